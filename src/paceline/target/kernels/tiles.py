"""The frame of matrix products x @ weight.T, which deals the work to threads.

Weights are stored in panels of 16 or 32 outputs, in the order of use. A tile is a compiled function that multiplies a
number of adjacent rows by a panel, with all sums in registers; `products.py` and `integer.py` write the body of its
loop. Sums have a fixed order, so a row's result is the same, bit for bit, among any other rows.

Threads take a few panels at a time (`kernels.on_threads`)."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numba import carray, cfunc, njit

from paceline.compiled import address, call, fetch_add
from paceline.target.kernels import on_threads
from paceline.target.kernels import vectors as v
from paceline.target.kernels.vectors import Value

AHEAD = 4096  # distance of the prefetch into the L2 cache, in bytes: a page, where the processor's own prefetch ends

(
    PANEL, ROW, ROUNDED, CHUNK, ROWS, OUTPUTS, STRIDE, UNITS, X, WEIGHTS, BIAS, OUT, ROW_BYTES, PANEL_BYTES, TILES,
    MOST, COLUMNS, ITEMSIZE, ROUND, INPUT, INPUT_BYTES, BLOCKS, RECORD, NUMBERS, COUNT,
) = range(25)  # fmt: skip
"""Indices in the task that threads share. PANEL and ROW count panels and rows that were taken, ROUNDED rows that are
done. X, WEIGHTS, BIAS, OUT, TILES and INPUT are addresses, as is the function ROUND, or 0."""


class Tiles:
    """Compiled functions @tile1 to @tileN: @tile3 multiplies three adjacent rows by a panel.

    most            N, the largest number of rows.
    columns         number of outputs of a panel.
    unit, row_unit  bytes of a unit of a panel, and of a unit of a row.
    record          bytes of a block of 32 inputs of a row that @round has rounded; 0: rows are not rounded.
    numbers         bytes of the numbers of a record, which come first."""

    def __init__(
        self, addresses: Callable[[str], int], most: int, *, columns: int, dtype: torch.dtype, unit: int,
        row_unit: int, record: int = 0, numbers: int = 0,
    ):  # fmt: skip
        self.most, self._columns, self._unit, self._row_unit = most, columns, unit, row_unit
        functions = array("q", [addresses(f"tile{n}") for n in range(1, most + 1)])
        self._alive = addresses, functions  # the task only points to them
        task = self._task = array("q", bytes(8 * COUNT))
        task[TILES], task[MOST], task[COLUMNS] = functions.buffer_info()[0], most, columns
        task[ITEMSIZE], task[RECORD], task[ROUND] = dtype.itemsize, record, addresses("round") if record else 0
        task[NUMBERS] = numbers

    def multiply(
        self, x: int, weights: int, bias: int, out: int, *, rows: int, outputs: int, stride: int, units: int,
        input: int = 0, input_bytes: int = 0, blocks: int = 0,
    ) -> None:  # fmt: skip
        """Compute out = x @ weights.T + bias, at these addresses.

        stride  bytes from a row of `out` to the next. units: number of units of a panel, and of a row of x.
        input   address of the rows to round, which are `input_bytes` apart and have `blocks` blocks; x is then memory
                for their records."""
        threads, task = torch.get_num_threads(), self._task[:]
        # Each thread takes a few panels at a time, so that a slow thread does not hold up the others.
        task[CHUNK] = max(-(-outputs // self._columns) // (4 * threads), 1)
        task[ROWS], task[OUTPUTS], task[STRIDE], task[UNITS] = rows, outputs, stride, units
        task[X], task[WEIGHTS], task[BIAS], task[OUT] = x, weights, bias, out
        task[ROW_BYTES], task[PANEL_BYTES] = units * self._row_unit, units * self._unit
        task[INPUT], task[INPUT_BYTES], task[BLOCKS] = input, input_bytes, blocks
        on_threads(_work, task, threads)


@njit
def _tile_of(row, rows, most):  # type: ignore[no-untyped-def]
    """The first row of a row's tile, and the tile's number of rows. Rows are dealt evenly to the fewest tiles."""
    tiles = -(-rows // most)
    low, larger = rows // tiles, rows % tiles  # the first `larger` tiles have one row more
    if row < larger * (low + 1):
        return row - row % (low + 1), low + 1
    return row - (row - larger) % low, low


@njit
def _round_rows(task):  # type: ignore[no-untyped-def]
    """Round a row at a time, until all threads together have rounded all. The records of a tile's rows are stored block
    by block: the numbers of all rows, their scales, and the initial values of their sums."""
    while True:
        row = fetch_add(task[ROW:], 1)
        if row >= task[ROWS]:
            break
        first, here = _tile_of(row, task[ROWS], task[MOST])
        x, records = task[INPUT] + row * task[INPUT_BYTES], task[X] + first * task[ROW_BYTES]
        numbers = records + task[NUMBERS] * (row - first)
        scales = records + task[NUMBERS] * here + 4 * (row - first)
        call(task[ROUND], (x, numbers, scales, 4 * here, here * task[RECORD], task[BLOCKS]))
        fetch_add(task[ROUNDED:], 1)
    while fetch_add(task[ROUNDED:], 0) < task[ROWS]:
        pass


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def _work(at):  # type: ignore[no-untyped-def]
    """Take a few panels at a time, until none is left, and multiply all rows by them."""
    task = carray(at, (COUNT,), np.int64)
    functions = carray(address(task[TILES]), (task[MOST],), np.int64)
    rows, columns, panel_bytes = task[ROWS], task[COLUMNS], task[PANEL_BYTES]
    panels = -(-task[OUTPUTS] // columns)
    if task[ROUND]:
        _round_rows(task)
    while True:
        begin = fetch_add(task, task[CHUNK])
        if begin >= panels:
            break
        for panel in range(begin, min(begin + task[CHUNK], panels)):
            weights, bias = task[WEIGHTS] + panel * panel_bytes, task[BIAS] + 4 * columns * panel
            out, left = task[OUT] + task[ITEMSIZE] * columns * panel, task[OUTPUTS] - columns * panel
            first = 0
            while first < rows:
                here = _tile_of(first, rows, task[MOST])[1]
                # The last tile of a panel prefetches what comes after the panel.
                away = 0 if first + here < rows else AHEAD if here == rows else panel_bytes
                x, to = task[X] + first * task[ROW_BYTES], out + first * task[STRIDE]
                call(functions[here - 1], (x, weights, weights + away, bias, to, task[STRIDE], left, task[UNITS], here))
                first += here


# A tile --------------------------------------------------------------------------------------------------------------

Body = Callable[[Value, Value, Value, Value, list[Value]], Sequence[Value]]


def tile(
    rows: int, halves: int, dtype: torch.dtype, count: Callable[[Value], Value], body: Body
) -> Callable[..., None]:
    """Write a function that multiplies `rows` rows by a panel of 16 * `halves` outputs, and adds the bias. It stores
    the first `columns` outputs, rounded to the dtype.

    count  count(units) is the number of iterations of its loop.
    body   body(x, w, ahead, i, sums) returns the sums after iteration i, a vector for each row and half, row by row."""

    def tile(
        x: Value, w: Value, ahead: Value, bias: Value, y: Value, stride: Value, columns: Value, units: Value,
        here: Value,
    ) -> None:  # fmt: skip
        begin = [v.load(bias + 64 * half, v.F32, align=64) for half in range(halves)] * rows
        sums = v.loop(count(units), begin, lambda i, sums: body(x, w, ahead, i, sums))
        for half in range(halves):
            mask = first_lanes(columns - v.LANES * half)
            for row, total in enumerate(sums[half::halves]):
                out = narrowed(total) if dtype == torch.bfloat16 else total
                at = y + stride * row + dtype.itemsize * v.LANES * half
                v.store(at, out, align=dtype.itemsize, mask=mask)

    return tile


def narrowed(x: Value) -> Value:
    """Round float32 numbers to bits of bfloat16, ties to even; NaN stays NaN."""
    bits = x.view(v.I32)
    high = bits >> 16
    near = (bits + ((high & 1) + 0x7FFF)) >> 16
    return v.select(x.is_nan(), high | 64, near).cast("trunc", v.I16)


def first_lanes(count: Value, lanes: int = v.LANES) -> Value:
    """A mask of the first `count` of `lanes` lanes."""
    return v.literal(v.I64, *range(lanes)).below(v.splat(count, lanes))
