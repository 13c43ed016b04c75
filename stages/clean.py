"""Remove what stages have made: build/, logs/, wheels/ and output/. What was fetched and .venv stay.

    python -m stages.clean           waits while a stage is at work
    python -m stages.clean --all     vendor/ and .venv/ as well
"""

import argparse
import sys
from pathlib import Path

from stages.wrapper.place import hold, remove

ROOT = Path(__file__).resolve().parent.parent
MADE = ("logs", "wheels", "output", ".wheels.partial", ".wheels.old", ".output.partial", ".output.old")
COSTLY = ("vendor", ".venv")


def main(argv: list[str] | None = None) -> int:
    """Remove the folders while holding the lock."""
    parser = argparse.ArgumentParser(prog="python -m stages.clean", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="vendor/ and .venv/ as well")
    options = parser.parse_args(argv)
    with hold(ROOT):
        for name in MADE + (COSTLY if options.all else ()):
            remove(ROOT / name)
        for path in (ROOT / "build").iterdir():
            if path.name != ".lock":
                remove(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
