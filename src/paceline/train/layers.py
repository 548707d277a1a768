"""Decoder layers of a drafter's own, as they are trained; `paceline.draft.neural.layers` runs them with a cache.

Doesn't know: drafters, losses.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from paceline.target.shape import Shape
from paceline.train.attention import register


class DecoderLayers(nn.ModuleList):
    """`count` causal layers of a target's shape, without biases. Their output projections begin at 0, so that the
    layers change nothing at first; with `copied` they begin as the target's last ones."""

    def __init__(self, teacher: Any, count: int, copied: bool = False) -> None:
        shape = Shape.of(teacher.config)
        super().__init__(LlamaDecoderLayer(layer_config(shape), index) for index in range(count))
        last = teacher.model.layers[len(teacher.model.layers) - count :]
        own: list[Any] = list(self)
        with torch.no_grad():
            for layer, original in zip(own, last, strict=True):
                if copied:
                    layer.load_state_dict(original.state_dict(), strict=False)
                else:
                    layer.self_attn.o_proj.weight.zero_()
                    layer.mlp.down_proj.weight.zero_()

    def forward(self, states: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """States [B, T, H], the same; turns: cos and sin [1, T, head_dim] of the target's rotary embedding."""
        for layer in self:
            states = layer(states, position_embeddings=turns)
        return states


def layer_config(shape: Shape) -> LlamaConfig:
    """A Llama whose layers have a target's sizes, and no biases. On a CPU attention is computed in blocks."""
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.eps,
        max_position_embeddings=shape.max_context,
        vocab_size=shape.vocab_size,
    )
    config._attn_implementation = "sdpa" if torch.cuda.is_available() else register()
    return config
