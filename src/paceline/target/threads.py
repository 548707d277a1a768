"""Threads: choose the number of processor threads of a round by how long rounds take while other processes run.

The threads of a product wait for each other at its end, and torch's OpenMP waits by spinning. On a quiet machine that
is the fastest way. Where another process wants one of the cores it is the slowest: a thread that spins keeps the core
from the thread it waits for. No limit on spinning suits both (docs/measurements.md, "A busy neighbour"), but a single
thread never waits. So when our threads get less of the processor than they could use, half of them are tried for a
few rounds, and kept if rounds are faster; later twice the number is tried in the same way.

    on = threads.begin()          # torch computes on the chosen number of threads
    ...                           # a round
    threads.end("of one kind")    # and on the caller's again

Another number of threads may round differently; the caller decides whether it may change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from statistics import fmean
from time import perf_counter, process_time

import torch

WINDOW, FEW = 16, 4
"""The number of recent rounds that are kept, and the fewest that give a usual time."""
LONG = 0.25
"""Seconds of rounds after which a trial may begin, even if they are fewer than WINDOW."""
TRIAL = 8
"""Rounds of a trial."""
BETTER = 0.95
"""Share of a round's usual time that a trial has to reach."""
MISSING = 0.15
"""Cores, on average, that the threads could use and do not get; above this fewer threads are tried."""
REST = 50
"""Pause between two trials, in durations of a trial: trials that fail cost about 2 % of the time."""

Now = Callable[[], float]


class Threads:
    """The number of threads for rounds of one model.

    fixed   always this number, and no trials.
    number  the choice.
    most    torch's own number, which the caller sets and which torch has between rounds."""

    def __init__(self, fixed: int | None = None, now: Now = perf_counter, worked: Now = process_time):
        self.fixed, self._now, self._worked = fixed, now, worked
        self._start(torch.get_num_threads())

    def fix(self, number: int | None) -> None:
        """Use `number` threads from now on; None: choose again, from nothing."""
        self.fixed = number
        self._start(torch.get_num_threads())

    def _start(self, most: int) -> None:
        self.most, self.number, self.using = most, self.fixed or most, self.fixed or most
        self.trial: int | None = None
        self._ratios: list[float] = []
        self._rest_until = 0.0
        self._forget()

    def _forget(self) -> None:
        """Drop what was measured on another number of threads."""
        self._usual: dict[Hashable, deque[float]] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def begin(self, keep: int | None = None) -> int:
        """Before a round: set torch to the chosen number of threads, or to `keep`; returns the number."""
        most = torch.get_num_threads()
        if most != self.most:  # the caller has changed it
            self._start(most)
        self.using = keep or self.trial or self.number
        if self.using != most:
            torch.set_num_threads(self.using)
        self._began = self._now(), self._worked()
        return self.using

    def end(self, kind: Hashable | None) -> None:
        """After a round: set torch back, and learn. kind: rounds of one kind take equally long; None: do not learn from
        this round."""
        if self.using != self.most:
            torch.set_num_threads(self.most)
        if self.fixed is not None or self.most == 1:
            return
        now = self._now()
        seconds = now - self._began[0]
        if self.using == self.trial:
            self._judge(kind, seconds, now)
        elif kind is not None and self.using == self.number:
            self._usual.setdefault(kind, deque(maxlen=WINDOW)).append(seconds)
            self._recent.append((seconds, self._worked() - self._began[1]))
            if self.trial is None and now >= self._rest_until:
                self._look()

    def _look(self) -> None:
        """Begin a trial if another number may be faster."""
        seconds, worked = map(sum, zip(*self._recent, strict=True))
        if len(self._recent) < FEW or (len(self._recent) < WINDOW and seconds < LONG):
            return
        if self.number > 1 and self.number - worked / seconds > MISSING:
            self._try(self.number // 2)
        elif self.number < self.most:
            self._try(min(2 * self.number, self.most))

    def _try(self, number: int) -> None:
        self.trial, self._ratios, self._tried, self._spent = number, [], 0, 0.0

    def _judge(self, kind: Hashable | None, seconds: float, now: float) -> None:
        """Count a round of the trial. A trial ends early once it cannot win any more, after one round if that takes a
        hundred times as long as usual."""
        self._tried += 1
        self._spent += seconds
        usual = self._usual.get(kind) if kind is not None else None
        if self._tried > 1 and usual is not None and len(usual) >= FEW:  # the first wakes the other threads
            self._ratios.append(seconds / fmean(usual))
        if len(self._ratios) == TRIAL and fmean(self._ratios) <= BETTER:
            assert self.trial is not None
            assert usual is not None
            self.number = self.trial
            self._spent = max(self._spent, 2 * fmean(usual))  # what it would cost to try the old number again
            self._forget()
        elif len(self._ratios) < TRIAL and sum(self._ratios) <= TRIAL * BETTER and self._tried < 4 * TRIAL:
            return
        self.trial, self._rest_until = None, now + REST * self._spent
