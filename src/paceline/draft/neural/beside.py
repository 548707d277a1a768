"""A draft model in a process of its own, on cores of its own, that drafts while the target verifies.

    beside = Beside(setup)                     # starts the process, which loads the model
    beside.windows(asks)                       # as Ahead: its answer comes first, then it looks ahead by itself
    beside.close()

The process answers at once if the outcome was drafted ahead for, and looks ahead after it has answered. Messages are
arrays in shared memory (`ring.py`). A process that dies, fails or does not answer in time raises `Closed`, and leaves
no memory and no process. Every answer has the number of its question; others are thrown away.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import torch

from paceline.draft.neural.branches import Ahead, Ask, Candidates, Window
from paceline.draft.neural.ring import Closed, Ring
from paceline.engine.sampling import SamplingParams
from paceline.engine.tree import IntArray

OPEN, DROP, ASK, CANDIDATES, WORK, FAILED, READY = range(7)
START_S = 300.0
"""Seconds that starting the process and loading its model may take."""


class Print(NamedTuple):
    """Of a tokenizer in another process: the target's, whose fingerprint is all that is compared."""

    fingerprint: str
    name: str
    eos_token_id: int | None = None


@dataclass
class TargetLike:
    """The facts of a target in another process."""

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


@dataclass(frozen=True)
class Setup:
    """What the process needs to begin. drafter: its spec; ahead: the options of `Ahead`; own: whether the draft's own
    candidates are all there are, so that it need not wait for others; cores: what it may run on."""

    drafter: str
    facts: TargetLike
    ahead: Mapping[str, Any]
    own: bool = True
    joined: bool = False
    threads: int = 1
    cores: frozenset[int] = frozenset()
    limit_s: float = 20.0


class Beside:
    """The target's side of the process."""

    def __init__(self, setup: Setup):
        self._to, self._from = Ring(), Ring()
        names = self._to.memory.name, self._from.memory.name
        process = get_context("spawn").Process(target=_serve, args=(setup, *names), daemon=True)
        self._end = finalize(self, _end, process, self._to, self._from)
        process.start()
        self.process = process
        for ring in (self._to, self._from):
            ring.alive, ring.limit = process.is_alive, START_S
        self._round = 0
        kind, _, rest = self._receive()
        if kind == FAILED:
            self.close()
            raise Closed(rest.decode())
        for ring in (self._to, self._from):
            ring.limit = setup.limit_s

    def open(self, id: int, prompt: Sequence[int] | IntArray, params: SamplingParams, max_context: int) -> None:
        """As `Ahead.open`."""
        head = json.dumps([id, max_context, asdict(params)], default=list).encode()
        self._send(OPEN, struct.pack("q", len(head)) + head + np.asarray(prompt, np.int64).tobytes())

    def drop(self, id: int) -> None:
        """As `Ahead.drop`."""
        self._send(DROP, struct.pack("q", id))

    def windows(self, asks: Sequence[Ask]) -> list[Window]:
        """As `Ahead.windows`; whatever answers an earlier question is thrown away."""
        self._round += 1
        parts = [np.array([ask.id, len(ask.new), *ask.new], np.int64).tobytes() for ask in asks]
        self._send(ASK, b"".join(parts))
        while True:
            kind, number, rest = self._receive()
            if kind == FAILED:
                raise Closed(rest.decode())
            if kind == ASK and number == self._round:
                return _read_windows(rest)

    def look_ahead(self, given: Mapping[int, Candidates] | None = None, joined: bool = False) -> None:
        """Hand over candidates; the process looks ahead by itself where it has its own."""
        if given is not None:
            flat = [[id, [[list(pair) for pair in top] for top in tops]] for id, tops in given.items()]
            self._send(CANDIDATES, json.dumps(flat).encode())

    def round_trip(self) -> float:
        """Seconds of a question without rows, and its answer."""
        took = []
        for _ in range(20):
            began = perf_counter()
            self.windows([])
            took.append(perf_counter() - began)
        return median(took)

    def overlap(self, seconds: float = 0.15) -> float:
        """Time of some work here and some there, one after the other, over the time of both at once: 2 if the two run
        beside each other, 1 if they take turns."""
        work = _Work(seconds)
        alone, others = work(), self._other(seconds)
        began = perf_counter()
        self._send(WORK, struct.pack("d", seconds))
        work()
        self._receive()
        return (alone + others) / (perf_counter() - began)

    def _other(self, seconds: float) -> float:
        took = 0.0
        for _ in range(2):  # the first finds out how much work that is
            began = perf_counter()
            self._send(WORK, struct.pack("d", seconds))
            self._receive()
            took = perf_counter() - began
        return took

    def close(self) -> None:
        """End the process and free the memory."""
        self._end()

    def _send(self, kind: int, rest: bytes) -> None:
        self._to.write(struct.pack("qq", kind, self._round) + rest)

    def _receive(self) -> tuple[int, int, bytes]:
        message = self._from.read()
        return *struct.unpack("qq", message[:16]), message[16:]


