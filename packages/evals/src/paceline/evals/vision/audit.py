"""Check a data set without a model: is it as described, and do trivial features give the answers away?

Checks that need boxes or a seed run only on our own data sets."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops
from scipy.stats import chisquare

from paceline.evals.vision.captions import SAME, TITLES, VALUES, compared
from paceline.evals.vision.dataset import Case, Data, read_data
from paceline.evals.vision.engine import build_facts, compose, drawn_area, render
from paceline.evals.vision.evaluate import geometry_scores
from paceline.evals.vision.options import BuildOptions
from paceline.evals.vision.writer import MANIFEST

REDRAWN = 5  # Cases of each subset to draw once more.
SLACK = 10.0  # A probe of trivial features may reach so many points above chance.
UNLIKELY = 1e-4  # Below this p-value the places of labels are not uniform.
FEWEST = 20  # A probe needs so many cases of a subset.
FOLDS = 5
SIDE = 96
"""Pixels to which pictures are scaled before features are measured: features are coarse, and pictures are many."""
UNAVOIDABLE = {
    "absolute_size": "a larger object covers more",
    "count": "more objects of one size cover more",
}
"""Subsets whose value cannot but change the covered area, and why."""
AGAIN, SIZES = "drawn again", "sizes in drawn area"
VALUE_WORDS = {"an", "is", "are", "not"} | {
    word for values in VALUES.values() for value in values for word in re.findall("[a-z]+", value)
}

Check = dict[str, Any]


def audit(source: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Run all checks that the data set allows.
    Returns {"name", "ok", "says"} of each; ok is None if it cannot be judged."""
    data = read_data(source)
    problems, twice, outside = list(data.problems), [], []
    seen: dict[str, str] = {}
    trivial: dict[str, list[np.ndarray]] = {}
    for number, case in enumerate(data.cases, 1):
        pictures = data.pictures(case, problems)
        progress(number, len(data.cases))
        if pictures is None:
            continue
        for image, picture in zip(case.images, pictures, strict=True):
            first = seen.setdefault(hashlib.sha256(picture.tobytes()).hexdigest(), image)
            if first != image:
                twice.append(f"{image} is {first} again")
        trivial.setdefault(case.subset, []).append(features(pictures, case.facts.get("boxes")))
        if case.facts and not case.facts["background"].startswith("inpaint:") and (spill := _spilled(case, pictures)):
            outside.append(spill)
    checks = [
        _check("whole", problems, f"{len(data.cases):,} cases"),
        _check("no picture twice", twice, f"{len(seen):,} different pictures"),
        *_labels(data),
        _wording(data),
    ]
    if described := [case for case in data.cases if case.facts]:
        wrong = [case.name for case in described if not np.array_equal(geometry_scores(case), np.eye(case.k))]
        checks.append(_check("captions true of one picture each", wrong, "by their boxes, all pairs of all cases"))
        checks.append(_check("pictures differ in boxes only", outside, f"{len(described):,} cases"))
    checks += [_trivial(subset, tables) for subset, tables in trivial.items()]
    return {"data": str(source), "checks": [*checks, *_redraw(data)]}


def _check(name: str, problems: Sequence[str], fine: str) -> Check:
    """A check that passes if there are no problems. fine: its text then."""
    says = f"{len(problems)}, the first: {problems[0]}" if problems else fine
    return {"name": name, "ok": not problems, "says": says}


def _spilled(case: Case, pictures: Sequence[Image.Image]) -> str:
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
    """Whether right keys stand at all places equally often."""
    for subset, ways in data.label_counts().items():
        for way, counts in ways.items():
            likely = float(chisquare(counts).pvalue)
            says = f"{' '.join(map(str, counts))} (p = {likely:.2g})"
            yield {"name": f"places of labels, {TITLES[subset]} {way}", "ok": likely > UNLIKELY, "says": says}


def _wording(data: Data) -> Check:
    """Whether captions of a case differ in their value alone; otherwise wording is a second variable."""
    mixed = [
        f"{case.name}: {case.captions[0]!r}, {case.captions[i]!r}"
        for case in data.cases
        for i in range(1, case.k)
        if _frame(case.captions[i]) != _frame(case.captions[0])
    ]
    return _check("one wording a case", mixed, f"{len(data.cases):,} cases")


def _frame(caption: str) -> list[str]:
    """The beginnings of a caption's words without those of values; singular and plural begin alike."""
    return [word[:3] for word in re.findall(r"[a-z]+|[.]", caption.lower()) if word not in VALUE_WORDS]


