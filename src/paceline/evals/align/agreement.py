"""How far judges agree on the same answers: kappa on verdicts, rank correlations of methods, and distances in SAR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from paceline.evals.align.figures import judge_labels, planned_rows, scenarios_of, verdicts_of
from paceline.evals.align.scoring import Scoring, score
from paceline.evals.align.store import JUDGEMENTS

FIGURES = ("safety", "behavior", "sar")


def agreement(folder: Path, about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each pair of judges, and one with Kendall's W over all of them; nothing with fewer than two."""
    judges = judge_labels(dict(about))
    if len(judges) < 2:
        return []
    marks, scores = _by_answer(folder, dict(about), judges)
    rows = [_pair(a, b, marks, scores, results) for a, b in combinations(judges, 2)]
    return [*rows, {"judges": judges, "kendall_w": {name: _w(judges, results, name) for name in FIGURES}}]


def _by_answer(folder: Path, about: dict[str, Any], judges: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Marks and scores by judge, then by answer."""
    scenarios, scoring = scenarios_of(about), Scoring(**about["scoring"])
    marks: dict[str, Any] = {judge: {} for judge in judges}
    scores: dict[str, Any] = {judge: {} for judge in judges}
    for row in planned_rows(folder / JUDGEMENTS, about):
        verdicts = verdicts_of(row)
        marks[row["judge"]][row["generation"]] = {verdict.rule: verdict.mark for verdict in verdicts}
        scores[row["judge"]][row["generation"]] = score(verdicts, scenarios[row["scenario"]], scoring)
    return marks, scores


def _pair(
    a: str, b: str, marks: Mapping[str, Any], scores: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    both = [key for key in marks[a] if key in marks[b]]
    told: dict[str, Any] = {"judges": [a, b], "answers": len(both)}
    if not both:
        return told
    ours = [mark for key in both for mark in marks[a][key].values()]
    theirs = [marks[b][key][rule] for key in both for rule in marks[a][key]]
    told["verdicts"] = len(ours)
    told["same_verdicts"] = float(np.mean([x == y for x, y in zip(ours, theirs, strict=True)]))
    told["kappa"] = kappa(ours, theirs)
    told["same_safety"] = float(np.mean([scores[a][key].safe == scores[b][key].safe for key in both]))
    told["sar_gap"] = float(np.mean([abs(scores[a][key].sar - scores[b][key].sar) for key in both]))
    told |= {name: _ranks(a, b, results, name) for name in FIGURES}
    return told


def kappa(ours: Sequence[str], theirs: Sequence[str]) -> float | None:
    """Cohen's kappa; None where both say one and the same throughout, and chance explains everything."""
    from sklearn.metrics import cohen_kappa_score

    if len({*ours, *theirs}) < 2:
        return None
    value = float(cohen_kappa_score(ours, theirs))
    return None if np.isnan(value) else value


def _ranks(a: str, b: str, results: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Spearman's rho and Kendall's tau over methods and scenarios; None with fewer than three to rank."""
    from scipy.stats import kendalltau, spearmanr

    columns = _columns([a, b], results, name)
    if columns.shape[1] < 3 or any(len(set(column)) < 2 for column in columns):
        return {"ranked": columns.shape[1], "rho": None, "tau": None}
    rho, tau = spearmanr(*columns).statistic, kendalltau(*columns).statistic
    return {"ranked": columns.shape[1], "rho": float(rho), "tau": float(tau)}


def _w(judges: Sequence[str], results: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return kendall_w(_columns(judges, results, name))


def kendall_w(scores: np.ndarray) -> float | None:
    """Kendall's coefficient of concordance, with the correction for ties, of scores [judges, ranked things]."""
    from scipy.stats import rankdata

    m, n = scores.shape
    if n < 2:
        return None
    ranks = np.apply_along_axis(rankdata, 1, scores)
    spread = ((ranks.sum(0) - ranks.sum(0).mean()) ** 2).sum()
    ties = sum((counts**3 - counts).sum() for row in scores for counts in [np.unique(row, return_counts=True)[1]])
    most = m * m * (n**3 - n) - m * ties
    return float(12 * spread / most) if most else None


def _columns(judges: Sequence[str], results: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Figures [judges, method and scenario] where every judge has one; overall rows repeat the others and are out,
    unless there is one scenario only."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in results:
        if row["scenario"] != "overall" and row[name] is not None:
            values.setdefault((row["method"], row["scenario"]), {})[row["judge"]] = row[name]
    whole = [[by[judge] for judge in judges] for by in values.values() if all(judge in by for judge in judges)]
    return np.array(whole).T if whole else np.empty((len(judges), 0))
