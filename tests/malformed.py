"""Requests that are wrong on purpose, by the thousand, from a seed; each says what may answer it."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from serving import CONFIG, SERVING, post

VOCAB = CONFIG.vocab_size
LIMIT_BYTES = int(str(SERVING["request_max_bytes"]))
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "1.0", "1e0", "-0.0", "0x1", "01", "+1", "1_0", ".5"]
ELEMENTS = ["true", "false", "null", '"7"', '""', "{}", "[]", "[1]", '{"id": 1}', *NUMBERS]
TOPS = ["null", "true", "1", "1.5", "NaN", '"tokens"', "[]", "[1, 2]", "{}", '[{"tokens": [1]}]']
NEVER_UTF8 = (b"\xff", b"\xfe", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\xed\xa0\x80", b"\x80")


@dataclass(frozen=True)
class Malformed:
    """A request as it is sent.

    Attributes:
        kind: what is wrong with it.
        sent: its bytes.
        statuses: what may answer it; none where the sender goes before it has sent all.
        last: whether no other request can follow on its connection.
    """

    kind: str
    sent: bytes
    statuses: tuple[int, ...] = (400,)
    last: bool = False


Maker = Callable[[random.Random], Malformed]


def requests(count: int, seed: int) -> list[Malformed]:
    """That many malformed requests of all kinds."""
    number = random.Random(seed)
    makers = [MAKERS[index % len(MAKERS)] for index in range(count)]
    number.shuffle(makers)
    return [make(number) for make in makers]


def ids(number: random.Random, most: int = 12) -> list[str]:
    return [str(number.randrange(VOCAB)) for _ in range(number.randint(1, most))]


def body(items: list[str]) -> bytes:
    return ('{"tokens": [' + ", ".join(items) + "]}").encode()


def valid(number: random.Random) -> bytes:
    return body(ids(number))


def with_item(number: random.Random, item: str) -> bytes:
    items = ids(number)
    items.insert(number.randint(0, len(items)), item)
    return body(items)


def truncated(number: random.Random) -> Malformed:
    whole = valid(number)
    return Malformed("cut JSON", post(whole[: number.randrange(1, len(whole))]))


def broken(number: random.Random) -> Malformed:
    whole = valid(number)
    place = number.randrange(len(whole))
    while chr(whole[place]) not in '{}[]":':
        place = number.randrange(len(whole))
    return Malformed("JSON without a bracket, a quote or a colon", post(whole[:place] + whole[place + 1 :]))


def garbage(number: random.Random) -> Malformed:
    return Malformed("no JSON", post(b"\x01" + number.randbytes(number.randint(0, 300))))


def trailing(number: random.Random) -> Malformed:
    more = number.choice([b"]", b"}", b",", b"\0", b" 1", b"{}", b"//", b"/* */", valid(number)])
    return Malformed("more behind the JSON", post(valid(number) + more))


def encoded(number: random.Random) -> Malformed:
    name = number.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-le"])
    return Malformed(f"in {name}", post(valid(number).decode().encode(name)))


def not_utf8(number: random.Random) -> Malformed:
    whole = valid(number)
    place = number.randint(0, len(whole))
    return Malformed("no UTF-8", post(whole[:place] + number.choice(NEVER_UTF8) + whole[place:]))


def wrong_top(number: random.Random) -> Malformed:
    return Malformed("no object with tokens", post(number.choice(TOPS).encode()))


def wrong_tokens(number: random.Random) -> Malformed:
    value = number.choice(["null", "1", '"1 2"', '{"0": 1}', "true", "1.5", "[]", "[[1]]"])
    return Malformed("tokens are no list of ids", post(f'{{"tokens": {value}}}'.encode()))


def wrong_item(number: random.Random) -> Malformed:
    return Malformed("one item is no integer", post(with_item(number, number.choice(ELEMENTS))))


def out_of_range(number: random.Random) -> Malformed:
    far = number.choice([VOCAB, VOCAB + 1, 2**31, 2**32, 2**63, 2**64, 10**30, number.randint(VOCAB, 10**6)])
    value = number.choice([far, -far, -1, -number.randrange(1, 10**6)])
    return Malformed("an id out of range", post(with_item(number, str(value))))


def many_digits(number: random.Random) -> Malformed:
    return Malformed("thousands of digits", post(with_item(number, "9" * number.randint(4301, 20_000))))


def nested(number: random.Random) -> Malformed:
    depth, (left, right) = number.randint(1000, 40_000), number.choice([("[", "]"), ('{"a":', "}")])
    depth = min(depth, (LIMIT_BYTES - 20) // (len(left) + 1))
    closed = right * depth if number.random() < 0.5 else ""
    text = left * depth + ("1" if closed else "") + closed
    return Malformed("nested too deeply", post(f'{{"tokens": {text}}}'.encode()))


def twice(number: random.Random) -> Malformed:
    text = number.choice([
        '{"tokens": [1], "tokens": [1]}', '{"tokens": [1], "tok\\u0065ns": [2]}',
        '{"a": 1, "tokens": [1], "a": 1}', '{"tokens": [1], "b": {"c": 1, "c": 2}}',
        '{"tokens": [1], "b": [{"c": 1, "c": 1}]}',
    ])  # fmt: skip
    return Malformed("a key twice", post(text.encode()))


def no_key(number: random.Random) -> Malformed:
    name = number.choice(["token", "Tokens", "tokens ", "", "TOKENS", "prompt", "t\\u006fken"])
    return Malformed("another key", post(f'{{"{name}": [1, 2]}}'.encode()))


def empty(number: random.Random) -> Malformed:
    return Malformed("an empty body", post(b" \t\r\n"[: number.randint(0, 4)] * number.randint(0, 50)))


def oversized(number: random.Random) -> Malformed:
    size = number.choice([LIMIT_BYTES + 1, 2 * LIMIT_BYTES, 5 * LIMIT_BYTES])
    filler = number.choice([b"1,", b"[", b" ", b"\0", b"\xff"])
    return Malformed("over the limit", post((b'{"tokens": [' + filler * size)[:size]), (413,), last=True)


def oversized_by_chunks(number: random.Random) -> Malformed:
    chunks = b"".join(b"4000\r\n" + b"1," * 0x2000 + b"\r\n" for _ in range(LIMIT_BYTES // 0x4000 + 1))
    return Malformed("over the limit in chunks", chunked(chunks + b"0\r\n\r\n"), (413,), last=True)


def other_type(number: random.Random) -> Malformed:
    kind = number.choice(["text/plain", "application/xml", "multipart/form-data; boundary=x", "", "\t;;=",
                          "application/json; charset=utf-16", "application/x-www-form-urlencoded"])
    wrong = with_item(number, number.choice(ELEMENTS))
    return Malformed("another content type", post(wrong, f"Content-Type: {kind}"))


def chunked(sent: bytes) -> bytes:
    return b"POST /draft HTTP/1.1\r\nHost: drafter\r\nTransfer-Encoding: chunked\r\n\r\n" + sent


def bad_chunks(number: random.Random) -> Malformed:
    sent = number.choice([b"zz\r\n{}\r\n0\r\n\r\n", b"-5\r\n{}\r\n0\r\n\r\n", b"\r\n\r\n", b";\r\n",
                          b"2\r\n{}xx\r\n0\r\n\r\n", b"0x2\r\n{}\r\n0\r\n\r\n"])
    return Malformed("chunks that are none", chunked(sent), (400, 413), last=True)


def bad_length(number: random.Random) -> Malformed:
    value = number.choice(["-1", "x", "1.5", "", "1e3", "0x10", "1 2", "+", "--5"])
    head = f"POST /draft HTTP/1.1\r\nHost: drafter\r\nContent-Length: {value}\r\n\r\n".encode()
    return Malformed("a length that is no number", head + valid(number), (400, 413), last=True)


def unfinished(number: random.Random) -> Malformed:
    whole = valid(number)
    announced = str(len(whole) + number.choice([1, 2, 500, 10**9, 10**20]))
    head = b"POST /draft HTTP/1.1\r\nHost: drafter\r\n"
    sent = number.choice([
        head + f"Content-Length: {announced}\r\n\r\n".encode() + whole,
        head + f"Transfer-Encoding: chunked\r\n\r\n{announced}\r\n".encode() + whole,
        head + b"Content-Length: 2\r\n\r\n", head + b"Content-Length: 2\r\n", head[: number.randint(1, 44)],
    ])  # fmt: skip
    return Malformed("less than was announced", sent, (), last=True)


def shorter_than_sent(number: random.Random) -> Malformed:
    whole = valid(number)
    sent = post(whole[: number.randint(1, len(whole) - 1)])
    return Malformed("more bytes than announced", sent + whole[-3:] + b"\r\n\r\n", (400,), last=True)


def two_lengths(number: random.Random) -> Malformed:
    sent = post(valid(number), f"Content-Length: {number.randint(0, 5)}", "Transfer-Encoding: chunked")
    return Malformed("two lengths", sent, (400, 413), last=True)


def bad_head(number: random.Random) -> Malformed:
    sent = number.choice([
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET\r\n\r\n",
        b"POST /draft\r\n\r\n", b"POST  /draft HTTP/1.1\r\n\r\n", b"POST /draft HTTP/9.9\r\n\r\n",
        b"POST /draft HTTP/1.1\r\nno colon\r\n\r\n", b"POST /draft HTTP/1.1\r\n: empty\r\n\r\n",
        b"POST /draft HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
        b"POST /draft HTTP/1.1\r\nx\xff: \xff\r\n\r\n", b"P\xffST /draft HTTP/1.1\r\n\r\n",
        b"POST /\xff\0 HTTP/1.1\r\n\r\n", b"POST http:// HTTP/1.1\r\n\r\n", b"POST %%% HTTP/1.1\r\n\r\n",
        b"POST /draft HTTP/1.1\r\nExpect: a miracle\r\nContent-Length: 1\r\n\r\n1",
    ])  # fmt: skip
    return Malformed("no head of a request", sent, (400, 404, 405, 413, 417), last=True)


def other_route(number: random.Random) -> Malformed:
    method = number.choice(["GET", "PUT", "DELETE", "PATCH", "BREW", "post"])
    path = number.choice(["/draft", "/draft/", "/Draft", "/", "/../draft", "/draft%00", "/%2e%2e/", "//x"])
    head = f"{method} {path} HTTP/1.1\r\nHost: drafter\r\nContent-Length: 0\r\n\r\n".encode()
    return Malformed("another route", head, (400, 404, 405), last=True)


# What is wrong with bodies comes up three times as often as what is wrong around them.
BODIES: list[Maker] = [truncated, broken, garbage, trailing, encoded, not_utf8, wrong_top, wrong_tokens,
                       wrong_item, out_of_range, many_digits, nested, twice, no_key, empty, other_type]
FRAMES: list[Maker] = [oversized, oversized_by_chunks, bad_chunks, bad_length, unfinished, shorter_than_sent,
                       two_lengths, bad_head, other_route]
MAKERS = [*BODIES * 3, *FRAMES]
