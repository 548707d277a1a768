"""How much of the answers a picture's trivial features give away: its mean colour, edges, covered area, JPEG size.

accuracy, error = probe(np.stack([features(pictures, boxes) for ...]))      # percent
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

UNAVOIDABLE = {
    "absolute_size": "a larger object covers more",
    "count": "more objects of one size cover more",
}
"""Subsets in which the value cannot but change the covered area, and why."""
SIDE = 96
"""Pictures are made this small first: the features are coarse, and there are thousands of pictures."""
FOLDS = 5


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


def probe(cases: np.ndarray, beside: bool = False) -> tuple[float, float]:
    """Percent of the pictures whose value a classifier tells from their features, and its standard error.

    cases: (cases, K, features). beside: it sees the features beside the mean of the case too, as someone does who has
    all K pictures: then the middle of any scale stands out. It is tested on cases that it was not fitted on."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import GroupKFold, cross_val_predict

    number, k, _ = cases.shape
    if number < FOLDS:
        return 100 / k, 0.0
    seen = np.concatenate([cases, cases - cases.mean(1, keepdims=True)], 2) if beside else cases
    values, groups = np.tile(np.arange(k), number), np.repeat(np.arange(number), k)
    classifier = HistGradientBoostingClassifier(max_iter=50, max_leaf_nodes=8, random_state=0)
    guesses = cross_val_predict(classifier, seen.reshape(number * k, -1), values, groups=groups, cv=GroupKFold(FOLDS))
    right = (guesses == values).reshape(number, k).mean(1)
    return float(100 * right.mean()), float(100 * right.std() / np.sqrt(number))
