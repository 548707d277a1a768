"""The page of one or more runs: figures beside published ones, what was confused, and the pictures themselves.

    write_page([Path("runs/before"), Path("runs/after")], Path("report.html"))

The page loads nothing; small pictures are inside it, if the data set is still where it was.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision.captions import TITLES
from paceline.evals.vision.dataset import Case, Data, read_data
from paceline.evals.vision.evaluate import REPORT, SCORES
from paceline.jsonl import write_whole
from paceline.workbench.report import COLORS, Curve, plot, render

TEMPLATE = Path(__file__).with_name("page.html.jinja")
SIDE = 132
"""Pixels of a picture on the page."""
SHOWN = 2
"""Right and wrong queries of each subset and direction that are shown."""

# What others measured on the released data, percent. Ours has other pictures: compare orders, not digits.
PAPER: dict[str, dict[str, float]] = {
    "FLAVA": {"absolute_size": 37.25, "relative_size": 32.6, "absolute_spatial": 14.4, "relative_spatial": 26.1,
              "existence": 54.9, "count": 17.8},
    "BLIP": {"absolute_size": 43.0, "relative_size": 32.85, "absolute_spatial": 11.6, "relative_spatial": 30.1,
             "existence": 52.75, "count": 37.25},
    "CoCa": {"absolute_size": 37.6, "relative_size": 33.45, "absolute_spatial": 11.75, "relative_spatial": 29.55,
             "existence": 50.45, "count": 36.05},
    "CLIP": {"absolute_size": 39.3, "relative_size": 33.9, "absolute_spatial": 12.45, "relative_spatial": 27.3,
             "existence": 54.75, "count": 24.15},
    "CLIP, tuned by the authors": {"absolute_size": 64.8, "relative_size": 42.2, "absolute_spatial": 32.4,
                                   "relative_spatial": 46.75, "existence": 68.25, "count": 56.7},
}  # fmt: skip
"""Bars of the CVPR 2024 poster of Peng et al., which match the mean of both directions."""
OFFICIAL: dict[str, dict[str, tuple[float, float]]] = {
    "CLIP": {"absolute_size": (44.27, 36.27), "relative_size": (34.07, 32.47), "absolute_spatial": (12.64, 12.20),
             "relative_spatial": (27.10, 26.75), "existence": (57.00, 52.00), "count": (25.27, 23.62)},
    "BLIP": {"absolute_size": (43.20, 43.07), "relative_size": (34.33, 33.27), "absolute_spatial": (12.07, 11.58),
             "relative_spatial": (30.65, 29.60), "existence": (55.50, 50.10), "count": (36.87, 37.40)},
}  # fmt: skip
"""Picture to text and text to picture, in the outputs saved with the official notebooks."""
MEANS: dict[str, float] = {
    "CLIP": 31.9, "NegCLIP": 34.6, "FSC-CLIP (COCO)": 34.2, "FSC-CLIP (LAION-COCO)": 33.4, "GNM-CLIP": 33.1,
    "CE-CLIP": 33.0, "CLoVe": 31.7, "TSVLC": 31.6, "DAC-LLM": 30.8, "DAC-SAM": 29.9,
}  # fmt: skip
"""Mean over subsets of both directions of CLIP ViT-B/32 and models tuned from it, in the study of FSC-CLIP (Oh et al.,
EMNLP 2024)."""


def write_page(runs: Sequence[Path], out: Path) -> None:
    """Raises PacelineError if a run cannot be read, or the page not written."""
    reports = [_read_report(run) for run in runs]
    subsets = [
        subset for subset in TITLES if any(one["subset"] == subset for report in reports for one in report["results"])
    ]
    tables = [{one["subset"]: one for one in report["results"]} for report in reports]
    names = [run.name for run in runs]
    page = render(
        TEMPLATE,
        titles=TITLES,
        subsets=subsets,
        runs=list(zip(names, reports, tables, COLORS, strict=False)),
        paper=PAPER,
        official=OFFICIAL,
        means=MEANS,
        examples=[(run.name, _examples(report, run)) for run, report in zip(runs, reports, strict=True)],
        frontiers=[
            (name, _frontier(report["frontier"]))
            for name, report in zip(names, reports, strict=True)
            if "frontier" in report
        ],
    )
    write_whole(out, page)


def _read_report(run: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads((run / REPORT).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PacelineError(
            f"{run} is no run: paceline eval vision run ... --out {run} writes one ({error})"
        ) from error
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
    """A small copy as a data URL."""
    file = BytesIO()
    picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(file, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
