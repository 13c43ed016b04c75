"""What is written down names no secret, no folder of this machine, and stays what it was otherwise."""

import sys
from pathlib import Path

import pytest

from stages.wrapper.redaction import hide_places, without_private

ROOT = Path("/home/ada/mill")


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")


@pytest.mark.parametrize("secret", ["1", "none", "rows", '"'])
def test_a_key_that_is_a_common_word_spoils_no_value(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", secret)
    told = without_private({"rows": 11, "nonempty": None, "share": 0.1, "told": ["a", True]}, ROOT)
    assert told == {"rows": 11, "nonempty": None, "share": 0.1, "told": ["a", True]}


def test_a_key_is_hidden_however_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", 'sk-"quoted"\n')
    assert without_private({"a": [{"b": 'with sk-"quoted".'}]}, ROOT) == {
        "a": [{"b": "with [TEACHER_API_KEY]."}]}


@pytest.mark.parametrize(("text", "told"), [
    ('File "/home/ada/mill/stages/x.py"', 'File "./stages/x.py"'),
    ("it lies in /home/ada/mill.", "it lies in .."),
    ("/home/ada/mill-2/x and /home/ada/.cache", "~/mill-2/x and ~/.cache"),
    ("/home/adam/x, /mnt/home/ada/x", "/home/adam/x, /mnt/home/ada/x"),
    (f"{sys.prefix}/lib/x.py", "[python]/lib/x.py"),
])
def test_folders_of_this_machine_are_not_told(text: str, told: str) -> None:
    assert hide_places(text, ROOT) == told


def test_no_home_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("", "/"):
        monkeypatch.setenv("HOME", home)
        assert hide_places("a / b, /etc/hosts", ROOT) == "a / b, /etc/hosts"
