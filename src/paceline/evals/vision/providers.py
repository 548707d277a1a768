"""Where the objects of the pictures come from: drawn by code, cut-outs in a folder, or a diffusion model.

    provider = open_provider("procedural")
    provider.names("train")             # what may be asked for
    provider.get("fish", rng)           # a Cutout: its words, its shape, its licence, and `sprite`

A folder holds RGBA pictures, or photos before a plain backdrop, and objects.json: {"cat1.png": {"name": "cat",
"plural": "cats", "article": "a", "licence": "CC0", "author": "..."}}. What has no licence is refused: someone will
publish the pictures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision.cutting import cut_out
from paceline.evals.vision.drawing import KINDS, Drawing
from paceline.evals.vision.render import Renderer, cover
from paceline.evals.vision.seeds import child
from paceline.evals.vision.words import Noun

SIDECAR = "objects.json"
OURS = "Apache-2.0"
"""Licence of what our own code draws."""


@dataclass(frozen=True)
class Cutout:
    """One object as it looks in one case."""

    noun: Noun
    picture: Drawing | Image.Image
    """Shapes, or RGBA pixels without an empty margin."""
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
            return cover(self.picture)
        return float(np.asarray(self.picture.getchannel("A")).mean()) / 255

    def sprite(self, renderer: Renderer, width: int, height: int) -> Image.Image:
        """The object, RGBA, from edge to edge of `width` x `height` pixels."""
        if isinstance(self.picture, Drawing):
            return renderer.sprite(self.picture, width, height)
        return self.picture.resize((width, height), Image.Resampling.LANCZOS)


class Provider(Protocol):
    def names(self, split: str) -> Sequence[str]:
        """What is there for "all", "train" or "test", sorted."""
        ...

    def get(self, name: str, rng: np.random.Generator) -> Cutout:
        """One look of the object `name`."""
        ...


def open_provider(spec: str) -> Provider:
    """ "procedural", "diffusion:MODEL", or a folder of cut-outs. Raises PacelineError for a folder that is not one."""
    if spec.startswith("diffusion:"):
        from paceline.evals.vision.diffusion import Generated, read_options

        return Generated(read_options(spec))
    return Procedural() if spec == "procedural" else _folder(spec)


class Procedural:
    def names(self, split: str) -> Sequence[str]:
        return sorted(name for name in KINDS if split == "all" or (KINDS[name].held_out) == (split == "test"))

    def get(self, name: str, rng: np.random.Generator) -> Cutout:
        kind = KINDS[name]
        colour = kind.colours[int(rng.integers(len(kind.colours)))]
        return Cutout(Noun(name, kind.plural, kind.article), _drawn(name, colour), OURS, f"procedural:{name}:{colour}")


@cache
def _drawn(name: str, colour: str) -> Drawing:
    return KINDS[name].draw(colour)


class Folder:
    """Cut-outs of a folder; every third name in an order of its own is held out."""

    def __init__(self, folder: Path, cutouts: dict[str, list[tuple[str, dict[str, Any]]]]):
        self.folder, self._cutouts = folder, cutouts

    def names(self, split: str) -> Sequence[str]:
        return sorted(
            n for n in self._cutouts if split == "all" or (child("held out", n).random() < 1 / 3) == (split == "test")
        )

    def get(self, name: str, rng: np.random.Generator) -> Cutout:
        files = self._cutouts[name]
        file, facts = files[int(rng.integers(len(files)))]
        noun = Noun(name, facts.get("plural", name + "s"), facts.get("article", "an" if name[0] in "aeiou" else "a"))
        return Cutout(noun, _cut(self.folder / file), facts["licence"], f"{file}, {facts.get('author', 'unknown')}")


@cache
def _folder(spec: str) -> Folder:
    folder = Path(spec)
    sidecar = folder / SIDECAR
    if not sidecar.is_file():
        raise PacelineError(f"{spec} is no source of objects: it is not 'procedural', and there is no {sidecar}")
    try:
        listed = json.loads(sidecar.read_text("utf-8"))
    except ValueError as error:
        raise PacelineError(f"{sidecar} is not JSON: {error}") from error
    cutouts: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for file, facts in sorted(listed.items()):
        lacking = [key for key in ("name", "licence") if not facts.get(key)]
        if lacking:
            raise PacelineError(f"{sidecar}: {file} has no {' and no '.join(lacking)}; every cut-out needs both")
        cutouts.setdefault(facts["name"], []).append((file, facts))
    return Folder(folder, cutouts)


@cache
def _cut(file: Path) -> Image.Image:
    """The picture without its empty margin; one without transparency is cut out of its backdrop."""
    try:
        with Image.open(file) as opened:
            picture = opened.convert("RGBA") if opened.has_transparency_data else cut_out(opened.convert("RGB"))
    except OSError as error:
        raise PacelineError(f"{file} cannot be read as a picture: {error}") from error
    inside = picture.getchannel("A").getbbox()
    if inside is None:
        raise PacelineError(f"{file} is transparent everywhere: nothing to place")
    return picture.crop(inside)
