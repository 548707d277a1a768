"""Proposers: how the drafts of a model grow. They know no model and no method.

`Chain` takes token after token, `BestTree` grows the most probable paths level by level; both run the model in every
step. `Block` and `BlockTree` take all tokens from one forward.

    proposer = Chain(model, rule)
    [(tree, nodes)] = proposer.propose([model.begin(row, most=5)])"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import torch

from paceline.core.tree import DraftTree, IntArray
from paceline.draft.likeliest import Likeliest, likeliest_columns, top_with_logprobs
from paceline.draft.models.draft_model import Draft, DraftModel
from paceline.draft.models.stop import StopRule
from paceline.draft.shapes import RankPath, best_first


class Proposal(NamedTuple):
    """A tree, and the number in its draft of each of its nodes; None: the model has not run it."""

    tree: DraftTree
    nodes: Sequence[int | None]


class Proposer(Protocol):
    """Anything that makes trees of drafts."""

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        """Grow the empty `drafts`. Returns the tree of each."""


class Stepwise:
    """Base of proposers that ask the stop rule after every step."""

    def __init__(self, model: DraftModel, rule: StopRule):
        self.model, self.rule = model, rule

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """Call `DraftModel.extend`, and count the nodes that were run."""
        logits = self.model.extend(drafts, num_logits)
        self.model.ran.update({draft.row.id: len(draft.tokens) for draft in drafts})
        return logits

    def is_enough(self, draft: Draft, drafted: int, signal: float) -> bool:
        """Whether the `drafted`th token, whose distribution had `signal`, is the last."""
        return self.rule.stop(draft.row.id, drafted, signal) or drafted >= draft.most


class Chain(Stepwise):
    """Run the model, take a token, ask the stop rule, go on: as speculative decoding began (Leviathan et al. 2023)."""

    def __init__(self, model: DraftModel, rule: StopRule):
        super().__init__(model, rule)
        self.likeliest = Likeliest(model.vocab_size, model.columns)

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        active = list(drafts)
        while active:
            active = self.grow(active, self.run(active, [1] * len(active)))
        return [chain_proposal(draft, self.model.ran[draft.row.id]) for draft in drafts]

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
            if token is not None
            and not self.is_enough(draft, len(draft.drafted), signal)
            and token not in draft.row.ends
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
    size    number of candidates to verify."""

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
        new = [c for c in self._best() if c >= self._num_old and self.found[c].token not in self.draft.row.ends]
        self.level = new[: self.width]
        for candidate in self.level:
            self._node[candidate] = len(self.draft.tokens)
            self.draft.add(self.found[candidate].token, self._node[self.found[candidate].parent])
        self.depth += bool(self.level)
        return bool(self.level)

    def _best(self) -> list[int]:
        """The best `size` candidates so far. A parent scores no less than its children, so it is chosen with them."""
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

    The `width` likeliest children of every node that was run become candidates, scored by the probability of their
    whole path; the `width` best of a level are run next; in the end the best `size` candidates of all levels are
    verified. The stop rule looks at the best node of a level, and its children stay candidates.

    size  number of candidates to verify."""

    def __init__(self, model: DraftModel, rule: StopRule, width: int, size: int):
        super().__init__(model, rule)
        self.width, self.size = width, size
        self.likeliest = Likeliest(model.vocab_size, model.columns)

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        growths = [Growth(draft, self.width, self.size) for draft in drafts]
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
    """The draft as a chain, of which the model has run the first `ran` nodes: a token in each forward but the first."""
    root, end = draft.num_committed - 1, len(draft.tokens)
    tree = DraftTree.chain(draft.row.last_token, draft.drafted, calls=max(ran - root, 1))
    return Proposal(tree, [node if node < ran else None for node in range(root, end)])


# All tokens from one forward ------------------------------------------------------------------------------------------


class Filled(NamedTuple):
    """A block that was run: logits [D, K] of its positions, before any bias, and their states [D, H], if they are read.
    """

    logits: torch.Tensor
    states: torch.Tensor | None = None


class Ranked(NamedTuple):
    """The candidates of a block's positions: tokens int64 [depth, ranks]; their order, best first, and their shares,
    [depth, rows, ranks], with a row for each candidate of the position before, or one if they do not depend on it."""

    tokens: IntArray
    order: IntArray
    shares: IntArray


class BlockModel(DraftModel):
    """A model that predicts all tokens of a draft in one forward."""

    def fill(self, drafts: Sequence[Draft]) -> list[Filled]:
        """Run every draft's block. Its positions do not know yet which tokens are drafted before them."""
        raise NotImplementedError

    def next(self, drafts: Sequence[Draft], filled: Sequence[Filled]) -> torch.Tensor:
        """Logits [R, K] of each draft's next position."""
        return torch.stack([one.logits[len(draft.drafted)] for draft, one in zip(drafts, filled, strict=True)])

    def signals(
        self, drafts: Sequence[Draft], filled: Sequence[Filled], logits: torch.Tensor, rule: StopRule
    ) -> list[float]:
        """The numbers by which the stop rule decides on the next token of every chain.

        logits  [R, K], from which that token is taken."""
        return rule.signals(logits)

    def candidates(self, draft: Draft, filled: Filled, ranks: int) -> Ranked:
        """The likeliest `ranks` tokens of the first `draft.most` positions."""
        row, logits = draft.row, filled.logits[: draft.most].contiguous()
        if row.params.is_greedy:
            columns, logs = top_with_logprobs(logits, ranks, None)
        else:
            ids = None if self.columns is None else self.columns.cpu().numpy()
            places = range(row.num_new, row.num_new + len(logits))
            columns, logs = (made.to(logits.device) for made in likeliest_columns(row, places, logits, ranks, ids))
        tokens = columns if self.columns is None else self.columns[columns]
        shares, order = self.shares(draft, filled, tokens, columns, logs).sort(-1, descending=True)
        return Ranked(tokens.cpu().numpy(), order.cpu().numpy(), shares.cpu().numpy())

    def shares(
        self, draft: Draft, filled: Filled, tokens: torch.Tensor, columns: torch.Tensor, logs: torch.Tensor
    ) -> torch.Tensor:
        """The probabilities of `candidates` in their order by the positions' logits, of which the logarithms are `logs`
        [depth, ranks]."""
        return logs.exp()[:, None]


