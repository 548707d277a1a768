"""Text files as people have them: plain, packed or in UTF-16, as JSON Lines, JSON as a whole, CSV or Parquet.

    for where, record in objects("log.jsonl", ConversationError, "an answer"): ...      # where: "log.jsonl, line 7"
"""

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

from paceline.errors import PacelineError
from paceline.jsonl import BOM, NotJSON, as_object, loads, numbered

PIECE_BYTES = 1 << 20  # Bytes of a piece, which is some seconds of work.
PEEKED = 16  # So many first bytes show a file's type.


def _zstd(raw: io.BufferedReader) -> io.BufferedReader:
    import pyarrow

    stream = pyarrow.CompressedInputStream(raw, "zstd")

    def read(size: int) -> bytes:
        try:
            return bytes(stream.read(size))
        except OSError as cause:
            raise EOFError(str(cause)) from None

    return io.BufferedReader(_Read(read, raw))


def _utf16(raw: io.BufferedReader) -> io.BufferedReader:
    """The bytes of UTF-8 that say the same."""
    text = io.TextIOWrapper(raw, "utf-16", newline="")

    def read(size: int) -> bytes:
        try:
            return text.read(size // 4).encode()  # A character has up to four bytes.
        except UnicodeDecodeError as cause:
            raise EOFError(f"not UTF-16: {cause.reason}") from None

    return io.BufferedReader(_Read(read, raw))


class _Read(io.RawIOBase):
    """A file whose bytes a function gives. inner: where they come from."""

    def __init__(self, read: Callable[[int], bytes], inner: IO[bytes]):
        self._read, self._inner = read, inner

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._inner.fileno()

    def readinto(self, buffer: Any) -> int:
        given = self._read(len(buffer))
        buffer[: len(given)] = given
        return len(given)


PACKED: dict[str, tuple[bytes, Callable[[Any], Any]]] = {
    ".gz": (rb"\x1f\x8b", gzip.open),
    ".xz": (rb"\xfd7zXZ\0", lzma.open),
    ".bz2": (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", bz2.open),
    ".zst": (rb"\x28\xb5\x2f\xfd", _zstd),
}
"""How packed files begin, as a pattern, and what unpacks them; by the usual ends of their names."""
_WIDE = rb"\xff\xfe|\xfe\xff"  # The byte order marks of UTF-16.
_PARQUET = b"PAR1"
MAYBE_PACKED = f"({'|'.join(map(re.escape, PACKED))})?$"
"""A pattern of the end of a name, behind what the file is."""
_CSV = re.compile(rf"\.csv{MAYBE_PACKED}", re.IGNORECASE)


def _unpacked(raw: io.BufferedReader, suffix: str) -> io.BufferedReader:
    """What a file holds, in UTF-8 where it is text: `raw` itself, if that is so. Its first bytes decide, and where they
    say nothing the end of its name."""
    begins = raw.peek(PEEKED)
    by_name = PACKED[suffix][1] if suffix in PACKED and begins else None
    unpack = next((unpack for mark, unpack in PACKED.values() if re.match(mark, begins)), by_name)
    inner: io.BufferedReader = unpack(raw) if unpack else raw
    return _utf16(inner) if re.match(_WIDE, inner.peek(PEEKED)) else inner


@dataclass(frozen=True)
class Piece:
    """Whole lines of a file, which any machine can read by themselves: bytes [begin, end); end None: all the rest.

    line  number of the first line."""

    path: Path
    begin: int = 0
    end: int | None = None
    line: int = 1


def pieces_of(path: Path, error: type[PacelineError]) -> Iterator[Piece]:
    """A file's pieces in order. An empty file is one piece; so is one that can be read only from its beginning: packed,
    in UTF-16, a table, or JSON as a whole. Raises `error` if the file cannot be read."""
    with opened(path, error) as file:
        _, first = next(numbered(file), (0, b""))
    with _reading(path, error), path.open("rb") as raw:
        if _unpacked(raw, path.suffix) is not raw or _is_table(raw, path) or _is_open(first):
            yield Piece(path)
            return
        begin, line = 0, 1
        while content := raw.read(PIECE_BYTES) + raw.readline():
            yield Piece(path, begin, begin + len(content), line)
            begin, line = begin + len(content), line + content.count(b"\n")
        if begin == 0:
            yield Piece(path)


def _is_table(file: io.BufferedReader, name: str | Path) -> bool:
    """Whether a file's rows are records. Of CSV only its name tells."""
    return bool(_CSV.search(str(name))) or file.peek(PEEKED).startswith(_PARQUET) or str(name).endswith(".parquet")


def _is_open(first: bytes) -> bool:
    """Whether the JSON that begins in a file's first line goes on after it, or is a list."""
    if first.lstrip().startswith(b"["):
        return True
    try:
        json.loads(first.decode())
    except json.JSONDecodeError as error:
        return first.lstrip().startswith(b"{") and error.pos >= len(error.doc.rstrip())
    except (ValueError, RecursionError):  # The bytes are no UTF-8, or nested too deep: whoever reads the line says so.
        return False
    return False


def _rows(file: io.BufferedReader, name: str | Path, error: type[PacelineError]) -> Iterator[dict[str, Any]]:
    """The rows of a table, whose cells may be JSON. Raises `error` if it cannot be read."""
    if _CSV.search(str(name)):
        csv.field_size_limit(1 << 30)
        try:
            for row in csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline="")):
                yield {str(column): _cell(cell) for column, cell in row.items() if cell}
        except (UnicodeDecodeError, csv.Error) as cause:
            raise error(f"{name} cannot be read: {cause}") from None
        return
    from pyarrow import ArrowInvalid, parquet

    try:
        for batch in parquet.ParquetFile(file if file.seekable() else io.BytesIO(file.read())).iter_batches(1024):
            for row in batch.to_pylist():
                yield {column: _cell(cell) for column, cell in row.items() if cell is not None}
    except ArrowInvalid as cause:
        raise error(f"{name} is no Parquet file: {cause}") from None


