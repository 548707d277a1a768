"""The page of one or more runs: figures beside published ones, confusions, and the pictures.

The page loads nothing; small pictures are inside it, if the data set is still where it was."""

import json
import tomllib
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision.captions import TITLES
from paceline.evals.vision.dataset import Case, Data, data_url, read_data
from paceline.evals.vision.evaluate import REPORT, SCORES
from paceline.runs.report import COLORS, Curve, Folded, Part, Plots, Report, Section, Table, dotted, marked, plot

PUBLISHED = Path(__file__).with_name("published.toml")
WAYS = {"i2t": "picture to text", "t2i": "text to picture"}
SIDE = 132  # pixels of a picture on the page
Shown = dict[str, Any]
"""A run's report, with its folder, its name and its results by subset ("table")."""
SHOWN = 2  # Right and wrong queries to show of each subset and direction.


def read_reports(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """The report of each run; PacelineError if one cannot be read."""
    return [_read_report(run) for run in runs]


def page(runs: Sequence[Path]) -> str:
    """The page of one run or more. PacelineError if one cannot be read."""
    shown = [
        report | {"run": run, "name": run.name, "table": {one["subset"]: one for one in report["results"]}}
        for run, report in zip(runs, read_reports(runs), strict=True)
    ]
    subsets = [subset for subset in TITLES if any(subset in one["table"] for one in shown)]
    frontiers = [(one["name"], _frontier(one["frontier"])) for one in shown if "frontier" in one]
    kept = "Mixtures of the weights before and after tuning; the marked one was written."
    facts: list[Part] = [
        "Percent right, ± standard error over cases. A case is K pictures and K captions that differ in one value: "
        "picture to text chooses a caption, text to picture a picture; group wants every query of a case right.",
        *(marked("p", _about(one, color)) for one, color in zip(shown, cycle(COLORS), strict=False)),
    ]
    confused = [Folded(TITLES[subset], _confusion(subset, shown), open=not n) for n, subset in enumerate(subsets)]
    sections = [
        Section("Scores", [_scores(subsets, shown), *(_replies(one) for one in shown if one.get("replies"))]),
        Section("What was kept", [kept, Plots(frontiers)] if frontiers else []),
        Section("Published", _published(subsets)),
        Section("What was taken for what", ["Rows: what was asked; columns: what was answered, percent.", *confused]),
        Section("Examples", [part for one in shown for part in _all_examples(one, subsets)]),
    ]
    window = f"Size, position, existence, count: {', '.join(one['name'] for one in shown)}"
    return Report("Size, position, existence, count", facts, sections, window=window).html()


def _about(one: Shown, color: str) -> Markup:
    problems = f"; {len(one['problems'])} problems" if one.get("problems") else ""
    return dotted(color, marked("b", one["name"])) + f": {one['model']}, on {one['data']}{problems}"


def _scores(subsets: Sequence[str], shown: Sequence[Shown]) -> Table:
    """A row for each subset and run, and for the means."""

    def figure(found: dict[str, Any], key: str) -> Any:
        if key not in found:
            return ""
        error = (found.get("stderr") or {}).get(key)
        return f"{found[key]:.1f}" + (Markup(" ") + marked("small", f"±{error:.1f}") if error is not None else "")

    def row(title: Any, one: Shown, found: dict[str, Any], chance: str) -> tuple[Any, ...]:
        mean = marked("b", figure(found, "mean") or figure(found, "question"))
        ways = (figure(found, way) for way in ("i2t", "t2i"))
        return (title, one["name"], chance, *ways, mean, figure(found, "group"), figure(found, "assignment"))

    rows = [
        row("" if n else TITLES[subset], one, found, f"{found['chance']['i2t']:.1f}")
        for subset in subsets for n, one in enumerate(shown) if (found := one["table"].get(subset))
    ]  # fmt: skip
    of_all = marked("b", "mean of subsets")
    rows += [row("" if n else of_all, one, one["mean"], "") for n, one in enumerate(shown)]
    heads = ("subset", "run", "chance", "picture to text", "text to picture", "mean", "group", "assignment")
    return Table(heads, rows)


def _replies(one: Shown) -> Markup:
    r = one["replies"]
    letters, right = (
        ", ".join(f"{letter} {count}" for letter, count in r[name].items()) for name in ("letters", "right_letters")
    )
    said = (
        f": {r['replies']} replies, {r['invalid']} of them invalid ({r['cut_off']} cut off); letters chosen {letters}; "
        f"right {right}; {r['prompt_tokens']} tokens read, {r['tokens']} written; pictures sent as "
        f"{', '.join(r['sent'])}, detail {r['detail']}{', blank' if r.get('blind') else ''}."
    )
    return marked("p", marked("b", one["name"]) + said)


def _published(subsets: Sequence[str]) -> list[Part]:
    of = tomllib.loads(PUBLISHED.read_text("utf-8"))
    rows = [(name, *(row[subset] for subset in subsets)) for name, row in of["paper"].items()]
    for name, row in of["official"].items():
        ways = (f"{row[subset][0]} / {row[subset][1]}" for subset in subsets)
        rows.append((f"{name}, official notebook (picture to text / text to picture)", *ways))
    means = ", ".join(f"{name} {value}" for name, value in of["means"].items())
    return [
        "On the released data, whose pictures are other ones. Poster of the paper (mean of both directions):",
        Table(("model", *(TITLES[subset] for subset in subsets)), rows),
        f"Means of six of models tuned from CLIP ViT-B/32 on other data (FSC-CLIP's study): {means}.",
    ]


def _confusion(subset: str, shown: Sequence[Shown]) -> list[Part]:
    parts: list[Part] = []
    for one in shown:
        found = one["table"].get(subset) or {}
        if not found.get("confusion"):
            continue
        off = found.get("count_error")
        far = f": off by {off['i2t']:.2f} / {off['t2i']:.2f} on average" if off else ""
        values = [str(value) for value in found["values"]]
        parts.append(marked("h3", one["name"] + far))
        for way, title in WAYS.items():
            rows = [(value, *row) for value, row in zip(values, found["confusion"][way], strict=True)]
            parts += [title, Table(("", *values), rows, heat=True)]
    return parts


def _all_examples(one: Shown, subsets: Sequence[str]) -> list[Part]:
    by_subset: dict[str, list[Markup]] = {}
    for subset, example in _examples(one, one["run"]):
        by_subset.setdefault(subset, []).append(example)
    folded = [
        Folded(TITLES[subset], [marked("div", Markup("").join(by_subset.get(subset, ())), "shown")], open=not n)
        for n, subset in enumerate(subsets)
    ]
    return [marked("h3", one["name"]), *folded] if by_subset else []


def _read_report(run: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads((run / REPORT).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PacelineError(
            f"{run} is no run: paceline eval vision run ... --out {run} writes one ({error})"
        ) from None
    return report


def _frontier(frontier: dict[str, Any]) -> Any:
    """A plot of SPEC against zero-shot accuracy, from the weights before to those after."""
    points = frontier["points"]
    spots = [(point["retention"], point["spec"]) for point in points]
    tips = [f"share {p['share']:.1f}: SPEC {p['spec']:.1f}, zero-shot {p['retention']:.1f}" for p in points]
    colours = [COLORS[1] if point["share"] == frontier["chosen"] else COLORS[0] for point in points]
    return plot([Curve(spots, tips, colours)], "zero-shot accuracy, %", "SPEC mean, %")


def _examples(report: dict[str, Any], folder: Path) -> list[tuple[str, Markup]]:
    """Queries of each subset that were answered right and wrong, with their pictures; empty without scores."""
    if not (folder / SCORES).exists() or not Path(report["data"]).exists():
        return []
    data, shown = read_data(Path(report["data"])), list[tuple[str, Markup]]()
    with np.load(folder / SCORES) as scores:
        for subset in TITLES:
            scored = [case for case in data.cases if case.subset == subset and case.name in scores]
            for way in ("i2t", "t2i"):
                left = {True: SHOWN, False: SHOWN}
                for case in scored:
                    table = scores[case.name] if way == "i2t" else scores[case.name].T
                    # The query moves on with the case, so that not every example is of the first value.
                    query = int(case.id[-3:], 36) % case.k
                    answer = int(table[query].argmax())
                    if left[answer == query]:
                        left[answer == query] -= 1
                        shown.append((subset, _example(data, case, way, query, answer)))
                    if not any(left.values()):
                        break
    return shown


def _example(data: Data, case: Case, way: str, query: int, answer: int) -> Markup:
    """A query with its pictures, and what was answered."""
    if way == "i2t":
        texts = [("answered", case.captions[answer]), ("right", case.captions[query])]
        marks = {query: ""}
    else:
        texts = [("asked for", case.captions[query])]
        marks = {answer: "answered", query: "right"}
    right = answer == query
    picture = Markup('<div><img src="{}" alt="{}" width="132" height="132"><small>{}</small></div>')
    pictures = Markup("").join(
        picture.format(_small(data.picture(case.images[i])), case.captions[i], mark)
        for i, mark in sorted(marks.items())
    )
    said = marked("b", f"{WAYS[way]}, {'right' if right else 'wrong'}")
    said += Markup("").join(Markup("<br>{}: {}").format(*text) for text in (texts[:1] if right else texts))
    both = marked("div", pictures, "two") + marked("figcaption", said)
    return marked("figure", both, "right" if right else "wrong")


def _small(picture: Image.Image) -> str:
    return data_url(picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS), "WEBP", quality=80)
