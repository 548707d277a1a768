"""Proposers: how the drafts of a model grow.

`Chain` draws token after token, `BestTree` grows the most probable paths level by level; both run the model in every
step. `Block` and `BlockTree` take all tokens from one forward. They know no model and no method.

    proposer = Chain(model, rule)
    trees = proposer.propose([model.begin(row, ends) for row in rows])"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch

from paceline.core.tree import DraftTree
from paceline.draft.cost import SIZES, RoundTimes, best_sizes
from paceline.draft.models.draft_model import DraftModel
from paceline.draft.models.drafts import Draft, Growth, chain_tree
from paceline.draft.models.sampler import TokenSampler
from paceline.draft.models.stop import StopRule
from paceline.draft.shapes import RankPath, best_first


class Proposer(Protocol):
    """Anything that makes trees of drafts."""

    def propose(self, drafts: Sequence[Draft], beside: int = 0) -> list[DraftTree]:
        """The tree of each draft, which is empty still. beside: other tokens of the forward that will verify them."""


class Stepping:
    """A proposer that asks the stop rule after every step."""

    def __init__(self, model: DraftModel, rule: StopRule):
        self.model, self.rule = model, rule

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """`DraftModel.extend`, and note what has been run."""
        logits = self.model.extend(drafts, num_logits)
        for draft in drafts:
            draft.num_run = len(draft.tokens)
            draft.calls += 1
        return logits

    def is_enough(self, draft: Draft, drafted: int, signal: float) -> bool:
        """Whether the `drafted`th token, whose distribution had `signal`, is the last."""
        return self.rule.stop(draft.row.id, drafted, signal) or drafted >= draft.most


class Chain(Stepping):
    """Run the model, draw a token, ask the stop rule, go on: speculative decoding as it began (Leviathan et al. 2023).

    takes_best  at a temperature: take the most probable token instead of drawing one."""

    def __init__(self, model: DraftModel, rule: StopRule, takes_best: bool = False):
        super().__init__(model, rule)
        self.sampler = TokenSampler(model.vocab_size, model.columns, takes_best)

    def propose(self, drafts: Sequence[Draft], beside: int = 0) -> list[DraftTree]:
        active = list(drafts)
        while active:
            active = self.grow(active, self.run(active, [1 + draft.num_guesses for draft in active]))
        return [chain_tree(draft) for draft in drafts]

    def grow(self, drafts: Sequence[Draft], logits: torch.Tensor) -> list[Draft]:
        """Add a token to every chain from its row of logits [R, K]; those that go on."""
        return self.draw(drafts, logits, self.rule.signals(logits))

    def draw(self, drafts: Sequence[Draft], logits: torch.Tensor, signals: Sequence[float]) -> list[Draft]:
        """`grow`, where the stop rule decides by these signals."""
        drew = self.sampler.draw(drafts, logits)
        return [
            draft
            for draft, signal, more in zip(drafts, signals, drew, strict=True)
            if more and not self.is_enough(draft, draft.length, signal) and draft.tokens[-1] not in draft.ends
        ]


class BestTree(Stepping):
    """Trees of the most probable tokens, level by level (EAGLE-2, Li et al. 2024, section 4).

    The `width` most probable children of every node that was run become candidates, scored by the probability of their
    whole path; the `width` best of a level are run next; in the end the best `size` candidates of all levels are
    verified. The stop rule looks at the best node of a level, and its children stay candidates. No token is drawn, so
    at a temperature the tree counts as a set of point masses.

    size  number of candidates to verify; None: as many as pay by `times`, all rows together."""

    def __init__(self, model: DraftModel, rule: StopRule, width: int, size: int | None, times: RoundTimes):
        super().__init__(model, rule)
        self.width, self.size, self.times = width, size, times

    def propose(self, drafts: Sequence[Draft], beside: int = 0) -> list[DraftTree]:
        growths = [Growth(draft, self.width, self.size or 0) for draft in drafts]
        active = list(growths)
        while active:
            levels = [len(growth.level) for growth in active]
            logits = self.run([growth.draft for growth in active], levels)
            signals = self.rule.signals(logits[[0, *accumulate(levels[:-1])]])
            for growth, of_row in zip(active, logits.split(levels), strict=True):
                growth.expand(of_row, self.model.columns)
            if self.size is None:
                sizes = best_sizes([growth.chances() for growth in growths], self.times, beside)
                for growth, size in zip(growths, sizes, strict=True):
                    growth.size = size
            active = [
                growth
                for growth, signal in zip(active, signals, strict=True)
                if not self.is_enough(growth.draft, growth.depth, signal) and growth.descend()
            ]
        return [growth.tree() for growth in growths]


class BlockModel(DraftModel):
    """A model whose one forward says something of all tokens of a draft."""

    def fill(self, drafts: Sequence[Draft]) -> None:
        """Run every draft's block. Its positions say nothing yet of the tokens drafted before them."""
        raise NotImplementedError

    def signals(self, drafts: Sequence[Draft], logits: torch.Tensor, rule: StopRule) -> list[float]:
        """What the stop rule decides by, for the next token of every chain. logits [R, K]: what it is drawn from."""
        raise NotImplementedError

    def candidates(self, draft: Draft, depth: int, ranks: int) -> tuple[Any, Any, Any]:
        """The best `ranks` tokens of the first `depth` positions, int64 [depth, ranks]; and, after each candidate of
        the position before (one row: after any), their order, best first, and probabilities, [depth, rows, ranks]."""
        raise NotImplementedError


class Block(Chain):
    """Chains out of blocks: tokens are drawn from left to right, position by position."""

    model: BlockModel

    def propose(self, drafts: Sequence[Draft], beside: int = 0) -> list[DraftTree]:
        if drafts:
            self.model.fill(drafts)
        active = list(drafts)
        while active:
            logits = self.model.extend(active, [1] * len(active))
            active = self.draw(active, logits, self.model.signals(active, logits, self.rule))
        for draft in drafts:
            draft.calls = 1
        return [chain_tree(draft) for draft in drafts]


class BlockTree:
    """Trees of the paths that are most probable by a block's distributions (DDTree, Ringel and Romano 2026, arXiv
    2604.12989, algorithm 1). No token is drawn, so at a temperature a tree counts as a set of point masses.

    size  number of nodes; None: as many as pay by `times`, all rows together. width: candidates at each position."""

    def __init__(self, model: BlockModel, width: int, size: int | None, times: RoundTimes):
        self.model, self.width, self.size, self.times = model, width, size, times

    def propose(self, drafts: Sequence[Draft], beside: int = 0) -> list[DraftTree]:
        if not drafts:
            return []
        self.model.fill(drafts)
        grown = [self.best_paths(draft, self.size or SIZES[-1] - 1) for draft in drafts]
        sizes = [self.size or 0] * len(drafts)
        if self.size is None:
            sizes = best_sizes([[*chances.values()] for chances, _ in grown], self.times, beside)
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
