"""Packing: from a file's blocks to panels, in which the values of 16 outputs lie side by side, on all threads.

`Format.columns` of `integer.py` says in torch where each bit of a block goes. It only moves bits, and flips some, so
`_runs` asks it once for every single bit. A compiled loop then moves them, without memory other than the panels."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numba import carray, cfunc, njit
from numpy.typing import NDArray

from paceline.compiled import address, fetch_add
from paceline.kernels import on_threads
from paceline.kernels.blocks import Blocks, Kind
from paceline.kernels.records import record

Bytes = NDArray[np.uint8]
COLUMNS = 16  # outputs of a panel. With 32, the sums of 12 rows would not fit into the registers.


class Layout(Protocol):
    """What packing reads of a `Format` of `integer.py`. It is hashable, and never changes."""

    kind: Kind
    halves: int
    bytes: int
    per_unit: int
    nbytes: int

    def columns(self, data: torch.Tensor) -> Sequence[torch.Tensor]: ...

    def __hash__(self) -> int: ...


class Task(NamedTuple):
    """The task that threads share.

    taken    number of panels taken.
    panels   number of panels, of `units` units. `read` bytes of an output become `written` bytes of a unit: `halves`
             values of two bytes, `singles` single ones, and words of four.
    row      bytes of an output; zeros follow to the end of its last unit.
    outputs  address of the outputs' addresses, 0 for zeros.
    zeros    address of what a unit of zeros becomes. runs: address and number of `Run`s."""

    taken: int
    panels: int
    units: int
    read: int
    written: int
    halves: int
    singles: int
    row: int
    outputs: int
    to: int
    zeros: int
    runs: int
    num_runs: int


class Run(NamedTuple):
    """Bits of neighbouring bytes that go to `length` neighbouring bytes: those of `mask`, shifted left, then right."""

    byte: int
    to: int
    length: int
    mask: int
    left: int
    right: int


TASK, RUN = record(Task), record(Run)


def packed(unit: Layout, parts: Sequence[Blocks], panels: int, units: int) -> torch.Tensor:
    """Pack the outputs of `parts`, stacked, into panels, uint8 [panels, units, bytes]. What has no output is zeros."""
    datas = [part.data if part.data.stride(-1) == 1 else part.data.contiguous() for part in parts]
    own = [data.data_ptr() + data.stride(0) * np.arange(len(data), dtype=np.int64) for data in datas]
    outputs = np.zeros(panels * COLUMNS, np.int64)
    outputs[: sum(map(len, own))] = np.concatenate(own)
    out = torch.empty(panels, units, unit.nbytes, dtype=torch.uint8)
    zeros, runs = _runs(unit)
    sizes = unit.per_unit * unit.kind.nbytes, len(zeros), unit.halves, unit.bytes, datas[0].shape[1]
    at = outputs.ctypes.data, out.data_ptr(), zeros.ctypes.data, runs.ctypes.data, len(runs)
    on_threads(_work, array("q", Task(0, panels, units, *sizes, *at)), torch.get_num_threads())
    return out


@cache
def _runs(unit: Layout) -> tuple[Bytes, NDArray[Any]]:
    """What a unit of zeros becomes, and the runs of an output's unit."""
    size = unit.per_unit * unit.kind.nbytes
    single = torch.from_numpy(np.packbits(np.eye(8 * size, dtype=np.uint8), axis=1, bitorder="little"))
    columns = unit.columns(torch.cat([torch.zeros(1, size, dtype=torch.uint8), single]))
    row = torch.cat([field.flatten(1).contiguous().view(torch.uint8) for field in columns], 1).numpy()
    source, to = np.nonzero(row[1:] ^ row[0])
    now = np.log2(row[1:][source, to] ^ row[0][to]).astype(np.int64)  # the only bit that changes
    masks: Counter[tuple[int, int, int]] = Counter()
    for byte, bit, at, moved in zip(*(line.tolist() for line in (source // 8, source % 8, to, now)), strict=True):
        masks[byte - at, moved - bit, at] |= 1 << bit
    runs: list[Run] = []
    for (away, shift, at), mask in sorted(masks.items()):
        run, last = Run(at + away, at, 1, mask, max(shift, 0), max(-shift, 0)), runs[-1] if runs else None
        if last and (last.byte + last.length, last.to + last.length, *last[3:]) == (run.byte, run.to, *run[3:]):
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(run)
    return row[0].copy(), np.array(runs, np.int64)


@njit(inline="always")
def _side_by_side(rows, out, halves, singles):  # type: ignore[no-untyped-def]
    """Write the rows' values of two bytes, then the single ones, then the words."""
    of_two, two, of_four, four = rows.view(np.uint16), out.view(np.uint16), rows.view(np.uint32), out.view(np.uint32)
    words = 2 * halves + singles
    for i in range(halves):
        for lane in range(COLUMNS):
            two[COLUMNS * i + lane] = of_two[lane, i]
    for i in range(2 * halves, words):
        for lane in range(COLUMNS):
            out[COLUMNS * i + lane] = rows[lane, i]
    for i in range(words // 4, of_four.shape[1]):
        for lane in range(COLUMNS):
            four[COLUMNS * i + lane] = of_four[lane, i]


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def _work(at):  # type: ignore[no-untyped-def]
    """Take a panel at a time, until none is left, and write its units."""
    task, counter = carray(at, (1,), TASK)[0], carray(at, (1,), np.int64)
    outputs = carray(address(task.outputs), (task.panels * COLUMNS,), np.int64)
    zeros = carray(address(task.zeros), (task.written,), np.uint8)
    runs = carray(address(task.runs), (task.num_runs,), RUN)
    rows, last = np.empty((COLUMNS, task.written), np.uint8), np.empty(task.read, np.uint8)
    while True:
        panel = fetch_add(counter, 1)
        if panel >= task.panels:
            return
        for unit in range(task.units):
            for lane in range(COLUMNS):
                begin, row = outputs[panel * COLUMNS + lane], rows[lane]
                for i in range(task.written):
                    row[i] = zeros[i] if begin else 0
                if not begin:
                    continue
                data = carray(address(begin + unit * task.read), (task.read,), np.uint8)
                here = task.row - unit * task.read
                if here < task.read:
                    for i in range(task.read):
                        last[i] = data[i] if i < here else 0
                    data = last
                for run in runs:
                    mask, left, right = np.uint8(run.mask), np.uint8(run.left), np.uint8(run.right)
                    # Of slices, so that LLVM knows that no place is negative, and uses vectors.
                    source, to = data[run.byte : run.byte + run.length], row[run.to : run.to + run.length]
                    for i in range(run.length):
                        to[i] ^= np.uint8((source[i] & mask) << left >> right)
            size = task.written * COLUMNS
            out = carray(address(task.to + (panel * task.units + unit) * size), (size,), np.uint8)
            _side_by_side(rows, out, task.halves, task.singles)
