"""Definitions: which edits count, how declarations are read, how a change is told."""

import textwrap
from pathlib import Path

import pytest
from workshop import Workshop

from stages.errors import UserError
from stages.files import digest_of
from stages.profile import load_profile
from stages.wrapper.code import code_digests
from stages.wrapper.declaration import chain, fill, read_declarations, values_at
from stages.wrapper.definition import changes, define
from stages.wrapper.digests import Digests

ROOT = Path(__file__).resolve().parent.parent


def _modules(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@pytest.mark.parametrize("statement", [
    "import stages.other",
    "import stages.other as o",
    "from stages.other import thing",
    "from stages import other",
    "from . import other",
    "from .other import thing",
    "def run():\n    from stages import other",
    "try:\n    import stages.other\nexcept ImportError:\n    pass",
    "import importlib\nimportlib.import_module('stages.other')",
])
def test_every_form_of_import_counts(tmp_path: Path, statement: str) -> None:
    _modules(tmp_path, stages__a=statement, stages__other="X = 1", stages__third="X = 1")
    assert list(code_digests(tmp_path, ["stages.a"])) == ["stages.a", "stages.other"]
    before = digest_of(code_digests(tmp_path, ["stages.a"]))
    _modules(tmp_path, stages__other="X = 23", stages__third="X = 23")
    assert digest_of(code_digests(tmp_path, ["stages.a"])) != before


def test_imports_are_followed_through_packages_and_circles(tmp_path: Path) -> None:
    (tmp_path / "drafter" / "codecs").mkdir(parents=True)
    (tmp_path / "drafter" / "__init__.py").write_text("")
    (tmp_path / "drafter" / "codecs" / "__init__.py").write_text("from ..weights import load")
    (tmp_path / "drafter" / "codecs" / "int4.py").write_text("from . import base\nfrom ... import beyond")
    _modules(tmp_path, stages__a="import drafter.codecs.int4, json", drafter__weights="import stages.a",
             drafter__codecs__base="", drafter__unused="")
    assert list(code_digests(tmp_path, ["stages.a"])) == [
        "drafter", "drafter.codecs", "drafter.codecs.base", "drafter.codecs.int4", "drafter.weights",
        "stages.a"]


def test_imports_for_types_alone_do_not_count(tmp_path: Path) -> None:
    _modules(tmp_path, stages__a="""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from stages import other
        else:
            from stages import third
        """, stages__other="", stages__third="")
    assert list(code_digests(tmp_path, ["stages.a"])) == ["stages.a", "stages.third"]


@pytest.mark.parametrize(("old", "new", "same"), [
    ("X = 1", "X  =  1  # one", True),
    ("def f():\n    return 1", 'def f():\n    """Say."""\n    return (1)', True),
    ("class A:\n    x = 1", 'class A:\n    """Say."""\n    x = 1\n    """And this."""', True),
    ("'''One.'''\nX = 1", "'''Two.'''\n\n\nX = 1", True),
    ("X = 'text'", "X = 'other text'", False),
    ("X = 1", "X = 1.0", False),
    ("def f(a=1): pass", "def f(a=2): pass", False),
    ("def f(): pass", "def g(): pass", False),
])
def test_only_what_the_interpreter_obeys_counts(tmp_path: Path, old: str, new: str, same: bool) -> None:
    _modules(tmp_path, stages__a=old)
    before = code_digests(tmp_path, ["stages.a"])
    _modules(tmp_path, stages__a=new)
    (tmp_path / "stages" / "a.py").touch()
    assert (code_digests(tmp_path, ["stages.a"]) == before) is same


def test_placeholders_take_every_value_and_no_null() -> None:
    config = {"a": {"b": "x", "none": None}, "rows": [{"id": "p"}, {"id": "q"}, {"id": None}]}
    assert fill("fetch/{a.b}/*", config) == ["fetch/x/*"]
    assert fill("fetch/{a.none}/*", config) == []
    assert fill("fetch/{rows.*.id}/{a.b}", config) == ["fetch/p/x", "fetch/q/x"]
    assert fill("plain", config) == ["plain"]
    with pytest.raises(UserError, match="SECTIONS"):
        fill("fetch/{a.c}/*", config)


def test_values_at_reaches_into_tables_and_lists() -> None:
    assert list(values_at({"a": {"x": {"k": 1}, "y": {"k": 2}}}, "a.*.k")) == [1, 2]


def test_plugins_chosen_by_the_config_enter_the_code(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.replace("stages/data.py", 'SECTIONS = ("target", "data")',
                 'SECTIONS = ("target", "data")\nPLUGINS = (("data.sources.*.kind", "stages.sources"),)')
    for name in ("__init__", "template", "synth", "hub"):
        shop.write(f"stages/sources/{name}.py", "")
    shop.run("fetch")
    definition = _define(shop, "data")
    assert {"stages.sources.template", "stages.sources.synth"} < definition["code"].keys()
    assert "stages.sources.hub" not in definition["code"]


def test_the_definition_holds_what_the_outputs_depend_on_and_no_more(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.run("all")
    definition = _define(shop, "distill")
    assert sorted(definition) == [
        "code", "config", "device", "dtype", "files", "inputs", "libraries", "seed", "stage"]
    assert list(definition["config"]) == ["distill"]
    assert definition["dtype"] == {"distill": "bfloat16"}
    assert list(definition["inputs"]) == ["data/rows/a.txt"]
    assert "stages.run" not in definition["code"]


def test_changes_are_told_by_path() -> None:
    old = {"config": {"a": {"x": 1, "y": [1]}}, "code": {"stages.a": "1"}, "inputs": {"p/q.r": "1"}}
    new = {"config": {"a": {"x": 2, "y": [1], "z": 3}}, "code": {"stages.a": "2"}, "inputs": {}}
    assert changes(old, new) == (
        "code stages.a changed ('1' -> '2'), config.a.x changed (1 -> 2), config.a.z is new and 1 more")
    assert changes(old, old) == ""


@pytest.mark.parametrize(("constant", "sentence"), [
    ('SECTIONS = ("distil",)', "a profile has"),
    ("SECTIONS = tuple()", "must be a literal"),
    ('SECTIONS = ()\nFILES = ("nothing/*.txt",)', "there is no such file"),
    ('SECTIONS = ()\nFILES = ("lock/sources.toml#no",)', "reads [no] of lock/sources.toml, which it has"),
    ('SECTIONS = ()\nTAKES = ("fetch/nowhere/*",)', "left nothing of that name"),
    ('SECTIONS = ()\nTAKES = ("pack",)', "in a circle"),
    ("SECTIONS = (", "data.py, line 2: '(' was never closed"),
    ('SECTIONS = ()\nLIBRARIES = ("no-such-library",)', "not installed"),
])
def test_mistakes_in_a_declaration_are_sentences(tmp_path: Path, constant: str, sentence: str) -> None:
    shop = Workshop(tmp_path)
    shop.run("fetch")
    shop.write("stages/data.py", f'"""A stage."""\n{constant}\ndef run(job): return {{}}\n')
    assert sentence in shop.run("data", code=2)


def test_the_stages_of_this_repository_stand_in_order() -> None:
    declarations = read_declarations(ROOT)
    order = list(declarations)
    for stage, declaration in declarations.items():
        assert all(order.index(upstream) < order.index(stage) for upstream in declaration.upstream)
        assert declaration.summary, f"stages/{stage}.py says nothing of itself in its first line"
    assert chain(declarations, order[-1])[-1] == order[-1]


def _define(shop: Workshop, stage: str) -> dict:
    profile = load_profile("toy", shop.root / "profiles")
    return define(shop.root, profile, read_declarations(shop.root)[stage], Digests(shop.root))


def test_comments_in_a_table_of_values_do_not_count(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.write("examples/words.toml", "[a]\nb = 1\n")
    shop.replace("stages/data.py", '"examples/*.jsonl"', '"examples/*.toml"')
    shop.run("fetch")
    before = _define(shop, "data")["files"]
    shop.write("examples/words.toml", "# Say more.\n[a]\nb   =   1  # and more\n")
    assert _define(shop, "data")["files"] == before
    shop.write("examples/words.toml", "[a]\nb = 2\n")
    assert _define(shop, "data")["files"] != before


def test_of_a_file_of_which_a_table_is_named_the_others_do_not_count(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.replace("stages/data.py", '"examples/*.jsonl"', '"lock/sources.toml#{target.source}"')
    shop.run("fetch")
    before = _define(shop, "data")["files"]
    assert list(before) == ["lock/sources.toml#smollm2-135m-instruct"]
    shop.replace("lock/sources.toml", "short talks", "long talks")
    assert _define(shop, "data")["files"] == before
    shop.replace("lock/sources.toml", "quantised to Q4_1", "in Q4_1")
    assert _define(shop, "data")["files"] != before


def test_the_codec_of_norms_is_part_of_what_qat_is() -> None:
    assert "drafter.codecs.bf16" in code_digests(ROOT, ["stages.qat"])

