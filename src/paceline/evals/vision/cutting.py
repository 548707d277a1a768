"""Cutting an object out of a picture with a plain backdrop, by the colour of the picture's border."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageFilter

NEAR = 40
"""Distance of a colour from the border's, in RGB, up to which it is background."""


def cut_out(picture: Image.Image) -> Image.Image:
    """RGBA: what differs from the colour of the border, without specks, cropped to it.

    A picture without anything on it stays whole: the contact sheet of a build is there to be looked at."""
    pixels = np.asarray(picture.convert("RGB"), np.float64)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    inside = np.linalg.norm(pixels - np.median(border, 0), axis=2) > NEAR
    mask = Image.fromarray((255 * inside).astype(np.uint8), "L")
    mask = mask.filter(ImageFilter.MinFilter(3)).filter(ImageFilter.MaxFilter(5)).filter(ImageFilter.MinFilter(3))
    box = mask.getbbox()
    cut = picture.convert("RGBA")
    if box is None:
        return cut
    cut.putalpha(mask.filter(ImageFilter.GaussianBlur(0.7)))
    return cut.crop(box)
