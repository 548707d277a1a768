"""Models that look at no picture: to check a data set and the figures, not to be beaten."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.evals.vision.dataset import Case
from paceline.evals.vision.geometry import holds
from paceline.evals.vision.seeds import child

Scores = NDArray[np.floating[Any]]


class Oracle:
    """Knows which caption belongs to which picture."""

    def case_scores(self, case: Case) -> Scores:
        return np.eye(case.k)


class Geometry:
    """Reads the boxes of cases.jsonl and decides of every picture and caption whether one is true of the other."""

    def case_scores(self, case: Case) -> Scores:
        facts = case.facts
        if "boxes" not in facts:
            raise PacelineError("geometry reads the boxes in cases.jsonl, which this data set does not have")
        a, b = (*facts["objects"], "")[:2]
        return np.array(
            [[float(holds(case.subset, value, boxes, facts["size"], a, b)) for value in facts["values"]]
             for boxes in facts["boxes"]]
        )  # fmt: skip


class Constant:
    """Everything fits everything: what a collapsed model scores."""

    def case_scores(self, case: Case) -> Scores:
        return np.ones((case.k, case.k))


class Random:
    """Scores that depend on the seed and the case alone."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def case_scores(self, case: Case) -> Scores:
        return child(self.seed, case.subset, case.id).random((case.k, case.k))


class Swapped:
    """Sees everything, and takes each value for the next one."""

    def case_scores(self, case: Case) -> Scores:
        return np.roll(np.eye(case.k), 1, axis=1)
