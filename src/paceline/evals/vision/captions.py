"""What captions say: the six subsets, their values, and sentences in which only the value changes.

    caption("count", 0, "three", objects)      # "a photo of three sheep"

Names, values and the first wordings follow the paper's figures (Peng et al. 2024, SPEC, overview and README); the other
templates are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

TEMPLATES: dict[str, tuple[str, ...]] = {
    "absolute_size": (
        "the {a} is {v} in the image",
        "a photo of a {v} {a}",
        "an image with a {v} {a}",
        "there is a {v} {a} in the picture",
        "the picture shows a {v} {a}",
        "the {a} in the picture is {v}",
    ),
    "relative_size": (
        "the {a} is {v} the {b}",
        "the {a} in the image is {v} the {b}",
        "an image with {an_a} {v} the {b}",
        "a photo of {an_a} that is {v} the {b}",
        "the picture shows {an_a} {v} the {b}",
        "in the picture, the {a} is {v} the {b}",
    ),
    "absolute_spatial": (
        "the {a} is {v} of the image",
        "a photo with {an_a} {v}",
        "an image with {an_a} {v}",
        "there is {an_a} {v} of the picture",
        "the picture shows {an_a} {v}",
        "the {a} is {v} of the picture",
    ),
    "relative_spatial": (
        "the {a} is {v} the {b}",
        "the {a} in the image is {v} the {b}",
        "an image with {an_a} {v} the {b}",
        "there is {an_a} {v} the {b}",
        "the picture shows {an_a} {v} the {b}",
        "in the picture, the {a} is {v} the {b}",
    ),
    "existence": (
        "there is {v} in the image",
        "a photo with {v}",
        "an image with {v}",
        "the image shows {v}",
        "the picture shows {v}",
        "there is {v} in the picture",
    ),
    "count": (
        "a photo of {v}",
        "an image with {v}",
        "an image of {v}",
        "a photo with {v}",
        "the picture shows {v}",
        "in the picture there are {v}",
    ),
}
"""{a}, {b}: the nouns; {an_a}: the first with its article; {v}: the value, with its noun where they belong together."""

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
