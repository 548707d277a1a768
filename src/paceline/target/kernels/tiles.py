"""The frame of matrix products x @ weight.T: which thread multiplies what, and where sums are kept.

Weights are stored in panels of 16 or 32 outputs, in the order of use. A tile is a compiled function that multiplies a
number of adjacent rows by a panel, with all sums in registers; `products.py` and `integer.py` say what a turn of its
loop adds. Every sum has one order, so a row's result is the same, bit for bit, among any other rows.

Threads take a few panels at a time. They are those of torch's OpenMP, because two thread pools would compete for the
cores.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numba import carray, cfunc, njit

from paceline.compiled import address, call, take
from paceline.target.kernels import on_threads
from paceline.target.kernels import vectors as v
from paceline.target.kernels.vectors import Value

AHEAD = 4096
"""Distance of the prefetch into the L2 cache, in bytes: a page, where the processor's own prefetch ends."""
TILE_SIZES = 64
"""Bytes that hold the sizes of AMX tiles."""

(
    PANEL, ROW, ROUNDED, THREAD, CHUNK, ROWS, OUTPUTS, STRIDE, UNITS, X, WEIGHTS, BIAS, OUT, ROW_BYTES, PANEL_BYTES,
    TILES, MOST, COLUMNS, ITEMSIZE, ROUND, INPUT, INPUT_BYTES, BLOCKS, RECORD, UNPACK, MEMORY, MEMORY_BYTES, CONFIGURE,
    SIZES, COUNT,
) = range(30)  # fmt: skip
"""Places in the task that threads share. PANEL, ROW, ROUNDED and THREAD count what was taken and done. X, WEIGHTS,
BIAS, OUT, TILES, INPUT, MEMORY and SIZES are addresses, as are the functions ROUND, UNPACK and CONFIGURE, or 0."""


