"""Models of the native decoder's families in GGUF files. Matrices stay in the file's blocks, or are expanded.

Every fault is a ModelError of one line."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from paceline.errors import ModelError, shortened
from paceline.formats.checkpoint import Checkpoint
from paceline.formats.checks import check_config, check_limits, check_shapes, unsupported
from paceline.formats.configurations import import_checks
from paceline.formats.folder import fingerprint, sampling
from paceline.formats.gguf_file import GGUF
from paceline.formats.place import one_line
from paceline.formats.rotary import row_order
from paceline.formats.shape import ATTENTION, DELTA, SHARED_GATE, TILED, Delta, Shape, weight_shapes
from paceline.kernels.blocks import Blocks, Weights, tensors_of, within

FAMILIES = {
    "llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "gemma3": "Gemma3TextConfig",
    "gemma4": "Gemma4TextConfig",
    "granite": "GraniteConfig", "olmo2": "Olmo2Config", "smollm3": "SmolLM3Config", "phi3": "Phi3Config",
    "qwen3moe": "Qwen3MoeConfig", "olmoe": "OlmoeConfig", "gpt-oss": "GptOssConfig",
    "deepseek2": "Glm4MoeLiteConfig",
    "qwen35": "Qwen3_5TextConfig", "qwen35moe": "Qwen3_5MoeTextConfig", "qwen3next": "Qwen3_5MoeTextConfig",
}  # fmt: skip
"""transformers' configurations by general.architecture. Mistral is "llama", too. A Qwen 3 Next in a file is a Qwen 3.5,
because its file has apart what its folder joins. Of deepseek2, those files are run that a GLM 4.7 Flash can be."""
_TILED = ("qwen35", "qwen35moe")
"""Architectures whose files order value heads as `Delta.tiled` says."""
_PAIRED = ("llama", "granite", "smollm3")
"""Architectures whose files store the dimensions that rotate together side by side."""
_EXPERTS: dict[str, Any] = {"num_experts": ("expert_count", None), "num_experts_per_tok": ("expert_used_count", None)}
_SHARED = {
    "moe_intermediate_size": ("expert_feed_forward_length", None),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", None),
}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": ("ssm.group_count", None),
    "linear_num_value_heads": ("ssm.time_step_rank", None),
    "linear_key_head_dim": ("ssm.state_size", None),
    "linear_conv_kernel_dim": ("ssm.conv_kernel", None),
}
_OWN_KEYS: dict[str, dict[str, Any]] = {
    "granite": {
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "attention_multiplier": ("attention.scale", 0.0),
        "logits_scaling": ("logit_scale", 1.0),
    },
    "qwen3moe": _EXPERTS | {"moe_intermediate_size": ("expert_feed_forward_length", None)},
    **dict.fromkeys(("olmoe", "gpt-oss"), _EXPERTS),
    "gemma4": {
        "num_experts": ("expert_count", 0),
        "top_k_experts": ("expert_used_count", 0),
        "moe_intermediate_size": ("expert_feed_forward_length", 0),
        "num_kv_shared_layers": ("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": ("embedding_length_per_layer_input", 0),
    },
    "deepseek2": {
        "q_lora_rank": ("attention.q_lora_rank", 0),
        "kv_lora_rank": ("attention.kv_lora_rank", None),
        "qk_rope_head_dim": ("rope.dimension_count", None),
        "n_routed_experts": ("expert_count", None),
        "num_experts_per_tok": ("expert_used_count", None),
        "n_shared_experts": ("expert_shared_count", None),
        "moe_intermediate_size": ("expert_feed_forward_length", None),
        "routed_scaling_factor": ("expert_weights_scale", 1.0),
        "norm_topk_prob": ("expert_weights_norm", False),
        "n_group": ("expert_group_count", 1),
        "topk_group": ("expert_group_used_count", 1),
    },
    "qwen35": _DELTA,
    **dict.fromkeys(("qwen35moe", "qwen3next"), _DELTA | _EXPERTS | _SHARED),
}
"""Entries of a configuration by architecture: the file's key, and its default. None: the file must have the key."""
FREQUENCIES = "rope_freqs.weight"
_FACTORS = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Keys of rope.scaling, and transformers' names for them."""
_NOT_RUN = {
    "attention.causal": True, "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
}  # fmt: skip
"""Metadata that the decoder cannot follow, with the values that have no effect; other values are refused."""
_NEUTRAL = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "attn_factor": 1.0}
"""Keys of rope.scaling with the values that have no effect; other values are refused."""
_SIGMOID = 2  # expert_gating_func of scores that are sigmoids
CONTROL = 3  # type of tokens without text
_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>",
    "<turn|>",
})  # fmt: skip
_ASKS = "<|tool_response>"  # ends an answer of Gemma 4 that calls a tool, though files do not call it a control token
_HARMONY = frozenset({"<|return|>", "<|call|>", "<|endoftext|>"})
"""Texts of control tokens that end an answer, as in llama.cpp. In a vocabulary with <|return|>, <|end|> ends a part of
an answer."""


