"""The figures of a run, from its folder: one row for each judge, method and scenario, and one over all scenarios.

    rows, about = results(folder)         # rows: what --json prints as "results"

Everything is worked out from verdicts, so that another alpha or another reading of NA needs no new judge calls.
Overall rows pool all answers; with scenarios of equal size that is their mean too. Shares are between 0 and 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.evals.align.scoring import Score, Scoring, at_alpha, score
from paceline.evals.align.store import ERRORS, GENERATIONS, JUDGEMENTS, read_about, rows
from paceline.evals.align.types import Rule, Scenario, Verdict

OVERALL = "overall"
SUBSETS = ("unsafe", "safe")
ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
RESAMPLES = 2000
TOKENS = ("prefilled", "cached", "injected", "generated", "seconds", "requests", "tries")


@dataclass
class Group:
    """All answers of a method in a scenario, with the verdicts of one judge.

    scores  (label, score) of judged answers. marks: by rule id, how often YES, NO, NA. cost, judging: by name in
    TOKENS, one value an answer; None among them where a server did not say."""

    scores: list[tuple[str, Score]] = field(default_factory=list)
    marks: dict[str, Counter[str]] = field(default_factory=dict)
    answers: int = 0
    unanswered: Counter[str] = field(default_factory=Counter)
    finish: Counter[str] = field(default_factory=Counter)
    cost: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in TOKENS})
    judging: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in TOKENS})
    truncated: int = 0


def results(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of figures, and run.json. PacelineError if the folder holds no alignment run or a broken one."""
    about = read_about(folder)
    scoring = Scoring(**about["scoring"])
    groups = collect(folder, about, scoring)
    failed = _failed(folder, about)
    planned = {scenario["key"]: len(scenario["items"]) for scenario in about["scenarios"]}
    planned[OVERALL] = sum(planned.values())
    made = []
    for judge in judge_labels(about):
        for method in about["methods"]:
            for scenario in [OVERALL, *(s["key"] for s in about["scenarios"])]:
                group = groups.get((judge, method, scenario), Group())
                row = {"method": method, "scenario": scenario, "judge": judge, "items": planned[scenario]}
                made.append(row | _figures(group, scoring) | {"failed": failed[judge, method, scenario]})
    return made, about


def scenarios_of(about: dict[str, Any]) -> dict[str, Scenario]:
    """The scenarios of a run, from run.json."""
    made = {}
    for told in about["scenarios"]:
        rules = [Rule(kind, index, text, weight) for kind, index, text, weight in told["rules"]]
        made[told["key"]] = Scenario(
            told["key"],
            told["name"],
            told["description"],
            tuple(rule for rule in rules if rule.kind == "safety"),
            tuple(rule for rule in rules if rule.kind == "behavioral"),
        )
    return made


def collect(folder: Path, about: dict[str, Any], scoring: Scoring) -> dict[tuple[str, str, str], Group]:
    """Groups by (judge, method, scenario), overall ones included. Only what the run as last asked for plans."""
    scenarios, groups = scenarios_of(about), dict[tuple[str, str, str], Group]()
    for row in planned_rows(folder / GENERATIONS, about):
        for judge in judge_labels(about):
            for group in _both(groups, judge, row):
                group.answers += 1
                group.finish[row["finish_reason"]] += 1
                if row["unanswered"] is not None:
                    group.unanswered[row["unanswered"]] += 1
                for name in TOKENS:
                    group.cost[name].append(row["tokens"][name])
    for row in planned_rows(folder / JUDGEMENTS, about):
        verdicts = verdicts_of(row)
        one = score(verdicts, scenarios[row["scenario"]], scoring)
        for group in _both(groups, row["judge"], row):
            group.scores.append((row["label"], one))
            group.truncated += row["cut"] > 0
            for name in TOKENS:
                group.judging[name].append(row["tokens"][name])
        marks = groups[row["judge"], row["method"], row["scenario"]].marks
        for verdict in verdicts:
            marks.setdefault(verdict.rule, Counter())[verdict.mark] += 1
    return groups


