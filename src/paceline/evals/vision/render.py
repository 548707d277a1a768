"""Drawings as pixels: by Skia where it is installed, otherwise by Pillow. Both are deterministic; their bytes differ.

choose().sprite(drawing, 120, 80)       # an RGBA picture of exactly 120 x 80 pixels
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageDraw

from paceline.errors import PacelineError, install
from paceline.evals.vision.drawing import Drawing, Shape, rgb, shade

LIGHT, DARK = 0.22, -0.16
"""How much lighter a filled shape is at its upper left, and how much darker at its lower right."""
SUPERSAMPLING = 4
"""Pixels that Pillow draws per pixel of a row, because it does not smooth edges."""
COVER_SIDE = 96
"""Longer side, in pixels, of the sprite by which a drawing's cover is measured."""


class Renderer(Protocol):
    name: str
    """With the version: another one draws other bytes."""

    def sprite(self, drawing: Drawing, width: int, height: int) -> Image.Image:
        """`drawing`, from edge to edge of its bounds, on a transparent ground: RGBA, not premultiplied."""
        ...


def choose(name: str = "auto") -> Renderer:
    """The renderer `name`, "skia" or "pillow"; "auto" is Skia where it can be used."""
    if name not in ("auto", "skia", "pillow"):
        raise PacelineError(f"no renderer {name!r}; there are auto, skia and pillow")
    if name == "pillow":
        return PillowRenderer()
    try:
        return SkiaRenderer()
    except ImportError as error:  # not installed, or a system library (libGL, fontconfig) is missing
        if name == "skia":
            raise PacelineError(f"Skia cannot be used ({error}); {install('vision')}") from error
        return PillowRenderer()


def _fit(drawing: Drawing, width: int, height: int) -> tuple[float, float, float, float]:
    """(left, top, across, down): the corner of a drawing's bounds, and pixels per unit for `width` x `height`."""
    left, top, right, bottom = drawing.bounds
    return left, top, width / (right - left), height / (bottom - top)


class SkiaRenderer:
    def __init__(self) -> None:
        import skia

        self._skia = skia
        self.name = f"skia {skia.__version__}"

    def sprite(self, drawing: Drawing, width: int, height: int) -> Image.Image:
        skia, (left, top, across, down) = self._skia, _fit(drawing, width, height)
        surface = skia.Surface(width, height)
        with surface as canvas:
            canvas.scale(across, down)
            canvas.translate(-left, -top)
            for shape in drawing.shapes:
                path = skia.Path.Polygon([skia.Point(x, y) for x, y in shape.points.tolist()], shape.fill is not None)
                if shape.fill is not None:
                    canvas.drawPath(path, self._fill(shape))
                if shape.stroke is not None:
                    canvas.drawPath(path, self._line(shape))
        return Image.fromarray(surface.toarray(colorType=skia.kRGBA_8888_ColorType), "RGBA")

    def _fill(self, shape: Shape) -> Any:
        skia, (low, high) = self._skia, (shape.points.min(0), shape.points.max(0))
        ends = [skia.Point(*low.tolist()), skia.Point(*high.tolist())]
        colours = [skia.Color(*rgb(colour)) for colour in _shades(shape)]
        return skia.Paint(AntiAlias=True, Shader=skia.GradientShader.MakeLinear(ends, colours))

    def _line(self, shape: Shape) -> Any:
        skia = self._skia
        return skia.Paint(
            AntiAlias=True,
            Style=skia.Paint.kStroke_Style,
            StrokeWidth=shape.width,
            StrokeJoin=skia.Paint.kRound_Join,
            StrokeCap=skia.Paint.kRound_Cap,
            Color=skia.Color(*rgb(shape.stroke or "")),
        )


class PillowRenderer:
    def __init__(self) -> None:
        from PIL import __version__

        self.name = f"pillow {__version__}"

    def sprite(self, drawing: Drawing, width: int, height: int) -> Image.Image:
        size, (left, top, across, down) = (width * SUPERSAMPLING, height * SUPERSAMPLING), _fit(drawing, width, height)
        large = Image.new("RGBA", size)
        scale = np.array([across, down]) * SUPERSAMPLING
        for shape in drawing.shapes:
            points = (shape.points - (left, top)) * scale
            if shape.fill is not None:
                mask = Image.new("L", size)
                ImageDraw.Draw(mask).polygon([*map(tuple, points.tolist())], fill=255)
                large.paste(_gradient(points, _shades(shape), size), (0, 0), mask)
            if shape.stroke is not None:
                self._line(ImageDraw.Draw(large), points, shape, float(scale.mean()))
        return large.resize((width, height), Image.Resampling.LANCZOS)

    @staticmethod
    def _line(draw: ImageDraw.ImageDraw, points: np.ndarray, shape: Shape, scale: float) -> None:
        width = max(1.0, shape.width * scale)
        corners = [*map(tuple, (points if shape.fill is None else np.concatenate([points, points[:1]])).tolist())]
        draw.line(corners, fill=shape.stroke, width=round(width), joint="curve")
        for x, y in (corners[0], corners[-1]):  # round ends
            draw.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), fill=shape.stroke)


@cache
def cover(drawing: Drawing) -> float:
    """Share of the drawing's bounds that is drawn, rounded to hundredths; by Pillow, whatever draws the pictures."""
    width = COVER_SIDE * min(1.0, drawing.aspect)
    sprite = PillowRenderer().sprite(drawing, round(width), round(width / drawing.aspect))
    return round(float(np.asarray(sprite.getchannel("A")).mean()) / 255, 2)


def _shades(shape: Shape) -> tuple[str, str]:
    """The colours of a filled shape at its upper left and lower right."""
    fill = shape.fill or ""
    return shade(fill, LIGHT), shade(fill, DARK)


def _gradient(points: np.ndarray, ends: tuple[str, str], size: tuple[int, int]) -> Image.Image:
    """A picture of `size` whose colour runs from the first of `ends` to the second across the points' bounds."""
    low, high = points.min(0), points.max(0)
    along = high - low
    x, y = (np.arange(n) - start for n, start in zip(size, low, strict=True))
    share = (x[None] * along[0] + y[:, None] * along[1]) / max(float(along @ along), 1e-9)
    first, last = (np.array(rgb(end), float) for end in ends)
    colours = first + np.clip(share, 0, 1)[..., None] * (last - first)
    return Image.fromarray(colours.round().astype(np.uint8), "RGB")
