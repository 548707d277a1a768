"""Drafting on features: a head reads a state of the target and the token after it, and then its own output.

Node j of a row is the pair (state of token j, token j + 1): a head that has read c pairs has read 1 + c of the row's
tokens. The states of committed tokens are the target's; they wait in `pending` until the head drafts. A drafted node's
state is its parent's output; after the round such nodes are forgotten, and accepted ones are read again with the
target's states (Li et al. 2024, EAGLE, section 3.1). Knows no method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from paceline.core.request import Request
from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft.models import stop
from paceline.draft.models.draft_model import Draft, segments
from paceline.draft.models.layers import PRECISION, Precision
from paceline.draft.models.model_drafter import TREE, ModelDrafterConfig
from paceline.draft.models.pending import StatesModel
from paceline.draft.options import option
from paceline.target.base import Facts
from paceline.target.cache import Pair, RaggedCache
from paceline.target.linear import Linear


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(ModelDrafterConfig):
    """Options of drafters with a head over features."""

    checkpoint: str = option(help="folder of the head, ours or a published one; or its file of weights")
    stop: stop.Name = option("fixed", "when to stop: at a fixed length, or where the draft is no longer sure")
    draft: int | None = option(4, "most tokens drafted a round; for a tree, its depth", least=1)
    tree: int | Literal["auto"] = option(16, TREE, least=0)
    dtype: Precision = option("auto", PRECISION)


class Network:
    """Base of heads that are bound to a target.

    taps     layers whose inputs it reads (`Needs.hidden_layers`). cache: cache of its layers.
    table    embedding [V, H]. head: its output head. columns: tokens of the head's rows; None: all tokens.
    nbytes   bytes of weights that a forward reads, without the output head."""

    taps: tuple[int, ...]
    cache: RaggedCache
    table: torch.Tensor
    head: Linear
    columns: torch.Tensor | None = None
    nbytes: int

    def first(self, states: torch.Tensor) -> torch.Tensor:
        """Features [N, H] of the target's states [N, taps * target's H]."""
        return states

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, segments: Sequence[Segment]) -> Pair:
        """Run the segments' nodes, given their embeddings and features [N, H]. Returns their children's features
        [N, H], and the input [M, H] of the output head for the nodes whose logits are wanted."""
        raise NotImplementedError


class FeatureModel(StatesModel):
    """A head over features that drafts token by token, and reads its own output.

    head, columns  the network's, without the tokens that the option `vocab` leaves out."""

    def __init__(self, network: Network, config: FeatureConfig, target: Facts):
        super().__init__(target, network.taps, network.cache, self.run_head)
        self.network = network
        self.head, self.columns = head_of(network, config, target)
        self.weight_bytes = network.nbytes + self.head.nbytes

    def length(self, row: Request) -> int:
        return 1 + self.pending.cached(row)

    def room(self, row: Request) -> int:
        return row.max_draft if self.pending.count(row) else 0  # 0: the target has run nothing of it yet

    def extend(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        features = torch.cat([self._features(draft) for draft in drafts])
        tokens = [token for draft in drafts for token in draft.tokens[draft.num_run :]]
        parts = segments(drafts, num_logits, self.pending.slot)
        out, read = self._forward(tokens, features, parts)
        for draft, of_row in zip(drafts, out.split([segment.num_run for segment in parts]), strict=True):
            draft.features.append(of_row)
        return self.head(read)

    def _features(self, draft: Draft) -> torch.Tensor:
        """The features of the nodes to be run: made of the target's states in the first step, later their parents'
        output.
        """
        if not draft.num_run:
            return self.network.first(self.pending.of(draft.row))
        return torch.cat(draft.features)[draft.parent[draft.num_run :]]

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int], features: torch.Tensor, segments: Sequence[Segment]) -> Pair:
        ids = torch.tensor(tokens, device=features.device)
        return self.network.forward(F.embedding(ids, self.network.table), features, segments)

    def commit(self, draft: Draft, nodes: Sequence[int]) -> None:
        # Drafted nodes were run on the head's own output. The target's states of accepted ones come to `pending`.
        self.pending.cache.commit(self.pending.slot(draft.row), range(draft.num_committed))

    def run_head(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        """Read committed states, as `RunHead`."""
        return self._forward(following.tolist(), self.network.first(states), segments)[0]


def head_of(network: Any, config: FeatureConfig, target: Facts) -> tuple[Linear, torch.Tensor | None]:
    """A network's output head and the tokens of its rows, without those that the option `vocab` leaves out."""
    if config.vocab is None:
        return network.head, network.columns
    from paceline.draft.models.vocab import kept_rows

    rows, columns = kept_rows(network.columns, config.vocab, config.checkpoint, target)
    return network.head.rows(rows), columns
