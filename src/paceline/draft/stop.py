"""Stop rules: when a drafter that has a model stops drafting. Any of them works with any such drafter.

    rule = stop_rule("svip")
    signals = rule.signals(logits)                 # one number for each row's next-token distribution
    rule.stop(row.id, 3, signals[0])               # whether the third drafted token is the last

A rule sees the distribution a token was drawn from, never the token: a draft that is cut short because of what was
drawn would not be drawn from q any more, and the output would not be the target's. The token at which a rule stops
stays in the draft (SVIP, section 3; Kangaroo's first token is always drafted). Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from paceline.errors import MethodError

Name = Literal["fixed", "confidence", "svip", "heuristic", "adaptive"]


class StopRule:
    """A fixed length, and the interface of the others.

    cap  most tokens in a draft. threshold: see the rule."""

    cap = 5
    threshold = 0.0
    bounds = (0.0, 0.0)
    """What `threshold` may be; two equal numbers: the rule has none."""

    def __init__(self, cap: int | None = None, threshold: float | None = None):
        self.cap = type(self).cap if cap is None else cap
        low, high = self.bounds
        if threshold is not None and low == high:
            raise MethodError(f"the stop rule {type(self).__name__.lower()} has no threshold; leave it out")
        if threshold is not None and not low <= threshold <= high:
            raise MethodError(f"threshold is {threshold:g}; for this stop rule it is between {low:g} and {high:g}")
        self.threshold = type(self).threshold if threshold is None else threshold

    def most(self, row: int) -> int:
        """Most tokens to draft for a row now."""
        return self.cap

    def signals(self, logits: torch.Tensor) -> list[float]:
        """What the rule wants to know of distributions: logits [R, K] to R numbers."""
        return [0.0] * len(logits)

    def stop(self, row: int, drafted: int, signal: float) -> bool:
        """Whether the `drafted`th token (from 1), whose distribution had `signal`, is the last."""
        return False

    def learn(self, row: int, drafted: int, accepted: int, seconds: float) -> None:
        """What became of a row's draft. seconds: since its draft before, drafting included."""

    def stepped(self, seconds: float) -> None:
        """What a forward of the draft model took."""

    def drop(self, row: int) -> None:
        """A row has ended."""


class Fixed(StopRule):
    """As many tokens as `cap` says; 5 is the papers' baseline."""


class Confidence(StopRule):
    """Stops behind a token whose distribution's best has less than `threshold` (Kangaroo: 0.6, at most 6 tokens)."""

    cap, threshold, bounds = 6, 0.6, (0.0, 1.01)

    def signals(self, logits: torch.Tensor) -> list[float]:
        """The best token's probability at temperature 1."""
        scores = logits.float()
        best: list[float] = (scores.max(-1).values - scores.logsumexp(-1)).exp().tolist()
        return best

    def stop(self, row: int, drafted: int, signal: float) -> bool:
        return signal < self.threshold


class Svip(StopRule):
    """Stops behind a token whose distribution is too uncertain: sqrt(0.15 H) above `threshold`, H in nats at
    temperature 1 (SVIP, Zhang et al. 2025, section 3: 0.3, that is 0.6 nats, at most 40 tokens)."""

    cap, threshold, bounds = 40, 0.3, (0.0, 10.0)
    SLOPE = 0.15

    def signals(self, logits: torch.Tensor) -> list[float]:
        """Estimated distance between draft and target, sqrt(0.15 H); a bound on 1 - acceptance."""
        logs = logits.float().log_softmax(-1)
        # A token of probability 0 adds nothing, but minus infinity times zero is no number.
        entropy = -(logs.exp() * logs.clamp_min(-1e30)).sum(-1).clamp_min(0)
        bound: list[float] = (self.SLOPE * entropy).sqrt().tolist()
        return bound

    def stop(self, row: int, drafted: int, signal: float) -> bool:
        return not signal <= self.threshold


class Heuristic(StopRule):
    """Two more than last time where all were accepted, one less where not (transformers' schedule), from 5 on."""

    cap = 40
    FIRST, MORE, LESS = 5, 2, 1

    def __init__(self, cap: int | None = None, threshold: float | None = None):
        super().__init__(cap, threshold)
        self._length: dict[int, int] = {}

    def most(self, row: int) -> int:
        return min(self._length.get(row, self.FIRST), self.cap)

    def learn(self, row: int, drafted: int, accepted: int, seconds: float) -> None:
        length = self._length.get(row, self.FIRST)
        # A draft that the row's end cut short says nothing about the length.
        if drafted:
            self._length[row] = min(length + self.MORE, self.cap) if accepted == drafted else max(1, length - self.LESS)

    def drop(self, row: int) -> None:
        self._length.pop(row, None)


RULES: dict[str, type[StopRule]] = {
    "fixed": Fixed,
    "confidence": Confidence,
    "svip": Svip,
    "heuristic": Heuristic,
}


def stop_rule(name: str, cap: int | None = None, threshold: float | None = None) -> StopRule:
    """The rule of that name; MethodError for a cap or a threshold that it cannot have."""
    if cap is not None and cap < 1:
        raise MethodError(f"draft is {cap}; a drafter drafts at least 1 token")
    return RULES[name](cap, threshold)


def names() -> Sequence[str]:
    """Every rule."""
    return list(RULES)
