"""Read JSON from outside. Anything wrong with it is a PacelineError of one line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from paceline.errors import PacelineError
from paceline.records.pieces import Piece

DEPTH = 100
"""Most levels of nesting. Python's own limit depends on the depth of the caller in the stack."""
BOM = b"\xef\xbb\xbf"


class NotJSON(PacelineError, ValueError):
    """Text that is not JSON, or JSON that cannot be used."""


def loads(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """`json.loads`, but whatever is wrong raises NotJSON: bytes that are not UTF-8, a syntax error, nesting deeper
    than DEPTH, an integer of more digits than Python reads, half a surrogate pair (no text can be made of it)."""
    try:
        text = text.removeprefix(BOM).decode() if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=parse_constant)
    except UnicodeDecodeError as error:
        raise NotJSON(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in error.doc.rstrip() else ""
        raise NotJSON(f"not JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise NotJSON(_DEEP) from None
    except ValueError:  # the only other one: int() of a long text is refused, as it would take quadratic time
        raise NotJSON("a whole number of more than 4,300 digits is not read") from None
    if text.count("[") + text.count("{") > DEPTH and _is_deep(value):
        raise NotJSON(_DEEP)
    if "\\ud" in text or "\\uD" in text:
        _refuse_surrogates(value)
    return value


_DEEP = f"nested more than {DEPTH} levels deep"


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH + 1):
        holders = [value for value in level if isinstance(value, (dict, list)) and value]
        if not holders:
            return False
        level = [inner for holder in holders for inner in (holder.values() if isinstance(holder, dict) else holder)]
    return True


def _refuse_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise NotJSON(f"{half} is half of a surrogate pair and stands alone, which is not a character") from None


def as_object(line: str | bytes, wanted: str) -> dict[str, Any]:
    """The JSON object of a line. NotJSON if it holds something else; `wanted` says what, in the message."""
    value = loads(line)
    if not isinstance(value, dict):
        raise NotJSON(f"a JSON object is wanted ({wanted}), not a {type(value).__name__}")
    return value


def numbered(lines: Iterable[bytes], first: int = 1) -> Iterator[tuple[int, bytes]]:
    """(line number from `first`, line) of every line that is not blank, without a byte order mark."""
    for number, line in enumerate(lines, first):
        line = line.removeprefix(BOM) if number == 1 else line
        if line.strip():
            yield number, line


@contextmanager
def opened(path: Path, error: type[PacelineError]) -> Iterator[IO[bytes]]:
    """A file, gzipped (by its first bytes, or its name) or not, for reading bytes. What cannot be read in the block, or
    unzipped, raises `error`. `tell` of its `raw` stays where the compressed bytes are."""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b" or path.suffix == ".gz"
            raw.seek(0)
            with gzip.open(raw) if zipped else raw as lines:
                yield lines  # type: ignore[misc]
    except (EOFError, gzip.BadGzipFile, zlib.error) as cause:
        raise error(f"{path} is cut off or damaged ({cause})") from cause
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror or cause}") from cause


def objects(
    source: str | Path | Piece, error: type[PacelineError], wanted: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file, line n", object) of every line that is not blank; `error`, which names the line, if it is not an object.

    wanted  what a line should be, for the message."""
    piece = source if isinstance(source, Piece) else Piece(Path(source))
    with opened(piece.path, error) as file:
        for number, line in numbered(piece.within(file), piece.line):
            where = f"{piece.path}, line {number}"
            try:
                record = as_object(line, wanted)
            except NotJSON as cause:
                raise error(f"{where}: {cause}") from None
            yield where, record
