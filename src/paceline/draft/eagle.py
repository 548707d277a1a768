"""eagle: a layer over the target's last state and the next token predicts the next state; the target's head reads it.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv 2401.15077); the tree grows
as in EAGLE-2 (arXiv 2406.16858): the best paths so far are drafted further, and the best nodes of all are verified.
Embedding and output head are the target's. The layer has neither a norm before its attention nor one at its end; its
geometry is its own. Folders that `paceline train eagle` wrote and published heads have the same layout.

    Engine("models/demo", draft="eagle:models/demo-eagle,tree=16")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.draft.neural.checkpoint import check_all, open_head
from paceline.draft.neural.features import FeatureConfig, FeatureDrafter, Network
from paceline.draft.neural.layers import (
    HeadLayers,
    Precision,
    head_ops,
    layer_config,
    layer_shapes,
    nbytes,
    placed,
    table_and_head,
)
from paceline.engine.round import Segment
from paceline.errors import MethodError
from paceline.target.base import Facts
from paceline.target.linear import linear
from paceline.target.shape import Shape

TABLE = "embed_tokens.weight"
"""Published heads bring a copy of the target's embedding."""
DERIVED = "rotary_emb.inv_freq"
"""Ending of names of tensors that follow from the configuration; old checkpoints have them."""


def eagle_shapes(shape: Shape, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Name and shape of a head's tensors, given which of the optional ones it has."""
    h = shape.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, 2 * h)}
    shapes |= {name: of for name, of in {"fc.bias": (h,), TABLE: (shape.vocab_size, h)}.items() if name in names}
    for number in range(shape.num_layers):
        of_layer = layer_shapes(shape, h, ("input_layernorm",) if number else ())
        shapes |= {f"layers.{number}.{name}": of for name, of in of_layer.items()}
    return shapes


class EagleNetwork:
    """fc(embedding, state), then the layer; no other norm (Li et al. 2024, section 3.1).

    config   the head's config.json; tensors by their names in it. MethodError if they are not for the target."""

    def __init__(
        self,
        path: str,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        target: Facts,
        dtype: Precision = "auto",
    ):
        layers = layer_config(path, {"vocab_size": target.vocab_size, **config}, target)
        shape = Shape.of(layers)
        if shape.hidden_size != target.hidden_size:
            raise MethodError(
                f"{path} predicts states of {shape.hidden_size} numbers, and those of {target.name} have "
                f"{target.hidden_size}: it is a head for another target"
            )
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(DERIVED)}
        check_all(path, tensors, eagle_shapes(shape, list(tensors)))
        here = placed({name: tensor for name, tensor in tensors.items() if name != TABLE}, target, dtype)
        self.taps: tuple[int, ...] = (target.num_layers,)
        self.table, self.head = table_and_head(target)
        if getattr(target, "quantised", None) is None:  # a table in blocks is not to the bit the one it was made of
            check_table(path, tensors.get(TABLE), self.table)
        self.columns: torch.Tensor | None = None
        prefixes = [f"layers.{n}." for n in range(shape.num_layers)]
        self.layers = HeadLayers(here, prefixes, shape, head_ops(layers, shape, target), target)
        vectors = self.layers.vectors
        self.fc = linear([here["fc.weight"]], vectors.get("fc.bias"), target.dtype)
        self.norms = [vectors.get(f"{prefix}input_layernorm.weight") for prefix in prefixes]
        self.cache, self.nbytes = self.layers.cache, nbytes(here)

    def first(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def forward(
        self, embedded: torch.Tensor, features: torch.Tensor, segments: Sequence[Segment]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout, cache = self.layers.begin(segments, features)
        x = y = self.fc(torch.cat([embedded, features], -1))
        for number, (layer, norm) in enumerate(zip(self.layers.layers, self.norms, strict=True)):
            residual, delta = layer(x if norm is None else self.layers.ops.norm(y, norm), y, layout, cache, number)
            y = residual + delta
        return y, y if layout.wanted is None else y[layout.wanted]


def check_table(path: str, own: torch.Tensor | None, table: torch.Tensor) -> None:
    """MethodError if a head brings the embedding of another target than `table`."""
    if own is not None and not torch.equal(own.to(table), table):
        raise MethodError(f"{path} brings another embedding than the target's: it is a head for another target")


class Eagle(FeatureDrafter):
    """Drafts with one layer that predicts the target's next state; trees of the most probable tokens, or chains."""

    name = "eagle"
    lossless = "yes"
    paper = "Li et al. 2024, EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858"
    Config = FeatureConfig

    def open(self, target: Facts) -> Network:
        config, tensors = open_head(self.config.checkpoint, self.name, target)
        return EagleNetwork(self.config.checkpoint, config, tensors, target, self.config.dtype)
