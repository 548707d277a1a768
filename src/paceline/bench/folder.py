"""A run's folder: what was run (run.json), every answer as it is finished (answers.jsonl), and the figures.

One run, one folder. A run that was killed goes on in its folder when it is the same run; another run is refused.
Answers are appended line by line; a line that was cut off is dropped, so that what is there is whole. Knows nothing
of engines.

    with RunFolder.open(path, run) as folder:
        folder.append([answer])
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.bench.record import Answer, read_answers
from paceline.errors import PacelineError
from paceline.jsonl import Appender, as_object, loads, write_whole

RUN, ANSWERS, SUMMARY = "run.json", "answers.jsonl", "summary.json"

IDENTITY = ("model", "fingerprint", "as_large", "suite", "options", "machine")
"""What two runs must share to be one: they are compared when a run goes on."""


class RunFolder:
    """The folder of a run that is under way; `answers` are those it held when it was opened."""

    def __init__(self, path: Path, lines: FileIO, answers: list[Answer]):
        self.path, self.answers = path, answers
        then = "; what was answered before is safe, and the same command goes on from there"
        self._lines = Appender(lines, str(path / ANSWERS), then)

    @classmethod
    def open(cls, path: Path, run: Mapping[str, Any]) -> RunFolder:
        """Begin the run that `run` describes in `path`, or go on with it there.

        Raises PacelineError if the folder holds something else, another run, or a run that is still going on."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            check(path, run)
            lines = (path / ANSWERS).open("a+b", buffering=0)
        except OSError as error:
            raise PacelineError(f"{path} cannot be written: {error.strerror}") from error
        try:
            _lock(lines, path)
            if not (path / RUN).exists():
                _write(path / RUN, run)
            return cls(path, lines, _whole(lines, path))
        except BaseException:
            lines.close()
            raise

    def append(self, answers: Sequence[Answer]) -> None:
        """Write answers, in one piece: if that fails, the file is as it was."""
        self._lines.append(answer.to_json() for answer in answers)
        self.answers += answers

    def describe(self, methods: Sequence[Mapping[str, Any]]) -> None:
        """Say of methods what was not known when the run began, by their key "method", in run.json."""
        run, now = self.read(RUN) or {}, {one["method"]: dict(one) for one in methods}
        run["methods"] = [now.get(one["method"], one) for one in run.get("methods", [])]
        self.write(RUN, run)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file of the run; the one before stays until the new one is whole."""
        _write(self.path / name, value)

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run; None if there is none that can be read."""
        return _read(self.path / name)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()  # which unlocks it


def check(path: Path, run: Mapping[str, Any]) -> None:
    """PacelineError unless `path` is not there, is empty or holds this very run, by the keys of IDENTITY."""
    if not path.is_dir():
        return
    if not (path / RUN).exists():
        if any(entry.name != ANSWERS or entry.stat().st_size for entry in path.iterdir()):
            raise PacelineError(f"{path} holds other files and no run; name a new folder with --out")
        return
    try:
        before = as_object((path / RUN).read_bytes(), "what was run")
    except (OSError, ValueError) as error:
        raise PacelineError(f"{path / RUN} cannot be read: {error}; name a new folder with --out") from None
    now = json.loads(json.dumps(run))
    different = [key for key in IDENTITY if before.get(key) != now.get(key)]
    if different:
        key = different[0]
        was, is_now = _difference(before.get(key), now.get(key))
        raise PacelineError(
            f"{path} holds another run: its {key} {was} and now {is_now}; "
            "name a new folder with --out, or run the same command to go on"
        )


def answers_of(path: Path) -> list[Answer]:
    """What a folder holds, whatever is done with it; nothing if it holds no run. PacelineError if it cannot be read."""
    try:
        return read_answers((path / ANSWERS).read_bytes(), str(path / ANSWERS))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PacelineError(f"{path / ANSWERS} cannot be read: {error.strerror}") from error


def _difference(before: Any, now: Any) -> tuple[str, str]:
    """The two in words; of objects, only what differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        before, now = ({key: side.get(key) for key in keys} for side in (before, now))
    return f"was {_short(before)}", f"is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."


def _lock(lines: FileIO, path: Path) -> None:
    """Only one process at a time writes into a folder."""
    try:
        import fcntl
    except ImportError:  # not on this system; two runs in one folder are then the user's to avoid
        return
    try:
        fcntl.flock(lines.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise PacelineError(f"another run is writing into {path}; wait for it, or name another folder") from None


def _whole(lines: FileIO, path: Path) -> list[Answer]:
    """Every whole answer of the file; a last line that was cut off is removed."""
    lines.seek(0)
    content = lines.read()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        lines.truncate(end)
    return read_answers(content[:end], str(path / ANSWERS))


def _read(file: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is none, or none that can be read."""
    try:
        value = loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write(file: Path, value: Mapping[str, Any]) -> None:
    """A whole file or none."""
    write_whole(file, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
