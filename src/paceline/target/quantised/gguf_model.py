"""A GGUF file as a Target: what its facts and names mean, for the families of the native decoder.

    target = load_gguf(Path("model-Q4_K_M.gguf"))

Matrices stay in the blocks that the file has (target/integer.py multiplies them), or are expanded to 16 or 32 bits.
Llama's queries and keys are stored with neighbours that rotate together; whole rows move back, so this is exact. Scaled
positions are read of every kind that these families have: the facts linear and yarn, and Llama 3's as a tensor of
factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from paceline.errors import ModelError, shortened
from paceline.target.checks import check_config
from paceline.target.decoder import Decoder
from paceline.target.quantised import checkpoint as quantised
from paceline.target.quantised.blocks import KINDS, Blocks
from paceline.target.quantised.gguf import GGUF
from paceline.target.quantised.gguf_tokenizer import end_tokens
from paceline.target.shape import unsupported, weight_shapes

FAMILIES = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
"""By general.architecture; Mistral's is llama too."""
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {ours: theirs for theirs, ours in (_OUTER | _INNER).items()}
_FREQUENCIES = "rope_freqs.weight"
_NEUTRAL = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "attn_factor": 1.0}
"""Facts of rope.scaling that change nothing with these values, and are not read with others."""


def load_gguf(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    precision: str | None = "auto",
    device: torch.device | str = "cpu",
    name: str | None = None,
) -> Decoder:
    """The model in a GGUF file, without tokenizer.

    dtype      of everything but the blocks; None: bfloat16 where the processor has units for it, else float32.
    precision  "auto": blocks stay as they are. None: they are expanded to `dtype`. "int8" or "int4": blocks are made of
               a file of 16 or 32 bits.

    Raises ModelError, one line, if it cannot be read or used."""
    file = GGUF(path)
    config = config_of(file)
    weights = weights_of(file, config)
    quantised.refuse_word(path, quantised.describe(weights), precision or "")
    if precision in quantised.WORDS:
        weights = quantised.quantised(quantised.tensors_of(weights), precision)
    elif precision is not None:
        _refuse_unmultiplied(path, weights)
    return Decoder(
        config,
        weights,
        name=name or path.stem,
        dtype=dtype or _own_dtype(weights),
        device=device,
        expand=precision is None,
        eos_token_ids=sorted(end_tokens(file.facts)),
        inverse_frequencies=_frequencies(file, config),
    )


def _refuse_unmultiplied(path: Path, weights: Mapping[str, torch.Tensor | Blocks]) -> None:
    for name, weight in weights.items():
        if isinstance(weight, Blocks) and weight.kind.number not in KINDS:
            raise ModelError(
                f"{path}: {_their_name(name)} is of type {weight.kind.name}, and products are computed of "
                f"{', '.join(kind.name for kind in KINDS.values())}: name a dtype to expand it, such as bfloat16, or "
                "make the file anew, as Q8_0, Q4_0 or Q4_K_M"
            )


def _own_dtype(weights: Mapping[str, torch.Tensor | Blocks]) -> torch.dtype:
    has_units = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    narrow = all(isinstance(w, Blocks) or w.ndim == 1 or w.dtype == torch.bfloat16 for w in weights.values())
    return torch.bfloat16 if has_units and narrow else torch.float32


# What the facts mean -------------------------------------------------------------------------------------------------


