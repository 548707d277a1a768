"""eagle: one layer predicts the target's next state from its last state and the next token; the target's head reads it.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv 2401.15077). The tree grows
as in EAGLE-2 (arXiv 2406.16858): the best paths are drafted further, and the best nodes of all levels are verified.
Embedding and output head are the target's. Folders of `paceline train eagle` have the layout of published heads."""

from collections.abc import Sequence

import torch

from paceline.core.segment import Segment
from paceline.draft.models import layers as neural
from paceline.draft.models.layers import Precision
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.draft.models.states import FeatureConfig, FeatureModel, Network
from paceline.formats.facts import Facts
from paceline.formats.heads.eagle import read_eagle
from paceline.formats.heads.files import open_head
from paceline.formats.heads.layout import Entries, Tensors, table_and_head
from paceline.kernels.linear import linear
from paceline.kernels.ops import Pair


class EagleNetwork(Network):
    """fc(embedding, state), then the layers, without a norm before the first or after the last (Li et al. 2024,
    3.1)."""

    def __init__(self, path: str, config: Entries, tensors: Tensors, target: Facts, dtype: Precision = "auto"):
        layers, own = read_eagle(path, config, tensors, target)
        here = neural.placed(own, target, dtype)
        self.taps: tuple[int, ...] = (target.num_layers,)
        self.table, self.head = table_and_head(target)
        self.layers = neural.rotary_layers(here, layers, target)
        self.fc = linear([here["fc.weight"]], self.layers.vectors.get("fc.bias"), target.dtype)
        self.cache, self.nbytes = self.layers.cache, neural.nbytes(here)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, segments: Sequence[Segment]) -> Pair:
        layout, cache = self.layers.begin(segments, features)
        y = self.layers(self.fc(torch.cat([embedded, features], -1)), layout, cache)
        return y, y if layout.wanted is None else y[layout.wanted]


class Eagle(ModelDrafter):
    """Drafts with one layer that predicts the target's next state; trees of the most probable tokens, or chains."""

    name = "eagle"
    paper = "Li et al. 2024, EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858"
    Config = FeatureConfig
    config: FeatureConfig

    def open(self, target: Facts) -> FeatureModel:
        path = self.config.checkpoint
        network = EagleNetwork(path, *open_head(path, self.name, target), target, self.config.dtype)
        return FeatureModel(network, self.config, target)
