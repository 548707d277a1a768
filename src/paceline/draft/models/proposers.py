"""Proposers: how the drafts of a model grow. They know no model and no method.

`Chain` takes token after token, `BestTree` grows the most probable paths level by level; both run the model in every
step. `Block` and `BlockTree` take all tokens from one forward.

    proposer = Chain(model, rule)
    trees = proposer.propose([model.begin(row, ends) for row in rows])"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import exp, inf
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from paceline.core.tree import DraftTree
from paceline.draft.likeliest import Likeliest, likeliest_columns, top_with_logprobs
from paceline.draft.models.draft_model import Draft, DraftModel
from paceline.draft.models.stop import StopRule
from paceline.draft.shapes import RankPath, best_first

Fitting = Callable[[Sequence[Sequence[float]], int], Sequence[int]]
"""fitting(chances, beside): how many of each row's nodes pay, the likeliest ones, given the probability of each, if
`beside` other tokens are in the same forward."""


class Proposer(Protocol):
    """Anything that makes trees of drafts."""

    def propose(self, drafts: Sequence[Draft], beside: int = 0) -> list[DraftTree]:
        """Grow the empty `drafts`. Returns the tree of each.

        beside  number of other tokens of the forward that will verify them."""


class Stepwise:
    """Base of proposers that ask the stop rule after every step."""

    def __init__(self, model: DraftModel, rule: StopRule):
        self.model, self.rule = model, rule

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """Call `DraftModel.extend`, and count the nodes and forwards."""
        logits = self.model.extend(drafts, num_logits)
        for draft in drafts:
            draft.num_run = len(draft.tokens)
            draft.calls += 1
        return logits

    def is_enough(self, draft: Draft, drafted: int, signal: float) -> bool:
        """Whether the `drafted`th token, whose distribution had `signal`, is the last."""
        return self.rule.stop(draft.row.id, drafted, signal) or drafted >= draft.most


class Chain(Stepwise):
    """Run the model, take a token, ask the stop rule, go on: as speculative decoding began (Leviathan et al. 2023)."""

    def __init__(self, model: DraftModel, rule: StopRule):
        super().__init__(model, rule)
        self.likeliest = Likeliest(model.vocab_size, model.columns)

    def propose(self, drafts: Sequence[Draft], beside: int = 0) -> list[DraftTree]:
        active = list(drafts)
        while active:
            active = self.grow(active, self.run(active, [1] * len(active)))
        return [chain_tree(draft) for draft in drafts]

    def grow(self, drafts: Sequence[Draft], logits: torch.Tensor) -> list[Draft]:
        """Add a token to every chain from its row of logits [R, K]. Returns the chains that go on."""
        return self.add(drafts, logits, self.rule.signals(logits))

    def add(self, drafts: Sequence[Draft], logits: torch.Tensor, signals: Sequence[float]) -> list[Draft]:
        """As `grow`; the stop rule decides by `signals`."""
        tokens = self.likeliest.next(drafts, logits)
        for draft, token in zip(drafts, tokens, strict=True):
            if token is not None:
                draft.add(token)
        return [
            draft
            for draft, signal, token in zip(drafts, signals, tokens, strict=True)
            if token is not None and not self.is_enough(draft, draft.length, signal) and token not in draft.ends
        ]


class Candidate(NamedTuple):
    """A node that may be verified.

    parent  the number of another candidate, -1 for the root. score: the logarithm of its path's probability."""

    token: int
    parent: int
    score: float


