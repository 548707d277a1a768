"""Place the things in the pictures of a case, which differ only in the value that the captions name.

Every random choice is made once for the case, so that its pictures differ in nothing else. Lengths without a unit are
shares of the picture's side. The paper gives no numbers; these are ours."""

from collections.abc import Callable, Sequence

import numpy as np

from paceline.evals.vision.captions import RATIOS, SAME, SIDES, VALUES, Box
from paceline.evals.vision.providers import Cutout

PAIR = 0.56  # Largest sqrt(a^2 + b^2) of the longer sides a and b of two compared objects.
GAP = 0.05  # least distance of two objects
SLACK = 0.9 * SAME
"""Largest ratio of the longer sides of compared objects of equal area; the rest of SAME is for whole pixels."""


Scene = tuple[Box, ...]
Layout = Callable[[np.random.Generator, Sequence[Cutout], int], list[Scene]]


def box(thing: Cutout, x: float, y: float, side: float, size: int) -> Box:
    """The box of `thing` around (x, y) with its longer side `side`, in whole pixels and inside the picture."""
    long = side * size
    width, height = (long, long / thing.aspect) if thing.aspect >= 1 else (long * thing.aspect, long)
    w, h = max(1, round(width)), max(1, round(height))
    left = min(max(round(x * size - w / 2), 0), size - w)
    top = min(max(round(y * size - h / 2), 0), size - h)
    return thing.name, left, top, w, h


def absolute_size(rng: np.random.Generator, things: Sequence[Cutout], size: int) -> list[Scene]:
    """One object around one centre, large, medium-sized or small."""
    x, y = 0.5 + rng.uniform(-0.1, 0.1, 2)
    return [(box(things[0], x, y, SIDES[value], size),) for value in VALUES["absolute_size"]]


def relative_size(rng: np.random.Generator, things: Sequence[Cutout], size: int) -> list[Scene]:
    """Two objects side by side, or one above the other. Sizes are roots of drawn areas, whose sum stays the same."""
    a, b = things[:2]
    fill_a, fill_b = _fill(a), _fill(b)
    whole, turned, swapped = PAIR * rng.uniform(0.85, 1.0), rng.random() < 0.5, rng.random() < 0.5
    x, y = rng.uniform(-0.04, 0.04, 2)
    scenes: list[Scene] = []
    for value in VALUES["relative_size"]:
        ratio = RATIOS[value] * np.sqrt(fill_b / fill_a)
        # Sides r s and s with r^2 s^2 fill_a + s^2 fill_b constant; at most `whole` in any picture of the case.
        small = whole * np.sqrt(min(fill_a, fill_b) / (ratio**2 * fill_a + fill_b))
        sides = (ratio * small, small)
        total = sum(sides) + GAP
        centres = (-total / 2 + sides[0] / 2, total / 2 - sides[1] / 2)
        if swapped:
            centres = (-centres[0], -centres[1])
        spots = [(0.5 + x, 0.5 + y + c) if turned else (0.5 + x + c, 0.5 + y) for c in centres]
        scenes.append(tuple(box(t, *spot, side, size) for t, spot, side in zip((a, b), spots, sides, strict=True)))
    return scenes


def comparable(a: Cutout, b: Cutout) -> bool:
    """Whether things that cover equal areas are about equally long too, so that "the same size" is true of both."""
    return bool(SLACK**-2 <= _fill(a) / _fill(b) <= SLACK**2)


def _fill(thing: Cutout) -> float:
    """Drawn share of the square around a thing."""
    return thing.cover * min(thing.aspect, 1 / thing.aspect)


