"""A replay's report as one HTML page: tables and plots, nothing loaded from anywhere, for a phone and for a desk.

    page(told, bases)        # told: what `paceline replay --json` prints

The plots are drawn here, as SVG, so that the page is a few dozen kilobytes and needs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from math import ceil, floor, log10
from pathlib import PurePath
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from paceline.replay.run import OVERALL

COLORS = (
    "#2a6fdb", "#d9600f", "#1f8f4e", "#b3307a", "#7a55c7", "#8a6d00", "#008a99", "#c43a31",
    "#5f7f2a", "#d0489b", "#54616f", "#3aa0ff",
)  # fmt: skip
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 270, 56, 14, 16, 42
DEEPEST = 16
"""Depths in the plot."""


@dataclass(frozen=True)
class Line:
    """Points (x, y) joined by a line, with a tip and a colour for each; the name stands at the last."""

    points: Sequence[tuple[float, float]]
    tips: Sequence[str]
    colors: Sequence[str]
    name: str = ""


def page(told: dict[str, Any], bases: Sequence[str]) -> str:
    """The page. bases[i] is what drafter i is a variant of; variants of one are joined in the plot over nodes."""
    results = told["results"]
    overall = [result for result in results if result["category"] == OVERALL]
    categories = list(dict.fromkeys(result["category"] for result in results))
    base_of = dict(zip(_specs(results), bases, strict=False))
    color_of = {spec: COLORS[i % len(COLORS)] for i, spec in enumerate(_specs(results))}
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("paceline.replay") / "page.html.jinja").read_text("utf-8"))
    return template.render(
        told=told,
        name=PurePath(told["trace"]).name,
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
            lines.append(Line(points, tips, [color_of[result["draft"]]] * len(points)))
    return _plot(lines, "depth of the draft", "accepted to that depth, %")


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
        lines.append(Line(points, tips, [color_of[r["draft"]] for r in group], base))
    return _plot(lines, "nodes verified a round, the root included", "tokens a round")


def _plot(lines: Sequence[Line], across: str, up: str) -> Markup:
    """Lines with points, axes and ticks, as an SVG that scales with the page."""
    points = [point for line in lines for point in line.points]
    if not points:
        return Markup("")
    xs, ys = _ticks([x for x, _ in points]), _ticks([y for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM),
        )

    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{up} by {across}")}">']
    for tick in xs:
        x, y = at(tick, ys[0])
        drawn.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{tick:g}</text>')
    for tick in ys:
        x, y = at(xs[0], tick)
        drawn.append(f'<path class="grid" d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for line in lines:
        spots = [at(x, y) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        drawn.append(f'<path d="M{path}" fill="none" stroke="{line.colors[0]}" stroke-width="1.8"/>')
        for (x, y), tip, color in zip(spots, line.tips, line.colors, strict=True):
            drawn.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"><title>{escape(tip)}</title></circle>'
            )
        if line.name:
            x, y = spots[-1]
            anchor = "start" if x < middle else "end"
            drawn.append(f'<text x="{x:.1f}" y="{y - 7:.1f}" text-anchor="{anchor}">{escape(_short(line.name))}</text>')
    drawn.append(f'<text x="{middle:.1f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(across)}</text>')
    upright = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="translate(11 {upright:.1f}) rotate(-90)"'
    drawn.append(f'<text {turned} text-anchor="middle">{escape(up)}</text></svg>')
    return Markup("".join(drawn))


def _short(name: str) -> str:
    """A name that does not run out of the plot."""
    return name if len(name) <= 28 else name[:27] + "…"


def _ticks(values: Sequence[float]) -> list[float]:
    """Four to nine round numbers that span `values`."""
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 5
    power = 10.0 ** floor(log10(rough))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= rough)
    return [round(i * step, 9) for i in range(floor(low / step), ceil(high / step) + 1)]
