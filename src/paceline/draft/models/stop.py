"""Stop rules decide when a drafter that has a model stops drafting. Any rule works with any such drafter.

    rule = RULES["svip"](cap=40)
    signals = rule.signals(logits)                 # one number for each row's next-token distribution
    rule.stop(row.id, 3, signals[0])               # whether drafting stops after the third token

A rule sees the distribution from which a token was taken, and may use the outcomes of earlier rounds. The token at
which it stops stays in the draft, so at least one is drafted (SVIP, section 3; Kangaroo). Every rule stops on NaN."""

from collections.abc import Sequence
from math import sqrt
from typing import Literal, NamedTuple

import torch

from paceline.core.sampling import is_compiled
from paceline.errors import MethodError
from paceline.kernels.rows import certainty_of_row

Name = Literal["fixed", "confidence", "svip", "heuristic"]


class Outcome(NamedTuple):
    """The result of a row's draft.

    drafted  number of drafted tokens, or a tree's depth. accepted: number of accepted tokens."""

    row: int
    drafted: int
    accepted: int


class StopRule:
    """The interface. A round calls `signals` and `stop` for every drafted token, and `learn` at its end.

    cap        largest number of tokens in a draft.
    threshold  see each rule.
    bounds     smallest and largest threshold; if they are equal, the rule has no threshold."""

    cap = 5
    threshold = 0.0
    bounds = (0.0, 0.0)

    def __init__(self, cap: int | None = None, threshold: float | None = None):
        self.cap = type(self).cap if cap is None else cap
        low, high = self.bounds
        if threshold is not None and low == high:
            raise MethodError(f"the stop rule {type(self).__name__.lower()} has no threshold; leave it out")
        if threshold is not None and not low <= threshold <= high:
            raise MethodError(f"threshold is {threshold:g}; for this stop rule it is between {low:g} and {high:g}")
        self.threshold = type(self).threshold if threshold is None else threshold

    def most(self, row: int) -> int:
        """The largest number of tokens to draft for the row now."""
        return self.cap

    def signals(self, logits: torch.Tensor) -> list[float]:
        """The number by which `stop` decides, for each row of logits [R, K]."""
        return [0.0] * len(logits)

    def stop(self, row: int, drafted: int, signal: float) -> bool:
        """Whether drafting stops after `drafted` tokens, 1 or more. signal: of the last token's distribution."""
        return False

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from the round."""

    def drop(self, row: int) -> None:
        """Forget a row."""


class Fixed(StopRule):
    """Drafts `cap` tokens; 5 is the papers' baseline."""


class Confidence(StopRule):
    """Stops if the best token's probability is below `threshold` (Kangaroo, Liu et al. 2024, 3.2: 0.6, at most 6)."""

    cap, threshold, bounds = 6, 0.6, (0.0, 1.0)

    def signals(self, logits: torch.Tensor) -> list[float]:
        return [best for _, best in certainties(logits)]

    def stop(self, row: int, drafted: int, signal: float) -> bool:
        return not signal >= self.threshold


class Svip(StopRule):
    """Stops if sqrt(0.15 H) is above `threshold`, where H is the entropy in nats at temperature 1 (SVIP, Zhang et al.
    2025, section 3: 0.3, which is 0.6 nats, and at most 40 tokens).

    sqrt(0.15 H) estimates the distance between draft and target, which bounds 1 - acceptance."""

    cap, threshold, bounds = 40, 0.3, (0.0, 10.0)
    SLOPE = 0.15

    def signals(self, logits: torch.Tensor) -> list[float]:
        return [sqrt(self.SLOPE * entropy) for entropy, _ in certainties(logits)]

    def stop(self, row: int, drafted: int, signal: float) -> bool:
        return not signal <= self.threshold


class Heuristic(StopRule):
    """Drafts 5 tokens at first; then 2 more after a draft that was accepted whole, 1 less after any other
    (transformers' schedule)."""

    cap = 40
    FIRST, MORE, LESS = 5, 2, 1

    def __init__(self, cap: int | None = None, threshold: float | None = None):
        super().__init__(cap, threshold)
        self._length: dict[int, int] = {}

    def most(self, row: int) -> int:
        return min(self._length.get(row, self.FIRST), self.cap)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for row, drafted, accepted in outcomes:
            length = self._length.get(row, self.FIRST)
            if drafted:
                more, less = min(length + self.MORE, self.cap), max(length - self.LESS, 1)
                self._length[row] = more if accepted == drafted else less

    def drop(self, row: int) -> None:
        self._length.pop(row, None)


RULES: dict[str, type[StopRule]] = {rule.__name__.lower(): rule for rule in (Fixed, Confidence, Svip, Heuristic)}


def certainties(logits: torch.Tensor) -> list[tuple[float, float]]:
    """Entropy in nats, 0 or more, and the best token's probability, for each row of logits [R, K] at temperature 1. NaN
    where logits are NaN."""
    if is_compiled(logits):
        return [certainty_of_row(logits, r) for r in range(len(logits))]
    probs = logits.float().softmax(-1)
    both = torch.stack([torch.special.entr(probs).sum(-1), probs.amax(-1)], -1)
    return [(entropy, best) for entropy, best in both.tolist()]