def checkpoint_of(file: GGUF) -> Checkpoint:
    """The model in a GGUF file, without its tokenizer. ModelError if it cannot be used."""
    config = config_of(file)
    weights = weights_of(file, config)
    ends, frequencies = sorted(end_tokens(file.metadata)), _frequencies(file, config)
    return Checkpoint(
        file.path.stem, config, weights, ends, fingerprint(weights), None, frequencies, sampling_of(file)
    )  # fmt: skip


def sampling_of(file: GGUF) -> dict[str, float]:
    """The values of SamplingParams that the file recommends."""
    facts = within(file.metadata, "general.sampling.")
    named = facts | {"temperature": facts.get("temp"), "repetition_penalty": facts.get("penalty_repeat")}
    plain = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in named.items()}
    return sampling(plain, file.path)


def end_tokens(facts: Mapping[str, Any]) -> set[int]:
    """Tokens that end an answer: the end tokens in the metadata, and control tokens with certain texts."""
    facts = within(facts, "tokenizer.ggml.")
    named = [facts.get(f"{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens, types = (found if isinstance(found := facts.get(key), list) else [] for key in ("tokens", "token_type"))
    texts = _HARMONY if "<|return|>" in tokens else _ENDS
    kinds = enumerate(zip(tokens, types, strict=False))
    known = {i for i, (text, kind) in kinds if (kind == CONTROL and text in texts) or text == _ASKS}
    return {i for i in named if isinstance(i, int)} | known


# The configuration ---------------------------------------------------------------------------------------------------


def config_of(file: GGUF) -> PretrainedConfig:
    """Make the model's transformers configuration. ModelError for a model that the native decoder does not run."""
    family = file.family
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(
            f"{file.path} is of architecture {shortened(repr(family))}, and GGUF files are run of "
            f"{', '.join(FAMILIES)} (Mistral, SmolLM and Vicuna are llama; docs/models.md)"
        )
    facts = within(file.metadata, f"{family}.")
    if family == "gemma4":
        facts = _of_first_layer(facts)
    elif family == "deepseek2":
        facts = _of_latent(file, facts)
    experts = {theirs for theirs, _ in _OWN_KEYS.get(family, {}).values()}
    if facts.get("expert_count") and "expert_count" not in experts:
        raise ModelError(f"{file.path} is a mixture of {facts['expert_count']} experts, which the native decoder lacks")

    if odd := [f"{key} {facts[key]}" for key, value in _NOT_RUN.items() if facts.get(key, value) != value]:
        raise ModelError(f"{file.path} has {shortened(', '.join(odd))}, which the native decoder does not run")

    def number(key: str, default: Any = None) -> Any:
        """Read a number, or a list with the same number for each layer; a whole one if the default is whole. ModelError
        for other values, or if the key is missing and has no default."""
        value = default if facts.get(key) is None else facts[key]
        if value is None:
            raise ModelError(f"{file.path} does not say its {key}: it was not made for llama.cpp, or is damaged")
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if isinstance(value, list):
            raise ModelError(f"{file.path}: {key} differs from layer to layer, which the native decoder lacks")
        whole = isinstance(default, int)
        if not isinstance(value, int if whole else (int, float)):
            wanted = "a whole number" if whole else "a number"
            raise ModelError(f"{file.path}: {key} is {shortened(repr(value))}; it must be {wanted}")
        return value

    heads, size = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", size // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        partly = key == "rope.dimension_count" and (
            family in ("phi3", "deepseek2") or "ssm.group_count" in facts
        )
        if number(key, head_dim) != head_dim and not partly:
            raise ModelError(
                f"{file.path}: {family}.{key} is {facts[key]}, and heads have {head_dim} numbers: not supported"
            )
    if "token_embd.weight" not in file.places:
        raise ModelError(f"{file.path} has no token_embd.weight: it holds no model, or a part of one")
    values = {
        "vocab_size": file.places["token_embd.weight"].shape[0],
        "hidden_size": size,
        "intermediate_size": number("feed_forward_length", facts.get("expert_feed_forward_length")),
        "num_hidden_layers": number("block_count") - number("nextn_predict_layers", 0),  # The head's layers come last.
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": number("context_length"),
        "tie_word_embeddings": "output.weight" not in file.places,
        "rope_parameters": rope_of(
            file, facts, float(number("rope.freq_base", 10000.0)), float(number("rope.scale_linear", 1.0))
        ),
        "attention_bias": "blk.0.attn_q.bias" in file.places,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.places,
        "sliding_window": None,
    }
    name = FAMILIES[family]
    if window := number("attention.sliding_window", 0):
        values["sliding_window"] = window
        name = "MistralConfig" if family == "llama" else name
        values |= {"use_sliding_window": True, "max_window_layers": 0} if family != "llama" else {}
    values |= {key: number(theirs, default) for key, (theirs, default) in _OWN_KEYS.get(family, {}).items()}
    check_limits(values.get, file.path, is_native=False)
    if (layers := values["num_hidden_layers"]) > len(file.places):
        raise ModelError(f"{file.path} says that it has {layers} layers, and it has {len(file.places)} tensors")
    if family == "gpt-oss":
        values["rope_parameters"] |= {"truncate": False}  # Its files cannot say this.
    elif family == "qwen3moe":
        values["norm_topk_prob"] = True
    elif family == "granite":
        values["attention_multiplier"] = values["attention_multiplier"] or head_dim**-0.5
    elif family == "gemma3":
        values |= _gemma3(facts, number, values)
    elif family == "gemma4":
        values |= _gemma4(file, facts, number, values)
    elif family == "deepseek2":
        values |= _latent(facts, number, values)
    elif _OWN_KEYS.get(family, {}).keys() >= _DELTA.keys():
        values |= _hybrid(facts, number, values) | {TILED: family in _TILED}
        values["rope_parameters"] |= {"partial_rotary_factor": number("rope.dimension_count", head_dim) / head_dim}
    elif family == "phi3":
        turned = number("rope.dimension_count", head_dim) / head_dim
        scale = number("rope.scaling.attn_factor") if "rope.scaling.attn_factor" in facts else None
        values["rope_parameters"] |= {"partial_rotary_factor": turned} | _longrope(file, scale)
        original = number("rope.scaling.original_context_length", values["max_position_embeddings"])
        values["original_max_position_embeddings"] = original
    import_checks()
    try:
        config: PretrainedConfig = getattr(transformers, name)(**values)
    except Exception as error:  # transformers checks types and raises many errors
        raise ModelError(f"{file.path}: its facts make no model: {shortened(one_line(error))}") from None
    check_config(config, file.path)
    if reason := unsupported(config) or (window and not Shape.of(config).window and "a window is new in its family"):
        raise ModelError(f"{file.path}: the native decoder cannot run it, {reason}")
    return config


def rope_of(file: GGUF, facts: Mapping[str, Any], theta: float, scale: float) -> dict[str, Any]:
    """Make transformers' rope_parameters for unscaled, linear and yarn positions. (Llama 3's factors are a tensor.)"""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scale != 1.0:  # Older files have this key.
        return rope | {"rope_type": "linear", "factor": scale}
    scaling = within(facts, "rope.scaling.")
    kind = scaling.pop("type", "none")
    if kind == "none":
        return rope
    scaling.pop("finetuned", None)
    odd = [
        key
        for key, value in scaling.items()
        if (not isinstance(value, (int, float)) if key in _SCALING else _NEUTRAL.get(key) != value)
    ]
    if kind not in ("linear", "yarn") or odd:
        what = f"kind {kind!r}" if kind not in ("linear", "yarn") else f"with {', '.join(odd)}"
        raise ModelError(f"{file.path}: positions scaled {what} are not supported; there are linear, yarn and llama3")
    return rope | {"rope_type": kind} | {_SCALING[key]: scaling[key] for key in _SCALING if key in scaling}


def _gemma3(facts: Mapping[str, Any], number: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Add entries that files of Gemma 3 leave out: the layers with a window, and the 27B's scale of attention."""
    layers, slides = values["num_hidden_layers"], facts.get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        period = max(int(number("attention.sliding_window_pattern", 6)), 1)
        slides = [bool((layer + 1) % period) for layer in range(layers)]
    local = {"rope_type": "default", "rope_theta": float(number("rope.freq_base_swa", 10000.0))}
    size = values["hidden_size"] // values["num_attention_heads"] if layers == 62 else values["head_dim"]
    return {
        "layer_types": [ATTENTION[bool(one) and values["sliding_window"] is not None] for one in slides],
        "rope_parameters": dict(zip(ATTENTION, (values["rope_parameters"], local), strict=True)),
        "query_pre_attn_scalar": size,
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
    }


def _of_first_layer(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A Gemma 4's facts, with those of layers with a window where layers differ; the others by keys that end in
    "_all"."""
    made = {**facts}
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        made[key], made[f"{key}_all"] = facts.get(f"{key}_swa", facts.get(key)), facts.get(key)
    for key in ("attention.head_count_kv", "feed_forward_length"):
        found = facts.get(key)
        if isinstance(found, list) and found:
            made[key], made[f"{key}_all"] = found[0], found[-1]
    return made


def _gemma4(
    file: GGUF, facts: Mapping[str, Any], number: Callable[..., Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The entries in which a Gemma 4's layers differ, and those of tokens' vectors and of experts."""
    slides, kept = facts.get("attention.sliding_window_pattern"), values["num_hidden_layers"]
    if not isinstance(slides, list):
        raise ModelError(f"{file.path} does not say which layers have a window: it was not made for llama.cpp")
    size = number("attention.key_length_all", values["head_dim"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := number(f"{key}_all", size)) != size:
            raise ModelError(f"{file.path}: gemma4.{key} is {found}, and heads have {size} numbers: not supported")
    factors = file.tensor(FREQUENCIES) if FREQUENCIES in file.places else torch.ones(size // 2)
    if not isinstance(factors, torch.Tensor) or factors.numel() != size // 2:
        raise ModelError(f"{file.path}: {FREQUENCIES} has the shape {list(factors.shape)}; it should be [{size // 2}]")
    turned = float((factors < 2).float().mean())  # Files give what does not turn a factor of 1e30.
    full = {"rope_type": "proportional", "partial_rotary_factor": turned} | {
        "rope_theta": values["rope_parameters"]["rope_theta"]
    }
    local = {"rope_type": "default", "rope_theta": float(number("rope.freq_base_swa", 10000.0))}
    own = range(kept - values["num_kv_shared_layers"])
    inner, last = values["intermediate_size"], number("feed_forward_length_all", values["intermediate_size"])
    table = file.places.get("per_layer_token_embd.weight")
    return {
        "layer_types": [ATTENTION[bool(one)] for one in slides[:kept]],
        "rope_parameters": dict(zip(ATTENTION, (full, local), strict=True)),
        "global_head_dim": size,
        "num_global_key_value_heads": number("attention.head_count_kv_all", values["num_key_value_heads"]),
        "attention_k_eq_v": any(f"blk.{n}.attn_v.weight" not in file.places for n in own),
        "use_double_wide_mlp": last == 2 * inner,
        "vocab_size_per_layer_input": table.shape[0] if table else values["vocab_size"],
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
        "enable_moe_block": values["num_experts"] > 0,
    } | {key: values[key] or None for key in ("num_experts", "top_k_experts", "moe_intermediate_size")}


def _of_latent(file: GGUF, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of latent attention, with the sizes of a head's keys and values before they were made latent. ModelError
    for a file that is no GLM 4.7 Flash."""
    if "attention.key_length_mla" not in facts:
        raise ModelError(f"{file.path} has no attention.key_length_mla: it is of an old converter; convert it anew")
    scored = any(name.endswith(".exp_probs_b.bias") for name in file.places)  # Early files do not say the function.
    plain = facts.get("rope.scaling.type", "none") == "none"
    if not (scored and plain and facts.get("expert_gating_func", _SIGMOID) == _SIGMOID):
        raise ModelError(f"{file.path} is a DeepSeek; of deepseek2, GLM 4.7 Flash is run")
    lengths = {f"attention.{part}_length": facts.get(f"attention.{part}_length_mla") for part in ("key", "value")}
    return {**facts, **lengths}


def _latent(facts: Mapping[str, Any], number: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    layers, dense = values["num_hidden_layers"], number("leading_dense_block_count", 0)
    return {
        "num_key_value_heads": values["num_attention_heads"],
        "q_lora_rank": values["q_lora_rank"] or None,
        "head_dim": values["qk_rope_head_dim"],
        "qk_nope_head_dim": values["head_dim"] - values["qk_rope_head_dim"],
        "v_head_dim": number("attention.value_length"),
        "norm_topk_prob": bool(values["norm_topk_prob"]),
        "mlp_layer_types": ["dense" if n < dense else "sparse" for n in range(layers)],
        "rope_interleave": True,
    }


def _hybrid(facts: Mapping[str, Any], number: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The width of value heads, and which layers have a state: those of a list, or all but every fourth or so."""
    states, layers = facts.get("attention.recurrent_layers"), values["num_hidden_layers"]
    if not isinstance(states, list):
        period = max(int(number("full_attention_interval", 4)), 1)
        states = [(layer + 1) % period != 0 for layer in range(layers)]
    return {
        "layer_types": [DELTA if one else ATTENTION[0] for one in states[:layers]],
        "linear_value_head_dim": number("ssm.inner_size") // max(values["linear_num_value_heads"], 1),
    }


def _longrope(file: GGUF, scale: float | None) -> dict[str, Any]:
    """Phi's factors of the rotary frequencies; empty if the file has none."""
    found = tensors_of({_FACTORS[name]: file.tensor(name) for name in _FACTORS if name in file.places})
    named: dict[str, Any] = {name: factors.tolist() for name, factors in found.items()}
    return named and {"rope_type": "longrope", "attention_factor": scale, **named}


def _frequencies(file: GGUF, config: PretrainedConfig) -> torch.Tensor | None:
    """Llama 3's inverse frequencies, which are the usual ones divided by the file's factors; None without factors."""
    if FREQUENCIES not in file.places or file.family == "gemma4":
        return None
    factors, size = file.tensor(FREQUENCIES), config.head_dim
    if not isinstance(factors, torch.Tensor) or factors.numel() != size // 2:
        raise ModelError(f"{file.path}: {FREQUENCIES} has the shape {list(factors.shape)}; it should be [{size // 2}]")
    base = dict(config.rope_parameters)["rope_theta"]
    inverse: torch.Tensor = base ** -(torch.arange(0, size, 2).float() / size) / factors.flatten()
    return inverse


# Tensors -------------------------------------------------------------------------------------------------------------


def weights_of(file: GGUF, config: PretrainedConfig) -> Weights:
    """Map the tensors that the native decoder reads, by their names in a checkpoint."""
    s = Shape.of(config)
    weights, used = tensors_in(file, s, weight_shapes(config))
    shared = [n for n, kind in enumerate(s.layers) if kind.source is not None]
    unread = {f"blk.{n}.attn_{part}.weight" for n in shared for part in ("k", "v", "k_norm")}
    known = {*used, *unread, FREQUENCIES, *(_FACTORS if file.family == "phi3" else ())}
    heads = int(file.metadata.get(f"{file.family}.nextn_predict_layers") or 0)
    starts = tuple(f"blk.{s.num_layers + n}." for n in range(heads))  # heads of multi-token prediction
    if others := sorted(name for name in file.places.keys() - known if not name.startswith(starts)):
        raise ModelError(
            f"{file.path} has {shortened(others[0])}, and {len(others) - 1} more that a {file.family} of "
            f"{s.num_layers} layers does not have: its facts are wrong, or it is of a model that is not supported"
        )
    return weights


def tensors_in(file: GGUF, s: Shape, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Weights, set[str]]:
    """Map the tensors with these names and shapes in a checkpoint of shape `s`. Returns them, and their names in the
    file. ModelError if a tensor is missing or has another shape."""
    weights = Weights()
    heads = {"q_proj": s.num_heads, "k_proj": s.num_kv_heads} if file.family in _PAIRED else {}
    parts = {name: _parts_of_latent(s, name) for name in shapes if ".kv_b_proj." in name}
    stored = {name: _stored(file, s, name, shape) for name, shape in shapes.items() if name not in parts}
    wanted = {one.name: one.shape for one in (*stored.values(), *(part for two in parts.values() for part in two))}
    found = {name: place.shape for name, place in file.places.items()}
    check_shapes(file.path, wanted, found, s.num_layers, "metadata")
    for name, (keys, values) in parts.items():
        key, value = (_dense(file.tensor(part.name)).view(part.shape) for part in (keys, values))
        weights[name] = torch.cat([key.transpose(1, 2), value], 1).flatten(0, 1)
    for name, shape in shapes.items():
        if name in parts:
            continue
        tensor = file.tensor(stored[name].name)
        if (own := stored[name].rows) is not None:
            tensor = tensor.rows(own) if isinstance(tensor, Blocks) else tensor.reshape(-1, *shape[1:])[own]
        part = name.split(".")[-2]
        if part in heads:
            tensor = unpermuted(tensor, heads[part])
        if isinstance(tensor, torch.Tensor):
            tensor = tensor.view(shape)
            if name.endswith(".A_log"):
                tensor = (-tensor.double()).log().float()  # Files store -exp(A_log).
            elif s.norm_offset and part.endswith("norm") and ".linear_attn." not in name:
                tensor = tensor - s.norm_offset  # Files store the sum.
        weights[name] = tensor
    return weights, {*wanted}


@dataclass(frozen=True)
class _Stored:
    """Where a file has a checkpoint's tensor: the name and shape of its own, and which rows of it; None: all."""

    name: str
    shape: tuple[int, ...]
    rows: torch.Tensor | slice | None = None


def _dense(tensor: torch.Tensor | Blocks) -> torch.Tensor:
    return tensor.float() if isinstance(tensor, torch.Tensor) else tensor.dense()


def _parts_of_latent(s: Shape, name: str) -> tuple[_Stored, _Stored]:
    """Where a file has the two parts of a matrix that makes keys and values of latent vectors. The first is stored
    with rows and columns exchanged."""
    assert s.latent is not None
    layer, still = name.split(".")[2], s.head_dim - s.latent.turned
    keys = _Stored(f"blk.{layer}.attn_k_b.weight", (s.num_heads, s.latent.rank, still))
    return keys, _Stored(f"blk.{layer}.attn_v_b.weight", (s.num_heads, s.head_dim, s.latent.rank))


def _stored(file: GGUF, s: Shape, name: str, shape: tuple[int, ...]) -> _Stored:
    theirs = tensor_name(file.family, name) or name
    if (expert := re.search(r"(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj(\..*)", name)) and s.experts is not None:
        layer, part, end = expert[1], expert[3], expert[4]
        number, joined = int(expert[2]), f"blk.{layer}.ffn_gate_up_exps{end}"
        theirs = f"blk.{layer}.ffn_{part}_exps{end}"
        parts = ("gate", "up") if joined in file.places and part != "down" else (part,)
        first = (number * len(parts) + parts.index(part)) * shape[0]
        rows, stack = slice(first, first + shape[0]), (s.experts.count, len(parts) * shape[0], *shape[1:])
        return _Stored(joined if parts[1:] else theirs, stack, rows)
    if file.family == "qwen3next" and (decays := re.search(r"(.*)\.in_proj_([ba])\.weight", name)):
        assert s.delta is not None
        order = row_order(replace(s, delta=replace(s.delta, joined=True)), "in_proj_ba")
        assert order is not None
        own = order.view(2, -1)["ba".index(decays[2])]
        return _Stored(str(tensor_name(file.family, f"{decays[1]}.in_proj_ba.weight")), (2 * shape[0], shape[1]), own)
    if name.endswith(f".{SHARED_GATE}.weight") and theirs in file.places and len(file.places[theirs].shape) == 1:
        return _Stored(theirs, shape[1:])
    return _Stored(theirs, (shape[0], *shape[2:]) if len(shape) == 3 else shape)


_SUFFIXED = {
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias", "self_attn.sinks": "self_attn.sinks.weight",
    "layer_scalar": "layer_scalar.weight", "e_score_correction_bias": "e_score_correction.bias",
    "mlp.gate.per_expert_scale": "mlp.experts.down_proj.scale",
}  # fmt: skip
"""Names of vectors that have another suffix in files."""
_SUFFIXES = (".weight", ".bias", ".scale")


def tensor_name(architecture: str, name: str) -> str | None:
    """GGUF's name for a checkpoint's tensor; None if the architecture lacks it. Experts' matrices share a tensor."""
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    for ours, theirs in _SUFFIXED.items():
        name = name.replace(ours, theirs)
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is None:
        return _names(architecture).get_name(name, _SUFFIXES)
    first = _names(architecture).get_name(f"model.layers.0.{name[layer.end() :]}", _SUFFIXES)
    return first and first.replace("blk.0.", f"blk.{layer[1]}.", 1)


@cache
def _names(architecture: str) -> Any:
    """GGUF's names for tensors in layer 0 and outside of layers."""
    import gguf  # imported here, because most models are no GGUF files

    (known,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(known, 1)


def unpermuted(tensor: torch.Tensor | Blocks, heads: int) -> torch.Tensor | Blocks:
    """Restore the checkpoint's order of rows. Of dimensions that rotate in pairs, files of the Llama family store the
    two side by side; checkpoints store first those that come first, then the others. Whole rows move, so this is
    exact."""
    rows = tensor.data if isinstance(tensor, Blocks) else tensor
    moved = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)
    return Blocks(tensor.kind, moved) if isinstance(tensor, Blocks) else moved


def untiled(name: str, weight: torch.Tensor, delta: Delta) -> torch.Tensor:
    """Restore the checkpoint's order of value heads in a tensor of a file whose heads are tiled (`Delta.tiled`)."""
    heads = torch.arange(delta.value_heads).view(-1, delta.key_heads).T.reshape(-1, 1)
    each, wide = heads.flatten(), (heads * delta.value_dim + torch.arange(delta.value_dim)).flatten()
    mixed = torch.cat([torch.arange(2 * delta.keys), 2 * delta.keys + wide])
    part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    if part == "out_proj":
        return weight[:, wide]
    rows = {"in_proj_qkv": mixed, "conv1d": mixed, "in_proj_z": wide}
    rows |= dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), each)
    return weight[rows[part]] if part in rows else weight
