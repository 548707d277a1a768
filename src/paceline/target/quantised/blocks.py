"""Weights of few bits in blocks, byte for byte as GGUF files hold them: read, and two kinds also made.

    blocks = quantise(weight, Q8_0)
    blocks.dense()                       # float32 [outputs, width], each number what the format says it is

A block holds 32 or 256 neighbouring inputs of one output: small whole numbers, and the scales that turn them into
weights. The package gguf reads every kind; products with blocks need one of KINDS. Knows nothing of files or of
products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

CHUNK = 1 << 22
"""Weights that are converted at once: temporary numbers take several times the room of the blocks."""


@dataclass(frozen=True)
class Kind:
    """A format of blocks.

    name, number  ggml's. inputs: weights of a block; nbytes: bytes of a block.
    offset        what is taken off the unsigned codes of the panels; see `target/integer.py`."""

    name: str
    number: int
    inputs: int
    nbytes: int
    offset: int

    @property
    def bits(self) -> float:
        """Bits of a weight, scales included."""
        return 8 * self.nbytes / self.inputs


Q8_0 = Kind("Q8_0", 8, 32, 34, 128)
Q4_0 = Kind("Q4_0", 2, 32, 18, 8)
Q4_K = Kind("Q4_K", 12, 256, 144, 0)
Q6_K = Kind("Q6_K", 14, 256, 210, 32)
KINDS = {kind.number: kind for kind in (Q8_0, Q4_0, Q4_K, Q6_K)}
"""By number, those that `target/integer.py` multiplies. All others can only be expanded."""


@cache
def kind_of(number: int) -> Kind | None:
    """The format with that number of ggml's; None for one that cannot be read."""
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

    data  uint8 [outputs, bytes of a row], which may be mapped from a file."""

    def __init__(self, kind: Kind, data: torch.Tensor):
        self.kind, self.data = kind, data
        self.shape = torch.Size((len(data), data.shape[1] // kind.nbytes * kind.inputs))

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.data.nbytes

    def rows(self, ids: torch.Tensor) -> Blocks:
        """The outputs `ids` alone, copied."""
        return Blocks(self.kind, self.data[ids])

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [outputs, width]."""
        from gguf import GGMLQuantizationType, quants  # imported here: most models have no blocks

        kind, out = GGMLQuantizationType(self.kind.number), torch.empty(self.shape, dtype=dtype)
        with np.errstate(all="ignore"):  # scales that are no numbers stay visible in the weights
            for some in _chunks(self.shape):
                out[some] = torch.from_numpy(quants.dequantize(self.data[some].numpy(), kind))
        return out


def joined(parts: Sequence[Blocks]) -> Blocks:
    """Blocks of one kind and width below each other."""
    return parts[0] if len(parts) == 1 else Blocks(parts[0].kind, torch.cat([part.data for part in parts]))


def quantise(weight: torch.Tensor, kind: Kind) -> Blocks:
    """A weight [outputs, width] in blocks of `kind`, Q8_0 or Q4_0, with the bytes that llama.cpp's quantiser makes of
    its float32 values. `width` is a multiple of 32."""
    data = torch.empty(len(weight), weight.shape[1] // kind.inputs * kind.nbytes, dtype=torch.uint8)
    for some in _chunks(weight.shape):
        values = weight[some].float()
        data[some] = _MADE[kind](values.view(len(values), -1, kind.inputs)).flatten(1)
    return Blocks(kind, data)


def _chunks(shape: torch.Size) -> list[slice]:
    step = max(1, CHUNK // max(shape[1], 1))
    return [slice(begin, begin + step) for begin in range(0, shape[0], step)]


# Scales and codes of the kinds that pack them ------------------------------------------------------------------------


def _nibbles(block: torch.Tensor) -> torch.Tensor:
    """Low halves of bytes [..., bytes], then their high halves: [..., 2, bytes]."""
    return torch.stack([block & 15, block >> 4], -2)


def scales_of_q4_k(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each block the scales and the minima of its eight runs, uint8 [..., 8]: six bits each, packed in twelve
    bytes."""
    low, high, mixed = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scale = torch.cat([low & 63, (mixed & 15) | (low >> 6 << 4)], -1)
    minimum = torch.cat([high & 63, (mixed >> 4) | (high >> 6 << 4)], -1)
    return scale, minimum


def codes_of_q6_k(block: torch.Tensor) -> torch.Tensor:
    """Of each block the codes 0 to 63, uint8 [..., 256]: four bits from one place, two from another."""
    low = _nibbles(block[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (2, 32)).flatten(-3, -2)
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = (block[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    return (low | (high << 4)).flatten(-3)


# Making: float32 [rows, blocks, 32] to blocks [rows, blocks, bytes] ----------------------------------------------


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0, 1 / scale)


def _made_q8_0(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(-1, keepdim=True) / 127
    numbers = values * _inverse(scale)
    size = numbers.abs()
    rounded = (size.floor() + (2 * (size - size.floor())).floor()) * numbers.sign()  # halves go away from zero
    return torch.cat([scale.half().view(torch.uint8), rounded.to(torch.int8).view(torch.uint8)], -1)


def _made_q4_0(values: torch.Tensor) -> torch.Tensor:
    scale = values.gather(-1, values.abs().argmax(-1, keepdim=True)) / -8
    codes = (values * _inverse(scale) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat([scale.half().view(torch.uint8), codes[..., :16] | (codes[..., 16:] << 4)], -1)


_MADE: dict[Kind, Callable[[torch.Tensor], torch.Tensor]] = {Q8_0: _made_q8_0, Q4_0: _made_q4_0}
