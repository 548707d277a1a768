"""One or more runs as a page: figures beside published ones, what was confused, and the pictures themselves.

    write_page([Path("runs/before"), Path("runs/after")], Path("report.html"))

The page loads nothing; pictures are small and inside it. Those of a data set that has moved are left out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision import published
from paceline.evals.vision.command import REPORT, SCORES
from paceline.evals.vision.dataset import Data, read_data
from paceline.evals.vision.words import TITLES
from paceline.jsonl import write_whole
from paceline.workbench.report import COLORS, Curve, plot, style

SIDE = 132
"""Pixels of a picture on the page."""
SHOWN = 2
"""Right and wrong queries of each subset and direction that are shown."""


def write_page(runs: Sequence[Path], out: Path) -> None:
    """Raises PacelineError if a run cannot be read, or the page not written."""
    write_whole(out, page([read_report(run) for run in runs], [run.name for run in runs], runs))


def read_report(run: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads((run / REPORT).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PacelineError(
            f"{run} is no run: paceline eval vision run ... --out {run} writes one ({error})"
        ) from error
    return report


def page(reports: Sequence[dict[str, Any]], names: Sequence[str], folders: Sequence[Path]) -> str:
    subsets = [
        subset for subset in TITLES if any(one["subset"] == subset for report in reports for one in report["results"])
    ]
    tables = [{one["subset"]: one for one in report["results"]} for report in reports]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files(__package__) / "page.html.jinja").read_text("utf-8"))
    return template.render(
        style=style(),
        titles=TITLES,
        subsets=subsets,
        runs=list(zip(names, reports, tables, COLORS, strict=False)),
        published=published,
        examples=[
            (name, examples(report, folder)) for name, report, folder in zip(names, reports, folders, strict=True)
        ],
        frontiers=[
            (name, _frontier(report["frontier"]))
            for name, report in zip(names, reports, strict=True)
            if "frontier" in report
        ],
    )


def _frontier(frontier: dict[str, Any]) -> Any:
    """SPEC against zero-shot accuracy, from the weights before to those after."""
    points = frontier["points"]
    spots = [(point["retention"], point["spec"]) for point in points]
    tips = [f"share {p['share']:.1f}: SPEC {p['spec']:.1f}, zero-shot {p['retention']:.1f}" for p in points]
    colours = [COLORS[1] if point["share"] == frontier["chosen"] else COLORS[0] for point in points]
    return plot([Curve(spots, tips, colours)], "zero-shot accuracy, %", "SPEC mean, %")


def examples(report: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Queries of each subset that were answered right and wrong, with their pictures; none where scores are lacking."""
    if not (folder / SCORES).exists() or not Path(report["data"]).exists():
        return []
    data, shown = read_data(Path(report["data"])), []
    with np.load(folder / SCORES) as scores:
        for subset in TITLES:
            for way in ("i2t", "t2i"):
                room = {True: SHOWN, False: SHOWN}
                for case in (case for case in data.cases if case.subset == subset and f"{subset}/{case.id}" in scores):
                    table = scores[f"{subset}/{case.id}"]
                    answers = (table if way == "i2t" else table.T).argmax(1)
                    # Not always the first value: the query to look at moves on with the case.
                    query = int(case.id[-3:], 36) % case.k if case.id else 0
                    right = bool(answers[query] == query)
                    if room[right]:
                        room[right] -= 1
                        shown.append(_example(data, case, way, query, int(answers[query]), right))
                    if not any(room.values()):
                        break
    return shown


def _example(data: Data, case: Any, way: str, query: int, answer: int, right: bool) -> dict[str, Any]:
    if way == "i2t":
        pictures, texts = [query], [("answered", case.captions[answer]), ("right", case.captions[query])]
    else:
        pictures, texts = sorted({answer, query}), [("asked for", case.captions[query])]
    marks = {answer: "answered", query: "right"} if way == "t2i" else {query: ""}
    return {
        "subset": case.subset,
        "way": "picture to text" if way == "i2t" else "text to picture",
        "right": right,
        "texts": texts[:1] if right else texts,
        "pictures": [
            {"src": small(data.picture(case.images[i])), "mark": marks[i], "alt": case.captions[i]}
            for i in pictures
        ],
    }  # fmt: skip


def small(picture: Image.Image) -> str:
    """As a data URL."""
    file = BytesIO()
    picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(file, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
