"""Threads: how many processor threads a round gets, chosen by what rounds take beside other processes.

Threads of a product wait for each other at its end, and torch's OpenMP waits by spinning. Alone that is the fastest
way there is. Beside a process that wants one of the cores it is the slowest: whoever waits keeps a core from the one
that is waited for. No time of spinning suits both (docs/performance.md, "A busy neighbour"), but one thread waits for
nobody. So when a process that computes gets less of the processor than its threads could use, half of them are tried
for a few rounds, and kept if rounds are faster; later twice as many are tried, and kept if those are.

    on = threads.begin()          # torch computes on the chosen number of threads
    ...                           # a round
    threads.end("of one kind")    # and on the caller's again

Knows nothing of models. Another number of threads may round otherwise: whether it may change is the caller's to know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from statistics import fmean
from time import perf_counter, process_time

import torch

WINDOW, FEW = 16, 4
"""Rounds that are looked back at; and the fewest that say what a round takes."""
LONG = 0.25
"""Seconds of rounds that are worth a look, were they fewer than WINDOW."""
TRIAL = 8
"""Rounds of a trial."""
BETTER = 0.95
"""Of a round's usual time: what a trial has to reach."""
MISSING = 0.15
"""Cores that the threads could use and do not get, in the mean, before fewer are tried."""
REST = 50
"""Times a trial's seconds until the next one: so trials that fail cost about 2 % of the time."""

Now = Callable[[], float]


class Threads:
    """The number of threads for rounds of one model.

    fixed   this number always, and nothing is tried.
    number  the choice; most: torch's own number, which the caller sets and which is what torch has between rounds."""

    def __init__(self, fixed: int | None = None, now: Now = perf_counter, worked: Now = process_time):
        self.fixed, self._now, self._worked = fixed, now, worked
        self._start(torch.get_num_threads())

    def _start(self, most: int) -> None:
        self.most, self.number, self.using = most, self.fixed or most, self.fixed or most
        self.trial: int | None = None
        self._ratios: list[float] = []
        self._rest_until = 0.0
        self._forget()

    def _forget(self) -> None:
        """Of rounds with another number of threads nothing is kept."""
        self._usual: dict[Hashable, deque[float]] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def begin(self, keep: int | None = None) -> int:
        """Before a round: give torch the chosen number of threads, or `keep`; which number it is."""
        most = torch.get_num_threads()
        if most != self.most:  # the caller has changed it
            self._start(most)
        self.using = keep or self.trial or self.number
        if self.using != most:
            torch.set_num_threads(self.using)
        self._began = self._now(), self._worked()
        return self.using

    def end(self, kind: Hashable | None) -> None:
        """After a round: give torch its own number back, and learn. kind: rounds of one kind take as long as each
        other; None: nothing is learnt of this one."""
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
        """Whether another number is worth a trial."""
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
        """A round of the trial. It ends early once it cannot win any more; a round that takes a hundred times as long
        as usual is then the only one."""
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
