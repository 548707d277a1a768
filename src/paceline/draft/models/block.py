"""`Block` and `BlockTree`: drafts that are made in one forward, and the interface of the models that make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from paceline.core.tree import DraftTree, IntArray
from paceline.draft.likeliest import likeliest_columns, top_with_logprobs
from paceline.draft.models.draft_model import Draft, DraftModel
from paceline.draft.models.proposers import Chain, Proposal, chain_proposal
from paceline.draft.models.stop import StopRule
from paceline.draft.shapes import RankPath, best_first


class Filled(NamedTuple):
    """The output of a block.

    logits  [D, K], for each position, before any bias. states: [D, H]; None: nothing reads them."""

    logits: torch.Tensor
    states: torch.Tensor | None = None


class Ranked(NamedTuple):
    """The candidates of a block's positions.

    tokens         int64 [depth, ranks].
    order, shares  [depth, rows, ranks]: the candidates' columns in `tokens`, best first, and their probabilities. Row r
                   holds after candidate r of the position before; with a single row, that candidate does not matter."""

    tokens: IntArray
    order: IntArray
    shares: IntArray


class BlockModel(DraftModel):
    """A model that predicts all tokens of a draft in one forward."""

    def fill(self, drafts: Sequence[Draft]) -> list[Filled]:
        """Run each draft's block. Its positions do not depend on the tokens drafted before them."""
        raise NotImplementedError

    def next(self, drafts: Sequence[Draft], filled: Sequence[Filled]) -> torch.Tensor:
        """Logits [R, K] of each draft's next position."""
        return torch.stack([one.logits[len(draft.drafted)] for draft, one in zip(drafts, filled, strict=True)])

    def signals(
        self, drafts: Sequence[Draft], filled: Sequence[Filled], logits: torch.Tensor, rule: StopRule
    ) -> list[float]:
        """The numbers by which the stop rule decides whether each chain's next token is the last.

        logits  [R, K], from which these tokens are taken."""
        return rule.signals(logits)

    def candidates(self, draft: Draft, filled: Filled, ranks: int) -> Ranked:
        """The likeliest `ranks` tokens of each of the first `draft.most` positions."""
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
        """The candidates' probabilities [depth, rows, ranks], as in `Ranked` but not sorted.

        tokens, columns  the candidates [depth, ranks], best first by the logits. logs: their log probabilities."""
        return logs.exp()[:, None]


class Block(Chain):
    """Drafts a chain from a block, whose tokens are taken from left to right.

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
    """Drafts a tree of a block's most probable paths (DDTree, Ringel and Romano 2026, arXiv 2604.12989, algorithm 1).

    size   number of drafted nodes. width: number of candidates at each position."""

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
        """Find the `size` most probable paths. Returns their probabilities, in falling order, and their last tokens."""
        tokens, order, shares = self.model.candidates(draft, filled, min(self.size, self.width))
        place: dict[RankPath, int] = {(): 0}  # column of a path's last token in `tokens`
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
            return [share for share in shares[at, given(path)].tolist() if share > 0]  # drops NaN

        return best_first(below, self.size), token
