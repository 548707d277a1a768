"""Compiled loops for CPUs: the steps of a layer, attention, matrix products. This module has their threads."""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import llvmlite.binding as llvm
import torch

from paceline import processor


def supported(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether `products.py` runs here: it needs AVX-512 BF16 (AVX2 or Arm for float32), and a recent LLVM."""
    fused = processor.has("avx2", "fma") or processor.has("neon")
    has_units = {torch.bfloat16: processor.has("avx512bf16"), torch.float32: fused}
    return has_units.get(dtype, False) and llvm.llvm_version_info >= (18,)


@processor.remembered
def preferred(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether `products.py` is faster here than torch's libraries for the few rows of decoding.

    It is faster on CPUs without AMX tiles: in bfloat16 with AVX-512 BF16, in float32 with AVX2. On EPYC and Ryzen, MKL
    takes two to four times as long (docs/exact.md). On Arm nobody has measured it."""
    return supported(dtype) and not processor.prefers_library()


@cache
def parallel() -> int | None:
    """Address of GOMP_parallel, which runs a task on the threads of torch's OpenMP; None if it is not GNU's OpenMP."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    libraries = {line.split()[-1] for line in maps.splitlines() if "gomp" in line}
    for library in sorted(libraries, key=lambda path: "torch" not in path):
        try:
            return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


_recording = threading.local()


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """A context in which this thread's calls of `on_threads` are listed instead of run: function, task, and whether a
    single thread runs it."""
    _recording.calls = []
    try:
        yield _recording.calls
    finally:
        _recording.calls = None


def is_recording() -> bool:
    """Whether this thread is in a context of `recorded`."""
    return getattr(_recording, "calls", None) is not None


def on_threads(work: Any, task: array[int], threads: int) -> None:
    """Run `work`, compiled by numba.cfunc, on `threads` threads at once. Its argument is the address of `task`, numbers
    of 64 bits that all threads share.

    The threads are torch's if its OpenMP is GNU's, because two pools would compete for the cores; else ours."""
    if is_recording():
        _recording.calls.append((work, task, threads == 1))
        return
    at, fork = task.buffer_info()[0], _fork()
    if threads == 1:
        _alone(work.address)(at)
    elif fork is None:
        _helpers.run(_alone(work.address), at, threads)
    else:
        fork(work.address, at, threads, 0)


class _Job:
    """Work that helpers join while it lasts."""

    def __init__(self, work: Any, at: int):
        self.work, self.at, self._inside, self._over = work, at, 0, False
        self._lock, self._left = threading.Lock(), threading.Semaphore(0)

    def help(self) -> None:
        """Do a part of the work, unless it has ended."""
        with self._lock:
            if self._over:
                return
            self._inside += 1
        self.work(self.at)
        self._left.release()

    def end(self) -> None:
        """Let no more helpers join, and wait for those that have. Helpers that have not begun may lack a core, so
        nobody waits for them."""
        with self._lock:
            self._over = True
        for _ in range(self._inside):
            self._left.acquire()


class _Helpers:
    """Threads that live as long as the process and wait for work. Each takes pieces of the task until none is left, so
    it does not matter when, in which order, or whether they begin."""

    def __init__(self) -> None:
        self._work: SimpleQueue[_Job] = SimpleQueue()
        self._count, self._lock = 0, threading.Lock()

    def run(self, work: Any, at: int, threads: int) -> None:
        """Run work(at) on this thread and on up to threads - 1 others at once."""
        with self._lock:
            while self._count < threads - 1:
                threading.Thread(target=self._help, name="kernels", daemon=True).start()
                self._count += 1
        job = _Job(work, at)
        for _ in range(threads - 1):
            self._work.put(job)
        work(at)
        job.end()

    def _help(self) -> None:
        while True:
            self._work.get().help()


_helpers = _Helpers()


def _forget_helpers() -> None:
    """Make new helpers in a forked process, because it lacks its parent's threads."""
    global _helpers
    _helpers = _Helpers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)


@cache
def _fork() -> Any:
    where = parallel()
    kinds = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    return None if where is None else ctypes.CFUNCTYPE(None, *kinds)(where)


@cache
def _alone(work: int) -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)
