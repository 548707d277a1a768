"""A Round by hand, for tests that show a drafter what became of its drafts without an engine."""

import numpy as np

from paceline.core.accept import Accepted
from paceline.core.round import Round
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.draft.base import stamp


def shown(rows, trees, accepted, verdict=None, by=None):
    """The round in which `trees` were verified. by: who drafted them."""
    trees = list(trees) if by is None else stamp(list(trees), by)
    return Round(list(rows), trees, [Segment.tree(0, tree) for tree in trees], verdict, list(accepted))


def prompt_run(row, tokens, verdict=None):
    """The round in which a piece of a row's prompt was run."""
    segment = Segment.chunk(row.slot, np.array(tokens), last=False)
    path = list(range(len(tokens)))
    return Round([row], [DraftTree.root(tokens[-1])], [segment], verdict, [Accepted(path, [])])
