"""A draft model in a process of its own, on cores of its own, that drafts while the target verifies.

    worker = DraftWorker(setup)                # starts the process, which loads the model
    worker.windows(asks)                       # as Ahead: its answer comes first, then it looks ahead by itself
    worker.close()

Messages are pickled through a socket, which wakes the reader at once. A process that dies, fails or does not answer in
time raises `Closed`. Every answer has the number of its question; answers to earlier questions are dropped.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from weakref import finalize

import torch

from paceline.draft.neural.branches import Ahead, Ask, Candidates, Window
from paceline.engine.sampling import SamplingParams
from paceline.engine.tree import IntArray
from paceline.target.base import Facts, Target

START_S = 300.0
"""Seconds that starting the process and loading its model may take."""


class Closed(Exception):
    """The process is gone, or took longer than it may."""


class Fingerprint(NamedTuple):
    """The target's tokenizer as the process knows it: drafters compare nothing but the fingerprint."""

    fingerprint: str
    name: str
    eos_token_id: int | None = None


@dataclass
class RemoteTarget:
    """The facts of a target that runs in another process."""

    name: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    weights_fingerprint: str
    tokenizer: Any
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, target: Facts, device: torch.device) -> RemoteTarget:
        """The facts of `target`. device: where the draft model runs."""
        tokenizer = target.tokenizer and Fingerprint(target.tokenizer.fingerprint, target.tokenizer.name)
        return cls(
            target.name, target.vocab_size, target.max_context, tuple(target.eos_token_ids), target.weights_fingerprint,
            tokenizer, target.num_layers, target.hidden_size, target.dtype, device,
        )  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """What the process needs to begin.

    drafter  its spec. ahead: the options of `Ahead`.
    own      whether the draft's own candidates are all there are, so that the process looks ahead without waiting for
             others. joined: whether others are added to its own.
    threads  processor threads; cores: those it may run on, none: all.
    limit_s  seconds that an answer may take."""

    drafter: str
    facts: RemoteTarget
    ahead: Mapping[str, Any]
    own: bool = True
    joined: bool = False
    threads: int = 1
    cores: frozenset[int] = frozenset()
    limit_s: float = 20.0


class DraftWorker:
    """The process, as the target's side sees it. Closed if it cannot be started."""

    def __init__(self, setup: Setup):
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(setup, other), daemon=True)
        self._end = finalize(self, _end, self.process, self._pipe)
        self.process.start()
        other.close()  # the process has the only copy, so its death is the end of the stream
        self._question = 0
        _limit(self._pipe, START_S)
        try:
            self._answer()
        except Closed:
            self.close()
            raise
        _limit(self._pipe, setup.limit_s)

    def open(self, id: int, prompt: Sequence[int] | IntArray, params: SamplingParams, max_context: int) -> None:
        """As `Ahead.open`."""
        self._send("open", id, prompt, params, max_context)

    def drop(self, id: int) -> None:
        """As `Ahead.drop`."""
        self._send("drop", id)

    def windows(self, asks: Sequence[Ask]) -> list[Window]:
        """As `Ahead.windows`."""
        windows: list[Window] = self._ask("windows", asks)
        return [replace(one, probs=[torch.from_numpy(q) for q in one.probs]) for one in windows]

    def look_ahead(self, given: Mapping[int, Candidates] | None = None, joined: bool = False) -> None:
        """Hand over candidates. Without any the process looks ahead by itself."""
        if given is not None:
            self._send("look_ahead", given)

    def round_trip(self) -> float:
        """Seconds that a question without rows and its answer take."""
        return median(_seconds(lambda: self.windows([])) for _ in range(20))

    def overlap(self, seconds: float = 0.15) -> float:
        """Time of some work here and some there, one after the other, over the time of both at once: 2 if the two
        overlap, 1 if they take turns."""
        _work(seconds)
        self._ask("work", seconds)  # each side finds out first how much work that is
        in_turn = _seconds(lambda: _work(seconds)) + _seconds(lambda: self._ask("work", seconds))

        def both() -> None:
            self._send("work", seconds)
            _work(seconds)
            self._answer()

        return in_turn / _seconds(both)

    def close(self) -> None:
        """End the process."""
        self._end()

    def _send(self, kind: str, *message: Any) -> None:
        self._question += 1
        try:
            self._pipe.send((kind, self._question, message))
        except OSError as error:
            raise Closed(_why(error)) from None

    def _ask(self, kind: str, *message: Any) -> Any:
        self._send(kind, *message)
        return self._answer()

    def _answer(self) -> Any:
        """The answer to the last question."""
        while True:
            try:
                number, answer = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise Closed(_why(error)) from None
            if number < 0:
                raise Closed(answer)
            if number == self._question:
                return answer


