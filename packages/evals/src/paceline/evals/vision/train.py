"""Training of two towers as in SPEC (Peng et al. 2024, poster): CLIP's loss on pairs, and hard negatives on cases.

    L = L_clip + mu (L_hn of pictures against captions + L_hn of captions against pictures)

A case is K pairs that differ in one value, so the hard negatives of a pair are the other pairs of its case; nothing has
to be mined. Without cases the same loop trains a model from nothing.

To keep earlier abilities, the weights before and after are mixed, and a mixture is chosen (WiSE-FT, Wortsman et al.
2022): the straight line between them often has points with most of the gain and little of the loss.
Here the gain is SPEC's mean, and the loss is zero-shot accuracy: naming what a picture shows."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from paceline.errors import PacelineError
from paceline.evals.vision import child
from paceline.evals.vision.dataset import Data, PairFile, read_data, read_pairs
from paceline.evals.vision.evaluate import BATCH, DualEncoder, score
from paceline.evals.vision.options import Negatives, Scope, TrainOptions, TuneOptions
from paceline.evals.vision.scores import overall
from paceline.evals.vision.towers import Towers, small
from paceline.outputs import STEPS, Appender, Writer, replacing, write_json

LARGEST_SCALE = 100.0  # Largest scale of the logits, as in CLIP (Radford et al. 2021, 2.5).
CACHED = 10_000  # pictures that are kept in memory: 1.5 GB at 224 x 224 pixels, 3.4 GB at 336 x 336
SAVE_SECONDS = 60.0
SHARES = tuple(tenth / 10 for tenth in range(11))  # Shares of the way from the earlier to the later weights.
EVERY = 20  # Steps between two lines of the log.

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Pairs:
    """n pictures and n captions; row i of each belongs to row i of the other."""

    images: Tensor  # (n, d), of unit length
    texts: Tensor  # (n, d), of unit length
    captions: Tensor  # (n,): equal numbers for equal captions
    cases: Tensor  # (n,): equal numbers for pairs of one case

    def same_caption(self) -> Tensor:
        """Mask, (n, n), of two different pairs with the same caption, which would be false negatives."""
        return _off_diagonal(self.captions[:, None] == self.captions[None])


def _off_diagonal(table: Tensor) -> Tensor:
    return table & ~torch.eye(len(table), dtype=torch.bool, device=table.device)


def clip_loss(pairs: Pairs, scale: Tensor) -> Tensor:
    """The contrastive loss, the mean of both directions. Pairs with the same caption are not each other's negatives.

    scale: of the logits."""
    return hard_loss(pairs, None, scale, "batch")


def hard_loss(
    hard: Pairs, generic: Pairs | None, scale: Tensor, scope: Scope = "own", negatives: Negatives = "both"
) -> Tensor:
    """L_hn, the mean of both directions: each hard pair against the generic pairs and its hard negatives.

    scope: hard negatives of the pair's own case, or of all cases. negatives: their modality; "text" before SPEC."""
    same_case = hard.cases[:, None] == hard.cases[None]
    never = hard.same_caption()
    if scope == "own":
        never = never | ~same_case
    without = never | _off_diagonal(same_case)
    texts, images = (generic.texts, generic.images) if generic else (None, None)
    to_text = direction_loss(hard.images, hard.texts, texts, without if negatives == "image" else never, scale)
    to_image = direction_loss(hard.texts, hard.images, images, without if negatives == "text" else never, scale)
    return (to_text + to_image) / 2


def direction_loss(queries: Tensor, keys: Tensor, generic: Tensor | None, never: Tensor, scale: Tensor) -> Tensor:
    """Cross entropy of query i against key i, the keys not in `never`, and all generic keys.

    queries, keys: (n, d). generic: (m, d). never: (n, n)."""
    logits = (scale.float() * (queries.float() @ keys.float().T)).masked_fill(never, -torch.inf)
    if generic is not None:
        logits = torch.cat([logits, scale.float() * (queries.float() @ generic.float().T)], 1)
    return F.cross_entropy(logits, torch.arange(len(queries), device=logits.device))


