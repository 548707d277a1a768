"""Where the objects of the pictures come from: drawn by code, cut-outs in a folder, or a diffusion model.

A folder holds RGBA pictures, or photos before a plain backdrop, and objects.json: {"cat1.png": {"name": "cat",
"plural": "cats", "article": "a", "licence": "CC0", "author": "..."}}. A picture without a licence is refused,
because its results may be published."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from paceline.errors import PacelineError
from paceline.evals.vision import child
from paceline.evals.vision.dataset import read_picture
from paceline.evals.vision.drawing import KINDS, Drawing, Kind, Noun, article_of, cover, sprite

SIDECAR = "objects.json"
OURS = "Apache-2.0"  # Licence of our own drawings.
NEAR = 40  # Colours up to this distance from the border's, in RGB, are background.


@dataclass(frozen=True)
class Cutout:
    """One object as it looks in one case."""

    noun: Noun
    picture: Drawing | Image.Image  # shapes, or RGBA pixels without an empty margin
    licence: str
    source: str

    @property
    def name(self) -> str:
        return self.noun.name

    @property
    def aspect(self) -> float:
        """Width over height."""
        if isinstance(self.picture, Drawing):
            return self.picture.aspect
        return self.picture.width / self.picture.height

    @property
    def cover(self) -> float:
        """Share of its box that is drawn."""
        if isinstance(self.picture, Drawing):
            assert isinstance(self.noun, Kind)
            return cover(self.noun)
        return float(np.asarray(self.picture.getchannel("A")).mean()) / 255

    def sprite(self, width: int, height: int) -> Image.Image:
        """The object, RGBA, from edge to edge of `width` x `height` pixels."""
        if isinstance(self.picture, Drawing):
            return sprite(self.picture, width, height)
        return self.picture.resize((width, height), Image.Resampling.LANCZOS)


class Procedural:
    def names(self, split: str) -> Sequence[str]:
        """Sorted names of the objects for "all", "train" or "test"."""
        return sorted(kind.name for kind in KINDS.values() if split == "all" or kind.held_out == (split == "test"))

    def get(self, name: str, rng: np.random.Generator) -> Cutout:
        """One look of the object `name`."""
        kind = KINDS[name]
        colour = kind.colours[int(rng.integers(len(kind.colours)))]
        return Cutout(kind, kind.draw(colour), OURS, f"procedural:{name}:{colour}")


@cache
class Folder:
    """Cut-outs of a folder. About every third name is held out, by a random number of its own."""

    def __init__(self, folder: str):
        sidecar = Path(folder, SIDECAR)
        if not sidecar.is_file():
            raise PacelineError(f"{folder} is no source of objects: it is not 'procedural', and there is no {sidecar}")
        try:
            listed = json.loads(sidecar.read_text("utf-8"))
        except ValueError as error:
            raise PacelineError(f"{sidecar} is not JSON: {error}") from None
        self._cutouts: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
        for file, facts in sorted(listed.items()):
            if lacking := [key for key in ("name", "licence") if not facts.get(key)]:
                raise PacelineError(f"{sidecar}: {file} has no {' and no '.join(lacking)}; every cut-out needs both")
            self._cutouts.setdefault(facts["name"], []).append((sidecar.with_name(file), facts))

    def names(self, split: str) -> Sequence[str]:
        held_out = {name for name in self._cutouts if child("held out", name).random() < 1 / 3}
        return sorted(name for name in self._cutouts if split == "all" or (name in held_out) == (split == "test"))

    def get(self, name: str, rng: np.random.Generator) -> Cutout:
        files = self._cutouts[name]
        file, facts = files[int(rng.integers(len(files)))]
        noun = Noun(name, facts.get("plural", name + "s"), facts.get("article", article_of(name)))
        return Cutout(noun, _cut(file), facts["licence"], f"{file.name}, {facts.get('author', 'unknown')}")


@cache
def _cut(file: Path) -> Image.Image:
    """The picture without its empty margin; one without transparency is cut out of its backdrop."""
    picture = read_picture(file)
    picture = picture.convert("RGBA") if picture.has_transparency_data else cut_out(picture)
    inside = picture.getchannel("A").getbbox()
    if inside is None:
        raise PacelineError(f"{file} is transparent everywhere: nothing to place")
    return picture.crop(inside)


def cut_out(picture: Image.Image) -> Image.Image:
    """Cut the object out of a plain backdrop, RGBA and cropped: pixels unlike the border's colour, without specks.

    A picture without an object stays whole, which shows in the contact sheet of a build."""
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
