"""x @ weight.T with weights in blocks of four to eight bits, multiplied as integers on CPUs.

    IntegerPanels([Blocks, ...])(x)

Rows of x are rounded to eight bits in records: 32 inputs and a scale. The codes of a block and the numbers of a record
are multiplied and summed as integers; this sum, times both scales, is added in float32. Every sum has one order, so a
row's result is the same, bit for bit, among any other rows and on any number of threads.

Panels have the blocks of 16 outputs in the order of use. Tiles multiply the records of up to 12 rows by a panel, in the
frame of `products.py`.
"""

from __future__ import annotations

import platform
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np
import torch
from numba import carray, cfunc
from torch.nn.functional import pad

from paceline.compiled import call
from paceline.target.kernels import on_threads
from paceline.target.kernels.products import Tiles, constant, loaded, prefetched, splat, tile
from paceline.target.quantised.blocks import (
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    Blocks,
    Kind,
    joined,
)

COLUMNS = 16
"""Outputs of a panel. With 32, the sums of twelve rows do not fit into the registers."""
ROWS = 12
"""Most rows of a tile: each needs two of 32 registers, for its sum and that of the current block."""
SLOW_ROWS = 4
"""The same without VNNI: larger tiles are hardly faster, for a row needs many instructions, and compile for seconds."""
PAIR = 2
"""Blocks in a turn of the innermost loop: two blocks share bytes."""
STEP = 64
"""Panels that are packed at once."""
DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of x and of the result."""


@dataclass(frozen=True)
class Unit:
    """A unit of a panel: what it holds of each of its outputs.

    blocks         number of blocks of 32 inputs.
    bits           bits of a code.
    halves, bytes  number of values of two bytes and of one.
    runs           sums of a block: inputs that share a scale have one.

    Codes follow in lines, a word of four bytes for each output. Codes of eight bits: a line has four inputs of a block.
    Of others, eight lines have the low four bits of two blocks; where bits are left, the lines of `high` follow."""

    blocks: int
    bits: int
    halves: int
    bytes: int = 0
    runs: int = 1

    @property
    def high(self) -> int:
        """Bits of a code that are not in its nibble."""
        return 0 if self.bits == 8 else self.bits - 4

    @property
    def header(self) -> int:
        """Bytes of all outputs before their codes."""
        return COLUMNS * (2 * self.halves + self.bytes)

    @property
    def words(self) -> int:
        """Lines of codes."""
        return self.blocks * self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs; a multiple of a cache line's 64."""
        return self.header + 4 * COLUMNS * self.words

    @property
    def record(self) -> int:
        """Bytes of a record, the block of a rounded row: its 32 numbers, their scale, and what its sums begin with."""
        return 36 + 4 * self.runs


UNITS = {
    Q8_0: Unit(blocks=2, bits=8, halves=2),
    Q4_0: Unit(blocks=2, bits=4, halves=2),
    Q4_1: Unit(blocks=2, bits=4, halves=4),
    Q5_0: Unit(blocks=2, bits=5, halves=2),
    Q5_1: Unit(blocks=2, bits=5, halves=4),
    Q4_K: Unit(blocks=8, bits=4, halves=2, bytes=16),
    Q5_K: Unit(blocks=8, bits=5, halves=2, bytes=16),
    Q6_K: Unit(blocks=8, bits=6, halves=2, bytes=16, runs=2),
}


