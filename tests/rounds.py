"""A Round by hand, for tests that show a drafter what became of its drafts without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.accept import Accepted
from paceline.core.request import Row
from paceline.core.round import Round
from paceline.core.segment import Segment, Verdict
from paceline.core.tree import DraftTree
from paceline.draft.base import Drafter, stamp


def shown(
    rows: Sequence[Row],
    trees: Sequence[DraftTree],
    accepted: Sequence[Accepted],
    verdict: Verdict | None = None,
    by: Drafter | None = None,
) -> Round:
    """The round in which `trees` were verified. by: who drafted them."""
    trees = list(trees) if by is None else stamp(list(trees), by)
    return Round(list(rows), trees, [Segment.tree(0, tree) for tree in trees], verdict, list(accepted))


def prompt_run(row: Row, tokens: Sequence[int], verdict: Any = None) -> Round:
    """The round in which a piece of a row's prompt was run."""
    segment = Segment.chunk(row.slot, np.array(tokens), last=False)
    path = list(range(len(tokens)))
    return Round([row], [DraftTree.root(tokens[-1])], [segment], verdict, [Accepted(path, [])])
