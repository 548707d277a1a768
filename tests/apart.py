"""Which tests run where the engine is not installed: those that import neither it nor anything else that is missing
there, however indirectly."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

ENGINE = {"torch", "transformers"}


@cache
def needs_engine(file: Path) -> bool:
    """Whether importing a module imports torch, transformers, or something that is not installed."""
    names = imported(file)
    if any(name.partition(".")[0] in ENGINE for name in names) or any(_spec(name) is None for name in modules(file)):
        return True
    found = {_file(name) for name in names if name.partition(".")[0] in ("tests", "paceline")}
    return any(needs_engine(one) for one in found - {None, file} if one is not None)


@cache
def modules(file: Path) -> tuple[str, ...]:
    """The modules that a module imports when it is imported."""
    return tuple(name for name, is_module in _imported(ast.parse(file.read_text("utf-8"))) if is_module)


@cache
def imported(file: Path) -> tuple[str, ...]:
    """The modules that a module imports when it is imported, and names in these, which may be modules."""
    return tuple(name for name, _ in _imported(ast.parse(file.read_text("utf-8"))))


def _imported(module: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names, each with whether it must be a module's."""
    for node in ast.iter_child_nodes(module):
        if isinstance(node, ast.Import):
            yield from ((alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, True
            yield from ((f"{node.module}.{alias.name}", False) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With) and "TYPE_CHECKING" not in ast.unparse(node)[:20]:
            yield from _imported(node)


def _file(name: str) -> Path | None:
    spec = _spec(name)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


@cache
def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ImportError:
        return None
