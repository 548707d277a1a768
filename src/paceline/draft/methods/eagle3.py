"""eagle3: a layer over the inputs of three of the target's layers drafts, with an output head of its own.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (arXiv
2503.01840). A committed token's feature is made of these three inputs; a drafted node's feature is the head's own
output, which the head was trained to read. The draft vocabulary may be smaller than the target's. P-EAGLE's heads,
which are read, too, draft all tokens in one forward over the last pair and pairs of a mask's embedding and a learnt
feature.

Folders are from `paceline train eagle3` or published (`formats/heads/eagle.py`)."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from paceline.core.segment import Segment
from paceline.draft.models import layers as neural
from paceline.draft.models.block import Block, BlockModel, BlockTree, Filled
from paceline.draft.models.draft_model import Draft, DraftModel
from paceline.draft.models.layers import Precision
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.draft.models.proposers import Proposer
from paceline.draft.models.states import FeatureConfig, FeatureModel, Network
from paceline.formats.facts import Facts
from paceline.formats.heads.eagle import MASK, OUTPUT, Eagle3Head
from paceline.formats.heads.files import open_head
from paceline.formats.heads.layout import Entries, Tensors, table_and_head
from paceline.kernels.linear import linear
from paceline.kernels.ops import Pair


class Eagle3Network(Network):
    """Decoder layers over [norm(embedding), norm(feature)].

    A committed token's feature is fc(tapped states); a drafted token's is its parent's output."""

    def __init__(self, path: str, config: Entries, tensors: Tensors, target: Facts, dtype: Precision = "auto"):
        head = Eagle3Head.read(path, config, tensors, target)
        self.config, self.flags, self.taps = head.layers, head.flags, head.taps
        self.table, self.columns, self.mask = head.table, head.columns, head.mask
        here = neural.placed(head.weights, target, dtype)
        self.layers = neural.rotary_layers(here, head.layers, target)
        self.weights, self.cache = self.layers.vectors, self.layers.cache
        output, fc = here.get(OUTPUT), here.get("fc.weight")
        self.head = table_and_head(target)[1] if output is None else linear([output], None, target.dtype)
        self.fc = None if fc is None else linear([fc], None, target.dtype)
        self.nbytes = neural.nbytes(here, "lm_head")

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        """Apply the norm of this name to the states, if the head has it."""
        weight = self.weights.get(f"{name}.weight")
        return states if weight is None else self.layers.ops.norm(states, weight)

    def first(self, states: torch.Tensor) -> torch.Tensor:
        if self.flags.norm_before_fc:
            states = self._norm(states, "input_norm")
        if self.flags.fc_norm:
            parts = states.chunk(len(self.taps), -1)
            states = torch.cat([self._norm(part.contiguous(), f"fc_norm.{n}") for n, part in enumerate(parts)], -1)
        return states if self.fc is None else self.fc(states)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, segments: Sequence[Segment]) -> Pair:
        layout, cache = self.layers.begin(segments, features)
        first, *deeper = self.layers.layers
        normed = self._norm(features, "layers.0.hidden_norm")
        x = torch.cat([self._norm(embedded, "layers.0.input_layernorm"), normed], -1)
        residual, delta = first.after_norm(x, normed if self.flags.norm_before_residual else features, layout, cache, 0)
        for number, layer in enumerate(deeper, 1):
            residual, delta = layer(residual, delta, layout, cache, number)
        y, read = self.layers.ops.add_norm(residual, delta, self.weights.get("norm.weight"))
        return (read if self.flags.norm_output else y), read if layout.wanted is None else read[layout.wanted]


class ParallelModel(BlockModel, FeatureModel):
    """P-EAGLE: all drafted pairs have the mask's embedding and feature, so none waits for another. A pair sees the
    pairs before it. The masks' keys and values are not kept."""

    network: Eagle3Network

    def fill(self, drafts: Sequence[Draft]) -> list[Filled]:
        network, token = self.network, self.network.mask
        assert token is not None
        mask = network.first(network.weights[MASK][None])
        features = [part for d in drafts for part in (self._features(d), mask.expand(d.most - 1, -1))]
        nodes = [d.tokens + [token] * (d.most - 1) for d in drafts]
        parts = [
            Segment(self.pending.slot(d.row), np.array(own), np.arange(-1, len(own) - 1), num_logits=d.most)
            for d, own in zip(drafts, nodes, strict=True)
        ]
        _, read = self._forward([*chain(*nodes)], torch.cat(features), parts)
        return [Filled(logits) for logits in self.head(read).split([d.most for d in drafts])]


class Eagle3(ModelDrafter):
    """Drafts with one layer over three of the target's states and a vocabulary of its own; trees, or chains."""

    name = "eagle3"
    paper = "Li et al. 2025, EAGLE-3, arXiv 2503.01840"
    Config = FeatureConfig
    config: FeatureConfig

    def open(self, target: Facts) -> FeatureModel:
        path = self.config.checkpoint
        network = Eagle3Network(path, *open_head(path, self.name, target), target, self.config.dtype)
        kind = FeatureModel if network.mask is None else ParallelModel
        return kind(network, self.config, target)

    def proposer_of(self, model: DraftModel) -> Proposer:
        if not isinstance(model, ParallelModel):
            return super().proposer_of(model)
        if self.config.tree:
            return BlockTree(model, self.config.width, self.config.tree)
        return Block(model, self.rule)
