"""Suffix automaton of a growing token sequence: the longest suffix that also occurs earlier, and where.

Appending a token costs O(1), amortised (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a
text").

A state stands for all substrings that end at the same positions. The suffix link of the whole sequence's state leads to
the longest suffix that also ends elsewhere, so that link gives the match."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.core.tree import IntArray

STAMP_HOPS = 64
"""Largest number of links followed to update `recent`. Usual text needs 1 or 2; "aaaa" would need one for each
token."""


class Match(NamedTuple):
    """The longest suffix that also ends earlier.

    length  number of its tokens; 0 if the last token is new.
    recent  offset of the last earlier place where it ends: text[recent] follows it."""

    length: int
    recent: int


# Columns of a state. Nine states in ten have one edge, so a state holds its first edge. Further edges are rows of
# `edges`. A hash table of (state, token) finds them, and chains link those of a state, so that a split can copy them.
LENGTH, LINK, RECENT, TOKEN, TARGET, MORE = range(6)
FROM, SYMBOL, TO, NEXT = range(4)
_STATES, _EDGES, LAST, _FOUND = range(4)
_HERE, _NOWHERE = -1, -2


class SuffixAutomaton:
    """A compiled automaton on int32 arrays. It holds no text; the caller copies from its own text after a match.

    capacity  number of tokens to make room for, at most 128 bytes each. The arrays double as needed.

    The arrays have room for the largest automaton of n tokens: 2n - 1 states and 3n - 4 edges."""

    def __init__(self, capacity: int = 64):
        self._capacity = 0
        self._states = np.array([[0, -1, 0, -1, -1, -1]], np.int32)
        self._edges = np.empty((0, 4), np.int32)
        self._table = np.empty(0, np.int32)
        self._counts = np.array([1, 0, 0, 0], np.int64)
        self._grow(max(capacity, 1))

    def __len__(self) -> int:
        return int(self._states[self._counts[LAST], LENGTH])

    def extend(self, tokens: Sequence[int] | IntArray) -> None:
        """Append `tokens`, each 0 or more."""
        if len(self) + len(tokens) > self._capacity:
            self._grow(max(2 * self._capacity, len(self) + len(tokens)))
        # A fresh int32 array always has the same type, so that only one version is compiled.
        _extend(self._states, self._edges, self._table, self._counts, np.array(tokens, np.int32))

    def match(self) -> Match:
        """The longest suffix that also ends earlier. After more than STAMP_HOPS links, `recent` may be an older end."""
        last = self._states[self._counts[LAST]]
        if last[LENGTH] == 0:
            return Match(0, 0)
        return Match(int(self._states[last[LINK], LENGTH]), int(self._counts[_FOUND]))

    def after(self, tokens: Sequence[int] | IntArray) -> Match:
        """The longest suffix of `tokens`, another text, that occurs here. `recent` is as in `match`."""
        state, length = _walk(self._states, self._edges, self._table, np.array(tokens, np.int32))
        return Match(int(length), int(self._states[state, RECENT]))

    def _grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens."""
        self._capacity = capacity
        self._states = enlarged(self._states, 2 * capacity + 1)
        self._edges = enlarged(self._edges, 3 * capacity)
        self._table = np.full(1 << (4 * capacity - 1).bit_length(), -1, np.int32)
        _hash_all(self._edges, self._table, self._counts[_EDGES])


def warm_up() -> None:
    """Compile the automaton now, or load it from the cache of earlier runs."""
    automaton = SuffixAutomaton(1)
    automaton.extend([0, 0, 1])
    automaton.after([0])