class Block(Chain):
    """Chains of blocks, whose tokens are taken from left to right.

    model  runs a whole block in `fill`."""

    model: BlockModel

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        blocks = dict(zip((draft.row.id for draft in drafts), self.model.fill(drafts) if drafts else (), strict=True))
        active = list(drafts)
        while active:
            filled = [blocks[draft.row.id] for draft in active]
            logits = self.model.next(active, filled)
            active = self.add(active, logits, self.model.signals(active, filled, logits, self.rule))
        return [chain_proposal(draft, 0) for draft in drafts]


class BlockTree:
    """Trees of the paths that are most probable by a block's distributions (DDTree, Ringel and Romano 2026, arXiv
    2604.12989, algorithm 1).

    size   number of nodes. width: number of candidates at each position."""

    def __init__(self, model: BlockModel, width: int, size: int):
        self.model, self.width, self.size = model, width, size

    def propose(self, drafts: Sequence[Draft]) -> list[Proposal]:
        filled = self.model.fill(drafts) if drafts else []
        return [self._tree(draft, one) for draft, one in zip(drafts, filled, strict=True)]

    def _tree(self, draft: Draft, filled: Filled) -> Proposal:
        chances, tokens = self.best_paths(draft, filled)
        number = {(): 0} | {path: n for n, path in enumerate(chances, 1)}
        above = [number[path[:-1]] for path in number if path]
        likely = np.array([chances.get(path, 1.0) for path in number])
        tree = DraftTree.of(draft.tokens[-1], [tokens[path] for path in number if path], above, chances=likely, calls=1)
        return Proposal(tree, [None] * len(number))

    def best_paths(self, draft: Draft, filled: Filled) -> tuple[dict[RankPath, float], dict[RankPath, int]]:
        """The `size` most probable paths, in falling order: their probabilities, and the last token of each."""
        tokens, order, shares = self.model.candidates(draft, filled, min(self.size, self.width))
        place: dict[RankPath, int] = {(): 0}  # of a path's last token among its position's candidates
        token: dict[RankPath, int] = {}

        def given(path: RankPath) -> int:
            return place[path] if order.shape[1] > 1 else 0

        def below(path: RankPath) -> list[float]:
            at = len(path)
            if path:
                place[path] = int(order[at - 1, given(path[:-1]), path[-1]])
                token[path] = int(tokens[at - 1, place[path]])
            if at == len(tokens) or token.get(path) in draft.row.ends:
                return []
            return [share for share in shares[at, given(path)].tolist() if share > 0]  # which no NaN is

        return best_first(below, self.size), token
