"""The wheelhouse: what is let in, what is refused by name, and the proofs that it is complete."""

import json
from pathlib import Path

import pytest
from upstreams import job, sha256, wheel

from stages import wheels
from stages.errors import UserError
from stages.files import files_under
from stages.upstream import grader
from stages.upstream.pins import read_pins

ROOT = Path(__file__).resolve().parent.parent
ALPHA_NEEDS = (
    "beta>=1,<2",
    "gamma[fast]",
    "uvloop>=0.15; sys_platform != 'win32'",
    "typing-extensions>=4.4",
    "not-for-linux; sys_platform == 'win32'",
    "not-asked; extra == 'more'",
)


def house(root: Path) -> Path:
    """Lay out vendor/wheels and a lock that agree, and return the folder."""
    folder = root / "vendor/wheels"
    wheel(
        folder,
        "alpha",
        tag="cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64",
        requires=ALPHA_NEEDS,
        files={"alpha.py": "import beta\nimport typing_extensions\n"},
    )
    wheel(folder, "beta", "1.4", tag="cp38-abi3-manylinux_2_28_x86_64")
    wheel(folder, "gamma", requires=("delta; extra == 'fast'",))
    wheel(folder, "delta")
    (root / "lock").mkdir()
    (root / "lock/serve.in").write_text("alpha  # the server\n")
    lock(root)
    return folder


def lock(root: Path) -> None:
    pins = ""
    for path in sorted((root / "vendor/wheels").glob("*.whl")):
        name, version = path.name.split("-")[:2]
        hashes = (sha256(path.read_bytes()), "0" * 64)
        pins += " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in hashes)]) + "\n"
    (root / "lock/serve.txt").write_text(pins)


def run(root: Path) -> dict[str, object]:
    return wheels.run(job(root, "wheels", "wheels"))


def test_a_whole_house_is_copied_listed_installed_and_imported(tmp_path: Path):
    folder = house(tmp_path)
    metrics = run(tmp_path)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert (metrics["wheels"], metrics["bytes"]) == (4, sum(sizes.values()))
    out = tmp_path / "wheels"
    assert set(files_under(out)) == {*sizes, "requirements.txt", "sbom.json"}
    digests = {path.name.split("-")[0]: sha256(path.read_bytes()) for path in folder.iterdir()}
    assert (out / "requirements.txt").read_text().splitlines() == [
        f"{name}=={'1.4' if name == 'beta' else '1.0'} --hash=sha256:{digests[name]}"
        for name in sorted(digests)
    ]
    bom = json.loads((out / "sbom.json").read_text())
    assert {one["name"]: one["hashes"][0]["content"] for one in bom["components"]} == digests
    assert bom["components"][0]["purl"] == "pkg:pypi/alpha@1.0"
    assert bom["components"][0]["licenses"] == [{"license": {"name": "MIT"}}]
    edges = {one["ref"]: one["dependsOn"] for one in bom["dependencies"]}
    assert edges["pkg:pypi/alpha@1.0"] == ["pkg:pypi/beta@1.4", "pkg:pypi/gamma@1.0"]
    assert edges["pkg:pypi/gamma@1.0"] == ["pkg:pypi/delta@1.0"]
    before = (out / "sbom.json").read_bytes()
    run(tmp_path)
    assert (out / "sbom.json").read_bytes() == before


@pytest.mark.parametrize(
    "tag",
    [
        "cp311-cp311-manylinux_2_28_x86_64",
        "cp312-cp312-manylinux_2_40_x86_64",
        "cp312-cp312-musllinux_1_2_x86_64",
        "cp312-cp312-manylinux_2_28_aarch64",
        "cp312-cp312-win_amd64",
        "cp313-abi3-manylinux_2_28_x86_64",
        "cp312-cp312-linux_x86_64",
        "py2-none-any",
        "cp312-cp312t-manylinux_2_28_x86_64",
    ],
)
def test_a_wheel_that_does_not_run_there_is_refused_by_name(tmp_path: Path, tag: str):
    folder = house(tmp_path)
    next(folder.glob("delta-*")).unlink()
    path = wheel(folder, "delta", tag=tag)
    lock(tmp_path)
    with pytest.raises(UserError, match=rf"{path.name} does not run on the grader"):
        run(tmp_path)


@pytest.mark.parametrize(
    "tag",
    [
        "cp312-cp312-manylinux_2_39_x86_64",
        "cp312-cp312-manylinux1_x86_64",
        "cp312-none-any",
        "py3-none-any",
        "py2.py3-none-any",
        "cp32-abi3-manylinux2010_x86_64",
        "py3-none-manylinux_2_34_x86_64",
    ],
)
def test_a_wheel_that_runs_there_is_taken(tag: str):
    interpreters, abi, platform = tag.split("-")
    known = {str(one) for one in grader.tags()}
    assert any(f"{interpreter}-{abi}-{platform}" in known for interpreter in interpreters.split("."))


