"""Heads that read every committed state, once and in order, and draft from what they made of the last.

What they read with may keep a cache of its own. States that were committed since they last drafted wait in `Pending`;
of long prompts most are read at once. Knows no method.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.draft.neural.heads.drafting import StaticConfig, StaticHeads
from paceline.draft.neural.pending import Pending
from paceline.engine.request import Request
from paceline.engine.round import Round
from paceline.target.cache import RaggedCache


class ReadingHeads(StaticHeads):
    """Base of such drafters. They fill in `read`, and set in `open` what waits, and the cache if they have one."""

    pending: Pending
    cache: RaggedCache | None = None

    def __init__(self, config: StaticConfig):
        super().__init__(config)
        self._slots: dict[int, int] = {}
        self._last: dict[int, torch.Tensor] = {}

    def read(self, rows: Sequence[Request], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the heads draft from after each of the next states of rows, [n, H] each; [sum(n), H]."""
        raise NotImplementedError

    def slots(self, rows: Sequence[Request]) -> list[int]:
        """Where in the cache the rows are."""
        return [self._slots[row.id] for row in rows]

    def start(self, row: Request) -> None:
        if self.cache is not None:
            self._slots[row.id] = self.cache.add_row(row.expected_length)
        self.pending.start(row)

    def drop(self, row: Request) -> None:
        if self.cache is not None and row.id in self._slots:
            self.cache.drop_row(self._slots.pop(row.id))
        self.pending.drop(row)
        self._last.pop(row.id, None)

    def able(self, row: Request) -> bool:
        return row.id in self._last or self.pending.count(row) > 0

    def states(self, rows: Sequence[Request]) -> torch.Tensor:
        waiting = [row for row in rows if self.pending.count(row)]
        if waiting:
            counts = [self.pending.count(row) for row in waiting]
            made = self.read(waiting, [self.pending.of(row) for row in waiting])
            for row, count, of_row in zip(waiting, counts, made.split(counts), strict=True):
                self.pending.read(row, count)
                self._last[row.id] = of_row[-1].clone()
        return torch.stack([self._last[row.id] for row in rows])

    def observe(self, round: Round) -> None:
        """Take the states of what was committed, whoever drafted it; of long prompts most are read at once."""
        self.pending.add(round)
        for row in round.rows:
            for states in self.pending.chunks(row):
                self.read([row], [states])
