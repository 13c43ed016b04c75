"""pip and its kin as child processes: clean surroundings, and errors without addresses."""

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# How to reach the index. Everything else that pip may be configured with (find-links, extra indexes,
# constraints, targets) could change what is chosen or be written into a lock, so it is left out.
REACH = (
    "index-url",
    "cert",
    "client-cert",
    "proxy",
    "trusted-host",
    "timeout",
    "default-timeout",
    "retries",
    "cache-dir",
    "keyring-provider",
)
TOKENS = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
WATCH_S = 0.5


def pip_environment() -> dict[str, str]:
    """Return the environment for a pip child: the configured ways to the index, and nothing else of pip's."""
    own = {key for key in os.environ if key.startswith("PIP_")}
    child = {key: value for key, value in os.environ.items() if key not in own | TOKENS}
    variables = {key: f"PIP_{key.upper().replace('-', '_')}" for key in REACH}
    child |= {variables[key]: value for key, value in _from_files().items() if key in REACH}
    child |= {variable: os.environ[variable] for variable in variables.values() if variable in own}
    return child | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run_pip(
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
    watch: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m ARGUMENTS` and return its exit status and texts, which are never shown as they are.

    `watch` is called now and then while it runs. The child does not outlive an interrupt of this call.
    """
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(
        command,
        env=environment or pip_environment(),
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=WATCH_S)
                    return subprocess.CompletedProcess(command, process.returncode, output, errors)
                except subprocess.TimeoutExpired:
                    if watch:
                        watch()
        except BaseException:
            process.kill()
            raise


def reason(completed: subprocess.CompletedProcess[str], lines: int = 3) -> str:
    """Return what a failed pip said, in one line: its errors, or else its last words, without any address."""
    said = [line.strip() for line in (completed.stderr or completed.stdout).splitlines() if line.strip()]
    errors = [line for line in said if line.startswith(("ERROR:", "error:"))] or said
    text = " ".join(line.removeprefix("ERROR:").strip() for line in errors[-lines:])
    return without_addresses(text) or f"exit status {completed.returncode}"


def without_addresses(text: str) -> str:
    """Take every URL (hosts, users, passwords, tokens in queries) and bearer token out of a text."""
    text = re.sub(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>)\]]+", "(address)", text, flags=re.IGNORECASE)
    text = re.sub(r"host='[^']*'", "host=(address)", text)
    text = re.sub(r"(?i)bearer\s+\S+", "bearer (token)", text)
    return re.sub(r"hf_[A-Za-z0-9]{8,}", "(token)", text)


@functools.cache
def _from_files() -> dict[str, str]:
    """Return what pip's configuration files say, by key; later files win."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    settings = {}
    for line in listed.stdout.splitlines():
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if equals and section in ("global", "download", "install"):
            settings[key] = str(ast.literal_eval(value))
    return settings
