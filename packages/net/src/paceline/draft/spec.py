"""Specs, `name[:checkpoint][,key=value...]`: how drafters and peers are named. `options.py` declares their options.

    part = parse("sam,draft=20")
    SamConfig(**values(part, SamConfig))

A value in double quotes is taken as it is: model:"runs/a+b,c". Within quotes, \\" is a quote and \\\\ a backslash."""

import re
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal

from paceline.core.options import Options as Options
from paceline.core.options import check_range
from paceline.core.options import option as option
from paceline.core.options import quoted as quoted
from paceline.errors import MethodError, meant

Takes = Literal["no", "optional", "required"]
_QUOTED = r'(?<![^:=|\s])"(?:[^"\\]|\\.)*"'


@dataclass(frozen=True)
class OptionInfo:
    """One option of a method. in_front: as in `option`."""

    name: str
    type: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    in_front: Any = None


@dataclass(frozen=True)
class Part:
    """A name, its checkpoint and its options, all as texts."""

    name: str
    checkpoint: str | None
    options: dict[str, str]


def cut(text: str, separator: str) -> list[str]:
    """Cut `text` at each match of the pattern `separator` outside of quotes."""
    found = re.finditer(f"(?s){_QUOTED}|({separator})", text)
    places = [0, *(place for one in found if one[1] is not None for place in one.span(1)), len(text)]
    return [text[begin:end] for begin, end in zip(places[::2], places[1::2], strict=True)]


def exchanged(text: str, old: str, new: str) -> str:
    """Replace `old` by `new` outside of quotes, because lists of specs write options with ; instead of ,."""
    return new.join(cut(text, re.escape(old)))


def _unquoted(text: str) -> str:
    """Remove the quotes around `text`, if it is quoted as a whole."""
    inner = re.fullmatch(f"(?s){_QUOTED}", text.strip())
    return text if inner is None else re.sub(r'\\(["\\])', r"\1", inner[0][1:-1])


def split(spec: str) -> list[str]:
    """Split a spec at each + before a name; paths may contain other + ("model:./c++/checkpoint")."""
    return cut(spec.strip(), r"\s*\+\s*(?=[A-Za-z][\w-]*\s*(?:[:,+]|$))")


def parse(part: str, spec: str = "") -> Part:
    """Parse one `part` of `spec` into name, checkpoint and options. MethodError if it cannot be read."""
    spec = spec or part
    head, *pairs = cut(part, r",(?=\s*[A-Za-z_][\w-]*=)")
    name, colon, checkpoint = head.partition(":")
    if "," in name:
        raise MethodError(f"{head!r} in {spec!r}: an option is written key=value, as in name,key=value.")
    options: dict[str, str] = {}
    for pair in pairs:
        key, _, value = pair.strip().partition("=")
        if key in options:
            raise MethodError(f"{name}: option {key} is given twice in {spec!r}.")
        options[key] = _unquoted(value.strip())
    return Part(name, _unquoted(checkpoint) if colon else None, options)


def values(part: Part, config: type | None, *, in_front: bool = False) -> dict[str, Any]:
    """Read the fields of `config` that `part` sets. config: None has no options.

    Raises MethodError for an unknown option, a value that cannot be read or is outside its range, and a checkpoint
    that is missing or not wanted."""
    known, hints = _fields(config), typing.get_type_hints(config or object)
    given = _checkpoint(part, known.pop("checkpoint", None))
    for key, text in part.options.items():
        if key not in known:
            exist = f"Its options: {', '.join(known)}." if known else "It has no options."
            raise MethodError(f"{part.name} has no option {key!r}.{meant(key, known)} {exist}")
        given[key] = _read(text, hints[key], f"{part.name}: {key}")
        check_range(given[key], known[key], f"{part.name}: {key}")
    for key, field in known.items():
        if in_front and key not in given and "in_front" in field.metadata:
            given[key] = field.metadata["in_front"]
    return given


def options(config: type | None) -> tuple[OptionInfo, ...]:
    """Describe every option of `config` but the checkpoint."""
    known, hints = _fields(config), typing.get_type_hints(config or object)
    known.pop("checkpoint", None)
    return tuple(_info(field, _kinds(hints[field.name])) for field in known.values())


def takes_checkpoint(config: type | None) -> Takes:
    """Whether a checkpoint may or must be given."""
    field = _fields(config).get("checkpoint")
    return "no" if field is None else "required" if _required(field) else "optional"


def _checkpoint(part: Part, field: Field[Any] | None) -> dict[str, Any]:
    """The checkpoint as a field of the config, or no field. MethodError if it is missing or not wanted."""
    if part.checkpoint:
        if field is None:
            raise MethodError(f"{part.name} takes no checkpoint, but {part.checkpoint!r} is given: leave it out.")
        return {"checkpoint": part.checkpoint}
    if part.checkpoint is not None or (field is not None and _required(field)):
        wants = "needs a checkpoint" if field is not None else "takes no checkpoint, but a colon is given"
        raise MethodError(f"{part.name} {wants}: write {part.name}{':PATH' if field is not None else ''}.")
    return {}


def _fields(config: type | None) -> dict[str, Field[Any]]:
    return {} if config is None else {field.name: field for field in fields(config)}


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _info(field: Field[Any], kinds: Sequence[Any]) -> OptionInfo:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    choices = tuple(choice for kind in kinds for choice in _choices(kind))
    names = ["choice" if _choices(kind) else "none" if kind is types.NoneType else kind.__name__ for kind in kinds]
    more = field.metadata
    return OptionInfo(field.name, " or ".join(names), default, more.get("help", ""), choices, more.get("in_front"))


def _kinds(hint: Any) -> Sequence[Any]:
    """The types that a hint allows."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _choices(kind: Any) -> tuple[Any, ...]:
    """The values of a Literal; none for any other type."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "none"}


def _read(text: str, hint: Any, what: str) -> Any:
    """Convert `text` to the first type of `hint` that fits. MethodError if none does."""
    kinds = sorted(_kinds(hint), key=lambda kind: kind is not types.NoneType)
    for kind in kinds:
        for choice in _choices(kind):
            if str(choice) == text:
                return choice
        if kind is types.NoneType and text.lower() == "none":
            return None
        if kind is bool and text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        if kind in (int, float, str):
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
