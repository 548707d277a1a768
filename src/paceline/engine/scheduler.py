"""Schedule: which requests join the batch, and which rows run in a round. Knows nothing of drafts or models."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from paceline.engine.request import Row


class Turn(NamedTuple):
    """A row that runs in this round. chunk: how many tokens of its prompt it runs; 0: it is decoding."""

    row: Row
    chunk: int


class Schedule(Protocol):
    """Called by the engine before every round: first `admit`, then `select`."""

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Take the requests that join now out of `waiting`. Those that the cache has no memory for are put back."""

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """At least one of the rows of `running`, which lacks those that wait until another row has computed what their
        prompts share."""


class Ragged:
    """First come, first served, rows of any length side by side. Every row that is decoding runs in every round, and
    prompts run in pieces with them, so that a long one holds up neither them nor a short prompt.

    max_batch      most rows at once.
    prefill_chunk  most prompt tokens in one round. Half of them are the oldest prompt's, the rest goes to the prompts
                   that have least left. So a prompt of k tokens, if it came first or the others are longer, takes about
                   2 k / prefill_chunk rounds."""

    def __init__(self, max_batch: int, prefill_chunk: int):
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """As many as there is room for, in the order they came."""
        left = self.max_batch - len(running)
        return [waiting.popleft() for _ in range(min(left, len(waiting)))]

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """All rows that are decoding, and pieces of prompts as far as the chunk goes."""
        prompts = {row.id: row for row in running if not row.is_decoding}
        chunks = self._chunks(list(prompts.values()))
        return [Turn(row, chunks.get(row.id, 0)) for row in running if row.id in chunks or row.id not in prompts]

    def _chunks(self, prompts: Sequence[Row]) -> dict[int, int]:
        """How many tokens each prompt runs, by row id."""
        if not prompts:
            return {}
        oldest = min(prompts, key=lambda row: row.id)
        left = self.prefill_chunk
        chunks = {oldest.id: min(-(-left // 2), len(oldest.pending))}
        left -= chunks[oldest.id]
        for row in sorted(prompts, key=lambda row: len(row.pending)):
            more = min(left, len(row.pending) - chunks.get(row.id, 0))
            if more:
                chunks[row.id] = chunks.get(row.id, 0) + more
                left -= more
        return chunks
