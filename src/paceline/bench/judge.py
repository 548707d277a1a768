"""Tie or bug: why an answer differs from plain decoding, where it first does.

Greedy answers may differ in a dtype of few bits, because a forward over many tokens rounds differently from one over
a single token, and of two logits that are nearly equal the other one then wins. Whether that is what happened can be
seen: the two tokens' logits, computed exactly, lie closer together than the dtype's own noise, and no third is above
them. Anything else is a bug.

    with Judge(target, exact) as judge:
        judge.verdict(prefix, plain_token, other_token)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from paceline.round import Segment
from paceline.target.base import Target


@dataclass(frozen=True)
class Judgement:
    """gap: how far the lower of the two logits lies below the best of all, exactly computed; noise: how much the
    dtype changes a logit there (the most over the vocabulary)."""

    verdict: str
    gap: float
    noise: float


class Judge:
    """target: the model as it ran. exact: the same in float32, or the target itself if that is its dtype.

    A prefix that goes on where the one before ended is read on from there: of one text, the shorter ones first."""

    def __init__(self, target: Target, exact: Target, chunk: int = 512):
        self._exact = _Reader(exact, 1, chunk)
        self._own = [_Reader(target, last, chunk) for last in (1, 16)]
        self._logits = lru_cache(maxsize=256)(self._both)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in (self._exact, *self._own):
            reader.close()

    def verdict(self, prefix: Sequence[int], plain: int, other: int) -> Judgement:
        """Whether `other` instead of `plain` after `prefix` (prompt and common tokens) is a tie."""
        exact, noise = self._logits(tuple(prefix))
        gap = float(exact.max() - exact[[plain, other]].min())
        return Judgement("tie" if gap <= 2 * noise else "bug", round(gap, 6), round(noise, 6))

    def _both(self, prefix: tuple[int, ...]) -> tuple[torch.Tensor, float]:
        """Logits after `prefix` in float32, and by how much the target's own differ, computed in two ways."""
        exact = self._exact.logits(prefix)
        own = [reader.logits(prefix) for reader in self._own]
        differences = [float((one - exact).abs().max()) for one in own]
        return exact, max(*differences, *(float((own[0] - one).abs().max()) for one in own), 1e-5)


class _Reader:
    """A row of a target, and what it has read. last: tokens before a prefix's end that are run in one forward;
    what comes before them is run in chunks, and kept for the next prefix."""

    def __init__(self, target: Target, last: int, chunk: int):
        self._target, self._last, self._chunk = target, last, chunk
        self._slot: int | None = None
        self._read: tuple[int, ...] = ()

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        """Logits after `prefix`, float32 [V]."""
        cut = max(len(prefix) - self._last, 0)
        if self._slot is None or prefix[:cut][: len(self._read)] != self._read:
            self.close()
            self._slot = self._target.add_row(len(prefix) + 1)
        tokens = np.array(prefix, np.int64)
        for begin in range(len(self._read), cut, self._chunk):
            part = tokens[begin : min(begin + self._chunk, cut)]
            self._target.verify([Segment.chunk(self._slot, part, last=False)])
            self._target.commit(self._slot, range(len(part)))
            self._read = prefix[: begin + len(part)]
        return self._target.verify([Segment.chunk(self._slot, tokens[cut:], last=True)]).of(0)[-1].float().cpu()

    def close(self) -> None:
        """Give the row back."""
        if self._slot is not None:
            self._target.drop_row(self._slot)
        self._slot, self._read = None, ()
