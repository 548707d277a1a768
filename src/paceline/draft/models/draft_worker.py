"""A draft model in its own process, on its own cores, that drafts while the target verifies.

Messages are pickled through a socket, which wakes the reader at once. A response carries the number of its request;
responses to earlier requests are dropped. `Closed` is raised if the process dies, fails or is too slow."""

import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import torch

from paceline.core.sampling import SamplingParams
from paceline.core.tree import IntArray
from paceline.draft.models.branches import Candidates, Lookahead, Next, Window
from paceline.draft.recording import Recording
from paceline.formats.facts import Facts

START_S = 300.0
"""Largest number of seconds for starting the process and loading its model."""


class Closed(Exception):
    """The process is gone, or did not answer in time."""


def facts_to_send(target: Facts, device: torch.device) -> Facts:
    """Make the facts of `target` for the process. Of the tokenizer, only name and fingerprint are sent.

    device  the draft model's."""
    tokenizer = target.tokenizer and SimpleNamespace(
        fingerprint=target.tokenizer.fingerprint, name=target.tokenizer.name, eos_token_id=None
    )
    return Recording.elsewhere(target, tokenizer=tokenizer, device=device)


@dataclass(frozen=True)
class Setup:
    """How to start the process.

    drafter  spec of the drafter. facts: facts of the target. ahead: options of `Lookahead`.
    own      whether the process looks ahead by its own candidates, without waiting for the target's.
    threads  processor threads. cores: cores on which it may run; empty: all.
    limit_s  largest number of seconds for a response."""

    drafter: str
    facts: Facts
    ahead: Mapping[str, Any]
    own: bool = True
    threads: int = 1
    cores: frozenset[int] = frozenset()
    limit_s: float = 20.0


class DraftWorker:
    """The target's side, with the methods of `Lookahead`. Raises Closed if the process does not start."""

    def __init__(self, setup: Setup):
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(setup, other), daemon=True)
        self._end = finalize(self, _end, self.process, self._pipe)
        self.process.start()
        other.close()  # Now only the process holds that end, so reading fails when the process dies.
        self._number = 0
        _limit(self._pipe, START_S)
        try:
            self._answer()
        except Closed:
            self.close()
            raise
        _limit(self._pipe, setup.limit_s)

    def open(self, id: int, prompt: Sequence[int] | IntArray, params: SamplingParams, max_context: int) -> None:
        self._send("open", id, prompt, params, max_context)

    def drop(self, id: int) -> None:
        self._send("drop", id)

    def windows(self, asked: Sequence[Next]) -> list[Window]:
        windows: list[Window] = self._ask("windows", asked)
        return windows

    def look_ahead(self, given: Mapping[int, Candidates] | None = None) -> None:
        """Send candidates. None: nothing is sent, and the process looks ahead by itself."""
        if given is not None:
            self._send("look_ahead", given)

    def close(self) -> None:
        self._end()

    def _send(self, kind: str, *message: Any) -> None:
        self._number += 1
        try:
            self._pipe.send((kind, self._number, message))
        except OSError as error:
            raise Closed(_why(error)) from None

    def _ask(self, kind: str, *message: Any) -> Any:
        self._send(kind, *message)
        return self._answer()

    def _answer(self) -> Any:
        """Wait for the response to the last request."""
        while True:
            try:
                number, response = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise Closed(_why(error)) from None
            if number < 0:
                raise Closed(response)
            if number == self._number:
                return response


def _why(error: Exception) -> str:
    return "" if isinstance(error, BlockingIOError) else "it ended"


def _limit(pipe: Connection, seconds: float) -> None:
    """Make sending and receiving fail with BlockingIOError after `seconds`."""
    whole, part = divmod(max(round(1e6 * seconds), 1), 1_000_000)
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for what in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, what, struct.pack("ll", whole, part))


def _end(process: BaseProcess, pipe: Connection) -> None:
    pipe.close()
    with suppress(Exception):
        process.kill()
        process.join(5)


def split_cores(threads: int) -> tuple[frozenset[int], frozenset[int]]:
    """Divide this process's cores. Returns the target's, and the draft's, which are the last `threads`. Both are empty
    if there are too few cores, or the system does not name them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) <= threads:
        return frozenset(), frozenset()
    return frozenset(cores[:-threads]), frozenset(cores[-threads:])


@contextmanager
def confined(target: Facts, cores: frozenset[int]) -> Iterator[None]:
    """Run the target on `cores`, with a thread on each."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with target.threads.at(len(cores)) if target.threads is not None else nullcontext():
            yield
    finally:
        os.sched_setaffinity(0, before)


def _serve(setup: Setup, pipe: Connection) -> None:
    """Run the process: answer requests until the other side is gone."""
    try:
        ahead = _ready(setup)
        pipe.send((0, None))
        while True:
            kind, number, message = pipe.recv()
            with torch.inference_mode():
                _act(setup, ahead, pipe, kind, number, message)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return  # Ctrl-C reaches the other side, too, and that ends this process.
    except Exception as error:
        with suppress(OSError):
            pipe.send((-1, f"{type(error).__name__}: {error}"))


def _ready(setup: Setup) -> Lookahead:
    from paceline.draft.models.model_drafter import ModelDrafter
    from paceline.draft.registry import create

    if setup.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    torch.set_num_threads(setup.threads)
    drafter = create(setup.drafter)
    assert isinstance(drafter, ModelDrafter)
    drafter.bind(setup.facts)
    return Lookahead(drafter, **setup.ahead)


def _act(setup: Setup, ahead: Lookahead, pipe: Connection, kind: str, number: int, message: tuple[Any, ...]) -> None:
    if kind == "windows":
        pipe.send((number, ahead.windows(*message)))
        if setup.own and not pipe.poll():
            ahead.look_ahead()
    else:  # These have no answer: open, drop and look_ahead.
        getattr(ahead, kind)(*message)