def _trivial(subset: str, tables: list[np.ndarray]) -> Check:
    """Whether a classifier of trivial features stays near chance."""
    name = f"trivial features, {TITLES[subset]}"
    if len(tables) < FEWEST:
        return {"name": name, "ok": None, "says": f"too few to judge ({len(tables)} of {FEWEST})"}
    table = np.stack(tables)
    (accuracy, error), (in_case, _) = probe(table), probe(table, with_case=True)
    chance = 100 / len(VALUES[subset])
    note = f"; {UNAVOIDABLE[subset]}" if subset in UNAVOIDABLE else ""
    alone = f"{accuracy:.1f} % of pictures alone (standard error {error:.1f}, chance {chance:.1f})"
    return {
        "name": name,
        "ok": subset in UNAVOIDABLE or accuracy < chance + max(SLACK, 3 * error),
        "says": f"{alone}, {in_case:.1f} % beside their case{note}",
    }


def features(pictures: Sequence[Image.Image], boxes: Sequence[Sequence[Any]] | None) -> np.ndarray:
    """(K, features): mean red, green and blue, edge density, JPEG bytes, and the boxes' area where boxes are known."""
    rows = []
    for i, picture in enumerate(pictures):
        small = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        pixels = np.asarray(small, np.float64)
        grey = pixels.mean(2)
        edges = np.abs(np.diff(grey, axis=0)).mean() + np.abs(np.diff(grey, axis=1)).mean()
        file = BytesIO()
        small.save(file, "JPEG", quality=75)
        area = sum(box[3] * box[4] for box in boxes[i]) / picture.width**2 if boxes else 0.0
        rows.append([*pixels.mean((0, 1)), edges, len(file.getvalue()), area])
    return np.array(rows)


def probe(cases: np.ndarray, with_case: bool = False) -> tuple[float, float]:
    """Percent of the pictures whose value a classifier tells from their features, and its standard error.

    cases: (cases, K, features). with_case: whether the classifier also reads the features minus their mean over the
    case, as if it saw all K pictures. It is tested on cases that it was not fitted on."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import GroupKFold, cross_val_predict

    number, k, _ = cases.shape
    if number < FOLDS:
        return 100 / k, 0.0
    seen = np.concatenate([cases, cases - cases.mean(1, keepdims=True)], 2) if with_case else cases
    values, groups = np.tile(np.arange(k), number), np.repeat(np.arange(number), k)
    classifier = HistGradientBoostingClassifier(max_iter=50, max_leaf_nodes=8, random_state=0)
    guesses = cross_val_predict(classifier, seen.reshape(number * k, -1), values, groups=groups, cv=GroupKFold(FOLDS))
    right = (guesses == values).reshape(number, k).mean(1)
    return float(100 * right.mean()), float(100 * right.std() / np.sqrt(number))


def _redraw(data: Data) -> list[Check]:
    """Draw some cases once more, from the options in the manifest, and measure what compared objects cover."""
    manifest = data.source / MANIFEST
    if not manifest.is_file():
        return []
    facts = json.loads(manifest.read_text("utf-8"))
    asked = {key: facts[key] for key in BuildOptions.__dataclass_fields__}
    options = BuildOptions(**asked)
    here = build_facts(options)
    for key in ("renderer", "engine_version"):
        if here[key] != facts[key]:
            says = f"not checked: it was drawn with {key} {facts[key]}, and here is {here[key]}"
            return [{"name": name, "ok": None, "says": says} for name in (AGAIN, SIZES)]
    ours = [case for case in data.cases if case.facts]
    some = [case for subset in VALUES for case in [case for case in ours if case.subset == subset][:REDRAWN]]
    again = [
        (image, picture.tobytes() == data.picture(image).tobytes())
        for case in some
        for image, picture in zip(
            case.images, render(options, compose(options, case.subset, int(case.id))), strict=True
        )
    ]
    checks = [
        _check(AGAIN, [image for image, same in again if not same], f"{len(again)} pictures are the same, byte by byte")
    ]
    if sized := [case for case in ours if case.subset == "relative_size"]:
        checks.append(
            _check(SIZES, list(filter(None, (_unequal(options, case) for case in sized))), f"{len(sized):,} cases")
        )
    return checks


def _unequal(options: BuildOptions, case: Case) -> str:
    """A caption about sizes that is not true of the areas its picture's objects cover; "" if all are true."""
    drawn = compose(options, case.subset, int(case.id))
    if [thing.name for thing in drawn.things] != case.facts["objects"]:
        return f"{case.name}: the seed gives other objects"
    for value, boxes in zip(case.facts["values"], case.facts["boxes"], strict=True):
        a, b = (drawn_area(drawn, box) for box in boxes)
        if compared(sqrt(a / b), sqrt(SAME)) != value:
            return f"{case.name}: {value!r} of areas of {a:.0f} and {b:.0f} pixels"
    return ""
