"""eagle3: a layer over the inputs of three of the target's layers drafts, with an output head of its own.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (arXiv
2503.01840). The feature of a committed token is made of those three inputs; a drafted node's is the head's own output,
which it was trained to read. The draft vocabulary may be smaller than the target's.

Folders can be in the `speculators` format, which `paceline train eagle3` writes, or the authors' ("midlayer.")."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from paceline.core.segment import Segment
from paceline.draft.models import layers as neural
from paceline.draft.models.checkpoint import check_all, open_head
from paceline.draft.models.features import FeatureConfig, FeatureModel, Network
from paceline.draft.models.layers import TABLE, Entries, Precision, Tensors
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.draft.models.vocab import MEMBERS, OFFSETS, columns_of
from paceline.errors import MethodError
from paceline.target.base import Facts
from paceline.target.cache import Pair
from paceline.target.linear import linear
from paceline.target.shape import Shape


@dataclass(frozen=True)
class Flags:
    """How a head differs from the paper's (EAGLE-3.1), as its config.json says.

    norm_before_residual  the layer adds to the normed feature.
    norm_before_fc        one norm over all tapped states.
    fc_norm               a norm for each tapped state.
    norm_output           the next node reads the normed output."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From config.json. A missing flag is off, but norm_before_residual is on in the `speculators` format."""
        inner = config.get("eagle_config") or {}
        named = {f.name: inner.get(f.name, config.get(f.name)) for f in fields(cls)}
        given = {name: bool(value) for name, value in named.items() if value is not None}
        return cls(**{"norm_before_residual": "speculators_model_type" in config, **given})


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads if it names none: the paper's, or the last three of a small target."""
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
    """Name and shape of a head's tensors, without optional ones. width: of one tapped state; taps: their number."""
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


class Eagle3Network(Network):
    """A layer over [norm(embedding), norm(feature)]. The feature of a committed token is fc(tapped states), that of a
    drafted one its parent's output."""

    def __init__(self, path: str, config: Entries, tensors: Tensors, target: Facts, dtype: Precision = "auto"):
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        described = {"vocab_size": target.vocab_size, **(config.get("transformer_layer_config") or config)}
        layers = self.config = neural.layer_config(path, described, target)
        shape, self.flags = Shape.of(layers), Flags.of(config)
        self.taps = taps_of(path, config, target)
        width = config.get("target_hidden_size") or shape.hidden_size
        neural.check_width(path, width, target)
        vocab = config.get("draft_vocab_size") or target.vocab_size
        shapes = eagle3_shapes(shape, width, len(self.taps), vocab, self.flags)
        optional = {TABLE: (target.vocab_size, shape.hidden_size), OFFSETS: (vocab,), MEMBERS: (target.vocab_size,)}
        check_all(path, tensors, shapes | {name: of for name, of in optional.items() if name in tensors})
        self.columns = columns_of(path, tensors, vocab, target)
        here = neural.placed({name: tensors[name] for name in shapes}, target, dtype)
        self.table = self._table(path, tensors.get(TABLE), shape, target)
        self.layers = neural.rotary_layers(here, layers, target)
        self.weights, self.cache = self.layers.vectors, self.layers.cache
        self.fc, self.head = (linear([here[f"{name}.weight"]], None, target.dtype) for name in ("fc", "lm_head"))
        self.nbytes = neural.nbytes(here, "lm_head")

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return self.layers.ops.norm(states, self.weights[f"{name}.weight"])

    def _table(self, path: str, own: torch.Tensor | None, shape: Shape, target: Facts) -> torch.Tensor:
        """The head's own embedding, or else the target's. If the two are equal, the target's, which saves memory."""
        if own is None and shape.hidden_size != target.hidden_size:
            raise MethodError(f"{path} is {shape.hidden_size} wide, the target's embedding {target.hidden_size}: "
                              "it needs an embedding of its own, and brings none")  # fmt: skip
        if own is not None:
            own = own.to(target.device, target.dtype)
            if shape.hidden_size != target.hidden_size:
                return own
        table, _ = neural.table_and_head(target)
        return table if own is None or torch.equal(own, table) else own

    def first(self, states: torch.Tensor) -> torch.Tensor:
        if self.flags.norm_before_fc:
            states = self._norm(states, "input_norm")
        if self.flags.fc_norm:
            parts = states.chunk(len(self.taps), -1)
            states = torch.cat([self._norm(part.contiguous(), f"fc_norm.{n}") for n, part in enumerate(parts)], -1)
        return self.fc(states)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, segments: Sequence[Segment]) -> Pair:
        layout, cache = self.layers.begin(segments, features)
        first, *deeper = self.layers.layers
        normed = self._norm(features, "layers.0.hidden_norm")
        x = torch.cat([self._norm(embedded, "layers.0.input_layernorm"), normed], -1)
        residual, delta = first.after_norm(x, normed if self.flags.norm_before_residual else features, layout, cache, 0)
        for number, layer in enumerate(deeper, 1):
            residual, delta = layer(residual, delta, layout, cache, number)
        y, read = self.layers.ops.add_norm(residual, delta, self.weights["norm.weight"])
        return (read if self.flags.norm_output else y), read if layout.wanted is None else read[layout.wanted]


class Eagle3(ModelDrafter):
    """Drafts with one layer over three of the target's states and a vocabulary of its own; trees, or chains."""

    name = "eagle3"
    paper = "Li et al. 2025, EAGLE-3, arXiv 2503.01840"
    Config = FeatureConfig
    config: FeatureConfig

    def open(self, target: Facts) -> FeatureModel:
        path = self.config.checkpoint
        network = Eagle3Network(path, *open_head(path, self.name, target), target, self.config.dtype)
        return FeatureModel(network, self.config, target)