def enlarged(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """Return `array` with room for `rows` rows; the new rows are not initialised."""
    larger = np.empty((rows, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


@njit(cache=True)
def _extend(states, edges, table, counts, tokens):  # type: ignore[no-untyped-def]
    for token in tokens:
        last = counts[LAST]
        end = states[last, LENGTH] + 1
        new = _state(states, counts, end, end)
        p, place = last, _NOWHERE
        while p >= 0:
            place = _locate(states, edges, table, p, token)
            if place != _NOWHERE:
                break
            _add(states, edges, table, counts, p, token, new)
            p = states[p, LINK]
        if p < 0:
            link = 0
        else:
            link = _target(states, edges, p, place)
            if states[p, LENGTH] + 1 != states[link, LENGTH]:
                link = _split(states, edges, table, counts, p, token, link)
        states[new, LINK] = link
        counts[LAST] = new
        counts[_FOUND] = states[link, RECENT]
        hops = 0
        while link > 0 and hops < STAMP_HOPS:
            states[link, RECENT] = end
            link = states[link, LINK]
            hops += 1


@njit(cache=True)
def _walk(states, edges, table, tokens):  # type: ignore[no-untyped-def]
    """State and length of the longest suffix of `tokens` that occurs."""
    state, length = np.int64(0), np.int64(0)
    for token in tokens:
        place = _locate(states, edges, table, state, token)
        while place == _NOWHERE and state > 0:
            state = np.int64(states[state, LINK])
            length = np.int64(states[state, LENGTH])
            place = _locate(states, edges, table, state, token)
        if place == _NOWHERE:
            state, length = np.int64(0), np.int64(0)
        else:
            state, length = _target(states, edges, state, place), length + 1
    return state, length


@njit
def _split(states, edges, table, counts, p, token, q):  # type: ignore[no-untyped-def]
    """Move the shorter strings of state q, which now end at one more position, to a new state. Returns that state."""
    copy = _state(states, counts, states[p, LENGTH] + 1, states[q, RECENT])
    if states[q, TOKEN] >= 0:
        _add(states, edges, table, counts, copy, states[q, TOKEN], states[q, TARGET])
    edge = states[q, MORE]
    while edge >= 0:
        _add(states, edges, table, counts, copy, edges[edge, SYMBOL], edges[edge, TO])
        edge = edges[edge, NEXT]
    states[copy, LINK] = states[q, LINK]
    states[q, LINK] = copy
    while p >= 0:
        place = _locate(states, edges, table, p, token)
        if place == _NOWHERE or _target(states, edges, p, place) != q:
            break
        if place == _HERE:
            states[p, TARGET] = copy
        else:
            edges[place, TO] = copy
        p = states[p, LINK]
    return copy


@njit
def _state(states, counts, length, recent):  # type: ignore[no-untyped-def]
    new = counts[_STATES]
    counts[_STATES] = new + 1
    states[new, LENGTH] = length
    states[new, RECENT] = recent
    states[new, TOKEN] = -1
    states[new, MORE] = -1
    return new


@njit
def _locate(states, edges, table, state, token):  # type: ignore[no-untyped-def]
    """Find the edge of a state by its token. Returns its row of `edges`, _HERE if the state holds it, or _NOWHERE."""
    if states[state, TOKEN] == token:
        return _HERE
    if states[state, MORE] < 0:
        return _NOWHERE
    slot = hashed(table, state, token)
    while table[slot] >= 0:
        edge = table[slot]
        if edges[edge, FROM] == state and edges[edge, SYMBOL] == token:
            return np.int64(edge)
        slot = (slot + 1) & (len(table) - 1)
    return _NOWHERE


@njit
def _target(states, edges, state, place):  # type: ignore[no-untyped-def]
    """The state to which an edge leads. place: result of `_locate`."""
    return np.int64(states[state, TARGET] if place == _HERE else edges[place, TO])


@njit
def _add(states, edges, table, counts, state, token, target):  # type: ignore[no-untyped-def]
    if states[state, TOKEN] < 0:
        states[state, TOKEN] = token
        states[state, TARGET] = target
        return
    edge = counts[_EDGES]
    counts[_EDGES] = edge + 1
    edges[edge, FROM] = state
    edges[edge, SYMBOL] = token
    edges[edge, TO] = target
    edges[edge, NEXT] = states[state, MORE]
    states[state, MORE] = edge
    _hash(edges, table, edge)


@njit
def _hash(edges, table, edge):  # type: ignore[no-untyped-def]
    slot = hashed(table, edges[edge, FROM], edges[edge, SYMBOL])
    while table[slot] >= 0:
        slot = (slot + 1) & (len(table) - 1)
    table[slot] = edge


@njit(cache=True)
def _hash_all(edges, table, num_edges):  # type: ignore[no-untyped-def]
    for edge in range(num_edges):
        _hash(edges, table, edge)


@njit
def hashed(table, state, token):  # type: ignore[no-untyped-def]
    """The first slot at which to look up (state, token): a multiplicative hash with the high bits folded in."""
    mixed = np.int64(state) * 0x9E3779B1 + np.int64(token) * 0x85EBCA77
    return (mixed ^ (mixed >> 29)) & (len(table) - 1)
