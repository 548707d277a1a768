"""Shape: describes a model for the native decoder, by sizes, kinds of layers, names of tensors, and rotary tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from transformers import PretrainedConfig

from paceline.kernels.ops import GELU, SILU, Activation
from paceline.kernels.records import Sizes

STATIC_ROPE = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
"""Kinds of rotary tables that do not depend on the text's length. With longrope this holds up to the length of the
first training, the range of its short factors (`Shape.max_context`)."""
ATTENTION = ("full_attention", "sliding_attention")  # kinds of layers in `layer_types`
DELTA = "linear_attention"  # kind of a layer with the gated delta rule, in `layer_types`
ALL_SLIDING = ("mistral", "phi3", "qwen3_moe")
"""Families without `layer_types` in which all layers have the sliding window."""
OF_LAYERS = {"gemma4_text": {"head_dim", "num_key_value_heads"}}
"""Entries that may differ from layer to layer, by model_type."""
TILED = "linear_value_heads_tiled"  # entry of a configuration that was made of a GGUF file: `Delta.tiled`
ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU}
CHOICE = "e_score_correction_bias"  # biases of a router's choice, which stay in 32 bits
ROUTER, SHARED_GATE = "mlp.gate", "mlp.shared_expert_gate"  # matrices of a mixture of experts
BESIDE = "model.embed_tokens_per_layer"  # table of the vectors that layers get of a token beside its state
UNQUANTISED = (ROUTER, SHARED_GATE, *(f"linear_attn.in_proj_{part}" for part in ("ba", "b", "a")))
"""Matrices of a layer that stay in 16 or 32 bits, because they are small and sensitive."""

Norms = tuple[str | None, str | None, str | None, str | None]
"""Names of a layer's norms: before attention, of attention's output, before the MLP, of the MLP's output."""
PRE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
POST: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
OF_EXPERTS = tuple(f"{part}_feedforward_layernorm_{n}" for part, n in (("post", 1), ("pre", 2), ("post", 2)))
"""Norms of an MLP beside experts: of its output, of their input and of their output."""
BESIDE_GATE, BESIDE_OUT, BESIDE_NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
BOTH: Norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class LayerKind:
    """The properties in which a model's layers differ.

    window     largest number of tokens that a node sees, with itself; None: all before it.
    rope       key of the layer's rotary parameters in the configuration; "": the usual parameters; None: no positions.
    experts    whether the MLP is a mixture of experts.
    recurrent  whether the layer has the gated delta rule (`Delta`) instead of attention.
    sizes      number and size of its key heads, and size of its MLP; None: the model's.
    keys_only  whether its values are its keys before their norm.
    source     number of the layer whose keys and values it reads; None: its own."""

    window: int | None = None
    rope: str | None = ""
    experts: bool = False
    recurrent: bool = False
    sizes: tuple[int, int, int] | None = None
    keys_only: bool = False
    source: int | None = None

    @property
    def has_keys(self) -> bool:
        """Whether the layer writes keys and values."""
        return not self.recurrent and self.source is None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `count` MLPs of inner size `size`. A token uses `chosen` of them.

    normalised  whether the weights of the chosen experts are divided by their sum.
    shared      inner size of a further MLP that all tokens use, weighted by a gate; 0: there is none.
    gated       whether there is this gate.
    beside      whether the layer's own MLP runs beside them, and norms, and factors of inputs and experts with it.
    sigmoid     whether an expert's score is its sigmoid, and the chosen are those with the best sums of scores and
                biases, among the experts of the best `best_groups` of `groups` groups. Else scores are a softmax.
    factor      factor of the weights."""

    count: int
    chosen: int
    size: int
    normalised: bool
    shared: int = 0
    gated: bool = True
    beside: bool = False
    sigmoid: bool = False
    groups: int = 1
    best_groups: int = 1
    factor: float = 1.0


@dataclass(frozen=True)
class Latent:
    """Attention whose queries, and keys with values, are made of latent vectors with `query_rank`, or None, and `rank`
    numbers. Of a head's queries and keys, `turned` numbers rotate; those of a key are the same for all heads.

    pairs  whether numbers that rotate together are neighbours in the checkpoint.
    eps    of the norms of latent vectors."""

    query_rank: int | None
    rank: int
    turned: int
    pairs: bool
    eps: float = 1e-6


@dataclass(frozen=True)
class Delta:
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464): `value_heads` heads, each with a state [key_dim,
    value_dim] of the text so far. Several value heads share the queries and keys of a key head.

    kernel  width in tokens, with the node's own, of the convolution over queries, keys and values.
    joined  whether the checkpoint groups rows by key head, in in_proj_qkvz and in_proj_ba.
    tiled   whether value heads are in the order of GGUF files: the first of each key head, then the second of each.
            Else the value heads of a key head are neighbours.

    keys, values, channels  size of all keys, of all values, and of queries, keys and values together."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    joined: bool
    tiled: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def sizes(self) -> Sizes:
        """The sizes, for compiled code."""
        neighbours = 1 if self.tiled else self.value_heads // self.key_heads
        return Sizes(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.kernel, neighbours)

    @property
    def key_head_of(self) -> torch.Tensor:
        """The key head of each value head, int64 [value_heads]."""
        return torch.arange(self.value_heads) // self.sizes.neighbours % self.key_heads


@dataclass(frozen=True)
class Shape:
    """The sizes and options of a decoder, from a Hugging Face configuration.

    layers           kind of each layer.
    norms            names of a layer's norms. norm_offset: number to add to the checkpoint's weights of norms.
    qk_norm          whether queries and keys have an RMS norm: of each head, or of all together if `qk_norm_whole`.
    v_norm           whether values have an RMS norm without weights.
    sinks            whether the softmax of a head has a score without a value.
    gated            whether attention's output is multiplied by the sigmoid of a gate, which q_proj also computes.
    activation       the function of the MLP's gate.
    fused            whether the checkpoint has the joined matrices qkv_proj and gate_up_proj.
    rotary_dim       number of a head's first dimensions that are rotated; 0: all.
    attention_scale  factor of the products of queries and keys; None: 1 / sqrt(head_dim).
    embedding_scale  factor of the embedding. residual_scale: factor of the outputs of attention and MLP.
    logit_divisor    divisor of the logits. logit_cap: bound of their size, or None.
    beside           size of the vector that each layer gets of a token beside its state; 0: there is none.
    scaled           whether each layer has a factor of its result."""

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
    layers: tuple[LayerKind, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    v_norm: bool = False
    sinks: bool = False
    gated: bool = False
    norms: Norms = PRE
    norm_offset: float = 0.0
    activation: Activation = SILU
    fused: bool = False
    rotary_dim: int = 0
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    beside: int = 0
    scaled: bool = False
    experts: Experts | None = None
    delta: Delta | None = None
    latent: Latent | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> Shape:
        """Read `config`, for which `checks.unsupported` is None."""
        whole, config = config, kinds_of_layers(config)[0]
        bias = bool(getattr(config, "attention_bias", False))
        sizes = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_layers": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "intermediate_size": getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
            "eps": config.rms_norm_eps,
            "max_context": _max_context(config),
            "tied": bool(config.tie_word_embeddings),
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": bool(getattr(config, "mlp_bias", False)),
            "logit_cap": getattr(config, "final_logit_softcapping", None),
            "activation": ACTIVATIONS[activation_of(config)],
        }
        own = FAMILIES[config.model_type](whole)
        return cls(**sizes | {"layers": _layers(config, mixtures="experts" in own)} | own)

    def of_layer(self, kind: LayerKind) -> Shape:
        """The shape with the sizes of a layer."""
        if kind.sizes is None:
            return self
        heads, size, inner = kind.sizes
        return replace(self, num_kv_heads=heads, head_dim=size, intermediate_size=inner)

    @property
    def shared(self) -> int:
        """Largest number of query heads that share a key head."""
        return max(self.num_heads // self.of_layer(kind).num_kv_heads for kind in self.layers)

    @property
    def places(self) -> tuple[int, int]:
        """Number and size of the places for heads in a token's keys in the cache. Larger heads take several places."""
        sizes = {kind.sizes[:2] if kind.sizes else (self.num_kv_heads, self.head_dim) for kind in self.layers}
        size = gcd(*(size for _, size in sizes))
        return max(heads * own // size for heads, own in sizes), size

    @property
    def window(self) -> int | None:
        """The shortest window of the layers; None if no layer has a window."""
        return min((kind.window for kind in self.layers if kind.window is not None), default=None)


def kinds_of_layers(config: PretrainedConfig) -> list[PretrainedConfig]:
    """The configuration, for each layer if entries differ from layer to layer."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def _max_context(config: PretrainedConfig) -> int:
    """Length of the longest text. With longrope it is the range of the short factors, because a longer text would
    rotate all its tokens, also earlier ones, by other angles."""
    ropes = [rope for rope in ropes_of(config) if kind_of_rope(rope) == "longrope"]
    ends = (rope.get("original_max_position_embeddings") for rope in ropes)
    return int(min([config.max_position_embeddings, *(end for end in ends if end is not None)]))


def activation_of(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu"))


def _layers(config: PretrainedConfig, mixtures: bool) -> tuple[LayerKind, ...]:
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    usual = ATTENTION[config.model_type in ALL_SLIDING]
    types = getattr(config, "layer_types", None) or [usual] * count
    rotated = getattr(config, "no_rope_layers", None) or [1] * count
    ropes = dict(getattr(config, "rope_parameters", None) or {})
    kinds = getattr(config, "mlp_layer_types", None)
    dense, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return tuple(
        LayerKind(
            window=window if types[n] == ATTENTION[1] else None,
            rope=None if not rotated[n] else types[n] if types[n] == ATTENTION[1] and types[n] in ropes else "",
            experts=mixtures and n not in dense and (n + 1) % step == 0 and (not kinds or kinds[n] == "sparse"),
            recurrent=types[n] == DELTA,
        )
        for n in range(count)
    )


# Families ------------------------------------------------------------------------------------------------------------


def _gemma3(config: Any) -> dict[str, Any]:
    return {
        "norms": BOTH,
        "norm_offset": 1.0,
        "qk_norm": True,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "embedding_scale": config.hidden_size**0.5,
    }


def _gemma4(config: Any) -> dict[str, Any]:
    mixtures, count = bool(config.enable_moe_block), config.num_hidden_layers
    first_shared = count - config.num_kv_shared_layers
    layers, of_heads = [], {own.head_dim for own in config.per_layer_config}
    for n, kind in enumerate(_layers(config, mixtures)):
        own, inner, source = config.per_layer_config[n], config.intermediate_size, None
        if n >= first_shared:
            source = max(i for i in range(first_shared) if config.layer_types[i] == config.layer_types[n])
            inner *= 2 if config.use_double_wide_mlp else 1
        sizes, keys_only = (own.num_key_value_heads, own.head_dim, inner), config.attention_k_eq_v and not kind.window
        layers.append(replace(kind, sizes=sizes, source=source, keys_only=bool(keys_only)))
    sizes_of_experts = config.num_experts, config.top_k_experts, config.moe_intermediate_size
    experts = {"experts": Experts(*sizes_of_experts, True, beside=True)} if mixtures else {}
    return experts | {
        "layers": tuple(layers),
        "head_dim": max(of_heads),
        "norms": BOTH,
        "qk_norm": True,
        "v_norm": True,
        "attention_scale": 1.0,
        "embedding_scale": config.hidden_size**0.5,
        "beside": config.hidden_size_per_layer_input or 0,
        "scaled": True,
    }


def _granite(config: Any) -> dict[str, Any]:
    return {
        "attention_scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_divisor": config.logits_scaling,
    }


def _rotary_dim(config: Any) -> int:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size * (dict(config.rope_parameters).get("partial_rotary_factor") or 1.0))


def _experts(config: Any, size: int, shared: int = 0) -> Experts:
    normalised = bool(getattr(config, "norm_topk_prob", True))
    return Experts(config.num_experts, config.num_experts_per_tok, size, normalised, shared)


def _glm4_moe_lite(config: Any) -> dict[str, Any]:
    turned, bias = config.qk_rope_head_dim, bool(config.attention_bias)
    routing = {"groups": config.n_group, "best_groups": config.topk_group, "factor": config.routed_scaling_factor}
    sizes = config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size
    shared = config.n_shared_experts * config.moe_intermediate_size
    return {
        "num_kv_heads": config.num_attention_heads,
        "head_dim": config.qk_nope_head_dim + turned,
        "rotary_dim": turned,
        "qkv_bias": bias,
        "latent": Latent(config.q_lora_rank, config.kv_lora_rank, turned, bool(config.rope_interleave)),
        "experts": Experts(*sizes, bool(config.norm_topk_prob), shared, gated=False, sigmoid=True, **routing),
    }


def _gpt_oss(config: Any) -> dict[str, Any]:
    return {
        "sinks": True,
        "mlp_bias": True,
        "activation": Activation(config.swiglu_alpha, limit=config.swiglu_limit, shift=1.0),
        "experts": _experts(config, config.intermediate_size),
    }


def _hybrid(config: Any, joined: bool) -> dict[str, Any]:
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    return {
        "qk_norm": True,
        "norm_offset": 1.0,
        "gated": True,
        "rotary_dim": _rotary_dim(config),
        "delta": Delta(*heads, *sizes, joined, bool(getattr(config, TILED, False))),
    }


def _shared(config: Any) -> dict[str, Any]:
    return {"experts": _experts(config, config.moe_intermediate_size, config.shared_expert_intermediate_size)}


FAMILIES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "llama": lambda _: {},
    "mistral": lambda _: {},
    "qwen2": lambda _: {"qkv_bias": True, "out_bias": False},
    "qwen3": lambda _: {"qk_norm": True},
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "granite": _granite,
    "olmo2": lambda _: {"norms": POST, "qk_norm": True, "qk_norm_whole": True},
    "smollm3": lambda _: {},
    "phi3": lambda c: {"fused": True, "rotary_dim": _rotary_dim(c)},
    "qwen3_moe": lambda c: {"qk_norm": True, "experts": _experts(c, c.moe_intermediate_size)},
    "olmoe": lambda c: {"qk_norm": True, "qk_norm_whole": True, "experts": _experts(c, c.intermediate_size)},
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt_oss": _gpt_oss,
    "qwen3_next": lambda c: _hybrid(c, True) | _shared(c),
    "qwen3_5_text": lambda c: _hybrid(c, False),
    "qwen3_5_moe_text": lambda c: _hybrid(c, False) | _shared(c),
}
"""Fields of `Shape` that a family sets, by the configuration's model_type."""


def ropes_of(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The configuration's rotary parameters: a single dictionary, or a dictionary for each kind of layer."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    nested = [dict(one) for one in rope.values() if isinstance(one, Mapping)]
    return nested or [rope]


def kind_of_rope(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", "default"))


# Weights -------------------------------------------------------------------------------------------------------------


def weight_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint's tensors that the decoder reads."""
    s = Shape.of(config)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (s.vocab_size, s.hidden_size),
        "model.norm.weight": (s.hidden_size,),
    }
    if s.beside:
        every = s.num_layers * s.beside
        shapes[f"{BESIDE}.weight"] = (config.vocab_size_per_layer_input, every)
        shapes["model.per_layer_model_projection.weight"] = (every, s.hidden_size)
        shapes["model.per_layer_projection_norm.weight"] = (s.beside,)
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocab_size, s.hidden_size)
    first = {f"{s.norms[0]}.weight": (s.hidden_size,)} if s.norms[0] else {}
    of = {kind: layer_shapes(s, kind=kind) | first for kind in set(s.layers)}
    layers = ((n, name, size) for n, kind in enumerate(s.layers) for name, size in of[kind].items())
    return shapes | {f"model.layers.{n}.{name}": size for n, name, size in layers}


def layer_shapes(s: Shape, width: int | None = None, kind: LayerKind = LayerKind()) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's tensors, without the norm before its attention.

    width  size of the attention's input; None: the hidden size."""
    s = s.of_layer(kind)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (s.hidden_size,) for name in s.norms[1:] if name}
    h, d = s.hidden_size, s.delta
    if kind.recurrent and d is not None:
        parts = {"qkvz": d.channels + d.values, "ba": 2 * d.value_heads}
        if not d.joined:
            parts = {"qkv": d.channels, "z": d.values, "b": d.value_heads, "a": d.value_heads}
        own = [(f"linear_attn.in_proj_{part}", rows, h, False) for part, rows in parts.items()]
        own.append(("linear_attn.out_proj", h, d.values, False))
        vectors = {"A_log": (d.value_heads,), "dt_bias": (d.value_heads,), "norm.weight": (d.value_dim,)}
        sizes: dict[str, tuple[int, ...]] = {"conv1d.weight": (d.channels, 1, d.kernel), **vectors}
        shapes |= {f"linear_attn.{name}": size for name, size in sizes.items()}
    else:
        own = _attention(s, width or h, shapes, kind)
    if kind.experts and s.experts is not None:
        own.append((ROUTER, s.experts.count, h, s.mlp_bias))
        for number in range(s.experts.count):
            own += _mlp(f"mlp.experts.{number}", h, s.experts.size, s)
        if s.experts.beside:
            own += _mlp("mlp", h, s.intermediate_size, s)
            shapes |= {f"{ROUTER}.scale": (h,), f"{ROUTER}.per_expert_scale": (s.experts.count,)}
            shapes |= {f"{name}.weight": (h,) for name in OF_EXPERTS}
        if s.experts.sigmoid:
            shapes[f"{ROUTER}.{CHOICE}"] = (s.experts.count,)
        if s.experts.shared:
            own += [(SHARED_GATE, 1, h, False)] if s.experts.gated else []
            own += _mlp("mlp.shared_expert", h, s.experts.shared, s)
    else:
        own += _mlp("mlp", h, s.intermediate_size, s)
    if s.beside:
        own += [(BESIDE_GATE, s.beside, h, False), (BESIDE_OUT, h, s.beside, False)]
        shapes[f"{BESIDE_NORM}.weight"] = (h,)
    if s.scaled:
        shapes["layer_scalar"] = (1,)
    for name, rows, columns, bias in own:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def _attention(
    s: Shape, width: int, shapes: dict[str, tuple[int, ...]], kind: LayerKind
) -> list[tuple[str, int, int, bool]]:
    """Name, rows, columns and bias of attention's matrices. Adds the shapes of its vectors to `shapes`."""
    q, kv, h = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.hidden_size
    if (latent := s.latent) is not None:
        shapes["self_attn.kv_a_layernorm.weight"] = (latent.rank,)
        own = [
            ("self_attn.o_proj", h, q, s.out_bias),
            ("self_attn.kv_a_proj_with_mqa", latent.rank + latent.turned, h, s.qkv_bias),
            ("self_attn.kv_b_proj", 2 * kv - s.num_heads * latent.turned, latent.rank, False),
        ]
        if latent.query_rank is None:
            return [*own, ("self_attn.q_proj", q, h, False)]
        shapes["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        of_queries = [("self_attn.q_a_proj", latent.query_rank, h, s.qkv_bias)]
        return [*own, *of_queries, ("self_attn.q_b_proj", q, latent.query_rank, False)]
    if s.qk_norm:
        whole = s.qk_norm_whole
        shapes["self_attn.q_norm.weight"] = (q if whole else s.head_dim,)
        shapes["self_attn.k_norm.weight"] = (kv if whole else s.head_dim,)
    if s.sinks:
        shapes["self_attn.sinks"] = (s.num_heads,)
    out = ("self_attn.o_proj", h, q, s.out_bias)
    if s.fused:
        return [out, ("self_attn.qkv_proj", q + 2 * kv, width, s.qkv_bias)]
    rows = {"q": 2 * q if s.gated else q}
    if kind.source is None:
        rows |= {"k": kv} if kind.keys_only else {"k": kv, "v": kv}
    else:
        shapes.pop("self_attn.k_norm.weight", None)
    return [out, *((f"self_attn.{part}_proj", count, width, s.qkv_bias) for part, count in rows.items())]


def _mlp(start: str, h: int, m: int, s: Shape) -> list[tuple[str, int, int, bool]]:
    down = (f"{start}.down_proj", h, m, s.mlp_bias)
    if s.fused:
        return [(f"{start}.gate_up_proj", 2 * m, h, s.mlp_bias), down]
    return [(f"{start}.gate_proj", m, h, s.mlp_bias), (f"{start}.up_proj", m, h, s.mlp_bias), down]
