"""A run as a report reads it: methods, figures and some answers, from the files in its folder.

    run = read_run(Path("out/run"))
    run.ranked[0].get("speedup")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.folder import ANSWERS, RUN, SUMMARY
from paceline.bench.metrics import BASELINE, OVERALL
from paceline.bench.record import PEER, Answer
from paceline.errors import PacelineError
from paceline.jsonl import loads
from paceline.pages.plots import COLORS

KIND_COLORS = {"ours": COLORS[0], "peer": COLORS[1], "plain": COLORS[10]}


@dataclass(frozen=True)
class Method:
    """A method of the run. facts: what run.json says of it; rows: its figures by category, "overall" among them."""

    name: str
    facts: dict[str, Any]
    rows: dict[str, dict[str, Any]]

    @property
    def kind(self) -> str:
        """ours, peer, or plain for the baseline."""
        return "plain" if self.name == BASELINE else "peer" if self.name.startswith(PEER) else "ours"

    @property
    def label(self) -> str:
        """The name without what its mark says already."""
        return self.name.removeprefix(PEER)

    @property
    def color(self) -> str:
        return KIND_COLORS[self.kind]

    @property
    def lossless(self) -> bool:
        return bool(self.facts.get("lossless", True))

    @property
    def unavailable(self) -> str | None:
        """Why it could not take part."""
        return self.facts.get("unavailable")

    @property
    def failed(self) -> str | None:
        """Why it did not answer everything."""
        return self.get("failed")

    @property
    def why(self) -> str:
        """Why there is not a full set of answers, empty if there is: one that was not there, failed, or is to come."""
        if self.unavailable:
            return f"did not take part: {self.unavailable}"
        if self.failed and self.get("answers"):
            return f"failed after {self.get('answers')} answers: {self.failed}"
        return self.failed or ("" if self.rows else "no answers yet")

    def get(self, figure: str, category: str = OVERALL) -> Any:
        """A figure; None if there is none."""
        return self.rows.get(category, {}).get(figure)


@dataclass(frozen=True)
class BenchRun:
    """What a run's folder holds.

    about    run.json; summary  summary.json, as they were written.
    methods  the fastest first; those without a speed-up last, in the order of the run.
    tasks    in the order of the summary.
    shown    of each task the first question answered, by method."""

    folder: Path
    about: dict[str, Any]
    summary: dict[str, Any]
    methods: list[Method]
    tasks: list[str]
    shown: dict[str, dict[str, Answer]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return bool(self.summary.get("complete"))

    @property
    def baseline(self) -> Method | None:
        """Plain decoding; None without answers of it."""
        return next((method for method in self.measured if method.kind == "plain"), None)

    @property
    def loops(self) -> bool:
        """Whether some of plain decoding's answers run into a loop."""
        return bool(self.baseline and self.baseline.get("looping"))

    @property
    def measured(self) -> list[Method]:
        """Methods with figures."""
        return [method for method in self.methods if method.get("tokens_per_second") is not None]

    @property
    def ranked(self) -> list[Method]:
        """Lossless methods that answered every question and can be compared with plain decoding, the fastest first."""
        return [
            method
            for method in self.measured
            if method.kind != "plain" and method.lossless and not method.failed and method.get("speedup") is not None
        ]


def read_run(folder: Path) -> BenchRun:
    """Read what `paceline bench --out folder` has written so far.

    Raises PacelineError if it is not a run's folder, or one of its files is broken. A last answer that was cut off is
    left out."""
    if not (folder / RUN).is_file():
        raise PacelineError(f"{folder} is not the folder of a run: it has no {RUN}; paceline bench --out makes one")
    if not (folder / SUMMARY).is_file():
        raise PacelineError(f"{folder} has no {SUMMARY} yet; run the command of the benchmark again, and it goes on")
    about, summary = _read_object(folder / RUN), _read_object(folder / SUMMARY)
    results = summary.get("results")
    if not isinstance(results, list) or not all(isinstance(row, dict) and _is_named(row) for row in results):
        raise PacelineError(f'{folder / SUMMARY} is not a summary: "results" must list objects by method and category')
    facts = about.get("methods", [])
    if not isinstance(facts, list) or not all(isinstance(row, dict) and "method" in row for row in facts):
        raise PacelineError(f'{folder / RUN} does not describe a run: "methods" must list objects with a "method"')
    tasks = list(dict.fromkeys(row["category"] for row in results if row["category"] != OVERALL))
    return BenchRun(folder, about, summary, _methods(facts, results), tasks, _first_answers(folder / ANSWERS))


def _is_named(row: dict[str, Any]) -> bool:
    return isinstance(row.get("method"), str) and isinstance(row.get("category"), str)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = loads(file.read_bytes(), parse_constant=lambda _: None)
    except (OSError, ValueError) as error:
        raise PacelineError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise PacelineError(f"{file} is not one JSON object")
    return value


def _methods(facts: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[Method]:
    of = {row["method"]: row for row in facts}
    rows: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in of}
    for row in results:
        rows.setdefault(row["method"], {})[row["category"]] = row
    methods = [Method(name, of.get(name, {}), by_category) for name, by_category in rows.items()]
    return sorted(methods, key=lambda method: -(method.get("speedup") or 0.0))


def _first_answers(file: Path) -> dict[str, dict[str, Answer]]:
    """Of each task the first question in the file, and every method's first answer to it."""
    first: dict[str, dict[str, Answer]] = {}
    question: dict[str, str] = {}
    for answer in _answers(file):
        if question.setdefault(answer.task, answer.question) == answer.question and not answer.failed:
            first.setdefault(answer.task, {}).setdefault(answer.method, answer)
    return first


def _answers(file: Path) -> Iterator[Answer]:
    """Whole lines; what follows the last end of a line was cut off."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield Answer.from_json(line.decode())
                except (PacelineError, UnicodeDecodeError) as error:
                    raise PacelineError(f"{file}, line {number}: {error}") from None
    except OSError as error:
        raise PacelineError(f"{file} cannot be read: {error.strerror}") from None
