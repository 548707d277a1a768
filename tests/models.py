"""Small random models of every family, saved as Hugging Face folders with a tiny tokenizer.

    folder = make("qwen3", tmp_path)          # config.json, model.safetensors, tokenizer files

Weights are far larger than a fresh initialisation would make them, and biases and norms are random too: logits vary
by whole units from token to token, so a wrong mask, position or bias cannot hide below a tolerance.
"""

from __future__ import annotations

import atexit
import pickle
import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 320
"""Of the models; the tokenizer has 288 tokens, as real models often have more rows than tokens."""
MAX_CONTEXT = 128
BOS, EOS = 0, 1

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = ["the cat and the dog sat on the mat", "there was a little dog", "and then the little cat said: hello"]

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}


def _rope(kind: str, theta: float = 10000.0, **kw: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **kw}


GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "full_attention": _rope("proportional", 1e6, partial_rotary_factor=0.25),
        "sliding_attention": _rope("default", 1e4),
    },
}

# Each entry: name of the configuration class, and what differs from COMMON. The native decoder runs all of these.
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama1": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama2": ("LlamaConfig", {"rms_norm_eps": 1e-5}),
    "llama3": (
        "LlamaConfig",
        {
            "rope_parameters": _rope(
                "llama3",
                500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        },
    ),
    "llama-linear": ("LlamaConfig", {"rope_parameters": _rope("linear", factor=2.0)}),
    "llama-yarn": (
        "LlamaConfig",
        {"rope_parameters": _rope("yarn", factor=4.0, original_max_position_embeddings=32)},
    ),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "vicuna": ("LlamaConfig", {"num_key_value_heads": 4, "rope_parameters": _rope("linear", factor=8.0)}),
    "smollm": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": _rope("default", 100000.0)}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 24}),
    "mistral-window": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True, "rope_parameters": _rope("default", 1e6)}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3Config", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _rope("linear", 1e6, factor=8.0),
                "sliding_attention": _rope("default", 1e4),
            },
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        GEMMA4
        | {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gemma4-moe": (
        "Gemma4TextConfig",
        GEMMA4
        | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.5,
            "logits_scaling": 1.25,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),  # the fourth does not use positions
    "phi3": ("Phi3Config", {"sliding_window": 8, "rope_parameters": _rope("default", partial_rotary_factor=0.75)}),
    "phi3-long": (
        "Phi3Config",
        {
            "max_position_embeddings": 4 * MAX_CONTEXT,
            "original_max_position_embeddings": MAX_CONTEXT,
            "rope_parameters": _rope(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.1, 1.2, 1.4, 1.6, 2.0],
                long_factor=[1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            ),
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "glm-flash": (
        "Glm4MoeLiteConfig",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "swiglu_limit": 1.5,
            "rope_parameters": _rope(
                "yarn", 150000.0, factor=4.0, original_max_position_embeddings=32, truncate=False
            ),
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [2],
        },
    ),
    "qwen3.5": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        {
            "intermediate_size": None,
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
}
HYBRID = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
"""Those with recurrent states."""

# Architectures that only transformers runs: learned positions, parallel residual, partial rotary.
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {}),
    "gpt-neox": ("GPTNeoXConfig", {"rope_parameters": _rope("default", partial_rotary_factor=0.25)}),
    "phi": ("PhiConfig", {"rope_parameters": _rope("default", partial_rotary_factor=0.5)}),
    "gptj": ("GPTJConfig", {"rotary_dim": 8}),
    "opt": ("OPTConfig", {"word_embed_proj_dim": 64}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
}

# Causal language models that cannot be verified as trees, each for a reason of its own.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", {"state_size": 8}),
    "bloom": ("BloomConfig", {}),
    "falcon-alibi": ("FalconConfig", {"alibi": True}),
    "mpt": ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 128}),
    "openai-gpt": ("OpenAIGPTConfig", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128}),
    "gpt-neo": (
        "GPTNeoConfig",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_hidden_layers": 2},
    ),
}

FAMILIES = NATIVE | FOREIGN | REFUSED


def config(family: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a family, with some entries changed."""
    kind, values = FAMILIES[family]
    return getattr(transformers, kind)(**(COMMON | values | changes))


def model(family: str | PretrainedConfig, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model in evaluation mode."""
    if isinstance(family, str):
        return deepcopy(_model(family, seed, pickle.dumps(changes)))
    with torch.random.fork_rng():  # so that tests draw the same numbers whether the model is new or remembered
        made = AutoModelForCausalLM.from_config(family, dtype=torch.float32).eval()
    randomize(made, seed)
    return made


@lru_cache(100)
def _model(family: str, seed: int, changes: bytes) -> PreTrainedModel:
    """Many tests ask for the same one."""
    return model(config(family, **pickle.loads(changes)), seed)


@torch.no_grad()
def randomize(made: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter random values: matrices around 0, norm weights around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    has_states = any(name.endswith("A_log") for name, _ in made.named_parameters())
    for name, weight in made.named_parameters():
        weight.copy_(shaped(name, torch.randn(weight.shape, generator=generator), has_states))


def shaped(name: str, noise: torch.Tensor, has_states: bool) -> torch.Tensor:
    """The random parameter of this name, of noise around 0."""
    if noise.ndim >= 2:
        return noise * (0.3 if "emb" in name or "wte" in name else 0.2)
    if name.endswith("A_log"):
        return noise - 2  # so that states remember many tokens
    if has_states and "linear_attn" not in name and name.endswith("norm.weight"):
        return noise * 0.3  # added to 1 there, and rounding grows with what comes out
    return noise * 0.3 if name.endswith("bias") else 1 + noise * 0.3


def make(family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a random model of `family` with the tiny tokenizer; returns the folder. Other words change the config."""
    shutil.copytree(_saved(family, seed, dtype, pickle.dumps(changes)), folder, dirs_exist_ok=True)
    return folder


@cache
def _saved(family: str, seed: int, dtype: torch.dtype, changes: bytes) -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model(family, seed, **pickle.loads(changes)).to(dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def make_repetitive(folder: Path, **changes: Any) -> Path:
    """Save a random Llama with a chat template whose next token hangs mostly on the last one, so that it soon repeats
    itself and drafts are accepted."""
    make("llama2", folder, **changes)
    rewrite(folder, lambda name, tensor: tensor * 0.01 if "o_proj" in name or "down_proj" in name else tensor)
    return folder


def rewrite(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Change the weights in a model folder; `change` gets the name and the values of each."""
    file = folder / "model.safetensors"
    weights = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def tokenizer(vocab_size: int = 288) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: four special tokens, 256 bytes, a few merges; puts <s> in front; has a chat
    template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