def _end(process: BaseProcess, *rings: Ring) -> None:
    with suppress(Exception):
        process.kill()
        process.join(5)
    for ring in rings:
        ring.close(unlink=True)


# The process ---------------------------------------------------------------------------------------------------------


def _serve(setup: Setup, inward: str, outward: str) -> None:
    """The process: until the other side is gone."""
    parent = os.getppid()
    into, out = Ring(inward), Ring(outward)
    for ring in (into, out):
        ring.alive, ring.limit = lambda: os.getppid() == parent, float("inf")
    number = 0

    def say(kind: int, rest: bytes = b"") -> None:
        out.write(struct.pack("qq", kind, number) + rest)

    try:
        ahead = _ready(setup)
        say(READY)
        while True:
            message = into.read()
            kind, number = struct.unpack("qq", message[:16])
            _answer(setup, ahead, kind, message[16:], say, into)
    except Closed:
        return
    except KeyboardInterrupt:  # the other side was interrupted too, and ends this one when it is ready to
        return
    except Exception as error:
        with suppress(Closed):
            say(FAILED, f"{type(error).__name__}: {error}".encode())


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


def _answer(setup: Setup, ahead: Ahead, kind: int, rest: bytes, say: Any, into: Ring) -> None:
    """Deal with one message."""
    if kind == OPEN:
        (length,) = struct.unpack("q", rest[:8])
        id, max_context, params = json.loads(rest[8 : 8 + length])
        prompt = np.frombuffer(rest[8 + length :], np.int64).copy()
        ahead.open(id, prompt, _params(params), max_context)
    elif kind == DROP:
        ahead.drop(*struct.unpack("q", rest))
    elif kind == ASK:
        with torch.inference_mode():
            windows = ahead.windows(_read_asks(rest))
            say(ASK, _written(windows))
            if setup.own and not into.waiting:
                ahead.look_ahead()
    elif kind == CANDIDATES:
        given = {id: [[(int(v), float(p)) for v, p in top] for top in tops] for id, tops in json.loads(rest)}
        with torch.inference_mode():
            ahead.look_ahead(given, setup.joined)
    elif kind == WORK:
        _Work(*struct.unpack("d", rest))()
        say(WORK)


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    bias = {int(token): value for token, value in fields["logit_bias"].items()}  # JSON made texts of the numbers
    return SamplingParams(**{**fields, "logit_bias": bias})


class _Work:
    """A loop of products that takes about `seconds` here; how many is found out the first time."""

    _times: dict[float, int] = {}

    def __init__(self, seconds: float):
        self.matrix, self.vector = torch.ones(1024, 1024), torch.ones(1024)
        if seconds not in self._times:
            began = perf_counter()
            for _ in range(50):
                self.matrix @ self.vector
            self._times[seconds] = max(1, int(50 * seconds / (perf_counter() - began)))
        self.count = self._times[seconds]

    def __call__(self) -> float:
        began = perf_counter()
        for _ in range(self.count):
            self.matrix @ self.vector
        return perf_counter() - began


# Messages ------------------------------------------------------------------------------------------------------------


def _read_asks(data: bytes) -> list[Ask]:
    numbers, asks, at = np.frombuffer(data, np.int64), [], 0
    while at < len(numbers):
        id, count = int(numbers[at]), int(numbers[at + 1])
        asks.append(Ask(id, numbers[at + 2 : at + 2 + count].tolist()))
        at += 2 + count
    return asks


def _written(windows: Sequence[Window]) -> bytes:
    """Windows as bytes: the number of integers; for each row id, hit, calls, the number of tokens, the width of the
    distributions (0: none), the tokens; then all distributions, float32."""
    numbers: list[int] = []
    probs: list[bytes] = []
    for window in windows:
        hit = -1 if window.hit is None else int(window.hit)
        width = len(window.probs[0]) if window.probs else 0
        numbers += [window.id, hit, window.calls, len(window.tokens), width, *window.tokens]
        probs += [q.float().cpu().numpy().tobytes() for q in window.probs]
    return struct.pack("q", len(numbers)) + np.array(numbers, np.int64).tobytes() + b"".join(probs)


def _read_windows(data: bytes) -> list[Window]:
    (count,) = struct.unpack("q", data[:8])
    numbers = np.frombuffer(data, np.int64, count, 8).tolist()
    at, offset, windows = 0, 8 + 8 * count, []
    while at < count:
        id, hit, calls, length, width = numbers[at : at + 5]
        tokens = numbers[at + 5 : at + 5 + length]
        probs = []
        for _ in range(length if width else 0):
            probs.append(torch.from_numpy(np.frombuffer(data, np.float32, width, offset).copy()))
            offset += 4 * width
        windows.append(Window(id, tokens, probs, None if hit < 0 else bool(hit), calls))
        at += 5 + length
    return windows
