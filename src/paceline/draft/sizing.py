"""tree=auto: how many nodes a draft should have, by what verifying them costs here and by what they bring.

A round of a draft of n nodes gives 1 + gain(n) tokens and costs seconds(n) and the drafting. gain was measured in
training, or is the sum of the probabilities that a model gives its own draft; seconds is measured here, in a few
forwards of the target over trees of a few sizes, which takes some thirty forwards when a drafter meets its target.
Knows no method.

    seconds = verify_seconds(target)                       # {1: 0.011, 2: 0.012, ..., 64: 0.031}
    size = best_size(gains, seconds, drafting=0.002)       # gains[n]: accepted tokens that a draft of n nodes brings
    sizes = best_sizes(chances, seconds)                   # of several rows that are verified together
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nlargest
from itertools import accumulate
from time import perf_counter

import numpy as np

from paceline.engine.round import Segment
from paceline.engine.tree import DraftTree
from paceline.target.base import Facts, Target

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Nodes of the trees that are timed, the root among them."""
REPEATS = 3
CONTEXT = 32
"""Tokens of the row that the trees grow from."""
FALLBACK = 16
"""Drafted nodes where verifying cannot be timed: the target runs in another engine, or not at all."""


def verify_seconds(target: Facts, most: int = SIZES[-1]) -> dict[int, float]:
    """Seconds of one forward by its number of nodes, the root among them: the least of a few. Empty if the target is
    not one that can be run here."""
    if not isinstance(target, Target):
        return {}
    slot = target.add_row(CONTEXT + 2 * SIZES[-1])
    try:
        prompt = np.arange(CONTEXT) % target.vocab_size
        target.verify([Segment.chunk(slot, prompt, last=True)])
        target.commit(slot, range(CONTEXT))
        sizes = [size for size in SIZES if size <= most and CONTEXT + size <= target.max_context]
        return {size: min(_timed(target, slot, size) for _ in range(REPEATS + 1)) for size in sizes}
    finally:
        target.drop_row(slot)


def _timed(target: Target, slot: int, size: int) -> float:
    """Seconds of a forward over a bushy tree of `size` nodes; nothing is committed."""
    tokens = np.arange(size) % target.vocab_size
    tree = DraftTree(tokens, np.array([-1, *((node - 1) // 2 for node in range(1, size))]))
    began = perf_counter()
    verdict = target.verify([Segment.tree(slot, tree)])
    verdict.logits[0, 0].item()  # waits for an accelerator
    return perf_counter() - began


def best_size(
    gains: Sequence[float], seconds: Mapping[int, float], drafting: float = 0.0, rows: int = 1, beside: int = 0
) -> int:
    """The number of drafted nodes that gives most tokens a second; 0: drafting does not pay.

    gains     gains[n]: accepted tokens that n drafted nodes bring, gains[0] = 0.
    seconds   of a forward by its number of nodes; between them it is taken to be linear, after the last constant in
              its slope. Empty: FALLBACK nodes a row, as far as there are gains.
    drafting  seconds that drafting takes.
    rows      that share the nodes, each with a root. beside: nodes that run in the same forward and bring nothing."""
    if not seconds:
        return min(FALLBACK * rows, len(gains) - 1)
    sizes = sorted(seconds)
    drafted = np.arange(len(gains))
    nodes = drafted + rows + beside
    cost = np.interp(nodes, sizes, [seconds[size] for size in sizes])
    if len(sizes) > 1:
        slope = max((seconds[sizes[-1]] - seconds[sizes[-2]]) / (sizes[-1] - sizes[-2]), 0.0)
        cost += np.maximum(nodes - sizes[-1], 0) * slope
    cost += np.where(drafted > 0, drafting, 0.0)
    return int(np.argmax((rows + np.asarray(gains)) / cost))


def best_sizes(chances: Sequence[Sequence[float]], seconds: Mapping[int, float], beside: int = 0) -> list[int]:
    """Of rows that are verified together, how many candidates of each give most tokens a second, the likeliest first.

    chances  for each row the probabilities that its candidates are accepted. No row gets more than SIZES has."""
    likeliest = [(p, r) for r, of_row in enumerate(chances) for p in nlargest(SIZES[-1] - 1, of_row)]
    likeliest.sort(key=lambda one: -one[0])
    gains = [0.0, *accumulate(p for p, _ in likeliest)]
    taken = Counter(r for _, r in likeliest[: best_size(gains, seconds, rows=len(chances), beside=beside)])
    return [taken[r] for r in range(len(chances))]
