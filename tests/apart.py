"""Which tests run where the engine is not installed: those whose modules import no torch, however indirectly."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ENGINE = {"torch", "transformers"}


@cache
def needs_engine(file: Path) -> bool:
    """Whether importing a module imports torch or transformers."""
    names = imported(file)
    if any(name.partition(".")[0] in ENGINE for name in names):
        return True
    found = {_file(name) for name in names if name.partition(".")[0] in ("tests", "paceline")}
    return any(needs_engine(one) for one in found - {None, file} if one is not None)


@cache
def imported(file: Path) -> tuple[str, ...]:
    """The names that a module imports when it is imported, and names in these, which may be modules."""
    return tuple(_imported(ast.parse(file.read_text("utf-8"))))


def _imported(module: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With) and "TYPE_CHECKING" not in ast.unparse(node)[:20]:
            yield from _imported(node)


@cache
def _file(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except ImportError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
