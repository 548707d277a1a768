"""The objects that pictures show: shapes in a square of 100 by 100, y downwards, and their pixels, drawn by Pillow.

Their data are objects/*.json; docs/research/eval-vision.md describes the format. They are drawn here, so that no
picture has a foreign owner or licence. Curves are cut into short straight pieces."""

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb, rgb_to_hls
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageOps
from PIL import __version__ as PILLOW

Points = NDArray[np.float64]  # (n, 2), in units of a hundredth of the square

OUTLINE = 1.8  # width of a line, in the same units
OUTLINE_SHADE = -0.45
PIECES = 18  # straight pieces of a Bézier curve
LIGHT, DARK = 0.22, -0.16
"""How much lighter a filled shape is at its upper left, and how much darker at its lower right."""
SUPERSAMPLING = 4  # Pixels drawn per pixel of a row, because Pillow does not smooth edges.
COVER_SIDE = 96  # A drawing's cover is measured on a sprite with this longer side, in pixels.

COLOURS = tomllib.loads(Path(__file__).with_name("palette.toml").read_text("utf-8"))
BRIGHT = COLOURS["bright"]
"""Colours of things that come in any colour."""
PALETTE = BRIGHT | COLOURS["others"]


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


@dataclass(frozen=True, eq=False)
class Kind(Noun):
    """A thing people have a word for, and its looks."""

    colours: tuple[str, ...]  # as "#rrggbb"
    held_out: bool
    """Builds of the split "train" never show it, those of "test" show no other; some of every file are held out."""
    shows: frozenset[str]  # Other names that a picture of it fits: its parts, and the kinds it belongs to.
    shapes: tuple[dict[str, Any], ...]  # as in the file

    def draw(self, colour: str) -> Drawing:
        """The thing in `colour`, one of `colours`."""
        return _draw(self, colour)


@cache
def _draw(kind: Kind, colour: str) -> Drawing:
    return Drawing(tuple(shape for one in kind.shapes for shape in _drawn(one, colour)))


def _kinds() -> Iterator[Kind]:
    for file in sorted((files(__package__) / "objects").iterdir(), key=lambda file: file.name):
        for name, facts in json.loads(file.read_text("utf-8")).items():
            colours = [*BRIGHT] if facts["colours"] == "bright" else facts["colours"]
            yield Kind(
                name,
                facts.get("plural", name + ("es" if name.endswith(("s", "sh", "ch", "x")) else "s")),
                facts.get("article", article_of(name)),
                tuple(PALETTE.get(colour, colour) for colour in colours),
                facts.get("held_out", False),
                frozenset(facts.get("shows", ())),
                tuple(facts["shapes"]),
            )


KINDS = {kind.name: kind for kind in _kinds()}


def shows(thing: str, name: str) -> bool:
    """Whether a picture of a `thing` shows a `name`: itself, a part of it, or what it is a kind of."""
    return name == thing or (thing in KINDS and name in KINDS[thing].shows)


def _drawn(data: dict[str, Any], main: str) -> Iterator[Shape]:
    """The shapes of one entry of a file."""
    if "stroke" in data:
        stroke = _colour(data["stroke"], main)
        for part in re.findall(r"M[^M]*", data["path"]):
            yield Shape(trace(part), None, stroke, data.get("width", OUTLINE))
        return
    fill = _colour(data["fill"], main)
    points = next(OUTLINES[key](data) for key in OUTLINES if key in data)
    if data.get("outline", True):
        yield Shape(points, fill, shade(fill, OUTLINE_SHADE), OUTLINE)
    else:
        yield Shape(points, fill, None, 0.0)


def _oval(x: float, y: float, rx: float, ry: float) -> Points:
    turn = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    return np.stack([x + rx * np.cos(turn), y + ry * np.sin(turn)], 1)


def _box(box: Sequence[float], r: float) -> Points:
    x, y, width, height = box
    turn = np.linspace(0, np.pi / 2, 9) if r else np.zeros(1)
    corners = ((x + width - r, y + height - r), (x + r, y + height - r), (x + r, y + r), (x + width - r, y + r))
    points = [
        np.stack([cx + r * np.cos(turn + quarter * np.pi / 2), cy + r * np.sin(turn + quarter * np.pi / 2)], 1)
        for quarter, (cx, cy) in enumerate(corners)
    ]
    return np.concatenate(points)


