"""Multi-token-prediction heads in the checkpoints of their targets, as DeepSeek, Qwen, GLM and MiMo publish them,
or alone, in the `speculators` format."""

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from paceline.errors import MethodError
from paceline.formats.experts import as_checkpoint, renamed
from paceline.formats.folder import open_weights
from paceline.formats.heads.checkpoint import check_all
from paceline.formats.heads.layout import Tensors
from paceline.formats.shape import ROUTER, LayerKind, Shape, layer_shapes
from paceline.kernels.blocks import WeightsByName

LAYOUTS = (
    # In order: Qwen3-Next, Qwen3.5 and ours; DeepSeek-V3 and GLM-4.5; MiMo; the `speculators` format.
    (r"mtp\.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "layers.0."),
    (r"model\.layers\.\d+\.", ("eh_proj", "enorm", "hnorm", "shared_head.norm"), ""),
    (r"model\.mtp_layers\.\d+\.", ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"), ""),
    (r"mtp_layers\.\d+\.", ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"), ""),
)
"""A layout is a pattern with which a head's names begin; the names of its product, of its norms of embedding and state,
and of its last norm; and what the names in its layer begin with. Our names are those of the first layout, without
"mtp."."""
OUTER = tuple(f"{name}.weight" for name in LAYOUTS[0][1])
STATE_FIRST = re.compile(LAYOUTS[2][0] + r"input_proj\.weight")  # MiMo's product takes the state first.
SHARED = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
"""What the names of tensors that the target has, too, end with."""
FOREIGN = {
    "kv_a_proj": "latent attention (MLA)",
    "linear_attn": "a running state",
    "shared_expert": "experts that all tokens share",
    "mlp.experts": "other experts than its target's",
}
"""Kinds of layers that a head may have but its target has not, by parts of names."""


def head_names(names: Iterable[str]) -> dict[str, str]:
    """The names of the first head's tensors in a checkpoint, by our names; empty if there is no head."""
    names = list(names)
    for pattern, outer, inside in LAYOUTS:
        product = re.compile(f"({pattern}){outer[0]}\\.weight")
        starts = [found[1] for name in names if (found := product.fullmatch(name))]
        if starts:
            start = min(starts, key=lambda one: (len(one), one))
            ours = {f"{start}{theirs}.weight": own for theirs, own in zip(outer, OUTER, strict=True)}
            later = re.compile(f"{re.escape(start)}layers\\.[1-9]")
            own = [one for one in names if one.startswith(start) and not (one.endswith(SHARED) or later.match(one))]
            return {ours.get(name, f"layers.0.{name.removeprefix(start + inside)}"): name for name in own}
    return {}


def head_of(checkpoint: Iterable[str], read: Callable[[str], torch.Tensor]) -> Tensors:
    """Read the first head in a checkpoint. Returns its tensors by our names; none if there is no head.

    checkpoint  names of the checkpoint's tensors. read: function that returns a tensor by name."""
    names = head_names(checkpoint)
    tensors = {renamed(own): read(name) for own, name in names.items()}
    joined = [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    tensors |= as_checkpoint({name: tensors.pop(name) for name in joined})
    if tensors and STATE_FIRST.fullmatch(names[OUTER[0]]) and (product := tensors[OUTER[0]]).ndim:
        tensors[OUTER[0]] = product.roll(product.shape[-1] // 2, -1)
    return tensors


def head_in(folder: Path) -> Tensors:
    """Map the head in a model's folder from disk. Returns no tensors if the model has no head."""
    opened = open_weights(folder)
    return head_of(opened, lambda name: opened[name].get_tensor(name))


def head_shape(shape: Shape, names: Container[str]) -> Shape:
    """The shape of a head's layer, for a target of `shape`. It sees the whole text; with a router it has experts.

    names  names of the head's tensors."""
    kind = LayerKind(experts=f"layers.0.{ROUTER}.weight" in names)
    return replace(shape, num_layers=1, layers=(kind,))


def check_head(path: str | Path, tensors: WeightsByName, target: Shape | None) -> None:
    """Raise MethodError unless these are the tensors of a head for `target`; None: the target is not native."""
    wanted: dict[str, tuple[int, ...]] = {}
    if target is not None:
        shape, h = head_shape(target, tensors), target.hidden_size
        of_layer = layer_shapes(shape, kind=shape.layers[0]) | {f"{n}.weight": (h,) for n in shape.norms[:1] if n}
        wanted = dict(zip(OUTER, ((h, 2 * h), (h,), (h,), (h,)), strict=True))
        wanted |= {f"layers.0.{name}": size for name, size in of_layer.items()}
    others = " ".join(tensors.keys() - wanted.keys())
    if why := next((why for part, why in FOREIGN.items() if part in others), None):
        raise MethodError(f"{path}: the layer of its head has {why}, which nothing here runs")
    if target is not None:
        check_all(path, tensors, wanted)
