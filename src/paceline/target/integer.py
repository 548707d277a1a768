"""x @ weight.T where the weights are blocks of four to eight bits: whole numbers are multiplied, on CPUs.

Weights stay as a file has them (target/blocks.py), in another order: panels of 16 outputs, which stream from memory
once for up to 12 rows. Each row of x is rounded by itself, to eight bits by 32 inputs: d = max|x| / 127 and
q = rint(x / d). Codes of weights are unsigned; what that adds to a sum, offset * sum(q), is taken off beforehand. Sums
of whole numbers are exact, and those of the blocks are added in the order of the blocks, so a row's result is the same,
bit for bit, alone and among others, on any number of threads.

A block and a row: four products of bytes and their sum are one instruction where the CPU has VNNI. Elsewhere the same
sums are formed by ordinary instructions, which is slow, and right to the last bit.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm
import torch

from paceline.target import integer_kernel
from paceline.target.blocks import Q4_K, Q6_K, Q8_0, Blocks, Kind, codes_of_q6_k, joined, scales_of_q4_k
from paceline.target.integer_kernel import COLUMNS, UNITS

STEP = 64
"""Panels that are laid out at once."""
DTYPES = (torch.bfloat16, torch.float32)
"""Of x, and so of the result."""


@cache
def fast() -> bool:
    """Whether this CPU multiplies bytes at full speed: AVX-512 VNNI."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512vnni")) and bool(features.get("avx512bw"))


@cache
def supported() -> bool:
    """Whether the kernel runs here at all: it needs conversion of float16, and fused multiplication and addition."""
    features = llvm.get_host_cpu_features()
    return platform.machine() in ("aarch64", "arm64") or bool(features.get("f16c") and features.get("fma"))


def warnings() -> list[str]:
    """What a user of blocks should know of this CPU."""
    if not supported():
        return ["this CPU cannot multiply weights of eight and four bits: they were expanded, and save nothing"]
    return [] if fast() else ["this CPU has no AVX-512 VNNI: weights of eight and four bits are multiplied slowly"]


class IntegerPanels:
    """A weight [outputs, width] whose parts are below each other, each in blocks of a kind of its own; and a bias
    [outputs] or None."""

    def __init__(self, parts: Sequence[Blocks], bias: torch.Tensor | None = None):
        self.width = parts[0].shape[1]
        self._parts: list[_Part] = []
        first = 0
        for same in _runs(parts):
            outputs = same.shape[0]
            self._parts.append(_Part(same, first, None if bias is None else bias[first : first + outputs]))
            first += outputs
        self.outputs = first

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks as a file has them."""
        return sum(part.outputs * part.row_bytes for part in self._parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] @ weight.T + bias, [rows, outputs], in the dtype of x."""
        x = x.contiguous()
        out = x.new_empty(len(x), self.outputs)
        for part in self._parts if len(x) else ():
            part.multiply(x, out)
        return out

    def blocks(self) -> list[Blocks]:
        """The weight as it was, by parts."""
        return [part.blocks() for part in self._parts]

    def rows(self, ids: torch.Tensor) -> list[Blocks]:
        """The outputs `ids`, one after another; neighbours of one kind are joined."""
        if len(self._parts) == 1:
            return [self._parts[0].blocks(ids)]
        return _runs([part.blocks(ids[i : i + 1] - part.first) for i, part in enumerate(map(self._part_of, ids))])

    def _part_of(self, output: torch.Tensor) -> _Part:
        return next(part for part in reversed(self._parts) if part.first <= output)


def _runs(parts: Sequence[Blocks]) -> list[Blocks]:
    """Neighbours of one kind joined."""
    runs: list[list[Blocks]] = []
    for part in parts:
        if runs and runs[-1][0].kind == part.kind:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [joined(run) for run in runs]