def _cell(value: Any) -> Any:
    """The value of a cell, parsed if it is JSON of a list or an object."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with suppress(NotJSON):
            return loads(value)
    return value


@contextmanager
def seekable(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """The paths, standard input ("-") copied to a file that is deleted afterwards."""
    with ExitStack() as files:
        found = []
        for path in paths:
            if str(path) == "-":
                copy = files.enter_context(NamedTemporaryFile(prefix="stdin-", suffix=".jsonl"))
                shutil.copyfileobj(sys.stdin.buffer, copy)
                copy.flush()
                path = Path(copy.name)
            found.append(path)
        yield found


def listed(value: Any) -> list[Any]:
    """The records in a file's only value: a list's items, or the value."""
    return value if isinstance(value, list) else [value]


def records(
    file: io.BufferedReader, name: str | Path, error: type[PacelineError], piece: Piece | None = None,
    parts: Callable[[Any], Sequence[Any]] = listed,
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """What an opened file holds: ("file, line n", the line) of every line that is not blank; of a table, and of JSON
    that is printed over several lines, ("file, item n", value). Raises `error` if it cannot be read.

    name   the file's, for messages and for CSV.
    piece  read this piece alone.
    parts  the records in a value that is the whole file."""
    if piece is not None and piece.end is not None:
        file.seek(piece.begin)
        lines = numbered(io.BytesIO(file.read(piece.end - piece.begin)), piece.line)
    elif _is_table(file, name):
        yield from ((f"{name}, item {number}", row) for number, row in enumerate(_rows(file, name, error), 1))
        return
    else:
        lines = numbered(file)
        number, first = next(lines, (0, b""))
        if _is_open(first):
            rest = file.read()
            try:
                values = _values(b"\n" * (number - 1) + first + rest, parts)
            except NotJSON as cause:
                if first.lstrip().startswith(b"[") or not _is_lines(rest):
                    raise error(f"{name}: {cause}") from None
                lines = chain([(number, first)], numbered(io.BytesIO(rest), number + 1))
            else:
                yield from ((f"{name}, item {n}", value) for n, value in enumerate(values, 1))
                return
        elif first:
            lines = chain([(number, first)], lines)
    yield from ((f"{name}, line {number}", line) for number, line in lines)


def _is_lines(rest: bytes) -> bool:
    """Whether the text after a first line that is not JSON is empty, or lines of records."""
    _, second = next(numbered(io.BytesIO(rest)), (0, b"{"))
    return re.match(rb'[\s",}\]]', second) is None


def _values(whole: bytes, parts: Callable[[Any], Sequence[Any]]) -> Sequence[Any]:
    """The records in a file that is one JSON value, or several, each of which begins and ends a line."""
    joined, count = re.subn(rb"(?m)^([}\]]\s*\n)(?=[{\[])", rb"\1,", whole)
    return loads(b"[" + joined + b"]") if count else parts(loads(whole))


def _buffered(raw: Any) -> io.BufferedReader:
    return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)


@contextmanager
def opened(source: Path | IO[bytes], error: type[PacelineError], name: str = "") -> Iterator[io.BufferedReader]:
    """A file of bytes, or one that is open, unpacked and in UTF-8 if its first bytes or its name say that it is one of
    PACKED or UTF-16. Raises `error` if it cannot be read."""
    name = name or str(source)
    with _reading(name, error), ExitStack() as files:
        raw = source.open("rb") if isinstance(source, Path) else source
        files.callback(raw.close)
        yield _unpacked(_buffered(raw), Path(name).suffix)


@contextmanager
def _reading(name: str | Path, error: type[PacelineError]) -> Generator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as cause:
        raise error(f"{name} is cut off or damaged ({cause})") from cause
    except OSError as cause:
        raise error(f"{name} cannot be read: {cause.strerror or cause}") from cause


def readable(given: Any) -> Any:
    """`given`, the callback of an option with files to read ("-": standard input). PacelineError unless all are there.
    None is opened: what writes into a pipe would miss its reader."""
    return _there(given, folders=False)


def readable_or_folders(given: Any) -> Any:
    """As `readable`, for files and folders."""
    return _there(given, folders=True)


def _there(given: Any, *, folders: bool) -> Any:
    for path in [] if given is None else given if isinstance(given, list | tuple) else [given]:
        if str(path) != "-":
            missing, is_folder = not os.path.exists(path), os.path.isdir(path) and not folders
            why = errno.ENOENT if missing else errno.EISDIR if is_folder else errno.EACCES
            if missing or is_folder or not os.access(path, os.R_OK):
                raise PacelineError(f"{path} cannot be read: {os.strerror(why)}")
    return given


def text_of(path: Path, error: type[PacelineError]) -> str:
    """Read the text of a file, as in `opened`. Raises `error` if it cannot be read or is not UTF-8."""
    with opened(path, error) as file:
        content = file.read().removeprefix(BOM)
    try:
        return content.decode()
    except UnicodeDecodeError as cause:
        line = content.count(b"\n", 0, cause.start) + 1
        raise error(f"{path}, line {line}: not UTF-8 ({cause.reason})") from None


def objects(source: str | Path, error: type[PacelineError], wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every record in a file, as `records` has them; `error`, which names the place, if it is not an
    object.

    wanted  what a line should be, for the message."""
    with opened(Path(source), error) as file:
        for where, line in records(file, source, error):
            try:
                record = as_object(line, wanted)
            except NotJSON as cause:
                raise error(f"{where}: {cause}") from None
            yield where, record
