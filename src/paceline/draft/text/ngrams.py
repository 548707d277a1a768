"""n-gram stores: the tokens that followed a token in this request, in the model's answers, in finished requests.

The first two databases of Hierarchy Drafting (Cho et al. 2025, arXiv 2502.05609) and the pool of lookahead decoding
(Fu et al. 2024, arXiv 2402.02057). The key of all stores is one token; `after(token)` gives what follows, best first.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from paceline.core.tree import IntArray
from paceline.draft.text.store import Progress, Store, silent

Gram = tuple[int, ...]

N = 5  # tokens of an n-gram in a store on disk; the published setting
MOST = 100_000  # n-grams a store on disk keeps; the published setting


def grams(text: IntArray, n: int) -> Iterator[Gram]:
    tokens = text.tolist()
    return zip(*(tokens[i:] for i in range(n)), strict=False)


class RecentNgrams:
    """D_c: the tokens that followed each token, newest first.

    n     number of tokens of an n-gram, the key included.
    ways  number of n-grams of a key. Of more, the one that was not seen for longest is forgotten.
    read  number of tokens of the text given to `update` that are left out, from its beginning."""

    def __init__(self, n: int, ways: int, read: int = 0):
        self.n, self.ways = n, ways
        self._read, self._tokens = read, 0
        self._by_key: dict[int, OrderedDict[Gram, None]] = {}

    def __len__(self) -> int:
        """Number of tokens of the texts that were learnt."""
        return self._tokens

    def update(self, text: IntArray) -> None:
        """Add the n-grams that end in the new tokens of `text` int64 [m], the whole text so far."""
        self.learn(text[self._read :])
        self._read = max(self._read, len(text) - self.n + 1)  # the last n - 1 tokens begin none that is complete

    def learn(self, text: IntArray) -> None:
        self._tokens += len(text)
        for gram in grams(text, self.n):
            self.add(gram)

    def add(self, gram: Gram) -> None:
        """Add an n-gram, or make it the newest."""
        same_key = self._by_key.setdefault(gram[0], OrderedDict())
        same_key[gram] = None
        same_key.move_to_end(gram)
        if len(same_key) > self.ways:
            same_key.popitem(last=False)

    def after(self, token: int) -> list[Gram]:
        """The tokens that followed `token`, n - 1 in each tuple, newest first."""
        return [gram[1:] for gram in reversed(self._by_key.get(token, {}))]


class FrequentNgrams:
    """D_m: the n-grams that stand in most documents of a corpus, most frequent first; read only.

    starts  int64 [V + 1]. N-grams that begin with token t are rows starts[t] to starts[t + 1] of `values`.
    values  the tokens after the first, int32 [m, n - 1]."""

    def __init__(self, starts: NDArray[np.int64], values: NDArray[np.int32]):
        self._starts, self._values = starts, values

    @classmethod
    def of(cls, store: Store) -> Self:
        """The n-grams of a store; StoreError if it was built without them."""
        return cls(store.array("ngrams_starts"), store.array("ngrams_values"))

    def after(self, token: int) -> Iterator[Gram]:
        """The tokens that followed `token`, n - 1 in each tuple, most frequent first."""
        begin, end = self._starts[token : token + 2].tolist() if token < len(self._starts) - 1 else (0, 0)
        return (tuple(self._values[row].tolist()) for row in range(begin, end))


class PastNgrams:
    """A growing D_m, at most `ways` n-grams of a key. Those in most texts come first, the latest first among equals."""

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
    """The `most` n-grams that stand in most documents, for `FrequentNgrams`; the earlier first among equals.

    text  token ids [m], documents one after another; ends int64 [d]: the offset after each. No n-gram crosses an end.

    Returns ngrams_starts int64 [vocab_size + 1] and ngrams_values int32 [m, n - 1]. They are told apart by a hash."""
    text = np.asarray(text)
    document = np.repeat(np.arange(len(ends), dtype=np.int32), np.diff(ends, prepend=0))
    count = max(len(text) - n + 1, 0)
    place = np.flatnonzero(document[:count] == document[n - 1 :])
    key = np.zeros(count, np.uint64)
    for i in range(n):
        key = key * np.uint64(0x9E3779B97F4A7C15) + text[i : i + count].astype(np.uint64)
    progress(0.3)
    key = key[place]
    place = place[np.argsort(key, kind="stable")]  # equal n-grams side by side, in the order of the text
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
