"""How far a drafter's distribution agrees with its target's, over the labelled positions of held-out rows.

Doesn't know: how drafters are made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.train.data import Rows, batches
from paceline.train.loss import IGNORE

Logits = Callable[[Tensor], Tensor]
"""Token ids [B, T] to logits [B, T, V] of the token after each."""


@dataclass(frozen=True)
class Agreement:
    """How a draft distribution q fits the target's p on one source, at temperature 1.

    overlap  mean of sum min(p, q): the chance that a token drawn from q is accepted.
    top1     share of positions at which both prefer the same token."""

    source: str
    tokens: int
    overlap: float
    top1: float


def logits_of(model: Any) -> Logits:
    """A transformers model as a function of token ids."""
    return lambda ids: model(input_ids=ids).logits


def overlaps(p: Tensor, q: Tensor) -> tuple[float, float]:
    """Over N positions: the sum of sum min(p, q), and how often both prefer the same token. p, q [N, V]."""
    return float(torch.minimum(p, q).sum()), float((p.argmax(-1) == q.argmax(-1)).sum())


@torch.no_grad()
def agreement(target: Logits, draft: Logits, held: Mapping[str, Rows], batch: int = 4) -> list[Agreement]:
    """By source; the last entry, "all", weighs every source alike."""
    by_source = []
    for name, rows in held.items():
        overlap, top1, count = 0.0, 0.0, 0
        for ids, labels in batches(rows, batch):
            p, q = (torch.softmax(logits(ids).float()[labels != IGNORE], -1) for logits in (target, draft))
            more = overlaps(p, q)
            overlap, top1, count = overlap + more[0], top1 + more[1], count + len(p)
        by_source.append(Agreement(name, count, overlap / count, top1 / count))
    return with_all(by_source)


def with_all(by_source: Sequence[Agreement]) -> list[Agreement]:
    """The sources, and after them "all": the mean over the sources."""
    count = len(by_source)
    overlap, top1 = sum(a.overlap for a in by_source) / count, sum(a.top1 for a in by_source) / count
    return [*by_source, Agreement("all", sum(a.tokens for a in by_source), overlap, top1)]


def lines(agreements: Sequence[Agreement]) -> list[str]:
    """`agreement` for a reader."""
    width = max(len(a.source) for a in agreements)
    return [
        f"{a.source:{width}}  accepted {a.overlap:6.1%}  same best token {a.top1:6.1%}  ({a.tokens:,} tokens)"
        for a in agreements
    ]
