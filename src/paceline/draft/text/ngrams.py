"""n-gram stores: what followed a token in this request, in the model's own answers, and in finished requests.

The first two databases of Hierarchy Drafting (Cho et al. 2025, arXiv 2502.05609). The key of all stores is one token,
and all have the method `collect`:

    store = ContextNgrams(n=3)
    store.update(np.array([1, 2, 3, 1, 2, 4, 9]))
    drafts = np.full((7, 2), -1, np.int32)
    store.collect(1, drafts, 0)              # 2 drafts, newest first: [2, 4], [2, 3]

`collect(token, drafts, size)` adds what followed `token` to the first `size` rows of `drafts`, int32 [k, length],
padded with -1, and returns the number of rows filled. No row is a prefix of another. An n-gram is stored as its place
in a text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.draft.text.store import Store
from paceline.engine.tree import IntArray

N = 5
"""Tokens of an n-gram in a store on disk; the published setting."""

MOST = 100_000
"""n-grams a store on disk keeps; the published setting."""

_CHUNK = 1 << 20
"""Tokens counted between two reports of progress."""

# Columns of a key's row: its token, how many places it has, the places, best first.
_TOKEN, _HELD, _PLACES = range(3)


class ContextNgrams:
    """D_c: what followed each token of one growing text, newest first.

    n     tokens of an n-gram, the key included.
    ways  n-grams of a key; a new one replaces the one not seen for longest.

    Memory: about 4 * (2 + ways) bytes for each distinct token."""

    def __init__(self, n: int = N, ways: int = 7):
        self.n = n
        self._keys = _Keys(ways)
        self._text: IntArray = np.empty(0, np.int64)

    def update(self, text: IntArray) -> None:
        """Add the n-grams that end in the new tokens of `text` int64 [m], the whole text so far. The store keeps `text`
        and reads from it."""
        begin = max(len(self._text) - self.n + 1, 0)
        gained = len(text) - self.n + 1 - begin
        self._text = text
        if gained > 0:
            self._keys.reserve(gained)
            _insert(text, begin, self.n, *self._keys.arrays)

    def collect(self, token: int, drafts: NDArray[np.int32], size: int) -> int:
        """What followed `token`, newest first."""
        return int(_collect(self._text, self.n, token, *self._keys.arrays, drafts, size))


class FrequentNgrams:
    """D_m: the n-grams that stand in most documents of a corpus, most frequent first; read only.

    starts  int64 [V + 1]: n-grams that begin with token t are rows starts[t] to starts[t + 1] of `values`.
    values  int32 [m, n - 1]: the tokens after the first."""

    def __init__(self, starts: NDArray[np.int64], values: NDArray[np.int32]):
        # Plain arrays: handing a mapped one to compiled code takes much longer.
        self._starts, self._values = np.asarray(starts), np.asarray(values)

    @classmethod
    def of(cls, store: Store) -> FrequentNgrams:
        """The n-grams of a store; StoreError if it was built without them."""
        return cls(store.array("ngrams_starts"), store.array("ngrams_values"))

    def __len__(self) -> int:
        return len(self._values)

    def collect(self, token: int, drafts: NDArray[np.int32], size: int) -> int:
        """What followed `token`, most frequent first."""
        return int(_collect_frequent(self._starts, self._values, token, drafts, size))


class PastNgrams:
    """A growing D_m: n-grams that stand in most texts first, the latest first among equals.

    tokens  to make room for, about 60 bytes each."""

    def __init__(self, tokens: int, n: int = N, ways: int = 7):
        self._used = self._documents = 0
        self._n = n
        self._text = np.empty(tokens, np.int32)
        self._counts = _counters(tokens)
        self._keys = _Keys(ways)

    def __len__(self) -> int:
        return self._used

    def learn(self, text: IntArray) -> None:
        """Add a text, int64 [m]."""
        begin, self._used = self._used, self._used + len(text)
        self._text[begin : self._used] = text
        self._keys.reserve(len(text))
        self._documents += 1
        _learn(self._text, begin, self._used, self._documents, self._n, *self._counts, *self._keys.arrays)

    def collect(self, token: int, drafts: NDArray[np.int32], size: int) -> int:
        """What followed `token`, most frequent first."""
        return int(_collect(self._text, self._n, token, *self._keys.arrays, drafts, size))


class _Keys:
    """Map of a token to up to `ways` places, best first: rows found by an open-addressing hash table."""

    def __init__(self, ways: int):
        self._rows = np.empty((0, _PLACES + ways), np.int32)
        self._table = np.empty(0, np.int32)
        self._num = np.zeros(1, np.int64)

    @property
    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
        """rows int32 [keys, 2 + ways], table int32 [slots], and the number of rows in use, int64 [1]."""
        return self._rows, self._table, self._num

    def reserve(self, more: int) -> None:
        """Make room for `more` keys; compiled code cannot."""
        num = int(self._num[0])
        if num + more <= len(self._rows):
            return
        rows = np.empty((max(2 * len(self._rows), num + more, 64), self._rows.shape[1]), np.int32)
        rows[:num] = self._rows[:num]
        self._rows = rows
        self._table = np.full(_slots(len(rows)), -1, np.int32)
        _hash_all(*self.arrays)


def build_part(
    text: NDArray[np.integer],
    ends: NDArray[np.int64],
    vocab_size: int,
    progress: Callable[[float], None] | None = None,
    *,
    n: int = N,
    most: int = MOST,
) -> dict[str, NDArray[np.integer]]:
    """The `most` n-grams that stand in most documents, for `FrequentNgrams`; the earlier first among equals.

    text  token ids [m], documents one after another; ends int64 [d]: the offset after each. No n-gram crosses an end.

    Returns ngrams_starts int64 [vocab_size + 1], ngrams_values int32 [m, n - 1], and ngrams_counts int32 [m], the
    number of documents that have each n-gram. Building takes about 20 bytes a token of the text."""
    text = np.asarray(text)
    table, count, seen = _counters(len(text))
    # The documents that end in each chunk.
    strides = np.searchsorted(ends, np.arange(0, len(text) + _CHUNK, _CHUNK), side="right")
    for begin, end in zip(strides[:-1].tolist(), strides[1:].tolist(), strict=True):
        _count(text, ends, begin, end, n, table, count, seen)
        if progress is not None:
            progress(end / max(len(ends), 1))
    places = np.flatnonzero(count)
    places = places[np.argsort(-count[places], kind="stable")[:most]]
    places = places[np.argsort(text[places], kind="stable")]
    per_token = np.bincount(text[places], minlength=vocab_size)
    return {
        "ngrams_starts": np.concatenate([[0], np.cumsum(per_token)]).astype(np.int64),
        "ngrams_values": text[places[:, None] + np.arange(1, n)].astype(np.int32),
        "ngrams_counts": count[places],
    }


def _counters(size: int) -> tuple[NDArray[np.int64 | np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """For a text of `size` tokens: a table of places; and, by the first place of an n-gram, the number of documents
    that have it and the last of them."""
    place = np.int32 if size < 1 << 31 else np.int64
    return np.full(_slots(size), -1, place), np.zeros(size, np.int32), np.zeros(size, np.int32)


def _slots(size: int) -> int:
    """Slots of a hash table for `size` entries: a power of two, at least a third of them free."""
    return 1 << max(3 * size // 2, 1).bit_length()


@njit(cache=True)
def _insert(text, begin, n, rows, table, num):  # type: ignore[no-untyped-def]
    """Put every n-gram of text[begin:] before the others of its key."""
    for place in range(begin, len(text) - n + 1):
        row = _row(rows, table, num, text[place])
        at = 0
        while at < rows[row, _HELD] and not _same(text, rows[row, _PLACES + at], place, n):
            at += 1
        if at == rows[row, _HELD]:
            at = _one_more(rows, row)
        _move_up(rows, row, at, 0)
        rows[row, _PLACES] = place


@njit(cache=True)
def _learn(text, begin, end, document, n, table, count, seen, rows, keys, num):  # type: ignore[no-untyped-def]
    """Count the n-grams of a document, text[begin:end], and move each to its place by count among its key's."""
    for at in range(begin, end - n + 1):
        place = _first_place(text, at, n, table)
        if not _is_new(place, document, count, seen):
            continue
        row = _row(rows, keys, num, text[place])
        held = rows[row, _HELD]
        old = 0
        while old < held and rows[row, _PLACES + old] != place:
            old += 1
        new = 0
        while new < old and count[rows[row, _PLACES + new]] > count[place]:
            new += 1
        if old == held:
            old = _one_more(rows, row)
        if new <= old:
            _move_up(rows, row, old, new)
            rows[row, _PLACES + new] = place


