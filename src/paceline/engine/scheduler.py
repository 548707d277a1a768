"""Schedule: which requests join the batch, and which rows run in a round."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from paceline.engine.request import Row


class Turn(NamedTuple):
    """A row that runs in this round. chunk: number of prompt tokens that it runs; 0: it is decoding."""

    row: Row
    chunk: int


class Schedule(Protocol):
    """Called by the engine before every round: first `admit`, then `select`."""

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Remove from `waiting` the requests that join now. The engine puts back those that do not fit into memory."""

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """At least one of the rows of `running`. Rows that wait for another row's keys and values are not in it."""


def take(waiting: deque[Row], most: int) -> list[Row]:
    """Remove up to `most` requests from the front of `waiting`."""
    return [waiting.popleft() for _ in range(min(most, len(waiting)))]


class Ragged:
    """First come, first served, rows of any length in one forward. Every row that is decoding runs in every round.
    Prompts run in pieces in the same rounds, so that a long one holds up neither these rows nor a short prompt.

    max_batch      most rows at once.
    prefill_chunk  most prompt tokens in one round. Half of them are the oldest prompt's, the rest goes to the prompts
                   with the fewest tokens left. So a prompt of k tokens takes about 2 k / prefill_chunk rounds if it is
                   the oldest or the shortest."""

    def __init__(self, max_batch: int, prefill_chunk: int):
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """As many as fit into the batch, in order of arrival."""
        return take(waiting, self.max_batch - len(running))

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """All rows that are decoding, and pieces of prompts up to the chunk."""
        prompts = {row.id: row for row in running if not row.is_decoding}
        chunks = self._chunks(list(prompts.values()))
        return [Turn(row, chunks.get(row.id, 0)) for row in running if row.id in chunks or row.id not in prompts]

    def _chunks(self, prompts: Sequence[Row]) -> dict[int, int]:
        """Number of tokens that each prompt runs, by row id."""
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
