"""What captions say: the six subsets, their values, and sentences in which only the value changes.

    caption("count", 0, "three", objects)      # "a photo of three sheep"

K, the names and the wordings follow the paper's figures (Peng et al. 2024, SPEC, overview and README); the further
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
BESIDE = ("to the left of", "to the right of", "above", "below")
PRESENCE = ("no", "a")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

VALUES: dict[str, tuple[str, ...]] = {
    "absolute_size": SIZES,
    "relative_size": COMPARED,
    "absolute_spatial": PLACES,
    "relative_spatial": BESIDE,
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
"""{a}, {b}: the nouns; {an_a}: with its article; {v}: the value, with its noun where the two belong together."""

SHOWS: dict[str, tuple[str, ...]] = {
    "apple": ("leaf",),
    "car": ("lamp",),
    "carrot": ("leaf",),
    "cherry": ("leaf",),
    "crab": ("shell",),
    "duck": ("bird",),
    "flower": ("leaf",),
    "ice cream": ("cherry",),
    "lemon": ("leaf",),
    "penguin": ("bird",),
    "snail": ("shell",),
    "snowman": ("ball", "carrot", "hat"),
    "sun": ("star",),
    "traffic light": ("lamp",),
    "tree": ("leaf",),
    "turtle": ("shell",),
}
"""What else a picture of a thing shows: its parts, and what it is a kind of, as far as captions have words for them."""

HELD_OUT_TEMPLATES = 2
"""The last ones of each subset: exports for training never use them, test exports use them alone."""


@dataclass(frozen=True)
class Noun:
    """How captions name a thing."""

    name: str
    plural: str
    article: str

    @property
    def with_article(self) -> str:
        return f"{self.article} {self.name}"


def shows(thing: str, name: str) -> bool:
    """Whether who sees a `thing` sees a `name`."""
    return name == thing or name in SHOWS.get(thing, ())


def caption(subset: str, template: int, value: str, nouns: Sequence[Noun]) -> str:
    """The caption of `value` in a subset's template number `template`; the first noun is what it is about."""
    a = nouns[0]
    b = nouns[1] if len(nouns) > 1 else a
    said = value
    if subset == "existence":
        said = f"no {a.name}" if value == "no" else a.with_article
    elif subset == "count":
        said = f"{value} {a.name if value == 'one' else a.plural}"
    return TEMPLATES[subset][template].format(a=a.name, b=b.name, an_a=a.with_article, v=said)


def templates(subset: str, split: str) -> range:
    """The numbers of the templates that a split ("all", "train" or "test") may use."""
    number = len(TEMPLATES[subset])
    return {
        "all": range(number),
        "train": range(number - HELD_OUT_TEMPLATES),
        "test": range(number - HELD_OUT_TEMPLATES, number),
    }[split]


def plain(nouns: Sequence[Noun]) -> str:
    """A caption that names what is there and says nothing of where, how large or how many."""
    return "a photo of " + " and ".join(noun.with_article for noun in nouns)
