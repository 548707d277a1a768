"""Strict JSON, of texts and of lines: every fault of outside data is a PacelineError of one line."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from paceline.errors import PacelineError, kind_of, shortened

DEPTH = 100  # Most levels of nesting. Python's own limit depends on the caller's depth in the stack.
BOM = b"\xef\xbb\xbf"
_DEEP = f"nested more than {DEPTH} levels deep"


class NotJSON(PacelineError, ValueError):
    """Text that is not JSON, or JSON that cannot be used."""


def loads(
    text: str | bytes, parse_constant: Callable[[str], Any] | None = None, once: bool = False, raw: bool = False
) -> Any:
    """As `json.loads`. NotJSON for bytes that are not UTF-8, a syntax error, nesting deeper than DEPTH, an integer with
    more digits than Python reads, and half of a surrogate pair, which no text can hold.

    once  NotJSON also for an object with two fields of one name.
    raw   strings may have line breaks and other control characters in them, as models write them."""
    try:
        text = text.removeprefix(BOM).decode() if isinstance(text, bytes) else text
        hook = _once if once else None
        value = json.loads(text, parse_constant=parse_constant, object_pairs_hook=hook, strict=not raw)
    except UnicodeDecodeError as error:
        raise NotJSON(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        is_line, what = "\n" not in error.doc.rstrip(), error.msg.removesuffix(" at")
        column = min(error.pos, len(error.doc.rstrip("\r\n"))) + 1 if is_line else error.colno
        line = "" if is_line else f"line {error.lineno}, "
        raise NotJSON(f"not JSON: {what} at {line}column {column}") from None
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


def as_object(line: Any, wanted: str) -> dict[str, Any]:
    """The JSON object of a line, or the value that was read of it; NotJSON for anything else. wanted: what the line
    should be, for the message."""
    value = loads(line) if isinstance(line, str | bytes) else line
    if not isinstance(value, dict):
        raise NotJSON(f"a JSON object is wanted ({wanted}), not {kind_of(value)}")
    return value


def numbered(lines: Iterable[bytes], first: int = 1) -> Iterator[tuple[int, bytes]]:
    """(line number, counted from `first`; line) of every line that is not blank, without a byte order mark."""
    for number, line in enumerate(lines, first):
        line = line.removeprefix(BOM) if number == 1 else line
        if line.strip():
            yield number, line
