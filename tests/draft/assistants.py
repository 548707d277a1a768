"""Gemma 4's assistants for tests: transformers' own module, at random or knowing what its target says."""

from contextlib import contextmanager

import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from tests.draft.answered import last_steps

LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


@contextmanager
def all_shared():
    """Let transformers 5.23 make a model whose layers all read others' keys: its configuration asks for a layer that
    makes them, and an assistant has none."""
    before = Gemma4TextConfig.kv_sharing_modes
    with pytest.MonkeyPatch.context() as patch:

        def modes(config):
            shared = config.num_kv_shared_layers == config.num_hidden_layers
            return ["reuse"] * config.num_hidden_layers if shared else before.fget(config)

        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
        yield


def random_assistant(model, seed=3, clusters=0, tie_word_embeddings=True, **changes):
    """A random assistant of a Gemma 4. clusters: of tokens, of which it reads a quarter; 0: it reads all tokens.
    changes: to the configuration of its layers."""
    theirs = model.config
    heads = {layer.head_dim: layer.num_key_value_heads for layer in theirs.per_layer_config}
    small, large = min(heads), max(heads)
    text = {
        "vocab_size": theirs.vocab_size, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": heads[small],
        "num_global_key_value_heads": heads[large], "head_dim": small, "global_head_dim": large,
        "rope_parameters": theirs.rope_parameters, "sliding_window": theirs.sliding_window,
        "max_position_embeddings": theirs.max_position_embeddings, "attention_k_eq_v": theirs.attention_k_eq_v,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": len(LAYERS),
    }  # fmt: skip
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text | changes), backbone_hidden_size=theirs.hidden_size,
        use_ordered_embeddings=bool(clusters), num_centroids=clusters or 2048,
        centroid_intermediate_top_k=max(clusters // 4, 1), tie_word_embeddings=tie_word_embeddings,
    )  # fmt: skip
    with torch.random.fork_rng(), all_shared():
        torch.manual_seed(seed)
        made = Gemma4AssistantForCausalLM(config).eval()
        with torch.no_grad():
            for name, weight in made.named_parameters():
                weight.normal_(1 if "norm" in name else 0, 0.3)
            if clusters:
                made.masked_embedding.token_ordering.copy_(torch.randperm(theirs.vocab_size))
    return made


def knowing_assistant(model, scale=0.0):
    """An assistant that knows the next token of a Gemma 4 whose layers add nothing: its last norm and its output head
    are the target's, and read the embedding. scale: of what its layers add."""
    width = model.config.hidden_size
    made = random_assistant(model, hidden_size=width, tie_word_embeddings=False)
    with torch.no_grad():
        made.pre_projection.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], 1))
        made.model.norm.weight.copy_(model.model.norm.weight)
        made.lm_head.weight.copy_(model.lm_head.weight)
        for layer in made.model.layers:
            for part in last_steps(layer):
                part.weight *= scale
    return made
