"""Read a run from its folder, and write its findings as sentences and as a Markdown table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.metrics import BASELINE, OVERALL, summarize
from paceline.bench.record import ANSWERS, KIND, SUMMARY, read_answers, settled
from paceline.errors import PacelineError
from paceline.jsonl import loads
from paceline.peers import PEER
from paceline.runs.report import COLORS, macro, render
from paceline.runs.runs import RUN, read_about

WORDS, TABLE = (Path(__file__).with_name(name) for name in ("words.txt.jinja", "table.md.jinja"))
KIND_COLORS = {"ours": COLORS[0], "peer": COLORS[1], "plain": COLORS[10]}


@dataclass(frozen=True)
class Method:
    """A method of the run. facts: its entry in run.json; rows: its figures by category, "overall" included."""

    name: str
    facts: dict[str, Any]
    rows: dict[str, dict[str, Any]]

    @property
    def kind(self) -> str:
        """ours, peer, or plain for the baseline."""
        is_plain = self.name == BASELINE or self.facts.get("baseline")
        return "plain" if is_plain else "peer" if self.name.startswith(PEER) else "ours"

    @property
    def label(self) -> str:
        """The name without the prefix of peers, which have a mark."""
        return self.name.removeprefix(PEER)

    @property
    def color(self) -> str:
        return KIND_COLORS[self.kind]

    @property
    def lossless(self) -> bool:
        return bool(self.facts.get("lossless", True))

    @property
    def unavailable(self) -> str | None:
        """Why the method could not take part; None if it could."""
        return self.facts.get("unavailable")

    @property
    def failed(self) -> str | None:
        """Why the method did not answer everything; None if it did."""
        return self.get("failed")

    @property
    def why(self) -> str:
        """Why answers are missing: the method did not take part, failed, or is not asked yet; "" if none is missing."""
        if self.unavailable:
            return f"did not take part: {self.unavailable}"
        if self.failed and self.get("answers"):
            return f"failed after {self.get('answers')} answers: {self.failed}"
        return self.failed or ("" if self.rows else "no answers yet")

    def get(self, figure: str, category: str = OVERALL) -> Any:
        """A figure of a category; None if it is unknown."""
        return self.rows.get(category, {}).get(figure)


@dataclass(frozen=True)
class BenchRun:
    """A run's folder.

    about    run.json with its identity merged in; summary: summary.json.
    methods  fastest first; methods without a speed-up last, in the order of the run.
    tasks    in the order of the summary."""

    folder: Path
    about: dict[str, Any]
    summary: dict[str, Any]
    methods: list[Method]
    tasks: list[str]

    @property
    def model(self) -> str:
        return str(self.about.get("model_name") or self.about.get("model") or "unknown")

    @property
    def complete(self) -> bool:
        return bool(self.summary.get("complete"))

    @property
    def baseline(self) -> Method | None:
        """Plain decoding, or the server in its place; None if it has no answers."""
        return next((method for method in self.measured if method.kind == "plain"), None)

    @property
    def plain(self) -> str:
        """The name of the baseline: plain decoding, or the first of two servers."""
        return self.baseline.label if self.baseline and self.baseline.name != BASELINE else "plain decoding"

    @property
    def servers(self) -> list[Method]:
        """The methods, if they are running servers."""
        return [method for method in self.measured if "url" in method.facts.get("settings", {})]

    @property
    def loops(self) -> bool:
        """Whether any of plain decoding's answers ends in a loop."""
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
    """Read a run's folder, as far as `paceline bench --out folder` has written it.

    Raises PacelineError if it is no run's folder, or a file is broken. An answer cut off at the end is left out."""
    about = read_about(folder, KIND)
    about = {**about["identity"], **about}
    try:
        summary = _summary(folder, about.get("methods", []))
        methods = _methods(about.get("methods", []), summary["results"])
        tasks = list(dict.fromkeys(row["category"] for row in summary["results"] if row["category"] != OVERALL))
    except (TypeError, KeyError, AttributeError):
        raise PacelineError(f"{folder / RUN} and {SUMMARY} do not list methods and their results") from None
    return BenchRun(folder, about, summary, methods, tasks)


def _summary(folder: Path, methods: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Read summary.json, or work out the figures of a run that was killed before it was written."""
    file = folder / SUMMARY
    if not file.exists():
        answers, facts = settled(read_answers(folder / ANSWERS)), {str(of["method"]): of for of in methods}
        return {"complete": False, "disturbed": [], "results": summarize(answers, facts)}
    try:
        summary: dict[str, Any] = loads(file.read_bytes(), parse_constant=lambda _: None)
    except (OSError, ValueError) as error:
        raise PacelineError(f"{file} cannot be read: {error}") from None
    return summary


def _methods(facts: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[Method]:
    of = {row["method"]: row for row in facts}
    rows: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in of}
    for row in results:
        rows.setdefault(row["method"], {})[row["category"]] = row
    methods = [Method(name, of.get(name, {}), by_category) for name, by_category in rows.items()]
    return sorted(methods, key=lambda method: -(method.get("speedup") or 0.0))


def describe(what: str, run: BenchRun) -> str:
    """A run in words: "headline", "findings", "setting" or "machine" of words.txt.jinja."""
    return " ".join(macro(WORDS, what)(run).split())


def markdown(run: BenchRun) -> str:
    """A table for a README, the fastest first, then a line about the machine and one with the command."""
    return render(TABLE, run=run, setting=describe("setting", run), machine=describe("machine", run))
