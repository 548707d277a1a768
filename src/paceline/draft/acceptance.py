"""How far runs of tokens get: how many steps drafting ahead takes (`branches.py`)."""

import numpy as np

from paceline.draft.cost import Floats

DEEPEST = 64  # deeper tokens count as this deep
MEMORY = 400.0  # runs after which the counts are halved


class Lengths:
    """How far runs of tokens get: drafts until they end by themselves, windows until a token is rejected.

    memory  runs after which the counts are halved."""

    def __init__(self, memory: float = MEMORY) -> None:
        self.memory = memory
        self._went_on = np.ones(DEEPEST + 1)
        self._could = np.full(DEEPEST + 1, 1.25)

    def note(self, length: int, limit: int) -> None:
        """A run ended after `length` tokens; one that could have no more than `limit` counts up to there."""
        length = min(length, DEEPEST - 1)
        self._could[: min(length + 1, limit)] += 1
        self._went_on[:length] += 1
        if self._could[0] > self.memory:
            self._could /= 2
            self._went_on /= 2

    def reach(self, most: int) -> Floats:
        """P(a run has 1, 2, ... `most` tokens or more)."""
        steps = np.minimum(self._went_on / self._could, 1.0)
        return steps[np.minimum(np.arange(most), DEEPEST)].cumprod()

    def steps(self, most: int, rows: int) -> Floats:
        """Expected length of the longest of `rows` runs, by their limit: 1, 2, ... `most` tokens."""
        return (1 - (1 - self.reach(most)) ** rows).cumsum()
