"""Cases from a seed: which objects, where, what the captions say (`compose`), and the pictures (`render`).

    plan = Plan(seed=7, size=512)
    case = compose(plan, "count", 12)       # no pixel is drawn for this
    render(plan, case)                      # nine RGB pictures, image i for caption i

The paper's engine paints backgrounds around copied objects with a diffusion model; here all pictures of a case share
the same array of pixels, which is stricter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision import layouts
from paceline.evals.vision.backgrounds import background
from paceline.evals.vision.geometry import Box
from paceline.evals.vision.layouts import FITS, LAYOUTS, THINGS
from paceline.evals.vision.providers import Cutout, Provider, open_provider
from paceline.evals.vision.render import Renderer, choose
from paceline.evals.vision.seeds import child
from paceline.evals.vision.words import VALUES, caption, plain, shows, templates

ENGINE = 2
"""Version of what a seed makes: the cases of another version are others."""
PLAIN = ("plain", "classes")
"""Pairs beside the six subsets: one to three objects, and single ones; captions name them and say nothing else."""


@dataclass(frozen=True)
class Plan:
    """What makes two builds the same, byte by byte."""

    seed: int = 0
    size: int = 512
    split: str = "all"
    """Which objects and templates: "all", "train", or "test", the last two disjoint."""
    objects: str = "procedural"
    backgrounds: str | None = None
    renderer: str = "auto"
    count_size: str = "case"

    def provider(self) -> Provider:
        return open_provider(self.objects)

    def facts(self) -> dict[str, Any]:
        """For the manifest: what was asked, and what drew it."""
        drawn = _renderer(self.renderer).name
        return {**self.__dict__, "renderer": drawn, "engine_version": ENGINE}


@dataclass(frozen=True)
class Case:
    """K pictures and K captions, picture i for caption i."""

    subset: str
    number: int
    values: tuple[str, ...]
    captions: tuple[str, ...]
    scenes: tuple[tuple[Box, ...], ...]
    things: tuple[Cutout, ...]
    template: int

    @property
    def id(self) -> str:
        return f"{self.number:05d}"

    def image(self, i: int) -> str:
        """Path of picture i below the subset's folder."""
        return f"images/{self.id}_{i}.png"

    def facts(self, plan: Plan) -> dict[str, Any]:
        """A line of cases.jsonl."""
        return {
            "case": self.id,
            "subset": self.subset,
            "template": self.template,
            "seed": plan.seed,
            "size": plan.size,
            "objects": [thing.name for thing in self.things],
            "sources": [thing.source for thing in self.things],
            "licences": sorted({thing.licence for thing in self.things}),
            "background": plan.backgrounds or "procedural",
            "values": list(self.values),
            "images": [self.image(i) for i in range(len(self.values))],
            "captions": list(self.captions),
            "boxes": [[list(box) for box in scene] for scene in self.scenes],
        }


def compose(plan: Plan, subset: str, number: int) -> Case:
    """Case `number` of a subset, or pair `number` of "plain" and "classes"."""

    def rng(role: str) -> Any:
        return child(plan.seed, plan.split, subset, number, role)

    if subset in PLAIN:
        return _pair(plan, subset, number)
    things = _choose(plan, subset, rng("objects"), rng("colours"))
    allowed = templates(subset, plan.split)
    template = allowed[int(rng("template").integers(len(allowed)))]
    nouns = [thing.noun for thing in things]
    if subset == "count":
        options = layouts.Options(plan.count_size)
        scenes = layouts.count(rng("layout"), things, plan.size, options)
    else:
        scenes = LAYOUTS[subset](rng("layout"), things, plan.size)
    values = VALUES[subset]
    captions = tuple(caption(subset, template, value, nouns) for value in values)
    return Case(subset, number, values, captions, tuple(scenes), _seen(things, scenes, subset), template)


def _choose(plan: Plan, subset: str, rng: Any, looks: Any) -> tuple[Cutout, ...]:
    """Things in random order, such that none shows another and the subset's layout can compare them."""
    provider, wanted, fit = plan.provider(), THINGS.get(subset, 1), FITS.get(subset, lambda a, b: True)
    names = provider.names(plan.split)
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
        f"{', of like shape' if subset in FITS else ''}; {plan.objects} has {len(names)} for split {plan.split!r}"
    )


def _seen(things: tuple[Cutout, ...], scenes: list[layouts.Scene], subset: str) -> tuple[Cutout, ...]:
    """The things that are in a picture of the case, or named by its captions."""
    drawn = {box[0] for scene in scenes for box in scene}
    return tuple(thing for thing in things if thing.name in drawn)


def _pair(plan: Plan, subset: str, number: int) -> Case:
    """One picture and a caption that only names what is in it."""
    rng, names = child(plan.seed, plan.split, subset, number), plan.provider().names(plan.split)
    several = int(rng.choice((1, 2, 3), p=(0.5, 0.3, 0.2))) if subset == "plain" else 1
    things = tuple(plan.provider().get(names[i], rng) for i in rng.permutation(len(names))[:several])
    scene = layouts.scattered(rng, things, plan.size)
    order = rng.permutation(len(things))
    return Case(subset, number, ("",), (plain([things[i].noun for i in order]),), (scene,), things, 0)


def render(plan: Plan, case: Case) -> list[Image.Image]:
    """The pictures of a case, RGB."""
    renderer = _renderer(plan.renderer)
    if (plan.backgrounds or "").startswith("inpaint:"):
        return _painted(plan, case, renderer)
    ground = background(
        child(plan.seed, plan.split, case.subset, case.number, "background"), plan.size, plan.backgrounds
    )
    things = {thing.name: thing for thing in case.things}
    sprites: dict[tuple[str, int, int], Image.Image] = {}
    pictures = []
    for scene in case.scenes:
        picture = ground.copy()
        for name, x, y, width, height in scene:
            key = (name, width, height)
            if key not in sprites:
                sprites[key] = things[name].sprite(renderer, width, height)
            picture.paste(sprites[key], (x, y), sprites[key])
        pictures.append(picture)
    return pictures


def drawn_area(plan: Plan, case: Case, box: Box) -> float:
    """Pixels that an object of the case covers in its box."""
    name, _, _, width, height = box
    (thing,) = (thing for thing in case.things if thing.name == name)
    sprite = thing.sprite(_renderer(plan.renderer), width, height)
    return float(np.asarray(sprite.getchannel("A")).sum()) / 255


def _painted(plan: Plan, case: Case, renderer: Renderer) -> list[Image.Image]:
    """The pictures on a background that a diffusion model paints."""
    from paceline.evals.vision.diffusion import painted, read_options

    things = {thing.name: thing for thing in case.things}
    sprites = [
        [things[name].sprite(renderer, width, height) for name, _, _, width, height in scene] for scene in case.scenes
    ]
    seed = int(child(plan.seed, plan.split, case.subset, case.number, "background").integers(1 << 31))
    return painted(read_options(plan.backgrounds or ""), case.scenes, sprites, plan.size, seed)


@cache
def _renderer(name: str) -> Renderer:
    return choose(name)
