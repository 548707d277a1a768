"""Paths: which keys every node of a forward attends to, in the order of its text. Pure planning in NumPy.

What it is for, and how it is computed: `paceline.target.path_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engine.round import Segment
from paceline.engine.tree import IntArray

BLOCK = 64
"""Keys are taken this many at a time, from position 0 of a text on."""
TILE = 64
"""Most queries that share what was read of a block of keys: nodes times query heads that share a key head."""
SLOT, FIRST, COUNT, LIMIT, PATHS, STRIDE = range(6)
"""Columns of `PathPlan.tiles`."""


@dataclass(slots=True)
class PathPlan:
    """Where the keys of every node of a forward lie, int64.

    tiles   [tiles, 6]: nodes of one segment that share a reading of keys: slot, first packed node, number of nodes,
            the number of positions that are all theirs and lie in order, and where their paths begin in `places` and
            how long each is.
    lows, ends  [N + padding]: the positions a node sees are lows to ends - 1, itself last.
    places  flat: the cache places of a node's path from position LIMIT on.
    scores  the number of scores of a query head.
    addresses  of tiles, lows, ends and places, for compiled code.
    """

    tiles: IntArray
    lows: IntArray
    ends: IntArray
    places: IntArray
    scores: int
    addresses: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.addresses = tuple(a.ctypes.data for a in (self.tiles, self.lows, self.ends, self.places))

    @classmethod
    def of(
        cls, segments: Sequence[Segment], lengths: Sequence[int], *, shared: int = 1, window: int | None = None
    ) -> PathPlan:
        """The plan for `segments`, whose rows have `lengths` tokens; shared and window as in `layout.plan`."""
        tiles: list[tuple[int, ...]] = []
        places: list[IntArray] = []
        packed = written = 0
        step = max(1, TILE // shared)
        for segment, length in zip(segments, lengths, strict=True):
            limit, stride = length + len(segment.tokens), 0
            if segment.depth[-1] != len(segment.tokens) - 1:
                limit = length // BLOCK * BLOCK
                paths = _paths(segment, length, limit)
                stride = paths.shape[1]
                places.append(paths.ravel())
            for begin in range(0, segment.num_run, step):
                count = min(step, segment.num_run - begin)
                tiles.append((segment.slot, packed + begin, count, limit, written + begin * stride, stride))
            packed += segment.num_run
            written += segment.num_run * stride
        ends = np.concatenate([n + s.depth[s.start :] + 1 for s, n in zip(segments, lengths, strict=True)])
        lows = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        flat = np.concatenate(places) if places else np.zeros(1, np.int64)
        return cls(np.array(tiles, np.int64), lows, ends, flat, int((ends - lows).sum()))


def _paths(segment: Segment, length: int, limit: int) -> IntArray:
    """Cache places of the path of every node that is run, from position `limit` on; padded with the first."""
    deepest = int(segment.depth.max())
    path = np.zeros((len(segment.tokens), deepest + 1), np.int64)
    every = np.arange(len(segment.tokens))
    node = every.copy()
    for _ in range(deepest + 1):
        path[every, segment.depth[node]] = node
        node = np.maximum(segment.parent[node], 0)
    committed = np.broadcast_to(np.arange(limit, length), (len(path), length - limit))
    return np.ascontiguousarray(np.concatenate([committed, length + path], 1)[segment.start :], np.int64)
