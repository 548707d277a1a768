"""Weights of few bits in blocks, byte for byte as in GGUF files.

A block has 32 or 256 neighbouring inputs of an output: small whole numbers and their scales. The package gguf quantises
and expands blocks; products with blocks are only for KINDS. A quantised model is another model than its checkpoint."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

ACTIVATIONS = 8, 16
CHUNK = 1 << 22
"""Number of weights converted together. Conversion needs several times the memory of the blocks."""


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
        """Mean bits of a weight, with its share of scales."""
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
MXFP4 = Kind("MXFP4", 39, 32, 17, 12)
KINDS = {kind.number: kind for kind in (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4)}
"""Formats that `kernels/integer.py` multiplies, by number. Other formats can only be expanded."""


@cache
def kind_of(number: int) -> Kind | None:
    """Return ggml's format by number; None if the package gguf cannot expand it."""
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
    activations  bits to which products with it round their inputs, from ACTIVATIONS.
    nbytes       bytes of all blocks."""

    def __init__(self, kind: Kind, data: torch.Tensor, activations: int = 8):
        self.kind, self.data, self.activations, self.nbytes = kind, data, activations, data.nbytes
        self.shape = torch.Size((len(data), data.shape[1] // kind.nbytes * kind.inputs))

    def rows(self, ids: torch.Tensor | slice) -> Blocks:
        """Return the blocks of outputs `ids`."""
        return Blocks(self.kind, self.data[ids], self.activations)

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Expand the weight [outputs, width]."""
        from gguf import GGMLQuantizationType, quants  # imported here, because most models have no blocks

        kind, out = GGMLQuantizationType(self.kind.number), torch.empty(self.shape, dtype=dtype)
        with np.errstate(all="ignore"):  # NaN scales become NaN weights, so that damage shows.
            for some in _chunks(self.shape):
                out[some] = torch.from_numpy(quants.dequantize(self.data[some].numpy(), kind))
        return out


def quantise(weight: torch.Tensor | Blocks, kind: Kind) -> Blocks:
    """Quantise a weight [outputs, width] to blocks of `kind`, Q8_0 or Q4_0, with the same bytes as llama.cpp. The width
    must be a multiple of 32."""
    from gguf import GGMLQuantizationType, quants

    number = GGMLQuantizationType(kind.number)
    data = torch.empty(weight.shape[0], weight.shape[1] // kind.inputs * kind.nbytes, dtype=torch.uint8)
    with np.errstate(all="ignore"):  # NaN stays NaN, as in `dense`.
        for some in _chunks(weight.shape):
            part = weight.rows(some).dense() if isinstance(weight, Blocks) else weight[some].float()
            data[some] = torch.from_numpy(quants.quantize(part.numpy(), number))
    return Blocks(kind, data)


def _chunks(shape: torch.Size) -> list[slice]:
    step = max(1, CHUNK // max(shape[1], 1))
    return [slice(begin, begin + step) for begin in range(0, shape[0], step)]


# Weights by name -----------------------------------------------------------------------------------------------------

T = TypeVar("T")
Weights = dict[str, "torch.Tensor | Blocks"]
WeightsByName = Mapping[str, "torch.Tensor | Blocks"]


def tensors_of(weights: WeightsByName) -> dict[str, torch.Tensor]:
    """The weights that are not in blocks: norms, biases, tables."""
    return {name: w for name, w in weights.items() if isinstance(w, torch.Tensor)}


def within(named: Mapping[str, T], start: str) -> dict[str, T]:
    """The items whose names begin with `start`, by the rest of the name."""
    return {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}


# Memory --------------------------------------------------------------------------------------------------------------


def give_back(weights: Iterable[torch.Tensor | Blocks]) -> None:
    """Give the memory of weights back that are mapped from files: it is read again if it is needed again. Only for
    weights that nobody has written to. Other weights, and those on systems other than Linux, stay as they are."""
    datas = [weight.data for weight in weights]
    places = [(data.data_ptr(), data.nbytes) for data in datas if data.device.type == "cpu" and data.is_contiguous()]
    advise = _advise()
    mapped = [] if advise is None else _mapped()
    for at, size in places:
        first, end = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE, (at + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end and any(begin <= first and end <= last for begin, last in mapped):
            advise(first, end - first, mmap.MADV_DONTNEED)


def _mapped() -> list[tuple[int, int]]:
    """Addresses of this process at which files are mapped, each with its end."""
    try:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    ends = [line[0].split("-") for line in lines if line[4] != "0"]
    return [(int(begin, 16), int(end, 16)) for begin, end in ends]


@cache
def _advise() -> Any:
    """madvise; None where there is none."""
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return found
