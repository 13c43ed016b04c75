"""The recipes of earlier systems, and our own, as small profiles through qat, pack and load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mill import Mill, finished

from drafter import codecs, weights
from drafter.inspect import inspect
from stages.qat import read_drafter

COMMON = '\ndtype = "bfloat16"\nbatch_tokens = 640\nlearning_rate = 1e-3\nwarmup_steps = 2\n'
RECIPES = {
    "int4 g32 clipped": 'codec = "int4"\ngroup = 32\nclip = true\nsteps = 4',
    "fp8 untouched": 'codec = "fp8"\nsteps = 0',
    "nf4 + int8 + rank 32 + zstd": 'codec = "nf4"\ncodec_embedding = "int8"\nrank = 32\nzstd = 3\nsteps = 4',
    "entropy": 'codec = "entropy"\nsteps = 4',
}
ALLOTMENTS = {"entropy": 70_000}


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Mill:
    return finished(tmp_path_factory)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_through_qat_pack_and_load(recipe: str, mill: Mill, tmp_path: Path) -> None:
    copy = mill.copy(tmp_path / "mill")
    allotment = ALLOTMENTS.get(recipe, 300_000)
    head, _, rest = (copy.root / "profiles/toy.toml").read_text().partition("[qat]")
    rest = rest[rest.find("\n["):] if "\n[" in rest else ""
    profile = head.replace("limit_bytes = 4_000_000", f"limit_bytes = {3_800_000 + allotment}")
    copy.write("profiles/toy.toml", f"{profile}[qat]\n{RECIPES[recipe]}{COMMON}{rest}")
    copy.run("qat")
    copy.run("pack")
    metrics, path = copy.metrics("qat"), copy.folder("pack") / "model.safetensors"
    assert metrics["packed_equals_trained"] is True
    assert metrics["packed_bytes"] == path.stat().st_size <= allotment
    if recipe == "entropy":
        assert path.stat().st_size >= 0.995 * allotment
    rows = {row.name: row for row in inspect(path, copy.folder("distill") / "drafter.safetensors")}
    assert all(row.error_db is None or row.error_db < -3 for row in rows.values())
    _, loaded = weights.load(path)
    if recipe == "fp8 untouched":
        for name, one in read_drafter(copy.folder("distill")).weights.items():
            told = {"codec": "fp8" if one.ndim == 2 else "bf16", "shape": list(one.shape)}
            assert torch.equal(loaded[name], codecs.round_trip(one.float(), told))
    # What travels in output/ can show itself, by itself.
    shown = subprocess.run([sys.executable, "-m", "drafter.inspect", "--json"], cwd=copy.folder("pack"),
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert [json.loads(line)["name"] for line in shown.stdout.splitlines()] == list(rows)
