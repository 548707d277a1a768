"""What the native decoder reads from a model's configuration: sizes, names of tensors, rotary tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary tables that are the same for texts of any length."""


@dataclass(frozen=True)
class Shape:
    """The sizes and options of a decoder, from a Hugging Face configuration."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    max_context: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    window: int | None

    @classmethod
    def of(cls, config: PretrainedConfig) -> Shape:
        """Read `config`; call `unsupported` first."""
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            eps=config.rms_norm_eps,
            max_context=config.max_position_embeddings,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=attention_bias or config.model_type == "qwen2",
            out_bias=attention_bias and config.model_type != "qwen2",
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=config.model_type == "qwen3",
            window=_window(config),
        )


def _window(config: PretrainedConfig) -> int | None:
    """The sliding window of all layers, or None."""
    types = set(getattr(config, "layer_types", None) or ())
    if types == {"full_attention"} or (config.model_type != "mistral" and not types):
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def unsupported(config: PretrainedConfig) -> str | None:
    """Why the native decoder cannot run this configuration, in a few words; None if it can."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    rope = dict(getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        return f"rope type {rope!r} is not one of {', '.join(STATIC_ROPE)}"
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        return "its layers use different kinds of attention"
    activation = getattr(config, "hidden_act", "silu")
    if activation != "silu":
        return f"activation {activation!r} is not 'silu'"
    return None


def weight_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint's tensors that the decoder reads."""
    s = Shape.of(config)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (s.vocab_size, s.hidden_size),
        "model.norm.weight": (s.hidden_size,),
    }
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocab_size, s.hidden_size)
    layer = layer_shapes(s) | {"input_layernorm.weight": (s.hidden_size,)}
    return shapes | {f"model.layers.{n}.{name}": shape for n in range(s.num_layers) for name, shape in layer.items()}


def layer_shapes(s: Shape, width: int | None = None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's tensors, without the norm before its attention.

    width  that of the attention's input, if not the hidden size."""
    q, kv, h, m = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.hidden_size, s.intermediate_size
    products = [
        ("self_attn.q_proj", q, width or h, s.qkv_bias),
        ("self_attn.k_proj", kv, width or h, s.qkv_bias),
        ("self_attn.v_proj", kv, width or h, s.qkv_bias),
        ("self_attn.o_proj", h, q, s.out_bias),
        ("mlp.gate_proj", m, h, s.mlp_bias),
        ("mlp.up_proj", m, h, s.mlp_bias),
        ("mlp.down_proj", h, m, s.mlp_bias),
    ]
    shapes: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (h,)}
    for name, rows, columns, bias in products:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if s.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (s.head_dim,)
    return shapes


def rotary_tables(
    config: PretrainedConfig, shape: Shape, inverse: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, float32 [max_context + 1, head_dim]; the first half of sin is negated.

    inverse  frequencies [head_dim / 2], instead of the configuration's."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    kind, scale = parameters.get("rope_type", "default"), 1.0
    if inverse is not None:
        pass
    elif kind == "default":
        base = parameters.get("rope_theta", 10000.0)
        inverse = base ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    else:
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angle = torch.outer(torch.arange(shape.max_context + 1).float(), inverse.float().cpu())
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
