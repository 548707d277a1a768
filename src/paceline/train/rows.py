"""Rows of tokens to train on, and batches of them: documents laid end to end or packed whole, mixed by weight.

Doesn't know: text, tokenizers, models.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.train.loop import Batch
from paceline.train.loss import IGNORE

Rows = tuple[np.ndarray, np.ndarray]
"""Input ids and labels, int32 [num_rows, length]; a label is the next token, or IGNORE."""

Rendered = tuple[list[int], list[bool]]
"""A document in token ids, and which of them are learnt."""


@dataclass(frozen=True)
class MixtureConfig:
    """What a batch is made of. A source that `weights` does not name weighs `other`, its plain text beside its
    conversations ("text/NAME") a quarter of that."""

    length: int  # tokens a row
    rows: int  # rows a batch
    weights: dict[str, float]
    decay_weights: dict[str, float]  # the mixture after `decay_from` of the budget
    other: float = 0.1
    decay_from: float = 0.75
    short: int | None = None  # tokens a row until `decay_from`: attention costs less
    seed: int = 0


def lay_end_to_end(rendered: Iterable[Rendered], length: int) -> Rows:
    """Documents one after another, cut every `length` tokens; every token is learnt."""
    flat = np.fromiter((i for ids, _ in rendered for i in ids), dtype=np.int32)
    count = max(len(flat) - 1, 0) // length
    return flat[: count * length].reshape(count, length), flat[1 : count * length + 1].reshape(count, length)


def pack_whole(rendered: Iterable[Rendered], length: int, pad: int) -> Rows:
    """Conversations packed whole into rows; one longer than a row is cut, and left out when no answer survives."""
    bins: list[tuple[list[int], list[int]]] = []
    is_open: list[int] = []
    for ids, learn in rendered:
        inputs = ids[:-1][:length]
        labels = [i if wanted else IGNORE for i, wanted in zip(ids[1:], learn[1:], strict=True)][:length]
        if all(label == IGNORE for label in labels):
            continue
        for index in is_open:
            if len(bins[index][0]) + len(inputs) <= length:
                break
        else:
            index = len(bins)
            bins.append(([], []))
            is_open = [*is_open, index][-16:]
        bins[index][0].extend(inputs)
        bins[index][1].extend(labels)
    ids_out = np.full((len(bins), length), pad, dtype=np.int32)
    labels_out = np.full((len(bins), length), IGNORE, dtype=np.int32)
    for row, (inputs, labels) in enumerate(bins):
        ids_out[row, : len(inputs)] = inputs
        labels_out[row, : len(labels)] = labels
    return ids_out, labels_out


class Mixture:
    """Batches of rows drawn from several sources by weight; every source is read through before it repeats."""

    def __init__(self, rows: dict[str, Rows], config: MixtureConfig) -> None:
        self.rows = {name: r for name, r in rows.items() if len(r[0])}
        if not self.rows:
            raise PacelineError("the sources hold less text than one row; add sources or shorten the rows")
        self.config = config
        self.step = 0
        self.taken: Counter[str] = Counter()
        self._order: dict[str, tuple[int, np.ndarray]] = {}

    def next(self, progress: float) -> Batch:
        config = self.config
        chosen = config.weights if progress < config.decay_from else config.decay_weights
        names = sorted(self.rows)
        rng = random.Random(f"{config.seed}/{self.step}")
        weights = [chosen.get(n, config.other / (4 if n.startswith("text/") else 1)) for n in names]
        picked = [self._row(name) for name in rng.choices(names, weights, k=config.rows)]
        self.step += 1
        ids, labels = (torch.from_numpy(np.stack(side)).long() for side in zip(*picked, strict=True))
        if config.short and progress < config.decay_from:
            ids, labels = ids.reshape(-1, config.short), labels.reshape(-1, config.short)
        return {"input_ids": ids, "labels": labels}

    def _row(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        ids, labels = self.rows[name]
        epoch, place = divmod(self.taken[name], len(ids))
        if self._order.get(name, (-1, None))[0] != epoch:
            rng = np.random.default_rng([self.config.seed, epoch, *name.encode()])
            self._order[name] = (epoch, rng.permutation(len(ids)))
        self.taken[name] += 1
        index = self._order[name][1][place]
        return ids[index], labels[index]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "taken": dict(self.taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.taken = state["step"], Counter(state["taken"])
        self._order = {}


def batches(rows: Rows, size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and labels, int64 [at most `size`, length] each, of all rows in order."""
    for start in range(0, len(rows[0]), size):
        ids, labels = (torch.from_numpy(side[start : start + size]).long() for side in rows)
        yield ids, labels


def first_batch(rows: Rows, most: int = 16) -> Batch:
    """The first rows as a batch of the loop."""
    ids, labels = (torch.from_numpy(side[:most]).long() for side in rows)
    return {"input_ids": ids, "labels": labels}


def row_counts(rows: dict[str, Rows]) -> list[str]:
    """A line for each source: how many rows, and how many of their tokens are learnt."""
    return [
        f"  {name:10} {len(ids):6} rows  {ids.size:>10,} tokens, {int((labels != IGNORE).sum()):>10,} learnt"
        for name, (ids, labels) in rows.items()
    ]
