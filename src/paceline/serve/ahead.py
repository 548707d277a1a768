"""Read ahead: while the engine is idle, it computes how the next request of a conversation will begin, if that differs
from the tokens computed already.

A chat template may write an answer differently when it has become a part of the conversation: without its thinking, or
a call in another spelling. The server renders the conversation as the client will send it, and reads it. Answers do not
change: the next request finds more of its prompt computed. The forward ends between two layers when a request comes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.tree import IntArray
from paceline.engine.engine import Engine
from paceline.engine.prefixes import SHORTEST, common
from paceline.engine.scheduler import Ragged
from paceline.errors import Interrupted, PacelineError

log = logging.getLogger("paceline.engine")

WAITING, KEPT = 4, 64
"""Largest number of conversations that wait to be read, and of those that were read and may come."""
LAYER_SECONDS = 0.005
"""Time that a layer of a forward may take, which delays a request that comes meanwhile."""
PIECES = 32, 512
"""Smallest and largest number of tokens of a forward."""


@dataclass(eq=False)
class Part:
    """Tokens `begin` to `end` of a conversation, which were read ahead."""

    tokens: IntArray
    begin: int
    end: int


class ReadAhead:
    """Reads conversations while `is_idle` is true. Except for `put`, it is for the engine's thread.

    read, used, wasted  numbers of tokens: read ahead, found by later prompts, and lost to all prompts."""

    def __init__(self, engine: Engine, is_idle: Callable[[], bool]):
        self._engine, self._is_idle = engine, is_idle
        self._waiting: deque[tuple[Sequence[int], SamplingParams]] = deque(maxlen=WAITING)
        self._parts: deque[Part] = deque()
        self._piece = PIECES[0]
        self.read = self.used = self.wasted = 0

    def put(self, tokens: Sequence[int], params: SamplingParams) -> None:
        """Plan to read a conversation, for requests with the same salt and drafter."""
        # Its row never has two new tokens, so no drafter learns from it. The answer's grammar and limits do not count.
        own = SamplingParams(
            max_tokens=2, cache_salt=params.cache_salt, draft=params.draft, branches=params.branches
        )  # fmt: skip
        self._waiting.append((tokens, own))

    def work(self) -> bool:
        """Read the latest conversation, until it is read or a request comes. Returns whether there was one."""
        if not self._waiting:
            return False
        tokens, params = self._waiting.pop()
        with suppress(PacelineError):  # The conversation has become too long for another turn.
            row = self._engine.check(tokens, params)
            if self._engine.reusable(row) + SHORTEST < len(tokens) and not self._run(self._engine.add(tokens, params)):
                self._waiting.append((tokens, params))
        return True

    def _run(self, row: Row) -> bool:
        """Run a row's prompt. Returns whether it is over: all of it was run, or it cannot go on."""
        engine, target = self._engine, self._engine.target
        layers = target.num_layers if target.inside is not None else 1  # Others run all layers in one call.
        target.is_interrupted, stuck = lambda: not self._is_idle(), False
        try:
            with suppress(Interrupted):  # A request has come, which goes first.
                while not stuck and row.finish_reason is None and row.cached < row.prompt_length and self._is_idle():
                    began, before = perf_counter(), row.cached
                    with engine.using(schedule=Ragged(1, self._piece)):
                        engine.step()
                    stuck = row.cached <= before
                    each = (perf_counter() - began) / layers / max(row.cached - before, 1)
                    self._piece = min(max(int(LAYER_SECONDS / max(each, 1e-9)), PIECES[0]), PIECES[1])
        except Exception:  # Reading ahead must never harm requests.
            log.exception("a conversation could not be read ahead")
            row.end("error")
        finally:
            target.is_interrupted = None
            end, tokens = row.cached, row.tokens[: row.cached].copy()
            engine.abort(row)
        if end > row.reused:
            self.read += end - row.reused
            self._parts.append(Part(tokens, row.reused, end))
            if len(self._parts) > KEPT:
                dropped = self._parts.popleft()
                self.wasted += dropped.end - dropped.begin
        return stuck or end >= row.prompt_length or row.finish_reason == "error"

    def ended(self, row: Row) -> None:
        """Count the tokens that a request found read ahead."""
        prompt = row.tokens[: min(row.prompt_length, row.reused)]
        for part in [*self._parts]:
            used = common(part.tokens, prompt) - part.begin
            if used > 0:
                self._parts.remove(part)
                self.used += used
                self.wasted += part.end - part.begin - used


def same_beginning(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The tokens with which both begin."""
    return list(a[: common(np.array(a, np.int64), np.array(b, np.int64))])