@njit(cache=True)
def _count(text, ends, first, last, n, table, count, seen):  # type: ignore[no-untyped-def]
    """Count the n-grams of documents first to last - 1."""
    for document in range(first, last):
        begin = ends[document - 1] if document else 0
        for at in range(begin, ends[document] - n + 1):
            _is_new(_first_place(text, at, n, table), document, count, seen)


@njit
def _is_new(place, document, count, seen):  # type: ignore[no-untyped-def]
    """Count the n-gram first seen at `place`, unless this document had it already."""
    if count[place] > 0 and seen[place] == document:
        return False
    seen[place] = document
    count[place] += 1
    return True


@njit
def _first_place(text, at, n, table):  # type: ignore[no-untyped-def]
    """Where the n-gram text[at : at + n] stood first; adds it to the table if it is new."""
    mixed = np.int64(0)
    for i in range(n):
        mixed = mixed * 0x9E3779B1 + np.int64(text[at + i])
    slot = (mixed ^ (mixed >> 29)) & (len(table) - 1)
    while table[slot] >= 0:
        if _same(text, table[slot], at, n):
            return np.int64(table[slot])
        slot = (slot + 1) & (len(table) - 1)
    table[slot] = at
    return np.int64(at)


@njit
def _same(text, one, other, n):  # type: ignore[no-untyped-def]
    same = 0
    while same < n and text[one + same] == text[other + same]:
        same += 1
    return same == n


