"""Schedule: which requests join the batch, and which rows run in a round. Knows nothing of drafts or models.

    Ragged   first come, first served; every row that is decoding runs in every round, and prompts run beside them in
             pieces. A row has a length of its own and is never realigned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from paceline.row import Row


class Turn(NamedTuple):
    """A row that runs in this round. chunk: how many tokens of its prompt it runs; 0: it is decoding."""

    row: Row
    chunk: int


class Schedule(Protocol):
    """Called by the engine before every round, first `admit`, then `select`."""

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Take the requests that join the batch now out of `waiting`."""

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """The rows that run in this round, at least one of those that are running."""


class Ragged:
    """Rows of any length side by side.

    max_batch      most rows at once.
    prefill_chunk  most prompt tokens in one round, so that a long prompt does not hold up the other rows."""

    def __init__(self, max_batch: int, prefill_chunk: int):
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """As many as there is room for, in the order they came."""
        room = self.max_batch - len(running)
        return [waiting.popleft() for _ in range(min(room, len(waiting)))]

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """All rows that are decoding, and pieces of prompts in the order they joined as far as the chunk goes."""
        turns, room = [], self.prefill_chunk
        for row in running:
            if row.is_decoding:
                turns.append(Turn(row, 0))
            elif room > 0:
                chunk = min(room, len(row.pending))
                room -= chunk
                turns.append(Turn(row, chunk))
        return turns
