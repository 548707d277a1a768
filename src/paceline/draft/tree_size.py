"""How large a tree should be (`tree=auto`): forwards of the target are timed, and the nodes that pay are verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nlargest
from itertools import accumulate

import numpy as np

from paceline.core.clock import seconds_of
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree, Floats
from paceline.target.base import Facts, Target

MOST = 4096  # nodes up to which times are computed
SIZES = (1, 2, 4, 8, 16, 32, 64)  # nodes of the trees that `time_forwards` runs, the root included
REPEATS = 4
CONTEXT = 32  # tokens of the row below which those trees are verified
DEFAULT_SIZE = 16  # drafted nodes a row if forwards cannot be timed: the target runs in another engine, or not at all


def forward_times(seconds: Mapping[int, float]) -> Floats:
    """Seconds of a forward by its number of nodes, float64 [MOST + 1], from some that were measured.

    Times are linear between two sizes, constant before the first, and rise after the last with the slope of the last
    two, if that is above 0."""
    sizes, nodes = sorted(seconds), np.arange(MOST + 1)
    last = sizes[-2:]
    slope = (seconds[last[-1]] - seconds[last[0]]) / max(last[-1] - last[0], 1)
    between = np.interp(nodes, sizes, [seconds[size] for size in sizes])
    return between + max(slope, 0.0) * np.maximum(nodes - sizes[-1], 0)


def best_size(
    gains: Sequence[float], times: Floats | None, drafting: float = 0.0, rows: int = 1, fixed: int = 0
) -> int:  # fmt: skip
    """The number of drafted nodes that gives the most tokens a second; 0: drafting does not pay.

    gains     gains[n]: accepted tokens that n drafted nodes bring, gains[0] = 0.
    times     output of `forward_times`; None: unknown. The size is then DEFAULT_SIZE nodes a row.
    drafting  seconds of drafting.
    rows      rows that share the nodes, each with a root. fixed: other nodes of the same forward."""
    if times is None:
        return min(DEFAULT_SIZE * rows, len(gains) - 1)
    drafted = np.arange(len(gains))
    cost = times[np.minimum(drafted + rows + fixed, MOST)] + np.where(drafted > 0, drafting, 0.0)
    return int(np.argmax((rows + np.asarray(gains)) / cost))


def best_sizes(chances: Sequence[Sequence[float]], times: Floats | None, fixed: int = 0) -> list[int]:
    """The number of drafted nodes of each row, fewer than SIZES[-1], that gives the most tokens a second for all rows
    together.

    chances  the probability of acceptance of each row's candidates; the likeliest of all are taken."""
    likeliest = [(p, r) for r, of_row in enumerate(chances) for p in nlargest(SIZES[-1] - 1, of_row)]
    likeliest.sort(key=lambda one: -one[0])
    gains = [0.0, *accumulate(p for p, _ in likeliest)]
    taken = Counter(r for _, r in likeliest[: best_size(gains, times, rows=len(chances), fixed=fixed)])
    return [taken[r] for r in range(len(chances))]


def time_forwards(target: Facts) -> Floats | None:
    """`forward_times` of one row here, the least of REPEATS at each size; None if the target cannot be run here."""
    if not isinstance(target, Target):
        return None
    slot = target.add_row(CONTEXT + 2 * SIZES[-1])
    try:
        prompt = np.arange(CONTEXT) % target.vocab_size
        target.verify([Segment.chunk(slot, prompt, last=True)])
        target.commit(slot, range(CONTEXT))
        sizes = [size for size in SIZES if CONTEXT + size <= target.max_context]
        return forward_times({size: min(_timed(target, slot, size) for _ in range(REPEATS)) for size in sizes})
    finally:
        target.drop_row(slot)


def _timed(target: Target, slot: int, size: int) -> float:
    """Seconds of a forward over a bushy tree of `size` nodes; nothing is committed."""
    tokens = np.arange(size) % target.vocab_size
    tree = DraftTree(tokens, np.array([-1, *((node - 1) // 2 for node in range(1, size))]))
    # Reading a number waits for an accelerator.
    return seconds_of(lambda: target.verify([Segment.tree(slot, tree)]).logits[0, 0].item())
