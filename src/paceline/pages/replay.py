"""A replay's report as one HTML page: tables and plots, nothing loaded from anywhere, for a phone and for a desk.

    page(report, bases)      # report: what `paceline replay --json` prints

The plots are SVG, so that the page is a few dozen kilobytes and needs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from paceline.workbench.report import COLORS, Curve, plot, style

DEEPEST = 16
"""Depths in the plot."""


def page(report: dict[str, Any], bases: Sequence[str]) -> str:
    """The page. bases[i] is what drafter i is a variant of; variants of one are joined in the plot over nodes."""
    results = report["results"]
    overall = [result for result in results if result["category"] == "overall"]
    categories = list(dict.fromkeys(result["category"] for result in results))
    base_of = dict(zip(_specs(results), bases, strict=False))
    color_of = {spec: COLORS[i % len(COLORS)] for i, spec in enumerate(_specs(results))}
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("paceline.pages") / "replay.html.jinja").read_text("utf-8"))
    return template.render(
        told=report,
        style=style(),
        name=PurePath(report["trace"]).name,
        overall=overall,
        color_of=color_of,
        by_category=[
            (category, [result for result in results if result["category"] == category])
            for category in categories
            if len(categories) > 1
        ],
        most=max((result["mean_accepted_tokens"] for result in results), default=1.0),
        depths=_depths(overall, color_of),
        nodes=_nodes(overall, base_of, color_of),
    )


def _specs(results: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(result["draft"] for result in results))


def _depths(overall: Sequence[dict[str, Any]], color_of: dict[str, str]) -> Markup:
    """Share of drafts accepted to each depth, of those that reach it."""
    lines = []
    for result in overall:
        shares = result["accepted_by_depth"][:DEEPEST]
        tips = [f"{result['draft']}: {share:.1%} accepted to depth {d}" for d, share in enumerate(shares, 1)]
        points = [(d, 100 * share) for d, share in enumerate(shares, 1)]
        if points:
            lines.append(Curve(points, tips, [color_of[result["draft"]]] * len(points)))
    return plot(lines, "depth of the draft", "accepted to that depth, %")


def _nodes(overall: Sequence[dict[str, Any]], base_of: dict[str, str], color_of: dict[str, str]) -> Markup:
    """Tokens a round against nodes verified a round; variants of one drafter are one line."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in overall:
        groups.setdefault(base_of[result["draft"]], []).append(result)
    lines = []
    for base, group in groups.items():
        group.sort(key=lambda result: float(result["verified_per_round"]))
        tips = [
            f"{r['draft']}: {r['mean_accepted_tokens']:.3f} tokens from {r['verified_per_round']:.1f} nodes a round"
            for r in group
        ]
        points = [(r["verified_per_round"], r["mean_accepted_tokens"]) for r in group]
        lines.append(Curve(points, tips, [color_of[r["draft"]] for r in group], base))
    return plot(lines, "nodes verified a round, the root included", "tokens a round")
