"""Print the bit plan of a profile's drafter, and what bits other bases would get for the same bytes.

    python -m stages.bits --profile smollm2
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.table import Table

from drafter.codecs.entropy import code_bits, to_codes
from stages.bits.bases import BASES, bits_per_weight, table
from stages.bits.planner import Packing, Planner
from stages.bits.steps import LogSteps, log_steps, to_steps
from stages.display import console
from stages.errors import UserError
from stages.profile import Profile, load_profile
from stages.qat import Drafter, read_drafter

ROOT = Path(__file__).resolve().parent.parent.parent


def main(argv: list[str] | None = None) -> int:
    """Print both tables; return 0, or 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m stages.bits", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default=os.environ.get("PROFILE") or "smollm2")
    parser.add_argument("--bytes", type=int, help="another allotment than the profile's")
    options = parser.parse_args(argv)
    try:
        profile = load_profile(options.profile, ROOT / "profiles")
        allotment = options.bytes or profile.limits.allotment_bytes
        console().print(bases_table(allotment))
        console().print(plan_table(profile, allotment))
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    return 0


def bases_table(allotment_bytes: int) -> Table:
    """Return the table of bases and layer counts."""
    drawn = Table("base", "layers", "weights", "bits a weight", title=f"{allotment_bytes:,} bytes of weights")
    for name, layers, count, bits in table(allotment_bytes):
        drawn.add_row(name if layers == BASES[name].layers else "", str(layers), f"{count:,}",
                      f"{bits:.2f}" if bits > 0 else "nothing left")  # fmt: skip
    return drawn


def plan_table(profile: Profile, allotment_bytes: int) -> Table:
    """Return the table of the profile's own drafter, tensor by tensor.

    Raises:
        UserError: distill has left no drafter yet, or the allotment cannot be met.
    """
    folder = ROOT / "build" / profile.name / "distill"
    if not (folder / "drafter.safetensors").is_file():
        raise UserError(f"{folder} holds no drafter to plan for; run `make distill PROFILE={profile.name}`")
    if profile.qat.codec != "entropy":
        raise UserError(f"qat.codec is {profile.qat.codec!r}: its bits follow from the shapes alone; only "
                        "'entropy' is planned")
    drafter = read_drafter(folder)
    logs = log_steps(drafter.weights, drafter.sensitivities, profile.qat.fisher_exponent)
    packing = Planner(drafter.config, allotment_bytes).fit(drafter.weights, logs)
    even = bits_per_weight(drafter.config, allotment_bytes)
    drawn = Table("tensor", "shape", "bits", "ideal", "step: least", "median", "largest", "zeros",
                  title=f"{packing.size_bytes:,} bytes, {packing.size_bytes / allotment_bytes:.2%} of the "
                        f"allotment; {even:.3f} bits a weight on the average")  # fmt: skip
    for row in _plan_rows(drafter, logs, packing):
        drawn.add_row(*row)
    return drawn


def _plan_rows(drafter: Drafter, logs: LogSteps, packing: Packing) -> Iterator[list[str]]:
    for name, rows in logs.items():
        weight = drafter.weights[name].float()
        size = sum(part.nbytes for key, part in packing.parts.items() if key.startswith(f"{name}."))
        steps = to_steps(rows, packing.shift)
        codes = to_codes(weight, steps)
        spread = torch.quantile(steps.float(), torch.tensor([0.0, 0.5, 1.0])).tolist()
        yield [name, "x".join(map(str, weight.shape)), f"{size * 8 / weight.numel():.3f}",
               f"{code_bits(codes) / weight.numel():.3f}", *(f"{step:.3g}" for step in spread),
               f"{float((codes == 0).float().mean()):.1%}"]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
