"""The one table of methods, and the names users write: "sam,draft=20+prompt-lookup" becomes drafters.

    name[:checkpoint][,key=value...]       one drafter
    a+b                                    a, and b for the rows for which a has nothing to propose

A method is a `Drafter` class. What this module reads from it:

    Config      a frozen dataclass of its options, built from `key=value` and given to the class as its only
                argument; a class without options has none. A field's default is the option's; its type says
                how the value is read (int, float, bool, str, Literal, or one of these `| None`);
                `metadata["help"]` says what it means, with unit and the paper's default;
                `metadata["in_front"]` is the default where another drafter stands behind this one. A field
                named `checkpoint` takes the checkpoint: without a default it must be given.
    lossless    "yes", or what it keeps instead.
    paper       where it comes from.
    docstring   its first line is the method's summary.

Other packages add methods through the entry-point group `paceline.drafters` (name = "package.module:Class").
Only this table knows methods by name; modules are imported when they are asked for.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from importlib.metadata import entry_points
from typing import Any, Literal

from paceline.draft.base import Drafter
from paceline.errors import MethodError, meant
from paceline.fallback import Fallback

GROUP = "paceline.drafters"

_BUILT_IN = {
    "none": "paceline.draft.none:NoDraft",
    "prompt-lookup": "paceline.draft.prompt_lookup:PromptLookup",
    "sam": "paceline.draft.sam:Sam",
    "rest": "paceline.draft.rest:Rest",
    "suffix": "paceline.draft.suffix:Suffix",
    "hierarchy": "paceline.draft.hierarchy:Hierarchy",
    "recycling": "paceline.draft.recycling:Recycling",
    "blend": "paceline.draft.blend:Blend",
    "ngram-pool": "paceline.draft.ngram_pool:NgramPool",
}


@dataclass(frozen=True)
class OptionInfo:
    """One option of a method. `in_front` is its default in front of another drafter, where that differs."""

    name: str
    type: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    in_front: Any = None


@dataclass(frozen=True)
class MethodInfo:
    """What there is to say about a method before it is made. `checkpoint`: whether it takes one."""

    name: str
    summary: str
    lossless: str
    paper: str
    options: tuple[OptionInfo, ...]
    checkpoint: Literal["no", "optional", "required"] = "no"


def names() -> list[str]:
    """Every method, the built-in ones first."""
    return list(_table())


def describe(name: str) -> MethodInfo:
    """What `name` is and which options it has; MethodError if there is no such method."""
    drafter = _load(name)
    config = _config_fields(drafter)
    hints = _hints(drafter)
    checkpoint = config.pop("checkpoint", None)
    return MethodInfo(
        name,
        (inspect.getdoc(drafter) or "").split("\n")[0],
        getattr(drafter, "lossless", "not stated"),
        getattr(drafter, "paper", "not stated"),
        tuple(_option(field, hints[field.name]) for field in config.values()),
        "no" if checkpoint is None else "required" if _required(checkpoint) else "optional",
    )


def create(spec: str) -> Drafter:
    """The drafter that `spec` names, ready for the engine. Raises MethodError that says what exists instead."""
    parts = [_parse(part, spec) for part in _split(spec)]
    last = len(parts) - 1
    drafters = [_build(part, in_front=i < last) for i, part in enumerate(parts)]
    return drafters[0] if last == 0 else Fallback(drafters)


@dataclass(frozen=True)
class _Part:
    name: str
    checkpoint: str | None
    options: dict[str, str]


def _split(spec: str) -> list[str]:
    """Cut at every + that a name follows, so that a path may hold others ("model:./c++/checkpoint")."""
    return re.split(r"\s*\+\s*(?=[A-Za-z][\w-]*\s*(?:[:,+]|$))", spec.strip())


def _parse(part: str, spec: str) -> _Part:
    """name[:checkpoint][,key=value...]"""
    head, *pairs = re.split(r",(?=\s*[A-Za-z_][\w-]*=)", part)
    name, colon, checkpoint = head.partition(":")
    if "," in name:
        raise MethodError(f"{head!r} in {spec!r}: an option is written key=value, as in name,key=value.")
    options: dict[str, str] = {}
    for pair in pairs:
        key, _, value = pair.strip().partition("=")
        if key in options:
            raise MethodError(f"{name}: option {key} is given twice in {spec!r}.")
        options[key] = value
    return _Part(name, checkpoint if colon else None, options)


def _build(part: _Part, *, in_front: bool) -> Drafter:
    drafter = _load(part.name)
    known = _config_fields(drafter)
    hints = _hints(drafter)
    values = _checkpoint(part, known.pop("checkpoint", None))
    for key, text in part.options.items():
        if key not in known:
            exist = f"Its options: {', '.join(known)}." if known else "It has no options."
            raise MethodError(f"{part.name} has no option {key!r}.{meant(key, known)} {exist}")
        values[key] = _read(text, hints[key], f"{part.name}: {key}")
    for key, field in known.items():
        if in_front and key not in values and "in_front" in field.metadata:
            values[key] = field.metadata["in_front"]
    config = getattr(drafter, "Config", None)
    return drafter() if config is None else drafter(config(**values))  # type: ignore[call-arg]


def _checkpoint(part: _Part, field: Field[Any] | None) -> dict[str, Any]:
    """The checkpoint as the config wants it, or MethodError if it is missing or not wanted."""
    if part.checkpoint:
        if field is None:
            raise MethodError(f"{part.name} takes no checkpoint, but {part.checkpoint!r} is given: leave it out.")
        return {"checkpoint": part.checkpoint}
    if part.checkpoint is not None or (field is not None and _required(field)):
        wants = "needs a checkpoint" if field is not None else "takes no checkpoint, but a colon is given"
        raise MethodError(f"{part.name} {wants}: write {part.name}{':PATH' if field is not None else ''}.")
    return {}


def _table() -> dict[str, str]:
    """name -> "module:Class", of this package and of those that registered."""
    table = dict(_BUILT_IN)
    for entry in entry_points(group=GROUP):
        if entry.name in table:
            raise MethodError(
                f"Two drafters are called {entry.name!r}: {table[entry.name]} and {entry.value}. "
                "Uninstall one of the two packages."
            )
        table[entry.name] = entry.value
    return table


def _load(name: str) -> type[Drafter]:
    """The class of a method."""
    table = _table()
    if name not in table:
        raise MethodError(
            f"There is no drafter {name!r}.{meant(name.lower(), table)} Drafters: {', '.join(table)}."
        )
    module, _, attribute = table[name].partition(":")
    try:
        drafter = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if name in _BUILT_IN:
            raise
        raise MethodError(f"Drafter {name!r} ({table[name]}) cannot be imported: {error}.") from error
    if not (isinstance(drafter, type) and issubclass(drafter, Drafter)):
        raise MethodError(f"Drafter {name!r} ({table[name]}) is not a subclass of paceline.draft.base.Drafter.")
    return drafter


def _config_fields(drafter: type[Drafter]) -> dict[str, Field[Any]]:
    config = getattr(drafter, "Config", None)
    return {} if config is None else {field.name: field for field in fields(config)}


def _hints(drafter: type[Drafter]) -> dict[str, Any]:
    return typing.get_type_hints(getattr(drafter, "Config", object))


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _option(field: Field[Any], hint: Any) -> OptionInfo:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    choices = tuple(choice for kind in _kinds(hint) for choice in _choices(kind))
    return OptionInfo(
        field.name,
        " or ".join(_type_name(kind) for kind in _kinds(hint)),
        default,
        field.metadata.get("help", ""),
        choices,
        field.metadata.get("in_front"),
    )


def _kinds(hint: Any) -> Sequence[Any]:
    """The types a hint allows: one, or those of a union."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _choices(kind: Any) -> tuple[Any, ...]:
    """The values of a Literal; none for any other type."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _type_name(kind: Any) -> str:
    if _choices(kind):
        return "choice"
    return "none" if kind is types.NoneType else str(kind.__name__)


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WANTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    types.NoneType: "none",
}


def _read(text: str, hint: Any, what: str) -> Any:
    """`text` as the first type of `hint` that can hold it."""
    text = text.strip()
    kinds = sorted(_kinds(hint), key=lambda kind: kind is not types.NoneType)
    for kind in kinds:
        for choice in _choices(kind):
            if str(choice) == text:
                return choice
        if kind is types.NoneType and text.lower() == "none":
            return None
        elif kind is bool and text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        elif kind in (int, float, str):
            try:
                return kind(text)
            except ValueError:
                continue
    wanted, guess = [], ""
    for kind in kinds:
        choices = [str(choice) for choice in _choices(kind)]
        wanted += choices or [_WANTED[kind]]
        guess = guess or meant(text, choices)
    raise MethodError(f"{what} is {text!r}; it must be {' or '.join(wanted)}.{guess}")
