"""eagle: one layer predicts the target's next state from its last state and the next token; the target's head reads it.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv 2401.15077). The tree grows
as in EAGLE-2 (arXiv 2406.16858): the best paths so far are drafted further, and the best nodes of all are verified.
Embedding and output head are the target's. Folders of `paceline train eagle` have the layout of published heads."""

from collections.abc import Sequence

import torch

from paceline.core.segment import Segment
from paceline.draft.models import layers as neural
from paceline.draft.models.checkpoint import check_all, open_head
from paceline.draft.models.features import FeatureConfig, FeatureModel, Network
from paceline.draft.models.layers import TABLE, Entries, Precision, Tensors
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.errors import MethodError
from paceline.target.base import Facts
from paceline.target.cache import Pair
from paceline.target.linear import linear
from paceline.target.shape import Shape

DERIVED = "rotary_emb.inv_freq"
"""Ending of the names of rotary tables, which old checkpoints hold. They follow from the configuration."""


def eagle_shapes(shape: Shape, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Name and shape of a head's tensors. names: those it has, some of which are optional."""
    h = shape.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, 2 * h)}
    shapes |= {name: of for name, of in {"fc.bias": (h,), TABLE: (shape.vocab_size, h)}.items() if name in names}
    for number in range(shape.num_layers):
        of_layer = neural.head_shapes(shape, h, ("input_layernorm",) if number else ())
        shapes |= {f"layers.{number}.{name}": of for name, of in of_layer.items()}
    return shapes


class EagleNetwork(Network):
    """fc(embedding, state), then the layers; no norm before the first, nor after the last (Li et al. 2024, 3.1)."""

    def __init__(self, path: str, config: Entries, tensors: Tensors, target: Facts, dtype: Precision = "auto"):
        layers = neural.layer_config(path, {"vocab_size": target.vocab_size, **config}, target)
        shape = Shape.of(layers)
        neural.check_width(path, shape.hidden_size, target)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(DERIVED)}
        check_all(path, tensors, eagle_shapes(shape, list(tensors)))
        here = neural.placed({name: tensor for name, tensor in tensors.items() if name != TABLE}, target, dtype)
        self.taps: tuple[int, ...] = (target.num_layers,)
        self.table, self.head = neural.table_and_head(target)
        # Quantising changes the target's table, and so does its training (`Drafter.bind`).
        if target.weights_fingerprint and getattr(target, "quantised", None) is None:
            own = tensors.get(TABLE)
            if own is not None and not torch.equal(own.to(self.table), self.table):
                raise MethodError(f"{path} brings another embedding than the target's: it is a head for another target")
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