@cache
def fast() -> bool:
    """Whether this CPU multiplies bytes at full speed (AVX-512 VNNI)."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512vnni")) and bool(features.get("avx512bw"))


@cache
def supported() -> bool:
    """Whether the kernel runs here: it needs conversion of float16, and fused multiplication and addition."""
    features = llvm.get_host_cpu_features()
    return platform.machine() in ("aarch64", "arm64") or bool(features.get("f16c") and features.get("fma"))


def warnings() -> list[str]:
    """Lines for users of blocks on this CPU."""
    if not supported():
        return ["this CPU cannot multiply weights of eight and four bits: they were expanded, and save nothing"]
    return [] if fast() else ["this CPU has no AVX-512 VNNI: weights of eight and four bits are multiplied slowly"]


class IntegerPanels:
    """A weight [outputs, width] of stacked parts, whose kinds of blocks may differ; and a bias [outputs] or None."""

    def __init__(self, parts: Sequence[Blocks], bias: torch.Tensor | None = None):
        self.width = parts[0].shape[1]
        self._parts: list[_Part] = []
        first = 0
        for same in _runs(parts):
            outputs = same.shape[0]
            self._parts.append(_Part(same, first, None if bias is None else bias[first : first + outputs]))
            first += outputs
        self.outputs = first

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] @ weight.T + bias, [rows, outputs], in the dtype of x."""
        x = x.contiguous()
        out = x.new_empty(len(x), self.outputs)
        for part in self._parts if len(x) else ():
            part.multiply(x, out)
        return out

    def blocks(self) -> list[Blocks]:
        """The weight, part by part."""
        return [part.blocks() for part in self._parts]

    def dense(self) -> torch.Tensor:
        """The weight [outputs, width] in float32."""
        return torch.cat([part.dense() for part in self.blocks()])

    def rows(self, ids: torch.Tensor) -> list[Blocks]:
        """The outputs `ids`, in order; neighbours of one kind are joined."""
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
    """Panels of one kind, for columns first to first + outputs - 1 of the result."""

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
        # A unit that is not full ends with blocks of padding, whose records must be zeros.
        self._records = torch.empty if blocks_run * 32 == self.width else torch.zeros

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Fill this part's columns of `out`."""
        (rows, columns), size = out.shape, out.element_size()
        records = self._records(rows * self._row_records, dtype=torch.uint8)
        tiles = tiles_of(self.kind, x.dtype, fast())
        task = (
            0, tiles.address("round"), x.data_ptr(), records.data_ptr(), rows, tiles.most, self.width // 32,
            self.width * size, self._row_records, self._unit.record,
        )  # fmt: skip
        on_threads(_round_rows, array("q", task), 1)
        sizes = {"rows": rows, "outputs": self.outputs, "stride": columns * size, "units": self._units}
        tiles.multiply(records.data_ptr(), *self._at, out.data_ptr() + self.first * size, **sizes)

    def blocks(self, ids: torch.Tensor | None = None) -> Blocks:
        """The outputs `ids`; None: all."""
        ids = torch.arange(self.outputs) if ids is None else ids
        columns = _unpacked(self.kind, self._panels, ids)
        return Blocks(self.kind, _file_bytes(self.kind, columns)[:, : self.row_bytes].contiguous())


# The order of a panel ------------------------------------------------------------------------------------------------


class _Columns(NamedTuple):
    """The fields of each output, [outputs, units, count in a unit]: float16 bits as int16, bytes, words of codes."""

    halves: torch.Tensor
    bytes: torch.Tensor
    words: torch.Tensor