class Growth:
    """A tree while it grows (Li et al. 2024, EAGLE-2, section 4).

    found   candidates so far, level by level.
    level   numbers of the candidates that are run next, best first; at first the root, -1.
    depth   depth of their children.
    width   largest number of children of a node, and of nodes of a level.
    size    number of candidates to verify; it may change while the tree grows."""

    def __init__(self, draft: Draft, width: int, size: int):
        self.draft, self.width, self.size = draft, width, size
        self.found: list[Candidate] = []
        self.level, self.depth = [-1], 1
        self._node = {-1: draft.num_committed - 1}
        self._num_old = 0

    def expand(self, logits: torch.Tensor, likeliest: Likeliest) -> None:
        """Make the likeliest tokens of logits [len(level), K] candidates, as children of the level."""
        row = self.draft.row
        tokens, logs = likeliest.best(row, row.num_new + self.depth - 1, logits, self.width)
        self._num_old = len(self.found)
        for above, of_node, scores in zip(self.level, tokens.tolist(), logs.tolist(), strict=True):
            so_far = self.found[above].score if above >= 0 else 0.0
            for token, score in zip(of_node, scores, strict=True):
                if score > -inf:  # which no NaN is either
                    # Rounding must not put a child before its parent.
                    self.found.append(Candidate(token, above, so_far + min(score, 0.0)))

    def descend(self) -> bool:
        """Make the best new candidates the next level. Returns False if none of them would be verified."""
        new = [c for c in self._best() if c >= self._num_old and self.found[c].token not in self.draft.ends]
        self.level = new[: self.width]
        for candidate in self.level:
            self._node[candidate] = len(self.draft.tokens)
            self.draft.add(self.found[candidate].token, self._node[self.found[candidate].parent])
        self.depth += 1
        return bool(self.level)

    def _best(self) -> list[int]:
        """The best `size` candidates so far. A parent scores no less than its children, so it is chosen with them."""
        return sorted(range(len(self.found)), key=lambda c: -self.found[c].score)[: self.size]

    def tree(self) -> DraftTree:
        """The tree of the best candidates, in the order of their numbers."""
        chosen = sorted(self._best())
        number = {-1: 0} | {candidate: n for n, candidate in enumerate(chosen, 1)}
        self.draft.run_index = [self._node.get(candidate) for candidate in number]
        nodes = [self.found[candidate] for candidate in chosen]
        parents, chances = [number[node.parent] for node in nodes], np.exp([0.0, *(node.score for node in nodes)])
        tokens, root = [node.token for node in nodes], self.draft.row.last_token
        return DraftTree.of(root, tokens, parents, chances=chances, calls=self.draft.calls)


class BestTree(Stepwise):
    """Trees of the likeliest tokens, level by level (EAGLE-2, Li et al. 2024, section 4).

    The `width` likeliest children of every node that was run become candidates, scored by the probability of their
    whole path; the `width` best of a level are run next; in the end the best `size` candidates of all levels are
    verified. The stop rule looks at the best node of a level, and its children stay candidates.

    size  number of candidates to verify, or a function that gives it after every level."""

    def __init__(self, model: DraftModel, rule: StopRule, width: int, size: int | Fitting):
        super().__init__(model, rule)
        self.width, self.size = width, size
        self.likeliest = Likeliest(model.vocab_size, model.columns)

    def propose(self, drafts: Sequence[Draft], beside: int = 0) -> list[DraftTree]:
        growths = [Growth(draft, self.width, self.size if isinstance(self.size, int) else 0) for draft in drafts]
        active = list(growths)
        while active:
            levels = [len(growth.level) for growth in active]
            logits = self.run([growth.draft for growth in active], levels)
            signals = self.rule.signals(logits[[0, *accumulate(levels[:-1])]])
            for growth, of_row in zip(active, logits.split(levels), strict=True):
                growth.expand(of_row, self.likeliest)
            if not isinstance(self.size, int):
                sizes = self.size([[exp(one.score) for one in growth.found] for growth in growths], beside)
                for growth, size in zip(growths, sizes, strict=True):
                    growth.size = size
            active = [
                growth
                for growth, signal in zip(active, signals, strict=True)
                if not self.is_enough(growth.draft, growth.depth, signal) and growth.descend()
            ]
        return [growth.tree() for growth in growths]


def chain_tree(draft: Draft) -> DraftTree:
    """The draft as a chain."""
    root, end = draft.num_committed - 1, len(draft.tokens)
    draft.run_index = [node if node < draft.num_run else None for node in range(root, end)]
    return DraftTree.chain(draft.row.last_token, draft.drafted, calls=draft.calls)


# All tokens from one forward ------------------------------------------------------------------------------------------

MOST = 63  # nodes of a tree, where its size is decided by what pays