def config_of(file: GGUF) -> PretrainedConfig:
    """The configuration that transformers would have. ModelError for what the native decoder does not run."""
    family = file.facts.get("general.architecture")
    if family not in FAMILIES:
        raise ModelError(
            f"{file.path} is of architecture {shortened(repr(family))}, and GGUF files are run of "
            f"{', '.join(FAMILIES)} (Mistral, SmolLM and Vicuna are llama)"
        )
    facts = {key.removeprefix(f"{family}."): value for key, value in file.facts.items() if key.startswith(f"{family}.")}
    if facts.get("expert_count"):
        raise ModelError(f"{file.path} is a mixture of {facts['expert_count']} experts, which the native decoder lacks")
    heads = _fact(file, facts, "attention.head_count")
    size = _fact(file, facts, "embedding_length")
    head_dim = facts.get("attention.key_length", size // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.get(key, head_dim) != head_dim:
            raise ModelError(
                f"{file.path}: {family}.{key} is {facts[key]}, and heads have {head_dim} numbers: not supported"
            )
    if "token_embd.weight" not in file:
        raise ModelError(f"{file.path} has no token_embd.weight: it holds no model, or a part of one")
    values = {
        "vocab_size": file.places["token_embd.weight"].shape[0],
        "hidden_size": size,
        "intermediate_size": _fact(file, facts, "feed_forward_length"),
        "num_hidden_layers": _fact(file, facts, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _fact(file, facts, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _fact(file, facts, "context_length"),
        "tie_word_embeddings": "output.weight" not in file,
        "rope_parameters": _rope(file, facts),
        "attention_bias": "blk.0.attn_q.bias" in file,
        "mlp_bias": "blk.0.ffn_gate.bias" in file,
        "sliding_window": None,
    }
    name = FAMILIES[family]
    if window := facts.get("attention.sliding_window"):
        values["sliding_window"] = window
        name = "MistralConfig" if family == "llama" else name
        values |= {"use_sliding_window": True, "max_window_layers": 0} if family != "llama" else {}
    try:
        config: PretrainedConfig = getattr(transformers, name)(**values)
    except Exception as error:  # transformers checks types in many ways
        raise ModelError(f"{file.path}: its facts make no model: {shortened(' '.join(str(error).split()))}") from error
    check_config(config, file.path)
    if reason := unsupported(config):
        raise ModelError(f"{file.path}: the native decoder cannot run it, {reason}")
    return config


def _fact(file: GGUF, facts: Mapping[str, Any], key: str) -> Any:
    if key not in facts:
        raise ModelError(f"{file.path} does not say its {key}: it was not made for llama.cpp, or is damaged")
    value = facts[key]
    if isinstance(value, list):
        raise ModelError(f"{file.path}: {key} differs from layer to layer, which the native decoder lacks")
    return value


def _rope(file: GGUF, facts: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(facts.get("rope.freq_base", 10000.0))}
    if (factor := facts.get("rope.scale_linear")) not in (None, 1.0):  # as older files say it
        return rope | {"rope_type": "linear", "factor": float(factor)}
    scaling = {key.removeprefix("rope.scaling."): v for key, v in facts.items() if key.startswith("rope.scaling.")}
    kind = scaling.pop("type", "none")
    if kind == "none":
        return rope
    known = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    odd = [key for key, v in scaling.items() if key not in known and key != "finetuned" and _NEUTRAL.get(key) != v]
    if kind not in ("linear", "yarn") or odd:
        what = f"kind {kind!r}" if kind not in ("linear", "yarn") else f"with {', '.join(odd)}"
        raise ModelError(f"{file.path}: positions scaled {what} are not supported; there are linear, yarn and llama3")
    return rope | {"rope_type": kind} | {known[key]: scaling[key] for key in known if key in scaling}


def _frequencies(file: GGUF, config: PretrainedConfig) -> torch.Tensor | None:
    """Llama 3's: the usual ones, each divided by a factor of its own."""
    if _FREQUENCIES not in file:
        return None
    factors, size = file.tensor(_FREQUENCIES), config.head_dim
    if not isinstance(factors, torch.Tensor) or factors.numel() != size // 2:
        raise ModelError(f"{file.path}: {_FREQUENCIES} has the shape {list(factors.shape)}; it should be [{size // 2}]")
    base = dict(config.rope_parameters)["rope_theta"]
    inverse: torch.Tensor = base ** -(torch.arange(0, size, 2).float() / size) / factors.flatten()
    return inverse


# Tensors -------------------------------------------------------------------------------------------------------------


def weights_of(file: GGUF, config: PretrainedConfig) -> dict[str, torch.Tensor | Blocks]:
    """The tensors that the native decoder reads, by the names that a checkpoint gives them."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    permuted = file.facts["general.architecture"] == "llama"
    weights: dict[str, torch.Tensor | Blocks] = {}
    for name, shape in weight_shapes(config).items():
        theirs = _their_name(name)
        if theirs not in file:
            raise ModelError(f"{file.path} lacks {theirs}: it is incomplete, or of a model that is not supported")
        tensor = file.tensor(theirs)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{file.path}: {theirs} has the shape {list(tensor.shape)} where {list(shape)} is needed")
        part = name.split(".")[-2]
        weights[name] = _unpermuted(tensor, heads[part]) if permuted and part in heads else tensor
    return weights


def _their_name(name: str) -> str:
    """A checkpoint's name as GGUF has it."""
    stem, _, end = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{end}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.{end}"


def _unpermuted(tensor: torch.Tensor | Blocks, heads: int) -> torch.Tensor | Blocks:
    """Rows in the order of a checkpoint: the first halves of the pairs that rotate together, then the second."""
    rows = tensor.data if isinstance(tensor, Blocks) else tensor
    moved = rows.reshape(heads, len(rows) // heads // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
    return Blocks(tensor.kind, moved) if isinstance(tensor, Blocks) else moved
