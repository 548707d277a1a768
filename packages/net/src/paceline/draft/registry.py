"""The registry of methods makes drafters of specs such as "sam,draft=20+prompt-lookup".

    name[:checkpoint][,key=value...]       one drafter
    a+b                                    a, and b for the rows for which a proposes nothing
    name:"a+b"                             a path with a +; `spec.py` has the rules

A method is a `Drafter` class, described by its class attributes and the first line of its docstring; its module is
imported on demand. Other packages add methods through the entry-point group `paceline.drafters`
(name = "package.module:Class"). No other module of the core knows a method by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from paceline.draft.spec import OptionInfo, Part, Takes, options, parse, split, takes_checkpoint, values
from paceline.errors import MethodError, install, meant

if TYPE_CHECKING:
    from paceline.draft.base import Drafter

GROUP = "paceline.drafters"

_BUILT_IN = (
    "none", "prompt-lookup", "sam", "rest", "suffix", "hierarchy", "recycling", "ngram-pool", "past-answer",
    "jacobi", "prediction", "grammar", "model", "s2d", "mirror", "kangaroo", "medusa", "hydra", "amphista", "eagle",
    "eagle3", "mtp", "dflash", "auto",
)  # fmt: skip
"""Our methods. The module of a method's name has the class with this `name`."""


@dataclass(frozen=True)
class MethodInfo:
    """A method's description.

    checkpoint  whether it takes a checkpoint: "no", "optional" or "required"."""

    name: str
    summary: str
    lossless: str
    paper: str
    options: tuple[OptionInfo, ...]
    checkpoint: Takes = "no"


def names() -> list[str]:
    """Names of all methods, the built-in ones first."""
    return list(_table())


def describe(name: str) -> MethodInfo:
    """Describe a method. MethodError if there is no method `name`."""
    named(name)
    drafter = _load(name)
    summary = (inspect.getdoc(drafter) or "").split("\n")[0]
    config = drafter.Config
    return MethodInfo(name, summary, drafter.lossless, drafter.paper, options(config), takes_checkpoint(config))


def named(spec: str) -> list[Part]:
    """Parse `spec` and look its methods up, without importing them or torch. MethodError as in `create`."""
    parts, table = [parse(part, spec) for part in split(spec)], _table()
    unknown = next((part.name for part in parts if part.name not in table), None)
    if unknown is not None:
        guess = " a>b is not made any more: write a+b." if ">" in unknown else meant(unknown.lower(), table)
        in_path = len(parts) > 1 and parts[0].checkpoint
        more = "A path with a + in it is put in double quotes." if in_path else f"Drafters: {', '.join(table)}."
        raise MethodError(f"There is no drafter {unknown!r}.{guess} {more}")
    return parts


def create(spec: str) -> Drafter:
    """Make the drafter that `spec` describes. Raises MethodError, which lists the methods that exist."""
    parts = named(spec)
    made = [_made(part, in_front=part is not parts[-1]) for part in parts]
    if len(made) == 1:
        return made[0]
    from paceline.draft.fallback import Fallback

    return Fallback(made)


def _made(part: Part, *, in_front: bool) -> Drafter:
    kind: Any = _load(part.name)
    given = values(part, kind.Config, in_front=in_front)
    made: Drafter = kind() if kind.Config is None else kind(kind.Config(**given))
    return made


def by_request(specs: Sequence[str]) -> Drafter:
    """Make a drafter in which each request may choose one of `specs`; its default is the first. A request's own grammar
    and prediction are asked before it. MethodError as in `create`."""
    from paceline.draft.fallback import Choice, Fallback

    return Choice({spec: Fallback([create("grammar"), create("prediction"), create(spec)]) for spec in specs})


@cache
def added() -> tuple[EntryPoint, ...]:
    """Drafters of other packages. Read once, because that takes milliseconds."""
    return tuple(entry_points(group=GROUP))


def _table() -> dict[str, str]:
    """By name of each method: "module:Class", or for ours only the module."""
    table = {name: f"paceline.draft.methods.{name.replace('-', '_')}" for name in _BUILT_IN}
    for entry in added():
        if entry.name in table:
            raise MethodError(
                f"Two drafters are called {entry.name!r}: {table[entry.name]} and {entry.value}. "
                "Uninstall one of the two packages."
            )
        table[entry.name] = entry.value
    return table


def _load(name: str) -> type[Drafter]:
    from paceline.draft.base import Drafter  # imports torch

    table = _table()
    module, _, attribute = table[name].partition(":")
    try:
        loaded = importlib.import_module(module)
        drafter = getattr(loaded, attribute) if attribute else _named(name, vars(loaded))
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and name in _BUILT_IN and error.name == module:
            raise MethodError(f"Drafter {name!r} runs beside a model and is not installed; {install('.')}") from None
        if name in _BUILT_IN:
            raise
        raise MethodError(f"Drafter {name!r} ({table[name]}) cannot be imported: {error}.") from None
    if not (isinstance(drafter, type) and issubclass(drafter, Drafter)):
        raise MethodError(f"Drafter {name!r} ({table[name]}) is not a subclass of paceline.draft.base.Drafter.")
    return drafter


def _named(name: str, members: Mapping[str, Any]) -> Any:
    """The drafter of that name among a module's members."""
    return next(one for one in members.values() if getattr(one, "name", None) == name and isinstance(one, type))
