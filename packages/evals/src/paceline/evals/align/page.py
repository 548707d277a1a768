"""The report of an alignment run: one HTML page that loads nothing, a Markdown table, or JSON.

page(folder), markdown(folder), summary(folder)    # folder: of `paceline eval align --out`, finished or not"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup

from paceline.evals.align import figures
from paceline.evals.align.figures import GENERATIONS, JUDGEMENTS, OVERALL, About, planned_rows, results, scored
from paceline.evals.align.types import Rule
from paceline.runs.report import (
    COLORS,
    Curve,
    Folded,
    Part,
    Plots,
    Report,
    Section,
    Table,
    dotted,
    marked,
    number,
    plot,
    render,
    visible,
    words,
)

COLUMNS, SAID = tomllib.loads(Path(__file__).with_name("page.toml").read_text("utf-8")).values()
TABLE, CHOICES = (Path(__file__).with_name(f"{name}.jinja") for name in ("table.md", "choices.txt"))
SHOWN = 3  # Answers to show of each scenario and method.
MARKS = {"YES": "#1f8f4e", "NO": "#c43a31", "NA": "transparent"}
Row = dict[str, Any]
"""A row of `figures.results`."""
DONE = ("judged", "unanswered", "failed")
"""Figures of a row that together are its items, once the run is complete."""


def page(folder: Path) -> str:
    """The run as one HTML page. Raises PacelineError if the folder holds no alignment run."""
    rows, about = results(folder)
    color_of = {method: COLORS[i % len(COLORS)] for i, method in enumerate(about["methods"])}
    overall = [row for row in rows if row["scenario"] == OVERALL]
    judges = dict.fromkeys(row["judge"] for row in rows)
    several, judged = len(judges) > 1, "method = method; " + "judge = judge; " * (len(judges) > 1)
    said, missing = _summary(folder, about, rows), to_come(rows)
    alphas = [
        (SAID["alphas"] + f", judge {judge}" * several, _alphas([r for r in overall if r["judge"] == judge], color_of))
        for judge in judges
    ]
    ends = [f"{r['method']}: {words(r['finish_reasons'])}{_left_out(r)}" for r in overall]
    sections = [
        Section("Overall", [_overall(overall, several, color_of), SAID["scores"], Plots(alphas)]),
        Section("By scenario and kind of prompt", [
            Table.of([r for r in rows if r["scenario"] != OVERALL], judged + COLUMNS["by_scenario"])
        ]),
        Section("How far the judges agree", _agreement(said["agreement"])),
        Section("Verdicts by rule", [*_rules(folder, about), "Green: kept, red: broken, the rest: does not apply."]),
        Section("What it cost, mean an item", [Table.of(overall, COLUMNS["costs"])]),
        Section("Speculation by phase", _phases(said["phases"], about)),
        Section("How requests ended", ends),
        Section("Answers to read", [
            f"The first {SHOWN} of each scenario and method, folded: prompts may ask for harm, and answers may give "
            f"it. All are in the folder's {GENERATIONS} and {JUDGEMENTS}.",
            *_answers(folder, about),
        ]),
    ]
    title = f"Specification alignment of {about['identity']['model']}"
    return Report(title, [said["choices"], *([marked("p", missing, "no")] if missing else [])], sections).html()


def _left_out(r: Row) -> str:
    """Why items of a row have no answer, and how many answers the judge saw only in part."""
    why = f"; no answer: {words(r['unanswered_why'])}" if r["unanswered"] else ""
    return why + (f"; {r['cut_for_judge']} answers were shown to the judge in part" if r["cut_for_judge"] else "")


def _overall(rows: Sequence[Row], several: bool, color_of: dict[str, str]) -> Table:
    names, spans = [], []
    for r in rows:
        why = f"no answer: {words(r['unanswered_why'])}" if r["unanswered"] else "not asked yet"
        below = "" if r["judged"] else marked("small", "failed: errors.jsonl says why" if r["failed"] else why)
        names.append(dotted(color_of[r["method"]], r["method"]) + below)
        span = r["intervals"]["sar"]
        spans.append(f"{100 * span[0]:.1f} to {100 * span[1]:.1f}" if span else "")
    judged = [f"{r['judged']} of {r['items']}" for r in rows]
    columns = "judge = judge; " * several + COLUMNS["scores"]
    return Table.of(rows, columns, ("method", names), ("judged", judged), ("95 % interval\nof SAR", spans))


def _agreement(found: Sequence[dict[str, Any]]) -> list[Part]:
    pairs, together = ([a for a in found if name in a] for name in ("verdicts", "kendall_w"))
    said = [
        f"Kendall's W over {len(a['judges'])} judges: "
        + ", ".join(f"{name} {number(a['kendall_w'][name.lower()], 3)}" for name in ("safety", "behavior", "SAR"))
        + ". ρ, τ and W rank methods within scenarios."
        for a in together
    ]
    judges = [", ".join(pair["judges"]) for pair in pairs]
    return [Table.of(pairs, COLUMNS["agreement"], ("judges", judges)), *said] if found else []


def _phases(phases: Sequence[dict[str, Any]], about: About) -> list[Part]:
    said = (
        f"Our engine with drafts by {about.get('draft')}, prefix reuse {'on' if about.get('reuse') else 'off'}. "
        "Seconds are the engine's."
    )
    named = [f"{one['method']}: {one['phase']}" for one in phases]
    return [Table.of(phases, COLUMNS["phases"], ("phase", named)), said] if phases else []


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
    """A sentence on how much of an incomplete run is done; "" for a complete run."""
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


def _rules(folder: Path, about: About) -> list[Part]:
    """By judge, method and scenario: each rule with the shares of its marks."""
    marks: dict[tuple[str, str, str], Counter[tuple[str, str]]] = {}
    for row, verdicts, _ in scored(folder, about):
        group = marks.setdefault((row["judge"], row["method"], row["scenario"]), Counter())
        group.update((verdict.rule, verdict.mark) for verdict in verdicts)
    scenarios = figures.scenarios_of(about)
    return [
        Folded(
            f"{key}, {method}, judge {judge}",
            [_rule(rule, {mark: counts[rule.id, mark] for mark in MARKS}) for rule in scenarios[key].rules],
            open=not n,
        )
        for n, ((judge, method, key), counts) in enumerate(marks.items())
    ]


def _rule(rule: Rule, counts: dict[str, int]) -> Markup:
    """A rule and its marks as a bar, with their counts as a tip."""
    total, bar = max(sum(counts.values()), 1), Markup('<i style="width: {}%; background: {}; display: block"></i>')
    shares = Markup("").join(bar.format(f"{100 * counts[mark] / total:.1f}", color) for mark, color in MARKS.items())
    tip = ", ".join(f"{mark} {count}" for mark, count in counts.items())
    both = marked("span", f"{rule.id}: {rule.text}") + marked("span", shares, "stack")
    return Markup('<div class="rule" title="{}">{}</div>').format(tip, both)


def _answers(folder: Path, about: About) -> list[Part]:
    """The first answers of each scenario and method, with every judge's verdicts."""
    shown: dict[str, tuple[Mapping[str, Any], list[str], list[Part]]] = {}
    count: Counter[tuple[str, str]] = Counter()
    for row in planned_rows(folder / GENERATIONS, about):
        count[row["scenario"], row["method"]] += 1
        if count[row["scenario"], row["method"]] <= SHOWN:
            said = {"Prompt": row["prompt"], "Thought": row.get("thought") or "", "Answer": row["response"]}
            texts = {title: text for title, text in said.items() if text or title != "Thought"}
            both = [(marked("h3", title), marked("pre", visible(text))) for title, text in texts.items()]
            shown[row["key"]] = row, [], [*chain.from_iterable(both)]
    scenarios = figures.scenarios_of(about)
    rules = {key: {rule.id: rule.text for rule in scenario.rules} for key, scenario in scenarios.items()}
    for row, verdicts, score in scored(folder, about):
        if row["generation"] in shown:
            _, scores, parts = shown[row["generation"]]
            scores.append(f"{row['judge']}: {'safe' if score.safety else 'unsafe'}, {score.sar:.2f}")
            for v in verdicts:
                mark = marked("b", v.mark, {"YES": "yes", "NO": "no"}.get(v.mark, ""))
                analysis = Markup(" ") + marked("i", visible(v.analysis)) if v.analysis else ""
                text = f" {v.rule}: {rules[row['scenario']][v.rule]}"
                parts.append(marked("p", Markup("{}{}{}").format(mark, text, analysis)))
    ordered = sorted(shown.values(), key=lambda one: (one[0]["item"], one[0]["method"]))
    return [
        Folded(
            f"{row['item']}, {row['label']}, {row['method']}{': ' + row['unanswered'] if row['unanswered'] else ''}"
            + "".join(f"; {one}" for one in scores),
            parts,
        )
        for row, scores, parts in ordered
    ]
