"""What captions say: the six subsets, their values, and sentences in which only the value changes.

    caption("count", 0, "three", objects)      # "a photo of three sheep"

Names and values follow the paper's figures (Peng et al. 2024, SPEC, overview and README).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SIZES = ("large", "medium-sized", "small")
COMPARED = ("smaller than", "the same size as", "bigger than")
PLACES = (
    "in the top-left corner", "at the top center", "in the top-right corner",
    "at the middle left", "in the center", "at the middle right",
    "in the bottom-left corner", "at the bottom center", "in the bottom-right corner",
)  # fmt: skip
"""Row by row, as one reads. Each names its row and its column: what is in a corner is "at the top" too."""
DIRECTIONS = ("to the left of", "to the right of", "above", "below")
PRESENCE = ("no", "a")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

VALUES: dict[str, tuple[str, ...]] = {
    "absolute_size": SIZES,
    "relative_size": COMPARED,
    "absolute_spatial": PLACES,
    "relative_spatial": DIRECTIONS,
    "existence": PRESENCE,
    "count": NUMBERS,
}
"""The values of each subset, in the order of a case's images; the names are those of the released folders."""

TITLES = {
    "absolute_size": "absolute size",
    "relative_size": "relative size",
    "absolute_spatial": "absolute position",
    "relative_spatial": "relative position",
    "existence": "existence",
    "count": "count",
}

TEMPLATES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("templates.toml").read_text("utf-8"))
HELD_OUT_TEMPLATES = 2
"""The last templates of each subset: builds of the split "train" never use them, those of "test" use no other."""


@dataclass(frozen=True)
class Noun:
    """How captions name a thing."""

    name: str
    plural: str
    article: str

    @property
    def with_article(self) -> str:
        return f"{self.article} {self.name}"


def article_of(name: str) -> str:
    """ "a" or "an", by the first letter."""
    return "an" if name[0] in "aeiou" else "a"


def caption(subset: str, template: int, value: str, nouns: Sequence[Noun]) -> str:
    """The caption of `value` in a subset's template number `template`; the first noun is what it is about."""
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
    """A caption that names what is there and says nothing of where, how large or how many."""
    return "a photo of " + " and ".join(noun.with_article for noun in nouns)
