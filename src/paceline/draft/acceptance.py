"""The probability that the nodes of a draft are accepted, learned from earlier drafts.

A draft survives from depth to depth. The share that survives a step is learned by depth and by the length of the draft
(with drafters that copy, the length depends on the match). A draft that was cut counts only down to the cut, so cutting
does not bias the shares (Kaplan and Meier 1958). A row's probabilities are those of all rows ** multiplier, where
multiplier = observed / expected rejections of the row, both with a Gamma prior (Vaupel et al. 1979). Siblings share a
step by their rank. The `chances` that a drafter gives with a tree replace shares and ranks. Old counts fade."""

from itertools import pairwise
from math import expm1, log

import numpy as np

from paceline.core.tree import DraftTree
from paceline.draft.cost import Floats

DEEPEST = 64  # deeper nodes count as this deep
CLASSES = 7  # lengths of drafts: 1, 2 and 3, 4 to 7, ..., 32 and more; the first is that of all lengths
FIRST = 0.7  # share of drafts whose first token is accepted, before anything is known
STRENGTH = 4.0  # weight of a share's prior in trials: FIRST at depth 1, the share of the depth above at others
MEMORY = 400.0  # trials at a depth after which the counts are halved
REFRESH = 16  # drafts of a length between two updates of its shares
ROW_STRENGTH, ROW_FADE = 15.0, 0.95
"""Weight of the multiplier's prior in rejections (2 trusts lucky rows too far); fade of rejections per draft."""
LARGEST_MULTIPLIER = 4.0  # the smallest is 1 / LARGEST_MULTIPLIER
RANKS = 8
LEAST = 1e-3  # smallest probability of a step
_DEPTHS = np.arange(1, DEEPEST + 1)


