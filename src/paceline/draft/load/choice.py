"""Choice: which nodes of a round's drafts pay, given what a round costs at this batch's size.

All nodes of all rows stand in one line, the likeliest first. Verifying the first k of them brings their chances, in
tokens, and costs the time by which k nodes make the round longer; that time is worth `rate` tokens a second, what the
batch makes in the mean (Dinkelbach 1967: the rate that comes of always choosing so is the largest there is). A node's
chance is at most its parent's, so the first k are whole trees. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.draft.load.times import MOST, Times

Floats = NDArray[np.float64]


class Choice(NamedTuple):
    """Nodes whose chance is at least `threshold` pay. tokens: what they are expected to bring; nodes: their number;
    price: tokens that one more would have had to bring."""

    threshold: float
    tokens: float
    nodes: int
    price: float


def choose(drafts: Sequence[Floats], rows: int, times: Times, rate: float, fixed: int = 0, widest: int = 1) -> Choice:
    """The nodes that pay, of drafts whose nodes have these chances, in a round of `rows` rows.

    fixed   tokens that are run in any case, roots left out; widest: nodes of the widest row among those."""
    if len(drafts) == 1:
        places = np.arange(1, len(drafts[0]) + 1)
        line = drafts[0]
        if len(line) > 1 and (line[1:] > line[:-1]).any():  # a tree
            line = np.sort(line)[::-1]
    else:
        line = np.concatenate(drafts)
        places = np.concatenate([np.arange(1, len(draft) + 1) for draft in drafts])
        order = np.argsort(-line, kind="stable")
        line, places = line[order], np.maximum.accumulate(places[order])
    begin = min(rows + fixed, MOST)
    line = line[: MOST - begin]
    count = len(line)
    longer = times.of(rows)[begin : begin + count + 1]
    extra = longer[1:] - longer[0]
    if times.pad:
        extra = extra + times.pad * rows * np.maximum(places[:count] + 1 - widest, 0)
    if widest <= 1:
        extra = extra + times.uneven * rows
    brought = line.cumsum()
    gains = brought - rate * extra
    best = int(gains.argmax()) if count else -1
    taken = best + 1 if best >= 0 and gains[best] > 0 else 0
    price = rate * (times.slope(rows, begin + taken) + times.pad)
    if not taken:
        return Choice(2.0, 0.0, 0, price)
    return Choice(float(line[best]), float(brought[best]), taken, price)
