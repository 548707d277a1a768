"""Layout: where the segments of one forward lie in memory, and which keys each node attends to. Planned in NumPy.

The N tokens of all segments are packed into one dimension, so that linear layers compute almost no padding. Attention
needs more dimensions: short segments share a padded group over a range of slots, and a long segment (a prompt's chunk)
is a group of its own. Node i of a segment has the position (row length) + (its depth) and the cache place
(row length) + i; it sees the row's committed tokens, its ancestors and itself, or all nodes of a `mutual` segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.segment import Segment
from paceline.core.tree import IntArray, ancestors
from paceline.kernels.records import BLOCK, Tile

SHARED_QUERIES = 64  # largest segment of a shared group, in nodes: the others are padded to the longest

MIN_QUERIES = 4  # minimum for a key head: torch has another attention kernel for a single query, oneDNN for up to three

KEY_GRANULE = 64
"""The number of keys that attention reads is a multiple of this (the last are masked), for at least `MIN_QUERIES`
queries. torch's CPU kernel then adds in the same order for any number of nodes, so that a token's attention is the same
alone and in a draft, also in bfloat16. 16 would do; with 64 torch compiles fewer kernels (docs/log.md)."""


def padded_size(count: int) -> int:
    """Round a number of nodes up to a size that kernels are compiled for: 1, 2, 3, 4, 6, ... 16, 20, ... 32, 40, ...
    96, 112, ... 256, 288, ... From 4 on, it adds at most a quarter."""
    steps = ((4, 1), (16, 2), (32, 4), (96, 8), (256, 16), (512, 32))
    step = next((step for most, step in steps if count <= most), 64)
    return -(-count // step) * step


@dataclass(slots=True)
class Group:
    """Segments of one attention call: slots first..last-1, `queries` nodes each, over the first `keys` of the cache.

    begin, end  the group's packed nodes, if gather is None.
    gather      int64 [slots * queries]: the packed node of each (slot, query), any node for padding. gather, scatter
                and packed are None if the packed order is the padded order.
    scatter     int64 [nodes]: the padded place of each packed node of the group.
    packed      int64 [nodes]: the group's packed nodes.
    mask        additive, 0 or -inf, [slots, 1, queries * shared, keys]: for each node a row for each of the `shared`
                query heads of a key head, and at least `MIN_QUERIES` rows, the last unused. A long segment has a single
                row for each node, which is cheaper there. None for a piece of a prompt, which sees all earlier tokens,
                and its own causally.
    """

    first: int
    last: int
    queries: int
    keys: int
    begin: int
    end: int
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    packed: torch.Tensor | None
    mask: torch.Tensor | None

    @property
    def is_long(self) -> bool:
        """Whether this is a single segment, too long to share a call."""
        return self.queries > SHARED_QUERIES


@dataclass(slots=True)
class Layout:
    """The plan of one forward over N packed nodes, then `padding` nodes whose results are not used.

    tokens, positions, slots, at   int64 [N + padding]; `at` is the place in the row's slot.
    spans      (begin, end) of each segment in the packed order.
    groups     the calls of torch's attention, for segments that are not in `paths`.
    by_window  indices in `groups` by a layer's window, if layers have different windows.
    segments   the segments without padding.
    wanted     int64 [M]: packed nodes whose logits are wanted; None: all. num_wanted: M.
    reach      number of the row's tokens in the cache, including this forward's, by slot."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    at: torch.Tensor
    spans: list[tuple[int, int]]
    groups: list[Group]
    wanted: torch.Tensor | None
    num_wanted: int
    reach: dict[int, int]
    padding: int = 0
    paths: PathPlan | None = None
    by_window: Mapping[int | None, range] = field(default_factory=dict)
    segments: Sequence[Segment] = ()

    def calls(self, window: int | None) -> range:
        """Indices of the `groups` of a layer with this window."""
        return self.by_window.get(window, range(len(self.groups)))

    @property
    def num_nodes(self) -> int:
        """N, without padding."""
        return self.spans[-1][1]


