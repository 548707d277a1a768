"""Pictures of objects as shapes: polygons and lines in a square of 100 by 100, y downwards, independent of any size.

    pen = Pen()
    pen.oval(50, 50, 40, 40, "#d23b32")
    pen.path("M50 10 Q60 0 70 5", stroke="#6b4a2b", width=4)
    pen.drawing().bounds        # tight, line widths included

Curves are cut into short straight pieces here, so that every renderer draws the same outline.
"""

from __future__ import annotations

import re
from colorsys import hls_to_rgb, rgb_to_hls
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
"""(n, 2), in units of a hundredth of the square."""

OUTLINE = 1.8
"""Width of the line around a filled shape, in the same units."""
PIECES = 18
"""Straight pieces of a Bézier curve."""


@dataclass(frozen=True)
class Shape:
    """One closed and filled outline, or an open line (`fill` is None)."""

    points: Points
    fill: str | None
    stroke: str | None
    width: float


@dataclass(frozen=True, eq=False)
class Drawing:
    """Shapes, the lowest first. Equal to itself alone, so that figures of it can be cached."""

    shapes: tuple[Shape, ...]

    @cached_property
    def bounds(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of everything drawn."""
        low = np.min([s.points.min(0) - s.width / 2 for s in self.shapes], 0)
        high = np.max([s.points.max(0) + s.width / 2 for s in self.shapes], 0)
        return float(low[0]), float(low[1]), float(high[0]), float(high[1])

    @property
    def aspect(self) -> float:
        """Width over height."""
        left, top, right, bottom = self.bounds
        return (right - left) / (bottom - top)


@dataclass
class Pen:
    """Collects shapes. `fill` None draws only the line; `line=False` draws no outline around a fill."""

    shapes: list[Shape] = field(default_factory=list)

    def drawing(self) -> Drawing:
        return Drawing(tuple(self.shapes))

    def oval(self, x: float, y: float, rx: float, ry: float, fill: str | None, *, line: bool = True) -> None:
        """An ellipse around (x, y)."""
        turn = np.linspace(0, 2 * np.pi, 72, endpoint=False)
        self._fill(np.stack([x + rx * np.cos(turn), y + ry * np.sin(turn)], 1), fill, line)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str | None, *, r: float = 0, line: bool = True
    ) -> None:
        """A rectangle with its top-left corner at (x, y), its corners rounded with radius `r`."""
        turn = np.linspace(0, np.pi / 2, 9) if r else np.zeros(1)
        corners = ((x + width - r, y + height - r), (x + r, y + height - r), (x + r, y + r), (x + width - r, y + r))
        points = [
            (cx + r * np.cos(turn + quarter * np.pi / 2), cy + r * np.sin(turn + quarter * np.pi / 2))
            for quarter, (cx, cy) in enumerate(corners)
        ]
        self._fill(np.concatenate([np.stack(p, 1) for p in points]), fill, line)

    def poly(self, corners: str, fill: str | None, *, line: bool = True) -> None:
        """A polygon, "x y x y ..."."""
        self._fill(np.array(corners.split(), float).reshape(-1, 2), fill, line)

    def star(self, x: float, y: float, outer: float, inner: float, tips: int, fill: str, *, line: bool = True) -> None:
        """A star of `tips` tips, one of them up."""
        turn = np.arange(2 * tips) * np.pi / tips - np.pi / 2
        radius = np.where(np.arange(2 * tips) % 2, inner, outer)
        self._fill(np.stack([x + radius * np.cos(turn), y + radius * np.sin(turn)], 1), fill, line)

    def path(
        self,
        text: str,
        fill: str | None = None,
        *,
        line: bool = True,
        stroke: str | None = None,
        width: float = OUTLINE,
    ) -> None:
        """An outline in SVG's absolute commands M, L, Q and C. With `stroke` it is open lines of that colour."""
        if stroke is None:
            self._fill(trace(text), fill, line)
            return
        for part in re.findall(r"M[^M]*", text):
            self.shapes.append(Shape(trace(part), None, stroke, width))

    def _fill(self, points: Points, fill: str | None, line: bool) -> None:
        stroke = shade(fill, -0.45) if fill is not None else "#222222"
        self.shapes.append(Shape(points, fill, stroke if line else None, OUTLINE if line else 0.0))


def trace(text: str) -> Points:
    """(n, 2): the points of a path of M, L, Q and C commands; ValueError for any other."""
    points: list[Points] = []
    for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", text):
        given = np.array(re.findall(r"-?[\d.]+", numbers), float).reshape(-1, 2)
        order = {"M": 1, "L": 1, "Q": 2, "C": 3}.get(command)
        if order is None:
            raise ValueError(f"path command {command!r} in {text!r}: M, L, Q and C are known")
        for control in given.reshape(-1, order, 2):
            points.append(control if order == 1 else _bezier(np.concatenate([points[-1][-1:], control])))
    return np.concatenate(points)


def _bezier(control: Points) -> Points:
    """The curve of 3 or 4 control points, without its first point (de Casteljau)."""
    t = np.linspace(0, 1, PIECES + 1)[1:, None, None]
    level = np.broadcast_to(control, (PIECES, *control.shape))
    while level.shape[1] > 1:
        level = (1 - t) * level[:, :-1] + t * level[:, 1:]
    return np.asarray(level[:, 0])


def rgb(colour: str) -> tuple[int, int, int]:
    """The three bytes of "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def shade(colour: str, by: float) -> str:
    """`colour` made lighter (by > 0, 1 is white) or darker (by < 0, -1 is black)."""
    hue, light, full = rgb_to_hls(*(byte / 255 for byte in rgb(colour)))
    light = light + by * ((1 - light) if by > 0 else light)
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(hue, light, full))
