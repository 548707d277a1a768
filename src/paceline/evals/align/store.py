"""A run's folder: append-only JSON Lines that survive anything, each row under a key of everything that matters.

    run.json            what was asked, as it was last asked
    generations.jsonl   one row a finished item and method
    judgements.jsonl    one row a judged answer and judge
    errors.jsonl        what failed, with why; it is tried again when the run goes on

A row is written in one piece; a last line that was cut off (kill -9, a full disk) is dropped when the folder is opened
again. Rows are never changed. Only their keys and places are kept in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import PacelineError
from paceline.jsonl import Appender, NotJSON, as_object, loads, write_whole

RUN, GENERATIONS, JUDGEMENTS, ERRORS = "run.json", "generations.jsonl", "judgements.jsonl", "errors.jsonl"
KIND = "align"
"""What run.json says of itself."""


class Lines:
    """Rows of a file by their "key"; a later row of a key takes the place of an earlier one."""

    def __init__(self, path: Path):
        self.path = path
        self._at: dict[str, int] = {}
        self._file = Appender.open(path, then="; what is there is safe, and the same command goes on")
        self._end = self._index()

    def _index(self) -> int:
        """Note where rows are; cut off a torn last line. Returns the file's length."""
        at = 0
        with self.path.open("r+b") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    lines.truncate(at)
                    break
                self._at[str(parse(line, self.path).get("key"))] = at
                at += len(line)
        return at

    def __contains__(self, key: str) -> bool:
        return key in self._at

    def __len__(self) -> int:
        return len(self._at)

    def get(self, key: str) -> dict[str, Any] | None:
        """The row of a key."""
        if key not in self._at:
            return None
        with self.path.open("rb") as lines:
            lines.seek(self._at[key])
            return parse(lines.readline(), self.path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row in one piece; if that fails the file is as it was."""
        line = json.dumps(row, ensure_ascii=False)
        self._file.append([line])
        self._at[str(row.get("key"))] = self._end
        self._end += len(line.encode()) + 1

    def close(self) -> None:
        self._file.close()


class Store:
    """The folder of a run under way; one process at a time."""

    def __init__(self, path: Path):
        self.path = path
        self.generations = Lines(path / GENERATIONS)
        self.judgements = Lines(path / JUDGEMENTS)
        self.errors = Lines(path / ERRORS)

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any]) -> Store:
        """Begin the run that `about` describes, or go on with it. about["identity"] is what may not change.

        Raises PacelineError if the folder holds something else, another run, or a run that is going on."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            _check(path, about)
            _lock(path)
            store = cls(path)
        except OSError as error:
            raise PacelineError(f"{path} cannot be written: {error.strerror}") from error
        write_whole(path / RUN, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        return store

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lines in (self.generations, self.judgements, self.errors):
            lines.close()
        _unlock(self.path)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Whole rows of a file, none if it is not there; what follows the last line end was cut off."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield parse(line, path)


def parse(line: bytes, path: Path) -> dict[str, Any]:
    """A line's object; PacelineError if it holds something else."""
    try:
        return as_object(line, "a row of a run")
    except NotJSON as error:
        raise PacelineError(f"{path} holds a line that is {error}; mend or remove that line") from None


def is_run(path: Path) -> bool:
    """Whether a folder holds an alignment run."""
    try:
        about = loads((path / RUN).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("kind") == KIND


def read_about(path: Path) -> dict[str, Any]:
    """run.json of a folder; PacelineError if it holds no alignment run."""
    if not is_run(path):
        raise PacelineError(f"{path} holds no alignment run; paceline eval align --out makes one")
    about: dict[str, Any] = loads((path / RUN).read_bytes())
    return about


def _check(path: Path, about: Mapping[str, Any]) -> None:
    if not (path / RUN).exists():
        if any(path.iterdir()):
            raise PacelineError(f"{path} holds other files and no run; name a new folder with --out")
        return
    before = read_about(path).get("identity") or {}
    now = json.loads(json.dumps(about["identity"]))
    for key in now:
        if before.get(key) != now[key]:
            raise PacelineError(
                f"{path} holds another run: its {key} was {_short(before.get(key))} and now is {_short(now[key])}; "
                "name a new folder with --out, or run the same command to go on"
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


_locks: dict[Path, Any] = {}


def _lock(path: Path) -> None:
    """Only one process at a time writes into a folder."""
    try:
        import fcntl
    except ImportError:  # not on this system; two runs in one folder are then the user's to avoid
        return
    file = (path / RUN).with_suffix(".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise PacelineError(f"another run is writing into {path}; wait for it, or name another folder") from None
    _locks[path] = file


def _unlock(path: Path) -> None:
    if path in _locks:
        _locks.pop(path).close()