def _add_sdist(folder: Path) -> None:
    (folder / "delta-1.0.tar.gz").write_bytes(b"source")


def _add_link(folder: Path) -> None:
    (folder / "delta-1.0-py3-none-any.whl").rename(folder.parent / "away.whl")
    (folder / "delta-1.0-py3-none-any.whl").symlink_to(folder.parent / "away.whl")


def _change_byte(folder: Path) -> None:
    wheel(folder, "delta", files={"delta.py": "value = 2\n"})


def _cut(folder: Path) -> None:
    path = folder / "delta-1.0-py3-none-any.whl"
    path.write_bytes(path.read_bytes()[:-30])


def _remove(folder: Path) -> None:
    (folder / "delta-1.0-py3-none-any.whl").unlink()


def _add_stranger(folder: Path) -> None:
    wheel(folder, "epsilon")


def _other_version(folder: Path) -> None:
    _remove(folder)
    wheel(folder, "delta", "1.1")


def _rename(folder: Path) -> None:
    (folder / "gamma-1.0-py3-none-any.whl").rename(folder / "delta-1.0-py3-none-any.whl")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (
            _add_sdist,
            r"delta-1\.0\.tar\.gz is not a wheel: only \.whl files are taken, never source archives",
        ),
        (_add_link, r"delta-1\.0-py3-none-any\.whl is not a wheel"),
        (
            _change_byte,
            r"delta-1\.0-py3-none-any\.whl has sha256 .* which lock/serve\.txt does not have for delta==1\.0",
        ),
        (_cut, r"delta-1\.0-py3-none-any\.whl is damaged"),
        (_remove, r"there is no wheel of delta; run `make fetch`"),
        (_add_stranger, r"epsilon-1\.0-py3-none-any\.whl is not in lock/serve\.txt"),
        (_other_version, r"delta-1\.1-py3-none-any\.whl: lock/serve\.txt pins delta==1\.0"),
        (_rename, r"delta-1\.0-py3-none-any\.whl holds the metadata of another distribution"),
    ],
)
def test_what_differs_from_the_lock_is_refused_by_name(tmp_path: Path, harm, sentence: str):
    folder = house(tmp_path)
    harm(folder)
    with pytest.raises(UserError, match=sentence):
        run(tmp_path)
    assert files_under(tmp_path / "wheels") == []


@pytest.mark.parametrize(
    ("requires", "sentence"),
    [
        (
            ("zeta>=2",),
            r"delta-1\.0-py3-none-any\.whl needs zeta>=2, which is neither among the wheels nor installed",
        ),
        (("beta>=2",), r"delta-1\.0-py3-none-any\.whl needs beta>=2; the wheelhouse has 1\.4"),
        (
            ("torch>=2.9",),
            r"delta-1\.0-py3-none-any\.whl needs torch>=2\.9; the grader is only sure to have 2\.8\.0",
        ),
    ],
)
def test_a_house_that_is_not_closed_is_refused(tmp_path: Path, requires: tuple[str, ...], sentence: str):
    folder = house(tmp_path)
    wheel(folder, "delta", requires=requires)
    lock(tmp_path)
    with pytest.raises(UserError, match=sentence):
        run(tmp_path)


def test_a_wheel_for_another_python_is_refused(tmp_path: Path):
    wheel(house(tmp_path), "delta", extra="Requires-Python: >=3.13\n")
    lock(tmp_path)
    with pytest.raises(UserError, match=r"asks for Python >=3\.13"):
        run(tmp_path)


def test_a_house_that_does_not_import_is_refused(tmp_path: Path):
    # pydantic is here, where stages run, but neither in the house nor with the grader.
    wheel(
        house(tmp_path),
        "beta",
        "1.4",
        tag="cp38-abi3-manylinux_2_28_x86_64",
        files={"beta.py": "import pydantic\n"},
    )
    lock(tmp_path)
    with pytest.raises(UserError, match="No module named 'pydantic'"):
        run(tmp_path)


def test_the_real_lock_ships_only_what_the_grader_lacks():
    shipped = set(grader.shipped(read_pins(ROOT / "lock/serve.txt")))
    assert {"sanic", "prometheus-client"} <= shipped
    assert not shipped & {"torch", "numpy", "setuptools", "typing-extensions", "uvloop"}