class Tiles:
    """Compiled functions @tile1 to @tileN: @tile3 multiplies three adjacent rows by a panel.

    most            N.
    columns         outputs of a panel.
    unit, row_unit  bytes of a unit of a panel, and of a unit of a row.
    record          bytes of a block of 32 inputs of a row that @round has rounded; 0: rows are not rounded.
    unpacked        bytes of a unit of a panel that @unpack has unpacked, once for all rows; 0: panels are read as they
                    are.
    sizes           of AMX tiles, as @configure loads them; empty: there are none."""

    def __init__(
        self, addresses: Callable[[str], int], most: int, *, columns: int, dtype: torch.dtype, unit: int,
        row_unit: int, record: int = 0, unpacked: int = 0, sizes: bytes = b"",
    ):  # fmt: skip
        self.most, self._columns, self._unit, self._row_unit, self._unpacked = most, columns, unit, row_unit, unpacked
        functions, tile_sizes = array("q", [addresses(f"tile{n}") for n in range(1, most + 1)]), array("B", sizes)
        self._alive = addresses, functions, tile_sizes  # the task only points to them
        task = self._task = array("q", bytes(8 * COUNT))
        task[TILES], task[SIZES] = functions.buffer_info()[0], tile_sizes.buffer_info()[0]
        task[MOST], task[COLUMNS], task[ITEMSIZE], task[RECORD] = most, columns, dtype.itemsize, record
        task[ROUND] = addresses("round") if record else 0
        task[UNPACK] = addresses("unpack") if unpacked else 0
        task[CONFIGURE] = addresses("configure") if sizes else 0

    def multiply(
        self, x: int, weights: int, bias: int, out: int, *, rows: int, outputs: int, stride: int, units: int,
        input: int = 0, input_bytes: int = 0, blocks: int = 0,
    ) -> None:  # fmt: skip
        """out = x @ weights.T + bias, at these addresses.

        stride  bytes from one row of `out` to the next. units: of a panel, and of a row of x.
        input   address of the rows to round, which are `input_bytes` apart and have `blocks` blocks; x is then memory
                for their records."""
        threads, task = torch.get_num_threads(), self._task[:]
        # Each thread takes a few panels at a time, so that a slow thread does not hold up the others.
        task[CHUNK] = max(-(-outputs // self._columns) // (4 * threads), 1)
        task[ROWS], task[OUTPUTS], task[STRIDE], task[UNITS] = rows, outputs, stride, units
        task[X], task[WEIGHTS], task[BIAS], task[OUT] = x, weights, bias, out
        task[ROW_BYTES], task[PANEL_BYTES] = units * self._row_unit, units * self._unit
        task[INPUT], task[INPUT_BYTES], task[BLOCKS] = input, input_bytes, blocks
        if self._unpacked:
            task[MEMORY_BYTES] = 2 * TILE_SIZES + units * self._unpacked
            memory = torch.empty(threads * task[MEMORY_BYTES], dtype=torch.uint8)
            task[MEMORY] = memory.data_ptr()
        on_threads(_work, task, threads)


@njit
def _tile_of(row, rows, most):  # type: ignore[no-untyped-def]
    """The first row of a row's tile, and its number of rows: they are dealt evenly to as few tiles as possible."""
    tiles = -(-rows // most)
    low, larger = rows // tiles, rows % tiles  # the first `larger` tiles have one row more
    if row < larger * (low + 1):
        return row - row % (low + 1), low + 1
    return row - (row - larger) % low, low


@njit
def _round_rows(task):  # type: ignore[no-untyped-def]
    """Round rows, one at a time, until all threads together have rounded all. The rows of a tile have their records
    block by block: the numbers of all, their scales, and what their sums begin with."""
    while True:
        row = take(task[ROW:], 1)
        if row >= task[ROWS]:
            break
        first, here = _tile_of(row, task[ROWS], task[MOST])
        x, records = task[INPUT] + row * task[INPUT_BYTES], task[X] + first * task[ROW_BYTES]
        numbers, scales = records + 32 * (row - first), records + 32 * here + 4 * (row - first)
        call(task[ROUND], (x, numbers, scales, 4 * here, here * task[RECORD], task[BLOCKS]))
        take(task[ROUNDED:], 1)
    while take(task[ROUNDED:], 0) < task[ROWS]:
        pass


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def _work(at):  # type: ignore[no-untyped-def]
    """Take a few panels at a time, until none is left, and multiply all rows by them."""
    task = carray(at, (COUNT,), np.int64)
    functions = carray(address(task[TILES]), (task[MOST],), np.int64)
    rows, columns, panel_bytes = task[ROWS], task[COLUMNS], task[PANEL_BYTES]
    panels = -(-task[OUTPUTS] // columns)
    sizes_before = task[MEMORY] + take(task[THREAD:], 1) * task[MEMORY_BYTES]
    unpacked = sizes_before + 2 * TILE_SIZES
    if task[CONFIGURE]:
        call(task[CONFIGURE], (sizes_before, task[SIZES]))
    if task[ROUND]:
        _round_rows(task)
    while True:
        begin = take(task, task[CHUNK])
        if begin >= panels:
            break
        for panel in range(begin, min(begin + task[CHUNK], panels)):
            packed = weights = task[WEIGHTS] + panel * panel_bytes
            if task[UNPACK]:
                call(task[UNPACK], (packed, unpacked, task[UNITS]))
                weights = unpacked
            bias = task[BIAS] + 4 * columns * panel
            out, left = task[OUT] + task[ITEMSIZE] * columns * panel, task[OUTPUTS] - columns * panel
            first = 0
            while first < rows:
                here = _tile_of(first, rows, task[MOST])[1]
                # The last tile of a panel prefetches what comes after the panel.
                away = 0 if first + here < rows else AHEAD if here == rows and weights == packed else panel_bytes
                x, to = task[X] + first * task[ROW_BYTES], out + first * task[STRIDE]
                call(functions[here - 1], (x, weights, packed + away, bias, to, task[STRIDE], left, task[UNITS]))
                first += here
    if task[CONFIGURE]:
        call(task[CONFIGURE], (sizes_before + TILE_SIZES, sizes_before))


# A tile --------------------------------------------------------------------------------------------------------------

Turn = Callable[[Value, Value, Value, Value, list[Value]], Sequence[Value]]


def tile(
    rows: int, halves: int, dtype: torch.dtype, turns: Callable[[Value], Value], turn: Turn
) -> Callable[..., None]:
    """The function of `rows` rows times a panel of 16 * `halves` outputs, plus the bias. It stores the first `columns`
    outputs, rounded to the dtype.

    turns  how often its loop runs, for so many units.
    turn   (x, w, ahead, i, sums): the sums and what turn i adds to them; one for each row and half, row by row."""

    def tile(
        x: Value, w: Value, ahead: Value, bias: Value, y: Value, stride: Value, columns: Value, units: Value
    ) -> None:
        begin = [v.load(bias + 64 * half, v.F32, align=64) for half in range(halves)] * rows
        sums = v.loop(turns(units), begin, lambda i, sums: turn(x, w, ahead, i, sums))
        for half in range(halves):
            mask = first_lanes(columns - v.LANES * half)
            for row, total in enumerate(sums[half::halves]):
                out = narrowed(total) if dtype == torch.bfloat16 else total
                at = y + stride * row + dtype.itemsize * v.LANES * half
                v.store(at, out, align=dtype.itemsize, mask=mask)

    return tile


def narrowed(x: Value) -> Value:
    """Bits of float32 numbers rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = x.view(v.I32)
    high = bits >> 16
    near = (bits + ((high & 1) + 0x7FFF)) >> 16
    return v.select(x.is_nan(), high | 64, near).cast("trunc", v.I16)


def first_lanes(count: Value, lanes: int = v.LANES) -> Value:
    """A mask of the first `count` of so many lanes."""
    return v.literal(v.I64, *range(lanes)).below(v.splat(count, lanes))
