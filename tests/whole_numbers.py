"""What schemathesis imports before it sends anything: ids without a fraction.

To JSON Schema 7.0 is an integer; to this server it is none, as its description says in words.
"""

import schemathesis


@schemathesis.hook
def map_body(context: object, body: object) -> object:
    return whole(body)


def whole(value: object) -> object:
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, dict):
        return {name: whole(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
