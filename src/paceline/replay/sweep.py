"""One option, several values: `nodes=8,16,32` makes three drafters of each that has the option."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.draft.registry import describe
from paceline.errors import PacelineError


@dataclass(frozen=True)
class Variant:
    """A drafter, and the one it is a variant of: itself where nothing was swept."""

    spec: str
    base: str


def sweep(specs: Sequence[str], what: str | None) -> list[Variant]:
    """Every drafter, and instead of one that has the option, one for each of its values.

    what  "option=value,value,..."; None: nothing. Raises PacelineError if no drafter has the option, MethodError for
    a drafter that does not exist."""
    if what is None:
        return [Variant(spec, spec) for spec in specs]
    option, equals, listed = what.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not option or not equals or not values:
        raise PacelineError(f"--sweep is {what!r}; write option=value,value,... such as draft=5,10,20")
    variants = [each for spec in specs for each in _variants(spec, option.strip(), values)]
    if all(each.spec == each.base for each in variants):
        raise PacelineError(f"none of {', '.join(specs)} has an option {option!r} to sweep")
    return variants


def _variants(spec: str, option: str, values: Sequence[str]) -> list[Variant]:
    parts = re.split(r"\+(?=[A-Za-z])", spec)
    has = [option in [o.name for o in describe(re.split("[:,]", part.strip())[0]).options] for part in parts]
    if not any(has):
        return [Variant(spec, spec)]
    return [
        Variant("+".join(f"{p},{option}={value}" if h else p for p, h in zip(parts, has, strict=True)), spec)
        for value in values
    ]
