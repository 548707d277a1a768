"""Decoder layers of the heads' own, over committed text alone, with a ragged cache of their own.

They never run on drafted nodes, so the cache is neither gathered nor rolled back: it grows by what is committed. The
states that are not read yet wait in `pending.Pending`.

    layers = OwnLayers(tensors, ["prefix.layers.0."], target)
    out = layers.run(row_segments, lambda layout, cache: ...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from paceline.draft.neural.layer import HeadLayer, head_cache, layer_shapes
from paceline.engine.round import Segment
from paceline.errors import MethodError
from paceline.target.attention import begin
from paceline.target.base import Facts
from paceline.target.cache import Writer
from paceline.target.decoder import Decoder
from paceline.target.layout import Layout
from paceline.target.quantised.blocks import Blocks
from paceline.target.quantised.checkpoint import tensors_of
from paceline.target.shape import Shape

NORM = "input_layernorm"


class OwnLayers:
    """Pre-norm layers of the target's shape without biases, one cache for all of them.

    weights   of `own_shapes`, the name of each layer's after its prefix in `prefixes`; on the target's device."""

    def __init__(self, weights: Mapping[str, torch.Tensor | Blocks], prefixes: Sequence[str], target: Decoder):
        self.shape = own_shape(target, len(prefixes))
        self.ops = target.ops
        self.layers = [HeadLayer(weights, prefix, self.shape, self.ops) for prefix in prefixes]
        vectors = tensors_of(weights)
        self.norms = [vectors[f"{prefix}{NORM}.weight"] for prefix in prefixes]
        self.cache = head_cache(self.shape, target)

    def begin(self, segments: Sequence[Segment], states: torch.Tensor) -> tuple[Layout, Writer]:
        """Plan a forward over the segments' nodes, whose states [N, H] these are."""
        return begin(segments, self.cache, self.shape, self.ops, states)

    def __call__(self, states: torch.Tensor, layout: Layout, cache: Writer, first: int, last: int) -> torch.Tensor:
        """Layers first..last-1 over states [N, H], the same."""
        for number in range(first, last):
            x = self.ops.norm(states, self.norms[number])
            residual, delta = self.layers[number](x, states, layout, cache, number)
            states = residual + delta
        return states


def own_shape(target: Decoder, layers: int) -> Shape:
    """The target's shape, for that many layers of a head's own."""
    shape = replace(target.shape, num_layers=layers, qk_norm=False, window=None)
    return replace(shape, qkv_bias=False, out_bias=False, mlp_bias=False)


def own_shapes(target: Decoder, prefixes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors of `OwnLayers`."""
    of_layer = layer_shapes(own_shape(target, 1), target.hidden_size, (NORM,))
    return {f"{prefix}{name}": shape for prefix in prefixes for name, shape in of_layer.items()}


def native(target: Facts, who: str) -> Decoder:
    """The target as a native decoder; MethodError for another one."""
    if isinstance(target, Decoder):
        return target
    raise MethodError(
        f"{who} has layers of the target's kind, and {target.name} runs in transformers: it needs a model of a family "
        "that the native decoder runs, or heads without layers of their own"
    )
