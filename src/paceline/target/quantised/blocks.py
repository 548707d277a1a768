"""Weights of few bits in blocks, byte for byte as in GGUF files.

A block has 32 or 256 neighbouring inputs of one output: small whole numbers and their scales. The package gguf
quantises and expands them; products with blocks need one of KINDS. A quantised model is another model than its
checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from paceline import processor
from paceline.core import rules
from paceline.errors import ModelError
from paceline.target.shape import UNQUANTISED

ACTIVATIONS = 8, 16
SMALL = 256 << 20
"""Bytes of a model in blocks up to which inputs have 16 bits by default on all processors (docs/quantised.md)."""
CHUNK = 1 << 22  # number of weights converted at once: the conversion needs several times the memory of the blocks


@dataclass(frozen=True)
class Kind:
    """A format of blocks.

    name, number  ggml's name and number.
    inputs        number of weights in a block.
    nbytes        bytes of a block.
    offset        number to subtract from unsigned codes (`kernels/integer.py`); 0 for formats with a minimum."""

    name: str
    number: int
    inputs: int
    nbytes: int
    offset: int

    @property
    def bits(self) -> float:
        """Bits of a weight, including scales."""
        return 8 * self.nbytes / self.inputs

    @property
    def has_minimum(self) -> bool:
        """Whether a weight is scale * code + minimum, instead of scale * (code - offset)."""
        return self.offset == 0


Q8_0 = Kind("Q8_0", 8, 32, 34, 128)
Q4_0 = Kind("Q4_0", 2, 32, 18, 8)
Q4_1 = Kind("Q4_1", 3, 32, 20, 0)
Q5_0 = Kind("Q5_0", 6, 32, 22, 16)
Q5_1 = Kind("Q5_1", 7, 32, 24, 0)
Q4_K = Kind("Q4_K", 12, 256, 144, 0)
Q5_K = Kind("Q5_K", 13, 256, 176, 0)
Q6_K = Kind("Q6_K", 14, 256, 210, 32)
KINDS = {kind.number: kind for kind in (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K)}
"""Formats that `kernels/integer.py` multiplies, by number. All others can only be expanded."""


@cache
def kind_of(number: int) -> Kind | None:
    """Look up ggml's format by number; None if the package gguf cannot expand it."""
    if number in KINDS:
        return KINDS[number]
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    try:
        known = GGMLQuantizationType(number)
        inputs, nbytes = GGML_QUANT_SIZES[known]
        quants.dequantize(np.zeros((1, nbytes), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return Kind(known.name, number, inputs, nbytes, 0)


class Blocks:
    """A weight [outputs, width] in blocks.

    data         uint8 [outputs, bytes of a row], possibly mapped from a file.
    activations  bits to which products with it round their inputs: one of ACTIVATIONS.
    nbytes       bytes of all blocks."""

    def __init__(self, kind: Kind, data: torch.Tensor, activations: int = 8):
        self.kind, self.data, self.activations, self.nbytes = kind, data, activations, data.nbytes
        self.shape = torch.Size((len(data), data.shape[1] // kind.nbytes * kind.inputs))

    def rows(self, ids: torch.Tensor | slice) -> Blocks:
        """The blocks of outputs `ids`."""
        return Blocks(self.kind, self.data[ids], self.activations)

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Expand the weight [outputs, width]."""
        from gguf import GGMLQuantizationType, quants  # imported here: most models have no blocks

        kind, out = GGMLQuantizationType(self.kind.number), torch.empty(self.shape, dtype=dtype)
        with np.errstate(all="ignore"):  # NaN scales become NaN weights, so that damage shows
            for some in _chunks(self.shape):
                out[some] = torch.from_numpy(quants.dequantize(self.data[some].numpy(), kind))
        return out


def joined(parts: Sequence[Blocks]) -> Blocks:
    """Stack blocks of the same kind and width."""
    first, *more = parts
    return Blocks(first.kind, torch.cat([part.data for part in parts]), first.activations) if more else first


def quantise(weight: torch.Tensor | Blocks, kind: Kind) -> Blocks:
    """Quantise a weight [outputs, width] to blocks of `kind`, Q8_0 or Q4_0, with the bytes of llama.cpp's quantiser.
    `width` is a multiple of 32."""
    from gguf import GGMLQuantizationType, quants

    number = GGMLQuantizationType(kind.number)
    data = torch.empty(weight.shape[0], weight.shape[1] // kind.inputs * kind.nbytes, dtype=torch.uint8)
    with np.errstate(all="ignore"):  # as in `dense`
        for some in _chunks(weight.shape):
            part = weight.rows(some).dense() if isinstance(weight, Blocks) else weight[some].float()
            data[some] = torch.from_numpy(quants.quantize(part.numpy(), number))
    return Blocks(kind, data)


def _chunks(shape: torch.Size) -> list[slice]:
    step = max(1, CHUNK // max(shape[1], 1))
    return [slice(begin, begin + step) for begin in range(0, shape[0], step)]


# The weights of a model ----------------------------------------------------------------------------------------------

PRECISIONS: dict[str, tuple[Kind, Kind]] = dict(zip(rules.PRECISIONS, ((Q8_0, Q8_0), (Q4_0, Q8_0)), strict=True))
"""Kinds of the layers' matrices, and of the embedding and the output head, which lose the most with few bits."""
_OUTER = ("model.embed_tokens.weight", "lm_head.weight")

T = TypeVar("T")
Weights = dict[str, "torch.Tensor | Blocks"]
WeightsByName = Mapping[str, "torch.Tensor | Blocks"]


def exact_dtype(dtype: str | torch.dtype, kinds: str | None) -> str:
    """The dtype that keeps a model's blocks and has all else in float32; kinds: `Target.quantised` with `dtype`."""
    precision, _ = rules.split_dtype(dtype)
    return f"{precision}-float32" if precision and kinds else "float32"


def quantised(weights: WeightsByName, word: str) -> Weights:
    """Quantise matrices to precision `word`, except UNQUANTISED matrices and widths that are no multiple of 32.

    Blocks of fewer bits are expanded first; other blocks stay."""
    inner, outer = PRECISIONS[word]
    kept = tuple(f".{part}.weight" for part in UNQUANTISED)
    made: Weights = {}
    for name, weight in weights.items():
        if isinstance(weight, Blocks):
            made[name] = quantise(weight.dense(), inner) if weight.kind.bits < inner.bits else weight
            continue
        fits = weight.ndim == 2 and weight.shape[1] % inner.inputs == 0 and not name.endswith(kept)
        made[name] = quantise(weight, outer if name in _OUTER else inner) if fits else weight
    return made


def multipliable(weights: Weights) -> tuple[Weights, str | None]:
    """Convert matrices whose formats are not in KINDS to Q8_0. Returns the weights and a line about the conversion, or
    None if there was none. An embedding that is not also the output head is not multiplied, and stays."""
    looked_up = _OUTER[0] if _OUTER[1] in weights else None
    others = {
        name: w
        for name, w in weights.items()
        if isinstance(w, Blocks) and w.kind.number not in KINDS and name != looked_up
    }
    if not others:
        return weights, None
    made = {name: quantise(w, Q8_0) for name, w in others.items()}
    counts = Counter(w.kind.name for w in others.values()).most_common()
    now, before = (sum(w.nbytes for w in group.values()) / 1e6 for group in (made, others))
    what = " and ".join(f"{count} in {kind}" for kind, count in counts)
    return weights | made, f"matrices held as Q8_0: {what}; {now:,.0f} MB instead of {before:,.0f}"


def tensors_of(weights: WeightsByName) -> dict[str, torch.Tensor]:
    """The weights that are not in blocks: norms, biases, tables."""
    return {name: w for name, w in weights.items() if isinstance(w, torch.Tensor)}


def within(named: Mapping[str, T], start: str) -> dict[str, T]:
    """What has a name that begins with `start`, such as weights, by the rest of the name."""
    return {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}


def in_precision(name: str | Path, weights: WeightsByName, word: str | None) -> tuple[Weights, str | None]:
    """Quantise a model's weights to precision `word`, "int8" or "int4"; other words change nothing. Returns them
    and a description of the blocks that were quantised again; None: there were none.

    ModelError for blocks, unless `word` is int8 and some have fewer than eight bits: Q8_0 rounds a weight by at most
    1/254 of the largest in its block, which is little beside the loss of fewer bits."""
    in_blocks = [weight for weight in weights.values() if isinstance(weight, Blocks)]
    if word not in PRECISIONS:
        return {**weights}, None
    if in_blocks and (word == "int4" or all(w.kind.bits >= Q8_0.bits for w in in_blocks)):
        raise ModelError(
            f"{name} has its weights in {describe(weights)} already, so {word} cannot be made of it: leave dtype out "
            "to keep its blocks (auto-float32: all else in float32), or name float32, bfloat16 or float16 to expand "
            "them"
        )
    return quantised(weights, word), describe(weights) if in_blocks else None


def round_inputs(
    name: str | Path, weights: WeightsByName, activations: int | None, dtype: torch.dtype | None
) -> int | None:
    """Set and return the number of bits to which products with blocks round inputs; None: there are no blocks.

    activations  8, 16, or None for the `usual` number.
    dtype        dtype of all else; None: not decided yet.

    ModelError for other numbers, or for a number without blocks."""
    if activations not in (None, *ACTIVATIONS):
        raise ModelError(f"activations is {activations}; there are 8 and 16")
    in_blocks = [weight for weight in weights.values() if isinstance(weight, Blocks)]
    if not in_blocks:
        if activations is not None:
            raise ModelError(f"{name}: activations are rounded by products with weights in blocks, and it has none")
        return None
    if activations is None:
        activations, _ = usual(sum(weight.nbytes for weight in in_blocks), dtype)
    for weight in in_blocks:
        weight.activations = activations
    return activations


def usual(nbytes: int, dtype: torch.dtype | None) -> tuple[int, str]:
    """The default number of bits to which products with `nbytes` bytes of blocks round inputs, and the reason: 16 where
    that takes little time.

    dtype  dtype of all else; None: not decided yet."""
    if dtype not in (None, torch.float32):
        return 8, "all else is in 16 bits anyhow"
    if nbytes <= SMALL:
        return 16, f"the weights take at most {SMALL >> 20} MB, so it costs little time"
    if processor.has("avx512vnni") and not processor.has("amx-bf16"):
        return 16, "this processor has AVX-512 VNNI, so it costs little time"
    return 8, "16 would cost more than a seventh of the time of an answer on this processor"


def describe(weights: WeightsByName) -> str | None:
    """Describe formats, most frequent first, and bits: "F16 and Q8_0, 13.4 bits a weight". None: no blocks."""
    matrices = [w for w in weights.values() if len(w.shape) == 2]
    if not any(isinstance(w, Blocks) for w in matrices):
        return None
    sizes: dict[str, int] = {}
    for w in matrices:
        kind = w.kind.name if isinstance(w, Blocks) else "BF16" if w.dtype == torch.bfloat16 else f"F{8 * w.itemsize}"
        sizes[kind] = sizes.get(kind, 0) + w.shape.numel()
    names = sorted(sizes, key=lambda name: -sizes[name])
    bits = 8 * sum(w.nbytes for w in matrices) / sum(sizes.values())
    return f"{' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}, {bits:.1f} bits a weight"
