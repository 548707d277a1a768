"""The report of an alignment run: one HTML page that loads nothing, a Markdown table, or JSON.

page(folder), markdown(folder), summary(folder)    # folder: of `paceline eval align --out`, finished or not"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from paceline.evals.align import figures
from paceline.evals.align.figures import GENERATIONS, JUDGEMENTS, OVERALL, About, planned_rows, results, scored
from paceline.runs.report import COLORS, Curve, plot, render

TEMPLATE, TABLE, CHOICES = (
    Path(__file__).with_name(f"{name}.jinja") for name in ("page.html", "table.md", "choices.txt")
)
SHOWN = 3  # answers shown of each scenario and method
MARKS = {"YES": "#1f8f4e", "NO": "#c43a31", "NA": "transparent"}
DONE = ("judged", "unanswered", "failed")
"""Figures of a row that together are its items, once the run is complete."""


def page(folder: Path) -> str:
    """The run as one HTML page. Raises PacelineError if the folder holds no alignment run."""
    rows, about = results(folder)
    color_of = {method: COLORS[i % len(COLORS)] for i, method in enumerate(about["methods"])}
    overall = [row for row in rows if row["scenario"] == OVERALL]
    judges = dict.fromkeys(row["judge"] for row in rows)
    return render(
        TEMPLATE,
        **_summary(folder, about, rows),
        to_come=to_come(rows),
        about=about,
        several=len(judges) > 1,
        overall=overall,
        rows=[row for row in rows if row["scenario"] != OVERALL],
        color_of=color_of,
        alphas=[(judge, _alphas([row for row in overall if row["judge"] == judge], color_of)) for judge in judges],
        rules=_rules(folder, about),
        answers=_answers(folder, about),
        shown=SHOWN,
        files=f"{GENERATIONS} and {JUDGEMENTS}",
        pc=lambda share: "\N{EN DASH}" if share is None else f"{100 * share:.2f}",
        span=lambda pair: "" if not pair else f"{100 * pair[0]:.1f} to {100 * pair[1]:.1f}",
    )


def summary(folder: Path) -> dict[str, Any]:
    """The content of --json: results, choices, agreement of judges, and speculation by phase."""
    rows, about = results(folder)
    return {"results": rows} | _summary(folder, about, rows)


def _summary(folder: Path, about: About, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "choices": choices(about),
        "agreement": figures.agreement(folder, about, rows),
        "phases": figures.by_phase(folder, about),
    }


def markdown(folder: Path) -> str:
    """A table for a README: overall and by scenario, and the choices."""
    rows, about = results(folder)
    said = " ".join(filter(None, [choices(about), to_come(rows)]))
    return render(TABLE, rows=rows, about=about, choices=said) + "\n"


def to_come(rows: Sequence[dict[str, Any]]) -> str:
    """That a run is not complete, and how much of it is there, in a sentence; "" for a complete one."""
    overall = [row for row in rows if row["scenario"] == OVERALL]
    done, every = (sum(row[name] for row in overall for name in names) for names in (DONE, ("items",)))
    return f"The run is not complete: {done} of {every} answers are judged, failed or empty." if done < every else ""


def choices(about: About) -> str:
    """Every choice that changes the figures, in words."""
    return " ".join(render(CHOICES, about=about).splitlines())


def _alphas(rows: Sequence[dict[str, Any]], color_of: dict[str, str]) -> Markup:
    """A plot of SAR over alpha, a line for each method."""
    lines = []
    for row in rows:
        points = [(float(alpha), 100 * value) for alpha, value in row["sar_at"].items()]
        if points:
            tips = [f"{row['method']}: {y:.2f} at alpha = {x:g}" for x, y in points]
            lines.append(Curve(points, tips, [color_of[row["method"]]] * len(points), row["method"]))
    return plot(lines, "alpha", "SAR, %")


def _rules(folder: Path, about: About) -> list[dict[str, Any]]:
    """By judge, method and scenario: each rule with the shares of its marks."""
    marks: dict[tuple[str, str, str], Counter[tuple[str, str]]] = {}
    for row, verdicts, _ in scored(folder, about):
        group = marks.setdefault((row["judge"], row["method"], row["scenario"]), Counter())
        group.update((verdict.rule, verdict.mark) for verdict in verdicts)
    scenarios = figures.scenarios_of(about)
    return [
        {
            "name": f"{key}, {method}, judge {judge}",
            "rules": [
                {"id": rule.id, "text": rule.text, **_shares({mark: counts[rule.id, mark] for mark in MARKS})}
                for rule in scenarios[key].rules
            ],
        }
        for (judge, method, key), counts in marks.items()
    ]


def _shares(counts: dict[str, int]) -> dict[str, Any]:
    total = max(sum(counts.values()), 1)
    return {
        "shares": [(f"{100 * counts[mark] / total:.1f}", color) for mark, color in MARKS.items()],
        "tip": ", ".join(f"{mark} {count}" for mark, count in counts.items()),
    }


def _answers(folder: Path, about: About) -> list[dict[str, Any]]:
    """The first answers of each scenario and method, with every judge's verdicts."""
    shown: dict[str, dict[str, Any]] = {}
    count: Counter[tuple[str, str]] = Counter()
    for row in planned_rows(folder / GENERATIONS, about):
        count[row["scenario"], row["method"]] += 1
        if count[row["scenario"], row["method"]] <= SHOWN:
            shown[row["key"]] = {"row": row, "scores": [], "verdicts": []}
    scenarios = figures.scenarios_of(about)
    texts = {key: {rule.id: rule.text for rule in scenario.rules} for key, scenario in scenarios.items()}
    for row, verdicts, score in scored(folder, about):
        if (one := shown.get(row["generation"])) is not None:
            one["scores"].append(f"{row['judge']}: {'safe' if score.safety else 'unsafe'}, {score.sar:.2f}")
            one["verdicts"] += [[v.rule, v.mark, v.analysis, texts[row["scenario"]][v.rule]] for v in verdicts]
    return sorted(shown.values(), key=lambda one: (one["row"]["item"], one["row"]["method"]))
