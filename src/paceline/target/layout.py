"""Layout: how the segments of one forward lie in memory. Pure planning in NumPy; knows no weights.

Every token of every segment is packed into one dimension, N in all, so that linear layers never see padding. Only
attention needs a shape: short segments share one padded group over a range of slots, long ones (prompt chunks) go
one by one. Node i of a segment sits at position (length of the row) + (its depth) and is written to the cache at
(length of the row) + i; it sees the row's committed tokens, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.target.base import Segment
from paceline.tree import IntArray, ancestors, depths

SHARED_QUERIES = 64
"""Segments of at most this many nodes are padded to each other; longer ones would waste the others' time."""


@dataclass(slots=True)
class Group:
    """Segments attended in one call: slots first..last-1, `queries` nodes each, the first `keys` of the cache.

    gather   int64 [slots * queries]: packed index of every (slot, query), padding pointing anywhere; None when the
             packed order is the padded order.
    scatter  int64 [nodes]: where each packed node of the group sits in that padded order; None as above.
    nodes    the packed nodes begin..end-1 when they are consecutive and gather is None.
    mask     additive [slots, 1, queries, keys], 0 or -inf; None when everything is visible.
    causal   the mask is the plain lower triangle and nothing came before.
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
    causal: bool


@dataclass(slots=True)
class Layout:
    """The plan of one forward over N packed nodes.

    tokens, positions, slots, at   int64 [N]; `at` is the place in the row's cache.
    spans     (begin, end) of every segment in the packed order.
    wanted    int64 [M]: packed nodes whose logits are wanted, or None for all; wanted_at as Verdict.logits_at.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    at: torch.Tensor
    spans: list[tuple[int, int]]
    groups: list[Group]
    wanted: torch.Tensor | None
    wanted_at: list[int]
    reach: dict[int, int]

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.spans[-1][1]


def plan(
    segments: Sequence[Segment],
    lengths: Sequence[int],
    *,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Layout:
    """Lay out `segments`; lengths[s] is the committed length of segment s's row.

    window  a node sees only this many tokens, itself included (sliding-window attention)."""
    ends = np.cumsum([len(s.tokens) - s.start for s in segments]).tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    positions = [length + depths(s.parent)[s.start :] for s, length in zip(segments, lengths, strict=True)]
    at = [np.arange(length + s.start, length + len(s.tokens)) for s, length in zip(segments, lengths, strict=True)]

    def put(array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    short = [s for s, (begin, end) in enumerate(spans) if end - begin <= SHARED_QUERIES]
    long = [s for s, (begin, end) in enumerate(spans) if end - begin > SHARED_QUERIES]
    groups = [
        _group(members, segments, lengths, spans, positions, window, dtype, device)
        for members in ([short] if short else []) + [[s] for s in long]
    ]
    counts = [s.num_logits for s in segments]
    wanted = None
    if sum(counts) != ends[-1]:
        wanted = put(np.concatenate([np.arange(end - n, end) for n, end in zip(counts, ends, strict=True)]))
    return Layout(
        tokens=put(_join([s.tokens[s.start :] for s in segments])),
        positions=put(_join(positions)),
        slots=put(np.repeat([s.slot for s in segments], [end - begin for begin, end in spans])),
        at=put(_join(at)),
        spans=spans,
        groups=groups,
        wanted=wanted,
        wanted_at=[0, *np.cumsum(counts).tolist()],
        reach={s.slot: length + len(s.tokens) for s, length in zip(segments, lengths, strict=True)},
    )


def _join(arrays: Sequence[IntArray]) -> IntArray:
    return np.ascontiguousarray(arrays[0], np.int64) if len(arrays) == 1 else np.concatenate(arrays)


def _group(
    members: Sequence[int],
    segments: Sequence[Segment],
    lengths: Sequence[int],
    spans: Sequence[tuple[int, int]],
    positions: Sequence[IntArray],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Group:
    """One attention call for `members`, each on its own slot."""
    slots = [segments[s].slot for s in members]
    first, last = min(slots), max(slots) + 1
    queries = max(spans[s][1] - spans[s][0] for s in members)
    keys = max(lengths[s] + len(segments[s].tokens) for s in members)
    begin, end = spans[members[0]][0], spans[members[-1]][1]
    gather, scatter, packed = _padding(members, slots, spans, first, last, queries)
    alone = len(members) == 1
    plain = alone and _is_plain(segments[members[0]], positions[members[0]], window)
    causal = plain and queries > 1 and keys == queries
    mask = None
    if not (plain and (queries == 1 or causal)):
        visible = np.zeros((last - first, queries, keys), np.bool_)
        visible[:, :, 0] = True  # padding must see something, or its softmax is not a number
        for s in members:
            _see(visible[segments[s].slot - first], segments[s], lengths[s], positions[s], window)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        mask.masked_fill_(torch.from_numpy(~visible).to(device), -torch.inf)
        mask = mask.unsqueeze(1)
    in_order = gather is None
    return Group(
        first,
        last,
        queries,
        keys,
        begin,
        end,
        None if in_order else torch.from_numpy(gather).to(device),
        None if in_order else torch.from_numpy(scatter).to(device),
        None if in_order else torch.from_numpy(packed).to(device),
        mask,
        causal,
    )


def _is_plain(segment: Segment, positions: IntArray, window: int | None) -> bool:
    """A chain within the window: every node sees everything before it in the cache."""
    n = len(segment.tokens)
    chain = bool((segment.parent == np.arange(-1, n - 1)).all())
    return chain and (window is None or int(positions[-1]) < window)


def _padding(
    members: Sequence[int],
    slots: Sequence[int],
    spans: Sequence[tuple[int, int]],
    first: int,
    last: int,
    queries: int,
) -> tuple[IntArray | None, IntArray | None, IntArray | None]:
    """(gather, scatter, packed nodes) between the packed and the padded order; Nones when they are the same."""
    gather = np.zeros((last - first) * queries, np.int64)
    scatter, packed = [], []
    for s, slot in zip(members, slots, strict=True):
        begin, end = spans[s]
        place = (slot - first) * queries + np.arange(end - begin)
        gather[place] = np.arange(begin, end)
        scatter.append(place)
        packed.append(np.arange(begin, end))
    nodes = np.concatenate(packed)
    if len(nodes) == len(gather) and (gather == nodes[0] + np.arange(len(gather))).all():
        return None, None, None
    return gather, np.concatenate(scatter), nodes


def _see(visible: NDArray[np.bool_], segment: Segment, length: int, positions: IntArray, window: int | None) -> None:
    """Fill in what the nodes of one segment see: visible [queries, keys] of its slot."""
    n = len(segment.tokens)
    rows = visible[: n - segment.start]
    rows[:, :length] = True
    rows[:, length : length + n] = ancestors(segment.parent)[segment.start :]
    if window is not None:
        where = np.concatenate([np.arange(length), length + depths(segment.parent)])
        rows[:, : length + n] &= positions[:, None] - where[None, :] < window