class Batches:
    """Batches of whole groups of pairs: of cases, or of plain pairs, which are groups of one."""

    def __init__(self, towers: Towers, groups: Sequence[Sequence[str]], read: Callable[[int], Image.Image]):
        """groups: the captions of each. read: picture number i, counted through all groups."""
        self._towers, self._groups = towers, groups
        self._pixels = lru_cache(CACHED)(lambda i: towers.pixels([read(i)])[0])
        self._first = np.cumsum([0, *map(len, groups)]).tolist()

    @classmethod
    def of_pairs(cls, towers: Towers, pairs: PairFile) -> Batches:
        return cls(towers, [(caption,) for caption in pairs.captions], pairs.picture)

    @classmethod
    def of_cases(cls, towers: Towers, data: Data) -> Batches:
        if not data.cases:
            raise PacelineError(f"{data.source} has no case to train on: {'; '.join(data.problems[:1])}")
        images = [image for case in data.cases for image in case.images]
        return cls(towers, [case.captions for case in data.cases], lambda i: data.picture(images[i]))

    def draw(self, rng: np.random.Generator, number: int) -> Pairs:
        """`number` groups, embedded; every distinct caption is encoded once."""
        chosen = rng.choice(len(self._groups), min(number, len(self._groups)), replace=False).tolist()
        captions = [caption for c in chosen for caption in self._groups[c]]
        distinct = {caption: i for i, caption in enumerate(dict.fromkeys(captions))}
        device = self._towers.device
        numbers = torch.tensor([distinct[caption] for caption in captions], device=device)
        owners = torch.tensor([c for c in chosen for _ in self._groups[c]], device=device)
        pixels = np.stack([self._pixels(i) for c in chosen for i in range(self._first[c], self._first[c + 1])])
        images = self._towers.embed_images(torch.from_numpy(pixels).to(device))
        return Pairs(images, self._towers.embed_texts([*distinct])[numbers], numbers, owners)


def tune(
    towers: Towers, plain: PairFile | None, data: Data | None, options: TuneOptions, checkpoint: Path,
    report: Callable[[int, dict[str, float]], None] = lambda step, losses: None,
) -> None:  # fmt: skip
    """Train `towers` in place. Ctrl-C saves to `checkpoint`; the same call goes on from there.

    A step's batch depends on the seed and the step alone, so a run that was interrupted ends as one that was not.
    Raises PacelineError if the checkpoint is of another run, and KeyboardInterrupt after saving."""
    if plain is None and data is None:
        raise PacelineError("nothing to train on: give --generic PAIRS, or DATA with cases, or both")
    generic = Batches.of_pairs(towers, plain) if plain else None
    hard = Batches.of_cases(towers, data) if data else None
    model = _adapted(towers, options)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98))
    step, saved = _resume(checkpoint, model, optimizer, options), time.monotonic()
    model.train()
    try:
        while step < options.steps:
            for group in optimizer.param_groups:
                group["lr"] = options.lr * rate(step, options)
            losses = _losses(towers, generic, hard, options, step)
            optimizer.zero_grad()
            torch.stack([*losses.values()]).sum().backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            with torch.no_grad():
                towers.model.logit_scale.clamp_(max=math.log(LARGEST_SCALE))
            step += 1
            report(step, {name: float(value.detach()) for name, value in losses.items()})
            if time.monotonic() - saved > SAVE_SECONDS:
                _save(checkpoint, model, optimizer, options, step)
                saved = time.monotonic()
    finally:
        _save(checkpoint, model, optimizer, options, step)
    model.eval()
    if options.lora:
        towers.model = model.merge_and_unload()


def _losses(
    towers: Towers, generic: Batches | None, hard: Batches | None, options: TuneOptions, step: int
) -> dict[str, Tensor]:
    """The terms of the loss, of a step's batch."""
    scale = towers.model.logit_scale.exp()
    losses, plain = {}, None
    if generic is not None:
        plain = generic.draw(child(options.seed, "plain", step), options.batch)
        losses["clip"] = clip_loss(plain, scale)
    if hard is not None and options.mu:
        cases = hard.draw(child(options.seed, "cases", step), options.cases)
        losses["hard"] = options.mu * hard_loss(cases, plain, scale, options.scope, options.negatives)
    return losses


