"""Layout: where the segments of a forward lie in memory, and which keys each node sees. It is planned in NumPy.

The N tokens of all segments are packed into one dimension, so that linear layers compute almost no padding. Attention
needs more dimensions: short segments share a padded group over a range of slots, and each long segment (a prompt's
chunk) is a group. Node i of a segment has the position (row length) + (its depth) and the cache place (row length) + i.
It sees the row's committed tokens, its ancestors and itself, if the segment does not say otherwise (`Segment.sees`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from paceline.core.segment import Segment
from paceline.core.tree import IntArray, ancestors
from paceline.kernels.records import BLOCK, Tile

SHARED_QUERIES = 64
"""Largest number of nodes of a segment in a shared group, whose segments are padded to the longest."""
MIN_QUERIES = 4
"""Smallest number of queries of a key head. For fewer, torch (1) and oneDNN (up to 3) have other kernels."""
KEY_GRANULE = 64
"""The number of keys that attention reads is a multiple of this; the last are masked. With at least `MIN_QUERIES`
queries, torch's CPU kernel then adds in the same order for any number of nodes, so that a token's attention is the same
alone and in a draft, also in bfloat16. 16 would be enough; with 64 torch compiles fewer kernels (docs/log.md)."""


def padded_size(count: int) -> int:
    """Round a number of nodes up to a size for which kernels are compiled: 1, 2, 3, 4, 6, ... 16, 20, ... 32, 40, ...
    96, 112, ... 256, 288, ... It adds at most a quarter."""
    steps = ((4, 1), (16, 2), (32, 4), (96, 8), (256, 16), (512, 32))
    step = next((step for most, step in steps if count <= most), 64)
    return -(-count // step) * step


@dataclass(slots=True)
class Group:
    """Segments of an attention call: slots `first` to `last` - 1, each with `queries` nodes, over the first `keys`
    keys.

    begin, end  the group's packed nodes, if gather is None.
    gather      int64 [slots * queries]: the packed node of each (slot, query); for padding any node. gather, scatter
                and packed are None if the packed order is the padded order.
    scatter     int64 [nodes]: the padded place of each packed node of the group.
    packed      int64 [nodes]: the group's packed nodes.
    mask        0 or -inf, to add to scores, [slots, 1, rows, keys]. A short segment has a row for each node and each of
                the `shared` query heads of a key head, and unused rows up to `MIN_QUERIES`. A long segment has a row
                for each node, which is cheaper. None: a piece of a prompt, which sees all tokens before each of its
                own.
    shared      number of rows of a node."""

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
    shared: int = 1

    def mask_of(self, shared: int) -> torch.Tensor | None:
        """The mask of a layer whose key heads have only `shared` query heads each."""
        if self.mask is None or shared == self.shared:
            return self.mask
        rows = self.mask[:, :, : self.queries * self.shared].unflatten(2, (self.queries, -1))[:, :, :, :shared]
        return F.pad(rows.flatten(2, 3), (0, 0, 0, max(MIN_QUERIES - self.queries * shared, 0)))

    @property
    def is_long(self) -> bool:
        """Whether this is a single segment that is too long to share a call."""
        return self.queries > SHARED_QUERIES


@dataclass(slots=True)
class Layout:
    """The plan of a forward over N packed nodes, then `padding` nodes whose results are not used.

    tokens, positions, slots, at   int64 [N + padding]; `at` is the place in the row's slot.
    spans      (begin, end) of each segment in the packed order.
    groups     the calls of torch's attention, for segments that are not in `paths`.
    by_window  indices in `groups` by a layer's window, if layers have different windows.
    segments   the segments without padding.
    beside     [layers, N + padding, P] vectors that layers get of the tokens beside their states, if they do.
    wanted     int64 [M]: packed nodes whose logits are wanted; None: all. num_wanted: M.
    reach      by slot: number of the row's tokens in the cache, with this forward's."""

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
    beside: torch.Tensor | None = None

    def calls(self, window: int | None) -> range:
        """Indices of the `groups` of a layer with this window."""
        return self.by_window.get(window, range(len(self.groups)))

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N, without padding."""
        return self.spans[-1][1]


def plan(
    segments: Sequence[Segment], lengths: Sequence[int], *, shared: int = 1, windows: Sequence[int | None] = (None,),
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", padding: int = 0, most_on_paths: int = 0,
    pieces: bool = False,
) -> Layout:  # fmt: skip
    """Lay out `segments`. lengths[s]: committed length of segment s's row.

    shared   largest number of query heads that share a key head.
    windows  the layers' windows: the largest number of tokens that a node sees, with itself; None: all.
    padding  number of nodes to add to the last segment. Like rejected drafts, they stay in the cache after the row
             until they are overwritten.
    most_on_paths  segments of up to this number of nodes attend along paths (`PathPlan`), where results do not depend
             on the layout; torch computes the attention of the others.
    pieces   on the CPU, make no mask for later pieces of a prompt (`attend` needs none)."""
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
            _group(members, segments, lengths, spans, shared, window, dtype, device, pieces)
            for members in ([short] if short else []) + [[s] for s in long]
        ]

    reach = {s.slot: length + len(s.tokens) for s, length in zip(segments, lengths, strict=True)}
    every: list[Group] = []
    made: dict[int | None, range] = {}
    for window in windows:  # A window that no text exceeds has no effect.
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
    shared: int, window: int | None, dtype: torch.dtype, device: torch.device | str, pieces: bool,
) -> Group:  # fmt: skip
    """Plan the attention call of segments `members`, each in its own slot."""
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
    mask[..., 0] = 0  # Padding sees a key, because otherwise its softmax would be NaN.
    seen = mask[:, : queries * shared].reshape(last - first, queries, shared, keys)
    for s in members:
        _see(seen[segments[s].slot - first], segments[s], lengths[s], window)
    whole = torch.from_numpy(mask[:, None]).to(device, dtype)

    def put(array: IntArray | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array).to(device)

    return Group(first, last, queries, keys, begin, end, put(gather), put(scatter), put(packed), whole, shared)