class Acceptance:
    """Acceptance probabilities of one drafter's drafts."""

    def __init__(self) -> None:
        self._hits = np.zeros((CLASSES, DEEPEST + 1))
        self._trials = np.zeros((CLASSES, DEEPEST + 1))
        self._hazard = np.tile(-log(FIRST) * np.arange(DEEPEST + 1), (CLASSES, 1))
        self._news = [0] * CLASSES
        self._ranks = np.array([0.6**rank for rank in range(RANKS)])
        self._trust = [ROW_STRENGTH, ROW_STRENGTH]
        self._rows: dict[int, tuple[float, float]] = {}

    def multiplier(self, row: int) -> float:
        """Observed over expected rejections of the row's drafts."""
        observed, expected = self._rows.get(row, (0.0, 0.0))
        multiplier = (observed + ROW_STRENGTH) / (expected + ROW_STRENGTH)
        return min(max(multiplier, 1 / LARGEST_MULTIPLIER), LARGEST_MULTIPLIER)

    def by_depth(self, row: int, most: int) -> Floats:
        """Probability that a draft of unknown length reaches and survives depth 1, 2, ... `most`."""
        return np.exp(-self.multiplier(row) * self._hazard[0, 1 : min(most, DEEPEST) + 1])

    def values(self, tree: DraftTree, row: int) -> Floats:
        """The probability of every drafted node, float64 [len(tree) - 1]; a child's is at most its parent's."""
        multiplier, size = self.multiplier(row), len(tree) - 1
        if tree.chances is not None:
            return np.clip(tree.chances[1:], LEAST, 1.0) ** (multiplier * self._trust[0] / self._trust[1])
        hazard = self._hazard[_length_class(tree.max_depth)]
        if tree.max_depth == size <= DEEPEST and tree.probe is None:
            return np.exp(-multiplier * hazard[1 : size + 1])
        survival = np.exp(-multiplier * hazard)
        values, depth = [1.0] + [0.0] * (len(tree) - 1), np.minimum(tree.depth, DEEPEST).tolist()
        for node in range(len(tree)):
            children = tree.children(node)
            if children:
                step = values[node] * survival[depth[children[0]]] / survival[depth[node]]
                ranks = self._ranks[np.minimum(np.arange(len(children)), RANKS - 1)]
                for child, share in zip(children, ranks / ranks.sum(), strict=True):
                    values[child] = step * share
        return np.array(values[1:])

    def note(self, row: int, tree: DraftTree, path: list[int], length: int, limit: int) -> None:
        """A draft of depth `length` was verified, cut to `tree`, and `path` was accepted, root first.

        limit  the largest depth it could have had; for `by_depth`, deeper ones count as rejected. 0: not needed."""
        accepted, depth = len(path) - 1, min(tree.max_depth, DEEPEST)
        of = _length_class(length)
        if tree.chances is not None:
            expected = self._note_trust(tree, tree.chances, path, accepted < depth)
        else:
            hazard = self._hazard[of]
            expected = float(hazard[min(accepted, depth)])
            if accepted < depth:
                expected += _until_rejection(float(hazard[accepted + 1]) - expected)
        if depth:
            self._count(of, accepted, depth)
            rejections, hoped = self._rows.get(row, (0.0, 0.0))
            self._rows[row] = (ROW_FADE * rejections + (accepted < depth), ROW_FADE * hoped + expected)
            for above, node in pairwise(path if not tree.is_chain else ()):
                self._ranks = np.maximum(0.99 * self._ranks, LEAST)
                self._ranks[min(tree.children(above).index(node), RANKS - 1)] += 0.02
        if limit:
            self._count(0, accepted, min(limit, DEEPEST) if length < limit and depth == length else depth)

    def _note_trust(self, tree: DraftTree, chances: Floats, path: list[int], failed: bool) -> float:
        """Compare the drafter's own `chances` with the outcome; returns the rejections that they predicted."""
        chances, expected = np.clip(chances, LEAST, 1.0), 0.0
        for node in path:
            children = tree.children(node)
            if children:
                step = -log(min(max(sum(chances[child] for child in children) / chances[node], LEAST), 0.999))
                expected += _until_rejection(step) if failed and node == path[-1] else step
        self._trust = [0.99 * self._trust[0] + failed, 0.99 * self._trust[1] + expected]
        return expected * self._trust[0] / self._trust[1]

    def _count(self, of: int, accepted: int, depth: int) -> None:
        """Count a draft of class `of` that was verified down to `depth`."""
        accepted = min(accepted, depth)
        hits, trials = self._hits[of], self._trials[of]
        hits[1 : accepted + 1] += 1
        trials[1 : min(accepted + 1, depth) + 1] += 1
        self._news[of] += 1
        if self._news[of] >= REFRESH or trials[1] < REFRESH:
            self._refresh(of)

    def _refresh(self, of: int) -> None:
        """Update the shares of a class."""
        self._news[of] = 0
        if self._trials[of, 1] > MEMORY:
            self._hits[of] /= 2
            self._trials[of] /= 2
        share, sum_, depth = FIRST, 0.0, 0
        for hit, trial in zip(self._hits[of, 1:].tolist(), self._trials[of, 1:].tolist(), strict=True):
            if not trial:
                break
            depth += 1
            share = (hit + STRENGTH * share) / (trial + STRENGTH)
            sum_ -= log(max(share, LEAST))
            self._hazard[of, depth] = sum_
        self._hazard[of, depth + 1 :] = sum_ - log(max(share, LEAST)) * _DEPTHS[: DEEPEST - depth]

    def drop(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)

    def seed(self, accepted: list[float]) -> None:
        """Begin with recorded shares. accepted[d - 1]: of the drafts that reached depth d, the share that survived."""
        for depth, share in enumerate(accepted[:DEEPEST], 1):
            self._trials[:, depth], self._hits[:, depth] = STRENGTH, STRENGTH * share
        for of in range(CLASSES):
            self._refresh(of)


def _until_rejection(hazard: float) -> float:
    """The mean part of a step's hazard that a draft has gone through when the step rejects it.

    Rejection comes somewhere within a step, as a truncated exponential. Counting whole steps would expect more
    rejections than there can be where few drafts survive, and take every row for a lucky one."""
    return 1 - hazard / expm1(hazard) if hazard > 0 else 0.0  # 0: so far, no draft failed there


def _length_class(length: int) -> int:
    return min(max(length, 1).bit_length(), CLASSES - 1)


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


class Worth:
    """A fading mean over all rows, and one for each row, which starts from it."""

    FIRST, MEMORY, STRENGTH, FADE = 1.0, 256, 2.0, 0.9

    def __init__(self) -> None:
        self.mean = self.FIRST
        self._count = 4
        self._rows: dict[int, tuple[float, float]] = {}

    def of(self, row: int) -> float:
        """The mean of a row."""
        total, count = self._rows.get(row, (0.0, 0.0))
        return (total + self.STRENGTH * self.mean) / (count + self.STRENGTH)

    def note(self, row: int, value: float) -> None:
        """Another value of a row."""
        self._count = min(self._count + 1, self.MEMORY)
        self.mean += (value - self.mean) / self._count
        total, count = self._rows.get(row, (0.0, 0.0))
        self._rows[row] = self.FADE * total + value, self.FADE * count + 1

    def drop(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)