class _Part:
    """Panels of one kind, `outputs` columns of a result from `first` on."""

    def __init__(self, blocks: Blocks, first: int, bias: torch.Tensor | None):
        self.kind, self.first = blocks.kind, first
        self.outputs, self.width = blocks.shape
        self.row_bytes = blocks.data.shape[1]
        self._unit = UNITS[self.kind]
        self._units = -(-self.width // (32 * self._unit.blocks))
        count = -(-self.outputs // COLUMNS)
        self._panels = torch.empty(count, self._units, self._unit.nbytes, dtype=torch.uint8)
        for begin in range(0, count, STEP):
            some = blocks.data[begin * COLUMNS : (begin + STEP) * COLUMNS]
            self._panels[begin : begin + STEP] = _packed(_columns(self.kind, some))
        self._bias = torch.zeros(count * COLUMNS)
        if bias is not None:
            self._bias[: self.outputs] = bias
        self._at = self._panels.data_ptr(), self._bias.data_ptr()
        blocks_run = self._units * self._unit.blocks
        self._row_records = blocks_run * self._unit.record
        # A unit that is not full has a block after the last one, whose record must be zeros.
        self._records = torch.empty if blocks_run * 32 == self.width else torch.zeros

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Fill this part's columns of `out`."""
        rows, columns = out.shape
        records = self._records(rows * self._row_records, dtype=torch.uint8)
        size = out.element_size()
        integer_kernel.compiled(self.kind, x.dtype, fast())(
            x.data_ptr(), records.data_ptr(), *self._at, out.data_ptr() + self.first * size, rows, self.width // 32,
            self._units, self.outputs, columns * size, torch.get_num_threads(),
        )  # fmt: skip

    def blocks(self, ids: torch.Tensor | None = None) -> Blocks:
        """The outputs `ids`, or all."""
        ids = torch.arange(self.outputs) if ids is None else ids
        columns = _unpacked(self.kind, self._panels, ids)
        return Blocks(self.kind, _file_bytes(self.kind, columns)[:, : self.row_bytes].contiguous())


# The order of a panel ------------------------------------------------------------------------------------------------


class _Columns(NamedTuple):
    """Outputs one by one, each [outputs, units, count of its unit]: float16 as int16, bytes, and four codes a word."""

    halves: torch.Tensor
    bytes: torch.Tensor
    words: torch.Tensor


def _columns(kind: Kind, data: torch.Tensor) -> _Columns:
    """Blocks as a file has them, uint8 [outputs, bytes], to columns; a unit that is not full ends with zeros."""
    unit = UNITS[kind]
    per_unit = unit.blocks * 32 // kind.inputs
    blocks = data.unflatten(1, (-1, kind.nbytes))
    if missing := -blocks.shape[1] % per_unit:
        blocks = torch.nn.functional.pad(blocks, (0, 0, 0, missing))
    if kind == Q4_K:
        return _Columns(_halves(blocks[..., :4]), torch.cat(scales_of_q4_k(blocks), -1), _words(blocks[..., 16:]))
    if kind == Q6_K:
        halves = torch.nn.functional.pad(_halves(blocks[..., 208:]), (0, 1))
        return _Columns(halves, blocks[..., 192:208], _words(codes_of_q6_k(blocks)))
    codes = blocks[..., 2:] ^ (0x80 if kind == Q8_0 else 0)
    halves = _halves(blocks[..., :2]).unflatten(1, (-1, per_unit)).flatten(2)
    return _Columns(halves, blocks[:, ::per_unit, :0], _words(codes).unflatten(1, (-1, per_unit)).flatten(2))


def _file_bytes(kind: Kind, columns: _Columns) -> torch.Tensor:
    """The reverse of `_columns`: uint8 [outputs, bytes]."""
    halves, codes = columns.halves.contiguous().view(torch.uint8), columns.words.contiguous().view(torch.uint8)
    if kind == Q4_K:
        return torch.cat([halves, _packed_scales(columns.bytes), codes], -1).flatten(1)
    if kind == Q6_K:
        return torch.cat([*_packed_codes(codes), columns.bytes, halves[..., :2]], -1).flatten(1)
    per_unit = UNITS[kind].blocks
    codes = codes ^ (0x80 if kind == Q8_0 else 0)
    blocks = torch.cat([halves.unflatten(2, (per_unit, -1)), codes.unflatten(2, (per_unit, -1))], -1)
    return blocks.flatten(1)


def _packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales and minima of Q4_K, [..., 16], in their twelve bytes."""
    scale, minimum = scales[..., :8], scales[..., 8:]
    low = scale[..., :4] | (scale[..., 4:] >> 4 << 6)
    high = minimum[..., :4] | (minimum[..., 4:] >> 4 << 6)
    return torch.cat([low, high, (scale[..., 4:] & 15) | (minimum[..., 4:] << 4)], -1)


def _packed_codes(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of Q6_K, [..., 256], as 128 bytes of low and 64 of high bits."""
    halves = codes.unflatten(-1, (2, 2, 64))
    low = (halves[..., 0, :] & 15) | (halves[..., 1, :] << 4)
    quarters = codes.unflatten(-1, (2, 4, 32)) >> 4
    high = quarters[..., 0, :] | quarters[..., 1, :] << 2 | quarters[..., 2, :] << 4 | quarters[..., 3, :] << 6
    return low.flatten(-2), high.flatten(-2)


def _halves(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.int16)


def _words(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.int32)


def _packed(columns: _Columns) -> torch.Tensor:
    """Columns to panels, uint8 [panels, units, bytes]: in a unit each number of 16 outputs side by side."""
    fields = []
    for field in columns:
        full = torch.nn.functional.pad(field, (0, 0, 0, 0, 0, -len(field) % COLUMNS))
        lanes = full.unflatten(0, (-1, COLUMNS)).permute(0, 2, 3, 1).contiguous()
        fields.append(lanes.view(torch.uint8).flatten(2))
    return torch.cat(fields, -1)


def _unpacked(kind: Kind, panels: torch.Tensor, ids: torch.Tensor) -> _Columns:
    """The columns `ids` of panels."""
    unit, begin, fields = UNITS[kind], 0, []
    for count, dtype in ((unit.halves, torch.int16), (unit.bytes, torch.uint8), (unit.words, torch.int32)):
        end = begin + count * COLUMNS * dtype.itemsize
        lanes = panels[..., begin:end].view(dtype).unflatten(-1, (count, COLUMNS))
        fields.append(lanes[ids // COLUMNS, :, :, ids % COLUMNS])
        begin = end
    return _Columns(*fields)
