"""Small Llamas: made with random weights, and written as model folders that transformers reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama; the default is the demo target, 13 million parameters, 27 MB in bfloat16.

    Heads are 64 wide: vLLM's CPU attention takes 32, 64, 80, 96, 112 and 128, and half as many heads need half the
    work in the softmax.
    """

    hidden: int = 384
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 768
    positions: int = 2048
    rope_theta: float = 10000.0


DRAFT = ModelConfig(hidden=128, layers=3, heads=2, kv_heads=1, intermediate=384)
"""A draft model of 1.6 million parameters: an eighth of the demo target's, and three layers to its eight."""


def new_llama(shape: ModelConfig, seed: int, **settings: Any) -> LlamaForCausalLM:
    """Random weights, tied embeddings. settings: of `LlamaConfig`, the vocabulary's size and the special tokens."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "tie_word_embeddings": True,
        "max_position_embeddings": shape.positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }
    return LlamaForCausalLM(LlamaConfig(**config | settings))


def save_llama(
    network: LlamaForCausalLM, out: Path, dtype: torch.dtype, generation: GenerationConfig | None = None
) -> None:
    """Write config.json, model.safetensors and generation_config.json; the model in memory keeps its precision."""
    weights = {name: p.detach().to(dtype) for name, p in network.named_parameters()}  # tied weights once
    config = network.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    copy: Any = LlamaForCausalLM(LlamaConfig.from_dict(config))
    copy.to(dtype=dtype)
    copy.load_state_dict(weights, strict=False)
    copy.tie_weights()
    if generation is not None:
        copy.generation_config = generation
    out.mkdir(parents=True, exist_ok=True)
    copy.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
