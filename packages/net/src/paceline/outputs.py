"""Write lines at the end of files, and whole files; check beforehand where a command may write.

    with Appender.open(Path("log.jsonl"), REQUESTS) as log: log.append([record])

At any moment, and after a crash or on a full disk, a written file holds whole lines."""

import json
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol, Self

from paceline.errors import PacelineError
from paceline.jsonl import NotJSON, as_object
from paceline.textfiles import PIECE_BYTES


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
        """Append to `path`, which is made if it does not exist, and lock it until it is closed. private: only the owner
        may read a new file. Raises PacelineError if that fails, or if another process writes there.

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
        """Replace all records of the file. If that fails, the file stays as it was."""
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
    except ImportError:  # Without locks the user must start one process at a time.
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
    except (OSError, ValueError):  # io.UnsupportedOperation, for no real file, is both.
        return _Stream()


PAGE, TABLE, ISSUE, JUNIT = rb"<!doctype html>", rb'{\s*"paceline": "tune"', rb"# With drafts:", rb"\s*<testsuite "
REPLAYED, CERTIFICATE = rb'{\s*"trace": ', rb'{\s*"target": '
GGUF = rb"(?s)GGUF|.{8}\xff{8}"  # A lookup cache begins with two tokens, and -1 twice.
"""How the files of a kind begin, as patterns: what a command writes replaces its own kind only."""


def check_file(path: Path | None, kind: bytes = rb"\Z") -> Path | None:
    """Return `path`, or raise PacelineError unless a file can be written there. Only an empty file, or one that begins
    as `kind` says, may be replaced. The folder must exist."""
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
    """Return `path`, or raise PacelineError unless lines that begin so can be appended to it: JSON Lines to which no
    other process appends, a new file, a device or a pipe."""
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
    """Return `path`, or raise PacelineError unless files can be written into this folder, or it can be made."""
    if path is not None:
        with _writing(path):
            if path.exists() and not path.is_dir():
                raise PacelineError(f"{path} is a file; name a folder to write")
            _try_in(next(place for place in (path.absolute(), *path.absolute().parents) if place.exists()), path)
    return path


def check_new_folder(path: Path) -> Path:
    """As `check_folder`, but also raises PacelineError if `path` exists."""
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
    """Raise PacelineError if a command would write a file that it reads, or write twice to one place. Both arguments:
    values by option; values to read may be lists, and specs that contain a path."""
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
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # Another process may write the same file.
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
    """Write a file whole or not at all. Raises PacelineError if that fails."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any, indent: int = 1) -> None:
    """Write a JSON file, as `write_whole` does."""
    write_whole(path, json.dumps(value, indent=indent) + "\n")


def _line(record: Mapping[str, Any] | str) -> str:
    return (record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)) + "\n"
