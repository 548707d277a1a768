"""Drafting on features: a head reads a state of the target and the token after it, and then its own output.

Node j of a row is the pair (state of token j, token j + 1): a head that has read c pairs has read 1 + c of the row's
tokens. The states of committed tokens are the target's; they wait in `pending` until the head drafts. A drafted node's
state is its parent's output; after the round such nodes are forgotten, and accepted ones are read again with the
target's states (Li et al. 2024, EAGLE, section 3.1). Knows no method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from paceline.core.request import Request
from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.draft.models import stop
from paceline.draft.models.checkpoint import open_head
from paceline.draft.models.drafts import Draft, segments
from paceline.draft.models.layers import PRECISION, Precision
from paceline.draft.models.pending import Pending, StateReader
from paceline.draft.models.stepping import TREE, Stepping, SteppingConfig
from paceline.draft.models.vocab import kept_rows
from paceline.draft.spec import option
from paceline.target.base import Facts, Needs
from paceline.target.cache import Pair, RaggedCache
from paceline.target.linear import Linear


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(SteppingConfig):
    """Options of drafters with a head over features."""

    checkpoint: str = option(help="folder of the head, ours or a published one; or its file of weights")
    stop: stop.Name = option("fixed", "when to stop: at a fixed length, or where the draft is no longer sure")
    draft: int | None = option(4, "most tokens drafted a round; of a tree: its depth", least=1)
    tree: int | Literal["auto"] = option(16, TREE, least=0)
    dtype: Precision = option("auto", PRECISION)


class Network:
    """Base of heads that are bound to a target.

    taps     layers whose inputs it reads (`Needs.hidden_layers`). cache: its own.
    table    [V, H]: embeds tokens. head: its output head. columns: tokens of the head's rows; None: all.
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


class FeatureDrafter(StateReader, Stepping):
    """Base of drafters with a head over features.

    Head  makes the `Network` of (path, config.json, tensors by name, target, precision); MethodError if it cannot."""

    Head: ClassVar[type[Any]]
    config: FeatureConfig

    def open(self, target: Facts) -> Network:
        """The head of the checkpoint. MethodError if it is not for the target."""
        config, tensors = open_head(self.config.checkpoint, self.name, target)
        network: Network = self.Head(self.config.checkpoint, config, tensors, target, self.config.dtype)
        return network

    def bind(self, target: Facts) -> None:
        super().bind(target)
        network = self.network = self.open(target)
        self.pending = Pending(target, network.taps, network.cache)
        self.needs = Needs(hidden_layers=tuple(sorted(network.taps)))
        self.head, self.columns = network.head, network.columns
        if self.config.vocab is not None:
            rows, self.columns = kept_rows(self.columns, self.config.vocab, self.config.checkpoint, target)
            self.head = self.head.rows(rows)
        self.weight_bytes = network.nbytes + self.head.nbytes

    def cached(self, row: Request) -> int:
        return 1 + self.pending.cached(row)

    def draft_limit(self, row: Request) -> int:
        return row.max_draft if self.pending.count(row) else 0  # 0: the target has run nothing of it yet

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        features = torch.cat([self._features(draft) for draft in drafts])
        tokens = [token for draft in drafts for token in draft.tokens[draft.num_run :]]
        parts = segments(drafts, num_logits, self.pending.slot)
        out, read = self._forward(tokens, features, parts)
        for draft, of_row in zip(drafts, out.split([segment.num_run for segment in parts]), strict=True):
            draft.features.append(of_row)
        return self.head(read)

    def _features(self, draft: Draft) -> torch.Tensor:
        """The features of the nodes to be run: of the target's states in the first step, then their parents' output."""
        if not draft.num_run:
            return self.network.first(self.pending.of(draft.row))
        return torch.cat(draft.features)[draft.parent[draft.num_run :]]

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int], features: torch.Tensor, segments: Sequence[Segment]) -> Pair:
        ids = torch.tensor(tokens, device=features.device)
        return self.network.forward(F.embedding(ids, self.network.table), features, segments)

    def keep(self, draft: Draft, nodes: Sequence[int]) -> None:
        # Drafted nodes were run on the head's own output. The target's states of accepted ones come to `pending`.
        self.pending.cache.commit(self.pending.slot(draft.row), range(draft.num_committed))
        self.pending.read(draft.row, draft.num_committed)

    def through(self, states: torch.Tensor, following: IntArray, segments: Sequence[Segment]) -> torch.Tensor:
        return self._forward(following.tolist(), self.network.first(states), segments)[0]
