"""The ways to a network that Python has, for a stage that may reach declared servers alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WATCHED = """
import socket
from pathlib import Path
from stages.job import Job
from stages.wrapper.confinement import watch_network
here = Path({folder!r})
with socket.create_server(("127.0.0.1", 0)) as held:
    port = held.getsockname()[1]
    watch_network(Job("teacher", None, {{}}, here, here, here, 0, "cpu", here / "log",
                      reach=(f"http://localhost:{{port}}",)))
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    {line}
"""


def said(line: str, folder: Path, code: int) -> str:
    done = subprocess.run([sys.executable, "-c", WATCHED.format(folder=str(folder), line=line)], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.mark.parametrize(("line", "address"), [
    ("socket.create_connection(('127.0.0.1', 9), 5)", "127.0.0.1:9"),
    ("datagrams.sendto(b'x', ('127.0.0.1', 9))", "127.0.0.1:9"),
    ("datagrams.sendmsg([b'x'], [], 0, ('127.0.0.1', 9))", "127.0.0.1:9"),
    ("socket.gethostbyname('example.org')", "example.org"),
    ("socket.gethostbyaddr('192.0.2.7')", "192.0.2.7"),
    ("socket.getnameinfo(('192.0.2.7', 9), 0)", "192.0.2.7:9"),
])
def test_a_way_to_another_server_ends_the_stage(line: str, address: str, tmp_path: Path) -> None:
    refusal = f"teacher: tried to reach {address}; this stage may reach http://localhost:"
    assert refusal in said(line, tmp_path, 2)


@pytest.mark.parametrize("line", [
    "socket.create_connection(('localhost', port), 5).sendmsg([b'x'])",
    "socket.create_connection(('127.0.0.1', port), 5).sendall(b'x')",
    "one, other = socket.socketpair(); one.sendmsg([b'x'])",
])
def test_the_declared_server_and_pipes_are_open(line: str, tmp_path: Path) -> None:
    assert said(line, tmp_path, 0) == ""