@njit
def _one_more(rows, row):  # type: ignore[no-untyped-def]
    """The index for one more n-gram in a key's row: after the others, or that of the last one if the row is full."""
    held = rows[row, _HELD]
    if _PLACES + held == rows.shape[1]:
        return np.int64(held - 1)
    rows[row, _HELD] = held + 1
    return np.int64(held)


@njit
def _move_up(rows, row, old, new):  # type: ignore[no-untyped-def]
    """Free index `new`: the places from `new` to `old` - 1 move back by one."""
    for at in range(old, new, -1):
        rows[row, _PLACES + at] = rows[row, _PLACES + at - 1]


@njit
def _find(rows, table, token):  # type: ignore[no-untyped-def]
    """Slot of the token's row in the table, or the free slot where it belongs."""
    mixed = np.int64(token) * 0x9E3779B1
    slot = (mixed ^ (mixed >> 29)) & (len(table) - 1)
    while table[slot] >= 0 and rows[table[slot], _TOKEN] != token:
        slot = (slot + 1) & (len(table) - 1)
    return slot


@njit
def _row(rows, table, num, token):  # type: ignore[no-untyped-def]
    """The token's row; a new one if it has none."""
    slot = _find(rows, table, token)
    if table[slot] < 0:
        table[slot] = num[0]
        rows[num[0], _TOKEN] = token
        rows[num[0], _HELD] = 0
        num[0] += 1
    return np.int64(table[slot])


@njit(cache=True)
def _hash_all(rows, table, num):  # type: ignore[no-untyped-def]
    for row in range(num[0]):
        table[_find(rows, table, rows[row, _TOKEN])] = row


@njit(cache=True)
def _collect(text, n, token, rows, table, num, drafts, size):  # type: ignore[no-untyped-def]
    """Add what follows the places of a token."""
    if num[0] == 0:
        return size
    row = table[_find(rows, table, token)]
    if row < 0:
        return size
    for at in range(rows[row, _HELD]):
        if size == len(drafts):
            break
        size = put(drafts, size, text, rows[row, _PLACES + at] + 1, n - 1)
    return size


@njit(cache=True)
def _collect_frequent(starts, values, token, drafts, size):  # type: ignore[no-untyped-def]
    if token >= len(starts) - 1:
        return size
    for row in range(starts[token], starts[token + 1]):
        if size == len(drafts):
            break
        size = put(drafts, size, values[row], 0, values.shape[1])
    return size


@njit
def put(drafts, size, text, begin, length):  # type: ignore[no-untyped-def]
    """Add text[begin : begin + length], cut to a draft's length, to the first `size` drafts; returns their number.

    A sequence replaces a draft that is its prefix, and is left out if it is a prefix of a draft."""
    length = min(length, drafts.shape[1])
    at = 0
    while at < size:
        same = 0
        while same < length and drafts[at, same] == text[begin + same]:
            same += 1
        if same == length:
            return size
        if drafts[at, same] < 0:
            break
        at += 1
    for i in range(drafts.shape[1]):
        drafts[at, i] = text[begin + i] if i < length else -1
    return max(size, at + 1)
