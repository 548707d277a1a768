"""Tie or bug: why an answer differs from plain decoding, where it first does.

Greedy answers may differ in a dtype of few bits, because a forward over many tokens rounds differently from one over
a single token, and of two logits that are nearly equal the other one then wins. Whether that is what happened can be
told: the two tokens' logits, computed exactly, lie closer together than the dtype's own noise, and no third is above
them. Anything else is a bug.

    Judge(target, exact).verdict(prefix, plain_token, other_token)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from paceline.target.base import Segment, Target


@dataclass(frozen=True)
class Verdict:
    """gap: how far the lower of the two logits lies below the best of all, exactly computed; noise: how much the
    dtype changes a logit there (the most over the vocabulary)."""

    verdict: str
    gap: float
    noise: float


class Judge:
    """target: the model as it ran. exact: the same in float32, or the target itself if that is its dtype."""

    def __init__(self, target: Target, exact: Target, chunk: int = 512):
        self.target, self.exact, self.chunk = target, exact, chunk
        self._logits = lru_cache(maxsize=256)(self._both)

    def verdict(self, prefix: Sequence[int], plain: int, other: int) -> Verdict:
        """Whether `other` instead of `plain` behind `prefix` (prompt and common tokens) is a tie."""
        exact, noise = self._logits(tuple(prefix))
        gap = float(exact.max() - exact[[plain, other]].min())
        return Verdict("tie" if gap <= 2 * noise else "bug", round(gap, 6), round(noise, 6))

    def _both(self, prefix: tuple[int, ...]) -> tuple[torch.Tensor, float]:
        """Logits behind `prefix` in float32, and by how much the target's own differ, computed in two ways."""
        exact = self._behind(self.exact, prefix, len(prefix) - 1)
        ways = {len(prefix) - 1, max(len(prefix) - 16, 0)}
        own = [self._behind(self.target, prefix, cut) for cut in ways]
        differences = [float((one - exact).abs().max()) for one in own]
        return exact, max(*differences, *(float((own[0] - one).abs().max()) for one in own), 1e-5)

    def _behind(self, target: Target, prefix: tuple[int, ...], cut: int) -> torch.Tensor:
        """Logits behind `prefix`, float32 [V]: what comes before `cut` in chunks, the rest in one forward."""
        tokens = np.array(prefix, np.int64)
        slot = target.add_row(len(tokens) + 1)
        try:
            for begin in range(0, cut, self.chunk):
                part = tokens[begin : min(begin + self.chunk, cut)]
                target.verify([Segment.chunk(slot, part, last=False)])
                target.commit(slot, range(len(part)))
            verdict = target.verify([Segment.chunk(slot, tokens[cut:], last=True)])
            return verdict.of(0)[-1].float().cpu()
        finally:
            target.drop_row(slot)

