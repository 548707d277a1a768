"""Committed states of the target that a head has not read yet.

A head reads the target's states of every committed token, its own prompt's among them, and runs only when it is asked
to draft. What was committed meanwhile waits here: a prompt that is run in pieces, rounds that another drafter drafted,
tokens that ended a draft. Rows are independent of each other. Knows no head.

    self.pending = Pending(target, layers=(2, 4, 5))      # in `bind`; also Needs(hidden_layers=...)
    self.pending.add(round)                               # in `observe`, whoever drafted
    states = self.pending.of(row)                         # when drafting: the states of the row's next tokens
    self.pending.read(row, count)                         # the first `count` are in the head's own cache now
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.engine.request import Request
from paceline.engine.round import Round
from paceline.target.base import Facts

CHUNK = 512
"""Most tokens of a row that wait; a prompt's beyond that are run as they come."""


class Pending:
    """Of every row the states that wait, oldest first, [n, L * H]: of L layers side by side, in the given order.

    layers  as in `Needs.hidden_layers`: l is the input of layer l, the number of layers is after the final norm."""

    def __init__(self, target: Facts, layers: Sequence[int]):
        self.layers = tuple(layers)
        width = len(self.layers) * target.hidden_size
        self._nothing = torch.empty(0, width, dtype=target.dtype, device=target.device)
        self._states: dict[int, torch.Tensor] = {}

    def start(self, row: Request) -> None:
        """A row joins: nothing waits."""
        self._states[row.id] = self._nothing

    def drop(self, row: Request) -> None:
        """Forget a row."""
        self._states.pop(row.id, None)

    def count(self, row: Request) -> int:
        """The number of tokens whose states wait."""
        return len(self._states[row.id])

    def of(self, row: Request) -> torch.Tensor:
        """The states that wait, [count, L * H]."""
        return self._states[row.id]

    def add(self, round: Round) -> None:
        """Take the states of what the round committed."""
        for i, row in enumerate(round.rows):
            taps = [round.committed(i, layer) for layer in self.layers]
            states = taps[0] if len(taps) == 1 else torch.cat(taps, -1)
            self._states[row.id] = torch.cat([self._states[row.id], states])

    def read(self, row: Request, count: int) -> None:
        """The first `count` wait no longer."""
        self._states[row.id] = self._states[row.id][count:]

    def chunks(self, row: Request) -> Iterator[torch.Tensor]:
        """Pieces of CHUNK states, as long as more than that wait; each is read when the next is asked for."""
        while self.count(row) > CHUNK:
            yield self._states[row.id][:CHUNK]
            self.read(row, CHUNK)
