"""The page of one or more runs: figures beside published ones, what was confused, and the pictures themselves.

The page loads nothing; small pictures are inside it, if the data set is still where it was."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision.captions import TITLES
from paceline.evals.vision.dataset import Case, Data, data_url, read_data
from paceline.evals.vision.evaluate import REPORT, SCORES
from paceline.runs.report import COLORS, Curve, plot, render

TEMPLATE, PUBLISHED = (Path(__file__).with_name(name) for name in ("page.html.jinja", "published.toml"))
SIDE = 132  # pixels of a picture on the page
SHOWN = 2  # right and wrong queries of each subset and direction that are shown


def read_reports(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """The report of each run; PacelineError if one cannot be read."""
    return [_read_report(run) for run in runs]


def page(runs: Sequence[Path]) -> str:
    """The page of one run or more. PacelineError if one cannot be read."""
    reports = read_reports(runs)
    subsets = [
        subset for subset in TITLES if any(one["subset"] == subset for report in reports for one in report["results"])
    ]
    tables = [{one["subset"]: one for one in report["results"]} for report in reports]
    names = [run.name for run in runs]
    return render(
        TEMPLATE,
        titles=TITLES,
        subsets=subsets,
        runs=list(zip(names, reports, tables, COLORS, strict=False)),
        **tomllib.loads(PUBLISHED.read_text("utf-8")),
        examples=[(run.name, _examples(report, run)) for run, report in zip(runs, reports, strict=True)],
        frontiers=[
            (name, _frontier(report["frontier"]))
            for name, report in zip(names, reports, strict=True)
            if "frontier" in report
        ],
    )


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


def _examples(report: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Queries of each subset that were answered right and wrong, with their pictures; none where scores are lacking."""
    if not (folder / SCORES).exists() or not Path(report["data"]).exists():
        return []
    data, shown = read_data(Path(report["data"])), []
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
                        shown.append(_example(data, case, way, query, answer))
                    if not any(left.values()):
                        break
    return shown


def _example(data: Data, case: Case, way: str, query: int, answer: int) -> dict[str, Any]:
    if way == "i2t":
        texts = [("answered", case.captions[answer]), ("right", case.captions[query])]
        marks = {query: ""}
    else:
        texts = [("asked for", case.captions[query])]
        marks = {answer: "answered", query: "right"}
    return {
        "subset": case.subset,
        "way": "picture to text" if way == "i2t" else "text to picture",
        "right": answer == query,
        "texts": texts[:1] if answer == query else texts,
        "pictures": [
            {"src": _small(data.picture(case.images[i])), "mark": mark, "alt": case.captions[i]}
            for i, mark in sorted(marks.items())
        ],
    }


def _small(picture: Image.Image) -> str:
    return data_url(picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS), "WEBP", quality=80)
