"""The figures of a replay by drafter and category, the predicted speed-up, and the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from paceline.core.tree import Floats
from paceline.draft.cost import forward_times
from paceline.errors import PacelineError
from paceline.jsonl import loads
from paceline.logs.conversations import Reading
from paceline.logs.transcript import Transcript
from paceline.replay.walk import ReplayTally
from paceline.runs import report as pages
from paceline.runs.report import COLORS, Bar, Bars, Curve, Part, Plots, Section, Table, by_depth, dotted, marked, plot

REPLAY = "replay.json"
OVERALL = "overall"  # The category of all conversations together.
FIGURES = {
    "mean_accepted_tokens": 4, "answers": 0, "rounds": 0, "new_tokens": 0, "draft_rate": 4, "verified_per_round": 3,
    "verified_per_token": 3, "draft_us_per_round": 2,
}  # fmt: skip
"""Reported figures of a tally, each with its decimals."""


class Done(NamedTuple):
    """The tally of a conversation with a drafter, both given by number."""

    spec: int
    conversation: int
    tally: ReplayTally


class Report:
    """The tallies so far, by drafter and category. reading: counts of read and skipped lines of the recording."""

    def __init__(self, specs: Sequence[str], transcripts: Sequence[Transcript] = (), reading: Reading | None = None):
        self.specs, self.reading = list(specs), reading or Reading()
        self._of = [transcript.category for transcript in transcripts]
        self._answers = [sum(len(transcript.turns) for transcript in transcripts)] * len(specs)
        self.categories = [*dict.fromkeys(name for name in self._of if name not in ("", OVERALL)), OVERALL]
        self.tallies: defaultdict[tuple[int, str], ReplayTally] = defaultdict(ReplayTally)

    def add(self, done: Done) -> None:
        """Count one conversation."""
        for name in {self._of[done.conversation] or OVERALL, OVERALL}:
            self.tallies[done.spec, name] += done.tally

    def merge(self, other: Report, numbers: Sequence[int]) -> None:
        """Add the tallies of `other`, a report of other conversations.
        numbers: its drafters' numbers in this report."""
        if 0 in numbers:  # Every drafter reads all pieces, so the first counts them.
            self.reading += other.reading
        self.categories[-1:] = [*(name for name in other.categories if name not in self.categories), OVERALL]
        for (s, name), tally in other.tallies.items():
            self.tallies[numbers[s], name] += tally
        for s, number in enumerate(numbers):
            self._answers[number] += other._answers[s]

    def redact(self) -> None:
        """Replace the names of categories by numbers."""
        names = {name: f"category {i}" for i, name in enumerate(self.categories[:-1], 1)} | {OVERALL: OVERALL}
        self.tallies = defaultdict(ReplayTally, {(s, names[name]): tally for (s, name), tally in self.tallies.items()})
        self.categories = [*names.values()]

    @property
    def overall(self) -> list[ReplayTally]:
        """Each drafter's tally over all categories."""
        return [self.tallies[s, OVERALL] for s in range(len(self.specs))]

    @property
    def answers(self) -> int:
        """Answers in the recording."""
        return max(self._answers, default=0)

    @property
    def is_complete(self) -> bool:
        """Whether every drafter has replayed every answer."""
        return all(tally.answers == self.answers for tally in self.overall)

    def results(self, cost: Cost | None = None) -> list[dict[str, Any]]:
        """An object for every drafter and category with answers, as `--json` prints it."""
        return [
            _result(spec, category, self.tallies[s, category], cost)
            for s, spec in enumerate(self.specs)
            for category in self.categories
            if self.tallies[s, category].answers
        ]


def _result(spec: str, category: str, tally: ReplayTally, cost: Cost | None) -> dict[str, Any]:
    result: dict[str, Any] = {"draft": spec, "category": category}
    result |= {name: round(getattr(tally, name), digits) for name, digits in FIGURES.items()}
    result["accepted_by_depth"] = [round(share, 4) for share in tally.accepted_by_depth()]
    if cost is not None:
        result["predicted_speedup"] = round(predict(tally, cost), 3)
    return result


class Cost(NamedTuple):
    """Cost of rounds.

    forwards    times of forwards by their nodes, in units of a forward over one node.
    forward_ms  milliseconds of that unit; None: drafting counts as free."""

    forwards: Floats
    forward_ms: float | None = None


def predict(tally: ReplayTally, cost: Cost) -> float:
    """Speed-up over plain decoding, one request at a time. A round costs a forward over its nodes, and drafting."""
    if not tally.rounds:
        return 1.0
    times = cost.forwards
    drafting = 0.0 if cost.forward_ms is None else 1e3 * tally.seconds / cost.forward_ms
    return float(tally.new_tokens * times[1] / (tally.sizes @ times[: len(tally.sizes)] + drafting))


