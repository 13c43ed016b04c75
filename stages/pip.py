"""pip and its kin as child processes: clean surroundings, and errors without addresses."""

import ast
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
WATCH_S = 0.5


def pip_environment() -> dict[str, str]:
    """Return the environment for a pip child: the configured ways to the index, and nothing else of pip's."""
    child = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("PIP_") and key not in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    }
    for key, value in _configured().items():
        if key in REACH:
            child["PIP_" + key.upper().replace("-", "_")] = value
    child["PIP_CONFIG_FILE"] = os.devnull
    child["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    child["PIP_NO_INPUT"] = "1"
    return child


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


def _configured() -> dict[str, str]:
    """Return pip's settings by name, whatever file or variable they come from; later sources win."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    settings = {}
    for line in listed.stdout.splitlines():
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if equals and section in ("global", "download", "install", ":env:"):
            settings[key] = str(ast.literal_eval(value))
    return settings
