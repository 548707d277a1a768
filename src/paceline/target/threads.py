"""Threads: choose the number of processor threads of a round by measured time, while other processes may run.

The threads of a product wait for each other at its end, and torch's OpenMP waits by spinning. That is fastest on a
quiet machine, and slowest if another process wants a core (docs/log.md, "A busy neighbour"). So when our threads get
less of the processor than they could use, a trial runs a few rounds on half as many threads, and keeps this number if
rounds are faster. Later another trial doubles the number. Where other processes hold cores as the first round begins,
half as many threads begin, so that a prompt does not wait for a trial.

Sums may be rounded differently on another number of threads, so the caller decides whether the number may change."""

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time

import torch

WINDOW, MIN_ROUNDS = 16, 4
"""Number of recent rounds that count, and the smallest number that gives a usual time."""
LONG = 0.25
"""A trial may begin after WINDOW rounds, or after fewer rounds that took this many seconds together."""
TRIAL = 8  # number of rounds in a trial
BETTER = 0.95
"""A trial succeeds if its rounds take at most this share of the usual time."""
MISSING = 0.15
"""Fewer threads are tried if the threads miss more than this number of cores on average."""
REST = 50
"""The pause after a trial is this many times as long as the trial, so failed trials cost about 2 % of the time."""

Now = Callable[[], float]


def free_cores() -> int | None:
    """The number of cores on which no other process runs at this moment; None where Linux does not tell."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return None
    return (os.cpu_count() or 1) - (running - 1)


class Threads:
    """The number of threads for a model's rounds.

    fixed   the number to use, without trials; None: choose it.
    number  the current choice.
    most    torch's number of threads between rounds, which the caller sets.
    free    tells how many cores are free. It is asked now and before the first round: a moment may be an exception."""

    def __init__(
        self, fixed: int | None = None, now: Now = perf_counter, worked: Now = process_time,
        free: Callable[[], int | None] = free_cores,
    ):  # fmt: skip
        self.fixed, self._now, self._worked = fixed, now, worked
        self._free: tuple[Callable[[], int | None], int | None] | None = (free, free())
        self._start(torch.get_num_threads())

    def fix(self, number: int | None) -> None:
        """Use `number` threads from now on; None: choose, and forget earlier measurements."""
        self.fixed = number
        self._start(torch.get_num_threads())

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """A context in which `number` threads are used, and nothing is learnt. If the number is fixed inside, it
        stays."""
        before = {**vars(self)}
        self.fix(number)
        try:
            yield
        finally:
            if self.fixed == number:
                vars(self).update(before)

    def _start(self, most: int) -> None:
        self.most, self.number, self.using = most, self.fixed or most, self.fixed or most
        self.trial: int | None = None
        self._ratios: list[float] = []
        self._rest_until = 0.0
        self._begun: set[Hashable] = set()  # kinds of rounds that have run
        self._forget()

    def _forget(self) -> None:
        """Drop measurements on another number of threads."""
        self._usual: dict[Hashable, deque[float]] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def begin(self, keep: int | None = None) -> int:
        """Before a round: set torch to the chosen number of threads, or to `keep`. Returns this number."""
        most = torch.get_num_threads()
        if most != self.most:  # The caller has changed torch's number.
            self._start(most)
        self._look_around()
        self.using = keep or self.trial or self.number
        if self.using != most:
            torch.set_num_threads(self.using)
        self._began = self._now(), self._worked()
        return self.using

    def _look_around(self) -> None:
        """Before the first round: halve the number of threads if other processes have held cores since the model was
        loaded."""
        if self._free is not None and self.fixed is None:
            (free, before), self._free = self._free, None
            now = free()
            if before is not None and now is not None and max(before, now) < self.number:
                self.number = max(self.number // 2, 1)

    def end(self, kind: Hashable | None) -> None:
        """After a round: set torch back, and record the round's time.

        kind  rounds of the same kind take equally long, except the first, which loads code; None: this round is not
              recorded."""
        if self.using != self.most:
            torch.set_num_threads(self.most)
        if self.fixed is not None or self.most == 1:
            return
        if kind is not None and kind not in self._begun:
            self._begun.add(kind)
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
        elif self.using != self.number:  # An answer keeps the number of a trial that failed during it.
            self._rest_until = max(self._rest_until, now) + REST * seconds

    def _look(self) -> None:
        """Begin a trial if another number of threads may be faster."""
        seconds, worked = map(sum, zip(*self._recent, strict=True))
        if len(self._recent) < MIN_ROUNDS or (len(self._recent) < WINDOW and seconds < LONG):
            return
        if self.number > 1 and self.number - worked / seconds > MISSING:
            self._try(self.number // 2)
        elif self.number < self.most:
            self._try(min(2 * self.number, self.most))

    def _try(self, number: int) -> None:
        self.trial, self._ratios, self._tried, self._spent = number, [], 0, 0.0

    def _judge(self, kind: Hashable | None, seconds: float, now: float) -> None:
        """Record a round of the trial. The trial ends as soon as it cannot succeed, even after one very slow round."""
        self._tried += 1
        self._spent += seconds
        usual = self._usual.get(kind) if kind is not None else None
        if self._tried > 1 and usual is not None and len(usual) >= MIN_ROUNDS:  # The first round also starts threads.
            self._ratios.append(seconds / fmean(usual))
        if len(self._ratios) == TRIAL and fmean(self._ratios) <= BETTER:
            assert self.trial is not None
            assert usual is not None
            self.number = self.trial
            self._spent = max(self._spent, 2 * fmean(usual))  # the least cost of trying the old number again
            self._forget()
        elif len(self._ratios) < TRIAL and sum(self._ratios) <= TRIAL * BETTER and self._tried < 4 * TRIAL:
            return
        self.trial, self._rest_until = None, now + REST * self._spent
