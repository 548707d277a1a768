"""Append JSON Lines. At any moment, and after a crash or on a full disk, the file holds whole lines.

`check_file`, `check_log` and `check_folder` find out, before any work, whether its results can be written. They return
what they are given, None too, so that they serve as callbacks of command line options."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

from paceline.errors import PacelineError


class Writer(Protocol):
    """Anything that records can be appended to."""

    def append(self, records: Iterable[Mapping[str, Any] | str]) -> None:
        """Write records (or lines without their ends)."""


class Appender:
    """Lines at the end of an unbuffered file: when `append` returns they are written.

    raw   opened for writing; closed with this. name is for messages; then follows "cannot be written" in a message."""

    def __init__(self, raw: FileIO, name: str, then: str = ""):
        self._raw, self._name, self._then = raw, name, then
        self._is_file = stat.S_ISREG(os.fstat(raw.fileno()).st_mode)

    @classmethod
    def open(cls, path: Path, *, new: bool = False, then: str = "") -> Appender:
        """At the end of `path`, made if it does not exist; new: it must not exist. PacelineError if that fails."""
        try:
            return cls(path.open("xb" if new else "a+b", buffering=0), str(path), then)
        except FileExistsError as error:
            raise PacelineError(f"{path} exists already; give another name, or remove it first") from error
        except OSError as error:
            raise PacelineError(f"{path} cannot be written: {error.strerror}") from error

    def append(self, records: Iterable[Mapping[str, Any] | str]) -> None:
        """Write records (or lines without their ends) in one piece. If that fails the file is as it was, and
        PacelineError says why; a pipe that nobody reads any more raises BrokenPipeError."""
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
            raise PacelineError(f"{self._name} cannot be written: {error.strerror}{self._then}") from error

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Stream:
    """Standard output without a file descriptor, such as a test's."""

    def append(self, records: Iterable[Mapping[str, Any] | str]) -> None:
        sys.stdout.write("".join(_line(record) for record in records))
        sys.stdout.flush()


def standard_output() -> Writer:
    """Lines to standard output."""
    sys.stdout.flush()
    try:
        return Appender(FileIO(os.dup(sys.stdout.fileno()), "w"), "standard output")
    except (OSError, ValueError):  # no file: io.UnsupportedOperation is both
        return _Stream()


def check_file(path: Path | None) -> Path | None:
    """PacelineError unless a file can be written at `path`, in place of the one there may be. Its folder must exist."""
    if path is not None:
        with _writing(path):
            if path.exists() and not path.is_file():
                what = "a folder" if path.is_dir() else "no regular file"
                raise PacelineError(f"{path} is {what}; name a file to write")
            _try_in(path.absolute().parent, path)
    return path


def check_log(path: Path | None) -> Path | None:
    """PacelineError unless lines can be appended to `path`: to a file as in `check_file`, or to a device or a pipe."""
    if path is None or not path.exists() or path.is_dir():
        return check_file(path)
    with _writing(path):
        if path.is_file():
            path.open("ab").close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(0, "Permission denied")
    return path


def check_folder(path: Path | None) -> Path | None:
    """PacelineError unless files can be written into the folder `path`, which may be made, its parents too."""
    if path is not None:
        with _writing(path):
            if path.exists() and not path.is_dir():
                raise PacelineError(f"{path} is a file; name a folder to write")
            _try_in(next(place for place in (path.absolute(), *path.absolute().parents) if place.exists()), path)
    return path


def check_new_folder(path: Path) -> Path:
    """`check_folder`, and PacelineError if there is something at `path`."""
    if path.exists():
        raise PacelineError(f"{path} exists already; name a new folder")
    check_folder(path)
    return path


def _try_in(folder: Path, path: Path) -> None:
    """Write a nameless file into `folder`: permissions alone do not say that it works."""
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
        raise PacelineError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a file to write, which then replaces `path` (its folder is made). So `path` is written whole
    or not at all, and keeps its old content if something fails. PacelineError if it cannot be written."""
    beside = path.with_name(f"{path.name}.part")
    try:
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield beside
            with beside.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(beside, path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there whole or not at all; PacelineError if that fails."""
    with replacing(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


def _line(record: Mapping[str, Any] | str) -> str:
    return (record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)) + "\n"
