"""Backgrounds: pale, low in contrast, drawn from random numbers; or square pieces of pictures in a folder.

background(rng, 512)        # an RGB picture; all pictures of a case stand on the same one
"""

from __future__ import annotations

from collections.abc import Callable
from colorsys import hsv_to_rgb
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.errors import PacelineError

Pixels = NDArray[np.float64]
"""(size, size, 3), 0 to 255."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def background(rng: np.random.Generator, size: int, folder: str | None = None) -> Image.Image:
    """A background of `size` x `size` pixels, from `folder` if one is given."""
    if folder is not None:
        return _photo(rng, size, folder)
    draw = KINDS[int(rng.integers(len(KINDS)))]
    return Image.fromarray(draw(rng, size).clip(0, 255).round().astype(np.uint8), "RGB")


def _colours(rng: np.random.Generator, number: int) -> Pixels:
    """(number, 3): pale colours near one another."""
    hue = rng.random()
    return 255 * np.array(
        [hsv_to_rgb((hue + rng.uniform(-0.06, 0.06)) % 1, rng.uniform(0.05, 0.3), rng.uniform(0.72, 0.96))
         for _ in range(number)]
    )  # fmt: skip


def gradient(rng: np.random.Generator, size: int) -> Pixels:
    """From one colour to another, in any direction."""
    first, last = _colours(rng, 2)
    turn, axis = rng.uniform(0, 2 * np.pi), np.linspace(-0.5, 0.5, size)
    along = 0.5 + (axis[None] * np.cos(turn) + axis[:, None] * np.sin(turn)) / np.sqrt(2)
    return np.asarray(first + along[..., None] * (last - first))


def horizon(rng: np.random.Generator, size: int) -> Pixels:
    """Sky and ground."""
    sky, ground = _colours(rng, 1)[0], _colours(rng, 1)[0]
    pixels = np.empty((size, size, 3))
    line = round(size * rng.uniform(0.35, 0.75))
    pixels[:line] = sky + (255 - sky) * np.linspace(0, 0.4, line)[:, None, None]
    pixels[line:] = ground * np.linspace(1, 0.9, size - line)[:, None, None]
    return pixels


def noise(rng: np.random.Generator, size: int) -> Pixels:
    """Soft blotches: a coarse grid of random values, enlarged."""
    first, last = _colours(rng, 2)
    coarse = rng.random((int(rng.integers(4, 9)),) * 2).astype(np.float32)
    smooth = Image.fromarray(coarse, "F").resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(first + np.asarray(smooth)[..., None] * (last - first))


def checker(rng: np.random.Generator, size: int) -> Pixels:
    """Two colours, like tiles."""
    first, last = _colours(rng, 2)
    cell = np.arange(size) * int(rng.integers(5, 11)) // size
    return np.where(((cell[None] + cell[:, None]) % 2)[..., None], first, 0.5 * (first + last))


def stripes(rng: np.random.Generator, size: int) -> Pixels:
    """Two colours, like wallpaper, upright or lying."""
    first, last = _colours(rng, 2)
    band = (np.arange(size) * int(rng.integers(6, 15)) // size) % 2
    pixels = np.broadcast_to(np.where(band[:, None], first, 0.5 * (first + last)), (size, size, 3))
    return pixels if rng.random() < 0.5 else pixels.transpose(1, 0, 2)


KINDS: tuple[Callable[[np.random.Generator, int], Pixels], ...] = (gradient, horizon, noise, checker, stripes)


def _photo(rng: np.random.Generator, size: int, folder: str) -> Image.Image:
    """A random square of a random picture of `folder`."""
    files = _files(folder)
    try:
        with Image.open(files[int(rng.integers(len(files)))]) as picture:
            side = min(picture.size)
            left, top = (int(rng.integers(extent - side + 1)) for extent in picture.size)
            square = picture.convert("RGB").crop((left, top, left + side, top + side))
    except OSError as error:
        raise PacelineError(f"a background in {folder} cannot be read: {error}") from error
    return square.resize((size, size), Image.Resampling.LANCZOS)


@cache
def _files(folder: str) -> list[Path]:
    files = sorted(f for f in Path(folder).glob("*") if f.suffix.lower() in SUFFIXES)
    if not files:
        raise PacelineError(f"{folder} holds no backgrounds: no file ends in {', '.join(SUFFIXES)}")
    return files
