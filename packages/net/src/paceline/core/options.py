"""The options of a drafter or peer: a frozen dataclass, whose fields `spec.py` reads from texts.

    @dataclass(frozen=True)
    class SamConfig(Options):
        draft: int = option(40, "most tokens a draft holds", least=1)

The type of an option is int, float, bool, str, Literal, or one of these `| None`. A field named `checkpoint` takes the
checkpoint; without a default it must be given."""

import dataclasses
import re
from dataclasses import MISSING, Field, fields
from math import inf
from typing import Any

from paceline.errors import MethodError


def option(
    default: Any = MISSING, help: str = "", *, least: float | None = None, most: float | None = None, **more: Any
) -> Any:
    """A field of a dataclass of options.

    default      without it the option must be given.
    least, most  the range of a number, both ends included; None: no bound. The value None is in every range.
    more         in_front: the default for a drafter that is followed by another after a `+`."""
    return dataclasses.field(default=default, metadata={"help": help, "least": least, "most": most, **more})


class Options:
    """Base of dataclasses of options. Raises MethodError for a value outside its range."""

    def __post_init__(self) -> None:
        for known in fields(self):  # type: ignore[arg-type]
            check_range(getattr(self, known.name), known, f"{type(self).__name__}: {known.name}")


def check_range(value: Any, field: Field[Any], what: str) -> None:
    """Raise MethodError for NaN or a number outside the option's range. what: name of the option, for the message."""
    least, most = field.metadata.get("least"), field.metadata.get("most")
    if not isinstance(value, int | float) or (least is None and most is None):
        return
    if not (-inf if least is None else least) <= value <= (inf if most is None else most):
        span = f"{least} or more" if most is None else f"at most {most}" if least is None else f"{least} to {most}"
        raise MethodError(f"{what} is {value}; it must be {span}.")


def quoted(text: str) -> str:
    """Write `text` for a spec, in quotes if a spec would otherwise be cut there or changed."""
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'"{escaped}"' if re.search(r'[+>,;|"]|^\s|\s$', text) else text
