"""Candidate: one of the drafters `auto` chooses from, and what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.draft.acceptance import Chances, Lengths
from paceline.draft.base import Drafter, stamp
from paceline.draft.cost import DraftTimes
from paceline.engine.request import Request
from paceline.engine.round import Round
from paceline.engine.tree import DraftTree

Floats = NDArray[np.float64]

TRIALS = 8
"""Drafts that a drafter with a model must have made before it is asked for whole batches."""
LONGEST = 16
"""Most tokens that such a drafter is asked for."""


class Candidate:
    """See the module.

    spec     as the user named it. is_late: it runs a model, so that it is asked after those that look things up, and
             for a limited depth.
    worth    what a row gains by asking it, in tokens; more: beside the draft of another."""

    def __init__(self, spec: str, drafter: Drafter):
        self.spec, self.drafter = spec, drafter
        self.is_late = False
        self.chances, self.lengths = Chances(), Lengths()
        self.drafting = DraftTimes()
        self.worth, self.more = Worth(), Worth()
        self.drafts = 0
        self.watches = type(drafter).observe is not Drafter.observe
        self._call: tuple[int, int, float] | None = None

    def bind(self) -> None:
        """After the drafter has met its target."""
        self.is_late = self.drafter.weight_bytes > 0 or self.drafter.needs.resume_layer is not None

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        """Ask the drafter, and note how long it takes."""
        began = perf_counter()
        trees = stamp(self.drafter.propose(rows), self.drafter)
        steps = max(max(tree.calls for tree in trees), 1)
        self._call = len(rows), steps, perf_counter() - began
        self.drafts += 1
        return trees

    def observe(self, round: Round, learns: bool) -> None:
        """Show the drafter the round; its time is part of the call's."""
        began = perf_counter()
        if self.watches:
            self.drafter.observe(round)
        if self._call is not None:
            rows, steps, seconds = self._call
            if learns:
                self.drafting.note(rows, steps, seconds + (perf_counter() - began if self.watches else 0.0))
            self._call = None

    def seconds(self, is_measured: bool = False) -> float:
        """What this round's call takes, as it was measured or as such calls usually do; 0 without one."""
        if self._call is None:
            return 0.0
        return self._call[2] if is_measured else self.drafting.seconds(*self._call[:2])

    def drop(self, row: int) -> None:
        """Forget a row."""
        for kept in (self.chances, self.worth, self.more):
            kept.drop(row)

    def plan(self, rows: Sequence[Request], gains: Sequence[float], rate: float, price: float) -> Plan:
        """For which rows to run its model, and how deep, where others' drafts bring `gains` already.

        Depends on nothing that is drawn in this round, so that drafts that are drawn stay unbiased."""
        most = [min(row.max_draft, LONGEST) for row in rows]
        depth = max(most)
        if depth < 1 or self.drafts < TRIALS:
            return Plan([], 0)
        net = np.zeros((len(rows), depth))
        for i, (row, deepest) in enumerate(zip(rows, most, strict=True)):
            chances = self.chances.by_depth(row.id, deepest)
            net[i, :deepest] = np.maximum(chances - price, 0).cumsum()
            net[i, deepest:] = net[i, deepest - 1] if deepest else 0.0
        better = np.maximum(net - np.array(gains)[:, None], 0)
        asked = np.maximum((better > 0).sum(0), 1)
        steps = self.lengths.steps(depth, int(asked.max()))
        total = better.sum(0) - rate * steps * (self.drafting.call + self.drafting.row * asked)
        best = int(total.argmax())
        if total[best] <= 0:
            return Plan([], 0)
        return Plan([i for i in range(len(rows)) if better[i, best] > 0], best + 1)


class Plan(NamedTuple):
    """The rows to draft for, and the most tokens for each."""

    rows: list[int]
    depth: int


class Worth:
    """A mean over all rows, and for each row one that begins with it; both forget."""

    FIRST, MEMORY, STRENGTH, FADE = 1.0, 256, 2.0, 0.9

    def __init__(self) -> None:
        self.mean = self.FIRST
        self._count = 4
        self._rows: dict[int, tuple[float, float]] = {}

    def of(self, row: int) -> float:
        """The mean of a row."""
        kept = self._rows.get(row)
        return self.mean if kept is None else (kept[0] + self.STRENGTH * self.mean) / (kept[1] + self.STRENGTH)

    def note(self, row: int, value: float) -> None:
        """Another value of a row."""
        self._count = min(self._count + 1, self.MEMORY)
        self.mean += (value - self.mean) / self._count
        sum_, count = self._rows.get(row, (0.0, 0.0))
        self._rows[row] = self.FADE * sum_ + value, self.FADE * count + 1

    def drop(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)


class Limited:
    """A request that wants drafts of at most `limit` tokens."""

    __slots__ = ("_limit", "_row")

    def __init__(self, row: Request, limit: int):
        self._row, self._limit = row, limit

    @property
    def max_draft(self) -> int:
        """Deepest useful draft."""
        return min(self._row.max_draft, self._limit)

    def __len__(self) -> int:
        return len(self._row)

    def __getattr__(self, name: str) -> object:
        return getattr(self._row, name)
