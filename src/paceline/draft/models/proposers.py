"""Proposers: how the drafts of a model grow. They know no particular model and no method.

`Chain` takes token after token; `BestTree` grows the most probable paths level by level. Both run the model in every
step. `block.py` has those that take all tokens from one forward.

    proposer = Chain(model, rule)
    [(tree, nodes)] = proposer.propose([model.begin(row, most=5)])"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import torch

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.draft.likeliest import Likeliest
from paceline.draft.models.draft_model import Draft, DraftModel
from paceline.draft.models.stop import StopRule
from paceline.draft.text.copying import BySalt


class Proposal(NamedTuple):
    """A tree to verify.

    nodes  number in the draft of each node of the tree; None: the model has not run the node."""

    tree: DraftTree
    nodes: Sequence[int | None]


class Proposer(Protocol):
    """Turns drafts into trees."""

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        """Grow empty drafts. Returns the tree of each."""


class Stepwise:
    """Base of proposers that ask the stop rule after every step."""

    def __init__(self, model: DraftModel, rule: StopRule):
        self.model, self.rule = model, rule

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """Call `DraftModel.extend`, and count the nodes that it has run."""
        logits = self.model.extend(drafts, num_logits)
        self.model.ran.update({draft.row.id: len(draft.tokens) for draft in drafts})
        return logits

    def is_enough(self, draft: Draft, drafted: int, signal: float) -> bool:
        """Whether drafting stops after `drafted` tokens. signal: of the last token's distribution."""
        return self.rule.stop(draft.row.id, drafted, signal) or drafted >= draft.most


class Chain(Stepwise):
    """Drafts a chain: run the model, take a token, ask the stop rule, go on (Leviathan et al. 2023)."""

    def __init__(self, model: DraftModel, rule: StopRule):
        super().__init__(model, rule)
        self.likeliest = Likeliest(model.vocab_size, model.columns)

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        active = list(drafts)
        while active:
            active = self.grow(active, self.run(active, [1] * len(active)))
        return [chain_proposal(draft, self.model.ran[draft.row.id]) for draft in drafts]

    def grow(self, drafts: Sequence[Draft], logits: torch.Tensor) -> list[Draft]:
        """Add a token to each chain, from its row of logits [R, K]. Returns the chains that go on."""
        return self.add(drafts, logits, self.rule.signals(logits))

    def add(self, drafts: Sequence[Draft], logits: torch.Tensor, signals: Sequence[float]) -> list[Draft]:
        """Like `grow`. signals: the numbers by which the stop rule decides, one a chain."""
        tokens = self.likeliest.next(drafts, logits)
        for draft, token in zip(drafts, tokens, strict=True):
            if token is not None:
                draft.add(token)
        return [
            draft
            for draft, signal, token in zip(drafts, signals, tokens, strict=True)
            if token is not None
            and not self.is_enough(draft, len(draft.drafted), signal)
            and token not in draft.row.ends
        ]


class Candidate(NamedTuple):
    """A node that may be verified.

    parent  number of the candidate above; -1: the root. score: logarithm of the path's probability."""

    token: int
    parent: int
    score: float


