"""Variables that only a stage with a network may see, and the hand over their values in what is written."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NETWORK_NAMES = re.compile(
    r"HF_TOKEN|HUGGING_FACE_HUB_TOKEN|HF_ENDPOINT|(https?|all|no)_proxy|PIP_.*|SSL_CERT_(FILE|DIR)|"
    r"REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE", re.IGNORECASE)
# For a stage that may reach declared servers; no proxies, for they would be a way to others.
SERVER_NAMES = re.compile(r"TEACHER_API_KEY|SSL_CERT_(FILE|DIR)")
PRIVATE_PARTS = re.compile(r"TOKEN|PASSWORD|SECRET|API_KEY", re.IGNORECASE)
SHORTEST = 3  # a password of three letters cannot be told from plain words
CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/\s@\"']+(?=@)")


def network_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that reach for a network: tokens, endpoints, proxies, pip's settings."""
    return {name: value for name, value in environment.items() if NETWORK_NAMES.fullmatch(name)}


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that reaching declared servers takes: their key, and certificates."""
    return {name: value for name, value in environment.items() if SERVER_NAMES.fullmatch(name)}


def hide_secrets(text: str) -> str:
    """Return a text without the values of this process's tokens and without credentials in URLs."""
    for name, value in {**network_environment(os.environ), **server_environment(os.environ)}.items():
        secret = value.strip()  # it is sent without a line's end
        if PRIVATE_PARTS.search(name) and len(secret) > SHORTEST:
            text = text.replace(secret, f"[{name}]")
        for credentials in CREDENTIALS_IN_URL.findall(value):
            text = text.replace(credentials, f"[credentials of {name}]")
            for part in credentials.split(":")[1:]:
                text = text.replace(part, "[credentials]") if len(part) > SHORTEST else text
    return CREDENTIALS_IN_URL.sub("[credentials]", text)


def hide_places(text: str, root: Path) -> str:
    """Return a text without the folders of this machine: the repository's, Python's and the user's."""
    names = {sys.prefix: "[python]", sys.base_prefix: "[python]", os.environ.get("HOME", ""): "~"}
    names[str(root)] = "."
    for folder in sorted(names, key=len, reverse=True):
        if folder.strip("/"):
            pattern = rf"(?<![\w.-]){re.escape(folder.rstrip('/'))}(?![\w-])"
            text = re.sub(pattern, names[folder], text)
    return text


def without_private(value: Any, root: Path) -> Any:
    """Return a value of JSON with secrets and places hidden in each of its texts, so that it stays one."""
    if isinstance(value, str):
        return hide_places(hide_secrets(value), root)
    if isinstance(value, list | tuple):
        return [without_private(one, root) for one in value]
    if isinstance(value, dict):
        return {name: without_private(one, root) for name, one in value.items()}
    return value
