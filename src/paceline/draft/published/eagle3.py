"""EAGLE-3's heads: the `speculators` format, which `paceline train eagle3` writes, and the authors' ("midlayer.").

Our names are those of the `speculators` format, without optional tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.draft.models import layers as neural
from paceline.draft.models.checkpoint import check_all
from paceline.draft.models.layers import TABLE, Entries, Tensors
from paceline.draft.published.names import renamed
from paceline.draft.published.vocab import MEMBERS, OFFSETS, columns_of
from paceline.errors import MethodError
from paceline.target.base import Facts
from paceline.target.shape import Shape

NAMES = {r"midlayer\.(.+)": r"layers.0.\1"}


@dataclass(frozen=True)
class Flags:
    """How a head differs from the paper's (EAGLE-3.1), as its config.json says.

    norm_before_residual  whether the layer adds to the normed feature.
    norm_before_fc        whether one norm is over all tapped states.
    fc_norm               whether each tapped state has a norm.
    norm_output           whether the next node reads the normed output."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the flags in config.json. A missing one is off; norm_before_residual is on in the `speculators`
        format."""
        inner = config.get("eagle_config") or {}
        named = {f.name: inner.get(f.name, config.get(f.name)) for f in fields(cls)}
        given = {name: bool(value) for name, value in named.items() if value is not None}
        return cls(**{"norm_before_residual": "speculators_model_type" in config, **given})


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads if it names none: the paper's layers, or the last three of a small
    target."""
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(range(max(num_layers - 3, 0), num_layers))


def taps_of(path: str, config: Mapping[str, Any], target: Facts) -> tuple[int, ...]:
    """The layers whose inputs a head reads. MethodError if the target has no such layers."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = config.get(key) or (config.get("eagle_config") or {}).get(key)
    taps = tuple(named) if named else default_taps(target.num_layers)
    if not all(isinstance(layer, int) and 0 <= layer < target.num_layers for layer in taps):
        raise MethodError(
            f"{path} reads the inputs of layers {', '.join(map(str, taps))}, and {target.name} has layers 0 to "
            f"{target.num_layers - 1}: it is a head for another target"
        )
    return taps


def eagle3_shapes(shape: Shape, width: int, taps: int, vocab: int, flags: Flags) -> dict[str, tuple[int, ...]]:
    """Name and shape of a head's tensors, without optional ones.

    width  width of one tapped state. taps: number of tapped states."""
    h = shape.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, taps * width),
        "norm.weight": (h,),
        "lm_head.weight": (vocab, h),
    }
    if flags.norm_before_fc:
        shapes["input_norm.weight"] = (taps * width,)
    if flags.fc_norm:
        shapes |= {f"fc_norm.{n}.weight": (width,) for n in range(taps)}
    for number in range(shape.num_layers):
        norms = ("input_layernorm", "hidden_norm")[: 1 if number else 2]
        of_layer = neural.head_shapes(shape, h if number else 2 * h, norms)
        shapes |= {f"layers.{number}.{name}": of for name, of in of_layer.items()}
    return shapes


@dataclass(frozen=True)
class Eagle3Head:
    """A head as its file has it.

    layers   configuration of the head's decoder layers. taps: the layers of the target whose inputs it reads.
    columns  the target's ids int64 [K] of the head's vocabulary; None: all tokens.
    weights  the tensors by our names.
    table    the head's embedding [V, H]; it is the target's tensor where the two are equal, which saves memory."""

    layers: PretrainedConfig
    flags: Flags
    taps: tuple[int, ...]
    columns: Tensor | None
    weights: Tensors
    table: Tensor

    @classmethod
    def read(cls, path: str, config: Entries, tensors: Tensors, target: Facts) -> Self:
        """Read a head from its config.json and its tensors. MethodError if they are no head for the target."""
        tensors = renamed(tensors, NAMES)
        described = {"vocab_size": target.vocab_size, **(config.get("transformer_layer_config") or config)}
        layers = neural.layer_config(path, described, target)
        shape, flags, taps = Shape.of(layers), Flags.of(config), taps_of(path, config, target)
        width = config.get("target_hidden_size") or shape.hidden_size
        neural.check_width(path, width, target)
        vocab = config.get("draft_vocab_size") or target.vocab_size
        shapes = eagle3_shapes(shape, width, len(taps), vocab, flags)
        optional = {TABLE: (target.vocab_size, shape.hidden_size), OFFSETS: (vocab,), MEMBERS: (target.vocab_size,)}
        check_all(path, tensors, shapes | {name: of for name, of in optional.items() if name in tensors})
        columns = columns_of(path, tensors, vocab, target)
        table = _table(path, tensors.get(TABLE), shape, target)
        return cls(layers, flags, taps, columns, {name: tensors[name] for name in shapes}, table)


def _table(path: str, own: Tensor | None, shape: Shape, target: Facts) -> Tensor:
    """The head's own embedding, or else the target's; the target's too if the two are equal."""
    if own is None and shape.hidden_size != target.hidden_size:
        raise MethodError(f"{path} is {shape.hidden_size} wide, the target's embedding {target.hidden_size}: "
                          "it needs an embedding of its own, and brings none")  # fmt: skip
    if own is not None:
        own = own.to(target.device, target.dtype)
        if shape.hidden_size != target.hidden_size:
            return own
    table, _ = neural.table_and_head(target)
    return table if own is None or torch.equal(own, table) else own
