"""n-gram stores: the tokens that followed a token in this request, in the model's answers, in finished requests.

The first two databases of Hierarchy Drafting (Cho et al. 2025, arXiv 2502.05609) and the pool of lookahead decoding
(Fu et al. 2024, arXiv 2402.02057). The key of all stores is a token; `after(token)` gives what follows, best first."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.core.tree import IntArray
from paceline.draft.text.automaton import enlarged, hashed
from paceline.draft.text.store import Progress, Store, silent

Gram = tuple[int, ...]

N = 5
"""Number of tokens of an n-gram in a store on disk; the published setting."""
MOST = 100_000
"""Number of n-grams in a store on disk; the published setting."""


def grams(text: IntArray, n: int) -> Iterator[Gram]:
    tokens = text.tolist()
    return zip(*(tokens[i:] for i in range(n)), strict=False)


class RecentNgrams:
    """D_c: the tokens that followed each token, newest first.

    n     number of tokens of an n-gram, with the key.
    ways  number of different n-grams that `after` returns, newest first.
    read  number of first tokens that `update` leaves out.

    All n-grams are kept in order of arrival, each with the number of the n-gram before it with the same key."""

    def __init__(self, n: int, ways: int, read: int = 0):
        self.n, self.ways = n, ways
        self._read, self._tokens, self._count = read, 0, 0
        self._grams, self._before = np.empty((0, n), np.int32), np.empty(0, np.int32)
        self._table = np.empty(0, np.int32)

    def __len__(self) -> int:
        """Number of tokens of all texts that were learnt."""
        return self._tokens

    def update(self, text: IntArray) -> None:
        """Add the n-grams that end in new tokens. text: the whole text so far, int64 [m]."""
        self.learn(text[self._read :])
        self._read = max(self._read, len(text) - self.n + 1)  # The last n - 1 begin no whole n-gram.

    def learn(self, text: IntArray) -> None:
        self._tokens += len(text)
        if (most := self._count + len(text)) > len(self._before):
            capacity = max(2 * most, 64)
            self._grams, self._before = enlarged(self._grams, capacity), enlarged(self._before, capacity)
            self._table = np.full(1 << (2 * capacity - 1).bit_length(), -1, np.int32)
            _index(self._grams, self._before, self._table, 0, self._count)
        # A fresh int32 array always has the same type, so that only one version is compiled.
        self._count = _learn(self._grams, self._before, self._table, self._count, np.array(text, np.int32))

    def add(self, gram: Gram) -> None:
        """Add an n-gram, or make it the newest."""
        self.learn(np.array(gram))

    def after(self, token: int) -> list[Gram]:
        """Tuples of the n - 1 tokens that followed `token`, the newest tuple first."""
        return list(map(tuple, _after(self._grams, self._before, self._table, token, self.ways).tolist()))


@njit(cache=True)
def _slot(grams, table, token):  # type: ignore[no-untyped-def]
    """The slot of `table` that holds the newest n-gram of `token`, or -1 if there is none."""
    slot = hashed(table, 0, token)
    while table[slot] >= 0 and grams[table[slot], 0] != token:
        slot = (slot + 1) & (len(table) - 1)
    return slot


@njit(cache=True)
def _index(grams, before, table, begin, end):  # type: ignore[no-untyped-def]
    for i in range(begin, end):
        slot = _slot(grams, table, grams[i, 0])
        before[i] = table[slot]
        table[slot] = i


@njit(cache=True)
def _alike(first, second):  # type: ignore[no-untyped-def]
    same = 0
    while same < len(first) and first[same] == second[same]:
        same += 1
    return same == len(first)


@njit(cache=True)
def _learn(grams, before, table, count, text):  # type: ignore[no-untyped-def]
    n = grams.shape[1]
    for at in range(len(text) - n + 1):
        newest = table[_slot(grams, table, text[at])]
        if newest >= 0 and _alike(grams[newest], text[at : at + n]):
            continue  # Repetition of a token would fill the store.
        grams[count] = text[at : at + n]
        _index(grams, before, table, count, count + 1)
        count += 1
    return count


@njit(cache=True)
def _after(grams, before, table, token, ways):  # type: ignore[no-untyped-def]
    found, count = np.empty((ways, grams.shape[1] - 1), np.int32), 0
    place = table[_slot(grams, table, token)] if len(table) else -1
    while place >= 0 and count < ways:
        found[count] = grams[place, 1:]
        other = 0
        while not _alike(found[other], found[count]):
            other += 1
        count += other == count
        place = before[place]
    return found[:count]


def warm_up() -> None:
    """Compile the store now, or load it from the cache of earlier runs."""
    store = RecentNgrams(2, 1)
    store.add((0, 0))
    store.after(0)


class FrequentNgrams:
    """D_m: the most frequent n-grams of a corpus, counted by documents; read only.

    starts  int64 [V + 1]. N-grams that begin with token t are rows starts[t] to starts[t + 1] of `values`.
    values  the tokens after the first, int32 [m, n - 1]."""

    def __init__(self, starts: NDArray[np.int64], values: NDArray[np.int32]):
        self._starts, self._values = starts, values

    @classmethod
    def of(cls, store: Store) -> Self:
        """Open the n-grams of a store. StoreError if it was built without them."""
        return cls(store.array("ngrams_starts"), store.array("ngrams_values"))

    def after(self, token: int) -> Iterator[Gram]:
        """The tokens that followed `token`, n - 1 in each tuple, most frequent first."""
        begin, end = self._starts[token : token + 2].tolist() if token < len(self._starts) - 1 else (0, 0)
        return (tuple(self._values[row].tolist()) for row in range(begin, end))


class PastNgrams:
    """A growing D_m with up to `ways` n-grams of a key: those of the most texts, of equals the latest first."""

    def __init__(self, n: int, ways: int):
        self.n, self.ways = n, ways
        self._tokens = 0
        self._counts: Counter[Gram] = Counter()
        self._best: dict[int, list[Gram]] = {}

    def __len__(self) -> int:
        return self._tokens

    def learn(self, text: IntArray) -> None:
        """Add a text, int64 [m]."""
        self._tokens += len(text)
        for gram in dict.fromkeys(grams(text, self.n)):
            self._counts[gram] += 1
            others = [other for other in self._best.get(gram[0], ()) if other != gram]
            others.insert(sum(self._counts[other] > self._counts[gram] for other in others), gram)
            self._best[gram[0]] = others[: self.ways]

    def after(self, token: int) -> list[Gram]:
        """The tokens that followed `token`, n - 1 in each tuple, most frequent first."""
        return [gram[1:] for gram in self._best.get(token, ())]


def build_part(
    text: NDArray[Any], ends: IntArray, vocab_size: int, progress: Progress = silent, *, n: int = N, most: int = MOST
) -> dict[str, NDArray[Any]]:
    """Find the `most` n-grams that occur in the most documents, of equals the earlier, for `FrequentNgrams`.

    text  token ids [m], documents one after another; ends int64 [d]: the offset after each. No n-gram crosses an end.

    Returns ngrams_starts int64 [vocab_size + 1] and ngrams_values int32 [m, n - 1]. N-grams with equal hashes count as
    equal."""
    text = np.asarray(text)
    document = np.repeat(np.arange(len(ends), dtype=np.int32), np.diff(ends, prepend=0))
    count = max(len(text) - n + 1, 0)
    place = np.flatnonzero(document[:count] == document[n - 1 :])
    key = np.zeros(count, np.uint64)
    for i in range(n):
        key = key * np.uint64(0x9E3779B97F4A7C15) + text[i : i + count].astype(np.uint64)
    progress(0.3)
    key = key[place]
    place = place[np.argsort(key, kind="stable")]  # Equal n-grams are now neighbours, in text order.
    key, document = np.sort(key), document[place]
    progress(0.9)
    is_first = np.append(True, key[1:] != key[:-1])[: len(key)]
    is_counted = is_first | np.append(True, document[1:] != document[:-1])[: len(key)]
    documents = np.bincount(is_first.cumsum()[is_counted] - 1)
    place = place[is_first]
    chosen = np.lexsort((place, -documents))[:most]
    chosen = chosen[np.argsort(text[place[chosen]], kind="stable")]
    place = place[chosen]
    per_token = np.bincount(text[place], minlength=vocab_size)
    progress(1.0)
    return {
        "ngrams_starts": np.concatenate([[0], np.cumsum(per_token)]).astype(np.int64),
        "ngrams_values": text[place[:, None] + np.arange(1, n)].astype(np.int32),
    }
