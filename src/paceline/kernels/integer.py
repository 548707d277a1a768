"""x @ weight.T with weights in blocks of four to eight bits, on CPUs.

    IntegerPanels([Blocks, ...])(x)

Rows of x are rounded to eight or sixteen bits in records of 32 inputs and a scale. The codes of a block and the numbers
of a record are multiplied and summed as integers; the sum, times both scales, is added in float32. Integer sums are
exact, and the float32 sums have a fixed order. So a row's result is the same, bit for bit, among any other rows, on any
number of threads, and with any of the `INSTRUCTION_SETS`.

A number of sixteen bits is split into two of eight bits, RADIX * high + low, which are multiplied like two rows, so
that weights are read once for both.

If the processor has AMX, many rows in bfloat16, as of a prompt, are multiplied in bfloat16, unless the product must be
exact. Weights are then expanded on the way (`amx.py`), and rows are not rounded.

Panels have the blocks of 16 outputs in the order of use (`tiles.py`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from itertools import groupby, product
from operator import or_
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from paceline import processor
from paceline.kernels import amx
from paceline.kernels import vectors as v
from paceline.kernels.blocks import MXFP4, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, Blocks, Kind
from paceline.kernels.ops import ALL_ROWS
from paceline.kernels.packing import COLUMNS, packed
from paceline.kernels.tiles import Tiles, tile
from paceline.kernels.vectors import Value

PAIR = 2  # blocks in an iteration of the innermost loop: two blocks share bytes
DTYPES = (torch.bfloat16, torch.float32)  # dtypes of x and of the result


class InstructionSet(NamedTuple):
    """Instructions that multiply bytes.

    needs    CPU features that it needs.
    without  prefixes of CPU features that are switched off in its code.
    rows     largest number of rows of a tile. In AVX-512 a row needs two of 32 registers, for its sum and the current
             block's sum; elsewhere a row needs many instructions, and larger tiles are hardly faster."""

    needs: tuple[str, ...]
    without: tuple[str, ...]
    rows: int


_AVX_512 = ("avx512", "avx10", "evex512")
INSTRUCTION_SETS = {
    "vnni": InstructionSet(("avx512vnni", "avx512bw"), (), 16),
    "avxvnni": InstructionSet(("avxvnni",), _AVX_512, 4),
    "avx2": InstructionSet(("avx2",), (*_AVX_512, "avxvnni"), 4),
    "dotprod": InstructionSet(("dotprod",), (), 4),
    "plain": InstructionSet((), (*_AVX_512, "avxvnni"), 4),
}
"""By speed: AVX-512 VNNI, AVX-VNNI, AVX2, Arm's dot products, and ordinary multiplications. All give the same bits."""
MANY = 32
"""From so many rows on, a product in bfloat16 is faster, because a panel is expanded once for all rows."""
RADIX, LARGEST = 255, 127
"""With a radix of 255 the low part is never -128, whose products AVX2 could not add in 16 bits."""


class _Columns(NamedTuple):
    """Fields of outputs, [outputs, units, number in a unit]: float16 bits as int16, bytes, and words of codes."""

    halves: torch.Tensor
    bytes: torch.Tensor
    words: torch.Tensor


