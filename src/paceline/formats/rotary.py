"""Rotary positions: tables of cosines and sines, and the order of a checkpoint's rows that fits to them."""

from __future__ import annotations

from functools import cache

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.formats.shape import ATTENTION, Latent, Shape, kind_of_rope
from paceline.kernels.turns import Turns


def turns_of(
    config: PretrainedConfig, shape: Shape, inverse: torch.Tensor | None = None, rope: str | None = "",
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
) -> Turns:  # fmt: skip
    """The tables of all positions, [max_context + 1, head_dim].

    Dimension i of a head rotates with i + head_dim / 2 (`row_order`). The tables include `attention_scale`: they
    multiply both queries and keys by its square root.

    inverse  frequencies [head_dim / 2]; None: the configuration's.
    rope     as in `LayerKind`."""
    scale, factor = 1.0, 1.0
    if rope is None:
        inverse = torch.empty(0)
    else:
        if inverse is None:
            inverse, scale = frequencies(config, shape.rotary_dim or shape.head_dim, rope)
        if shape.attention_scale is not None:
            factor = (shape.attention_scale * shape.head_dim**0.5) ** 0.5
    return Turns(shape.max_context + 1, shape.head_dim, inverse, scale, factor, dtype, device)


def rotary_tables(config: PretrainedConfig, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of all positions, float32 [max_context + 1, head_dim]. The first half of sin is negated."""
    turns = turns_of(config, shape)
    turns.reach(len(turns.cos))
    return turns.cos, turns.sin


def frequencies(config: PretrainedConfig, size: int, rope: str) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, float32 [size / 2], and a factor of cos and sin. rope: as in `LayerKind`."""
    parameters, nested = dict(getattr(config, "rope_parameters", None) or {}), rope or ATTENTION[0]
    of_layers = {"layer_type": nested} if nested in parameters else {}
    parameters = dict(parameters.get(nested, parameters))
    if kind_of_rope(parameters) == "default":
        return parameters.get("rope_theta", 10000.0) ** -(torch.arange(0, size, 2).float() / size), 1.0
    inverse, scale = ROPE_INIT_FUNCTIONS[kind_of_rope(parameters)](config, torch.device("cpu"), **of_layers)
    return inverse, scale


@cache
def row_order(shape: Shape, name: str) -> torch.Tensor | None:
    """The order in which the decoder stores a checkpoint's rows; None: unchanged.

    If only `rotary_dim` dimensions of a head rotate, each half of a head gets its rotating dimensions first, then the
    others, as in `turns_of`. Gates follow all queries. Rows that are grouped by key head are sorted by role.

    name  last part of the tensor's name, such as "q_proj"."""
    size, d = shape.head_dim, shape.delta
    if d is not None and d.joined and name in ("in_proj_qkvz", "in_proj_ba"):
        share = d.value_heads // d.key_heads
        wide = share * d.value_dim
        each = [d.key_dim, d.key_dim, wide, wide] if name == "in_proj_qkvz" else [share, share]
        rows = torch.arange(d.key_heads * sum(each)).view(d.key_heads, -1)
        return torch.cat([part.flatten() for part in rows.split(each, 1)])
    if (latent := shape.latent) is not None:
        return _order_of_latent(shape, latent, name)
    turns = 0 < shape.rotary_dim < size
    queries, keys = shape.num_heads, shape.num_kv_heads
    norms = (queries, keys) if shape.qk_norm_whole else (1, 1)
    counts = {"qkv_proj": queries + keys, "q_proj": queries, "k_proj": keys, "q_norm": norms[0], "k_norm": norms[1]}
    gated = shape.gated and name == "q_proj"
    if name not in counts or not (turns or gated):
        return None
    order = torch.arange(size)
    if turns:
        order = torch.cat([part.view(2, -1) for part in order.split([shape.rotary_dim, size - shape.rotary_dim])], 1)
    heads = torch.arange(counts[name])[:, None] * (2 * size if gated else size)
    rows = (heads + order.flatten()).flatten()
    if gated:
        return torch.cat([rows, (heads + size + torch.arange(size)).flatten()])
    values = torch.arange(len(rows), len(rows) + keys * size if name == "qkv_proj" else len(rows))
    return torch.cat([rows, values])


def _order_of_latent(shape: Shape, latent: Latent, name: str) -> torch.Tensor | None:
    """`row_order` for latent attention: queries have half of the numbers that rotate, half of the others, and so on
    (`Attention`), and the part of a key that rotates has the first of each pair, then the second."""
    turned = torch.arange(latent.turned)
    turned = turned.view(-1, 2).T if latent.pairs else turned.view(2, -1)
    if name == "kv_a_proj_with_mqa":
        return torch.cat([torch.arange(latent.rank), latent.rank + turned.flatten()])
    if name not in ("q_proj", "q_b_proj"):
        return None
    still = shape.head_dim - latent.turned
    order = torch.cat([still + turned, torch.arange(still).view(2, -1)], 1).flatten()
    return (torch.arange(shape.num_heads)[:, None] * shape.head_dim + order).flatten()
