"""A tree of the most probable tokens in the making (EAGLE-2, Li et al. 2024, section 4). Runs no model."""

from __future__ import annotations

from math import exp, inf
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.engine.logits import top_tokens
from paceline.engine.tree import DraftTree

if TYPE_CHECKING:
    from paceline.draft.neural.stepping import Draft


class Growth:
    """A tree in the making. Candidates are numbered as they are found; -1 is the root.

    token, parent, score, depths  of every candidate: score is the logarithm of the probability of its path.
    level   candidates that are run next, best first; at first the root. depth: how deep their children are.
    width   children of each node, and nodes of a level. size: candidates that are verified in the end; it may change
            as they are found."""

    def __init__(self, draft: Draft, width: int, size: int):
        self.draft, self.width, self.size = draft, width, size
        self.token: list[int] = []
        self.parent: list[int] = []
        self.score: list[float] = []
        self.depths: list[int] = []
        self.level = [-1]
        self.depth = 1
        self._node = {-1: draft.known - 1}
        self._new: list[int] = []

    def expand(self, logits: torch.Tensor, columns: torch.Tensor | None) -> None:
        """Children of the level from logits [len(level), K]."""
        values, best = top_tokens(logits, min(self.width, logits.shape[-1]))
        logs = values.float() - logits.float().logsumexp(-1, keepdim=True)
        tokens = best if columns is None else columns[best]
        self._new = []
        for above, of_node, scores in zip(self.level, tokens.tolist(), logs.tolist(), strict=True):
            so_far = self.score[above] if above >= 0 else 0.0
            for token, score in zip(of_node, scores, strict=True):
                if score > -inf:  # which no NaN is either
                    self._new.append(len(self.token))
                    self.token.append(token)
                    self.parent.append(above)
                    # Rounding must not put a child before its parent.
                    self.score.append(so_far + min(score, 0.0))
                    self.depths.append(self.depth)

    def descend(self) -> bool:
        """Make the best new candidates the next level; whether there are any that could still be verified."""
        best = set(self._best())
        open_ = [c for c in self._new if c in best and self.token[c] not in self.draft.ends]
        self.level = sorted(open_, key=lambda c: -self.score[c])[: self.width]
        for candidate in self.level:
            self._node[candidate] = len(self.draft.tokens)
            self.draft.add(self.token[candidate], self._node[self.parent[candidate]])
        self.depth += 1
        return bool(self.level)

    def chances(self) -> list[float]:
        """The probability of every candidate's path."""
        return [exp(score) for score in self.score]

    def _best(self) -> list[int]:
        """The candidates to verify if no more were found. A parent's score is never below its children's, and it is
        less deep, so they hang together."""
        return sorted(range(len(self.token)), key=lambda c: (-self.score[c], self.depths[c]))[: self.size]

    def tree(self, source: str) -> DraftTree:
        """The best candidates, in the order in which they were found."""
        chosen = sorted(self._best())
        number = {-1: 0} | {candidate: n for n, candidate in enumerate(chosen, 1)}
        self.draft.kept = [self._node.get(candidate) for candidate in (-1, *chosen)]
        tokens = [self.token[candidate] for candidate in chosen]
        parents = [number[self.parent[candidate]] for candidate in chosen]
        chances = np.exp([0.0, *(self.score[candidate] for candidate in chosen)])
        return DraftTree.of(
            self.draft.row.last_token, tokens, parents, chances=chances, source=source, calls=self.draft.calls
        )
