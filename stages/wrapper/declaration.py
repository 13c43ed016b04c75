"""What a stage declares about itself, read from its syntax tree so that planning imports nothing of it."""

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.wrapper.code import parse

PLACEHOLDER = re.compile(r"\{([a-z0-9_.*]+)\}")


@dataclass(frozen=True)
class Declaration:
    """One stage module's literal constants, and the first line of its docstring.

    Attributes:
        sections: profile sections that it reads.
        takes: 'stage' or 'stage/<glob over subject names>'; `{a.b}` is filled from the declared sections.
        files: globs of repository files that it reads, filled like `takes`; `FILE.toml#TABLE` is one table.
        libraries: installed distributions whose versions enter the definition; filled like `takes`.
        plugins: pairs of a dotted config path and a package; the config's values name modules of it.
        reaches: a profile section that it reads and that is no part of its key; it may reach the `addresses`
            named there, and no other machine.
        place: folder of its outputs, relative to the repository; None is build/<profile>/<stage>.
        in_place: it writes its files itself, atomically, into its place.
        conducts: it starts containers itself, so it runs on the host under every runner.
    """

    stage: str
    summary: str = ""
    sections: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    plugins: tuple[tuple[str, str], ...] = ()
    reaches: str | None = None
    place: str | None = None
    in_place: bool = False
    conducts: bool = False

    @property
    def upstream(self) -> tuple[str, ...]:
        """The stages that it takes from, each once, in declared order."""
        return tuple(dict.fromkeys(pattern.split("/")[0] for pattern in self.takes))

    def folder(self, root: Path, profile: str) -> Path:
        """Where its outputs lie."""
        return root / (self.place or f"build/{profile}/{self.stage}")


def read_declarations(root: Path) -> dict[str, Declaration]:
    """Read every stage of a repository, in the order in which they run.

    A module of `stages/` is a stage if it declares SECTIONS and defines `run`. Among stages that could run
    next the alphabet decides.

    Raises:
        UserError: a constant is not a literal, or stages take from each other in a circle.
    """
    found = {}
    for path in sorted((root / "stages").glob("*.py")):
        declaration = _read(path)
        if declaration is not None:
            found[declaration.stage] = declaration
    return {stage: found[stage] for stage in _ordered(found)}


def chain(declarations: dict[str, Declaration], stage: str) -> list[str]:
    """Return a stage and all that it rests on, in running order.

    Raises:
        UserError: one of them takes from a stage that does not exist.
    """
    needed, waiting = {stage}, [stage]
    while waiting:
        name = waiting.pop()
        unknown = [upstream for upstream in declarations[name].upstream if upstream not in declarations]
        if unknown:
            raise UserError(f"stages/{name}.py: TAKES names {', '.join(unknown)}, which is no stage")
        fresh = set(declarations[name].upstream) - needed
        needed |= fresh
        waiting += fresh
    return [name for name in declarations if name in needed]


def values_at(config: Any, path: str) -> Iterator[Any]:
    """Yield the values at a dotted path of nested JSON; `*` stands for every item of a list or table.

    Raises:
        KeyError: the path leads nowhere.
    """
    head, _, rest = path.partition(".")
    if not path:
        yield config
    elif head == "*":
        for item in config.values() if isinstance(config, dict) else config:
            yield from values_at(item, rest)
    else:
        yield from values_at(config[head], rest)


def fill(pattern: str, config: dict[str, Any]) -> list[str]:
    """Fill the `{dotted.path}` of a pattern from the config: one result for each value, none for null."""
    paths = PLACEHOLDER.findall(pattern)
    try:
        choices = [[value for value in values_at(config, path) if value is not None] for path in paths]
    except (KeyError, TypeError) as error:
        raise UserError(f"{pattern}: the declared SECTIONS have no {error}") from error
    filled = []
    for chosen in itertools.product(*choices):
        values = iter(chosen)
        filled.append(PLACEHOLDER.sub(lambda _, values=values: str(next(values)), pattern))  # type: ignore[misc]
    return list(dict.fromkeys(filled))


def _read(path: Path) -> Declaration | None:
    tree = parse(path)
    runs = any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)
    constants = dict(_constants(tree, path)) if runs else {}
    if "sections" not in constants:
        return None
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    return Declaration(stage=path.stem, summary=summary, **constants)


def _constants(tree: ast.Module, path: Path) -> Iterator[tuple[str, Any]]:
    known = {field.name for field in fields(Declaration)} - {"stage", "summary"}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            name = target.id if isinstance(target, ast.Name) and target.id.isupper() else ""
            if name.lower() in known and isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                try:
                    yield name.lower(), ast.literal_eval(node.value)
                except ValueError as error:
                    raise UserError(f"stages/{path.name}: {name} must be a literal") from error


def _ordered(found: dict[str, Declaration]) -> Iterator[str]:
    sorter = TopologicalSorter({stage: found.keys() & one.upstream for stage, one in found.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        raise UserError(f"stages take from each other in a circle: {' -> '.join(error.args[1])}") from error
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()])
        stage = ready.pop(0)
        yield stage
        sorter.done(stage)