def rate(step: int, options: TuneOptions) -> float:
    """Share of the peak learning rate: a linear rise, then a cosine to zero."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _adapted(towers: Towers, options: TuneOptions) -> Any:
    """The model, with adapters if those are trained."""
    if options.lora:
        from peft import LoraConfig, get_peft_model

        linear = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
        adapters = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules=linear)
        towers.model = get_peft_model(towers.model, adapters)
    return towers.model


def _save(path: Path, model: Any, optimizer: torch.optim.Optimizer, options: TuneOptions, step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "config": asdict(options), "step": step}
    with replacing(path) as part:
        torch.save(state, part)


def _resume(path: Path, model: Any, optimizer: torch.optim.Optimizer, options: TuneOptions) -> int:
    """Load a checkpoint, if there is one; returns the step to go on from."""
    if not path.exists():
        return 0
    state, asked = torch.load(path, weights_only=True), asdict(options)
    if other := [key for key, value in asked.items() if state["config"].get(key) != value]:
        raise PacelineError(
            f"{path} is of another run ({', '.join(other)} differ): delete it, or choose another folder"
        )
    model.load_state_dict(state["model"])
    if state["step"] < options.steps:
        optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def weights(towers: Towers) -> Weights:
    return {name: value.detach().clone() for name, value in towers.model.state_dict().items()}


def mix(towers: Towers, before: Weights, after: Weights, share: float) -> None:
    """Give `towers` the weights that lie `share` of the way from `before` to `after`."""
    mixed = {
        name: value.lerp(after[name], share) if value.is_floating_point() else after[name]
        for name, value in before.items()
    }
    towers.model.load_state_dict(mixed)


def choose(points: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """The point with the best SPEC mean among those that lose at most `tolerance` points of accuracy."""
    least = points[0]["retention"] - tolerance
    return max((p for p in points if p["retention"] >= least), key=lambda point: float(point["spec"]))


def zero_shot(model: DualEncoder, pairs: PairFile) -> float:
    """Percent of the pictures that fit their own caption better than every other caption of the file.

    For pairs of one object each (`classes`), captioned "a photo of a fish", this is zero-shot classification."""
    classes = sorted(set(pairs.captions))
    texts = np.concatenate([model.encode_texts(classes[i : i + BATCH]) for i in range(0, len(classes), BATCH)])
    right = 0
    for start in range(0, len(pairs.images), BATCH):
        some = range(start, min(start + BATCH, len(pairs.images)))
        best = (model.encode_images([pairs.picture(i) for i in some]) @ texts.T).argmax(1)
        right += sum(classes[b] == pairs.captions[i] for b, i in zip(best, some, strict=True))
    return 100 * right / len(pairs.images)


def train(model: str, options: TuneOptions, files: TrainOptions) -> None:
    """Tune `model`, a path or "small", and write it to `files.out`; checkpoint and log go to `files.run`.

    Raises KeyboardInterrupt after saving; the same call goes on from there."""
    if (files.validate is None) != (files.retention is None):
        raise PacelineError("--validate and --retention belong together: one is weighed against the other")
    plain = read_pairs(files.generic) if files.generic else None
    learnt = read_data(files.data) if files.data else None
    checked = (read_data(files.validate), read_pairs(files.retention)) if files.validate and files.retention else None
    if model == "small":
        towers = small(plain.captions if plain else (), seed=options.seed)
    else:
        towers = Towers.load(model, files.device)
    before = weights(towers)
    files.run.mkdir(parents=True, exist_ok=True)
    with Appender.open(files.run / "log.jsonl", STEPS) as log:
        tune(towers, plain, learnt, options, files.run / "checkpoint.pt", _logger(log, options.steps))
    facts: dict[str, Any] = {"model": model, "data": str(files.data), "generic": str(files.generic), **asdict(options)}
    if checked is not None:
        facts["share"] = _mix_best(towers, before, *checked, files.tolerance, files.out)
    towers.save(files.out)
    write_json(files.out / "training.json", facts)


def _logger(log: Writer, steps: int) -> Callable[[int, dict[str, float]], None]:
    """A function that writes a step's losses to `log` and to the terminal, every EVERY steps."""
    began = time.perf_counter()

    def report(step: int, losses: dict[str, float]) -> None:
        if step % EVERY == 0 or step == steps:
            log.append([{"step": step, "seconds": round(time.perf_counter() - began, 1), **losses}])
            terms = "  ".join(f"{name} {value:.3f}" for name, value in losses.items())
            print(f"step {step}/{steps}  {terms}", file=sys.stderr, flush=True)

    return report


def _mix_best(towers: Towers, before: Weights, data: Data, pairs: PairFile, tolerance: float, out: Path) -> float:
    """Give `towers` the mixture with the best SPEC mean on `data` among those that lose at most `tolerance` points of
    zero-shot accuracy on `pairs`; write all of them to `out`, and return the share."""
    after, points = weights(towers), []
    for share in SHARES:
        mix(towers, before, after, share)
        results = score(towers, data).results()
        subsets = {one["subset"]: one["mean"] for one in results}
        accuracy = round(zero_shot(towers, pairs), 2)
        points.append({"share": share, "spec": overall(results)["mean"], "retention": accuracy, "subsets": subsets})
    chosen = float(choose(points, tolerance)["share"])
    mix(towers, before, after, chosen)
    write_json(out / "frontier.json", {"tolerance": tolerance, "chosen": chosen, "points": points})
    for p in points:
        mark = "  <- written" if p["share"] == chosen else ""
        print(f"share {p['share']:.1f}  SPEC {p['spec']:5.1f}  zero-shot {p['retention']:5.1f}{mark}")
    return chosen
