"""Make cases from a seed: objects, places and captions (`compose`), and pictures (`render`) on backgrounds, which are
pale, low in contrast and drawn from random numbers, or square pieces of pictures in a folder.

The paper's engine paints backgrounds around copied objects with a diffusion model; here all pictures of a case share
the same array of pixels, which is stricter."""

from collections.abc import Callable
from colorsys import hsv_to_rgb
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision import child, layouts
from paceline.evals.vision.captions import VALUES, Box, caption, plain, templates
from paceline.evals.vision.dataset import read_picture
from paceline.evals.vision.drawing import RENDERER, shows
from paceline.evals.vision.layouts import FITS, LAYOUTS, THINGS, Scene
from paceline.evals.vision.options import BuildOptions
from paceline.evals.vision.providers import Cutout, Folder, Procedural

ENGINE = 2  # Version of the cases that a seed makes.
PLAIN = ("plain", "classes")
"""Pairs beside the six subsets: pictures of one to three objects, and of single ones; captions name them alone."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")  # Endings of pictures in a folder of backgrounds.

Pixels = NDArray[np.float64]  # (size, size, 3), 0 to 255


def open_provider(spec: str) -> "Procedural | Folder":
    """Objects of "procedural", "diffusion:MODEL", or a folder of cut-outs; PacelineError for a folder without any."""
    if spec.startswith("diffusion:"):
        from paceline.evals.vision.diffusion import Generated, read_options

        return Generated(read_options(spec))
    return Procedural() if spec == "procedural" else Folder(spec)


def build_facts(options: BuildOptions) -> dict[str, Any]:
    """The facts that decide a build byte by byte: its options and the renderer."""
    return {**asdict(options), "renderer": RENDERER, "engine_version": ENGINE}


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

    @property
    def pair(self) -> dict[str, Any]:
        """A line of pairs.jsonl."""
        return {"image": self.images[0], "caption": self.captions[0], "objects": [thing.name for thing in self.things]}

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

    @cache
    def sprite(name: str, width: int, height: int) -> Image.Image:
        return things[name].sprite(width, height)

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


def drawn_area(case: Composition, box: Box) -> float:
    """Pixels that an object of the case covers in its box."""
    name, _, _, width, height = box
    (thing,) = (thing for thing in case.things if thing.name == name)
    return float(np.asarray(thing.sprite(width, height).getchannel("A")).sum()) / 255


def background(rng: np.random.Generator, size: int, folder: str | None = None) -> Image.Image:
    """A background of `size` x `size` pixels, from `folder` if one is given."""
    if folder is not None:
        return _photo(rng, size, folder)
    draw = GROUNDS[int(rng.integers(len(GROUNDS)))]
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


GROUNDS: tuple[Callable[[np.random.Generator, int], Pixels], ...] = (gradient, horizon, noise, checker, stripes)


def _photo(rng: np.random.Generator, size: int, folder: str) -> Image.Image:
    """A random square of a random picture of `folder`."""
    files = _photos(folder)
    picture = read_picture(files[int(rng.integers(len(files)))]).convert("RGB")
    side = min(picture.size)
    left, top = (int(rng.integers(extent - side + 1)) for extent in picture.size)
    square = picture.crop((left, top, left + side, top + side))
    return square.resize((size, size), Image.Resampling.LANCZOS)


@cache
def _photos(folder: str) -> list[Path]:
    files = sorted(f for f in Path(folder).glob("*") if f.suffix.lower() in SUFFIXES)
    if not files:
        raise PacelineError(f"{folder} holds no backgrounds: no file ends in {', '.join(SUFFIXES)}")
    return files
