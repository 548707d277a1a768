"""The frame of matrix products x @ weight.T, which divides the work among threads.

Weights are stored in panels of 16 or 32 outputs, in the order of use. A tile is a compiled function that multiplies a
fixed number of adjacent rows by a panel, with all sums in registers; `products.py` and `integer.py` write the body of
its loop. Sums have a fixed order, so a row's result is the same, bit for bit, among any other rows.

Threads take a few panels at a time (`kernels.on_threads`)."""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, njit

from paceline.compiled import address, call, fetch_add
from paceline.kernels import on_threads
from paceline.kernels import vectors as v
from paceline.kernels.records import record
from paceline.kernels.vectors import Value

AHEAD = 4096
"""Distance of the prefetch into the L2 cache, in bytes: a page, at whose end the processor's own prefetch stops."""


class Task(NamedTuple):
    """The task that threads share.

    panel, row, rounded  number of panels taken, of rows taken, and of rows that have been rounded.
    tiles to numbers     belong to the product; all other fields to a call (`Tiles.multiply`).
    x, weights, bias, out, tiles, input, round  addresses; round: a function, or 0."""

    panel: int
    row: int
    rounded: int
    tiles: int
    most: int
    columns: int
    itemsize: int
    record: int
    round: int
    numbers: int
    chunk: int
    rows: int
    outputs: int
    stride: int
    units: int
    x: int
    weights: int
    bias: int
    out: int
    row_bytes: int
    panel_bytes: int
    input: int
    input_bytes: int
    blocks: int


TASK = record(Task)


class Tiles:
    """Compiled functions @tile1 to @tileN: @tile3 multiplies three adjacent rows by a panel.

    most            N, the largest number of rows.
    columns         number of outputs of a panel.
    unit, row_unit  bytes of a unit of a panel, and of a unit of a row.
    rounded         bytes of a record that @round makes of 32 inputs of a row; 0: rows are not rounded.
    numbers         bytes of the numbers of such a record, which come first."""

    def __init__(
        self, addresses: Callable[[str], int], most: int, *, columns: int, dtype: torch.dtype, unit: int,
        row_unit: int, rounded: int = 0, numbers: int = 0,
    ):  # fmt: skip
        self.most, self._columns, self._unit, self._row_unit = most, columns, unit, row_unit
        functions = array("q", [addresses(f"tile{n}") for n in range(1, most + 1)])
        self._alive = addresses, functions  # The task only has their addresses.
        rounds = addresses("round") if rounded else 0
        self._own = functions.buffer_info()[0], most, columns, dtype.itemsize, rounded, rounds, numbers

    def multiply(
        self, x: int, weights: int, bias: int, out: int, *, rows: int, outputs: int, stride: int, units: int,
        input: int = 0, input_bytes: int = 0, blocks: int = 0,
    ) -> None:  # fmt: skip
        """Compute out = x @ weights.T + bias, at these addresses.

        stride  bytes from a row of `out` to the next. units: number of units of a panel, and of a row of x.
        input   address of rows to round, which are `input_bytes` apart and have `blocks` blocks. x is then memory for
                their records."""
        threads = torch.get_num_threads()
        # Each thread takes a few panels at a time, so that a slow thread does not hold up the others.
        chunk = max(-(-outputs // self._columns) // (4 * threads), 1)
        sizes, at = (chunk, rows, outputs, stride, units), (x, weights, bias, out)
        lengths = units * self._row_unit, units * self._unit
        task = Task(0, 0, 0, *self._own, *sizes, *at, *lengths, input, input_bytes, blocks)
        on_threads(_work, array("q", task), threads)


@njit
def _tile_of(row, rows, most):  # type: ignore[no-untyped-def]
    """The first row of a row's tile, and the tile's number of rows. Rows are divided evenly among the fewest tiles."""
    tiles = -(-rows // most)
    low, larger = rows // tiles, rows % tiles  # The first `larger` tiles have a row more.
    if row < larger * (low + 1):
        return row - row % (low + 1), low + 1
    return row - (row - larger) % low, low


@njit
def _round_rows(counters, task):  # type: ignore[no-untyped-def]
    """Round a row at a time, until the threads have rounded all rows. The records of a tile's rows are stored block by
    block: the numbers of all rows, their scales, and the initial values of their sums."""
    while True:
        row = fetch_add(counters[1:], 1)
        if row >= task.rows:
            break
        first, here = _tile_of(row, task.rows, task.most)
        x, records = task.input + row * task.input_bytes, task.x + first * task.row_bytes
        numbers = records + task.numbers * (row - first)
        scales = records + task.numbers * here + 4 * (row - first)
        call(task.round, (x, numbers, scales, 4 * here, here * task.record, task.blocks))
        fetch_add(counters[2:], 1)
    while fetch_add(counters[2:], 0) < task.rows:
        pass


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def _work(at):  # type: ignore[no-untyped-def]
    """Take a few panels at a time, until none is left, and multiply all rows by them."""
    task, counters = carray(at, (1,), TASK)[0], carray(at, (3,), np.int64)
    functions = carray(address(task.tiles), (task.most,), np.int64)
    rows, columns, panel_bytes = task.rows, task.columns, task.panel_bytes
    panels = -(-task.outputs // columns)
    if task.round:
        _round_rows(counters, task)
    while True:
        begin = fetch_add(counters, task.chunk)
        if begin >= panels:
            break
        for panel in range(begin, min(begin + task.chunk, panels)):
            weights, bias = task.weights + panel * panel_bytes, task.bias + 4 * columns * panel
            out, left = task.out + task.itemsize * columns * panel, task.outputs - columns * panel
            first = 0
            while first < rows:
                here = _tile_of(first, rows, task.most)[1]
                # The last tile of a panel prefetches what follows the panel.
                away = 0 if first + here < rows else AHEAD if here == rows else panel_bytes
                x, to = task.x + first * task.row_bytes, out + first * task.stride
                call(functions[here - 1], (x, weights, weights + away, bias, to, task.stride, left, task.units, here))
                first += here


# A tile --------------------------------------------------------------------------------------------------------------

Body = Callable[[Value, Value, Value, Value, list[Value]], Sequence[Value]]


def tile(
    rows: int, halves: int, dtype: torch.dtype, count: Callable[[Value], Value], body: Body
) -> Callable[..., None]:
    """Write a function that multiplies `rows` rows by a panel of 16 * `halves` outputs, adds the bias, and stores the
    first `columns` outputs, rounded to the dtype.

    count  count(units): number of iterations of the loop.
    body   body(x, w, ahead, i, sums) returns the sums after iteration i: a vector for each row and half, row by row."""

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
