"""Chances: how likely the nodes of a draft are to be accepted, learned from what became of earlier drafts.

    chances = Chances()
    values = chances.values(tree, row.id)        # for every drafted node: the chance that it is accepted
    chances.note(row.id, tree, path)

A draft survives from depth to depth; the share that survives a step is learned by depth and by the length of the draft,
which for drafters that copy says how long their match was (Kaplan and Meier 1958: drafts that were cut say nothing of
what lies behind the cut, so cutting does not bias the shares). A row may do better or worse than all rows together: its
chances are those to the power of its frailty, the rejections it had over those expected of it, both as a Gamma
distribution has them (Vaupel et al. 1979). Siblings share a step by their rank. Where a tree brings `chances` of its
drafter's, these take the place of shares and ranks. Everything fades, so that a new kind of text counts soon.
"""

from __future__ import annotations

from itertools import pairwise
from math import log

import numpy as np
from numpy.typing import NDArray

from paceline.engine.tree import DraftTree

Floats = NDArray[np.float64]

DEEPEST = 64
"""Deeper nodes count as this deep."""
CLASSES = 7
"""Lengths of drafts: 1, 2 and 3, 4 to 7, ..., 32 and more; the first is that of all lengths."""
FIRST = 0.7
"""Share of drafts whose first token stands, before anything is known."""
STRENGTH = 4.0
"""What comes before is worth this many trials: FIRST at depth 1, the depth above below it."""
MEMORY = 400.0
"""Trials at a depth, after which old ones count half."""
REFRESH = 16
"""Drafts of a length between two times that its shares are worked out."""
ROW_STRENGTH, ROW_FADE = 15.0, 0.95
"""Rejections that all rows' record is worth against the row's own; what a draft leaves of those before. With 2 a row
that had been lucky was trusted too far: nodes of chance 0.45 were accepted in 35 of 100 cases."""
FRAIL = 4.0
"""Largest frailty, and one over the smallest."""
RANKS = 8
LEAST = 1e-3
"""Smallest chance of a step."""
_DEPTHS = np.arange(1, DEEPEST + 1)


