"""JSON and JSON Lines: one reader, and one writer for prompts, recordings, corpora, training data and results.

    for where, record in objects("log.jsonl", ConversationError, "an answer"): ...      # where: "log.jsonl, line 7"
    with Appender.open(Path("log.jsonl"), REQUESTS) as log: log.append([record])

`loads` reads strictly: every fault of a JSON text from outside is a PacelineError of one line. At any moment, and after
a crash or on a full disk, a written file holds whole lines."""

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import mmap
import os
import re
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO, Any, Protocol, Self

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


PIECE_BYTES = 1 << 20  # bytes of a piece: some seconds of work
PEEKED = 16  # bytes at a file's beginning that say what it is


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
            return text.read(size // 4).encode()  # a character has up to four bytes
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
_WIDE = rb"\xff\xfe|\xfe\xff"  # the byte order marks of UTF-16
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
    except (ValueError, RecursionError):
        pass
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
    """What the JSON of lists and objects in a cell says."""
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
    """Whether what follows a first line that is not JSON is nothing, or lines of their own."""
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
    for path in [] if given is None else given if isinstance(given, list | tuple) else [given]:
        if str(path) != "-":
            missing = not os.path.exists(path)
            why = errno.ENOENT if missing else errno.EISDIR if os.path.isdir(path) else errno.EACCES
            if missing or os.path.isdir(path) or not os.access(path, os.R_OK):
                raise PacelineError(f"{path} cannot be read: {os.strerror(why)}")
    return given


def text_of(path: Path, error: type[PacelineError]) -> str:
    """The text of a file, as in `opened`. Raises `error` if it cannot be read or is not UTF-8."""
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


class Writer(Protocol):
    """Where records are appended."""

    def append(self, records: Iterable[Mapping[str, Any] | str]) -> None:
        """Write records, or lines without line ends."""


class Closing:
    """A context at whose end `close` is called."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


ANSWERS, REQUESTS, STEPS, RECORDS = b'{"index"', b'{"time"', b'{"step"', b"{"
"""How the records of a file begin: those of `generate`, of a server's log, of a training's log, and of any file in a
folder that is known to be ours."""


class Appender(Closing):
    """Lines at the end of an unbuffered file: when `append` returns they are written.

    raw   the file, opened for writing; `close` closes it.
    name  for messages; then: the end of the message "cannot be written"."""

    def __init__(self, raw: FileIO, name: str, then: str = ""):
        self._raw, self._name, self._then = raw, name, then
        self._is_file = stat.S_ISREG(os.fstat(raw.fileno()).st_mode)

    @classmethod
    def open(cls, path: Path, begins: bytes, *, private: bool = False, then: str = "") -> Self:
        """Append to `path`, which is made if it does not exist; private: a new file is its owner's alone. PacelineError
        if that fails, and if another process is writing there: the file is locked until it is closed.

        begins  how our records begin. A part of a line at the file's end, which a kill or a power cut left, is dropped:
                the next line could join it. PacelineError, and the file stays as it is, if that part is not ours."""
        with _writing(path):
            raw = _locked(path, private)
            try:
                _mend(raw, path, begins)
            except BaseException:
                raw.close()
                raise
            return cls(raw, str(path), then)

    def replace(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Put other records in the place of all that the file holds, which stays as it was if that fails."""
        path = Path(self._name)
        write_whole(path, "".join(map(_line, records)))
        with _writing(path):
            before, self._raw = self._raw, _locked(path)
            before.close()

    def append(self, records: Iterable[Mapping[str, Any] | str]) -> None:
        """Write records, or lines without line ends, all or none: PacelineError if that fails, BrokenPipeError for a
        pipe that nobody reads any more."""
        rest = memoryview("".join(_line(record) for record in records).encode())
        end = os.fstat(self._raw.fileno()).st_size
        try:
            while rest:
                rest = rest[self._raw.write(rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._is_file:
                self._raw.truncate(end)
                self._raw.seek(end)
            raise PacelineError(f"{self._name} cannot be written: {error.strerror}{self._then}") from None

    def is_at(self, path: Path) -> bool:
        """Whether this is still the file at `path`, which another program may rename or remove."""
        with suppress(FileNotFoundError):
            return not self._is_file or os.path.samestat(os.stat(path), os.fstat(self._raw.fileno()))
        return False

    def close(self) -> None:
        self._raw.close()


def lock(raw: FileIO, message: str) -> None:
    """Lock a file until it is closed; PacelineError with this message if another process has locked it."""
    try:
        import fcntl
    except ImportError:  # On such a system it is the user's to start one process at a time.
        return
    try:
        fcntl.flock(raw.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PacelineError(message) from None
    except OSError:  # This file system has no locks.
        return


def _locked(path: Path, private: bool = False) -> FileIO:
    """The file, opened and locked. A device or a pipe takes lines of any number of processes."""
    mode = 0o600 if private else 0o666
    while True:
        raw = FileIO(str(path), "a+", opener=lambda name, flags: os.open(name, flags, mode))
        try:
            if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
                return raw
            lock(raw, f"another process is writing into {path}; wait for it, or name another file")
            with suppress(FileNotFoundError):  # The one that had the lock may have put another file in its place.
                if os.path.samestat(os.stat(path), os.fstat(raw.fileno())):
                    return raw
        except BaseException:
            raw.close()
            raise
        raw.close()


def _mend(raw: FileIO, path: Path, begins: bytes) -> None:
    """Let a file end with a whole line. PacelineError for a part of a line that is not ours."""
    if end := _end(raw, path, begins):
        raw.seek(end - 1)
        is_open = raw.read(1) != b"\n"
        raw.truncate(end)
        raw.write(b"\n" * is_open)
    elif stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        raw.truncate(0)


def _end(raw: FileIO, path: Path, begins: bytes) -> int:
    """How many bytes of a file are whole records. PacelineError if a part of a line follows them that is not ours: it
    begins like no record of ours, and stands behind none. 0 for a device or a pipe."""
    status = os.fstat(raw.fileno())
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return 0
    with mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        part, before = content[end : end + len(begins)], content.rfind(b"\n", 0, max(end - 1, 0)) + 1
        if not begins.startswith(part) and content[before : before + len(begins)] != begins:
            raise _foreign(path)
        with suppress(NotJSON):  # A record that lacks nothing but its line end is whole.
            as_object(content[end:], "a record")
            return len(content)
        return end


def _foreign(path: Path) -> PacelineError:
    return PacelineError(f"{path} holds no JSON Lines, and lines would be added to it; name another file")


class _Stream:
    """Standard output without a file descriptor, such as a test's."""

    def append(self, records: Iterable[Mapping[str, Any] | str]) -> None:
        sys.stdout.write("".join(_line(record) for record in records))
        sys.stdout.flush()


def standard_output() -> Writer:
    """A writer of lines to standard output."""
    sys.stdout.flush()
    try:
        return Appender(FileIO(os.dup(sys.stdout.fileno()), "w"), "standard output")
    except (OSError, ValueError):  # no file: io.UnsupportedOperation is both
        return _Stream()


PAGE, TABLE, ISSUE, JUNIT = rb"<!doctype html>", rb'{\s*"paceline": "tune"', rb"# With drafts:", rb"\s*<testsuite "
REPLAYED, CERTIFICATE = rb'{\s*"trace": ', rb'{\s*"target": '
GGUF = rb"(?s)GGUF|.{8}\xff{8}"  # or a lookup cache: two tokens, and -1 twice
"""How the files of a kind begin, as patterns: what a command writes replaces its own kind only."""


def check_file(path: Path | None, kind: bytes = rb"\Z") -> Path | None:
    """`path`; PacelineError unless a file can be written there, or replaced: an empty one, or one that begins as `kind`
    says. Its folder must exist."""
    if path is not None:
        with _writing(path):
            if path.exists() and not path.is_file():
                what = "a folder" if path.is_dir() else "no regular file"
                raise PacelineError(f"{path} is {what}; name a file to write")
            _try_in(path.absolute().parent, path)
            if path.exists():
                with path.open("rb") as file:
                    begins = file.read(256)
                if begins and not re.match(kind, begins):
                    raise PacelineError(f"{path} holds something else, which would be lost; name another file to write")
    return path


def writes(kind: bytes) -> Callable[[Path | None], Path | None]:
    """`check_file` for files of a kind, as the callback of an option."""

    def check(path: Path | None) -> Path | None:
        return check_file(path, kind)

    return output(check)


def writes_in(**kinds: bytes) -> Callable[[Path | None], Path | None]:
    """`check_folder`, and `check_file` for what is written there, as the callback of an option. kinds: by the files'
    names, with _ for the dot."""

    def check(folder: Path | None) -> Path | None:
        check_folder(folder)
        if folder is not None and folder.is_dir():
            for name, kind in kinds.items():
                check_file(folder / name.replace("_", "."), kind)
        return folder

    return output(check)


def check_log(path: Path | None, begins: bytes) -> Path | None:
    """`path`; PacelineError unless lines that begin so can be appended to it: JSON Lines to which no other process
    appends, a new file, a device or a pipe."""
    if path is None or not path.exists() or path.is_dir():
        return check_file(path)
    with _writing(path):
        if path.is_file():
            with _locked(path) as raw:
                _end(raw, path, begins)
            with path.open("rb") as file:
                first = file.readline(PIECE_BYTES)
            with suppress(NotJSON):
                if not first.endswith(b"\n") or as_object(first, "a record"):
                    return path
            raise _foreign(path)
        elif not os.access(path, os.W_OK):
            raise PermissionError(0, "Permission denied")
    return path


def appends(begins: bytes) -> Callable[[Path | None], Path | None]:
    """`check_log` for records that begin so, as the callback of an option."""

    def check(path: Path | None) -> Path | None:
        return check_log(path, begins)

    return output(check)


def check_folder(path: Path | None) -> Path | None:
    """`path`; PacelineError unless files can be written into this folder, or it can be made."""
    if path is not None:
        with _writing(path):
            if path.exists() and not path.is_dir():
                raise PacelineError(f"{path} is a file; name a folder to write")
            _try_in(next(place for place in (path.absolute(), *path.absolute().parents) if place.exists()), path)
    return path


def check_new_folder(path: Path) -> Path:
    """As `check_folder`; also PacelineError if `path` exists."""
    if path.exists():
        raise PacelineError(f"{path} exists already; name a new folder")
    check_folder(path)
    return path


OUTPUTS: set[Any] = {check_file, check_folder, check_new_folder}
"""The callbacks of options and arguments that name what a command writes."""


def output(check: Callable[[Path | None], Path | None]) -> Callable[[Path | None], Path | None]:
    """Say that a callback is one of `OUTPUTS`."""
    OUTPUTS.add(check)
    return check


def check_apart(written: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """PacelineError if a command is to write what it reads, or twice to one place. Both: values by option; those read
    may be lists and specs that name a path among other things."""
    places: dict[str, str] = {}
    for name, path in written.items():
        if path is not None and (other := places.setdefault(os.path.realpath(path), name)) != name:
            raise PacelineError(f"{path} is both {other} and {name}; name two places to write")
    for name, value in read.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str | Path):
                for part in {str(text), *re.split(r"""[=:,;+|#"]""", str(text))} - {""}:
                    place = os.path.expanduser(part)
                    if os.path.exists(place) and (out := places.get(os.path.realpath(place))):
                        raise PacelineError(f"{part} is read ({name}), and {out} would write it; name another {out}")


def _try_in(folder: Path, path: Path) -> None:
    """Write a nameless file into `folder`: permissions alone do not show that it works."""
    if not folder.is_dir():
        problem = f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}"
        raise PacelineError(f"{path} cannot be written: {problem}")
    with TemporaryFile(dir=folder):
        pass


@contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise PacelineError(f"{path} cannot be written: {error.strerror or error}") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a file to write, which then replaces `path`; its folder is made. If something fails, `path`
    keeps its old content. PacelineError if it cannot be written."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # another process may write the same file
    try:
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield part
            with part.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; PacelineError if that fails."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any, indent: int = 1) -> None:
    """Write a JSON file, as `write_whole` does."""
    write_whole(path, json.dumps(value, indent=indent) + "\n")


def _line(record: Mapping[str, Any] | str) -> str:
    return (record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)) + "\n"
