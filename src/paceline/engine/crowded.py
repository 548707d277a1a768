"""Crowded: warns once if other processes hold up an engine's rounds.

Threads that share a product wait for each other, and the slowest waits for a core that another process has. So a busy
machine slows rounds by far more than its share (docs/log.md, "A busy neighbour")."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter, process_time

from paceline.draft.cost import Prices
from paceline.target.threads import MISSING, Threads

log = logging.getLogger("paceline.engine")
TIMES, ROUNDS = 10.0, 8
"""A warning follows after ROUNDS rounds in a row that each took TIMES their price."""
Now = Callable[[], float]


class Crowded:
    """Compares the rounds of an engine with `threads` with their price on the quiet machine, which is learnt from
    rounds that were not held up.

    now, worked  clocks in seconds: of the machine, and of this process's work on all its cores."""

    def __init__(self, threads: Threads, now: Now = perf_counter, worked: Now = process_time):
        self._threads, self._now, self._worked = threads, now, worked
        self._prices, self._slow, self._said = Prices(), 0, False
        self._fastest = float("inf")
        self._since = 0.0, 0.0

    def note(self, rows: int, nodes: int, context: int, seconds: float) -> None:
        """Record a round as in `Prices.note`, and log a warning after too many rounds that were held up."""
        if self._said:
            return
        price = self._prices.seconds(rows, nodes, context)
        self._fastest = min(self._fastest, seconds)
        # Prices of few rounds may say of another shape that it costs next to nothing.
        known = self._prices.known and price > self._fastest / Prices.SPIKE
        if not known or seconds <= Prices.SPIKE * price:
            self._prices.note(rows, nodes, context, seconds)
        self._slow = self._slow + 1 if known and seconds >= TIMES * price else 0
        if self._slow == 1:
            self._since = self._now(), self._worked()
        if self._slow >= ROUNDS:
            self._judge(seconds / price)

    def _judge(self, times: float) -> None:
        """Warn if this process had less of the processor than its threads could use. A long text may be slow, too."""
        passed, worked = self._now() - self._since[0], self._worked() - self._since[1]
        self._slow = 0
        if worked / passed < self._threads.using - MISSING:
            self._said = True
            log.warning(
                "rounds take %.0f times as long as on the quiet machine, and this process gets %.1f of the %d cores "
                "that its threads could use: other processes want them. --threads 1 waits for nobody.",
                times, worked / passed, self._threads.using,
            )  # fmt: skip