def plan(
    segments: Sequence[Segment], lengths: Sequence[int], *, shared: int = 1, windows: Sequence[int | None] = (None,),
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", padding: int = 0, most_on_paths: int = 0,
    pieces: bool = False,
) -> Layout:  # fmt: skip
    """Lay out `segments`; lengths[s] is the committed length of segment s's row.

    shared   number of query heads that share a key head.
    windows  windows of the layers: the largest number of tokens that a node sees, itself included; None: all.
    padding  number of nodes to add to the last segment. Like rejected drafts, they stay in the cache after the row
             until they are overwritten.
    most_on_paths  segments of at most this number of nodes attend along paths (`PathPlan`), where results do not depend
             on the layout; torch computes the attention of the others.
    pieces   on the CPU, make no mask for a piece of a prompt after the first (`attend` needs none)."""
    counts, given = [s.num_logits for s in segments], segments
    asked = _spans(segments)
    wanted = None
    if sum(counts) != asked[-1][1]:
        wanted = np.concatenate([np.arange(end - n, end) for n, (_, end) in zip(counts, asked, strict=True)])
    if padding:
        segments = [*segments[:-1], segments[-1].longer(padding)]
    spans = _spans(segments)
    positions = [length + s.depth[s.start :] for s, length in zip(segments, lengths, strict=True)]
    at = [np.arange(length + s.start, length + len(s.tokens)) for s, length in zip(segments, lengths, strict=True)]

    def put(array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def groups(window: int | None) -> list[Group]:
        rest = [s for s, segment in enumerate(segments) if segment.num_run > most_on_paths]
        short = [s for s in rest if segments[s].num_run <= SHARED_QUERIES]
        long = [s for s in rest if segments[s].num_run > SHARED_QUERIES]
        return [
            _group(members, segments, lengths, spans, positions, shared, window, dtype, device, pieces)
            for members in ([short] if short else []) + [[s] for s in long]
        ]

    reach = {s.slot: length + len(s.tokens) for s, length in zip(segments, lengths, strict=True)}
    every: list[Group] = []
    made: dict[int | None, range] = {}
    for window in windows:  # a window that no text exceeds has no effect
        limit = window if window is not None and window < max(reach.values()) else None
        if limit not in made:
            own = groups(limit)
            made[limit] = range(len(every), len(every) + len(own))
            every += own
        made[window] = made[limit]

    return Layout(
        tokens=put(_join([s.tokens[s.start :] for s in segments])),
        positions=put(_join(positions)),
        slots=put(_join([np.full(s.num_run, s.slot) for s in segments])),
        at=put(_join(at)),
        spans=asked,
        groups=every,
        wanted=None if wanted is None else put(wanted),
        num_wanted=sum(counts),
        reach=reach,
        padding=padding,
        paths=PathPlan.of(segments, lengths, shared=shared, most=most_on_paths),
        by_window=made,
        segments=given,
    )


def _spans(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """(begin, end) of each segment in the packed order."""
    return list(pairwise(accumulate((s.num_run for s in segments), initial=0)))


def _join(arrays: Sequence[IntArray]) -> IntArray:
    return np.ascontiguousarray(arrays[0], np.int64) if len(arrays) == 1 else np.concatenate(arrays)


def _group(
    members: Sequence[int], segments: Sequence[Segment], lengths: Sequence[int], spans: Sequence[tuple[int, int]],
    positions: Sequence[IntArray], shared: int, window: int | None, dtype: torch.dtype, device: torch.device | str,
    pieces: bool,
) -> Group:  # fmt: skip
    """The attention call of segments `members`, each in its own slot."""
    slots = [segments[s].slot for s in members]
    first, last = min(slots), max(slots) + 1
    queries = max(segments[s].num_run for s in members)
    keys = max(lengths[s] + len(segments[s].tokens) for s in members)
    begin, end = spans[members[0]][0], spans[members[-1]][1]
    if queries > SHARED_QUERIES:
        segment, length = segments[members[0]], lengths[members[0]]
        if _is_whole_chain(segment, keys, window) and (not length or (pieces and torch.device(device).type == "cpu")):
            return Group(first, last, queries, keys, begin, end, None, None, None, None)
        shared = 1
    keys = -(-keys // KEY_GRANULE) * KEY_GRANULE
    gather, scatter, packed = _padding(members, slots, spans, first, last, queries)
    mask = np.full((last - first, max(queries * shared, MIN_QUERIES), keys), -np.inf, np.float32)
    mask[..., 0] = 0  # padding sees one key, or its softmax would be NaN
    seen = mask[:, : queries * shared].reshape(last - first, queries, shared, keys)
    for s in members:
        _see(seen[segments[s].slot - first], segments[s], lengths[s], positions[s], window)
    whole = torch.from_numpy(mask[:, None]).to(device, dtype)

    def put(array: IntArray | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array).to(device)

    return Group(first, last, queries, keys, begin, end, put(gather), put(scatter), put(packed), whole)


def _is_whole_chain(segment: Segment, keys: int, window: int | None) -> bool:
    """Whether the segment is a chain that begins at its root and sees all of its row's `keys` tokens."""
    n = len(segment.tokens)
    seen = window is None or keys <= window
    return segment.start == 0 and int(segment.depth[-1]) == n - 1 and seen and not segment.mutual


def _padding(
    members: Sequence[int], slots: Sequence[int], spans: Sequence[tuple[int, int]], first: int, last: int, queries: int
) -> tuple[IntArray | None, IntArray | None, IntArray | None]:
    """Make gather, scatter and packed of `Group`; they are None if the packed order is the padded order."""
    if len(members) == 1:
        return None, None, None
    counts = [end - begin for begin, end in (spans[s] for s in members)]
    places = np.concatenate([(slot - first) * queries + np.arange(n) for slot, n in zip(slots, counts, strict=True)])
    nodes = np.concatenate([np.arange(*spans[s]) for s in members])
    gather = np.zeros((last - first) * queries, np.int64)
    gather[places] = nodes
    if len(nodes) == len(gather) and (gather == nodes[0] + np.arange(len(gather))).all():
        return None, None, None
    return gather, places, nodes


_CHAIN = np.triu(np.full((SHARED_QUERIES, SHARED_QUERIES), -np.inf, np.float32), 1)
"""The mask of a chain among its own nodes."""


def _see(mask: NDArray[np.float32], segment: Segment, length: int, positions: IntArray, window: int | None) -> None:
    """Set the mask of one slot, [queries, shared, keys], to 0 for the keys that the segment's nodes see."""
    n, start = len(segment.tokens), segment.start
    rows = mask[: n - start]
    rows[..., :length] = 0
    if segment.mutual:
        among = np.zeros((n - start, n), np.float32)
    elif n <= SHARED_QUERIES and segment.depth[-1] == n - 1:
        among = _CHAIN[start:n, :n]
    else:
        among = np.where(ancestors(segment.parent)[start:], np.float32(0), np.float32(-np.inf))
    rows[..., length : length + n] = among[:, None]
    if window is not None:
        where = np.concatenate([np.arange(length), length + segment.depth])
        far = positions[:, None] - where[None, :] >= window
        np.copyto(rows[..., : length + n], np.float32(-np.inf), where=far[:, None])


# Attention along paths -----------------------------------------------------------------------------------------------

TILE = 64  # largest number of queries that share a reading of a block of keys: nodes times query heads of a key head


@dataclass(slots=True)
class PathPlan:
    """Places of the keys of all nodes of a forward. All arrays are int64.

    tiles       [tiles, 6]: `Tile`s of `kernels/records.py`.
    ends        [N + padding]: a node sees positions below this, or the last `window` of them; the last is its own.
    places      flat: the cache places of each node's path from position LIMIT on.
    scores      number of scores of a query head, without a window.
    header      number of tiles, and addresses of tiles, ends and places, for compiled code."""

    tiles: IntArray
    ends: IntArray
    places: IntArray
    scores: int
    header: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        arrays = self.tiles, self.ends, self.places
        self.header = len(self.tiles), *(a.ctypes.data for a in arrays)

    @classmethod
    def of(
        cls, segments: Sequence[Segment], lengths: Sequence[int], *, shared: int = 1, most: int = 1 << 62
    ) -> PathPlan | None:
        """The paths of segments of at most `most` nodes; None if there are none. Other arguments as in `plan`."""
        if all(segment.num_run > most for segment in segments):
            return None
        tiles: list[Tile] = []
        places: list[IntArray] = []
        packed = written = 0
        step = max(1, TILE // shared)
        for segment, length in zip(segments, lengths, strict=True):
            if segment.num_run > most:
                packed += segment.num_run
                continue
            limit, stride = length + len(segment.tokens), 0
            if segment.depth[-1] != len(segment.tokens) - 1:
                limit = length // BLOCK * BLOCK
                paths = _paths(segment, length, limit)
                stride = paths.shape[1]
                places.append(paths.ravel())
            for begin in range(0, segment.num_run, step):
                count = min(step, segment.num_run - begin)
                tiles.append(Tile(segment.slot, packed + begin, count, limit, written + begin * stride, stride))
            packed += segment.num_run
            written += segment.num_run * stride
        ends = np.concatenate([n + s.depth[s.start :] + 1 for s, n in zip(segments, lengths, strict=True)])
        flat = np.concatenate(places) if places else np.zeros(1, np.int64)
        return cls(np.array(tiles, np.int64), ends, flat, int(ends.sum()))


def _paths(segment: Segment, length: int, limit: int) -> IntArray:
    """Cache places of the path of each node that is run, from position `limit` on, padded with the root's place."""
    deepest = int(segment.depth.max())
    path = np.zeros((len(segment.tokens), deepest + 1), np.int64)
    every = np.arange(len(segment.tokens))
    node = every.copy()
    for _ in range(deepest + 1):
        path[every, segment.depth[node]] = node
        node = np.maximum(segment.parent[node], 0)
    committed = np.broadcast_to(np.arange(limit, length), (len(path), length - limit))
    return np.ascontiguousarray(np.concatenate([committed, length + path], 1)[segment.start :], np.int64)
