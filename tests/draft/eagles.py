"""Heads for tests: random ones, ones that know the target's next token, and files in the layouts that others publish.

Layouts are written out here by hand, not by what trains and saves heads. A target of which a head can know everything
has layers that add nothing: its next token then depends on the last one alone.
"""

import json

import numpy as np
import torch
from safetensors.torch import save_file

from paceline.core.segment import Segment
from paceline.draft import registry
from paceline.draft.models.model_drafter import ModelDrafter
from tests import models

Tensors = dict[str, torch.Tensor]


def bound(path, target, method="eagle3"):
    """The drafter that reads a file or folder, bound to a target."""
    drafter = registry.create(f"{method}:{path}")
    assert isinstance(drafter, ModelDrafter)
    drafter.bind(target)
    return drafter


def layer_tensors(seed, hidden, width, heads, kv_heads, dim, inner, scale=0.3):
    """A decoder layer whose attention reads `width` numbers, by the names of Llama checkpoints."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "self_attn.q_proj.weight": (heads * dim, width),
        "self_attn.k_proj.weight": (kv_heads * dim, width),
        "self_attn.v_proj.weight": (kv_heads * dim, width),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    tensors = {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}
    return tensors | {"post_attention_layernorm.weight": 1 + torch.randn(hidden, generator=generator) * 0.1}


def geometry(model):
    """A head's own geometry, another one than its target's."""
    return {"hidden": model.config.hidden_size, "heads": 2, "kv_heads": 1, "dim": 24, "inner": 40}


def described(model, **more):
    """config.json of a head's layer, as published: a Llama with one layer."""
    of = geometry(model)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of["hidden"],
        "num_attention_heads": of["heads"],
        "num_key_value_heads": of["kv_heads"],
        "head_dim": of["dim"],
        "intermediate_size": of["inner"],
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "vocab_size": model.config.vocab_size,
        **more,
    }


def eagle1(model, seed=0):
    """A random EAGLE-1 head in its published layout, with the embedding that such files bring along."""
    hidden = model.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    layer = layer_tensors(seed, width=hidden, **geometry(model))
    return {
        "embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
        "fc.weight": torch.randn(hidden, 2 * hidden, generator=generator) * 0.1,
        "fc.bias": torch.randn(hidden, generator=generator) * 0.1,
        **{f"layers.0.{name}": tensor for name, tensor in layer.items()},
    }


def d2t_of(model, share=0.6):
    """Offsets and members of a draft vocabulary of that share of the tokens."""
    size = model.config.vocab_size
    keep = torch.from_numpy(np.sort(np.random.default_rng(3).permutation(size)[: int(share * size)]))
    members = torch.zeros(size, dtype=torch.bool)
    members[keep] = True
    return keep - torch.arange(len(keep)), members


def eagle3(model, seed=0, share=0.6, prefix="midlayer."):
    """A random EAGLE-3 head in its authors' layout; prefix "layers.0." makes it that of `speculators`."""
    hidden = model.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    layer = layer_tensors(seed, width=2 * hidden, **geometry(model))
    layer |= {f"{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "input_layernorm")}
    offsets, members = d2t_of(model, share)
    return {
        "fc.weight": torch.randn(hidden, 3 * hidden, generator=generator) * 0.1,
        **{f"{prefix}{name}": tensor for name, tensor in layer.items()},
        "norm.weight": 1 + torch.randn(hidden, generator=generator) * 0.1,
        "lm_head.weight": torch.randn(len(offsets), hidden, generator=generator) * 0.2,
        "d2t": offsets,
        "t2d": members,
    }


def speculators(model, **more):
    """config.json of an EAGLE-3 head in the `speculators` format."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "x", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": described(model),
        "draft_vocab_size": len(d2t_of(model)[0]),
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": None,
        **more,
    }


def parallel(model, folder):
    """A random P-EAGLE head in the `speculators` format; its mask is token 3."""
    made = speculators(model, speculators_model_type="peagle", architectures=["PEagleDraftModel"], mask_token_id=3)
    state = torch.randn(1, 1, 3 * model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    return write(folder, made, eagle3(model, prefix="layers.0.") | {"mask_hidden": state})


def write(folder, config, tensors):
    """A folder with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def knowing_head(folder, method, model):
    """A head that knows the next token of a model whose layers are `weakened` to nothing.

    EAGLE-1's passes the embedding on, with the target's final norm in its product. EAGLE-3's attention finds every
    token by its own embedding and writes it far above everything else; its own vocabulary is the whole one. Keys and
    values have a little of the features, so that a wrong one shows."""
    hidden, norm, little = model.config.hidden_size, model.model.norm.weight.detach(), 0.01
    if method == "eagle":
        tensors = {name: torch.zeros_like(tensor) for name, tensor in eagle1(model).items()}
        tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
        tensors["fc.weight"][:, :hidden] = torch.diag(norm)
        tensors["fc.weight"][:, hidden:] = little * torch.eye(hidden)
        random = eagle1(model)
        tensors |= {name: random[name] for name in tensors if name.endswith(("k_proj.weight", "v_proj.weight"))}
        return write(folder, described(model), tensors)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in eagle3(model, share=1.0).items()}
    tensors |= {f"midlayer.{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "input_layernorm")}
    find = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(0))
    tensors |= {f"midlayer.self_attn.{name}_proj.weight": torch.zeros(hidden, 2 * hidden) for name in "qkv"}
    tensors["midlayer.self_attn.o_proj.weight"] = 1e4 * torch.eye(hidden)
    for name in "qk":
        tensors[f"midlayer.self_attn.{name}_proj.weight"][:, :hidden] = find
    tensors["midlayer.self_attn.v_proj.weight"][:, :hidden] = torch.eye(hidden)
    tensors["midlayer.self_attn.v_proj.weight"][:, hidden:] = little * torch.eye(hidden)
    tensors["norm.weight"], tensors["lm_head.weight"] = norm.clone(), model.lm_head.weight.detach().clone()
    del tensors["d2t"], tensors["t2d"]
    own = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": hidden, "rope_theta": 1e9}
    return write(folder, described(model, norm_output=True, **own), tensors)


LENGTH = 12


def given(width):
    """States of LENGTH tokens, and the tokens after them."""
    rng = np.random.default_rng(0)
    states = torch.from_numpy(rng.normal(size=(LENGTH, width))).float()
    return states, torch.from_numpy(rng.integers(4, models.VOCAB_SIZE, LENGTH))


@torch.inference_mode()
def said(drafter):
    """Logits of a bound head after every one of LENGTH given pairs."""
    network = drafter.model.network
    states, tokens = given(drafter.model.pending._nothing.shape[1])
    slot = network.cache.add_row(LENGTH)
    segment = Segment(slot, tokens.numpy(), np.arange(-1, LENGTH - 1), num_logits=LENGTH)
    _, read = network.forward(network.table[tokens], network.first(states), [segment])
    network.cache.drop_row(slot)
    return drafter.model.head(read)
