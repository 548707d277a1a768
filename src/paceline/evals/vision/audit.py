"""Checks of a data set that need no model: is it what it says, and does something trivial give the answers away?

    report = audit(Path("build/spec"))
    [check["name"] for check in report["checks"] if check["ok"] is False]

What needs boxes or a seed is checked of our own data sets only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops
from scipy.stats import chisquare

from paceline.errors import PacelineError
from paceline.evals.vision.command import label_histograms
from paceline.evals.vision.dataset import Case, Data, read_data
from paceline.evals.vision.engine import Plan, compose, drawn_area, render
from paceline.evals.vision.geometry import SAME, compared
from paceline.evals.vision.models.known import Geometry
from paceline.evals.vision.probe import UNAVOIDABLE, features, probe
from paceline.evals.vision.words import TITLES, VALUES
from paceline.evals.vision.writer import MANIFEST

REDRAWN = 5
"""Cases of each subset that are drawn once more."""
SLACK = 10.0
"""Points above chance that a probe of trivial features may reach."""
UNLIKELY = 1e-4
"""Probability below which label places do not pass for uniform."""
FEWEST = 20
"""Cases of a subset that a probe needs."""

AGAIN, SIZES = "drawn again", "sizes in drawn area"

Check = dict[str, Any]


def audit(source: Path, advance: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """All checks that the data set allows, each {"name", "ok", "says"}; ok is None where nothing could be judged."""
    data = read_data(source)
    problems, digests, outside = list(data.problems), Counter[str](), []
    trivial: dict[str, list[np.ndarray]] = {}
    for number, case in enumerate(data.cases):
        try:
            pictures = [data.picture(image) for image in case.images]
        except PacelineError as error:
            problems.append(f"{case.subset}/{case.id}: {error}")
            continue
        digests.update(hashlib.sha256(picture.tobytes()).hexdigest() for picture in pictures)
        trivial.setdefault(case.subset, []).append(features(pictures, case.facts.get("boxes")))
        if case.facts and not case.facts["background"].startswith("inpaint:") and (spill := spilled(case, pictures)):
            outside.append(spill)
        advance(number + 1, len(data.cases))
    described = [case for case in data.cases if case.facts]
    checks = [
        _check("whole", not problems, problems, f"{len(data.cases):,} cases"),
        _check("no picture twice", max(digests.values(), default=1) == 1, [], f"{len(digests):,} different pictures"),
        *_labels(data),
        _wording(data),
    ]
    if described:
        wrong = [
            f"{case.subset}/{case.id}"
            for case in described
            if not np.array_equal(Geometry().case_scores(case), np.eye(case.k))
        ]
        checks.append(
            _check("captions true of one picture each", not wrong, wrong, "by their boxes, all pairs of all cases")
        )
        checks.append(_check("pictures differ in boxes only", not outside, outside, f"{len(described):,} cases"))
    checks += [_probe(subset, tables) for subset, tables in trivial.items()]
    checks += _redraw(source, data)
    return {"data": str(source), "checks": checks}


def _check(name: str, ok: bool, problems: list[str], says: str) -> Check:
    return {
        "name": name,
        "ok": bool(ok),
        "says": says if ok or not problems else f"{len(problems)}, the first: {problems[0]}",
    }


def spilled(case: Case, pictures: list[Image.Image]) -> str:
    """Where two pictures of a case differ outside the boxes of both; "" if nowhere."""
    for i in range(1, len(pictures)):
        changed: np.ndarray = np.asarray(ImageChops.difference(pictures[0], pictures[i])).max(2) > 0
        for _, x, y, width, height in (*case.facts["boxes"][0], *case.facts["boxes"][i]):
            changed[y : y + height, x : x + width] = False
        if changed.any():
            row, column = np.argwhere(changed)[0]
            return f"{case.images[i]} differs from {case.images[0]} at ({column}, {row})"
    return ""


def _labels(data: Data) -> Iterator[Check]:
    for subset, ways in label_histograms(data).items():
        for way, counts in ways.items():
            likely = float(chisquare(counts).pvalue)
            says = f"{' '.join(map(str, counts))} (p = {likely:.2g})"
            yield {"name": f"places of labels, {TITLES[subset]} {way}", "ok": likely > UNLIKELY, "says": says}


def _wording(data: Data) -> Check:
    """Whether captions of a case differ in more than their value: then wording is a second variable."""
    mixed = [
        f"{case.subset}/{case.id}: {case.captions[0]!r}, {case.captions[i]!r}"
        for case in data.cases
        for i in range(1, case.k)
        if _frame(case.captions[i]) != _frame(case.captions[0])
    ]
    return _check("one wording a case", not mixed, mixed, f"{len(data.cases):,} cases")


VALUE_WORDS = frozenset(re.findall(r"[a-z]+", " ".join(value for values in VALUES.values() for value in values))) | {
    "an",
    "is",
    "are",
    "not",
}


def _frame(caption: str) -> list[str]:
    """The beginnings of a caption's words but for those that values are made of; singular and plural begin alike."""
    words = re.findall(r"[a-z]+|[.]", caption.lower())
    return [word[:3] for word in words if word not in VALUE_WORDS]


