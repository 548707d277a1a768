"""Parts of draft heads: their weights, and decoder layers with their own cache.

    here = placed(tensors, target, "int8")                   # matrices are Blocks, all else tensors
    layers = own_layers(here, ["prefix.layers.0."], target)  # decoder layers of the target's shape

Fewer bits change how often a draft is right, never the output. Knows no particular head."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from transformers import PretrainedConfig

from paceline.core.segment import Segment
from paceline.errors import MethodError
from paceline.formats.facts import Facts, Inside
from paceline.formats.heads.layout import head_shapes
from paceline.formats.precision import multipliable, quantised
from paceline.formats.rotary import turns_of
from paceline.formats.shape import LayerKind, Shape
from paceline.kernels.blocks import Blocks, Weights, WeightsByName, tensors_of, within
from paceline.kernels.ops import TorchOps
from paceline.target.attention import Layer, begin
from paceline.target.cache import RaggedCache, Writer
from paceline.target.layout import Layout

# Weights -------------------------------------------------------------------------------------------------------------

Precision = Literal["auto", "int8", "int4"]
PRECISION = (
    "dtype of the drafter's matrices; auto: int8 beside a target in blocks, else the target's. int8 and int4 read less "
    "memory and change drafts a little"
)


def placed(weights: WeightsByName, target: Facts, precision: Precision = "auto") -> Weights:
    """Put a head's weights on the target's device, in its dtype, with matrices in blocks of `precision`. With "auto",
    blocks of a file stay beside a target in blocks.

    Products with blocks round their inputs to as many bits as the target's do; to 8 if the target has no blocks. Raises
    MethodError for blocks on a GPU."""
    kept: Weights = {}
    if precision == "auto" and target.device.type == "cpu" and target.quantised:
        precision = "int8"  # In float32, a draft would read four times as much.
        kept, _ = multipliable({name: weight for name, weight in weights.items() if isinstance(weight, Blocks)})
    tensors = {
        name: weight.dense() if isinstance(weight, Blocks) else weight
        for name, weight in weights.items()
        if name not in kept
    }
    if precision == "auto":
        return {name: tensor.to(target.device, target.dtype) for name, tensor in tensors.items()}
    if target.device.type != "cpu":
        raise MethodError(f"dtype={precision}: weights of eight and four bits run on CPUs, not on {target.device}")
    made = quantised({name: tensor.cpu() for name, tensor in tensors.items()}, precision) | kept
    for weight in made.values():
        if isinstance(weight, Blocks):
            weight.activations = target.activations or weight.activations
    return {name: w if isinstance(w, Blocks) else w.to(target.dtype) for name, w in made.items()}


def nbytes(weights: WeightsByName, *without: str) -> int:
    """Bytes of the weights whose names do not begin with one of `without`."""
    return sum(w.nbytes for name, w in weights.items() if not name.startswith(without or ("\0",)))


def native(target: Facts, what: str, instead: str = "heads without layers of their own") -> Inside:
    """Return the target's layers. MethodError if the target does not run in the native decoder.

    what  the method, and why it needs the layers. instead: an alternative for the user."""
    if target.inside is not None:
        return target.inside
    raise MethodError(
        f"{what}, and {target.name} runs in transformers: it needs a model of a family that the native decoder runs, "
        f"or {instead}"
    )


# A decoder layer -----------------------------------------------------------------------------------------------------

class HeadLayers:
    """Decoder layers of one shape, and their cache.

    weights   tensors on the target's device. Every name begins with a layer's prefix.
    prefixes  what each layer's names begin with. ops: the elementwise steps.
    vectors   the weights that are not in blocks."""

    def __init__(self, weights: WeightsByName, prefixes: Sequence[str], shape: Shape, ops: TorchOps, target: Facts):
        self.shape, self.ops, self.vectors = shape, ops, tensors_of(weights)
        kinds = zip(prefixes, shape.layers, strict=True)
        self.layers = [Layer(within(weights, prefix), shape, ops, kind) for prefix, kind in kinds]
        self.cache = RaggedCache(
            len(prefixes), shape.num_kv_heads, shape.head_dim, target.max_context, target.dtype, target.device
        )

    def begin(self, segments: Sequence[Segment], like: Tensor, window: int | None = None) -> tuple[Layout, Writer]:
        """Plan a forward over the segments' nodes, and reserve memory in the cache.

        like    the nodes' states.
        window  attention window of the layers that will run; None: all layers will run."""
        windows = {kind.window for kind in self.shape.layers} if window is None else {window}
        return begin(segments, self.cache, self.shape, self.ops, like, windows)

    def __call__(
        self, states: Tensor, layout: Layout, cache: Writer, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Run layers `first` to `last` - 1 over states [N, H]. Returns states [N, H]. last: None: run all the rest."""
        for number, layer in enumerate(self.layers[first:last], first):
            residual, delta = layer(states, None, layout, cache, number)
            states = residual + delta
        return states


def rotary_layers(weights: WeightsByName, config: PretrainedConfig, target: Facts) -> HeadLayers:
    """Build the layers "layers.0.", "layers.1.", ... of `weights`, with rotary positions."""
    shape = Shape.of(config)
    kind = TorchOps if target.inside is None else type(target.inside.ops)
    turns = turns_of(config, shape, dtype=target.dtype, device=target.device)
    prefixes = [f"layers.{n}." for n in range(shape.num_layers)]
    return HeadLayers(weights, prefixes, shape, kind(turns, shape.eps), target)


# Layers of the target's shape ----------------------------------------------------------------------------------------


def own_layers(weights: WeightsByName, prefixes: Sequence[str], target: Inside) -> HeadLayers:
    """Build pre-norm layers of the target's sizes, without biases. weights: those that `own_shapes` names."""
    return HeadLayers(weights, prefixes, own_shape(target, len(prefixes)), target.ops, target)


def own_shape(target: Inside, layers: int) -> Shape:
    """The shape of a head's own layers: a Llama's without biases, in the target's sizes."""
    s = target.shape
    return Shape(
        s.vocab_size, s.hidden_size, layers, s.num_heads, s.num_kv_heads, s.head_dim, s.intermediate_size, s.eps,
        s.max_context, s.tied, (LayerKind(),) * layers,
    )  # fmt: skip


def own_shapes(target: Inside, prefixes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of `own_layers`."""
    return head_shapes(own_shape(target, 1), prefixes)
