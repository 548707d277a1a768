"""The register of procedural kinds: what a thing is called, which colours it comes in, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.evals.vision.drawing import Drawing, Pen

RED, ORANGE, YELLOW, GREEN, BLUE, PURPLE, PINK = (
    "#d8433b", "#ee8a30", "#f2c83d", "#4c9f55", "#3f76c8", "#8455b5", "#e5779f",
)  # fmt: skip
BROWN, TAN, GREY, SILVER, DARK, WHITE, BLACK, TEAL = (
    "#8a5a34", "#d2a878", "#8f969c", "#c3cad0", "#4a5058", "#f6f6f2", "#2b2b2e", "#2f9c95",
)  # fmt: skip
BRIGHT = (RED, ORANGE, YELLOW, GREEN, BLUE, PURPLE, PINK, TEAL)
"""For things that come in any colour."""

Draw = Callable[[Pen, str], None]


@dataclass(frozen=True)
class Kind:
    """A thing people have a word for."""

    name: str
    plural: str
    article: str
    family: str
    colours: tuple[str, ...]
    sketch: Draw

    def draw(self, colour: str) -> Drawing:
        """The thing in `colour`, one of `colours`."""
        pen = Pen()
        self.sketch(pen, colour)
        return pen.drawing()


KINDS: dict[str, Kind] = {}

HELD_OUT = frozenset(
    (
        "apple", "banana", "bell", "bird", "boat", "book", "bus", "candle", "cat", "chair", "cup",
        "guitar", "hammer", "lemon", "rocket", "snail", "star", "tent", "tree", "truck",
    )
)  # fmt: skip
"""Kinds that exports for training never show and test exports show alone: some of every family."""


def kind(
    name: str, family: str, colours: tuple[str, ...], *, plural: str = "", article: str = ""
) -> Callable[[Draw], Draw]:
    """Register a function (pen, colour) as the picture of `name`."""

    def register(sketch: Draw) -> Draw:
        words = plural or (name + "es" if name.endswith(("s", "sh", "ch", "x")) else name + "s")
        KINDS[name] = Kind(name, words, article or ("an" if name[0] in "aeiou" else "a"), family, colours, sketch)
        return sketch

    return register