def _columns(kind: Kind, data: torch.Tensor) -> _Columns:
    """Columns of the blocks of a file, uint8 [outputs, bytes]; a unit that is not full ends with zeros."""
    unit, per_unit = UNITS[kind], _per_unit(kind)
    blocks = data.unflatten(1, (-1, kind.nbytes))
    if missing := -blocks.shape[1] % per_unit:
        blocks = pad(blocks, (0, 0, 0, missing))
    blocks = blocks.unflatten(1, (-1, per_unit))
    if kind == Q6_K:
        codes, high, scales, halves = blocks.split([128, 64, 16, 2], -1)
        codes = _merged(_fields(codes, 4, 64).unflatten(-1, (2, 32)).flatten(-3, -2), 4)
        halves = pad(halves, (0, 2))
    else:
        halves, scales, high, codes = blocks.split(_sizes(kind), -1)
        scales = _scales(scales) if kind.inputs == 256 else scales
        codes = codes ^ 0x80 if kind == Q8_0 else codes
    lines = codes.flatten(2).unflatten(2, (unit.blocks // PAIR, -1))
    if unit.high:
        fields = _fields(high, unit.high, _high_run(kind)).flatten(2).unflatten(2, (-1, PAIR, 8, 4))
        lines = torch.cat([lines, _merged(fields.transpose(3, 4).flatten(3, 4), unit.high)], -1)
    return _Columns(_seen_as(torch.int16, halves), scales.flatten(2), _seen_as(torch.int32, lines))


def _file_bytes(kind: Kind, columns: _Columns) -> torch.Tensor:
    """The inverse of `_columns`: uint8 [outputs, bytes]."""
    unit, per_unit = UNITS[kind], _per_unit(kind)
    halves, scales, lines = (_seen_as(torch.uint8, part) for part in columns)
    halves, scales = (part.unflatten(2, (per_unit, part.shape[2] // per_unit)) for part in (halves, scales))
    lines = lines.unflatten(2, (unit.blocks // PAIR, -1))
    codes, high = lines.split([64 if unit.bits == 8 else 32, 8 * unit.high], -1)
    codes = codes.flatten(2).unflatten(2, (per_unit, -1))
    if unit.high:
        fields = _fields(high, unit.high, 4).unflatten(3, (8, PAIR)).transpose(3, 4).flatten(2)
        high = _merged(fields.unflatten(2, (per_unit, -1, _high_run(kind))), unit.high)
    else:
        high = high.reshape(*codes.shape[:3], 0)
    if kind == Q6_K:
        codes = _merged(_fields(codes, 4, 32).unflatten(-2, (4, 2)).flatten(-2), 4)
        return torch.cat([codes, high, scales, halves[..., :2]], -1).flatten(1)
    scales = _packed_scales(scales) if kind.inputs == 256 else scales
    codes = codes ^ 0x80 if kind == Q8_0 else codes
    return torch.cat([halves, scales, high, codes], -1).flatten(1)


def _per_unit(kind: Kind) -> int:
    """A file's blocks in a unit."""
    return UNITS[kind].blocks * 32 // kind.inputs


def _sizes(kind: Kind) -> list[int]:
    """Bytes of a file's block but Q6_K's: its float16 numbers, packed scales, high bits, and nibbles or bytes."""
    unit = UNITS[kind]
    sizes = [2 * unit.halves // _per_unit(kind), 12 if kind.inputs == 256 else 0, kind.inputs * unit.high // 8]
    return [*sizes, kind.nbytes - sum(sizes)]


def _high_run(kind: Kind) -> int:
    """Neighbouring inputs whose high bits are in as many bytes of a file."""
    return 1 if kind.inputs == 32 else 32


def _fields(data: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Bytes [..., N] as fields of `bits` bits, [..., fields, run]: the lowest of `run` bytes, the next of these, ..."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (data.unflatten(-1, (-1, 1, run)) >> shifts).flatten(-3, -2) & ((1 << bits) - 1)


def _merged(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_fields`."""
    parts = fields.unflatten(-2, (-1, 8 // bits)).unbind(-2)
    return reduce(or_, (part << bits * i for i, part in enumerate(parts))).flatten(-2)


def _scales(packed: torch.Tensor) -> torch.Tensor:
    """Scales of the eight runs in Q4_K and Q5_K, then their minima, uint8 [..., 16], from twelve bytes of six bits."""
    low, high, mixed = packed.split(4, -1)
    return torch.cat([low & 63, (mixed & 15) | (low >> 6 << 4), high & 63, (mixed >> 4) | (high >> 6 << 4)], -1)


def _packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `_scales`."""
    scale, scale_4, minimum, minimum_4 = scales.split(4, -1)
    low, high = scale | (scale_4 >> 4 << 6), minimum | (minimum_4 >> 4 << 6)
    return torch.cat([low, high, (scale_4 & 15) | (minimum_4 << 4)], -1)


def _seen_as(dtype: torch.dtype, data: torch.Tensor) -> torch.Tensor:
    """[outputs, units, count] of `dtype`, from any number of dimensions after the units."""
    return data.flatten(2).contiguous().view(dtype)


def _packed(columns: _Columns) -> torch.Tensor:
    """Columns to panels, uint8 [panels, units, bytes]: a unit has each value of 16 outputs side by side."""
    fields = []
    for field in columns:
        full = pad(field, (0, 0, 0, 0, 0, -len(field) % COLUMNS))
        lanes = full.unflatten(0, (-1, COLUMNS)).permute(0, 2, 3, 1).contiguous()
        fields.append(lanes.view(torch.uint8).flatten(2))
    return torch.cat(fields, -1)


def _unpacked(kind: Kind, panels: torch.Tensor, ids: torch.Tensor) -> _Columns:
    """The columns of outputs `ids`, from panels."""
    unit, begin, fields = UNITS[kind], 0, []
    for count, dtype in ((unit.halves, torch.int16), (unit.bytes, torch.uint8), (unit.words, torch.int32)):
        end = begin + count * COLUMNS * dtype.itemsize
        lanes = panels[..., begin:end].view(dtype).unflatten(-1, (count, COLUMNS))
        fields.append(lanes[ids // COLUMNS, :, :, ids % COLUMNS])
        begin = end
    return _Columns(*fields)


# The kernel ----------------------------------------------------------------------------------------------------------

_DECLARATIONS = """
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <16 x i32>, <16 x i32>)
declare <16 x float> @llvm.rint.v16f32(<16 x float>)
declare <16 x i32> @llvm.umax.v16i32(<16 x i32>, <16 x i32>)
declare i32 @llvm.vector.reduce.umax.v16i32(<16 x i32>)
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""


@cache
def tiles_of(kind: Kind, dtype: torch.dtype, vnni: bool) -> Tiles:
    """Tiles for blocks of a kind, and @round; for rows and results of a dtype."""
    unit, functions = UNITS[kind], [*_rounding(kind, dtype)]
    most = ROWS if vnni else SLOW_ROWS
    for rows in range(1, most + 1):
        functions += tile(rows, 1, "%turns", _turn(kind, rows, vnni), dtype)
    row_unit = unit.blocks * unit.record
    return Tiles(
        _DECLARATIONS, functions, most=most, columns=COLUMNS, dtype=dtype, unit=unit.nbytes, row_unit=row_unit
    )


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def _round_rows(at):  # type: ignore[no-untyped-def]
    """Call @round at address `function` for all rows. The rows of a tile have their records block by block."""
    task = carray(at, (10,), np.int64)
    function, x, records, rows, most = task[1], task[2], task[3], task[4], task[5]
    blocks, x_bytes, row_bytes, record = task[6], task[7], task[8], task[9]
    tiles, first = -(-rows // most), 0
    for tile_at in range(tiles):
        here = rows // tiles + (tile_at < rows % tiles)
        for row in range(here):
            to = records + first * row_bytes + row * record
            call(function, (x + (first + row) * x_bytes, to, here * record, blocks))
        first += here


# Rounding ------------------------------------------------------------------------------------------------------------


def _rounding(kind: Kind, dtype: torch.dtype) -> Iterator[str]:
    """@round(x, records, stride, blocks) rounds one row to records that are `stride` bytes apart."""
    yield "define void @round(ptr %x, ptr %records, i64 %stride, i64 %blocks) {"
    yield "entry:"
    yield "  br label %loop"
    yield "loop:"
    yield "  %b = phi i64 [0, %entry], [%next, %loop]"
    yield f"  %x.at = mul i64 %b, {32 * dtype.itemsize}"
    yield "  %from = getelementptr i8, ptr %x, i64 %x.at"
    yield "  %r.at = mul i64 %b, %stride"
    yield "  %to = getelementptr i8, ptr %records, i64 %r.at"
    for half in (0, 1):
        yield from _floats(half, dtype)
        yield f"  %size{half} = and <16 x i32> %bits{half}, {constant(2147483647, 'i32')}"
    # Bits of absolute values, compared as integers, have the same order; NaN and infinity are above all.
    yield "  %sizes = call <16 x i32> @llvm.umax.v16i32(<16 x i32> %size0, <16 x i32> %size1)"
    yield "  %top = call i32 @llvm.vector.reduce.umax.v16i32(<16 x i32> %sizes)"
    yield "  %finite = icmp ult i32 %top, 2139095040"
    yield "  %max = bitcast i32 %top to float"
    yield "  %d.some = fdiv float %max, 127.0"
    yield "  %d = select i1 %finite, float %d.some, float 0x7FF8000000000000"
    yield "  %some = fcmp ogt float %d, 0.0"
    yield from splat("%by", "%d", "float")
    yield from splat("%any", "%some", "i1")
    for half in (0, 1):
        yield f"  %v{half} = bitcast <16 x i32> %bits{half} to <16 x float>"
        yield f"  %n{half} = fdiv <16 x float> %v{half}, %by"
        yield f"  %r{half} = call <16 x float> @llvm.rint.v16f32(<16 x float> %n{half})"
        yield f"  %k{half} = select <16 x i1> %any, <16 x float> %r{half}, <16 x float> zeroinitializer"
        yield f"  %q{half} = fptosi <16 x float> %k{half} to <16 x i32>"
        yield f"  %c{half} = trunc <16 x i32> %q{half} to <16 x i8>"
        yield f"  %c{half}.p = getelementptr i8, ptr %to, i64 {16 * half}"
        yield f"  store <16 x i8> %c{half}, ptr %c{half}.p, align 4"
        yield f"  %s{half} = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %q{half})"
    yield from _begun(kind)
    yield "  %next = add nuw nsw i64 %b, 1"
    yield "  %more = icmp ult i64 %next, %blocks"
    yield "  br i1 %more, label %loop, label %done"
    yield "done:"
    yield "  ret void"
    yield "}"


def _floats(half: int, dtype: torch.dtype) -> Iterator[str]:
    """%bits{half}: 16 numbers as bits of float32."""
    at = 16 * dtype.itemsize * half
    if dtype == torch.float32:
        yield from loaded(f"%bits{half}", "%from", at, "<16 x i32>")
        return
    yield from loaded(f"%narrow{half}", "%from", at, "<16 x i16>", 2)
    yield f"  %wide{half} = zext <16 x i16> %narrow{half} to <16 x i32>"
    yield f"  %bits{half} = shl <16 x i32> %wide{half}, {constant(16, 'i32')}"


def _begun(kind: Kind) -> Iterator[str]:
    """Store the scale, and what the block's sums begin with, or d * sum(q) for kinds with a minimum."""
    places = {32: "float %d"}
    if UNITS[kind].runs == 2:
        yield f"  %begin0 = mul i32 %s0, {-kind.offset}"
        yield f"  %begin1 = mul i32 %s1, {-kind.offset}"
        places |= {36: "i32 %begin0", 40: "i32 %begin1"}
    else:
        yield "  %s = add i32 %s0, %s1"
        yield f"  %begin = mul i32 %s, {-kind.offset}"
        yield "  %sf = sitofp i32 %s to float"
        yield "  %all = fmul float %d, %sf"
        places[36] = "float %all" if kind.has_minimum else "i32 %begin"
    for at, value in places.items():
        yield f"  %at{at} = getelementptr i8, ptr %to, i64 {at}"
        yield f"  store {value}, ptr %at{at}, align 4"


# A tile --------------------------------------------------------------------------------------------------------------


def _turn(kind: Kind, rows: int, vnni: bool) -> Iterator[str]:
    """PAIR blocks of a panel times the records of `rows` rows."""
    unit = UNITS[kind]
    turns = unit.blocks // PAIR
    yield f"  %turns = mul i64 %units, {turns}"
    yield f"  %unit = udiv i64 %turn, {turns}"
    yield f"  %pair = urem i64 %turn, {turns}"
    yield f"  %unit.at = mul i64 %unit, {unit.nbytes}"
    yield "  %wu = getelementptr i8, ptr %w, i64 %unit.at"
    yield f"  %lines.at = mul i64 %pair, {4 * COLUMNS * unit.words // turns}"
    yield "  %wl = getelementptr i8, ptr %wu, i64 %lines.at"
    yield f"  %scales.at = mul i64 %pair, {PAIR * COLUMNS * unit.runs}"
    yield "  %ws = getelementptr i8, ptr %wu, i64 %scales.at"
    yield f"  %x.at = mul i64 %turn, {PAIR * rows * unit.record}"
    yield "  %xp = getelementptr i8, ptr %x, i64 %x.at"
    yield f"  %a.at = mul i64 %turn, {unit.nbytes // turns}"
    yield "  %ap = getelementptr i8, ptr %ahead, i64 %a.at"
    yield from prefetched("%ap", 0, unit.nbytes // turns)
    for block in range(PAIR):
        yield from _block(kind, block, rows, vnni)


def _block(kind: Kind, block: int, rows: int, vnni: bool) -> Iterator[str]:
    """Add the scaled sums of one block."""
    before = {row: f"%s{row}.0" if block == 0 else f"%s{row}.b{block - 1}" for row in range(rows)}
    runs = UNITS[kind].runs
    for run in range(runs):
        at = f"{block}.{run}"
        groups = range(run * 8 // runs, (run + 1) * 8 // runs)
        yield from _scale(kind, block, run)
        for group in groups:
            yield from _codes(kind, block, group)
        for row in range(rows):
            start = (block * rows + row) * UNITS[kind].record
            if kind.has_minimum:
                yield f"  %t{at}.{row}.{groups[0]} = add <16 x i32> zeroinitializer, zeroinitializer"
            else:
                yield from loaded(f"%c{at}.{row}", "%xp", start + 36 + 4 * run, "i32")
                yield from splat(f"%t{at}.{row}.{groups[0]}", f"%c{at}.{row}", "i32")
        for group in groups:
            for row in range(rows):
                start = (block * rows + row) * UNITS[kind].record
                yield from loaded(f"%q{at}.{row}.{group}", "%xp", start + 4 * group, "i32")
                yield from _dot(f"{at}.{row}.{group}", f"{at}.{row}.{group + 1}", f"{block}.{group}", vnni)
        for row in range(rows):
            start = (block * rows + row) * UNITS[kind].record
            whole = f"%z{row}.0" if block == PAIR - 1 else f"%s{row}.b{block}"
            done = whole if run == runs - 1 else f"%h{at}.{row}"
            yield from loaded(f"%d{at}.{row}", "%xp", start + 32, "float")
            yield from splat(f"%ds{at}.{row}", f"%d{at}.{row}", "float")
            yield f"  %f{at}.{row} = sitofp <16 x i32> %t{at}.{row}.{groups[-1] + 1} to <16 x float>"
            yield f"  %g{at}.{row} = fmul <16 x float> %scale{at}, %ds{at}.{row}"
            gain = f"%gain{at}.{row}" if kind.has_minimum else done
            yield _fma(gain, f"%f{at}.{row}", f"%g{at}.{row}", before[row])
            if kind.has_minimum:
                yield from loaded(f"%m{at}.{row}", "%xp", start + 36, "float")
                yield from splat(f"%ms{at}.{row}", f"%m{at}.{row}", "float")
                yield _fma(done, f"%least{at}", f"%ms{at}.{row}", gain)
            before[row] = done


def _fma(name: str, a: str, b: str, c: str) -> str:
    return f"  {name} = call <16 x float> @llvm.fma.v16f32(<16 x float> {a}, <16 x float> {b}, <16 x float> {c})"


def _scale(kind: Kind, block: int, run: int) -> Iterator[str]:
    """%scale, and %least, the minimum, of kinds that have one: float32 of 16 outputs."""
    at, names = f"{block}.{run}", ("scale", "least")[: 2 if kind.has_minimum else 1]
    if kind.inputs == 32:
        for i, name in enumerate(names):
            yield from loaded(f"%{name}{at}.h", "%wu", 32 * (len(names) * block + i), "<16 x half>", 32)
            yield f"  %{name}{at} = fpext <16 x half> %{name}{at}.h to <16 x float>"
        return
    unit = UNITS[kind]
    widen = "uitofp" if kind.has_minimum else "sitofp"
    for i, name in enumerate(names):
        byte_at = 32 * unit.halves + COLUMNS * (unit.blocks * i + unit.runs * block + run)
        yield from loaded(f"%{name}{at}.h", "%wu", 32 * i, "<16 x half>", 32)
        yield from loaded(f"%{name}{at}.b", "%ws", byte_at, "<16 x i8>", 16)
        yield f"  %{name}{at}.f = fpext <16 x half> %{name}{at}.h to <16 x float>"
        yield f"  %{name}{at}.n = {widen} <16 x i8> %{name}{at}.b to <16 x float>"
        product = f"%{name}{at}.p" if name == "least" else f"%{name}{at}"
        yield f"  {product} = fmul <16 x float> %{name}{at}.f, %{name}{at}.n"
    if kind.has_minimum:  # which these kinds subtract
        yield f"  %least{at} = fneg <16 x float> %least{at}.p"


def _codes(kind: Kind, block: int, group: int) -> Iterator[str]:
    """%w{block}.{group}: codes of 16 outputs and four inputs."""
    unit, at = UNITS[kind], f"{block}.{group}"
    if unit.bits == 8:
        yield from loaded(f"%w{at}", "%wl", unit.header + 64 * (8 * block + group), "<16 x i32>", 64)
        return
    # As in files, a line has groups g and g + 4 of a block of 32, and the same group of two blocks in kinds of 256.
    line, upper = (4 * block + group % 4, group > 3) if kind.inputs == 32 else (group, block == 1)
    nibble = f"%k{at}" if unit.high else f"%w{at}"
    yield from loaded(f"%l{at}", "%wl", unit.header + 64 * line, "<16 x i32>", 64)
    if upper:
        yield f"  %l{at}.h = lshr <16 x i32> %l{at}, {constant(4, 'i32')}"
    yield f"  {nibble} = and <16 x i32> %l{at}{'.h' if upper else ''}, {constant(0x0F0F0F0F, 'i32')}"
    if unit.high:
        line, shift = divmod((PAIR * group + block) * unit.high, 8)
        mask = constant(0x10101010 * (2**unit.high - 1), "i32")
        yield from loaded(f"%u{at}", "%wl", unit.header + 64 * (8 + line), "<16 x i32>", 64)
        yield f"  %u{at}.s = {'lshr' if shift > 4 else 'shl'} <16 x i32> %u{at}, {constant(abs(shift - 4), 'i32')}"
        yield f"  %u{at}.m = and <16 x i32> %u{at}.s, {mask}"
        yield f"  %w{at} = or <16 x i32> {nibble}, %u{at}.m"


def _dot(before: str, after: str, weights: str, vnni: bool) -> Iterator[str]:
    """%t{after} = %t{before} + four unsigned codes times four signed numbers, for 16 outputs."""
    if vnni:
        yield from splat(f"%e{before}", f"%q{before}", "i32")
        vectors = f"<16 x i32> %t{before}, <16 x i32> %w{weights}, <16 x i32> %e{before}"
        yield f"  %t{after} = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512({vectors})"
        return
    total = f"%t{before}"
    for k in range(4):
        at = f"{before}.{k}"
        yield f"  %xu{at} = shl i32 %q{before}, {24 - 8 * k}"
        yield f"  %xs{at} = ashr i32 %xu{at}, 24"
        yield from splat(f"%xb{at}", f"%xs{at}", "i32")
        yield f"  %wu{at} = lshr <16 x i32> %w{weights}, {constant(8 * k, 'i32')}"
        yield f"  %wb{at} = and <16 x i32> %wu{at}, {constant(255, 'i32')}"
        yield f"  %m{at} = mul <16 x i32> %wb{at}, %xb{at}"
        done = f"%t{after}" if k == 3 else f"%sum{at}"
        yield f"  {done} = add <16 x i32> {total}, %m{at}"
        total = done
