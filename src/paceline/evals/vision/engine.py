"""Cases from a seed: which objects, where, what the captions say (`compose`), and the pictures (`render`).

    options = BuildOptions(seed=7, size=512)
    case = compose(options, "count", 12)       # draws no pixel
    render(options, case)                      # nine RGB pictures, picture i for caption i

The paper's engine paints backgrounds around copied objects with a diffusion model; here all pictures of a case share
the same array of pixels, which is stricter.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision import child, layouts
from paceline.evals.vision.backgrounds import background
from paceline.evals.vision.captions import VALUES, caption, plain, templates
from paceline.evals.vision.drawing import shows
from paceline.evals.vision.geometry import Box
from paceline.evals.vision.layouts import FITS, LAYOUTS, THINGS, Scene
from paceline.evals.vision.options import BuildOptions
from paceline.evals.vision.providers import Cutout, open_provider
from paceline.evals.vision.render import Renderer, choose

ENGINE = 2
"""Version of what a seed makes: the cases of another version are others."""
PLAIN = ("plain", "classes")
"""Pairs in addition to the six subsets: pictures of one to three objects, and of single ones, whose captions name them
and say nothing else."""

renderer_of = cache(choose)


def build_facts(options: BuildOptions) -> dict[str, Any]:
    """What must be equal for two builds to be equal byte by byte: what was asked for, and what drew it."""
    return {**asdict(options), "renderer": renderer_of(options.renderer).name, "engine_version": ENGINE}


@dataclass(frozen=True)
class Composition:
    """A case before it is drawn: K pictures and K captions, picture i for caption i."""

    subset: str
    number: int
    values: tuple[str, ...]
    captions: tuple[str, ...]
    scenes: tuple[Scene, ...]
    things: tuple[Cutout, ...]
    template: int

    @property
    def id(self) -> str:
        return f"{self.number:05d}"

    @property
    def images(self) -> list[str]:
        """Paths of the pictures below the subset's folder."""
        return [f"images/{self.id}_{i}.png" for i in range(len(self.values))]

    def facts(self, options: BuildOptions) -> dict[str, Any]:
        """A line of cases.jsonl."""
        return {
            "case": self.id,
            "subset": self.subset,
            "template": self.template,
            "seed": options.seed,
            "size": options.size,
            "objects": [thing.name for thing in self.things],
            "sources": [thing.source for thing in self.things],
            "licences": sorted({thing.licence for thing in self.things}),
            "background": options.backgrounds or "procedural",
            "values": list(self.values),
            "images": self.images,
            "captions": list(self.captions),
            "boxes": [[list(box) for box in scene] for scene in self.scenes],
        }


def compose(options: BuildOptions, subset: str, number: int) -> Composition:
    """Case `number` of a subset, or pair `number` of "plain" and "classes"."""

    def rng(role: str) -> np.random.Generator:
        return child(options.seed, options.split, subset, number, role)

    if subset in PLAIN:
        return _pair(options, subset, number)
    things = _choose(options, subset, rng("objects"), rng("colours"))
    allowed = templates(subset, options.split)
    template = allowed[int(rng("template").integers(len(allowed)))]
    if subset == "count":
        scenes = layouts.count(rng("layout"), things, options.size, options.count_size == "case")
    else:
        scenes = LAYOUTS[subset](rng("layout"), things, options.size)
    nouns = [thing.noun for thing in things]
    captions = tuple(caption(subset, template, value, nouns) for value in VALUES[subset])
    drawn = {box[0] for scene in scenes for box in scene}
    seen = tuple(thing for thing in things if thing.name in drawn)
    return Composition(subset, number, VALUES[subset], captions, tuple(scenes), seen, template)


def _choose(
    options: BuildOptions, subset: str, rng: np.random.Generator, looks: np.random.Generator
) -> tuple[Cutout, ...]:
    """Things in random order, such that none shows another and the subset's layout can place them together."""
    provider, wanted, fit = open_provider(options.objects), THINGS.get(subset, 1), FITS.get(subset, lambda a, b: True)
    names = provider.names(options.split)
    order = [names[i] for i in rng.permutation(len(names))]
    for start in range(len(order)):
        things: list[Cutout] = []
        for name in order[start:]:
            if any(shows(name, other.name) or shows(other.name, name) for other in things):
                continue
            thing = provider.get(name, looks)
            if all(fit(thing, other) for other in things):
                things.append(thing)
            if len(things) == wanted:
                return tuple(things)
    raise PacelineError(
        f"{subset} needs {wanted} different objects, none of them seen in another"
        f"{', of like shape' if subset in FITS else ''}; {options.objects} has {len(names)} for split {options.split!r}"
    )


def _pair(options: BuildOptions, subset: str, number: int) -> Composition:
    """One picture, and a caption that only names what is in it."""
    rng, provider = child(options.seed, options.split, subset, number), open_provider(options.objects)
    names = provider.names(options.split)
    several = int(rng.choice((1, 2, 3), p=(0.5, 0.3, 0.2))) if subset == "plain" else 1
    things = tuple(provider.get(names[i], rng) for i in rng.permutation(len(names))[:several])
    scene = layouts.scattered(rng, things, options.size)
    said = plain([things[i].noun for i in rng.permutation(len(things))])
    return Composition(subset, number, ("",), (said,), (scene,), things, 0)


def render(options: BuildOptions, case: Composition) -> list[Image.Image]:
    """The pictures of a case, RGB."""
    things = {thing.name: thing for thing in case.things}
    renderer = renderer_of(options.renderer)

    @cache
    def sprite(name: str, width: int, height: int) -> Image.Image:
        return things[name].sprite(renderer, width, height)

    sprites = [[sprite(name, width, height) for name, _, _, width, height in scene] for scene in case.scenes]
    rng = child(options.seed, options.split, case.subset, case.number, "background")
    if (options.backgrounds or "").startswith("inpaint:"):
        from paceline.evals.vision.diffusion import painted, read_options

        painter = read_options(options.backgrounds or "")
        return painted(painter, case.scenes, sprites, options.size, int(rng.integers(1 << 31)))
    ground = background(rng, options.size, options.backgrounds)
    pictures = []
    for scene, own in zip(case.scenes, sprites, strict=True):
        picture = ground.copy()
        for (_, x, y, _, _), one in zip(scene, own, strict=True):
            picture.paste(one, (x, y), one)
        pictures.append(picture)
    return pictures


def drawn_area(renderer: Renderer, case: Composition, box: Box) -> float:
    """Pixels that an object of the case covers in its box."""
    name, _, _, width, height = box
    (thing,) = (thing for thing in case.things if thing.name == name)
    return float(np.asarray(thing.sprite(renderer, width, height).getchannel("A")).sum()) / 255