class Format:
    """How panels hold a kind of blocks: the layout of a unit for each of its outputs, how a file's blocks get it, and
    how compiled code reads it. A new kind is a new object of FORMATS.

    blocks         number of blocks of 32 inputs.
    bits           number of bits of a code.
    halves, bytes  number of values of two bytes, and of single bytes.
    runs           number of sums of a block: inputs that share a scale have a common sum.
    high           number of bits of a code that are not in its nibble.
    words          number of lines of codes.
    nbytes         bytes of a unit, for all outputs: a multiple of a cache line's 64.
    per_unit       number of a file's blocks in a unit.

    Codes follow in lines, a word of four bytes for each output. With eight bits, a line has four inputs of a block.
    With fewer, eight lines have the low four bits of two blocks, and the lines of their other bits follow."""

    def __init__(self, kind: Kind, blocks: int, bits: int, halves: int, bytes: int = 0, runs: int = 1):
        self.kind, self.blocks, self.bits, self.halves, self.bytes, self.runs = kind, blocks, bits, halves, bytes, runs
        self.high, self.words, self.per_unit = bits % 8 and bits - 4, blocks * bits, blocks * 32 // kind.inputs
        self.header = COLUMNS * (2 * halves + bytes)  # bytes before the codes
        self.nbytes = self.header + 4 * COLUMNS * self.words

    @property
    def code_bits(self) -> int:
        """Number of bits of a code that is multiplied."""
        return self.bits if self.table is None else max(self.table).bit_length()

    def record(self, parts: int) -> int:
        """Bytes of a record, which is a block of a rounded row: 32 numbers of `parts` bytes, their scale, and the
        initial values of its sums."""
        return 32 * parts + 4 + 4 * self.runs

    # A file's blocks ------------------------------------------------------------------------------------------

    def columns(self, data: torch.Tensor) -> _Columns:
        """Make columns of a file's blocks, uint8 [outputs, bytes]. A unit that is not full ends with zeros."""
        blocks = data.unflatten(1, (-1, self.kind.nbytes))
        if missing := -blocks.shape[1] % self.per_unit:
            blocks = pad(blocks, (0, 0, 0, missing))
        halves, scales, high, codes = self._parts(blocks.unflatten(1, (-1, self.per_unit)))
        lines = codes.flatten(2).unflatten(2, (self.blocks // PAIR, -1))
        if self.high:
            fields = _fields(high, self.high, self._run).flatten(2).unflatten(2, (-1, PAIR, 8, 4))
            lines = torch.cat([lines, _merged(fields.transpose(3, 4).flatten(3, 4), self.high)], -1)
        return _Columns(_seen_as(torch.int16, halves), scales.flatten(2), _seen_as(torch.int32, lines))

    table: tuple[int, ...] | None = None
    """What is multiplied for each code; None: the code."""
    _run = 1  # the number of consecutive inputs whose high bits lie in consecutive bytes of a file
    _scales = 0  # bytes of packed scales in a file's block

    def _parts(self, blocks: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a file's blocks [..., bytes]: float16 numbers, scales, high bits, and nibbles or bytes."""
        sizes = [2 * self.halves // self.per_unit, self._scales, self.kind.inputs * self.high // 8]
        halves, scales, high, codes = blocks.split([*sizes, self.kind.nbytes - sum(sizes)], -1)
        return halves, scales, high, codes ^ 0x80 if self.bits == 8 else codes

    # Compiled -------------------------------------------------------------------------------------------------

    def factor(self, panel: _Panel, which: int, block: int, run: int) -> Value:
        """Scales (0) or minima (1) of 16 outputs, float32."""
        return panel.half((2 if self.kind.has_minimum else 1) * block + which)

    def least(self, panel: _Panel, block: int) -> Value:
        """Minima of 16 outputs, float32."""
        return self.factor(panel, 1, block, 0)

    def nibbles(self, block: int, group: int) -> tuple[int, bool]:
        """The line of a group's low bits, and whether they are its upper ones: a line has groups g and g + 4."""
        return 4 * block + group % 4, group > 3


class SuperFormat(Format):
    """The format of kinds with blocks of 256 inputs, whose runs have scales of a byte."""

    _run, _scales = 32, 12

    def _parts(self, blocks: torch.Tensor) -> Sequence[torch.Tensor]:
        halves, scales, high, codes = super()._parts(blocks)
        return halves, _scales(scales), high, codes

    def factor(self, panel: _Panel, which: int, block: int, run: int) -> Value:
        of_run = panel.byte(self.blocks * which + self.runs * block + run)
        return panel.half(which) * of_run.cast("uitofp" if self.kind.has_minimum else "sitofp", v.F32)

    def least(self, panel: _Panel, block: int) -> Value:
        return -super().least(panel, block)  # these kinds subtract it

    def nibbles(self, block: int, group: int) -> tuple[int, bool]:
        """As in `Format`: a line has the same group of two blocks."""
        return group, block == 1


class SixBits(SuperFormat):
    """Q6_K's format, whose file has its parts in another order."""

    def _parts(self, blocks: torch.Tensor) -> Sequence[torch.Tensor]:
        codes, high, scales, halves = blocks.split([128, 64, 16, 2], -1)
        codes = _merged(_fields(codes, 4, 64).unflatten(-1, (2, 32)).flatten(-3, -2), 4)
        return pad(halves, (0, 2)), scales, high, codes


class FourBitFloats(Format):
    """MXFP4's format: twice a float of four bits is a whole number, and a scale is the exponent of a power of two."""

    table = tuple(MXFP4.offset + sign * size for sign in (1, -1) for size in (0, 1, 2, 3, 4, 6, 8, 12))

    def _parts(self, blocks: torch.Tensor) -> Sequence[torch.Tensor]:
        exponents, codes = blocks.split([1, 16], -1)
        halves = torch.cat([exponents << 7, exponents >> 1], -1)  # the bits of a bfloat16
        return halves, blocks[..., :0], blocks[..., :0], codes

    def factor(self, panel: _Panel, which: int, block: int, run: int) -> Value:
        return panel.bfloat(block) * 0.5


FORMATS = {
    format.kind: format
    for format in (
        Format(Q8_0, blocks=2, bits=8, halves=2),
        Format(Q4_0, blocks=2, bits=4, halves=2),
        Format(Q4_1, blocks=2, bits=4, halves=4),
        Format(Q5_0, blocks=2, bits=5, halves=2),
        Format(Q5_1, blocks=2, bits=5, halves=4),
        SuperFormat(Q4_K, blocks=8, bits=4, halves=2, bytes=16),
        SuperFormat(Q5_K, blocks=8, bits=5, halves=2, bytes=16),
        SixBits(Q6_K, blocks=8, bits=6, halves=2, bytes=16, runs=2),
        FourBitFloats(MXFP4, blocks=2, bits=4, halves=2),
    )
}


@processor.remembered
def instruction_sets() -> list[str]:
    """Names of the `INSTRUCTION_SETS` that this CPU has, fastest first."""
    return [name for name, path in INSTRUCTION_SETS.items() if processor.has(*path.needs)]


def instruction_set() -> str:
    """The fastest of `instruction_sets`."""
    return instruction_sets()[0]


def supported() -> bool:
    """Whether the kernel runs here: it needs conversion of float16, and fused multiply-add."""
    return processor.ARM or processor.has("f16c", "fma")


def warnings() -> list[str]:
    """Lines for users of blocks on this CPU."""
    if not supported():
        return ["this CPU cannot multiply weights of eight and four bits: they were expanded, and save nothing"]
    slow = "this CPU has no instructions for weights of eight and four bits: they are multiplied slowly"
    return [slow] if instruction_set() == "plain" else []


@cache
def _cached_bytes() -> int:
    """Bytes of a core's L2 cache. Rows of this size stay in it while panels are multiplied by them."""
    name = "SC_LEVEL2_CACHE_SIZE"
    return (os.sysconf(name) if name in os.sysconf_names else 0) or 1 << 20


class IntegerPanels:
    """A weight [outputs, width] of stacked parts, which may have different kinds of blocks, and a bias [outputs] or
    None.

    exact        always multiply as integers, so that a row's result is the same among any other rows.
    activations  bits of an input, as in `Blocks`.
    wide         results are in float32, whatever the dtype of x; such products are always multiplied as integers.
    keep         also keep the parts, in `blocks`."""

    own_rows = ALL_ROWS

    def __init__(
        self, parts: Sequence[Blocks], bias: torch.Tensor | None = None, *, exact: bool = False, wide: bool = False,
        keep: bool = False,
    ):  # fmt: skip
        self.blocks = tuple(parts) if keep else ()
        self.width, self.exact, self.activations = parts[0].shape[1], exact, parts[0].activations
        self._wide = wide
        self._parts: list[_PanelGroup] = []
        first = 0
        for _, same in groupby(parts, lambda part: part.kind):
            group = _PanelGroup([*same], first, None if bias is None else bias[first:])
            self._parts.append(group)
            first += group.outputs
        self.outputs = first
        self.kernel = f"our kernel of blocks ({instruction_set()}, inputs of {self.activations} bits)"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] @ weight.T + bias, [rows, outputs], in the dtype of x."""
        # Views that change nothing are not made: a forward that is recorded spends most of its time on them.
        rows, x = len(x), x if x.is_contiguous() else x.contiguous()
        by_amx = rows >= MANY and x.dtype == torch.bfloat16 and not (self.exact or self._wide) and amx.supported()
        dtype = torch.float32 if self._wide else x.dtype
        out = x.new_empty(rows + (-rows % amx.PAIR if by_amx else 0), self.outputs, dtype=dtype)
        for part in self._parts if rows else ():
            to = out[:, part.first :] if part.first else out
            if by_amx:
                part.multiply_by_amx(x, to)
            else:
                part.multiply(x, to)
        return out if len(out) == rows else out[:rows]

    def dense(self) -> torch.Tensor:
        """The weight [outputs, width], of the `blocks`."""
        return torch.cat([part.dense() for part in self.blocks])


class _PanelGroup:
    """Panels of a single kind, for columns first to first + outputs - 1 of the result."""

    def __init__(self, parts: Sequence[Blocks], first: int, bias: torch.Tensor | None):
        self.kind, self.first, self._activations = parts[0].kind, first, parts[0].activations
        self.outputs, self.width = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self._unit = FORMATS[self.kind]
        self._units = -(-self.width // (32 * self._unit.blocks))
        count = -(-self.outputs // COLUMNS)
        count += count % 2  # AMX takes pairs.
        self._panels = packed(self._unit, parts, count, self._units)
        self._bias = torch.zeros(count * COLUMNS)
        if bias is not None:
            self._bias[: self.outputs] = bias[: self.outputs]
        self._at = self._panels.data_ptr(), self._bias.data_ptr()
        self._blocks_run = self._units * self._unit.blocks
        # A unit that is not full ends with padding, whose records must be zeros.
        self._records = torch.empty if self._blocks_run * 32 == self.width else torch.zeros

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x times the panels to the first columns of `out`."""
        parts = self._activations // 8
        tiles = tiles_of(self.kind, x.dtype, out.dtype, instruction_set(), parts)
        row_records = self._blocks_run * self._unit.record(parts)
        fitting = max(_cached_bytes() // row_records // tiles.most, 1) * tiles.most
        fits = len(x) <= fitting
        for some, to in ((x, out),) if fits else zip(x.split(fitting), out.split(fitting), strict=True):
            records = self._records(len(some) * row_records, dtype=torch.uint8)
            sizes = {"rows": len(some), "input": some.data_ptr(), "input_bytes": self.width * x.itemsize}
            sizes |= {"outputs": self.outputs, "units": self._units, "stride": out.stride(0) * out.itemsize}
            tiles.multiply(records.data_ptr(), *self._at, to.data_ptr(), **sizes, blocks=self.width // 32)

    def multiply_by_amx(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x times the panels, in bfloat16, to the first columns of `out`, which has a multiple of amx.PAIR
        rows."""
        sizes = {"outputs": self.outputs, "units": self._units, "stride": out.stride(0) * x.itemsize}
        tiles = by_amx(self.kind)
        for some, to in zip(x.split(amx.PAIR * tiles.most), out.split(amx.PAIR * tiles.most), strict=True):
            pairs = amx.packed(some, len(to))
            tiles.multiply(pairs.data_ptr(), *self._at, to.data_ptr(), rows=len(to) // amx.PAIR, **sizes)


# The order of a panel ------------------------------------------------------------------------------------------------


def _fields(data: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Split bytes [..., N] into fields of `bits` bits, [..., fields, run]: of each `run` bytes, first the lowest
    fields, then the next fields, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (data.unflatten(-1, (-1, 1, run)) >> shifts).flatten(-3, -2) & ((1 << bits) - 1)


def _merged(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `_fields`."""
    parts = fields.unflatten(-2, (-1, 8 // bits)).unbind(-2)
    return reduce(or_, (part << bits * i for i, part in enumerate(parts))).flatten(-2)


def _scales(packed: torch.Tensor) -> torch.Tensor:
    """Unpack twelve bytes of Q4_K or Q5_K: scales of the eight runs, then their minima, six bits each, uint8 [...,
    16]."""
    low, high, mixed = packed.split(4, -1)
    return torch.cat([low & 63, (mixed & 15) | (low >> 6 << 4), high & 63, (mixed >> 4) | (high >> 6 << 4)], -1)


def _seen_as(dtype: torch.dtype, data: torch.Tensor) -> torch.Tensor:
    """View bytes [outputs, units, ...] as [outputs, units, number] of `dtype`."""
    return data.flatten(2).contiguous().view(dtype)


# The kernel ----------------------------------------------------------------------------------------------------------


@processor.remembered
def tiles_of(kind: Kind, dtype: torch.dtype, out: torch.dtype, path: str, parts: int) -> Tiles:
    """Compile tiles that multiply blocks of `kind`. dtype: dtype of the rows; out: dtype of the results; path: a name
    in INSTRUCTION_SETS; parts: bytes of an input."""
    unit = FORMATS[kind]
    turns, record, most = unit.blocks // PAIR, unit.record(parts), INSTRUCTION_SETS[path].rows // parts

    def body(x: Value, w: Value, ahead: Value, i: Value, sums: list[Value]) -> list[Value]:
        v.prefetch(ahead + i * (unit.nbytes // turns), unit.nbytes // turns)
        return _added(_Panel(unit, w, i), x + i * (PAIR * record * len(sums)), sums, TOTALS[path], parts)

    def write(module: v.Module) -> None:
        module.add("round", partial(_round, unit, dtype, parts))
        for rows in range(1, most + 1):
            module.add(f"tile{rows}", tile(rows, 1, out, lambda units: units * turns, body))

    name = f"{kind.name} {dtype} {path}" + (" 16" if parts == 2 else "") + ("" if out == dtype else " wide")
    return Tiles(
        v.compiled(name, write, INSTRUCTION_SETS[path].without), most, columns=COLUMNS, dtype=out, unit=unit.nbytes,
        row_unit=unit.blocks * record, rounded=record, numbers=32 * parts,
    )  # fmt: skip


def _round(
    of: Format, dtype: torch.dtype, parts: int, x: Value, numbers: Value, scales: Value, step: Value, stride: Value,
    blocks: Value,
) -> None:  # fmt: skip
    """Round the blocks of a row into records, which are `stride` bytes apart. A record has 32 numbers of `parts` bytes,
    high bytes first, and their scale d. Then come, `step` bytes apart, the runs' initial sums, or d * sum(numbers) for
    kinds with a minimum."""
    most = float(LARGEST if parts == 1 else RADIX * LARGEST + LARGEST)

    def block(i: Value, _: list[Value]) -> list[Value]:
        """Round block `i`. Its scale is the largest absolute value over the largest number."""
        to, scale = numbers + i * stride, scales + i * stride
        places = [x + i * (32 * dtype.itemsize) + v.LANES * dtype.itemsize * half for half in (0, 1)]
        bits = [v.load_wide(at, dtype == torch.bfloat16).view(v.I32) for at in places]
        # As integers, the bits of absolute values have the numbers' order; NaN and infinity are above all.
        sizes = v.intrinsic("llvm.umax.v16i32", v.vector(v.I32), *(b & 0x7FFFFFFF for b in bits))
        largest = v.intrinsic("llvm.vector.reduce.umax.v16i32", v.I32, sizes)
        finite, inverse = largest < 0x7F800000, v.literal(v.F32, most) / largest.view(v.F32)
        usable = v.splat(finite & (inverse < math.inf))  # Otherwise all numbers are about 0.
        d = v.select(finite, largest.view(v.F32) / most, v.literal(v.F32, math.nan))
        sums = []
        for half in (0, 1):
            whole = _whole(usable, bits[half].view(v.F32) * v.splat(inverse))
            high = _whole(usable, whole.cast("sitofp", v.F32) * (1 / RADIX)) if parts == 2 else whole
            for part, number in enumerate([high, whole - high * RADIX][:parts]):
                v.store(to + 32 * part + v.LANES * half, number.cast("trunc", v.I8))
            sums.append(v.intrinsic("llvm.vector.reduce.add.v16i32", v.I32, whole))
        v.store(scale, d)
        for run, total in enumerate(sums if of.runs == 2 else [sums[0] + sums[1]], 1):
            begin = d * total.cast("sitofp", v.F32) if of.kind.has_minimum else total * -of.kind.offset
            v.store(scale + step * run, begin)
        return []

    v.loop(blocks, [], block)


def _whole(usable: Value, x: Value) -> Value:
    """Round to whole numbers, ties to even; 0 if `usable` is false."""
    near = v.intrinsic("llvm.rint.v16f32", v.vector(v.F32), x)
    return v.select(usable, near, v.literal(v.F32, *[0.0] * v.LANES)).cast("fptosi", v.I32)


class _Panel:
    """Reads blocks 2 i and 2 i + 1 of a panel."""

    def __init__(self, unit: Format, panel: Value, i: Value):
        self.unit, self.kind = unit, unit.kind
        turns = unit.blocks // PAIR
        self._at, pair = panel + i // turns * unit.nbytes, i % turns
        self._bytes = self._at + pair * (PAIR * COLUMNS * unit.runs) + 2 * COLUMNS * unit.halves
        self._lines = self._at + pair * (64 * unit.words // turns) + unit.header

    def half(self, place: int) -> Value:
        """The value of two bytes at a place of the unit, of 16 outputs, float32."""
        return v.load(self._at + 2 * COLUMNS * place, v.F16, align=32).cast("fpext", v.F32)

    def bfloat(self, place: int) -> Value:
        """The same for a bfloat16."""
        return v.load_wide(self._at + 2 * COLUMNS * place, True)

    def byte(self, place: int) -> Value:
        """The byte at a place of these blocks, of 16 outputs."""
        return v.load(self._bytes + COLUMNS * place, v.I8, align=16)

    def scale(self, block: int, run: int) -> Value:
        """Scales of 16 outputs, float32."""
        return self.unit.factor(self, 0, block, run)

    def least(self, block: int) -> Value:
        """Minima of 16 outputs, float32."""
        return self.unit.least(self, block)

    def codes(self, block: int, group: int) -> Value:
        """Unsigned codes of 16 outputs and of inputs `4 * group` to `4 * group + 3`."""
        if self.unit.bits == 8:
            return v.load(self._lines + 64 * (8 * block + group), v.I32, align=64)
        line, upper = self.unit.nibbles(block, group)
        nibbles = v.load(self._lines + 64 * line, v.I32, align=64)
        nibbles = (nibbles >> 4 if upper else nibbles) & 0x0F0F0F0F
        high = self.unit.high
        if self.unit.table is not None:
            return _looked_up(nibbles, self.unit.table)
        if not high:
            return nibbles
        line, shift = divmod((PAIR * group + block) * high, 8)
        bits = v.load(self._lines + 64 * (8 + line), v.I32, align=64)
        bits = bits >> shift - 4 if shift > 4 else bits << 4 - shift
        return nibbles | bits & 0x10101010 * (2**high - 1)


def _looked_up(codes: Value, table: Sequence[int]) -> Value:
    """Replace each byte of 16 words, from 0 to 15, by its entry in `table`."""
    name, lanes = "llvm.x86.ssse3.pshuf.b.128", 4
    if processor.ARM:
        name = "llvm.aarch64.neon.tbl1.v16i8"
    elif processor.has("avx2"):
        name, lanes = "llvm.x86.avx2.pshuf.b", 8
    entries = v.literal(v.I8, *[*table] * (lanes // 4))
    words = (codes.part(i, lanes).view(v.I8, 4 * lanes) for i in range(0, v.LANES, lanes))
    parts = [v.intrinsic(name, entries.ir.type, entries, word).view(v.I32, lanes) for word in words]
    while len(parts) > 1:
        parts = [v.join(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


Totals = Callable[[_Panel, int, range, Value, list[Value]], list[Value]]
"""totals(panel, block, groups, numbers, begin) adds the products of codes and rows' numbers, for these groups of four
inputs, to `begin`, the run's sums so far, int32. A row of two bytes counts as two rows, high bytes first."""


def _added(panel: _Panel, x: Value, sums: list[Value], totals_of: Totals, parts: int) -> list[Value]:
    """Add the products of PAIR blocks of a panel and the rows' records to `sums`. parts: bytes of a row's numbers."""
    rows, kind, unit = len(sums), panel.kind, panel.unit
    zero = v.literal(v.I32, *[0] * v.LANES)
    for block, run in product(range(PAIR), range(unit.runs)):
        numbers, groups = x + rows * unit.record(parts) * block, 8 // unit.runs
        scales = numbers + 32 * parts * rows
        begins = scales + 4 * rows * (run + 1)
        lows = [zero] * rows
        if not kind.has_minimum:
            lows = [v.splat(v.load(begins + 4 * row, v.I32, 1)) for row in range(rows)]
        begin = [total for low in lows for total in [*[zero] * (parts - 1), low]]
        totals = totals_of(panel, block, range(groups * run, groups * (run + 1)), numbers, begin)
        if parts == 2:
            totals = [high * RADIX + low for high, low in zip(totals[::2], totals[1::2], strict=True)]
        scale, least = panel.scale(block, run), panel.least(block) if kind.has_minimum else None
        for row in range(rows):
            d = v.splat(v.load(scales + 4 * row, v.F32, 1))
            sums[row] = v.fma(totals[row].cast("sitofp", v.F32), scale * d, sums[row])
            if least is not None:
                sums[row] = v.fma(least, v.splat(v.load(begins + 4 * row, v.F32, 1)), sums[row])
    return sums


def _by_dots(dot: Callable[[Value, Value, Value], Value], signed: bool = False) -> Totals:
    """Make totals that add group by group. signed: `dot` takes signed codes, so codes of eight bits need no correction
    by `begin`."""

    def totals_of(panel: _Panel, block: int, groups: range, numbers: Value, begin: list[Value]) -> list[Value]:
        of_eight = signed and panel.unit.bits == 8
        totals = [v.literal(v.I32, *[0] * v.LANES) for _ in begin] if of_eight else list(begin)
        for group in groups:
            codes = panel.codes(block, group) ^ 0x80808080 if of_eight else panel.codes(block, group)
            for row in range(len(begin)):
                totals[row] = dot(totals[row], codes, v.load(numbers + 32 * row + 4 * group, v.I32, 1))
        return totals

    return totals_of


def _vnni(total: Value, codes: Value, numbers: Value) -> Value:
    """Add four codes times four numbers to `total` in each lane, with AVX-512 VNNI. The functions below do the same."""
    return v.intrinsic("llvm.x86.avx512.vpdpbusd.512", v.vector(v.I32), total, codes, v.splat(numbers))


def _avx_vnni(total: Value, codes: Value, numbers: Value) -> Value:
    name, some = "llvm.x86.avx512.vpdpbusd.256", v.splat(numbers, 8)
    return v.join(*(v.intrinsic(name, v.vector(v.I32, 8), total.part(i, 8), codes.part(i, 8), some) for i in (0, 8)))


def _dotprod(total: Value, codes: Value, numbers: Value) -> Value:
    name, some = "llvm.aarch64.neon.sdot.v4i32.v16i8", v.splat(numbers, 4).view(v.I8, 16)
    parts = [(total.part(i, 4), codes.part(i, 4).view(v.I8, 16)) for i in range(0, v.LANES, 4)]
    a, b, c, d = (v.intrinsic(name, v.vector(v.I32, 4), *part, some) for part in parts)
    return v.join(v.join(a, b), v.join(c, d))


_FITTING = {4: 8, 5: 4, 6: 2, 8: 1}
"""By `Format.code_bits`: how many groups' products fit into a sum of 16 bits. Numbers are at most 127."""


def _avx2(panel: _Panel, block: int, groups: range, numbers: Value, begin: list[Value]) -> list[Value]:
    """Add with AVX2, which multiplies bytes and adds two products in 16 bits. Sums are widened only when they must be.

    One factor must be unsigned. For codes of eight bits it is the code's absolute value, and the number gets the code's
    sign. Such sums need no correction by `begin`, which is for unsigned codes."""
    bits, rows, some = panel.unit.bits, range(len(begin)), _FITTING[panel.unit.code_bits]
    ones = v.literal(v.I16, *[1] * 16)
    totals = [v.literal(v.I32, *[0] * v.LANES) for _ in rows] if bits == 8 else list(begin)
    for first in range(groups.start, groups.stop, some):
        short: list[list[Value]] = [[] for _ in rows]
        for group in range(first, min(first + some, groups.stop)):
            codes = panel.codes(block, group) ^ 0x80808080 if bits == 8 else panel.codes(block, group)
            halves = [codes.part(i, 8).view(v.I8, 32) for i in (0, 8)]
            for row in rows:
                number = v.splat(v.load(numbers + 32 * row + 4 * group, v.I32, 1), 8).view(v.I8, 32)
                pairs = [_without_sign(half, number) if bits == 8 else (half, number) for half in halves]
                sums = [v.intrinsic("llvm.x86.avx2.pmadd.ub.sw", v.vector(v.I16, 16), *pair) for pair in pairs]
                short[row] = [a + b for a, b in zip(short[row], sums, strict=True)] if short[row] else sums
        for row in rows:
            wide = [v.intrinsic("llvm.x86.avx2.pmadd.wd", v.vector(v.I32, 8), half, ones) for half in short[row]]
            totals[row] = totals[row] + v.join(*wide)
    return totals


def _without_sign(codes: Value, numbers: Value) -> tuple[Value, Value]:
    """Move the codes' signs to the numbers, which changes no product."""
    size = v.intrinsic("llvm.abs.v32i8", codes.ir.type, codes, v.literal(v.I1, 0))
    return size, v.intrinsic("llvm.x86.avx2.psign.b", codes.ir.type, numbers, codes)


def _plain(total: Value, codes: Value, numbers: Value) -> Value:
    for i in range(4):
        total = total + (codes >> 8 * i & 255) * v.splat((numbers << 24 - 8 * i).shifted(24))
    return total


TOTALS: dict[str, Totals] = {
    "vnni": _by_dots(_vnni), "avxvnni": _by_dots(_avx_vnni), "avx2": _avx2,
    "dotprod": _by_dots(_dotprod, signed=True), "plain": _by_dots(_plain),
}  # fmt: skip


# Many rows in bfloat16, by AMX ---------------------------------------------------------------------------------------


@cache
def by_amx(kind: Kind) -> Tiles:
    """Compile tiles that multiply many rows in bfloat16."""
    unit = FORMATS[kind]
    return amx.tiles(f"{kind.name} by AMX", partial(_expand, unit), blocks=unit.blocks, nbytes=unit.nbytes)


def _expand(unit: Format, panel: Value, i: Value, to: Value) -> None:
    """Expand blocks 2 i and 2 i + 1 of a panel to bfloat16."""
    blocks, kind, nbytes = _Panel(unit, panel, i), unit.kind, unit.nbytes * PAIR // unit.blocks
    v.prefetch(panel + (i + amx.CHUNK // PAIR) * nbytes, nbytes)  # of the next chunk
    for block, run in product(range(PAIR), range(blocks.unit.runs)):
        scale, groups = blocks.scale(block, run), 8 // blocks.unit.runs
        least = blocks.least(block) if kind.has_minimum else scale * -float(kind.offset)
        for group in range(groups * run, groups * (run + 1)):
            codes = blocks.codes(block, group)
            weights = [v.fma((codes >> 8 * k & 255).cast("uitofp", v.F32), scale, least).view(v.I32) for k in range(4)]
            near = [weight + 0x8000 for weight in weights]  # This rounds to bfloat16, ties away from 0.
            for k in (0, 2):
                pairs = near[k] >> 16 | near[k + 1] & 0xFFFF0000
                v.store(to + (2 * amx.REGISTER * block + 128 * group + 32 * k), pairs, align=64)
