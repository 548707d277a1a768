"""Training of two towers: CLIP's loss on plain pairs, and SPEC's hard negatives on cases.

    tune(Towers.load("openai/clip-vit-base-patch32"), pairs, cases, Config(), checkpoint)

The same loop trains a model from nothing (no cases, mu 0). A step's batch depends on the seed and the step alone, so a
run that is interrupted and resumed is the run that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from paceline.errors import PacelineError
from paceline.evals.vision.dataset import Data
from paceline.evals.vision.loss import LARGEST_SCALE, Negatives, Pairs, Scope, clip_loss, hard_loss
from paceline.evals.vision.models.towers import Towers
from paceline.evals.vision.retention import PairFile
from paceline.evals.vision.seeds import child

KEPT_BYTES = 3 << 30
"""Pictures that have been read stay in memory up to this much."""
SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Config:
    """How to train; what the paper says of none of this is in the documentation."""

    steps: int = 1000
    batch: int = 256
    """Plain pairs a step."""
    cases: int = 32
    """Cases a step, of whatever subset."""
    lr: float = 5e-6
    warmup: int = 50
    weight_decay: float = 0.1
    mu: float = 0.2
    scope: Scope = "own"
    negatives: Negatives = "both"
    lora: int = 0
    """Rank of the adapters that are trained instead of the weights; 0 trains the weights."""
    seed: int = 0


class Pixels:
    """Pictures as the model's bytes, read when they are wanted and kept."""

    def __init__(self, towers: Towers, read: Callable[[int], Image.Image]):
        self._towers, self._read = towers, read
        self._kept: dict[int, np.ndarray] = {}
        self._bytes = 0

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        """(n, 3, height, width), uint8."""
        new = [i for i in dict.fromkeys(numbers) if i not in self._kept]
        fresh = dict(zip(new, self._towers.pixels([self._read(i) for i in new]), strict=True)) if new else {}
        pixels = np.stack([fresh[i] if i in fresh else self._kept[i] for i in numbers])
        if self._bytes < KEPT_BYTES:
            self._kept |= fresh
            self._bytes += sum(one.nbytes for one in fresh.values())
        return torch.from_numpy(pixels).to(self._towers.device)


class PlainBatches:
    """Batches of plain pairs."""

    def __init__(self, towers: Towers, pairs: PairFile):
        self._towers, self._captions = towers, pairs.captions
        self._pixels = Pixels(towers, pairs.picture)

    def draw(self, rng: np.random.Generator, number: int) -> Pairs:
        chosen = rng.choice(len(self._captions), min(number, len(self._captions)), replace=False).tolist()
        return _embed(self._towers, self._pixels(chosen), [self._captions[i] for i in chosen])


class CaseBatches:
    """Batches of whole cases."""

    def __init__(self, towers: Towers, data: Data):
        if not data.cases:
            raise PacelineError(f"{data.source} has no case to train on: {'; '.join(data.problems[:1])}")
        self._towers, self._cases = towers, data.cases
        images = [image for case in data.cases for image in case.images]
        self._first = np.cumsum([0, *(case.k for case in data.cases)]).tolist()
        self._pixels = Pixels(towers, lambda i: data.picture(images[i]))

    def draw(self, rng: np.random.Generator, number: int) -> Pairs:
        chosen = rng.choice(len(self._cases), min(number, len(self._cases)), replace=False).tolist()
        numbers = [i for c in chosen for i in range(self._first[c], self._first[c + 1])]
        owners = torch.tensor([c for c in chosen for _ in range(self._cases[c].k)], device=self._towers.device)
        captions = [caption for c in chosen for caption in self._cases[c].captions]
        return _embed(self._towers, self._pixels(numbers), captions, owners)


