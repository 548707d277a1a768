"""Runs: the folder of a long piece of work, which survives kill -9 and a full disk and goes on where it stopped.

    run.json       what was asked: {"kind": ..., "identity": {...}, ...}
    NAME.jsonl     rows, appended as they are finished

A row is written in one piece. A last line that was cut off is dropped when its file is opened again."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any, Self

from paceline.errors import PacelineError
from paceline.jsonl import NotJSON, as_object, loads
from paceline.outputs import RECORDS, Appender, Closing, check_folder, lock, write_whole

RUN = "run.json"
ENOUGH = 6
"""Questions below which a figure has no 95 % interval: not even from the least of five to the greatest is so sure."""
GO_ON = "; what is there is safe, and the same command goes on"


class Lines(Closing):
    """The rows of a JSON Lines file, by the value of one of their fields; a later row replaces an earlier one with the
    same key. Only keys and places are kept in memory.

    key     the field; a row without it can be read in order, but not found.
    begins  how rows begin: by default with that field."""

    def __init__(self, path: Path, key: str = "key", begins: bytes = b""):
        self.path, self._key = path, key
        self._at: dict[str, int] = {}
        self._file = Appender.open(path, begins or f'{{"{key}"'.encode(), then=GO_ON)
        self._end = 0
        with path.open("rb") as file:
            for line in file:
                self._note(parse(line, path), len(line))

    def _note(self, row: Mapping[str, Any], size: int) -> None:
        if self._key in row:
            self._at[str(row[self._key])] = self._end
        self._end += size

    def __contains__(self, key: str) -> bool:
        return key in self._at

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._at)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All rows in their order, replaced ones too."""
        return rows(self.path)

    def get(self, key: str) -> dict[str, Any] | None:
        """The last row of a key; None if there is none."""
        if key not in self._at:
            return None
        with self.path.open("rb") as file:
            file.seek(self._at[key])
            return parse(file.readline(), self.path)

    def append(self, *new: Mapping[str, Any]) -> None:
        """Write rows in one piece. If that fails the file is as it was, and PacelineError says why."""
        lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in new]
        self._file.append(lines)
        for row, line in zip(new, lines, strict=True):
            self._note(row, len(line.encode()) + 1)

    def close(self) -> None:
        self._file.close()


class Run(Closing):
    """The folder of a run that is under way. One process at a time writes into it."""

    def __init__(self, path: Path, lock: FileIO):
        self.path, self._lock = path, lock
        self._lines: list[Lines] = []

    @classmethod
    def open(cls, path: Path, kind: str, identity: Mapping[str, Any], **about: Any) -> Self:
        """Begin a run of a kind, such as "bench", in `path`, or go on with it there.

        identity  what must be the same for a run to go on. about: what else run.json says when it begins.

        Raises PacelineError if the folder holds something else, another run, or a run that is still going on."""
        check(path, kind, identity)
        try:
            path.mkdir(parents=True, exist_ok=True)
            held = (path / ".lock").open("ab", buffering=0)
        except OSError as error:
            raise PacelineError(f"{path} cannot be written: {error.strerror}") from None
        run = cls(path, held)
        try:
            lock(held, f"another run is writing into {path}; wait for it, or name another folder")
            if not (path / RUN).exists():
                run.write(RUN, {"kind": kind, "identity": identity, **about})
        except BaseException:
            run.close()
            raise
        return run

    def lines(self, name: str, key: str = "key") -> Lines:
        """The rows of a file of the run; closed with it."""
        self._lines.append(Lines(self.path / name, key, RECORDS))
        return self._lines[-1]

    def update(self, **about: Any) -> None:
        """Say more in run.json, or something else."""
        self.write(RUN, {**(self.read(RUN) or {}), **about})

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file of the run; the one before stays until the new one is whole."""
        write_whole(self.path / name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def read(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file of the run; None if it is missing or unreadable."""
        return _read(self.path / name)

    def close(self) -> None:
        """Close the run's files and unlock the folder."""
        for lines in self._lines:
            lines.close()
        self._lock.close()


def new_folder(name: str) -> Path:
    """Make a folder for a run without one: runs/NAME-DATE-TIME. Raises PacelineError if it cannot be made."""
    folder = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    check_folder(folder)
    return folder


def check(path: Path, kind: str, identity: Mapping[str, Any]) -> None:
    """Raise PacelineError unless a run of this kind and identity can begin or go on in `path`. Writes nothing."""
    if not path.is_dir():
        return
    if not (path / RUN).exists():
        if any(entry.stat().st_size for entry in path.iterdir()):
            raise PacelineError(f"{path} holds other files and no run; name a new folder with --out")
        return
    check_identity(read_about(path, kind).get("identity") or {}, identity, str(path), "name a new folder with --out")


def check_identity(before: Mapping[str, Any], now: Mapping[str, Any], where: str, instead: str) -> None:
    """Raise PacelineError that names the first difference of two descriptions of a run.

    instead  what to do for another run, for the message."""
    now = json.loads(json.dumps(now))
    for key in now:
        if before.get(key) != now[key]:
            was, is_now = _difference(before.get(key), now[key])
            change = f"its {key} was {was} and now is {is_now}"
            raise PacelineError(f"{where} holds another run: {change}; {instead}, or run the same command to go on")


def is_run(path: Path, kind: str) -> bool:
    """Whether a folder holds a run of this kind."""
    return (_read(path / RUN) or {}).get("kind") == kind


def read_about(path: Path, kind: str) -> dict[str, Any]:
    """Read run.json of a folder. Raises PacelineError if it holds no run of this kind."""
    about = _read(path / RUN)
    if about is None or "identity" not in about:
        raise PacelineError(f"{path / RUN} cannot be read; name the folder of a run")
    if about.get("kind") != kind:
        raise PacelineError(f"{path} holds a run of the kind {about.get('kind')!r}, not {kind!r}")
    return about


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Whole rows of a file in their order, none if it is not there. What follows the last line end was cut off."""
    try:
        with path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield parse(line, path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise PacelineError(f"{path} cannot be read: {error.strerror}") from None


def parse(line: bytes, path: Path) -> dict[str, Any]:
    """Parse a line's object. Raises PacelineError if it holds anything else."""
    try:
        return as_object(line, "a row of a run")
    except NotJSON as error:
        raise PacelineError(f"{path} holds a line that is {error}; mend or remove that line") from None


def _read(file: Path) -> dict[str, Any] | None:
    try:
        value = loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _difference(before: Any, now: Any) -> tuple[str, str]:
    """Two values as text; of objects, only what differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        before, now = ({key: side.get(key) for key in keys} for side in (before, now))
    return _short(before), _short(now)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."
