"""Programs: the layers of a forward over few rows in one call.

Between its products, a layer of a small model is a dozen compiled steps of a few microseconds each, and Python takes
longer to call them than they take. So a forward is recorded: the functions that it calls, and what it passes to them.
After that it is one call. Every thread goes through the list, and waits for the others where a step reads what they
wrote. The functions and the order of their sums are the same, so the bits are, too.

A forward can be recorded if torch does nothing in it but allocate memory and make views, and all else goes through
`on_threads`. Where a library multiplies, layers are called one by one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.compiled import address, call, take
from paceline.target.cache import Writer
from paceline.target.kernels import barrier, on_threads, recorded

MOST_ROWS = 32  # most rows of a recorded forward: with more, calling the steps is a small part of its time
FIRST, STEPS, COUNT, BARRIER, DONE = range(5)
"""Places in the task of the compiled function. STEPS: address of COUNT lines of FUNCTION to WORDS; DONE: number of
steps for one thread alone that were run."""
FUNCTION, TASK, ALONE, FRESH, WORDS = range(5)
"""Places in a step's line. TASK, FRESH: addresses of its task, and of an unused copy; WORDS: their length."""


@cfunc("void(voidptr)", cache=True)
def _run(at):  # type: ignore[no-untyped-def]
    """One thread's way through a program. The first to come runs the steps that are for one thread alone. It waits for
    the others only at the end of steps for all."""
    task = carray(at, (5,), np.int64)
    steps = carray(address(task[STEPS]), (task[COUNT], 5), np.int64)
    is_first, done = take(task, 1) == 0, 0
    for i in range(len(steps)):
        if not steps[i, ALONE]:
            call(steps[i, FUNCTION], (steps[i, TASK],))
            if task[BARRIER]:
                call(task[BARRIER], (task[FIRST],))
        elif is_first:
            call(steps[i, FUNCTION], (steps[i, TASK],))
            take(task[DONE:], 1)
        else:
            done += 1
            while take(task[DONE:], 0) < done:
                pass
        if is_first:  # all have left the step: its counters begin anew
            used = carray(address(steps[i, TASK]), (steps[i, WORDS],), np.int64)
            used[:] = carray(address(steps[i, FRESH]), (steps[i, WORDS],), np.int64)


class Programs:
    """The recorded forwards of some layers. They share memory for what a layer computes: only its output is read by
    the next layer, so two layers' worth is enough."""

    def __init__(self) -> None:
        self._programs: dict[Hashable, _Program | None] = {}
        self._memory: dict[Hashable, torch.Tensor] = {}

    def run(
        self, step: Callable[..., Any], layers: range, place: int, x: torch.Tensor, cache: Writer
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The layers over x [N, H]: two summands [N, H], valid until the next call. None if it cannot be recorded.

        step   step(layer, x, delta): a layer over x + delta; two summands, too.
        place  number of the layer that is the cache's first."""
        if not 0 < len(x) <= MOST_ROWS:
            return None
        # Products are cut into pieces by the number of threads.
        key = layers, place, len(x), torch.get_num_threads()
        if key not in self._programs:
            self._programs[key] = self._record(step, layers, x, cache)
        program = self._programs[key]
        return None if program is None else program(x, cache)

    def _record(self, step: Callable[..., Any], layers: range, x: torch.Tensor, cache: Writer) -> _Program | None:
        with recorded() as steps:
            watch = _Watch(self._memory, len(x))
            into = out = watch.place(x)
            delta: Any = None
            try:
                with watch:
                    for watch.layer in layers:
                        watch.count = 0
                        out, delta = step(watch.layer, out, delta)
            except _NotRecordable:
                return None
        return _Program(into, (out, delta), cache.header, steps)


class _Program:
    """A recorded forward: its input and output, the header of its forward, and its steps: function, task, and whether
    it is for one thread alone."""

    def __init__(
        self,
        x: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor],
        header: array[int],
        steps: Sequence[tuple[Any, array[int], bool]],
    ):
        self._x, self._out, self._header = x, out, header
        self._tasks = [(task, task[:]) for _, task, _ in steps]
        self._lines = array("q")
        for (work, _, alone), (task, fresh) in zip(steps, self._tasks, strict=True):
            at, words = task.buffer_info()
            self._lines.extend((work.address, at, alone, fresh.buffer_info()[0], words))

    def __call__(self, x: torch.Tensor, cache: Writer) -> tuple[torch.Tensor, torch.Tensor]:
        self._x.copy_(x)
        self._header[:] = cache.header
        threads = torch.get_num_threads()
        wait = (barrier() or 0) if threads > 1 else 0
        on_threads(_run, array("q", (0, self._lines.buffer_info()[0], len(self._tasks), wait, 0)), threads)
        return self._out


class _NotRecordable(Exception):
    """A forward in which torch computes."""


_EMPTY = torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like


class _Watch(TorchDispatchMode):
    """While a forward is recorded: gives it memory, and raises _NotRecordable if torch is to compute.

    layer  the current one. count: of its allocations so far."""

    def __init__(self, memory: dict[Hashable, torch.Tensor], rows: int):
        super().__init__()
        self._memory, self._rows = memory, rows
        self.layer, self.count = -1, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.overloadpacket
        if not func.is_view and kind not in (*_EMPTY, torch.ops.aten.zeros):
            raise _NotRecordable(str(func))
        out = func(*args, **(kwargs or {}))
        return out if func.is_view else self.place(out, fill=kind == torch.ops.aten.zeros)

    def place(self, like: torch.Tensor, fill: bool = False) -> torch.Tensor:
        """Memory for a tensor like this one, which all programs share. fill: it is filled with zeros once, and those of
        this number of rows share it, for they leave zeros at the same places."""
        self.count += 1
        each = -(-like.numel() // self._rows)
        key = self.layer % 2 if self.layer >= 0 else None, self.count, each, like.dtype, self._rows if fill else 0
        if key not in self._memory:
            self._memory[key] = torch.zeros(MOST_ROWS * each, dtype=like.dtype)
        return self._memory[key][: like.numel()].view(like.shape)
