"""A decoder layer of a head: with a geometry, a rotary base and a ragged cache of its own, beside the target's.

What its attention reads and what it is added to are given apart, because heads differ there: EAGLE-1's first layer has
no norm before its attention, EAGLE-3's reads twice the width. Knows no head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from paceline.errors import MethodError
from paceline.target.attention import Attention, TorchOps, attention_shapes
from paceline.target.base import Facts
from paceline.target.cache import RaggedCache, Writer
from paceline.target.decoder import Decoder
from paceline.target.layout import Layout
from paceline.target.linear import linear
from paceline.target.quantised.blocks import Blocks
from paceline.target.quantised.checkpoint import tensors_of
from paceline.target.shape import Shape, rotary_tables, unsupported

_READ = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "vocab_size",
)  # fmt: skip
"""Entries of a head's config.json that say what its layers look like."""


def layer_config(where: Any, config: Mapping[str, Any], target: Facts) -> PretrainedConfig:
    """The configuration of a head's layers from its config.json.

    A missing rope_theta is 10000 whatever the target's is, and a missing head_dim the share of a head: so the
    published heads were trained. Tables reach as far as the target's context. MethodError for layers of another kind
    than the native decoder runs."""
    given = {key: config[key] for key in _READ if config.get(key) is not None}
    missing = [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if key not in given]
    if missing:
        raise MethodError(
            f"{where} does not say {', '.join(missing)} of its layers: it is no head that can be read here"
        )
    given.setdefault("num_hidden_layers", 1)
    given.setdefault("head_dim", given["hidden_size"] // given["num_attention_heads"])
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    family = config.get("model_type", "llama")
    family = family if family in ("mistral", "qwen2", "qwen3") else "llama"
    made = AutoConfig.for_model(
        family, **given, rope_parameters=rope, max_position_embeddings=target.max_context, tie_word_embeddings=False
    )
    if reason := unsupported(made):
        raise MethodError(f"{where}: its layers cannot be run here, {reason}")
    return made


def layer_shapes(shape: Shape, width: int, norms: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Name and shape of a layer's tensors. width: of what its attention reads; norms: names of those before it."""
    h, inner = shape.hidden_size, shape.intermediate_size
    attention = attention_shapes(shape, width)
    biased = ["q_proj", "k_proj", "v_proj"] * shape.qkv_bias + ["o_proj"] * shape.out_bias
    attention |= {f"{name}.bias": attention[f"{name}.weight"][:1] for name in biased}
    if shape.qk_norm:
        attention |= {"q_norm.weight": (shape.head_dim,), "k_norm.weight": (shape.head_dim,)}
    shapes = {f"self_attn.{name}": of for name, of in attention.items()}
    rows = {"gate_proj": (inner, h), "up_proj": (inner, h), "down_proj": (h, inner)}
    shapes |= {f"mlp.{name}.weight": of for name, of in rows.items()}
    if shape.mlp_bias:
        shapes |= {f"mlp.{name}.bias": of[:1] for name, of in rows.items()}
    return shapes | {f"{name}.weight": (h,) for name in (*norms, "post_attention_layernorm")}


class HeadLayer:
    """r + attention(x), and the gated MLP after it.

    weights  of `layer_shapes`, their names after `prefix`."""

    def __init__(self, weights: Mapping[str, torch.Tensor | Blocks], prefix: str, shape: Shape, ops: TorchOps):
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        inner = {name.removeprefix("self_attn."): weight for name, weight in own.items()}
        self.ops = ops
        self.attention = Attention(inner, shape, ops)
        vectors = tensors_of(own)
        self.mlp_norm = vectors["post_attention_layernorm.weight"]
        parts, dtype = ("mlp.gate_proj", "mlp.up_proj"), self.mlp_norm.dtype
        bias = torch.cat([vectors[f"{name}.bias"] for name in parts]) if shape.mlp_bias else None
        self.gate_up = linear([own[f"{name}.weight"] for name in parts], bias, dtype)
        self.down = linear([own["mlp.down_proj.weight"]], vectors.get("mlp.down_proj.bias"), dtype)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, layout: Layout, cache: Writer, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output as two summands, [N, H] each, which the next norm adds; x [N, width], residual [N, H]."""
        residual, h = self.ops.add_norm(residual, self.attention(x, layout, cache, layer), self.mlp_norm)
        return residual, self.down(self.ops.gate(self.gate_up(h)))


def head_ops(config: PretrainedConfig, shape: Shape, target: Facts) -> TorchOps:
    """The elementwise steps for a head's layers, of the kind that the target's run with."""
    kind = type(target.ops) if isinstance(target, Decoder) else TorchOps
    cos, sin = (table.to(target.device, target.dtype) for table in rotary_tables(config, shape))
    return kind(cos, sin, shape.eps)


def head_cache(shape: Shape, target: Facts) -> RaggedCache:
    """An empty cache for a head's layers."""
    return RaggedCache(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, target.max_context, target.dtype, target.device
    )
