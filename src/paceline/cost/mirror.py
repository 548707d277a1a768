"""The latency model of `mirror`, which drafts while the target runs: what a second device saves, and from which size
of the target on it pays.

Bhendawade et al. 2025 (arXiv 2510.13161), with two more terms: a window that was not drafted ahead is drafted while the
target waits, and two sides that share caches and memory, as the cores of a processor do, slow each other down. Times
are in seconds; `draft_device.py` measures them.

    latency = LatencyModel(before=0.02, after=0.02, ahead=0.03, fresh=0.012, hit=0.6)
    latency.round, latency.plain_round, latency.speedup
    latency_on(Machine(DEVICES["H100-SXM"]), Machine(DEVICES["L4"]), target, draft, hit=0.5)      # from datasheets
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.cost.model import Machine, Size, forward_seconds


@dataclass(frozen=True)
class LatencyModel:
    """A round of mirror, and what it would be without a second device.

    before    the target's forward until candidates are known: 0 if they are the draft's own.
    after     the rest of the forward: the time in which drafting is hidden.
    ahead     drafting all branches. fresh: drafting one window.
    hit       share of rounds whose window had been drafted ahead.
    proxy     reading candidates off the target's middle layer. rendezvous: the question and the answer.
    late      drafting one window after a miss, where the second device needs another time for it; None: `fresh`.
    together  how many times as long either side takes while both work: 1 on devices that share nothing, 2 if they only
              take turns."""

    before: float
    after: float
    ahead: float
    fresh: float
    hit: float
    proxy: float = 0.0
    rendezvous: float = 0.0
    late: float | None = None
    together: float = 1.0

    @property
    def exposed(self) -> float:
        """Mean time that the target waits for drafting, and that it loses while both work."""
        late = self.fresh if self.late is None else self.late
        crowded = (self.together - 1) * min(self.ahead, self.after)
        return max(0.0, self.ahead - self.after) + crowded + (1 - self.hit) * late

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

    def times_larger(self, factor: float) -> LatencyModel:
        """The same draft with a target that takes `factor` times as long."""
        return replace(self, before=self.before * factor, after=self.after * factor, proxy=self.proxy * factor)


def pays_from(latency: LatencyModel) -> float | None:
    """The factor by which the target must be slower for a speed-up above 1; None if no size is enough.

    The larger the target, the better drafting is hidden, but the less there is to hide: the gain rises until all
    branches fit into the forward, and falls after that."""
    factors = [10 ** (step / 50) for step in range(-150, 301)]
    if latency.after:
        factors.append(latency.ahead / latency.after)  # drafting ahead is just hidden
    pays = (factor for factor in sorted(factors) if factor <= 1e6 and latency.times_larger(factor).speedup > 1)
    return next(pays, None)


def latency_on(
    machine: Machine, draft_machine: Machine, target: Size, draft: Size, *, hit: float, window: int = 5,
    branches: int = 24, context: int = 0, rendezvous: float = 50e-6,
) -> LatencyModel:  # fmt: skip
    """The latency model by datasheets: `target` on one machine and `draft` on another, which share nothing; one row.

    Drafting ahead runs the window's last token, and then all `branches` together, a token a step; without a second
    device the draft would run on the target's."""
    after = forward_seconds(target, machine, window + 1, context=context) + machine.step + machine.extra
    token, branch = (
        forward_seconds(draft, draft_machine, n, context=context) + draft_machine.step for n in (1, branches)
    )
    fresh = window * (forward_seconds(draft, machine, 1, context=context) + machine.step)
    return LatencyModel(0.0, after, token + window * branch, fresh, hit, rendezvous=rendezvous, late=window * token)


def size_that_pays(
    machine: Machine, draft_machine: Machine, target: Size, draft: Size, **settings: Any
) -> float | None:
    """Parameters of the smallest target, of the family of `target`, for which drafting on a second device gains
    anything; None if no size does. settings: those of `latency_on`."""
    sizes = (replace(target, parameters=target.parameters * 10 ** (step / 25)) for step in range(-100, 101))
    pays = (size for size in sizes if latency_on(machine, draft_machine, size, draft, **settings).speedup > 1)
    return next((size.parameters for size in pays), None)
