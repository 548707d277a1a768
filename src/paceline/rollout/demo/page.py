"""The page of `paceline rollout demo`: curves of every rule over the epochs, and one table."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from paceline.jsonl import write_whole
from paceline.workbench.report import COLORS, Curve, plot, style

Rows = list[dict[str, Any]]

NOTES = (
    "Means over the seeds. Every rule of a seed begins at the same supervised start and sees the prompts in the same "
    "order. Seconds are those of rollouts, verification included, of one process; processor time beside it, because "
    "other programs disturb the clock. A rule that is not lossless trains on answers that are partly an older "
    "policy's, so its training reward says less about the policy than the held-out accuracy."
)


def write_page(file: Path, whole: dict[str, Any]) -> None:
    """Write the page of what `paceline.rollout.demo.run.write_results` returns."""
    write_whole(file, page(whole))


def page(whole: dict[str, Any]) -> str:
    """The page as HTML."""
    rows: Rows = whole["epochs"]
    plots = [
        _curves(rows, "reward", "training reward"),
        _curves(rows, "accuracy", "held-out accuracy"),
        _curves(_summed(rows), "all_decoded", "tokens decoded so far"),
        _curves(_summed(rows), "all_cpu", "processor seconds of rollouts so far"),
        _curves(_shares(rows), "reuse", "share of old tokens kept"),
        _curves(_shares(rows), "full_reuse", "share of old answers kept whole"),
        _curves(_shares(rows), "drift", "mean |p - q| of old tokens"),
    ]
    figures = "".join(f"<figure>{drawn}</figure>" for drawn in plots if drawn)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Rollouts that reuse answers</title><style>{style()}</style>"
    )
    body = (
        f"<h1>Rollouts that reuse answers</h1><p>{NOTES}</p>"
        f'<div class="wide">{_table(whole["results"])}</div><div class="plots">{figures}</div>'
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _curves(rows: Rows, name: str, up: str) -> str:
    """A curve for each rule: the mean over seeds of `name` at every epoch that has it."""
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if name in row:
            points[row["rule"]][row["epoch"]].append(row[name])
    curves = []
    for number, (rule, of) in enumerate(points.items()):
        line = [(float(epoch), mean(values)) for epoch, values in sorted(of.items())]
        tips = [f"{rule}, epoch {x:g}: {y:.4g}" for x, y in line]
        curves.append(Curve(line, tips, [COLORS[number % len(COLORS)]] * len(line), rule))
    return str(plot(curves, "epoch", up))


def _summed(rows: Rows) -> Rows:
    """With running sums of tokens and seconds over the epochs of each run."""
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    out = []
    for row in sorted(rows, key=lambda row: int(row["epoch"])):
        so_far = sums[row["rule"], row["seed"]]
        so_far[0] += row["decoded"]
        so_far[1] += row["cpu_seconds"]
        out.append({**row, "all_decoded": so_far[0], "all_cpu": so_far[1]})
    return [row for rule in dict.fromkeys(r["rule"] for r in rows) for row in out if row["rule"] == rule]


def _shares(rows: Rows) -> Rows:
    """With the shares of every epoch in which there was something to reuse."""
    return [
        {
            **row,
            "reuse": row["reused"] / row["old_tokens"],
            "full_reuse": row["full"] / row["offered"],
            "drift": row["drift"] / max(row["looked"], 1),
        }
        for row in rows
        if row["old_tokens"]
    ]


def _table(results: Rows) -> str:
    columns = {
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
    head = "".join(f"<th>{title}</th>" for title in columns.values())
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(_shown(result[name]))}</td>" for name in columns) + "</tr>" for result in results
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