def absolute_spatial(rng: np.random.Generator, things: Sequence[Cutout], size: int) -> list[Scene]:
    """One object in each cell of a 3 x 3 grid, off the cell's centre by the same jitter."""
    side = rng.uniform(0.18, 0.27)
    x, y = rng.uniform(-0.03, 0.03, 2)
    return [(box(things[0], (cell % 3 + 0.5) / 3 + x, (cell // 3 + 0.5) / 3 + y, side, size),) for cell in range(9)]


def relative_spatial(rng: np.random.Generator, things: Sequence[Cutout], size: int) -> list[Scene]:
    """Two objects on one axis, almost level on the other, their middle anywhere."""
    a, b = things[:2]
    sides = rng.uniform(0.18, 0.26, 2)
    apart = sum(sides) / 2 + GAP + rng.uniform(0, 0.08)
    offset = rng.uniform(-0.05, 0.05)
    free = 0.5 - apart / 2 - max(sides) / 2
    x, y = 0.5 + rng.uniform(-free, free, 2)
    scenes: list[Scene] = []
    for value in VALUES["relative_spatial"]:
        along = (-1 if value in ("to the left of", "above") else 1) * apart / 2
        dx, dy = (offset / 2, along) if value in ("above", "below") else (along, offset / 2)
        scenes.append((box(a, x + dx, y + dy, sides[0], size), box(b, x - dx, y - dy, sides[1], size)))
    return scenes


def existence(rng: np.random.Generator, things: Sequence[Cutout], size: int) -> list[Scene]:
    """Three to five other objects, and in one place either the target (the first thing) or a neutral one (the second).
    Neither the number of objects nor their area tells which."""
    target, neutral, *others = things
    others = others[: rng.integers(3, 6)]
    side = rng.uniform(0.2, 0.27)
    spots = _grid(rng, 0.025)
    around = tuple(box(t, *spot, side, size) for t, spot in zip(others, spots[1:], strict=False))
    return [(box(thing, *spots[0], side, size), *around) for thing in (neutral, target)]


def count(rng: np.random.Generator, things: Sequence[Cutout], size: int, one_size: bool = True) -> list[Scene]:
    """One to nine of a kind, in cells of a grid. Each picture adds an object to the one before.

    one_size: whether all pictures share a size; else each picture has a random size, independent of its number."""
    side = rng.uniform(0.16, 0.27)
    sides = rng.uniform(0.12, 0.27, 9)
    spots = _grid(rng, 0.03)
    return [
        tuple(box(things[0], *spot, side if one_size else sides[n - 1], size) for spot in spots[:n])
        for n in range(1, 10)
    ]


def scattered(rng: np.random.Generator, things: Sequence[Cutout], size: int) -> Scene:
    """One to four things of any size at random places, none on top of another: the picture of a plain pair."""
    if len(things) == 1:
        side = rng.uniform(0.2, 0.75)
        x, y = rng.uniform(side / 2, 1 - side / 2, 2)
        return (box(things[0], x, y, side, size),)
    cells = rng.permutation(4)[: len(things)]
    spots = [((cell % 2 + 0.5) / 2, (cell // 2 + 0.5) / 2, rng.uniform(0.2, 0.42)) for cell in cells]
    moved = [(rng.uniform(-1, 1, 2) * (0.5 - side) / 2, side) for *_, side in spots]
    return tuple(
        box(thing, x + dx, y + dy, side, size)
        for thing, (x, y, _), ((dx, dy), side) in zip(things, spots, moved, strict=True)
    )


def _grid(rng: np.random.Generator, jitter: float) -> list[tuple[float, float]]:
    """The nine cells of a 3 x 3 grid in random order, each moved a little."""
    moved = rng.uniform(-jitter, jitter, (9, 2))
    order = rng.permutation(9)
    return [((cell % 3 + 0.5) / 3 + x, (cell // 3 + 0.5) / 3 + y) for cell, (x, y) in zip(order, moved, strict=True)]


LAYOUTS: dict[str, Layout] = {
    "absolute_size": absolute_size,
    "relative_size": relative_size,
    "absolute_spatial": absolute_spatial,
    "relative_spatial": relative_spatial,
    "existence": existence,
    "count": count,
}

THINGS = {"relative_size": 2, "relative_spatial": 2, "existence": 7}
"""Number of different things that a subset's layout places, where it is not one."""
FITS: dict[str, Callable[[Cutout, Cutout], bool]] = {"relative_size": comparable}
"""Whether a subset's layout can place two things together, where it cannot any two."""