class Growth:
    """A tree while it grows (Li et al. 2024, EAGLE-2, section 4).

    found   candidates so far, level by level.
    level   numbers of the candidates to run next, best first; at first the root, -1.
    depth   depth of their children.
    width   largest number of children of a node, and of nodes run in a level.
    size    number of candidates to verify."""

    def __init__(self, draft: Draft, width: int, size: int):
        self.draft, self.width, self.size = draft, width, size
        self.found: list[Candidate] = []
        self.level, self.depth = [-1], 1
        self._node = {-1: draft.num_committed - 1}
        self._num_old = 0

    def expand(self, logits: torch.Tensor, likeliest: Likeliest) -> None:
        """Add candidates below each node of the level: the likeliest tokens by its row of logits [len(level), K]."""
        row = self.draft.row
        tokens, logs = likeliest.best(row, row.num_new + self.depth - 1, logits, self.width)
        self._num_old = len(self.found)
        for above, of_node, scores in zip(self.level, tokens.tolist(), logs.tolist(), strict=True):
            so_far = self.found[above].score if above >= 0 else 0.0
            for token, score in zip(of_node, scores, strict=True):
                if score > -inf:  # This drops NaN, too.
                    # Rounding must not put a child before its parent.
                    self.found.append(Candidate(token, above, so_far + min(score, 0.0)))

    def descend(self) -> bool:
        """Make the best new candidates the next level. Returns whether any of them would be verified."""
        new = [c for c in self._best() if c >= self._num_old and self.found[c].token not in self.draft.row.ends]
        self.level = new[: self.width]
        for candidate in self.level:
            self._node[candidate] = len(self.draft.tokens)
            self.draft.add(self.found[candidate].token, self._node[self.found[candidate].parent])
        self.depth += bool(self.level)
        return bool(self.level)

    def _best(self) -> list[int]:
        """The best `size` candidates so far. No child scores more than its parent, so parents are chosen first."""
        return sorted(range(len(self.found)), key=lambda c: -self.found[c].score)[: self.size]

    def proposal(self) -> Proposal:
        """The tree of the best candidates, in the order of their numbers."""
        chosen = sorted(self._best())
        number = {-1: 0} | {candidate: n for n, candidate in enumerate(chosen, 1)}
        nodes = [self.found[candidate] for candidate in chosen]
        parents, chances = [number[node.parent] for node in nodes], np.exp([0.0, *(node.score for node in nodes)])
        tokens, root = [node.token for node in nodes], self.draft.row.last_token
        tree = DraftTree.of(root, tokens, parents, chances=chances, calls=self.depth)
        return Proposal(tree, [self._node.get(candidate) for candidate in number])


class BestTree(Stepwise):
    """Trees of the likeliest tokens, level by level (EAGLE-2, Li et al. 2024, section 4).

    The `width` likeliest children of each node that was run become candidates, scored by the probability of the whole
    path. The best `width` candidates of a level are run next. In the end the best `size` of all levels are verified.
    The stop rule looks at the best node of a level; when it stops, the level's children stay candidates.

    Where the budget cuts trees, a tree of `size` would be drafted in vain, and may be too dear to draft at all. So a
    tree has at most twice as many candidates as were verified lately, and a few more.

    size  largest number of candidates to verify."""

    PACE, FEW = 0.2, 4
    """How fast the mean of verified candidates moves, and how many candidates a tree always has."""

    def __init__(self, model: DraftModel, rule: StopRule, width: int, size: int):
        super().__init__(model, rule)
        self.width, self.size = width, size
        self.likeliest = Likeliest(model.vocab_size, model.columns)
        self._verified = BySalt(lambda: [float(size)])

    def note(self, row: Request, proposed: int, verified: int) -> None:
        """Record how many of the candidates in a row's tree were verified. A tree that was not cut says that no fewer
        were wanted."""
        mean = self._verified.of(row.params.cache_salt)
        wanted = verified if verified < proposed else max(verified, mean[0])
        mean[0] += self.PACE * (wanted - mean[0])

    def _size(self, row: Request) -> int:
        return min(self.size, int(2 * self._verified.of(row.params.cache_salt)[0]) + self.FEW)

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        sizes = [self._size(draft.row) for draft in drafts]
        growths = [Growth(draft, min(self.width, size), size) for draft, size in zip(drafts, sizes, strict=True)]
        active = list(growths)
        while active:
            levels = [len(growth.level) for growth in active]
            logits = self.run([growth.draft for growth in active], levels)
            signals = self.rule.signals(logits[[0, *accumulate(levels[:-1])]])
            for growth, of_row in zip(active, logits.split(levels), strict=True):
                growth.expand(of_row, self.likeliest)
            active = [
                growth
                for growth, signal in zip(active, signals, strict=True)
                if not self.is_enough(growth.draft, growth.depth, signal) and growth.descend()
            ]
        return [growth.proposal() for growth in growths]


def chain_proposal(draft: Draft, ran: int) -> Proposal:
    """Turn a draft into a chain.

    ran  how many of its nodes the model has run: the committed ones together, then one a forward."""
    root, end = draft.num_committed - 1, len(draft.tokens)
    tree = DraftTree.chain(draft.row.last_token, draft.drafted, calls=max(ran - root, 1))
    return Proposal(tree, [node if node < ran else None for node in range(root, end)])
