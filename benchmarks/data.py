"""The data stage at volume: prompts a second and the most memory, over conversations made up on the spot.

    python -m benchmarks.data PROMPTS       (1,000,000 for the bound of 6 GiB)

The rows go the whole way: words, decontamination, template, tokens, sketches, spool, shuffled files. Writes
benchmarks/results/data-DEVICE.json.
"""

import argparse
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.machine import machine, write_results
from stages import data
from stages.job import Job
from stages.models.tokenizer import load_tokenizer
from stages.profile import load_profile
from stages.sources import Context, Row

ROOT = Path(__file__).resolve().parent.parent
PROFILE = "smollm2"
WORDS = 20_000
TURN_WORDS = (8, 60)
LATER_TURNS = 0.2  # of the conversations go on after an answer


def rows(_source: Any, context: Context) -> Iterator[Row]:
    """Yield conversations without end, of words that occur as often as words do."""
    rng = random.Random(context.job.seed)
    alphabet = "etaoinshrdlucmfwypvbgk"
    vocabulary = ["".join(rng.choices(alphabet, k=rng.randint(2, 9))) for _ in range(WORDS)]
    weights = list(accumulate(1 / place for place in range(1, WORDS + 1)))
    number = 0
    while True:
        texts = [" ".join(rng.choices(vocabulary, cum_weights=weights, k=rng.randint(*TURN_WORDS)))
                 for _ in range(3 if rng.random() < LATER_TURNS else 1)]
        messages = tuple({"role": ("user", "assistant")[turn % 2], "content": f"{text}."}
                         for turn, text in enumerate(texts))
        number += 1
        yield Row(f"made-up/{number}", "writing", messages)


def main(argv: list[str] | None = None) -> int:
    """Run the stage over so many prompts, and write down what it took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=int, help="how many")
    asked = parser.parse_args(argv).prompts
    profile = load_profile(PROFILE, ROOT / "profiles")
    source = profile.data.sources[0].model_copy(update={"rows": asked})
    section = profile.data.model_copy(update={"sources": (source,)})
    config = SimpleNamespace(target=profile.target, data=section)
    folder = Path(tempfile.mkdtemp())
    for name in ("out", "work"):
        (folder / name).mkdir()
    job = Job("data", config, {"fetch": ROOT / "vendor"}, folder / "out", folder / "work", ROOT, seed=0,
              device="cpu", log=folder / "data.log")
    made_up: Any = SimpleNamespace(rows=rows, origin=lambda *_: {"author": "this benchmark"})
    vars(data)["load_kind"] = lambda _kind: made_up
    began = time.monotonic()
    load_tokenizer(ROOT / "vendor" / profile.target.source, profile.target.format)
    loaded = time.monotonic()
    data.run(job)
    seconds = time.monotonic() - loaded - (loaded - began)  # the stage loads the tokenizer once more
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"prompts": asked, "seconds": round(seconds, 1), "prompts_per_second": round(asked / seconds),
             "peak_bytes": peak}
    print(found)
    write_results("data", machine(f"python -m benchmarks.data {asked}") | found)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
