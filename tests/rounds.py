"""A Round by hand, for tests that show a drafter what became of its drafts without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.draft.base import Drafter, stamp
from paceline.engine.accept import Accepted
from paceline.engine.request import Row
from paceline.engine.round import Round, Segment, Verdict
from paceline.engine.tree import DraftTree


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
