"""The two published schedules for rows that grow unequally, to compare with: Zhang et al. 2025, arXiv 2510.22876.

    Equal    EQSPEC: a batch begins together and ends together. After each round its rows are realigned.
    Grouped  EXSPEC: of a window of requests, `max_batch` that are equally long run together, which needs no
             realignment; where there are none, the first `max_batch` of the window run and are realigned.

Both keep the target's own token after a draft that stands whole, let rows that have ended leave, and give every row a
draft and a budget of its own. The published code does none of the three.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.row import Row
from paceline.schedule import Turn


class Equal:
    """A batch of at most `max_batch` rows; the next one begins when its last row has ended.

    prefill_chunk  most tokens of each row's prompt in one round. Drafting begins when all prompts are through."""

    def __init__(self, max_batch: int, prefill_chunk: int):
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """A whole batch, in the order they came, when there is none."""
        return [] if running else [waiting.popleft() for _ in range(min(self.max_batch, len(waiting)))]

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """The prompts, until they are through; then every row."""
        return _prompts(running, self.max_batch, self.prefill_chunk) or [Turn(row, 0) for row in running]


class Grouped:
    """A window of requests, of which `max_batch` run in a round.

    window         most requests that are begun; more than `max_batch`, or there is nothing to choose from.
    prefill_chunk  most tokens of each row's prompt in one round.

    A request whose length no others share runs only when it is among the window's first and nobody else makes a group;
    it can wait long. That is the method's, and a reason not to use it."""

    def __init__(self, max_batch: int, prefill_chunk: int, window: int):
        self.max_batch, self.prefill_chunk, self.window = max_batch, prefill_chunk, window

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """As many as the window has room for, in the order they came."""
        room = self.window - len(running)
        return [waiting.popleft() for _ in range(min(room, len(waiting)))]

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """Prompts that have just come, `max_batch` at a time; else the first group that is full, in the order of the
        window; else the window's first."""
        prompts = _prompts(running, self.max_batch, self.prefill_chunk)
        return prompts or [Turn(row, 0) for row in self._group(running) or running[: self.max_batch]]

    def _group(self, running: Sequence[Row]) -> list[Row]:
        """The first `max_batch` rows that are equally long; nobody if there are not so many."""
        by_length: dict[int, list[Row]] = {}
        for row in running:
            group = by_length.setdefault(len(row), [])
            group.append(row)
            if len(group) == self.max_batch:
                return group
        return []


def _prompts(running: Sequence[Row], most: int, chunk: int) -> list[Turn]:
    """Pieces of the first `most` prompts that are not through."""
    fresh = [row for row in running if not row.is_decoding]
    return [Turn(row, min(chunk, len(row.pending))) for row in fresh[:most]]