def _probe(subset: str, tables: list[np.ndarray]) -> Check:
    name = f"trivial features, {TITLES[subset]}"
    if len(tables) < FEWEST:
        return {"name": name, "ok": None, "says": f"too few to judge ({len(tables)} of {FEWEST})"}
    table = np.stack(tables)
    (accuracy, error), (beside, _) = probe(table), probe(table, beside=True)
    chance = 100 / len(VALUES[subset])
    allowed = subset in UNAVOIDABLE
    note = f"; {UNAVOIDABLE[subset]}" if allowed else ""
    alone = f"{accuracy:.1f} % of pictures alone (standard error {error:.1f}, chance {chance:.1f})"
    return {
        "name": name,
        "ok": allowed or accuracy < chance + max(SLACK, 3 * error),
        "says": f"{alone}, {beside:.1f} % beside their case{note}",
    }


def _redraw(source: Path, data: Data) -> list[Check]:
    """Draw some cases once more, from the seed in the manifest, and measure what compared objects cover."""
    manifest = source / MANIFEST
    if not manifest.is_file():
        return []
    facts = json.loads(manifest.read_text("utf-8"))
    plan = Plan(
        **{key: facts[key] for key in Plan.__dataclass_fields__ if key != "renderer"},
        renderer=facts["renderer"].split()[0],
    )
    if other := [key for key in ("renderer", "engine_version") if plan.facts()[key] != facts[key]]:
        says = f"not checked: it was drawn with {other[0]} {facts[other[0]]}, and here is {plan.facts()[other[0]]}"
        return [{"name": name, "ok": None, "says": says} for name in (AGAIN, SIZES)]
    other, number = [], 0
    for subset in VALUES:
        for case in [case for case in data.cases if case.subset == subset and case.facts][:REDRAWN]:
            again = render(plan, compose(plan, subset, int(case.id)))
            number += len(again)
            other += [
                image for image, picture in zip(case.images, again, strict=True)
                if picture.tobytes() != data.picture(image).tobytes()
            ]  # fmt: skip
    sized = [case for case in data.cases if case.subset == "relative_size" and case.facts]
    wrong = [unequal for case in sized if (unequal := _unlike(plan, case))]
    return [
        _check(AGAIN, not other, other, f"{number} pictures are the same, byte by byte"),
        *([_check(SIZES, not wrong, wrong, f"{len(sized):,} cases")] if sized else []),
    ]


def _unlike(plan: Plan, case: Case) -> str:
    """A caption of sizes that is not true of what its picture's objects cover; "" if all are."""
    drawn = compose(plan, case.subset, int(case.id))
    if [thing.name for thing in drawn.things] != case.facts["objects"]:
        return f"{case.subset}/{case.id}: the seed gives other objects"
    for value, boxes in zip(case.facts["values"], case.facts["boxes"], strict=True):
        a, b = (drawn_area(plan, drawn, box) for box in boxes)
        if compared(sqrt(a / b), sqrt(SAME)) != value:
            return f"{case.subset}/{case.id}: {value!r} of areas of {a:.0f} and {b:.0f} pixels"
    return ""