def _embed(towers: Towers, pixels: Tensor, captions: list[str], cases: Tensor | None = None) -> Pairs:
    """Every distinct caption is encoded once."""
    distinct = {caption: i for i, caption in enumerate(dict.fromkeys(captions))}
    numbers = torch.tensor([distinct[caption] for caption in captions], device=towers.device)
    return Pairs(towers.embed_images(pixels), towers.embed_texts([*distinct])[numbers], numbers, cases)


def tune(
    towers: Towers,
    plain: PairFile | None,
    data: Data | None,
    config: Config,
    checkpoint: Path,
    report: Callable[[int, dict[str, float]], None] = lambda step, losses: None,
) -> None:
    """Train `towers` in place. Ctrl-C saves to `checkpoint`; the same call goes on from there.

    Raises PacelineError if the checkpoint is of another run, and KeyboardInterrupt after saving."""
    if plain is None and data is None:
        raise PacelineError("nothing to train on: give --generic PAIRS, or DATA with cases, or both")
    generic = PlainBatches(towers, plain) if plain else None
    hard = CaseBatches(towers, data) if data else None
    model = _adapted(towers, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98))
    step, saved = _resume(checkpoint, model, optimizer, config), time.monotonic()
    model.train()
    try:
        while step < config.steps:
            losses = _step(towers, generic, hard, optimizer, trained, config, step)
            step += 1
            report(step, losses)
            if time.monotonic() - saved > SAVE_SECONDS:
                _save(checkpoint, model, optimizer, config, step)
                saved = time.monotonic()
    except KeyboardInterrupt:
        _save(checkpoint, model, optimizer, config, step)
        raise
    _save(checkpoint, model, optimizer, config, step)
    model.eval()
    if config.lora:
        towers.model = model.merge_and_unload()


def _step(
    towers: Towers,
    generic: PlainBatches | None,
    hard: CaseBatches | None,
    optimizer: torch.optim.Optimizer,
    trained: list[torch.nn.Parameter],
    config: Config,
    step: int,
) -> dict[str, float]:
    for group in optimizer.param_groups:
        group["lr"] = config.lr * rate(step, config)
    scale = towers.model.logit_scale.exp()
    plain = generic.draw(child(config.seed, "plain", step), config.batch) if generic else None
    losses: dict[str, Tensor] = {}
    if plain is not None:
        losses["clip"] = clip_loss(plain, scale)
    if hard is not None and config.mu:
        cases = hard.draw(child(config.seed, "cases", step), config.cases)
        losses["hard"] = config.mu * hard_loss(cases, plain, scale, config.scope, config.negatives)
    loss = torch.stack([*losses.values()]).sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    with torch.no_grad():
        towers.model.logit_scale.clamp_(max=math.log(LARGEST_SCALE))
    return {name: float(value.detach()) for name, value in losses.items()}


def rate(step: int, config: Config) -> float:
    """Of the peak learning rate: a linear rise, then a cosine to nothing."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _adapted(towers: Towers, config: Config) -> Any:
    """The model, with adapters if they are what is trained."""
    if not config.lora:
        return towers.model
    from peft import LoraConfig, get_peft_model

    linear = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    adapters = LoraConfig(r=config.lora, lora_alpha=2 * config.lora, target_modules=linear)
    towers.model = get_peft_model(towers.model, adapters)
    return towers.model


def _save(path: Path, model: Any, optimizer: torch.optim.Optimizer, config: Config, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "config": asdict(config), "step": step}
    torch.save(kept, draft)
    draft.replace(path)


def _resume(path: Path, model: Any, optimizer: torch.optim.Optimizer, config: Config) -> int:
    """The step to go on from."""
    if not path.exists():
        return 0
    kept = torch.load(path, weights_only=True)
    if kept["config"] != asdict(config):
        other = [key for key, value in asdict(config).items() if kept["config"].get(key) != value]
        raise PacelineError(
            f"{path} is of another run ({', '.join(other)} differ): delete it, or choose another folder"
        )
    model.load_state_dict(kept["model"])
    if kept["step"] < config.steps:
        optimizer.load_state_dict(kept["optimizer"])
    return int(kept["step"])
