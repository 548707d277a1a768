"""Multi-token-prediction heads for tests, in the layouts that models are published with, written out here by hand."""

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from paceline.formats.experts import as_checkpoint
from tests import models
from tests.draft.eagles import write

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""What DeepSeek's layout repeats of the target; here without its numbers."""
LAYOUTS = ("qwen", "deepseek", "mimo", "speculators")


def own_layer(model, seed=5, scale=0.3):
    """A random layer like the model's last one with attention, as transformers' module. scale: of what it adds."""
    layer = [one for one in models.model(model.config, seed).model.layers if hasattr(one, "self_attn")][-1]
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(scale)
    return layer


def random_head(model, seed=5, scale=0.3):
    """A random head for `model` in Qwen3-Next's layout; its layer is of the model's kind. scale: of what that adds."""
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(seed)
    tensors = as_checkpoint(own_layer(model, seed, scale).state_dict(prefix="mtp.layers.0."))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 1 + torch.randn(hidden, generator=generator) * 0.2
    return tensors | {"mtp.fc.weight": torch.randn(hidden, 2 * hidden, generator=generator) * 0.1}


def knowing_head(model, scale=0.0):
    """A head that knows the next token of a model whose layers add nothing: its last norm, which is the target's final
    one, reads the embedding. scale: of what its layer adds."""
    hidden, norm = model.config.hidden_size, model.model.norm.weight.detach()
    passing = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    tensors = random_head(model, scale=scale) | {"mtp.fc.weight": passing, "mtp.norm.weight": norm.clone()}
    return tensors | {"mtp.pre_fc_norm_embedding.weight": torch.ones(hidden)}


def in_layout(tensors, layout, layers):
    """The head as it lies in a checkpoint of a model with so many layers, with what files bring besides."""
    if layout == "qwen":
        return tensors
    fc = tensors["mtp.fc.weight"]
    half = fc.shape[1] // 2
    if layout in ("mimo", "speculators"):
        start, outer = "model.mtp_layers.0.", ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
        if layout == "mimo":
            fc = torch.cat([fc[:, half:], fc[:, :half]], 1)
        else:
            start = "mtp_layers.0."
    else:
        start, outer = f"model.layers.{layers}.", ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    theirs = dict(zip(("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), outer, strict=True))
    made = {f"{start}{theirs[name]}.weight": tensors[f"mtp.{name}.weight"] for name in theirs}
    made[f"{start}{outer[0]}.weight"] = fc
    inner = {name: t for name, t in tensors.items() if name.startswith("mtp.layers.0.")}
    made |= {start + name.removeprefix("mtp.layers.0."): tensor for name, tensor in inner.items()}
    if layout == "speculators":
        made = joined(made, "mtp_layers.0.mlp.experts.")
    if layout == "deepseek":
        made |= {start + name: torch.zeros(2, half) for name in COPIES}
    return made


def joined(tensors, start):
    """The tensors, with the matrices of all experts, whose names begin with `start`, in two."""
    made = {name: tensor for name, tensor in tensors.items() if not name.startswith(start)}
    experts = {name: tensor for name, tensor in tensors.items() if name.startswith(start)}
    of = {part: [t for name, t in experts.items() if part in name] for part in ("gate", "up", "down")}
    if of["up"]:
        made[f"{start}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(of["gate"], of["up"], strict=True)])
        made[f"{start}down_proj"] = torch.stack(of["down"])
    return made


def add(folder, tensors):
    """Put tensors into the checkpoint of a model's folder."""
    file = folder / "model.safetensors"
    whole = load_file(file) | tensors
    save_file({name: t.contiguous().clone() for name, t in whole.items()}, file, {"format": "pt"})
    return folder


def save(folder, tensors):
    """A folder with a head alone."""
    return write(folder, {}, tensors)


def reference(model, tensors):
    """transformers' module with the weights of a `random_head`; it takes the embedding before the state."""
    last = model.model.layers[-1]
    layer = MtpLayer(model.config, type(last), type(model.model.norm), 0)
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
    layer.mtp_block = own_layer(model)
    state = {f"{theirs}.weight": tensors[f"mtp.{ours}.weight"] for ours, theirs in names.items()}
    layer.load_state_dict(layer.state_dict() | state)
    return layer.eval()
