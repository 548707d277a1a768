"""The cost model: from accepted lengths to a speed-up, and the time of a round of `mirror`.

A round is a draft and the forward of the target that verifies it. Costs without a unit are in plain decoding steps; a
speed-up is over plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def chain_tokens(acceptance: Sequence[float]) -> float:
    """Expected tokens of a round that drafts a chain, the target's own included.

    acceptance[j]: probability that token j + 1 is accepted, given that all before it are (Leviathan et al. 2023,
    equation 1, with a rate for every depth)."""
    return 1.0 + float(np.cumprod(np.asarray(acceptance, float)).sum())


def speedup(
    tokens: float, *, verify: float = 1.0, calls: float = 0.0, call: float = 0.0, overhead: float = 0.0
) -> float:
    """Tokens of a round over its cost: a verification, `calls` draft calls of `call` each, and `overhead`, all in
    plain decoding steps (Leviathan et al. 2023, theorem 3.8, with the verification's own cost)."""
    return tokens / (verify + calls * call + overhead)


def memory_bound_speedup(tokens: float, calls: float, draft_bytes: float, target_bytes: float) -> float:
    """MBSU: the speed-up if a forward cost the bytes it reads and nothing else (VocabTrim, Goel et al. 2025)."""
    return speedup(tokens, calls=calls, call=draft_bytes / target_bytes if calls else 0.0)


def round_cost(tokens: float, speedup: float) -> float:
    """R: cost of a round, in plain decoding steps. Tokens a round depend on the text, R on the machine."""
    return tokens / speedup


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
