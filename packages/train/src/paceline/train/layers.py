"""Attention and decoder layers in training.

Models that are compiled for a CPU attend causally in blocks of queries, with batched bf16 matrix products, into which a
compiler fuses what is between them. Without a compiler torch's own attention is as fast, and is used. Each block
computes only the keys it may attend to and keeps the probabilities; query heads that share a key head share a product.
Exact up to rounding (a test compares it with torch's). transformers knows it as `NAME` after `register()`."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from paceline.formats.shape import Shape

NAME = "paceline_blocks"
BLOCK = 128  # queries


class _BlockAttention(torch.autograd.Function):
    """q [N, G, T, D], where G query heads share a key head; k, v [N, T, D] -> [N, G, T, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        n, group, length, width = q.shape
        outs, all_probs = [], []
        for start in range(0, length, block):
            end = min(start + block, length)
            rows = q[:, :, start:end].reshape(n, -1, width)
            scores = torch.bmm(rows, k[:, :end].transpose(1, 2)).view(n, group, end - start, end)
            seen = torch.arange(end, device=q.device)[None] <= torch.arange(start, end, device=q.device)[:, None]
            scores = torch.where(seen, scores.float() / math.sqrt(width), float("-inf"))
            probs = torch.softmax(scores, -1).to(q.dtype).view(n, -1, end)
            outs.append(torch.bmm(probs, v[:, :end]).view(n, group, end - start, width))
            all_probs.append(probs)
        out = torch.cat(outs, 2)
        ctx.save_for_backward(q, k, v, out, *all_probs)
        ctx.block = block
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, *all_probs = ctx.saved_tensors
        n, group, length, width = q.shape
        d_out = grads[0]
        # Softmax's backward subtracts sum(p dp) of each row, which equals sum(o do).
        inner = (d_out.float() * out.float()).sum(-1, keepdim=True)
        d_out = d_out.to(q.dtype)
        dq: list[Tensor] = []
        dk: list[Tensor] = []
        dv: list[Tensor] = []
        for probs, start in zip(all_probs, range(0, length, ctx.block), strict=True):
            end = min(start + ctx.block, length)
            rows = q[:, :, start:end].reshape(n, -1, width)
            d_rows = d_out[:, :, start:end].reshape(n, -1, width)
            d_probs = torch.bmm(d_rows, v[:, :end].transpose(1, 2)).float()
            d_scores = probs.float() * (d_probs - inner[:, :, start:end].reshape(n, -1, 1)) / math.sqrt(width)
            d_scores = d_scores.to(q.dtype)
            dq.append(torch.bmm(d_scores, k[:, :end]).view(n, group, end - start, width))
            dk.append(torch.bmm(d_scores.transpose(1, 2), rows))
            dv.append(torch.bmm(probs.transpose(1, 2), d_rows))
        return torch.cat(dq, 2), _sum_from_start(dk).to(k.dtype), _sum_from_start(dv).to(v.dtype), None


def _sum_from_start(parts: list[Tensor]) -> Tensor:
    """Sum of [N, T_i, D] aligned at position 0, in float32. Padded, so that a compiler makes it one pass."""
    longest = parts[-1].shape[1]
    total = parts[-1].float()
    for part in parts[:-1]:
        total = total + pad(part, (0, 0, 0, longest - part.shape[1]))
    return total


def block_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention with transformers' signature: query [B, H, T, D], key, value [B, KV, T, D] -> [B, T, H, D]."""
    batch, heads, length, width = query.shape
    shared = key.shape[1]
    cpu = query.device.type
    dtype = torch.get_autocast_dtype(cpu) if torch.is_autocast_enabled(cpu) else query.dtype
    out = _BlockAttention.apply(
        query.reshape(batch * shared, heads // shared, length, width).to(dtype),
        key.reshape(batch * shared, length, width).to(dtype),
        value.reshape(batch * shared, length, width).to(dtype),
        BLOCK,
    )
    return out.reshape(batch, heads, length, width).transpose(1, 2), None


def register() -> str:
    """Register the attention with transformers. Returns the name to set as `attn_implementation`."""
    AttentionInterface.register(NAME, block_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # It is causal by construction.
    return NAME


def use_blocks(*models: Any) -> None:
    """Set this attention in transformers models that are on the CPU."""
    for model in models:
        if next(model.parameters()).device.type == "cpu":
            model.set_attn_implementation(register())


class DecoderLayers(nn.ModuleList):
    """`count` causal layers of a target's shape, without biases; `paceline.draft.models.layers` runs them with a cache.

    Their output projections begin at 0, so that they change nothing at first."""

    def __init__(self, teacher: Any, count: int) -> None:
        shape = Shape.of(teacher.config)
        super().__init__(LlamaDecoderLayer(layer_config(shape), index) for index in range(count))
        layers: list[Any] = list(self)
        with torch.no_grad():
            for layer in layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()

    def forward(self, states: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """States [B, T, H] to states [B, T, H]. turns: cos and sin [1, T, head_dim] of the rotary embedding."""
        for layer in self:
            states = layer(states, position_embeddings=turns)
        return states


def layer_config(shape: Shape) -> LlamaConfig:
    """A Llama whose layers have a target's sizes, and no biases."""
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
    config._attn_implementation = "sdpa"
    return config