def _star(x: float, y: float, outer: float, inner: float, tips: int) -> Points:
    turn = np.arange(2 * tips) * np.pi / tips - np.pi / 2
    radius = np.where(np.arange(2 * tips) % 2, inner, outer)
    return np.stack([x + radius * np.cos(turn), y + radius * np.sin(turn)], 1)


OUTLINES = {
    "path": lambda data: trace(data["path"]),
    "oval": lambda data: _oval(*data["oval"]),
    "box": lambda data: _box(data["box"], data.get("round", 0)),
    "star": lambda data: _star(*data["star"]),
}


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


def _colour(data: str | dict[str, str], main: str) -> str:
    """ "#rrggbb" of a colour in a file."""
    if isinstance(data, dict):
        data = next((colour for name, colour in data.items() if PALETTE.get(name) == main), data["other"])
    name, _, lighter = data.partition(" ")
    colour = main if name == "main" else PALETTE.get(name, name)
    return shade(colour, float(lighter)) if lighter else colour


def shade(colour: str, by: float) -> str:
    """`colour` made lighter (by > 0, 1 is white) or darker (by < 0, -1 is black)."""
    hue, light, full = rgb_to_hls(*(byte / 255 for byte in ImageColor.getrgb(colour)))
    light = light + by * ((1 - light) if by > 0 else light)
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(hue, light, full))


RENDERER = f"pillow {PILLOW}"
"""What draws; another version may draw other bytes."""


def sprite(drawing: Drawing, width: int, height: int) -> Image.Image:
    """`drawing`, from edge to edge of its bounds, on a transparent ground: RGBA, not premultiplied."""
    left, top, right, bottom = drawing.bounds
    scale = SUPERSAMPLING * np.array([width / (right - left), height / (bottom - top)])
    large = Image.new("RGBA", (width * SUPERSAMPLING, height * SUPERSAMPLING))
    for shape in drawing.shapes:
        points = (shape.points - (left, top)) * scale
        if shape.fill is not None:
            _fill(large, points, shape.fill)
        if shape.stroke is not None:
            _line(ImageDraw.Draw(large), points, shape, float(scale.mean()))
    return large.resize((width, height), Image.Resampling.LANCZOS)


def _fill(large: Image.Image, points: Points, fill: str) -> None:
    """Fill an outline, lighter at its upper left than at its lower right."""
    low, high = points.min(0), points.max(0)
    x, y = (int(edge) for edge in low)
    size = int(high[0]) - x + 1, int(high[1]) - y + 1
    mask = Image.new("L", size)
    ImageDraw.Draw(mask).polygon([*map(tuple, (points - (x, y)).tolist())], fill=255)
    along = (high - low).astype(np.float32)
    across, down = (np.arange(n, dtype=np.float32) - (start % 1) for n, start in zip(size, low, strict=True))
    share = (across * along[0] + (down * along[1])[:, None]) * (255 / max(float(along @ along), 1e-9))
    shades = Image.fromarray(share.clip(0, 255).astype(np.uint8), "L")
    large.paste(ImageOps.colorize(shades, shade(fill, LIGHT), shade(fill, DARK)), (x, y), mask)


def _line(draw: ImageDraw.ImageDraw, points: Points, shape: Shape, scale: float) -> None:
    width = max(1.0, shape.width * scale)
    corners = [*map(tuple, (points if shape.fill is None else np.concatenate([points, points[:1]])).tolist())]
    draw.line(corners, fill=shape.stroke, width=round(width), joint="curve")
    for x, y in (corners[0], corners[-1]):  # round ends
        draw.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), fill=shape.stroke)


@cache
def cover(kind: Kind) -> float:
    """Share of a thing's bounds that is drawn, the same in all its colours, rounded to hundredths."""
    drawing = kind.draw(kind.colours[0])
    width = COVER_SIDE * min(1.0, drawing.aspect)
    drawn = sprite(drawing, round(width), round(width / drawing.aspect))
    return round(float(np.asarray(drawn.getchannel("A")).mean()) / 255, 2)
