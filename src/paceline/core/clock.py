"""Clock and Profile: the time of a round by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch

PARTS = {
    "draft": "draft", "observe": "draft", "top_k": "draft",
    "prepare": "forward", "layers": "forward", "head": "forward",
    "accept": "accept",
    "align": "align",
}  # fmt: skip
"""For each part of the clock, the part of a row's statistics to which it belongs. All other parts are bookkeeping."""


class Clock:
    """Splits running time into named parts, which add up to the whole.

    exact  laps wait for the accelerator, which takes time. False: its time is booked on the part that waits for a
           result."""

    def __init__(self, exact: bool = False):
        self.exact = exact
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def start(self) -> None:
        """Forget the time since the last lap."""
        self._last = perf_counter()

    def lap(self, part: str) -> None:
        """Book the time since the last lap under `part`."""
        if self.exact and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def shares(self, before: Mapping[str, float], rows: int) -> dict[str, float]:
        """Each row's share, by part of a row's statistics, of the time since `seconds` was `before`. rows: their
        number."""
        shares: dict[str, float] = {}
        for part, seconds in self.seconds.items():
            booked = PARTS.get(part, "bookkeeping")
            shares[booked] = shares.get(booked, 0.0) + (seconds - before.get(part, 0.0)) / rows
        return shares


def seconds_of(act: Callable[[], object]) -> float:
    """Measure the seconds that a call takes."""
    began = perf_counter()
    act()
    return perf_counter() - began


@dataclass(frozen=True)
class Profile:
    """Seconds of all rounds by part, in the order of the loop."""

    rounds: int
    parts: dict[str, float]

    def plus(self, now: Mapping[str, float], before: Mapping[str, float]) -> Profile:
        """Add a round, which took a clock's `seconds` from `before` to `now`."""
        parts = {part: self.parts.get(part, 0.0) + s - before.get(part, 0.0) for part, s in now.items()}
        return Profile(self.rounds + 1, parts)

    def without(self, other: Profile) -> Profile:
        """The profile of the rounds that are not in `other`."""
        parts = {part: s - other.parts.get(part, 0.0) for part, s in self.parts.items()}
        return Profile(self.rounds - other.rounds, parts)

    @property
    def seconds(self) -> float:
        """Seconds of all parts together."""
        return sum(self.parts.values())

    def share(self, *names: str) -> float:
        """Share of the named parts in the whole, 0 to 1."""
        return sum(self.parts.get(name, 0.0) for name in names) / self.seconds if self.seconds else 0.0

    def table(self) -> list[tuple[str, float, float]]:
        """(part, milliseconds per round, share of the whole) for each part."""
        rounds = max(self.rounds, 1)
        return [(part, 1e3 * s / rounds, self.share(part)) for part, s in self.parts.items()]
