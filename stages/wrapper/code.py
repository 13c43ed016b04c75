"""The code that a stage really imports from this repository, by digest of its syntax trees.

Comments, layout and docstrings do not count: a cosmetic edit re-runs nothing.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from stages.errors import UserError

PACKAGES = ("stages", "drafter")


def code_digests(root: Path, entries: Iterable[str]) -> dict[str, str]:
    """Return module name -> sha256 for the entry modules and all that they import within the repository.

    Imports inside functions count; those under `if TYPE_CHECKING:` do not, for they never happen.

    Raises:
        UserError: a module does not parse.
    """
    digests: dict[str, str] = {}
    waiting = [name for entry in entries for name in _with_parents(root, entry)]
    while waiting:
        name = waiting.pop()
        path = _file_of(root, name)
        if path is not None and name not in digests:
            digests[name], imported = _read(path, name, path.stat().st_mtime_ns)
            waiting += [part for module in imported for part in _with_parents(root, module)]
    return dict(sorted(digests.items()))


def syntax_digest(path: Path) -> str:
    """Return the sha256 of one Python file's syntax tree, without comments, layout and docstrings.

    Raises:
        UserError: it does not parse.
    """
    return _read(path, path.stem, path.stat().st_mtime_ns)[0]


def parse(path: Path) -> ast.Module:
    """Return a module's syntax tree.

    Raises:
        UserError: it does not parse; the text names file and line.
    """
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else f": {error}"
        raise UserError(f"{path}{line}") from error


def _with_parents(root: Path, name: str) -> list[str]:
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return []
    names = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return [name for name in names if _file_of(root, name)]


def _file_of(root: Path, name: str) -> Path | None:
    stem = root.joinpath(*name.split("."))
    for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
        if path.is_file():
            return path
    return None


@functools.cache
def _read(path: Path, name: str, _mtime_ns: int) -> tuple[str, tuple[str, ...]]:
    tree = _WithoutIdleText().visit(parse(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    text = f"{name}\n{ast.dump(tree)}"
    return hashlib.sha256(text.encode()).hexdigest(), tuple(_imports(tree, package))


class _WithoutIdleText(ast.NodeTransformer):
    """Drops strings that stand alone: docstrings, and notes below constants."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        idle = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if idle else self.generic_visit(node)


def _imports(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _base(node, package)
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call):
        yield from _named_by_call(node)
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        children = node.orelse
    for child in children:
        yield from _imports(child, package)


def _base(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parents = parts[: len(parts) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _named_by_call(node: ast.Call) -> Iterator[str]:
    """Yield the module that `import_module("a.b")` names as plain text."""
    function = node.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called in {"import_module", "__import__"} and node.args and isinstance(node.args[0], ast.Constant):
        yield str(node.args[0].value)
