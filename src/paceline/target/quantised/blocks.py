"""Weights of few bits in blocks, byte for byte as GGUF files hold them.

    blocks = quantise(weight, Q8_0)
    blocks.dense()                       # float32 [outputs, width], each number what the format says it is

A block holds 32 or 256 neighbouring inputs of one output: small whole numbers, and the scales that turn them into
weights. The package gguf makes and reads them; products with blocks need one of KINDS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

CHUNK = 1 << 22
"""Weights that are converted at once: temporary numbers take several times the memory of the blocks."""


@dataclass(frozen=True)
class Kind:
    """A format of blocks.

    name, number  ggml's. inputs: weights of a block; nbytes: bytes of a block.
    offset        what is taken off the unsigned codes of the panels (`kernels/integer.py`)."""

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
"""By number, those that `kernels/integer.py` multiplies. All others can only be expanded."""


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
    from gguf import GGMLQuantizationType, quants

    number = GGMLQuantizationType(kind.number)
    data = torch.empty(len(weight), weight.shape[1] // kind.inputs * kind.nbytes, dtype=torch.uint8)
    with np.errstate(all="ignore"):  # as in `dense`
        for some in _chunks(weight.shape):
            data[some] = torch.from_numpy(quants.quantize(weight[some].float().numpy(), number))
    return Blocks(kind, data)


def _chunks(shape: torch.Size) -> list[slice]:
    step = max(1, CHUNK // max(shape[1], 1))
    return [slice(begin, begin + step) for begin in range(0, shape[0], step)]
