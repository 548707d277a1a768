"""The part of a report that compares schedules: throughput by batch size, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from paceline.bench.metrics import OVERALL
from paceline.bench.together import beside_plain, scheduled
from paceline.bench.words import number
from paceline.pages.bench_run import BenchRun, Method
from paceline.pages.plots import COLORS, Curve, plot


@dataclass(frozen=True)
class Schedules:
    """picture: tokens per second by batch size, a line for every drafter and schedule; colors: of the lines, by name.
    rows: methods by batch size, each with its tokens per second over plain decoding's at that batch."""

    picture: Markup
    colors: dict[str, str]
    rows: list[tuple[int, Method, float | None]]


def schedules(run: BenchRun) -> Schedules | None:
    """None for a run that compares no schedules."""
    measured = [(scheduled(method.rows[OVERALL]), method) for method in run.measured]
    if not any(method.get("scheduled") for _, method in measured):
        return None
    beside = beside_plain([method.rows[OVERALL] for _, method in measured])
    measured.sort(key=lambda each: each[0]["batch"])
    lines: dict[str, list[tuple[int, Method]]] = {}
    for how, method in measured:
        lines.setdefault(f"{how['drafter']} {how['schedule']}", []).append((how["batch"], method))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(lines)}
    curves = [
        Curve(
            [(batch, method.get("tokens_per_second")) for batch, method in points],
            [f"{name}, batch {b}: {number(m.get('tokens_per_second'), 1)} tokens/s" for b, m in points],
            [colors[name]] * len(points),
        )
        for name, points in lines.items()
    ]
    sizes = sorted({how["batch"] for how, _ in measured})
    picture = plot(curves, "rows in a batch", "tokens a second", xs=sizes if len(sizes) > 1 else ())
    return Schedules(picture, colors, [(how["batch"], method, beside.get(method.name)) for how, method in measured])
