"""What a model could do before it was tuned: naming what a picture shows.

    zero_shot(towers, read_pairs(folder))       # percent of pictures whose own caption scores best

For pairs of one object each (`classes`), whose captions are "a photo of a fish", this is zero-shot classification.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from paceline.errors import PacelineError
from paceline.evals.vision.evaluate import BATCH, DualEncoder
from paceline.jsonl import objects


@dataclass(frozen=True)
class PairFile:
    """Pictures with a caption each."""

    folder: Path
    images: tuple[str, ...]
    captions: tuple[str, ...]

    def picture(self, i: int) -> Image.Image:
        try:
            with Image.open(self.folder / self.images[i]) as opened:
                return opened.convert("RGB")
        except OSError as error:
            raise PacelineError(f"{self.folder / self.images[i]} cannot be read: {error}") from error


def read_pairs(path: Path) -> PairFile:
    """pairs.jsonl, or the folder that holds it: lines of {"image": path beside the file, "caption": text}."""
    file = path / "pairs.jsonl" if path.is_dir() else path
    pairs = []
    for where, line in objects(str(file), PacelineError, '{"image": ..., "caption": ...}'):
        if not isinstance(line.get("image"), str) or not isinstance(line.get("caption"), str):
            raise PacelineError(f'{where} has no "image" and "caption"')
        pairs.append((line["image"], line["caption"]))
    if not pairs:
        raise PacelineError(f"{file} holds no pairs")
    images, captions = zip(*pairs, strict=True)
    return PairFile(file.parent, images, captions)


def zero_shot(model: DualEncoder, pairs: PairFile) -> float:
    """Percent of the pictures that fit their own caption better than every other caption of the file."""
    classes = sorted(set(pairs.captions))
    texts = np.concatenate([model.encode_texts(classes[i : i + BATCH]) for i in range(0, len(classes), BATCH)])
    right = 0
    for start in range(0, len(pairs.images), BATCH):
        some = range(start, min(start + BATCH, len(pairs.images)))
        best = (model.encode_images([pairs.picture(i) for i in some]) @ texts.T).argmax(1)
        right += sum(classes[b] == pairs.captions[i] for b, i in zip(best, some, strict=True))
    return 100 * right / len(pairs.images)
