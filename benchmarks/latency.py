"""The time of a round of `mirror`, from the times of its parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatencyModel:
    """A round of mirror, and what it would be without a second device. Times are in seconds.

    Bhendawade et al. 2025 (arXiv 2510.13161), with two more terms: a window that was not drafted ahead is drafted while
    the target waits, and two sides that share caches and memory, as the cores of a processor do, slow each other down.

    before    the target's forward until candidates are known: 0 if they are the draft's own.
    after     the rest of the forward: the time in which drafting is hidden.
    ahead     drafting all branches. fresh: drafting one window.
    hit       share of rounds whose window had been drafted ahead.
    proxy     reading candidates off the target's middle layer. rendezvous: the question and the answer.
    together  how many times as long either side takes while both work: 1 on devices that share nothing, 2 if they only
              take turns."""

    before: float
    after: float
    ahead: float
    fresh: float
    hit: float
    proxy: float = 0.0
    rendezvous: float = 0.0
    together: float = 1.0

    @property
    def exposed(self) -> float:
        """Mean time that the target waits for drafting, and that it loses while both work."""
        crowded = (self.together - 1) * min(self.ahead, self.after)
        return max(0.0, self.ahead - self.after) + crowded + (1 - self.hit) * self.fresh

    @property
    def round(self) -> float:
        """Mean time of a round of mirror."""
        return self.before + self.proxy + self.after + self.exposed + self.rendezvous

    @property
    def plain_round(self) -> float:
        """A round of plain speculation with the same draft on the same device, one after the other."""
        return self.before + self.after + self.fresh

    @property
    def speedup(self) -> float:
        """Over plain speculation with the same windows: tokens a round have the same distribution."""
        return self.plain_round / self.round
