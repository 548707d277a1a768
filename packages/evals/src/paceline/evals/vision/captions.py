"""Captions: the six subsets, their values, and sentences in which only the value changes. Also checks whether a caption
is true of a picture, by the names and boxes of its objects alone.

Names and values follow the paper's figures (Peng et al. 2024, SPEC, overview and README). `holds` checks every layout.
"""

import re
import tomllib
from collections.abc import Sequence
from math import hypot, log2
from pathlib import Path
from typing import Any

from paceline.evals.vision.drawing import Noun, shows

SUBSETS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("subsets.toml").read_text("utf-8"))
VALUES: dict[str, tuple[str, ...]] = {name: tuple(one["values"]) for name, one in SUBSETS.items()}
"""The values of each subset, in the order of a case's images; the names are those of the released folders."""
PLACES, NUMBERS = VALUES["absolute_spatial"], VALUES["count"]
TITLES: dict[str, str] = {name: one["title"] for name, one in SUBSETS.items()}
TEMPLATES: dict[str, list[str]] = {name: one["templates"] for name, one in SUBSETS.items()}
HELD_OUT_TEMPLATES = 2
"""The last templates of each subset: builds of the split "train" never use them, those of "test" use no other."""


def caption(subset: str, template: int, value: str, nouns: Sequence[Noun]) -> str:
    """The caption of `value` by a subset's template number `template`, about the first noun."""
    a = nouns[0]
    b = nouns[1] if len(nouns) > 1 else a
    if subset == "existence":
        value = f"no {a.name}" if value == "no" else a.with_article
    elif subset == "count":
        value = f"{value} {a.name if value == 'one' else a.plural}"
    return TEMPLATES[subset][template].format(a=a.name, b=b.name, an_a=a.with_article, v=value)


def templates(subset: str, split: str) -> range:
    """The numbers of the templates that a split ("all", "train" or "test") may use."""
    number = len(TEMPLATES[subset])
    first_held_out = number - HELD_OUT_TEMPLATES
    return {"all": range(number), "train": range(first_held_out), "test": range(first_held_out, number)}[split]


def plain(nouns: Sequence[Noun]) -> str:
    """A caption that names the objects, and says nothing of place, size or number."""
    return "a photo of " + " and ".join(noun.with_article for noun in nouns)


# Whether captions are true -------------------------------------------------------------------------------------------

Box = tuple[str, int, int, int, int]
"""(name, x, y, width, height) in pixels; x and y are the upper left corner's."""

SIDES = {"large": 0.75, "medium-sized": 0.45, "small": 0.20}
"""Longer side of an object of this size, as a share of the picture's."""
RATIOS = {"smaller than": 0.5, "the same size as": 1.0, "bigger than": 2.0}
"""Size of the first object over that of the second; a size is a longer side, or the square root of a drawn area."""
SAME = 1.25
"""Of two objects of the same size, the drawn areas differ by at most this factor, and so do the longer sides."""


def holds(subset: str, value: str, boxes: Sequence[Box], size: int, a: str, b: str = "") -> bool:
    """Whether the caption that says `value` of object `a` (and `b`) is true of a picture of `size` x `size` pixels.

    A caption about one object is false of a picture that shows several, parts and kinds of others counted. Raises
    IndexError if the picture lacks an object that the caption presupposes."""
    found = [box for box in boxes if shows(box[0], a)]
    if subset == "existence":
        return bool(found) == (value != "no")
    if subset == "count":
        return len(found) == NUMBERS.index(value) + 1
    first = found[0]
    if subset == "absolute_size":
        return len(found) == 1 and _nearest(SIDES, _side(first) / size) == value
    if subset == "absolute_spatial":
        return len(found) == 1 and _placed(first, size, value)
    others = [box for box in boxes if shows(box[0], b)]
    if len(found) > 1 or len(others) > 1:
        return False
    second = others[0]
    if subset == "relative_size":
        return compared(_side(first) / _side(second)) == value
    return _direction(first, second) == value


def compared(ratio: float, same: float = SAME) -> str | None:
    """The value that names a size `ratio` times another; None if "the same size" is nearest, but not within `same`."""
    value = _nearest(RATIOS, ratio)
    return None if value == "the same size as" and not 1 / same <= ratio <= same else value


def _side(box: Box) -> int:
    """The longer side."""
    return max(box[3], box[4])


def _centre(box: Box) -> tuple[float, float]:
    return box[1] + box[3] / 2, box[2] + box[4] / 2


def _nearest(known: dict[str, float], measured: float) -> str:
    return min(known, key=lambda value: abs(log2(measured / known[value])))


def _placed(box: Box, size: int, value: str) -> bool:
    """Whether a place's words are true of the box's cell of 3 x 3. One side alone is true of its corners too."""
    x, y = _centre(box)
    cell = {("left", "", "right")[int(3 * x / size)], ("top", "", "bottom")[int(3 * y / size)]} - {""}
    words = set(re.findall("[a-z]+", value))
    sides = words & {"left", "right", "top", "bottom"}
    return sides == cell or (sides < cell and not words & {"center", "middle"})


def _direction(first: Box, second: Box) -> str | None:
    """Where the first lies, seen from the second; None unless apart on one axis and about level on the other."""
    (x, y), (u, v) = _centre(first), _centre(second)
    apart_x = first[1] + first[3] <= second[1] or second[1] + second[3] <= first[1]
    apart_y = first[2] + first[4] <= second[2] or second[2] + second[4] <= first[2]
    if apart_x == apart_y or min(abs(x - u), abs(y - v)) > 0.35 * hypot(x - u, y - v):
        return None
    if apart_x:
        return "to the left of" if x < u else "to the right of"
    return "above" if y < v else "below"