def _ends(segment: Segment, length: int) -> IntArray:
    """The position before which each node that is run sees tokens."""
    return length + segment.depth[segment.start :] + (segment.sees != "none")


def _is_whole_chain(segment: Segment, keys: int, window: int | None) -> bool:
    """Whether the segment is a chain that begins at its root and sees all of its row's `keys` tokens."""
    n = len(segment.tokens)
    seen = window is None or keys <= window
    return segment.start == 0 and int(segment.depth[-1]) == n - 1 and seen and segment.sees == "ancestors"


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
"""The mask between the nodes of a chain."""


def _see(mask: NDArray[np.float32], segment: Segment, length: int, window: int | None) -> None:
    """Set the mask of one slot, [queries, shared, keys], to 0 for the keys that the segment's nodes see."""
    n, start = len(segment.tokens), segment.start
    rows = mask[: n - start]
    rows[..., :length] = 0
    if segment.sees != "ancestors":
        among = np.full((n - start, n), 0 if segment.sees == "all" else -np.inf, np.float32)
    elif n <= SHARED_QUERIES and segment.depth[-1] == n - 1:
        among = _CHAIN[start:n, :n]
    else:
        among = np.where(ancestors(segment.parent)[start:], np.float32(0), np.float32(-np.inf))
    rows[..., length : length + n] = among[:, None]
    if window is not None:
        where = np.concatenate([np.arange(length), length + segment.depth])
        far = _ends(segment, length)[:, None] - where[None, :] > window
        np.copyto(rows[..., : length + n], np.float32(-np.inf), where=far[:, None])


# Attention along paths -----------------------------------------------------------------------------------------------

TILE = 64
"""Largest number of queries, nodes times query heads of a key head, that share a reading of a block of keys."""


@dataclass(slots=True)
class PathPlan:
    """Places of the keys of all nodes of a forward. All arrays are int64.

    tiles       [tiles, 6]: `Tile`s of `kernels/records.py`.
    ends        [N + padding]: a node sees positions below this, or the last `window` of them. The last is its own.
    places      flat: cache places of each node's path from position `Tile.limit` on.
    scores      number of scores of a query head, without a window.
    queries     largest number of queries of a tile, for a key head.
    header      number of tiles, and addresses of tiles, ends and places, for compiled code."""

    tiles: IntArray
    ends: IntArray
    places: IntArray
    scores: int
    queries: int
    header: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        arrays = self.tiles, self.ends, self.places
        self.header = len(self.tiles), *(a.ctypes.data for a in arrays)

    @classmethod
    def of(
        cls, segments: Sequence[Segment], lengths: Sequence[int], *, shared: int = 1, most: int = 1 << 62
    ) -> PathPlan | None:
        """Plan the paths of segments of up to `most` nodes; None if there are none. Other arguments as in `plan`."""
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
            if segment.sees != "none" and segment.depth[-1] != len(segment.tokens) - 1:
                limit = length // BLOCK * BLOCK
                paths = _paths(segment, length, limit)
                stride = paths.shape[1]
                places.append(paths.ravel())
            for begin in range(0, segment.num_run, step):
                count = min(step, segment.num_run - begin)
                tiles.append(Tile(segment.slot, packed + begin, count, limit, written + begin * stride, stride))
            packed += segment.num_run
            written += segment.num_run * stride
        ends = np.concatenate([_ends(s, n) for s, n in zip(segments, lengths, strict=True)])
        flat = np.concatenate(places) if places else np.zeros(1, np.int64)
        queries = shared * max(tile.nodes for tile in tiles)
        return cls(np.array(tiles, np.int64), ends, flat, int(ends.sum()), queries)


def _paths(segment: Segment, length: int, limit: int) -> IntArray:
    """Cache places of the paths of all nodes that are run, from position `limit` on, padded with the root's place."""
    deepest = int(segment.depth.max())
    path = np.zeros((len(segment.tokens), deepest + 1), np.int64)
    every = np.arange(len(segment.tokens))
    node = every.copy()
    for _ in range(deepest + 1):
        path[every, segment.depth[node]] = node
        node = np.maximum(segment.parent[node], 0)
    committed = np.broadcast_to(np.arange(limit, length), (len(path), length - limit))
    return np.ascontiguousarray(np.concatenate([committed, length + path], 1)[segment.start :], np.int64)