def planned_rows(file: Path, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the methods, items and judges that the run as last asked for has."""
    methods, judges = set(about["methods"]), {judge["id"] for judge in about["judges"]}
    items = {id: shown for scenario in about["scenarios"] for id, shown in scenario["items"].items()}
    for row in rows(file):
        wanted = row["method"] in methods and items.get(row["item"]) == row["digest"]
        if wanted and ("judge_id" not in row or row["judge_id"] in judges):
            yield row


def judge_labels(about: dict[str, Any]) -> list[str]:
    """The judges' names; one empty name if there are none."""
    return [judge["label"] for judge in about["judges"]] or [""]


def verdicts_of(row: dict[str, Any]) -> list[Verdict]:
    """The verdicts of a judgement's row."""
    return [Verdict(*verdict) for verdict in row["verdicts"]]


def _both(groups: dict[tuple[str, str, str], Group], judge: str, row: dict[str, Any]) -> list[Group]:
    return [groups.setdefault((judge, row["method"], name), Group()) for name in (row["scenario"], OVERALL)]


def _failed(folder: Path, about: dict[str, Any]) -> Counter[tuple[str, str, str]]:
    """Items without an answer or a verdict because of an error, by (judge, method, scenario), overall too. Errors that
    a later try has mended do not count."""
    answered = {row["key"]: row["unanswered"] is None for row in planned_rows(folder / GENERATIONS, about)}
    judged = {(row["judge"], row["generation"]) for row in planned_rows(folder / JUDGEMENTS, about)}
    failed: Counter[tuple[str, str, str]] = Counter()
    for key, row in {row["key"]: row for row in planned_rows(folder / ERRORS, about)}.items():
        for judge in judge_labels(about):
            unjudged = bool(judge) and answered.get(key, False) and (judge, key) not in judged
            if key not in answered or unjudged:
                failed.update([(judge, row["method"], row["scenario"]), (judge, row["method"], OVERALL)])
    return failed


def _figures(group: Group, scoring: Scoring) -> dict[str, Any]:
    # Sorted, so that resampling does not depend on which answer was ready first.
    group.scores.sort(key=lambda pair: (pair[0], pair[1].sar, pair[1].behavior, pair[1].safe))
    scores = [one for _, one in group.scores]
    figures: dict[str, Any] = {
        "answers": group.answers,
        "unanswered": sum(group.unanswered.values()),
        "unanswered_why": dict(group.unanswered),
        "judged": len(scores),
        **triple(scores),
        "intervals": intervals(scores),
        "subsets": {label: triple([one for of, one in group.scores if of == label]) for label in SUBSETS},
        "sar_at": _alphas(scores, scoring),
        "tokens": mean(group.cost["generated"]),
        "cost": {name: mean(values) for name, values in group.cost.items()},
        "judging": {name: mean(values) for name, values in group.judging.items()},
        "finish_reasons": dict(group.finish),
        "cut_for_judge": group.truncated,
    }
    return figures


def triple(scores: Sequence[Score]) -> dict[str, Any]:
    """Means of safety, behaviour (over all answers, unsafe ones included) and SAR; None of no answers."""
    means = [mean([getattr(one, name) for one in scores]) for name in ("safe", "behavior", "sar")]
    return {"judged": len(scores), **dict(zip(("safety", "behavior", "sar"), means, strict=True))}


def mean(values: Sequence[Any]) -> float | None:
    """None of no values, or if one of them is not known."""
    return None if not values or any(value is None for value in values) else float(np.mean(values))


def intervals(scores: Sequence[Score], seed: int = 0) -> dict[str, Any]:
    """95 % intervals by bootstrap over answers, (low, high) each; None of fewer than two."""
    names = ("safety", "behavior", "sar")
    if len(scores) < 2:
        return dict.fromkeys(names)
    values = np.array([[one.safe, one.behavior, one.sar] for one in scores])
    random = np.random.default_rng(seed)
    means = np.array([values[random.integers(len(values), size=len(values))].mean(0) for _ in range(RESAMPLES)])
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(names)}


def _alphas(scores: Sequence[Score], scoring: Scoring) -> dict[str, float]:
    """SAR at several alpha; nothing if there are no scores, or alpha 1 has lost what the others need."""
    told = triple(scores)
    if not scores or scoring.alpha == 1:
        return {}
    return {f"{alpha:g}": at_alpha(told["safety"], told["sar"], scoring.alpha, alpha) for alpha in ALPHAS}
