"""The latency law of drafting beside the target (`mirror`): what a second device saves, and from which size on it pays.

Bhendawade et al. 2025 (arXiv 2510.13161), with the term that the paper leaves out: a window that was not drafted ahead
is drafted while the target waits. Plain numbers in, plain numbers out; times are in seconds.

    law = Law(before=0.02, after=0.02, ahead=0.03, fresh=0.012, hit=0.6)
    law.round, law.plain_round, law.speedup
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Law:
    """A round of mirror, and what it would be without a second device.

    before  the target's forward up to the candidates: 0 if they are the draft's own, which are there at once.
    after   the rest of it: the time in which drafting is hidden.
    ahead   drafting all branches. fresh: drafting one window.
    hit     share of rounds whose window had been drafted ahead.
    proxy   reading candidates off the target's middle layer. rendezvous: the question and the answer."""

    before: float
    after: float
    ahead: float
    fresh: float
    hit: float
    proxy: float = 0.0
    rendezvous: float = 0.0

    @property
    def exposed(self) -> float:
        """Drafting that the target waits for, in the mean."""
        return max(0.0, self.ahead - self.after) + (1 - self.hit) * self.fresh

    @property
    def round(self) -> float:
        """A round of mirror, in the mean: the target, what it waits for, and the two meetings."""
        return self.before + self.proxy + self.after + self.exposed + self.rendezvous

    @property
    def plain_round(self) -> float:
        """A round of plain speculation with the same draft on the same device, one after the other."""
        return self.before + self.after + self.fresh

    @property
    def speedup(self) -> float:
        """Over plain speculation with the same windows: they have the same law, so tokens a round are the same."""
        return self.plain_round / self.round

    def times_larger(self, factor: float) -> Law:
        """The same draft beside a target that takes `factor` times as long."""
        return replace(self, before=self.before * factor, after=self.after * factor, proxy=self.proxy * factor)


def pays_from(law: Law, gain: float = 1.0, most: float = 1e6) -> float | None:
    """The factor by which the target must be slower for a speed-up above `gain`; None if no size is enough.

    The larger the target, the better drafting is hidden, but the less there is to hide: the gain rises until all
    branches fit into the forward, and falls after that."""
    peak = law.ahead / law.after if law.after else most  # drafting ahead is just hidden
    candidates = [10 ** (step / 50) for step in range(-150, 301)] + [peak]
    good = [factor for factor in sorted(candidates) if factor <= most and law.times_larger(factor).speedup > gain]
    return good[0] if good else None
