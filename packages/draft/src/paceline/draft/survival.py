"""Survival: how likely a drafter's tokens are accepted at each depth, learnt from its drafts, for the budget."""

from collections.abc import Sequence
from math import expm1, log

import numpy as np

from paceline.core.tree import DraftTree, Floats

DEEPEST = 64  # Deeper nodes count as this deep.
FIRST = 0.7  # assumed share of drafts whose first token is accepted
STRENGTH = 4.0
"""Weight, in drafts, of the assumed share: FIRST at depth 1, the share of the depth above at other depths."""
MEMORY = 256.0  # number of drafts after which the counts are halved
LEAST, MOST = 1e-3, 0.999  # bounds of a share
ROW_STRENGTH, ROW_FADE = 10.0, 0.95
"""A row begins with ROW_STRENGTH rejections seen and as many expected; older rounds fade by ROW_FADE a round."""
RANK = 0.3  # probability of a sibling relative to the sibling before it
ASKED, REACHED = 0, 1
"""Rows of the counts in `Survival`. ASKED counts accepted tokens, and REACHED drafted tokens, each time that the
drafter is asked. Row 1 + n counts accepted tokens of drafts whose length has n bits (1, 2 and 3, 4 to 7, ...)."""
ROWS = 8


class Survival:
    """The probability that a drafter's tokens are accepted, by depth and by the draft's length, because drafters draft
    more when they are surer.

    A draft that was cut counts down to the cut (Kaplan and Meier 1958). A row's probabilities are those of all rows to
    the power of `strain`. A tree with `chances` is judged by these instead."""

    def __init__(self, shares: Sequence[float] = ()) -> None:
        self._hits, self._trials = np.zeros((ROWS, DEEPEST + 1)), np.zeros((ROWS, DEEPEST + 1))
        self._hazard = np.tile(-log(FIRST) * np.arange(DEEPEST + 1), (ROWS, 1))
        self._rows: dict[int, tuple[float, float]] = {}
        self._trust = [ROW_STRENGTH, ROW_STRENGTH]
        for depth, share in enumerate(shares[:DEEPEST], 1):
            self._trials[:, depth], self._hits[:, depth] = STRENGTH, STRENGTH * share
        for of in range(ROWS):
            self._refresh(of)

    def strain(self, row: int) -> float:
        """The row's number of rejections divided by the expected number, 1/4 to 4."""
        seen, expected = self._rows.get(row, (0.0, 0.0))
        return min(max((seen + ROW_STRENGTH) / (expected + ROW_STRENGTH), 0.25), 4.0)

    def asked(self, row: int, most: int) -> tuple[Floats, Floats]:
        """P(token is accepted) and P(token is drafted), for tokens 1, 2, ... of a draft of at most `most` tokens."""
        depths = slice(1, min(most, DEEPEST) + 1)
        return np.exp(-self.strain(row) * self._hazard[ASKED, depths]), np.exp(-self._hazard[REACHED, depths])

    def of(self, tree: DraftTree, row: int) -> Floats:
        """P(node is accepted) for each drafted node, float64 [len(tree) - 1]; no child's is above its parent's."""
        strain, size = self.strain(row), len(tree) - 1
        if tree.chances is not None:
            given = np.clip(tree.chances, LEAST, 1.0) ** (strain * self._trust[0] / self._trust[1])
            given[0] = 1.0
            for node, above in enumerate(tree.parent.tolist()[1:], 1):
                given[node] = min(given[node], given[above])
            return given[1:]
        hazard = self._hazard[_length(tree)]
        if tree.is_chain and size <= DEEPEST:
            return np.exp(-strain * hazard[1 : size + 1])
        stands, depth = [1.0] * len(tree), np.minimum(tree.depth, DEEPEST).tolist()
        survival = np.exp(-strain * hazard).tolist()
        for node in range(len(tree)):
            children = tree.children(node)
            shares = [RANK**rank for rank in range(len(children))]
            for child, share in zip(children, shares, strict=True):
                step = survival[depth[child]] / survival[depth[node]] if depth[child] > depth[node] else 1.0
                stands[child] = stands[node] * step * share / sum(shares)
        return np.array(stands[1:])

    def note_asked(self, length: int, limit: int, accepted: int, verified: int) -> None:
        """Record a draft.

        length  number of drafted tokens, of `limit` that were allowed. accepted: accepted tokens, of `verified`."""
        self._count(REACHED, length, limit)
        self._count(ASKED, accepted, verified)

    def note(self, row: int, tree: DraftTree, path: Sequence[int], length: int) -> None:
        """Record that `path`, root first, was accepted of `tree`. length: depth of the draft before it was cut."""
        accepted, depth = len(path) - 1, min(tree.max_depth, DEEPEST)
        is_rejected = accepted < depth
        if tree.chances is not None:
            expected = self._note_trust(tree, path, is_rejected)
        else:
            hazard = self._hazard[_length(tree, length)]
            expected = float(hazard[min(accepted, depth)])
            if is_rejected:
                expected += _until_rejection(float(hazard[accepted + 1]) - expected)
        seen, hoped = self._rows.get(row, (0.0, 0.0))
        self._rows[row] = ROW_FADE * seen + is_rejected, ROW_FADE * hoped + expected
        self._count(_length(tree, length), accepted, depth)

    def _note_trust(self, tree: DraftTree, path: Sequence[int], is_rejected: bool) -> float:
        """Compare the tree's `chances` with the outcome. Returns the number of rejections that they predicted."""
        assert tree.chances is not None
        chances, expected = np.clip(tree.chances, LEAST, 1.0), 0.0
        for node in path:
            if children := tree.children(node):
                step = -log(min(max(sum(chances[child] for child in children) / chances[node], LEAST), MOST))
                expected += _until_rejection(step) if is_rejected and node == path[-1] else step
        self._trust = [0.99 * self._trust[0] + is_rejected, 0.99 * self._trust[1] + expected]
        return expected * self._trust[0] / self._trust[1]

    def _count(self, of: int, accepted: int, depth: int) -> None:
        accepted, depth = min(accepted, depth, DEEPEST), min(depth, DEEPEST)
        self._hits[of, 1 : accepted + 1] += 1
        self._trials[of, 1 : min(accepted + 1, depth) + 1] += 1
        if self._trials[of, 1] > MEMORY:
            self._hits[of] /= 2
            self._trials[of] /= 2
        if self._trials[of, 1] % 8 < 1 or self._trials[of, 1] < 32:  # Not each time, because it is slow.
            self._refresh(of)

    def _refresh(self, of: int) -> None:
        share, sum_, depth = FIRST, 0.0, 0
        hits, trials = self._hits[of].tolist(), self._trials[of].tolist()
        while depth < DEEPEST and trials[depth + 1]:
            depth += 1
            share = min(max((hits[depth] + STRENGTH * share) / (trials[depth] + STRENGTH), LEAST), MOST)
            sum_ -= log(share)
            self._hazard[of, depth] = sum_
        self._hazard[of, depth + 1 :] = sum_ - log(share) * np.arange(1, DEEPEST - depth + 1)

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)


def _length(tree: DraftTree, length: int | None = None) -> int:
    """The row of counts for drafts of `length`; None: the tree's depth."""
    return 1 + min((tree.max_depth if length is None else length).bit_length(), ROWS - 2)


def _until_rejection(hazard: float) -> float:
    """The mean part of a step's hazard that a draft has passed when the step rejects it.

    If the whole step counted, the expected rejections of poor drafters would exceed those that can happen, and every
    row would seem lucky."""
    return 1 - hazard / expm1(hazard)  # Shares are at most MOST, so `hazard` is above 0.
