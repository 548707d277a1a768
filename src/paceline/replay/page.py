"""The report of a replay as one HTML page with tables and plots."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from markupsafe import Markup

from paceline.replay.report import OVERALL
from paceline.workbench.report import COLORS, Curve, plot, render

TEMPLATE = Path(__file__).with_name("page.html.jinja")
DEEPEST = 16  # depths in the plot


def page(report: dict[str, Any], base_of: Mapping[str, str]) -> str:
    """The page of what `paceline replay --json` prints. base_of: by drafter, the one that it is a variant of."""
    results = report["results"]
    specs = list(dict.fromkeys(result["draft"] for result in results))
    color_of = {spec: COLORS[i % len(COLORS)] for i, spec in enumerate(specs)}
    overall = [result for result in results if result["category"] == OVERALL]
    categories = list(dict.fromkeys(result["category"] for result in results))
    by_category = [(name, [result for result in results if result["category"] == name]) for name in categories]
    return render(
        TEMPLATE,
        report=report,
        name=PurePath(report["trace"]).name,
        overall=overall,
        color_of=color_of,
        by_category=by_category if len(categories) > 1 else [],
        most=max((result["mean_accepted_tokens"] for result in results), default=1.0),
        depths=_depths(overall, color_of),
        nodes=_nodes(overall, base_of, color_of),
    )


def _depths(overall: Sequence[dict[str, Any]], color_of: dict[str, str]) -> Markup:
    """Plot, by depth, the share of drafts accepted to that depth, of those that reach it."""
    lines = []
    for result in overall:
        shares = result["accepted_by_depth"][:DEEPEST]
        tips = [f"{result['draft']}: {share:.1%} accepted to depth {d}" for d, share in enumerate(shares, 1)]
        points = [(d, 100 * share) for d, share in enumerate(shares, 1)]
        if points:
            lines.append(Curve(points, tips, [color_of[result["draft"]]] * len(points)))
    return plot(lines, "depth of the draft", "accepted to that depth, %")


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
