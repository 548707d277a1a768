"""A row's draft while it grows: a chain, or a tree of the most probable tokens (EAGLE-2). Runs no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import exp, inf

import numpy as np
import torch

from paceline.core.logits import top_tokens
from paceline.core.request import Request
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree, IntArray


@dataclass
class Draft:
    """Nodes that the model runs, in the order in which it runs them.

    tokens, parent  the first `num_committed` nodes are committed tokens that the model has not run; the last of them is
                    the tree's root. The others are drafted.
    ends            tokens after which nothing can be accepted.
    most            most tokens to draft.
    num_assumed     drafted tokens that count as committed: the window begins after them (`branches.py`).
    num_guesses     drafted tokens at the end that streams guessed and the model has not confirmed.
    num_run         number of nodes that were run. calls: forwards so far.
    probs           distributions [V] that the drafted tokens were drawn from; empty if they were not drawn.
    features        states [n, H] of the nodes run so far, for models that use states.
    run_index       for each node of the proposed tree the node here; None if it was never run."""

    row: Request
    num_committed: int
    tokens: list[int]
    parent: list[int]
    ends: frozenset[int] = frozenset()
    most: int = 0
    num_assumed: int = 0
    num_guesses: int = 0
    num_run: int = 0
    calls: int = 0
    probs: list[torch.Tensor] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    run_index: list[int | None] = field(default_factory=list)

    @classmethod
    def chain(cls, row: Request, committed: list[int], ends: frozenset[int] = frozenset()) -> Draft:
        """An empty draft after the tokens `committed`, which the model has not run."""
        return cls(row, len(committed), committed, list(range(-1, len(committed) - 1)), ends)

    @property
    def drafted(self) -> list[int]:
        """Tokens drafted so far."""
        return self.tokens[self.num_committed :]

    @property
    def length(self) -> int:
        """Drafted tokens of a chain, without those that count as committed."""
        return len(self.tokens) - self.num_committed - self.num_assumed

    @property
    def context(self) -> IntArray:
        """All tokens before the next one to draft."""
        return np.concatenate([self.row.tokens, np.array(self.drafted, np.int64)])

    def add(self, token: int, parent: int | None = None) -> None:
        """Add a node after the last one, or after node `parent`."""
        self.parent.append(len(self.tokens) - 1 if parent is None else parent)
        self.tokens.append(token)

    def take_guesses(self) -> list[tuple[int, torch.Tensor | None]]:
        """Remove the guesses at the end. Returns each with the distribution it was drawn from, None if not drawn."""
        count, self.num_guesses = self.num_guesses, 0
        tokens, probs = self.tokens[len(self.tokens) - count :], self.probs[max(len(self.probs) - count, 0) :]
        for items in (self.tokens, self.parent, probs and self.probs):
            del items[len(items) - count :]
        return list(zip_longest(tokens, probs))

    def segment(self, slot: int, num_logits: int) -> Segment:
        """The nodes not run yet, with logits for the last `num_logits`."""
        return Segment(slot, np.array(self.tokens), np.array(self.parent), start=self.num_run, num_logits=num_logits)

    def accepted(self, path: Sequence[int]) -> list[int]:
        """The nodes, of those that were run, that are committed when `path` of the proposed tree is accepted."""
        nodes = list(range(self.num_committed))
        for node in path[1:]:
            index = self.run_index[node]
            if index is None:
                break
            nodes.append(index)
        return nodes


def segments(drafts: Sequence[Draft], num_logits: Sequence[int], slot: Callable[[Request], int]) -> list[Segment]:
    """Each draft's nodes not run yet, with logits for its last `num_logits[i]`. slot: a row's slot in the cache."""
    return [draft.segment(slot(draft.row), wanted) for draft, wanted in zip(drafts, num_logits, strict=True)]


def chain_tree(draft: Draft, source: str = "") -> DraftTree:
    """The draft as a chain, with the distributions its tokens were drawn from, if they were drawn."""
    root, end = draft.num_committed - 1, len(draft.tokens)
    draft.run_index = [node if node < draft.num_run else None for node in range(root, end)]
    return drawn_chain(draft.row.last_token, draft.drafted, draft.probs, source, draft.calls)


def drawn_chain(root: int, tokens: Sequence[int], probs: Sequence[torch.Tensor], source: str, calls: int) -> DraftTree:
    """A chain of `tokens`. probs: the distributions [V] they were drawn from; empty if they were not drawn."""
    tree = DraftTree.chain(root, list(tokens), source=source, calls=calls)
    if probs:
        tree.draft_probs = torch.stack([*probs, torch.zeros_like(probs[0])])
    return tree


def best_tokens(logits: torch.Tensor, count: int, columns: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `count` tokens of each row of logits [R, K], and the logarithms of their probabilities, both [R, count].

    columns  tokens of the logits' columns, int64 [K]; None: all tokens."""
    values, best = top_tokens(logits, min(count, logits.shape[-1]))
    logs = values.float() - logits.float().logsumexp(-1, keepdim=True)
    return best if columns is None else columns[best], logs


class Growth:
    """A tree while it grows (Li et al. 2024, EAGLE-2, section 4). Candidates have numbers from 0 on; -1 is the root.

    token, parent, score, depths  of each candidate; score: the logarithm of its path's probability.
    level   candidates that are run next, best first; at first the root. depth: of their children.
    width   most children of a node, and most nodes of a level.
    size    number of candidates to verify; it may change while the tree grows."""

    def __init__(self, draft: Draft, width: int, size: int):
        self.draft, self.width, self.size = draft, width, size
        self.token: list[int] = []
        self.parent: list[int] = []
        self.score: list[float] = []
        self.depths: list[int] = []
        self.level = [-1]
        self.depth = 1
        self._node = {-1: draft.num_committed - 1}
        self._new: list[int] = []

    def expand(self, logits: torch.Tensor, columns: torch.Tensor | None) -> None:
        """Make the best tokens of logits [len(level), K] candidates, as children of the level. See `best_tokens`."""
        tokens, logs = best_tokens(logits, self.width, columns)
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
        """Make the best new candidates the next level. False if none of them would be verified."""
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
        """The best `size` candidates so far. A parent scores no less than its children, so it is chosen with them."""
        return sorted(range(len(self.token)), key=lambda c: (-self.score[c], self.depths[c]))[: self.size]

    def tree(self, source: str = "") -> DraftTree:
        """The tree of the best candidates, in the order of their numbers."""
        chosen = sorted(self._best())
        number = {-1: 0} | {candidate: n for n, candidate in enumerate(chosen, 1)}
        self.draft.run_index = [self._node.get(candidate) for candidate in (-1, *chosen)]
        tokens = [self.token[candidate] for candidate in chosen]
        parents = [number[self.parent[candidate]] for candidate in chosen]
        chances = np.exp([0.0, *(self.score[candidate] for candidate in chosen)])
        return DraftTree.of(
            self.draft.row.last_token, tokens, parents, chances=chances, source=source, calls=self.draft.calls
        )
