"""Tuning that keeps what a model could do before: mixtures of the weights before and after, of which one is chosen.

WiSE-FT (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models"): the straight line between the weights before
and after often has points with most of the gain and little of the loss. Here the gain is SPEC's mean, and the loss is
zero-shot accuracy: naming what a picture shows.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from paceline.evals.vision.dataset import Data, PairFile, read_data, read_pairs
from paceline.evals.vision.evaluate import BATCH, DualEncoder, score
from paceline.evals.vision.options import TuneOptions
from paceline.evals.vision.scores import overall
from paceline.evals.vision.towers import Towers, small
from paceline.evals.vision.tune import tune
from paceline.jsonl import Appender, write_whole

SHARES = tuple(tenth / 10 for tenth in range(11))
"""Of the way from the weights before to those after."""
EVERY = 20
"""Steps between two lines of the log."""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Retention:
    """What the mixture is chosen by: the best SPEC mean on `cases` among those that lose at most `tolerance` points of
    zero-shot accuracy on `pairs`."""

    cases: Path
    pairs: Path
    tolerance: float = 2.0


def train(
    model: str,
    options: TuneOptions,
    out: Path,
    folder: Path,
    *,
    device: str = "cpu",
    data: Path | None = None,
    generic: Path | None = None,
    checked: Retention | None = None,
) -> None:
    """Tune `model`, a path or "small", and write it to `out`; checkpoint and log are in `folder`.

    data: cases. generic: plain pairs. Raises KeyboardInterrupt after saving; the same call goes on from there."""
    plain, learnt = read_pairs(generic) if generic else None, read_data(data) if data else None
    if checked is not None:
        cases, pairs = read_data(checked.cases), read_pairs(checked.pairs)
    if model == "small":
        towers = small(plain.captions if plain else (), seed=options.seed)
    else:
        towers = Towers.load(model, device)
    before = weights(towers)
    folder.mkdir(parents=True, exist_ok=True)
    tune(towers, plain, learnt, options, folder / "checkpoint.pt", _logger(folder / "log.jsonl", options.steps))
    facts: dict[str, Any] = {"model": model, "data": str(data), "generic": str(generic), **asdict(options)}
    if checked is not None:
        facts["share"] = _mix_best(towers, before, cases, pairs, checked.tolerance, out)
    towers.save(out)
    _write_json(out / "training.json", facts)


def _logger(file: Path, steps: int) -> Callable[[int, dict[str, float]], None]:
    """A function that writes a step's losses to `file` and to the terminal, every EVERY steps."""
    began = time.perf_counter()

    def report(step: int, losses: dict[str, float]) -> None:
        if step % EVERY == 0 or step == steps:
            with Appender.open(file) as rows:
                rows.append([{"step": step, "seconds": round(time.perf_counter() - began, 1), **losses}])
            terms = "  ".join(f"{name} {value:.3f}" for name, value in losses.items())
            print(f"step {step}/{steps}  {terms}", file=sys.stderr, flush=True)

    return report


def _mix_best(towers: Towers, before: Weights, data: Data, pairs: PairFile, tolerance: float, out: Path) -> float:
    """Give `towers` the best mixture, write all of them to `out`, and return the share."""
    after, points = weights(towers), []
    for share in SHARES:
        mix(towers, before, after, share)
        results = score(towers, data).results()
        subsets = {one["subset"]: one["mean"] for one in results}
        accuracy = round(zero_shot(towers, pairs), 2)
        points.append({"share": share, "spec": overall(results)["mean"], "retention": accuracy, "subsets": subsets})
    chosen = float(choose(points, tolerance)["share"])
    mix(towers, before, after, chosen)
    _write_json(out / "frontier.json", {"tolerance": tolerance, "chosen": chosen, "points": points})
    for p in points:
        mark = "  <- written" if p["share"] == chosen else ""
        print(f"share {p['share']:.1f}  SPEC {p['spec']:5.1f}  zero-shot {p['retention']:5.1f}{mark}")
    return chosen


def weights(towers: Towers) -> Weights:
    """A copy of the model's weights."""
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


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")
