"""Which captions are true of a picture, from the boxes of its objects alone: the independent check of every layout.

    holds("relative_spatial", "above", boxes, "kite", "tree")

A box is (name, x, y, width, height) in pixels, x and y its upper left corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, log2

from paceline.evals.vision.words import NUMBERS, PLACES, SIZES

Box = tuple[str, int, int, int, int]

SIDES = {"large": 0.75, "medium-sized": 0.45, "small": 0.20}
"""Longer side of an object of this size, as a share of the picture's."""
RATIOS = {"smaller than": 0.5, "the same size as": 1.0, "bigger than": 2.0}
"""Longer side of the first object over that of the second."""


def holds(subset: str, value: str, boxes: Sequence[Box], size: int, a: str, b: str = "") -> bool:
    """Whether the caption that says `value` of object `a` (and `b`) is true of a picture of `size` x `size` pixels.

    Raises StopIteration if an object that the caption takes for granted is not there."""
    if subset == "existence":
        return any(box[0] == a for box in boxes) == (value != "no")
    if subset == "count":
        return sum(box[0] == a for box in boxes) == NUMBERS.index(value) + 1
    first = next(box for box in boxes if box[0] == a)
    if subset == "absolute_size":
        return _nearest({side: SIDES[side] for side in SIZES}, _side(first) / size) == value
    if subset == "absolute_spatial":
        return _cell(first, size) == PLACES.index(value)
    second = next(box for box in boxes if box[0] == b)
    if subset == "relative_size":
        return _nearest(RATIOS, _side(first) / _side(second)) == value
    return _beside(first, second) == value


def _side(box: Box) -> int:
    """The longer side."""
    return max(box[3], box[4])


def _centre(box: Box) -> tuple[float, float]:
    return box[1] + box[3] / 2, box[2] + box[4] / 2


def _nearest(known: dict[str, float], measured: float) -> str:
    return min(known, key=lambda value: abs(log2(measured / known[value])))


def _cell(box: Box, size: int) -> int:
    """The cell of the 3 x 3 grid that the box's centre lies in, row by row."""
    x, y = _centre(box)
    return int(3 * y / size) * 3 + int(3 * x / size)


def _beside(first: Box, second: Box) -> str | None:
    """Where the first lies of the second: apart on one axis, and nearly level on the other; else None."""
    (x, y), (u, v) = _centre(first), _centre(second)
    apart_x = first[1] + first[3] <= second[1] or second[1] + second[3] <= first[1]
    apart_y = first[2] + first[4] <= second[2] or second[2] + second[4] <= first[2]
    if apart_x == apart_y or min(abs(x - u), abs(y - v)) > 0.35 * hypot(x - u, y - v):
        return None
    if apart_x:
        return "to the left of" if x < u else "to the right of"
    return "above" if y < v else "below"
