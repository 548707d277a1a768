"""Repeat comparisons until their ratio is steady, and warn of a ratio that cannot be trusted.

A small model answers in milliseconds, and another process may take the processor for as long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import quantiles
from time import perf_counter
from typing import Any

from paceline.bench.environment import is_impossible
from paceline.bench.looping import is_looping
from paceline.cli.drive import Comparison, Interrupt

LEAST, MOST = 5, 15
"""Fewest and most turns that are timed."""
STEADY = 0.05
"""Spread (interquartile range over median) of the ratios at which no more turns are needed."""
WILD = 0.5
"""Spread above which the machine was not quiet."""
PATIENCE = 30.0
"""Seconds after which no further turn begins; turns that long have many rounds, so their ratios are steady."""


@dataclass
class Repeated:
    """One job's comparisons: the one with the median ratio, and the ratios of all that were timed, sorted."""

    both: Comparison
    ratios: list[float]

    @property
    def spread(self) -> str:
        """Text after the ratio: of how many it is the median, and their range."""
        if len(self.ratios) < 2:
            return ""
        return f" (median of {len(self.ratios)}, {self.ratios[0]:.2f} to {self.ratios[-1]:.2f})"

    @property
    def doubts(self) -> list[str]:
        """Why the ratio cannot be trusted."""
        return doubts(self.both.speedup, self.both.pair[0].row.mean_accepted_tokens, self.ratios)

    @property
    def is_looping(self) -> bool:
        """Whether the drafted answer ends in a loop."""
        return is_looping(self.both.pair[0].row.new_tokens.tolist())

    def record(self) -> dict[str, Any]:
        """The record of the comparison, with all ratios."""
        record = self.both.record()
        if self.both.is_complete:
            record |= {
                "speedups": [round(ratio, 4) for ratio in self.ratios],
                "reliable": not self.doubts,
                "looping": self.is_looping,
            }
        return record


def once(both: Comparison) -> Repeated:
    """A comparison that is not repeated."""
    return Repeated(both, [both.speedup] if both.is_complete else [])


def steady(turn: Callable[[int], Iterator[Comparison]], interrupt: Interrupt) -> list[Repeated]:
    """Call `turn` with 0, 1, ... until the ratio of every job is steady; each call compares all jobs once.

    The first turn warms up and counts only if there is no time for another, or Ctrl-C ends it."""
    began = perf_counter()
    first, timed = list(turn(0)), list[list[Comparison]]()
    if not all(both.is_complete for both in first):
        return [once(both) for both in first]
    while first and len(timed) < MOST and perf_counter() - began < PATIENCE and not interrupt.pressed:
        timed.append([both for both in turn(len(timed) + 1) if both.is_complete])
        if len(timed) >= LEAST and all(_spread(of_job) <= STEADY for of_job in _ratios(timed).values()):
            break
    ratios = _ratios(timed)
    return [
        Repeated(both, ratios[both.job.index]) if both.job.index in ratios else once(both)
        for both in (typical(timed) or first)
    ]


def typical(turns: Iterable[Iterable[Comparison]]) -> list[Comparison]:
    """For each job, the complete comparison with the median ratio."""
    by_job: dict[int, list[Comparison]] = {}
    for both in chain.from_iterable(turns):
        if both.is_complete:
            by_job.setdefault(both.job.index, []).append(both)
    return [sorted(same, key=lambda both: both.speedup)[len(same) // 2] for same in by_job.values()]


def doubts(ratio: float, mean_accepted_tokens: float, ratios: list[float] | None = None) -> list[str]:
    """Why a ratio cannot be trusted, in one line; empty if it can."""
    if is_impossible(ratio, mean_accepted_tokens):
        why = f"a ratio of {ratio:.2f} at {mean_accepted_tokens:.2f} mean accepted tokens is impossible"
    elif _spread(ratios or []) > WILD:
        why = "the ratios scatter"
    else:
        return []
    return [f"{why}: another process is using the processor, and timings are not reliable"]


def _ratios(timed: Iterable[Iterable[Comparison]]) -> dict[int, list[float]]:
    """Sorted, by the index of the job."""
    ratios: dict[int, list[float]] = {}
    for both in chain.from_iterable(timed):
        ratios.setdefault(both.job.index, []).append(both.speedup)
    return {index: sorted(of_job) for index, of_job in ratios.items()}


def _spread(ratios: list[float]) -> float:
    """The middle half of the ratios over their median; 0 of fewer than two."""
    if len(ratios) < 2:
        return 0.0
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0
