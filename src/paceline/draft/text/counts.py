"""n-gram counts of a growing text: for each context of up to `longest` tokens, what followed it and how often.

Prediction by partial matching (Cleary and Witten 1984) reads them. Contexts are known by a 62-bit hash. A token of text
takes about 50 bytes for each length of context."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.core.tree import IntArray
from paceline.draft.text.automaton import enlarged

TOTAL, DISTINCT, HEAD = range(3)  # columns of `contexts`
TOKEN, COUNT, NEXT = range(3)  # columns of `items`
_CONTEXTS, _ITEMS = range(2)  # of `sizes`


class ContextCounts:
    """Counts for contexts of 1 to `longest` tokens.

    table     int64 [power of two]: index into `keys` and `contexts`, or -1; open addressing
    keys      int64 [C]: hash of each context
    contexts  int32 [C, 3]: tokens that followed it, how many different ones, first of its items
    items     int32 [I, 3]: token, how often, next item of the same context (-1: none), the latest new one first"""

    def __init__(self, longest: int, capacity: int = 64):
        self.longest = longest
        self.table = np.full(16, -1, np.int64)
        self.keys = np.empty(0, np.int64)
        self.contexts = np.empty((0, 3), np.int32)
        self.items = np.empty((0, 3), np.int32)
        self.sizes = np.zeros(2, np.int64)
        self._tail = np.empty(0, np.int64)
        self._length = 0
        self._reserve(capacity)

    def __len__(self) -> int:
        return self._length

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """What compiled code reads."""
        return self.table, self.keys, self.contexts, self.items

    def extend(self, tokens: Sequence[int] | IntArray) -> None:
        """Append `tokens`."""
        new = np.asarray(tokens, np.int64)
        if not len(new):
            return
        self._reserve(len(new))
        text = np.concatenate([self._tail, new])
        _extend(*self.arrays, self.sizes, self.longest, text, len(self._tail))
        self._tail = text[-self.longest :]
        self._length += len(new)

    def learn(self, text: IntArray) -> None:
        """Append a document; the next text does not count as following it."""
        self.extend(text)
        self._tail = self._tail[:0]

    def _reserve(self, tokens: int) -> None:
        """Make room for `tokens` more: at most one context and one item for each token and length."""
        contexts, items = (int(size) + tokens * self.longest for size in self.sizes)
        if contexts > len(self.keys):
            room = max(contexts, 2 * len(self.keys))
            self.keys, self.contexts = enlarged(self.keys, room), enlarged(self.contexts, room)
            self.table = np.full(1 << (2 * room - 1).bit_length(), -1, np.int64)
            _index(self.table, self.keys, self.sizes[_CONTEXTS])
        if items > len(self.items):
            self.items = enlarged(self.items, max(items, 2 * len(self.items)))


@njit
def mixed(key, token):  # type: ignore[no-untyped-def]
    """Hash of a context extended by `token` towards the past."""
    value = (np.int64(key) ^ (np.int64(key) >> 31)) * np.int64(0x1B873593CC9E2D51) + np.int64(token) + np.int64(1)
    return (value ^ (value >> 29)) & np.int64(0x3FFFFFFFFFFFFFFF)


@njit
def locate(table, keys, key):  # type: ignore[no-untyped-def]
    """Index of the context with this hash, or -1."""
    return table[_slot(table, keys, key)]


@njit
def _slot(table, keys, key):  # type: ignore[no-untyped-def]
    """Where the context with this hash stands in the table, or would stand."""
    slot = key & (len(table) - 1)
    while table[slot] >= 0 and keys[table[slot]] != key:
        slot = (slot + 1) & (len(table) - 1)
    return slot


@njit(cache=True)
def _index(table, keys, count):  # type: ignore[no-untyped-def]
    for at in range(count):
        table[_slot(table, keys, keys[at])] = at


@njit(cache=True)
def _extend(table, keys, contexts, items, sizes, longest, text, start):  # type: ignore[no-untyped-def]
    """Count every token of `text` from `start` on after the contexts before it."""
    for end in range(start, len(text)):
        token, key = text[end], np.int64(0)
        for length in range(1, min(longest, end) + 1):
            key = mixed(key, text[end - length])
            _count(table, keys, contexts, items, sizes, key, token)


@njit
def _count(table, keys, contexts, items, sizes, key, token):  # type: ignore[no-untyped-def]
    slot = _slot(table, keys, key)
    at = table[slot]
    if at < 0:
        at = sizes[_CONTEXTS]
        sizes[_CONTEXTS] += 1
        table[slot], keys[at] = at, key
        contexts[at, TOTAL], contexts[at, DISTINCT], contexts[at, HEAD] = 0, 0, -1
    contexts[at, TOTAL] += 1
    item = contexts[at, HEAD]
    while item >= 0:
        if items[item, TOKEN] == token:
            items[item, COUNT] += 1
            return
        item = items[item, NEXT]
    item = sizes[_ITEMS]
    sizes[_ITEMS] += 1
    items[item, TOKEN], items[item, COUNT], items[item, NEXT] = token, 1, contexts[at, HEAD]
    contexts[at, HEAD] = item
    contexts[at, DISTINCT] += 1
