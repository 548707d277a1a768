"""Rows that are preempted again and again, whatever memory there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from paceline.core.request import Row
from paceline.engine.engine import Engine


def preempt_often(engine: Engine, every: int = 4) -> Engine:
    """`engine`, whose youngest row is preempted once in `every` rounds that have several."""
    preempt, rounds = engine.room.preempt, count(1)

    def more(running: Sequence[Row]) -> list[Row]:
        gone = preempt(running)
        left = [row for row in running if row not in gone]
        if len(left) > 1 and next(rounds) % every == 0:
            gone.append(max(left, key=lambda row: row.id))
            engine.room.release(gone[-1])
        return gone

    engine.room.preempt = more  # type: ignore[method-assign]
    return engine
