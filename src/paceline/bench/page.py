"""A benchmark's report as one HTML page. Figures come from the run's folder; here they get their order and form."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from paceline.bench.metrics import OVERALL, batch_speedups, scheduled
from paceline.bench.report import KIND_COLORS, BenchRun, Method, describe
from paceline.runs.report import COLORS, DASH, FAINT, SMALL, Curve, number, percent, plot, render

TEMPLATE = Path(__file__).with_name("page.html.jinja")
DEEPEST = 16  # depths of a draft in the plots


def page(run: BenchRun) -> str:
    """The report as one HTML page."""
    differing = [(method, one) for method in run.measured for one in method.get("differs") or ()]
    return render(
        TEMPLATE,
        run=run,
        about=run.about,
        options=run.about.get("options") or {},
        suite=run.about.get("suite") or {},
        seen=run.about.get("environment") or {},
        model=run.model,
        **{what: describe(what, run) for what in ("headline", "findings", "setting")},
        baseline=run.baseline,
        unfinished=[method for method in run.methods if method.why],
        most=_most(run),
        best={category: _best(run, category) for category in [OVERALL, *run.tasks]},
        panels=[(m, of) for m in run.measured if (of := _depths(m, run.measured))],
        parts=dict.fromkeys(part for m in run.measured for part in m.get("parts_ms") or ()),
        schedules=_schedules(run),
        differing=differing,
        verdicts=Counter(difference["verdict"] for _, difference in differing),
        OVERALL=OVERALL,
        DASH=DASH,
        KIND_COLORS=KIND_COLORS,
    )


def _most(run: BenchRun) -> float:
    """What the bars of speed-ups reach at most, intervals included."""
    figures = ("speedup", "speedup_high")
    values = [m.get(f, c) for m in run.measured for f in figures for c in (OVERALL, *run.tasks)]
    return 1.02 * max([1.0, *(value for value in values if value is not None)])


def _best(run: BenchRun, category: str) -> Method | None:
    """The fastest lossless method that answered everything."""
    rated = [method for method in run.ranked if method.get("speedup", category) is not None]
    return max(rated, key=lambda method: float(method.get("speedup", category)), default=None)


def _depths(method: Method, others: Sequence[Method]) -> Markup:
    """Drafts accepted to a depth, of those that reach it, before those of the other methods."""
    shares = (method.get("accepted_by_depth") or ())[:DEEPEST]
    if not shares:
        return Markup("")
    faint = [
        Curve([(d, 100 * s) for d, s in enumerate(accepted[:DEEPEST], 1)], (), (FAINT,))
        for other in others
        if other is not method and (accepted := other.get("accepted_by_depth"))
    ]
    tips = [f"{method.label}: {percent(s, 1)} accepted to depth {d}" for d, s in enumerate(shares, 1)]
    line = Curve([(d, 100 * s) for d, s in enumerate(shares, 1)], tips, [method.color] * len(shares))
    label = f"Accepted by depth, {method.label}"
    return plot([*faint, line], frame=SMALL, xs=(1, 4, 8, 12, DEEPEST), ys=(0, 50, 100), label=label)


def _schedules(run: BenchRun) -> dict[str, Any] | None:
    """A plot of tokens per second by batch size with a line for every drafter and schedule, the lines' colours, and
    rows of (batch, method, its tokens per second over plain decoding's there). None where none were compared."""
    measured = [(scheduled(method.rows[OVERALL]), method) for method in run.measured]
    if not any(method.get("scheduled") for _, method in measured):
        return None
    gains = batch_speedups([method.rows[OVERALL] for _, method in measured])
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
    rows = [(how["batch"], method, gains.get(method.name)) for how, method in measured]
    return {"picture": picture, "colors": colors, "rows": rows}
