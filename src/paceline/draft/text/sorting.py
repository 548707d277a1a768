"""Sorts the suffixes of a text in O(n), by induced sorting.

Nong, Zhang and Chan 2009, "Linear Suffix Array Construction by Almost Pure Induced-Sorting": a suffix that begins a
rise (LMS) is sorted by recursion, all others by one pass up and one pass down the buckets. Takes about 13 bytes a token
beside text and result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.tree import IntArray

Positions = NDArray[np.int32]


def sorted_positions(text: NDArray[Any], ends: IntArray, report: Callable[[float], None]) -> Positions:
    """int32 [n]: where each suffix of `text` int [n] begins, in sorted order. Documents stop at `ends` int64 [d].

    report  called with the share that is done, 0 to 1."""
    string = _with_ends(text, ends)
    order = _sort(string, int(string.max(initial=0)) + 1, report)
    return _without_ends(string, ends, order)


@njit(cache=True)
def _with_ends(text, ends):  # type: ignore[no-untyped-def]
    """int32 [n + d]: the text with a symbol of its own after each document, below all tokens."""
    string = np.empty(len(text) + len(ends), np.int32)
    at = begin = 0
    for i in range(len(ends)):
        for j in range(begin, ends[i]):
            string[at] = np.int64(text[j]) + len(ends)
            at += 1
        string[at] = i
        at += 1
        begin = ends[i]
    return string


@njit(cache=True)
def _without_ends(string, ends, order):  # type: ignore[no-untyped-def]
    """int32 [n]: `order` of `_with_ends` in places of the text. The suffixes of the added symbols stand first."""
    at = begin = 0
    for i in range(len(ends)):
        for j in range(begin, ends[i]):
            string[at] = j
            at += 1
        at += 1
        begin = ends[i]
    return string[order[len(ends) :]]


def _sort(string: Positions, symbols: int, report: Callable[[float], None]) -> Positions:
    """Where each suffix of `string` int32 [n] begins, sorted; its symbols are 0..symbols-1."""
    order = np.full(len(string), -1, np.int32)
    rises = np.empty(len(string), np.bool_)
    buckets = np.zeros((2, symbols + 1), np.int32)
    bottoms = _classify(string, rises, buckets)
    _induce(string, rises, buckets, bottoms, order)
    report(0.3)
    if len(bottoms) > 1:
        names, distinct = _names(string, rises, order, bottoms)
        if distinct < len(bottoms):
            ranked = _sort(names, distinct, lambda done: report(0.3 + 0.4 * done))
        else:
            ranked = np.empty(len(bottoms), np.int32)
            ranked[names] = np.arange(len(bottoms), dtype=np.int32)
        report(0.7)
        order.fill(-1)
        _induce(string, rises, buckets, bottoms[ranked], order)
    report(1.0)
    return order


@njit(cache=True)
def _classify(string, rises, buckets):  # type: ignore[no-untyped-def]
    """Fill `rises` (the suffix is smaller than the next one) and `buckets`; where a fall ends and a rise begins.

    buckets  [0, c] where the suffixes that begin with c begin, [1, c] where the rising ones among them do."""
    count = 0
    for i in range(len(string) - 1, -1, -1):
        last = i + 1 == len(string)
        rises[i] = not last and (string[i] < string[i + 1] or (string[i] == string[i + 1] and rises[i + 1]))
        if not last and rises[i + 1] and not rises[i]:
            count += 1
        buckets[0, string[i] + 1] += 1
        if not rises[i]:
            buckets[1, string[i]] += 1
    for symbol in range(buckets.shape[1] - 1):
        buckets[0, symbol + 1] += buckets[0, symbol]
        buckets[1, symbol] += buckets[0, symbol]
    bottoms = np.empty(count, np.int32)
    at = 0
    for i in range(1, len(string)):
        if rises[i] and not rises[i - 1]:
            bottoms[at] = i
            at += 1
    return bottoms


@njit(cache=True)
def _induce(string, rises, buckets, bottoms, order):  # type: ignore[no-untyped-def]
    """Sort all suffixes into `order` (all -1), given the `bottoms` in order: falling ones first, then rising ones."""
    if len(string) == 0:
        return
    room = buckets[1].copy()
    for bottom in bottoms:
        order[room[string[bottom]]] = bottom
        room[string[bottom]] += 1
    room[:] = buckets[0]
    last = len(string) - 1
    order[room[string[last]]] = last
    room[string[last]] += 1
    for i in range(len(string)):
        before = order[i] - 1
        if before >= 0 and not rises[before]:
            order[room[string[before]]] = before
            room[string[before]] += 1
    room[:] = buckets[0]
    for i in range(len(string) - 1, -1, -1):
        before = order[i] - 1
        if before >= 0 and rises[before]:
            room[string[before] + 1] -= 1
            order[room[string[before] + 1]] = before


@njit(cache=True)
def _names(string, rises, order, bottoms):  # type: ignore[no-untyped-def]
    """int32 [m]: the rank of the piece from each bottom to the next one, equal pieces alike; and how many ranks."""
    # Bottoms are two apart at least, so half the room will do.
    rank_at = np.empty(len(string) // 2 + 1, np.int32)
    rank, previous = -1, -1
    for begin in order:
        if begin > 0 and rises[begin] and not rises[begin - 1]:
            if previous < 0 or not _same_piece(string, rises, previous, begin):
                rank += 1
            rank_at[begin // 2] = rank
            previous = begin
    names = np.empty(len(bottoms), np.int32)
    for i in range(len(bottoms)):
        names[i] = rank_at[bottoms[i] // 2]
    return names, rank + 1


@njit
def _same_piece(string, rises, a, b):  # type: ignore[no-untyped-def]
    """Whether the pieces from the bottoms a and b to the next bottom, with it, are equal."""
    i = 0
    while a + i < len(string) and b + i < len(string):
        if string[a + i] != string[b + i] or rises[a + i] != rises[b + i]:
            return False
        if i > 0 and rises[a + i] and not rises[a + i - 1]:
            return True
        i += 1
    return False
