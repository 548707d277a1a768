"""EAGLE's heads: the authors' files, which `paceline train eagle` writes, and the `speculators` format."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PretrainedConfig

from paceline.draft.models import layers as neural
from paceline.draft.models.checkpoint import check_all
from paceline.draft.models.layers import TABLE, Entries, Tensors
from paceline.draft.published.layout import Layout, count_layers, layer_config
from paceline.errors import MethodError
from paceline.target.base import Facts
from paceline.target.shape import Shape

LAYOUT = Layout(
    "eagle",
    names={r"fusion_fc\.(.+)": r"fc.\1", r"transformer\.(.+)": r"layers.0.\1"},
    known=("bias", "eagle_fc_bias", "fusion_bias", "skip_prenorm", "skip_output_norm"),  # tensors tell of a bias
)


def eagle_shapes(shape: Shape, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Name and shape of a head's tensors. names: those it has, some of which are optional."""
    h = shape.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, 2 * h)}
    shapes |= {name: of for name, of in {"fc.bias": (h,), TABLE: (shape.vocab_size, h)}.items() if name in names}
    for number in range(shape.num_layers):
        of_layer = neural.head_shapes(shape, h, ("input_layernorm",) if number else ())
        shapes |= {f"layers.{number}.{name}": of for name, of in of_layer.items()}
    return shapes


def read(path: str, config: Entries, tensors: Tensors, target: Facts) -> tuple[PretrainedConfig, dict[str, Tensor]]:
    """Returns the configuration of the head's layers, and its tensors by our names, without an embedding. MethodError
    unless they are a head for the target."""
    given, tensors = LAYOUT.read(path, config, tensors)
    layers = layer_config(path, {"vocab_size": target.vocab_size, **given}, tensors, target, count_layers(tensors))
    shape = Shape.of(layers)
    neural.check_width(path, shape.hidden_size, target)
    check_all(path, tensors, eagle_shapes(shape, list(tensors)))
    # Quantising changes the target's table, and so does its training (`Drafter.bind`).
    is_plain = target.weights_fingerprint and getattr(target, "quantised", None) is None
    if is_plain and not neural.is_copy(tensors.get(TABLE), neural.table_and_head(target)[0]):
        raise MethodError(f"{path} brings another embedding than the target's: it is a head for another target")
    return layers, {name: tensor for name, tensor in tensors.items() if name != TABLE}
