"""Which shape an enlarged model has, and the record of how a model was enlarged.

    large = choose_shape(small, parse_size("1B"), "demo")      # ordinary proportions, about 10**9 parameters
    Enlargement.read(folder).describe()
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ModelError, PacelineError
from paceline.records import loads
from paceline.target.shape import Shape

RECORD = "enlargement.json"
"""File of an enlarged model's folder that says what was done."""

SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}

WIDTHS = (1, 4, 16)
"""Factors whose square root is a power of two, so that norm weights stay exact in any dtype."""

TOLERANCE = 0.05
"""How far the parameter count may be from what was asked for."""

MLP_RATIO, WIDTH_TO_LAYERS = (3.0, 4.0), (30.0, 130.0)
"""Ordinary proportions of language models: MLP over width, width over number of layers."""


@dataclass(frozen=True)
class Proportions:
    """The numbers of a model that an enlargement changes, and its parameters (embeddings included; a head that is
    tied to them counts once)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    parameters: int

    @classmethod
    def of(cls, shape: Shape) -> Proportions:
        """Those of a decoder."""
        return cls(
            shape.hidden_size,
            shape.num_layers,
            shape.num_heads,
            shape.num_kv_heads,
            shape.intermediate_size,
            num_parameters(shape),
        )

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters (width {self.hidden_size}, {self.num_layers} layers, "
            f"{self.num_heads}/{self.num_kv_heads} heads, MLP {self.intermediate_size})"
        )


@dataclass(frozen=True)
class Enlargement:
    """What was done to the model `source`; bytes of the weights written."""

    source: str
    small: Proportions
    large: Proportions
    bytes: int

    @property
    def width_factor(self) -> int:
        """1, 4 or 16."""
        return self.large.hidden_size // self.small.hidden_size

    @property
    def layer_factor(self) -> int:
        """Layer l of the small model is layer l times this of the large one."""
        return self.large.num_layers // self.small.num_layers

    def fits(self, shape: Shape) -> bool:
        """Whether a model has the layers that the small one has, if not as many: it was cut from one like it."""
        cut = replace(Proportions.of(shape), num_layers=0, parameters=0)
        return cut == replace(self.small, num_layers=0, parameters=0)

    def of(self, shape: Shape) -> Shape:
        """A model of such layers after the same was done to it."""
        return grown(shape, self.width_factor, self.layer_factor, self.large.intermediate_size)

    def describe(self) -> str:
        """One sentence for a record."""
        added = self.layer_factor - 1
        layers = f", and {added} {'layers that add' if added > 1 else 'layer that adds'} nothing behind each of its own"
        return (
            f"{self.source}, {self.small}, was enlarged to {self.large} without changing the function it computes: "
            "width padded with zeros and norms rescaled to match, added heads and MLP columns that meet zero weights"
            f"{layers if added else ''}."
        )

    @classmethod
    def read(cls, folder: str | Path) -> Enlargement:
        """What `enlarge` noted in the folder it wrote. ModelError if it wrote none."""
        try:
            record = loads((Path(folder) / RECORD).read_bytes())
            small, large = Proportions(**record.pop("small")), Proportions(**record.pop("large"))
            return cls(small=small, large=large, **record)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise ModelError(f"{folder} is not an enlarged model: it has no readable {RECORD}") from None


def parse_size(text: str) -> int:
    """Parameters: "1B" is 10**9; "500M", "1.5B", "300k" and plain numbers too. PacelineError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    size = round(float(match[1]) * SIZES[match[2]]) if match else 0
    if size < 1:
        raise PacelineError(f"{text!r} is not a size; give a number of parameters such as 1B, 1.5B, 500M or 250000")
    return size


def num_parameters(s: Shape) -> int:
    q, kv, h, m = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.hidden_size, s.intermediate_size
    biases = s.qkv_bias * (q + 2 * kv) + s.out_bias * h + s.mlp_bias * (2 * m + h)
    layer = 2 * h * (q + kv) + 3 * h * m + 2 * h + biases + s.qk_norm * 2 * s.head_dim
    return (1 if s.tied else 2) * s.vocab_size * h + s.num_layers * layer + h


def choose_shape(small: Shape, params: int, name: str) -> Shape:
    """The shape of about `params` parameters that is nearest to ordinary proportions."""
    now = num_parameters(small)
    shapes = _shapes(small, params) if params > now else []
    if shapes:
        return min(shapes, key=lambda s: (_oddness(s), abs(num_parameters(s) - params)))
    smallest = min(num_parameters(s) for s in _neighbours(small))
    if params <= now:
        raise ModelError(
            f"{name} has {now:,} parameters already, so it cannot be enlarged to {params:,}; "
            f"the smallest enlargement has {smallest:,}"
        )
    near = sorted({num_parameters(s) for s in _near(small, params)}, key=lambda size: abs(size - params))[:2]
    raise ModelError(
        f"{name} cannot be enlarged to within {TOLERANCE:.0%} of {params:,} parameters; "
        f"the nearest sizes are {' and '.join(f'{size:,}' for size in sorted(near))}"
    )


def _shapes(small: Shape, params: int) -> list[Shape]:
    """Every larger shape within the tolerance whose MLP brings it nearest to `params`."""
    near = [s for s in _near(small, params) if abs(num_parameters(s) - params) <= TOLERANCE * params]
    return [s for s in near if num_parameters(s) > num_parameters(small)]


def _near(small: Shape, params: int) -> Iterator[Shape]:
    """For every width and number of layers (no more than the width) that leave room, the MLP that comes nearest to
    `params`; and the first that leave none."""
    for width in WIDTHS:
        for layers in range(1, 1 + max(1, small.hidden_size * width // small.num_layers)):
            least = grown(small, width, layers, small.intermediate_size)
            wider = replace(least, intermediate_size=least.intermediate_size + 1)
            slope = num_parameters(wider) - num_parameters(least)
            exact = small.intermediate_size + (params - num_parameters(least)) / slope
            columns = {64 * math.floor(exact / 64), 64 * math.ceil(exact / 64), small.intermediate_size}
            for mlp in columns:
                if mlp >= small.intermediate_size:
                    yield replace(least, intermediate_size=mlp)
            if num_parameters(least) > params:
                break


def _neighbours(small: Shape) -> list[Shape]:
    """The least that can be added in each direction."""
    mlp = small.intermediate_size
    return [grown(small, 1, 2, mlp), grown(small, WIDTHS[1], 1, mlp), grown(small, 1, 1, 64 * (mlp // 64 + 1))]


def grown(small: Shape, width: int, layers: int, mlp: int) -> Shape:
    return replace(
        small,
        hidden_size=small.hidden_size * width,
        num_heads=small.num_heads * width,
        num_kv_heads=small.num_kv_heads * width,
        num_layers=small.num_layers * layers,
        intermediate_size=mlp,
        eps=small.eps / width,
    )


def _oddness(s: Shape) -> float:
    """How far from ordinary proportions: 0 within them, squares of logarithms outside."""

    def outside(value: float, low: float, high: float) -> float:
        return max(math.log(low / value), math.log(value / high), 0.0)

    mlp = outside(s.intermediate_size / s.hidden_size, *MLP_RATIO)
    return mlp**2 + outside(s.hidden_size / s.num_layers, *WIDTH_TO_LAYERS) ** 2
