"""What the grader's machine is, as far as wheels go: its Python, its platforms, what it has installed."""

from collections.abc import Mapping

from packaging.tags import Tag, compatible_tags, cpython_tags

from stages.upstream.pins import Pin

PYTHON = (3, 12)
ABI = "cp312"
GLIBC_MINOR = 39  # Ubuntu 24.04

# Every platform tag that runs there, newest first. pip takes a `--platform` by its letter, so all are named.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)

# What its environment has for certain: the named packages at their version, or a version that it cannot be
# below (torch 2.8.0 asks for setuptools and typing-extensions on 3.12 with no upper bound, and transformers
# 4.57.1 dates the environment to October 2025 or later).
PREINSTALLED: Mapping[str, str] = {
    "torch": "2.8.0",
    "transformers": "4.57.1",
    "httpx": "0.28.1",
    "numpy": "2.1.0",
    "safetensors": "0.6.2",
    "setuptools": "80.9.0",
    "typing-extensions": "4.15.0",
}

# What the wheelhouse leaves out although a wheel asks for it, and why that is safe.
OMITTED: Mapping[str, str] = {
    "uvloop": "an event loop of 4.5 MB that sanic can do without: it then serves on asyncio's own",
}

MARKERS: Mapping[str, str] = {
    "implementation_name": "cpython",
    "implementation_version": "3.12.0",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_release": "",
    "platform_system": "Linux",
    "platform_version": "",
    "python_full_version": "3.12.0",
    "python_version": "3.12",
    "sys_platform": "linux",
}


def tags() -> frozenset[Tag]:
    """Return every wheel tag that the grader's Python runs."""
    return frozenset(
        [
            *cpython_tags(PYTHON, abis=[ABI], platforms=PLATFORMS),
            *compatible_tags(PYTHON, interpreter=ABI, platforms=PLATFORMS),
        ]
    )


def pip_target() -> list[str]:
    """Return pip's options for choosing the grader's wheels, whatever machine it runs on."""
    return [
        *(f"--platform={platform}" for platform in PLATFORMS),
        "--python-version=3.12",
        "--implementation=cp",
        "--only-binary=:all:",
    ]


def shipped(pins: Mapping[str, Pin]) -> dict[str, Pin]:
    """Return the pins whose wheels are shipped: all but what the grader has and what it can do without."""
    return {
        name: pin for name, pin in sorted(pins.items()) if name not in PREINSTALLED and name not in OMITTED
    }
