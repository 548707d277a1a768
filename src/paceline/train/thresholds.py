"""Thresholds for a draft with exits: those that should make it fastest for the target it was trained for.

S2D finds them by decoding with several (Kavehzadeh et al. 2024: 0.5,0.5 for 7B and 13B, 0.75,0.7 for 70B). Here they
are computed from held-out answers: how sure every exit is at every token, whether it names the token that the target
would, and which weights were read until then.

    ExitRecord(sure, right, layers=(0.12, 0.25, 0.37), head=0.03, share=share).best()      # ((0.6, 0.5), 1.21)

The speed-up is that of a machine where reading weights takes the time. Doesn't know: models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.cost.model import chain_tokens, speedup
from paceline.draft.s2d import NEVER

GRID = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, NEVER)
LONGEST = 16
"""Most tokens of a draft; longer ones do not pay at any rate that a part of a target reaches."""


@dataclass(frozen=True)
class ExitRecord:
    """What every exit of a draft says at N tokens.

    sure    [N, E]: the probability of its best token. right [N, E]: whether that is the target's best.
    layers  [E]: weights of the layers up to it, as a share of what a forward of the target reads.
    head    that share of the head, which is read at every exit that is tried.
    share   [N]: the weight of the tokens, 1 together."""

    sure: np.ndarray
    right: np.ndarray
    layers: Sequence[float]
    head: float
    share: np.ndarray

    def best(self) -> tuple[tuple[float, ...], float]:
        """Thresholds for all exits but the last, of those in GRID, and the speed-up they should bring.

        They are moved one after the other until that helps no more, starting from each value in GRID for all of
        them, because no threshold matters after an exit at which every token leaves."""
        ends = (self._climb((start,) * (len(self.layers) - 1)) for start in GRID)
        return max(ends, key=lambda end: end[1])

    def speed(self, thresholds: Sequence[float]) -> float:
        """Speed-up over plain decoding with the draft length that is best on average."""
        leaves = np.column_stack([self.sure[:, :-1] > np.asarray(thresholds), np.ones(len(self.sure), bool)])
        at = leaves.argmax(1)
        tried = np.cumsum([*(threshold < 1 for threshold in thresholds), True])
        rate = float(self.share @ self.right[np.arange(len(at)), at])
        call = float(self.share @ (np.asarray(self.layers) + self.head * tried)[at])
        return max(speedup(chain_tokens([rate] * n), calls=n, call=call) for n in range(1, LONGEST + 1))

    def _climb(self, thresholds: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
        speed, before = self.speed(thresholds), 0.0
        while speed > before:
            before = speed
            for exit in range(len(thresholds)):
                moved = [(*thresholds[:exit], value, *thresholds[exit + 1 :]) for value in GRID]
                speeds = ((self.speed(choice), choice) for choice in [*moved, thresholds])
                speed, thresholds = max(speeds, key=lambda pair: pair[0])  # of equals the lowest
        return thresholds, speed