class Chances:
    """The chances of one drafter's drafts."""

    def __init__(self) -> None:
        self._hits = np.zeros((CLASSES, DEEPEST + 1))
        self._trials = np.zeros((CLASSES, DEEPEST + 1))
        self._hazard = np.tile(-log(FIRST) * np.arange(DEEPEST + 1), (CLASSES, 1))
        self._news = [0] * CLASSES
        self._ranks = np.array([0.6**rank for rank in range(RANKS)])
        self._trust = [ROW_STRENGTH, ROW_STRENGTH]
        self._rows: dict[int, tuple[float, float]] = {}

    def frailty(self, row: int) -> float:
        """How many times as often as others' the row's drafts are rejected."""
        kept = self._rows.get(row)
        if kept is None:
            return 1.0
        return min(max((kept[0] + ROW_STRENGTH) / (kept[1] + ROW_STRENGTH), 1 / FRAIL), FRAIL)

    def by_depth(self, row: int, most: int) -> Floats:
        """Chance that a draft reaches and survives depth 1, 2, ... `most`, whatever its length: what can be said before
        there is a draft."""
        return np.exp(-self.frailty(row) * self._hazard[0, 1 : min(most, DEEPEST) + 1])

    def values(self, tree: DraftTree, row: int) -> Floats:
        """The chance of every drafted node, float64 [len(tree) - 1]; a child's is at most its parent's, a probe's 0."""
        frailty, size = self.frailty(row), len(tree) - 1
        if tree.chances is not None:
            return np.clip(tree.chances[1:], LEAST, 1.0) ** (frailty * self._trust[0] / self._trust[1])
        hazard = self._hazard[_length_class(tree.max_depth)]
        if tree.max_depth == size <= DEEPEST and tree.probe is None:
            return np.exp(-frailty * hazard[1 : size + 1])
        survival = np.exp(-frailty * hazard)
        return self._of_tree(tree, survival)

    def _of_tree(self, tree: DraftTree, survival: Floats) -> Floats:
        values, depth = [1.0] + [0.0] * (len(tree) - 1), np.minimum(tree.depth, DEEPEST).tolist()
        for node in range(len(tree)):
            children = tree.children(node)
            if children:
                step = values[node] * survival[depth[children[0]]] / survival[depth[node]]
                for child, share in zip(children, self._shares(len(children)), strict=True):
                    values[child] = step * share
        return np.array(values[1:])

    def _shares(self, count: int) -> list[float]:
        ranks = self._ranks[np.minimum(np.arange(count), RANKS - 1)]
        shares: list[float] = (ranks / ranks.sum()).tolist()
        return shares

    def note(self, row: int, tree: DraftTree, path: list[int], length: int, limit: int) -> None:
        """A draft of `length` depths was verified as `tree`, and `path` was accepted, root first.

        limit  the depth it was not to pass; what a draft shorter than that would have had after its end counts as
               rejected, for `by_depth`. 0: nobody asks for that."""
        accepted, depth = len(path) - 1, min(tree.max_depth, DEEPEST)
        of = _length_class(length)
        if tree.chances is not None:
            expected = self._note_trust(tree, path, accepted < depth)
        else:
            expected = float(self._hazard[of, min(accepted + 1, depth)])
        if depth:
            self._count(of, accepted, depth)
            rejected, hoped = self._rows.get(row, (0.0, 0.0))
            self._rows[row] = (ROW_FADE * rejected + (accepted < depth), ROW_FADE * hoped + expected)
            if not tree.is_chain and accepted:
                self._count_ranks(tree, path)
        if limit:
            self._count(0, accepted, min(limit, DEEPEST) if length < limit and depth == length else depth)

    def _note_trust(self, tree: DraftTree, path: list[int], failed: bool) -> float:
        """Set what the drafter's own chances promised beside what came; returns the rejections they promised."""
        assert tree.chances is not None
        chances, expected = np.clip(tree.chances, LEAST, 1.0), 0.0
        for node in path:
            children = tree.children(node)
            if children:
                expected -= log(min(max(sum(chances[child] for child in children) / chances[node], LEAST), 0.999))
        self._trust = [0.99 * self._trust[0] + failed, 0.99 * self._trust[1] + expected]
        return expected * self._trust[0] / self._trust[1]

    def _count(self, of: int, accepted: int, depth: int) -> None:
        """Count a draft of class `of` that was looked at down to `depth`."""
        accepted = min(accepted, depth)
        hits, trials = self._hits[of], self._trials[of]
        hits[1 : accepted + 1] += 1
        trials[1 : min(accepted + 1, depth) + 1] += 1
        self._news[of] += 1
        if self._news[of] >= REFRESH or trials[1] < REFRESH:
            self._refresh(of)

    def _refresh(self, of: int) -> None:
        """Work out the class's shares anew."""
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

    def _count_ranks(self, tree: DraftTree, path: list[int]) -> None:
        for above, node in pairwise(path):
            rank = tree.children(above).index(node)
            self._ranks *= 0.99
            self._ranks[min(rank, RANKS - 1)] += 0.02
        self._ranks = np.maximum(self._ranks, LEAST)

    def drop(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)

    def seed(self, accepted: list[float]) -> None:
        """Begin with a recording's shares: accepted[d - 1], the drafts that survived depth d of those that reached it
        and d - 1."""
        for depth, share in enumerate(accepted[:DEEPEST], 1):
            self._trials[:, depth], self._hits[:, depth] = STRENGTH, STRENGTH * share
        for of in range(CLASSES):
            self._refresh(of)


def _length_class(length: int) -> int:
    return min(max(length, 1).bit_length(), CLASSES - 1)


class Lengths:
    """How long drafts become before their drafter stops by itself; drafts that were limited say so of shorter ones."""

    def __init__(self) -> None:
        self._went_on = np.ones(DEEPEST + 1)
        self._could = np.full(DEEPEST + 1, 1.25)

    def note(self, length: int, limit: int) -> None:
        """A draft ended after `length` tokens; it was not to have more than `limit`."""
        length = min(length, DEEPEST - 1)
        self._could[: min(length + 1, limit)] += 1
        self._went_on[:length] += 1
        if self._could[0] > MEMORY:
            self._could /= 2
            self._went_on /= 2

    def steps(self, most: int, rows: int) -> Floats:
        """Steps until the longest of `rows` drafts has stopped, if none may be longer than 1, 2, ... `most`."""
        reach = np.minimum(self._went_on[:most] / self._could[:most], 1.0).cumprod()
        return (1 - (1 - reach) ** rows).cumsum()
