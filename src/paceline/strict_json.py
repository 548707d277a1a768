"""JSON from outside, read strictly: what cannot be used is a NotJSON of one line."""

import json
from collections.abc import Callable
from typing import Any

from paceline.errors import PacelineError, shortened

DEPTH = 100  # Most levels of nesting. Python's own limit depends on the caller's depth in the stack.
BOM = b"\xef\xbb\xbf"
_DEEP = f"nested more than {DEPTH} levels deep"


class NotJSON(PacelineError, ValueError):
    """Text that is not JSON, or JSON that cannot be used."""


def loads(text: str | bytes, parse_constant: Callable[[str], Any] | None = None, once: bool = False) -> Any:
    """As `json.loads`. NotJSON for bytes that are not UTF-8, a syntax error, nesting deeper than DEPTH, an integer with
    more digits than Python reads, and half of a surrogate pair, which no text can hold.

    once  NotJSON also for an object with two fields of one name."""
    try:
        text = text.removeprefix(BOM).decode() if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=parse_constant, object_pairs_hook=_once if once else None)
    except UnicodeDecodeError as error:
        raise NotJSON(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in error.doc.rstrip() else ""
        what = error.msg.removesuffix(" at")
        raise NotJSON(f"not JSON: {what} at {line}column {error.colno}") from None
    except NotJSON:
        raise
    except RecursionError:
        raise NotJSON(_DEEP) from None
    except ValueError:  # int() refuses a long text, which would take quadratic time
        raise NotJSON("a whole number of more than 4,300 digits is not read") from None
    if text.count("[") + text.count("{") > DEPTH and _is_deep(value):
        raise NotJSON(_DEEP)
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise NotJSON(f"{half} is half of a surrogate pair and stands alone, which is not a character") from None
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict[str, Any]()
    for name, value in pairs:
        if name in made:
            raise NotJSON(f"the field {shortened(repr(name))} is there twice")
        made[name] = value
    return made


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH + 1):
        holders = [value for value in level if isinstance(value, (dict, list)) and value]
        level = [inner for holder in holders for inner in (holder.values() if isinstance(holder, dict) else holder)]
    return bool(holders)