class BlockModel(DraftModel):
    """A model that predicts all tokens of a draft in one forward."""

    def fill(self, drafts: Sequence[Draft]) -> None:
        """Run every draft's block. Its positions do not know yet which tokens are drafted before them. The last of a
        draft's `features` are then the logits [D, K] of its positions."""
        raise NotImplementedError

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """Logits [R, K] of each draft's next position."""
        return torch.stack([draft.features[-1][len(draft.drafted)] for draft in drafts])

    def signals(self, drafts: Sequence[Draft], logits: torch.Tensor, rule: StopRule) -> list[float]:
        """The numbers by which the stop rule decides on the next token of every chain.

        logits  [R, K], from which that token is taken."""
        return rule.signals(logits)

    def candidates(self, draft: Draft, depth: int, ranks: int) -> tuple[Any, Any, Any]:
        """The likeliest `ranks` tokens of the first `depth` positions, int64 [depth, ranks]; their order, best first,
        and their probabilities, [depth, rows, ranks], with a row for each candidate of the position before, or one row
        if they do not depend on it."""
        row, logits = draft.row, draft.features[-1][:depth].contiguous()
        if row.params.is_greedy:
            columns, logs = top_with_logprobs(logits, ranks, None)
        else:
            ids = None if self.columns is None else self.columns.cpu().numpy()
            places = range(row.num_new, row.num_new + len(logits))
            columns, logs = (made.to(logits.device) for made in likeliest_columns(row, places, logits, ranks, ids))
        tokens = columns if self.columns is None else self.columns[columns]
        shares, order = self.shares(draft, tokens, columns, logs).sort(-1, descending=True)
        return tokens.cpu().numpy(), order.cpu().numpy(), shares.cpu().numpy()

    def shares(self, draft: Draft, tokens: torch.Tensor, columns: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
        """The probabilities of `candidates` in their order by the positions' logits, of which the logarithms are `logs`
        [depth, ranks]."""
        return logs.exp()[:, None]


class Block(Chain):
    """Chains of blocks, whose tokens are taken from left to right.

    model  runs a whole block in `fill`."""

    model: BlockModel

    def propose(self, drafts: Sequence[Draft], beside: int = 0) -> list[DraftTree]:
        if drafts:
            self.model.fill(drafts)
        active = list(drafts)
        while active:
            logits = self.model.extend(active, [1] * len(active))
            active = self.add(active, logits, self.model.signals(active, logits, self.rule))
        for draft in drafts:
            draft.calls = 1
        return [chain_tree(draft) for draft in drafts]


class BlockTree:
    """Trees of the paths that are most probable by a block's distributions (DDTree, Ringel and Romano 2026, arXiv
    2604.12989, algorithm 1).

    size   number of nodes, or a function that gives it.
    width  number of candidates at each position."""

    def __init__(self, model: BlockModel, width: int, size: int | Fitting):
        self.model, self.width, self.size = model, width, size

    def propose(self, drafts: Sequence[Draft], beside: int = 0) -> list[DraftTree]:
        """Draft one tree for each text; `beside` is the number of other rows of the round."""
        if not drafts:
            return []
        self.model.fill(drafts)
        most = self.size if isinstance(self.size, int) else MOST
        grown = [self.best_paths(draft, most) for draft in drafts]
        sizes: Sequence[int] = [most] * len(drafts)
        if not isinstance(self.size, int):
            sizes = self.size([[*chances.values()] for chances, _ in grown], beside)
        trees = []
        for draft, (chances, tokens), size in zip(drafts, grown, sizes, strict=True):
            number = {(): 0} | {path: n for n, path in enumerate(list(chances)[:size], 1)}
            above = [number[path[:-1]] for path in number if path]
            likely = np.array([chances.get(path, 1.0) for path in number])
            drafted = [tokens[path] for path in number if path]
            trees.append(DraftTree.of(draft.tokens[-1], drafted, above, chances=likely, calls=1))
            draft.run_index = [None] * len(number)
        return trees

    def best_paths(self, draft: Draft, count: int) -> tuple[dict[RankPath, float], dict[RankPath, int]]:
        """The `count` most probable paths, in falling order: their probabilities, and the last token of each."""
        tokens, order, shares = self.model.candidates(draft, draft.most, min(count, self.width))
        place: dict[RankPath, int] = {(): 0}  # of a path's last token among its position's candidates
        token: dict[RankPath, int] = {}

        def given(path: RankPath) -> int:
            return place[path] if order.shape[1] > 1 else 0

        def below(path: RankPath) -> list[float]:
            at = len(path)
            if path:
                place[path] = int(order[at - 1, given(path[:-1]), path[-1]])
                token[path] = int(tokens[at - 1, place[path]])
            if at == len(tokens) or token.get(path) in draft.ends:
                return []
            return [share for share in shares[at, given(path)].tolist() if share > 0]  # which no NaN is

        return best_first(below, count), token
