"""Small Llamas with random weights."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama; the default is the demo target, 13 million parameters, 27 MB in bfloat16. Heads are 64
    wide, which vLLM's CPU attention takes too."""

    hidden: int = 384
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 768
    positions: int = 2048
    rope_theta: float = 10000.0


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
