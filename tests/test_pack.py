"""The submission: what is in it, what its files say of each other, and that it is what was trained."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import small_config
from mill import Mill, finished
from trainers import make_job, make_trainer, own_settings_of_torch  # noqa: F401 (a fixture)

from drafter import weights
from drafter.replay import read_conversations
from stages.bits.views import RoundTripView, fixed_plan
from stages.files import digest_of, files_under, read_jsonl
from stages.profile import Qat, load_profile
from stages.training.trainer import Trainer
from stages.wrapper.declaration import fill, read_declarations
from stages.wrapper.record import definition_of, key_of

ROOT = Path(__file__).resolve().parent.parent
INT4 = Qat(codec="int4", dtype="float32", steps=0, batch_tokens=512, learning_rate=0.1)
BUILD_STAGES = ("data", "distill", "fetch", "qat", "teacher", "wheels")


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Mill:
    return finished(tmp_path_factory)


@pytest.fixture(scope="module")
def output(mill: Mill) -> Path:
    return mill.folder("pack")


def test_what_is_in_it(mill: Mill, output: Path) -> None:
    assert sorted(path.name for path in output.iterdir()) == [
        "LICENSE", "SHA256SUMS", "architecture.json", "config.json", "drafter", "evidence",
        "model.safetensors", "serve.sh", "serving.json", "wheels"]
    assert sorted(path.name for path in (output / "evidence").iterdir()) == [
        "SHA256SUMS", "data_manifest.json", "logs", "records", "source"]
    assert not [name for name in files_under(output) if "__pycache__" in name or name.endswith(".pyc")]
    assert not [name for name in files_under(output) if (output / name).is_symlink()]
    assert (output / "serve.sh").stat().st_mode & 0o777 == 0o755
    for name in files_under(output / "drafter"):
        assert (output / "drafter" / name).read_bytes() == (mill.root / "drafter" / name).read_bytes()
    assert (output / "model.safetensors").read_bytes() == mill.files("qat")["drafter.safetensors"]


@pytest.mark.parametrize("folder", [".", "evidence"])
def test_the_sums_name_every_file_and_hold(output: Path, folder: str) -> None:
    lines = (output / folder / "SHA256SUMS").read_text().splitlines()
    found = {name: digest for digest, name in (line.split("  ") for line in lines)}
    names = {name for name in files_under(output / folder) if name != "SHA256SUMS"}
    if folder == ".":
        names = {name for name in names if not name.startswith("evidence/")}
    assert found.keys() == names
    for name, digest in found.items():
        assert hashlib.sha256((output / folder / name).read_bytes()).hexdigest() == digest


def test_architecture_tells_base_target_and_evidence(mill: Mill, output: Path) -> None:
    told = json.loads((output / "architecture.json").read_text())
    assert told["teacher"] == {"engine": "own", "rederivable": True}
    assert sorted(told) == [
        "base_model", "base_revision", "drafter", "inference_evidence_files", "kept_layers", "method",
        "target_model", "target_revision", "teacher", "training_corpora", "training_evidence_files",
        "weights"]
    profile = load_profile("toy", mill.root / "profiles")
    assert told["base_model"] == told["target_model"] == profile.target.name
    assert told["base_revision"] == told["target_revision"] == profile.target.revision
    assert told["kept_layers"] == [0, 1, 3]
    assert told["drafter"] == json.loads((output / "config.json").read_text())
    assert told["drafter"]["layers"] == 3
    assert told["training_corpora"] == json.loads((output / "evidence/data_manifest.json").read_text())
    corpora = told["training_corpora"]
    logs = [one["log"] for one in (*corpora["sources"], corpora["target"])]
    assert [name for name in logs if not (output / name).is_file()] == []
    named = [*told["training_evidence_files"], *told["inference_evidence_files"], told["weights"]]
    assert [name for name in named if not (output / name).is_file()] == []
    assert {f"evidence/records/{stage}.json" for stage in BUILD_STAGES} < set(named)
    others = ("SHA256SUMS", "data_manifest.json", "logs/downloads.jsonl", "source/stages/teacher.py")
    assert {f"evidence/{name}" for name in others} < set(named)
    sums = (output / "evidence" / "SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in sums} == set(files_under(output / "evidence")) - {"SHA256SUMS"}
    assert set(files_under(output / "drafter")) == {
        name.removeprefix("drafter/") for name in named if name.startswith("drafter/")}


def test_the_evidence_is_records_logs_and_source(mill: Mill, output: Path) -> None:
    records, logs, source = (output / "evidence" / name for name in ("records", "logs", "source"))
    assert sorted(path.stem for path in records.iterdir()) == list(BUILD_STAGES)
    for stage in BUILD_STAGES:
        record = json.loads((records / f"{stage}.json").read_text())
        assert record == mill.record(stage)
        assert digest_of(definition_of(record)) == key_of(record)
    assert sorted(path.name for path in logs.iterdir()) == sorted([
        *(f"{stage}.log" for stage in BUILD_STAGES), "downloads.jsonl", "distill-training.jsonl",
        "qat-training.jsonl"])
    for stage in ("distill", "qat"):
        assert (logs / f"{stage}-training.jsonl").read_bytes() == mill.files(stage)["training.jsonl"]
    copied = files_under(source)
    for name in copied:
        assert (source / name).read_bytes() == (mill.root / name).read_bytes()
    whole = {"Makefile", *(f"profiles/{path.name}" for path in (mill.root / "profiles").glob("*.toml"))}
    for folder in ("stages", "lock", "examples"):
        whole |= {f"{folder}/{name}" for name in files_under(mill.root / folder) if "__pycache__" not in name}
    assert set(copied) == whole


def test_nothing_in_the_payload_tells_where_or_when_it_was_made(mill: Mill, output: Path) -> None:
    own = str(mill.root).encode()
    payload = [name for name in files_under(output) if not name.startswith("evidence/")]
    assert [name for name in payload if own in (output / name).read_bytes()] == []
    year = mill.record("pack")["predicate"]["runDetails"]["metadata"]["startedOn"][:10].encode()
    assert [name for name in payload if year in (output / name).read_bytes()] == []


def test_whoever_serves_it_can_read_it(mill: Mill, tmp_path: Path) -> None:
    copy = mill.copy(tmp_path / "copy")
    copy.forget("pack")
    before = os.umask(0o077)
    try:
        copy.run("pack")
    finally:
        os.umask(before)
    output = copy.folder("pack")
    folders = [output, *(path for path in output.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o755}
    files = {path: path.stat().st_mode & 0o777 for path in output.rglob("*") if path.is_file()}
    assert {path.name: mode for path, mode in files.items() if mode != 0o644} == {"serve.sh": 0o755}


def test_the_pin_of_another_base_is_part_of_what_pack_is() -> None:
    declaration = read_declarations(ROOT)["pack"]
    pins = {name: [file for pattern in declaration.files if "#" in pattern
                   for file in fill(pattern, load_profile(name, ROOT / "profiles").model_dump(mode="json"))]
            for name in ("smollm2", "qwen3-8b")}
    assert pins == {"smollm2": [], "qwen3-8b": ["lock/sources.toml#qwen3-1.7b"]}


def test_limits_that_cannot_be_kept_are_refused_with_their_numbers(mill: Mill, tmp_path: Path) -> None:
    copy = mill.copy(tmp_path / "copy")
    before = copy.files("pack")
    total, weight_bytes = copy.metrics("pack")["bytes"], copy.metrics("pack")["weight_bytes"]
    assert total == sum(map(len, before.values()))
    rest = total - weight_bytes
    copy.replace("profiles/toy.toml", "limit_bytes = 4_000_000\nreserve_bytes = 3_800_000",
                 "limit_bytes = 200_000\nreserve_bytes = 150_000")
    said = copy.run("pack", code=2)
    assert "over limits.reserve_bytes (150000)" in said
    told = int(said.partition("evidence take ")[2].split()[0])
    assert abs(told - rest) < 5_000  # logs and profile have grown
    assert copy.files("pack") == before
    said = copy.run("qat", code=2)
    packed = copy.metrics("qat")["packed_bytes"]
    assert f"take {packed} bytes packed by int4, over the allotment of 50000" in said
    assert not copy.work("qat", "checkpoint-*"), "it was refused after training"


def test_serving_decodes_the_very_values_that_were_trained_through(tmp_path: Path) -> None:
    start = dict(make_trainer(tmp_path / "start").finished())
    plan = fixed_plan(start, INT4)
    trainer = make_trainer(tmp_path, view=RoundTripView(plan, start))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for master in trainer.masters.values():
            master += 0.01 * torch.randn(master.shape, generator=random)
    weights.save(tmp_path / "x.safetensors", small_config(), plan, weights.encode(trainer.finished(), plan))
    config, decoded = weights.load(tmp_path / "x.safetensors")
    assert config == small_config()
    seen = trainer.view(trainer.masters)
    assert decoded.keys() == seen.keys()
    assert [name for name in seen if not torch.equal(seen[name], decoded[name])] == []


def test_tau_of_the_packed_model_is_the_last_that_qat_logged(
        mill: Mill, output: Path, tmp_path: Path) -> None:
    config, decoded = weights.load(output / "model.safetensors")
    settings = load_profile("toy", mill.root / "profiles").qat
    trainer = Trainer(make_job(tmp_path), settings, config, decoded)
    tau = trainer.tau(read_conversations(mill.folder("teacher") / "dev.jsonl"))
    assert json.loads(json.dumps(tau.to_json())) == mill.metrics("qat")["tau_dev"]
    *_, last = read_jsonl(output / "evidence" / "logs" / "qat-training.jsonl")
    assert last["tau_dev"] == round(tau.tau, 4)


def test_packed_weights_are_the_same_file_however_often_they_are_written(tmp_path: Path) -> None:
    tensors = make_trainer(tmp_path).finished()
    plan = fixed_plan(tensors, INT4)
    parts = weights.encode(tensors, plan)
    written = set()
    for attempt in range(12):  # the order of a hash map would show
        weights.save(tmp_path / str(attempt), small_config(), plan, parts)
        written.add((tmp_path / str(attempt)).read_bytes())
    assert len(written) == 1
