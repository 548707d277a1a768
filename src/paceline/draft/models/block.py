"""Drafts whose tokens all come from one forward: chains, and trees over the positions' distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.core.tree import DraftTree
from paceline.draft.models.draft_model import Draft, DraftModel
from paceline.draft.models.proposers import Chain, Fitting, chain_tree, top_with_logprobs
from paceline.draft.models.stop import StopRule
from paceline.draft.shapes import RankPath, best_first

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

        logits  [R, K], from which that token is drawn."""
        return rule.signals(logits)

    def candidates(self, draft: Draft, depth: int, ranks: int) -> tuple[Any, Any, Any]:
        """The best `ranks` tokens of the first `depth` positions, int64 [depth, ranks]; their order, best first, and
        their probabilities, [depth, rows, ranks], with a row for each candidate of the position before, or one row if
        they do not depend on it."""
        columns, logs = top_with_logprobs(draft.features[-1][:depth].contiguous(), ranks, None)
        tokens = columns if self.columns is None else self.columns[columns]
        shares, order = self.shares(draft, tokens, columns, logs).sort(-1, descending=True)
        return tokens.cpu().numpy(), order.cpu().numpy(), shares.cpu().numpy()

    def shares(self, draft: Draft, tokens: torch.Tensor, columns: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
        """The probabilities of `candidates` in their order by the positions' logits, of which the logarithms are `logs`
        [depth, ranks]."""
        return logs.exp()[:, None]


class Block(Chain):
    """Chains of blocks, whose tokens are drawn from left to right.

    model  runs a whole block in `fill`."""

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
