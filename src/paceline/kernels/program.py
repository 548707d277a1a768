"""Programs: the layers of a forward over few rows in a single call.

Between its products, a layer of a small model has a dozen compiled steps of a few microseconds each, and Python takes
longer to call them than they take. So a forward is recorded: the functions that it calls, and their arguments. From
then on it is a single call. Each thread goes through the list, and takes pieces of a step until none is left. The next
step begins when all pieces are done. Functions and orders of sums are the same as without a program, so the bits are,
too.

A forward can be recorded if torch only allocates memory and makes views, and all else goes through `on_threads`. If a
library multiplies, layers are called one by one."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.compiled import address, call, fetch_add, look, swap
from paceline.kernels import on_threads, recorded
from paceline.kernels.ops import Pair, Places
from paceline.kernels.records import record

MOST_ROWS = 32
"""Largest number of rows of a recorded forward. With more rows, calls are a small part of the time."""
THREADS = 1 << 16  # more than the number of threads of any machine
SPINS = 2000
"""How often a waiting thread looks at `current` before it yields its core."""


class Task(NamedTuple):
    """The task of a program.

    current  the number of the step that is running, times THREADS, plus the number of threads inside it.
    steps    address of `num_steps` lines. yields: address of sched_yield, or 0."""

    current: int
    steps: int
    num_steps: int
    yields: int


class Line(NamedTuple):
    """A step.

    alone           whether only a single thread runs it, the first. taken: counts the threads that try to.
    function, task  addresses."""

    taken: int
    function: int
    task: int
    alone: int


TASK, LINE = record(Task), record(Line)
WORDS = len(Line._fields)


@cfunc("void(voidptr)", cache=True)
def _run(at):  # type: ignore[no-untyped-def]
    """Run a thread through a program. A step is done when it has no pieces left and no thread inside. So a thread that
    loses its core between two steps does not hold up others, and skips the steps that they do."""
    task, state = carray(at, (1,), TASK)[0], carray(at, (1,), np.int64)
    count = task.num_steps
    steps, words = carray(address(task.steps), (count,), LINE), carray(address(task.steps), (count, WORDS), np.int64)
    while True:
        # Reading the step and counting this thread must be one operation; between two, the step could end.
        current = fetch_add(state, 1) // THREADS
        if current < count:
            line = steps[current]
            if not line.alone or fetch_add(words[current], 1) == 0:
                call(line.function, (line.task,))
        fetch_add(state, -1)
        if current >= count:
            return
        spins, done = 0, current * THREADS
        while look(state) // THREADS == current:
            if look(state) == done:  # No thread is inside.
                swap(state, done, done + THREADS)
            spins += 1
            if spins > SPINS and task.yields:
                call(task.yields, ())


States = dict[int, torch.Tensor]
"""States [N, H] before layers, by layer."""


class Programs:
    """Recorded forwards. They share the memory of intermediate results: since a layer reads only the output of the
    layer before, memory for two layers is enough."""

    def __init__(self) -> None:
        self._programs: dict[Hashable, _Program | None] = {}
        self._memory: dict[Hashable, torch.Tensor] = {}

    def run(
        self, step: Callable[..., Any], layers: Sequence[int], place: int, x: torch.Tensor, places: Places
    ) -> tuple[Pair, States] | None:
        """Run the layers over x [N, H]. Returns two summands [N, H] of the result, and the wanted states before layers,
        all valid until the next call; None if this forward cannot be recorded.

        step    step(layer, x, delta) runs a layer over x + delta, and returns two summands.
        layers  numbers of the layers. In front of one, ~layer wants its states: step(~layer, x, delta) adds x + delta.
        place   number of the cache's first layer."""
        if not 0 < len(x) <= MOST_ROWS:
            return None
        # The number of threads decides into which pieces products are cut.
        key = layers, place, len(x), torch.get_num_threads()
        if key not in self._programs:
            self._programs[key] = self._record(step, layers, x, places)
        program = self._programs[key]
        return None if program is None else (program(x, places), program.states)

    def _record(
        self, step: Callable[..., Any], layers: Sequence[int], x: torch.Tensor, places: Places
    ) -> _Program | None:
        with recorded() as steps:
            watch = _Watch(self._memory, len(x))
            into = out = watch.place(x)
            delta: Any = None
            states: States = {}
            try:
                with watch:
                    for watch.layer in layers:
                        watch.count = 0
                        out, delta = step(watch.layer, out, delta)
                        if watch.layer < 0:
                            states[~watch.layer] = out
            except _NotRecordable:
                return None
        return _Program(into, (out, delta), states, places.header, steps)


class _Program:
    """A recorded forward: input, output, states before layers, `Places.header`, and steps (function, task, whether a
    single thread runs it)."""

    def __init__(
        self, x: torch.Tensor, out: Pair, states: States, header: array[int],
        steps: Sequence[tuple[Any, array[int], bool]],
    ):  # fmt: skip
        self.states = states
        self._x, self._out, self._header, self._count = x, out, header, len(steps)
        *begins, end = len(steps) * WORDS + np.cumsum([0, *(len(task) for _, task, _ in steps)])
        self._memory = np.empty(end, np.int64)  # lines of all steps, then their tasks
        at = self._memory.ctypes.data
        lines = [Line(0, work.address, at + 8 * i, alone) for (work, _, alone), i in zip(steps, begins, strict=True)]
        self._fresh = np.concatenate([np.ravel(lines), *(task for _, task, _ in steps)])

    def __call__(self, x: torch.Tensor, places: Places) -> Pair:
        self._x.copy_(x)
        self._header[:] = places.header
        self._memory[:] = self._fresh  # This resets all counters.
        task = array("q", Task(0, self._memory.ctypes.data, self._count, _let_others_run()))
        on_threads(_run, task, torch.get_num_threads())
        return self._out


@cache
def _let_others_run() -> int:
    """Address of libc's sched_yield; 0 if there is none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    except (OSError, AttributeError, TypeError):  # Windows has none.
        return 0


class _NotRecordable(Exception):
    """Torch computes in this forward, so it cannot be recorded."""


_EMPTY = torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like


class _Watch(TorchDispatchMode):
    """Gives memory to a forward that is being recorded, and raises _NotRecordable if torch computes.

    layer  the current layer, or ~layer while its states are added, which keep memory of their own. count: number of its
           allocations so far."""

    def __init__(self, memory: dict[Hashable, torch.Tensor], rows: int):
        super().__init__()
        self._memory, self._rows = memory, rows
        self.layer, self.count = -1, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because True would import torch's compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.overloadpacket
        if not func.is_view and kind not in (*_EMPTY, torch.ops.aten.zeros):
            raise _NotRecordable(str(func))
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            return self.place(out, fill=kind == torch.ops.aten.zeros)
        views = [out] if isinstance(out, torch.Tensor) else out
        if any(view.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr() for view in views):
            raise _NotRecordable(f"{func} made a copy")  # `contiguous` makes a copy of some tensors.
        return out

    def place(self, like: torch.Tensor, fill: bool = False) -> torch.Tensor:
        """Give out memory of `like`'s size, which all programs share. fill: it is zeroed once, and shared only among
        programs with as many rows, which never write to the zeros that they need."""
        self.count += 1
        each = -(-like.numel() // self._rows)
        key = self.layer % 2 if self.layer >= 0 else self.layer, self.count, each, like.dtype, self._rows if fill else 0
        if key not in self._memory:
            self._memory[key] = torch.zeros(MOST_ROWS * each, dtype=like.dtype)
        return self._memory[key][: like.numel()].view(like.shape)
