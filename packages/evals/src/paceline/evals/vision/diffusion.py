"""Make pictures as in the paper, with a text-to-image model of diffusers (an optional package).

Four steps (Peng et al. 2024, poster): (1) generate a picture of one object, (2) cut the object out, (3) place the
cut-outs, (4) paint the background. So that all pictures of a case share their background, it is first painted around
one object alone, and every picture starts from a patch of that first painting.

    paceline eval vision build OUT --objects diffusion:stabilityai/stable-diffusion-xl-base-1.0
    paceline eval vision build OUT --backgrounds inpaint:stabilityai/stable-diffusion-xl-base-1.0

The paper's models for cutting out and inpainting are not known; here an object is cut out by the colour of the border,
because the prompt asks for a plain background."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops

from paceline.draft.spec import parse, values
from paceline.errors import PacelineError, install
from paceline.evals.vision.captions import Box
from paceline.evals.vision.drawing import KINDS
from paceline.evals.vision.providers import Cutout, Procedural, cut_out
from paceline.target.load import device_named

PROMPT = "a photo of a single {name}, whole, centred, on a plain white background"
BACKGROUND = "a plain indoor scene, out of focus"
PATCH = 1.4  # Side of the first painting's patch around an object, in sides of the object.


@dataclass(frozen=True)
class DiffusionOptions:
    checkpoint: str
    steps: int = 30
    size: int = 1024  # pixels that the model was trained on
    device: str = "cpu"
    cache: str = "build/diffusion"
    """Folder of generated objects, by model, prompt and seed."""


def read_options(spec: str) -> DiffusionOptions:
    return DiffusionOptions(**values(parse(spec), DiffusionOptions))


class Painter:
    """A text-to-image model, and the same weights as an inpainting one."""

    def __init__(self, options: DiffusionOptions):
        try:
            from diffusers import AutoPipelineForInpainting, AutoPipelineForText2Image
        except ImportError as error:
            raise PacelineError(f"diffusers cannot be used ({error}); {install('packages/evals[diffusion]')}") from None
        self.options = options
        try:
            self._draw = AutoPipelineForText2Image.from_pretrained(options.checkpoint).to(device_named(options.device))
        except (OSError, ValueError) as error:
            raise PacelineError(
                f"{options.checkpoint} is no text-to-image model: {str(error).splitlines()[0]}"
            ) from None
        self._paint = AutoPipelineForInpainting.from_pipe(self._draw)
        for pipeline in (self._draw, self._paint):
            pipeline.set_progress_bar_config(disable=True)

    def object(self, name: str, seed: int) -> Image.Image:
        """Steps 1 and 2: make a picture of `name`, cut out, and keep it in the cache's folder."""
        prompt = PROMPT.format(name=name)
        identity = f"{self.options}/{prompt}/{seed}"
        file = Path(self.options.cache) / f"{hashlib.sha256(identity.encode()).hexdigest()[:20]}.png"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            picture = cut_out(
                self._run(self._draw, seed, prompt=prompt, height=self.options.size, width=self.options.size)
            )
            draft = file.with_suffix(".part")
            picture.save(draft, "PNG")
            draft.replace(file)
        with Image.open(file) as cached:
            return cached.convert("RGBA")

    def fill(self, canvas: Image.Image, hole: Image.Image, seed: int) -> Image.Image:
        """Step 4: paint the white pixels of `hole`; all others stay."""
        side = self.options.size
        large = {"image": canvas.resize((side, side)), "mask_image": hole.resize((side, side))}
        painted = self._run(self._paint, seed, prompt=BACKGROUND, height=side, width=side, **large)
        return Image.composite(painted.resize(canvas.size, Image.Resampling.LANCZOS), canvas, hole)

    def _run(self, pipeline: Any, seed: int, **inputs: Any) -> Image.Image:
        import torch

        generator = torch.Generator("cpu").manual_seed(seed)
        picture: Image.Image = pipeline(num_inference_steps=self.options.steps, generator=generator, **inputs).images[0]
        return picture.convert("RGB")


painter_of = cache(Painter)


class Generated(Procedural):
    """The same kinds, but a model draws them."""

    def __init__(self, options: DiffusionOptions):
        self._painter = painter_of(options)

    def get(self, name: str, rng: np.random.Generator) -> Cutout:
        seed, model = int(rng.integers(4)), self._painter.options.checkpoint
        picture = self._painter.object(name, seed)
        return Cutout(KINDS[name], picture, f"that of {model}", f"{model}, seed {seed}")


def painted(
    options: DiffusionOptions, scenes: Sequence[Sequence[Box]], sprites: Sequence[Sequence[Image.Image]], size: int,
    seed: int,
) -> list[Image.Image]:  # fmt: skip
    """Steps 3 and 4: the pictures of a case, on a background that is painted once and continued in each of them."""
    painter = painter_of(options)
    anchor = next(box[0] for box in scenes[0] if all(box[0] in (other[0] for other in scene) for scene in scenes))
    first, sprite = next((box, sprite) for box, sprite in zip(scenes[0], sprites[0], strict=True) if box[0] == anchor)
    initial = painter.fill(*_laid_out([first], [sprite], size), seed)
    pictures = []
    for scene, own in zip(scenes, sprites, strict=True):
        canvas, hole = _laid_out(scene, own, size)
        patch, corner = _patch(initial, first, next(box for box in scene if box[0] == anchor))
        ground, covered = Image.new("RGB", canvas.size), Image.new("L", canvas.size)
        ground.paste(patch, corner)
        covered.paste(255, (*corner, corner[0] + patch.width, corner[1] + patch.height))
        canvas.paste(ground, (0, 0), ImageChops.darker(hole, covered))
        picture = painter.fill(canvas, ImageChops.darker(hole, ImageChops.invert(covered)), seed)
        for (_, x, y, _, _), one in zip(scene, own, strict=True):
            picture.paste(one, (x, y), one)  # Pasted once more, so that soft edges blend into the painting.
        pictures.append(picture)
    return pictures


def _patch(initial: Image.Image, first: Box, now: Box) -> tuple[Image.Image, tuple[int, int]]:
    """The first painting around an object, scaled to the object's size `now`, and the patch's upper left corner."""
    margin = [(PATCH - 1) / 2 * extent for extent in first[3:]]
    scale = [after / before for after, before in zip(now[3:], first[3:], strict=True)]
    left, top = (max(0, round(start - m)) for start, m in zip(first[1:3], margin, strict=True))
    right, bottom = (
        min(initial.width, round(s + e + m)) for s, e, m in zip(first[1:3], first[3:], margin, strict=True)
    )
    patch = initial.crop((left, top, right, bottom))
    patch = patch.resize([max(1, round(extent * s)) for extent, s in zip(patch.size, scale, strict=True)])
    x, y = (
        round(at - (before - start) * s)
        for at, before, start, s in zip(now[1:3], first[1:3], (left, top), scale, strict=True)
    )
    return patch, (x, y)


def _laid_out(scene: Sequence[Box], sprites: Sequence[Image.Image], size: int) -> tuple[Image.Image, Image.Image]:
    """Objects on an empty canvas, and a mask of the empty rest, in white."""
    canvas, hole = Image.new("RGB", (size, size)), Image.new("L", (size, size), 255)
    for (_, x, y, _, _), sprite in zip(scene, sprites, strict=True):
        canvas.paste(sprite, (x, y), sprite)
        hole.paste(0, (x, y), sprite.getchannel("A").point(lambda value: 255 if value > 127 else 0))
    return canvas, hole
