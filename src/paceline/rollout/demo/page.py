"""The page of `paceline rollout demo`: a table of the rules, and their curves over the epochs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from markupsafe import Markup

from paceline.rollout.run import Figures
from paceline.workbench.report import COLORS, Curve, plot, render

Rows = list[dict[str, Any]]

TEMPLATE = Path(__file__).with_name("page.html.jinja")
COLUMNS = {
    "name": "rule",
    "tokens_decoded": "tokens decoded",
    "reuse": "reuse",
    "full_reuse": "reused whole",
    "drift": "drift",
    "final_reward": "last training reward",
    "final_accuracy": "held-out accuracy",
    "accuracy_noise": "its deviation over seeds",
    "seconds": "seconds",
    "cpu_seconds": "processor seconds",
}
"""Fields of a result, and their headings in the table."""


def page(whole: dict[str, Any]) -> str:
    """The page as HTML. whole: what `paceline.rollout.demo.run.write_results` returns."""
    rows: Rows = whole["epochs"]
    sums, shares = _sums(rows), [row | _shares(Figures.of(row)) for row in rows if row["old_tokens"]]
    plots = [
        _curves(rows, "reward", "training reward"),
        _curves(rows, "accuracy", "held-out accuracy"),
        _curves(sums, "all_decoded", "tokens decoded so far"),
        _curves(sums, "all_cpu", "processor seconds of rollouts so far"),
        _curves(shares, "reuse", "share of old tokens kept"),
        _curves(shares, "full_reuse", "share of old answers kept whole"),
        _curves(shares, "drift", "mean |p - q| of old tokens"),
    ]
    return render(TEMPLATE, results=whole["results"], columns=COLUMNS, plots=plots)


def _curves(rows: Rows, name: str, up: str) -> Markup:
    """A curve for each rule: the mean over seeds of `name` at every epoch that has it."""
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if name in row:
            points[row["rule"]][row["epoch"]].append(row[name])
    curves = []
    for number, (rule, epochs) in enumerate(points.items()):
        line = [(float(epoch), mean(values)) for epoch, values in sorted(epochs.items())]
        tips = [f"{rule}, epoch {x:g}: {y:.4g}" for x, y in line]
        curves.append(Curve(line, tips, [COLORS[number % len(COLORS)]] * len(line), rule))
    return plot(curves, "epoch", up)


def _sums(rows: Rows) -> Rows:
    """The rows with each run's tokens and seconds so far. Rules keep their order, which decides their colours."""
    totals: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    order = list(dict.fromkeys(row["rule"] for row in rows))
    summed = []
    for row in sorted(rows, key=lambda row: (order.index(row["rule"]), row["epoch"])):
        total = totals[row["rule"], row["seed"]]
        total[0] += row["decoded"]
        total[1] += row["cpu_seconds"]
        summed.append({**row, "all_decoded": total[0], "all_cpu": total[1]})
    return summed


def _shares(figures: Figures) -> dict[str, float]:
    return {"reuse": figures.reuse, "full_reuse": figures.full_reuse, "drift": figures.mean_drift}