def read_cost(text: str, forward_ms: float | None = None) -> Cost:
    """Read `flat` (nodes are free), `linear:X` (each node after the first costs X of a forward), or a JSON file of
    {"nodes": time}, in any unit, with an entry for "1". Raises PacelineError for anything else."""
    if text == "flat":
        return Cost(forward_times({1: 1.0}), forward_ms)
    if text.startswith("linear:"):
        try:
            step = float(text.removeprefix("linear:"))
        except ValueError:
            step = -1.0
        if not 0 <= step < np.inf:
            raise PacelineError(f"--verify-cost {text}: linear:X wants a number, 0 or more, such as linear:0.01")
        return Cost(forward_times({1: 1.0, 2: 1.0 + step}), forward_ms)
    try:
        entries = loads(Path(text).read_bytes())
        table = dict(sorted((int(nodes), float(time)) for nodes, time in entries.items()))
    except OSError:
        raise PacelineError(f"--verify-cost {text}: no such file; give flat, linear:X or a JSON file") from None
    except (ValueError, AttributeError, TypeError):
        raise PacelineError(f'{text} is not a table of verification costs such as {{"1": 23.1, "64": 31.0}}') from None
    if min(table, default=0) != 1 or not all(0 < time < np.inf for time in table.values()):
        raise PacelineError(f'{text} must have an entry for "1" node, the plain forward, and times above 0')
    return Cost(forward_times({nodes: time / table[1] for nodes, time in table.items()}), forward_ms)


COLUMNS = """tokens\na round = mean_accepted_tokens:3; rounds with\na draft = draft_rate:%1;
nodes\na round = verified_per_round:1; verified\na token = verified_per_token:2;
drafter\nµs a round = draft_us_per_round:1"""
MEANING = (
    "Tokens a round: new tokens for each forward of the model, its own token included; plain decoding is 1. Verified a "
    "token: tokens the model looks at for each one it keeps; plain decoding is 1. Drafter: its own time, on one core "
    "of the machine that replayed. A greedy model accepts a drafted token exactly if it is the next one of its answer, "
    "so for drafters that look at tokens alone these are the figures they have with the model."
)


def page(report: dict[str, Any]) -> str:
    """The HTML page of a report as `paceline replay --json` prints it."""
    results = report["results"]
    specs = list(dict.fromkeys(result["draft"] for result in results))
    color_of = {spec: COLORS[i % len(COLORS)] for i, spec in enumerate(specs)}
    overall = [result for result in results if result["category"] == OVERALL]
    template = f", template {report['template']}" if report["template"] else ""
    facts: list[Part] = [f"{report['answers']:,} recorded answers, tokenizer {report['tokenizer']}{template}."]
    if not report["complete"]:
        facts.append(marked("p", "Interrupted: not every answer was replayed with every drafter.", "warn"))
    facts += [f"Note: {note}." for note in report.get("notes", ())]
    plots = Plots([
        ("What a round yields, and what it verifies for it", _nodes(overall, report["variants"], color_of)),
        ("Drafts accepted to a depth, of those that reach it", _depths(overall, color_of)),
    ])
    by_category: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_category.setdefault(result["category"], []).append(result)
    sections = [
        Section("Overall", [_table(overall, color_of, report["complete"]), plots]),
        Section("Tokens a round, by category", [_bars(by_category, color_of)] if len(by_category) > 1 else []),
        Section("What the figures mean", [MEANING]),
    ]
    return pages.Report(f"Replay of {PurePath(report['trace']).name}", facts, sections).html()


def _table(overall: Sequence[dict[str, Any]], color_of: Mapping[str, str], complete: bool) -> Table:
    counts = ["" if complete else f" ({r['answers']:,} answers)" for r in overall]
    names = [dotted(color_of[r["draft"]], r["draft"] + count) for r, count in zip(overall, counts, strict=True)]
    predicted = "; predicted\nspeed-up = predicted_speedup:2" if overall and "predicted_speedup" in overall[0] else ""
    return Table.of(overall, COLUMNS + predicted, ("drafter", names))


def _bars(by_category: Mapping[str, Sequence[dict[str, Any]]], color_of: Mapping[str, str]) -> Bars:
    most = max(r["mean_accepted_tokens"] for rows in by_category.values() for r in rows)

    def bar(r: dict[str, Any]) -> Bar:
        value, name = r["mean_accepted_tokens"], r["draft"]
        return Bar(name, f"{value:.2f}", value / most, color_of[name], f"{name}: {value:.3f}")

    return Bars([(category, [bar(r) for r in rows]) for category, rows in by_category.items()])


def _depths(overall: Sequence[dict[str, Any]], color_of: dict[str, str]) -> Markup:
    """Plot the share of drafts accepted to each depth, of those that reach it."""
    lines = [by_depth(r["accepted_by_depth"], r["draft"], color_of[r["draft"]]) for r in overall]
    return plot([line for line in lines if line.points], "depth of the draft", "accepted to that depth, %")


def _nodes(overall: Sequence[dict[str, Any]], base_of: Mapping[str, str], color_of: dict[str, str]) -> Markup:
    """Plot tokens a round over nodes verified a round."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in overall:
        groups.setdefault(base_of[result["draft"]], []).append(result)
    lines = []
    for base, group in groups.items():
        group.sort(key=lambda result: float(result["verified_per_round"]))
        tip = "{draft}: {mean_accepted_tokens:.3f} tokens from {verified_per_round:.1f} nodes a round"
        tips = [tip.format(**result) for result in group]
        points = [(r["verified_per_round"], r["mean_accepted_tokens"]) for r in group]
        lines.append(Curve(points, tips, [color_of[r["draft"]] for r in group], base))
    return plot(lines, "nodes verified a round, the root included", "tokens a round")