def _why(error: Exception) -> str:
    return "" if isinstance(error, BlockingIOError) else "it ended"


def _limit(pipe: Connection, seconds: float) -> None:
    """Let sending and receiving fail with BlockingIOError where they wait longer than `seconds`."""
    whole, part = divmod(max(round(1e6 * seconds), 1), 1_000_000)
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for what in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, what, struct.pack("ll", whole, part))


def _end(process: BaseProcess, pipe: Connection) -> None:
    pipe.close()
    with suppress(Exception):
        process.kill()
        process.join(5)


def _seconds(act: Callable[[], object]) -> float:
    began = perf_counter()
    act()
    return perf_counter() - began


@cache
def _products(seconds: float) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A matrix, a vector, and how often this process multiplies them in `seconds`."""
    matrix, vector = torch.ones(1024, 1024), torch.ones(1024)
    took = _seconds(lambda: [matrix @ vector for _ in range(50)])
    return matrix, vector, max(1, int(50 * seconds / took))


def _work(seconds: float) -> None:
    matrix, vector, count = _products(seconds)
    for _ in range(count):
        matrix @ vector


# Cores ---------------------------------------------------------------------------------------------------------------


def split_cores(threads: int) -> tuple[frozenset[int], frozenset[int]]:
    """This process's cores, for the target and the last `threads` for the draft; both empty where they cannot be
    split."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) <= threads:
        return frozenset(), frozenset()
    return frozenset(cores[:-threads]), frozenset(cores[-threads:])


@contextmanager
def confined(target: Facts, cores: frozenset[int]) -> Iterator[None]:
    """Leave only these cores to the target. Afterwards it has those of before, and its threads too unless somebody has
    set others meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        if isinstance(target, Target):
            with target.threads_of(len(cores)):
                ours = target.threads
                yield
                last = target.threads
            if last is not ours:
                target.threads = last
        else:
            yield
    finally:
        os.sched_setaffinity(0, before)


# The process ---------------------------------------------------------------------------------------------------------


def _serve(setup: Setup, pipe: Connection) -> None:
    """Answer until the other side is gone."""
    try:
        ahead = _ready(setup)
        pipe.send((0, None))
        while True:
            kind, number, message = pipe.recv()
            with torch.inference_mode():
                _act(setup, ahead, pipe, kind, number, message)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return  # an interrupt reaches the other side too, which ends this process when it is ready to
    except Exception as error:
        with suppress(OSError):
            pipe.send((-1, f"{type(error).__name__}: {error}"))


def _ready(setup: Setup) -> Ahead:
    from paceline.draft.neural.stepping import Stepping
    from paceline.draft.registry import create

    if setup.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    torch.set_num_threads(setup.threads)
    drafter = create(setup.drafter)
    assert isinstance(drafter, Stepping)
    drafter.bind(setup.facts)
    return Ahead(drafter, **setup.ahead)


def _act(setup: Setup, ahead: Ahead, pipe: Connection, kind: str, number: int, message: tuple[Any, ...]) -> None:
    """Deal with one message."""
    if kind == "open":
        ahead.open(*message)
    elif kind == "drop":
        ahead.drop(*message)
    elif kind == "windows":
        windows = ahead.windows(*message)
        plain = [replace(one, probs=[q.float().cpu().numpy() for q in one.probs]) for one in windows]
        pipe.send((number, plain))
        if setup.own and not pipe.poll():
            ahead.look_ahead()
    elif kind == "look_ahead":
        ahead.look_ahead(*message, setup.joined)
    elif kind == "work":
        _work(*message)
        pipe.send((number, None))
