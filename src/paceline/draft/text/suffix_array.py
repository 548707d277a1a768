"""Suffix array of a corpus: every place where a run of tokens stands, as one range of a sorted array.

Knows the tokens and the documents of a corpus store and nothing of rows or drafts. Built once, kept in the store,
mapped into memory, 4 bytes a token beside the text. `sorting.py` builds it.

    array = SuffixArray.of(open_store("build/corpus", kind="corpus"))
    lo, hi = array.find([278, 13958])                 # hi - lo places
    array.continuations(lo, hi, 10, 4, skip=2)        # what stands after ten of them, 4 tokens each

Suffixes are sorted as far as their document goes: what ends sooner comes first, and equal suffixes of two documents
come in the documents' order. No match and no continuation crosses from one document into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.draft.text.sorting import Positions, sorted_positions
from paceline.draft.text.store import Store
from paceline.draft.text.suffix_tree import Speculation
from paceline.errors import StoreError
from paceline.tree import IntArray

MOST_TOKENS = 2**31 - 1


def build_part(
    text: NDArray[Any], ends: IntArray, vocab_size: int, progress: Callable[[float], None] | None = None
) -> dict[str, NDArray[Any]]:
    """The array for a corpus store: `suffix_positions` int32 [n], where each suffix begins, in sorted order.

    text        int [n], documents one after another, each ending with the end token.
    ends        int64 [d], the offset after each document.
    vocab_size  not needed here; every part is given it.
    progress    called with the share that is done, 0 to 1.

    Raises StoreError for a corpus of 2^31 tokens or more."""
    if len(text) + len(ends) > MOST_TOKENS:
        raise StoreError(f"a suffix array holds {MOST_TOKENS:,} tokens, and the corpus has {len(text):,}; split it")
    report = progress or (lambda done: None)
    positions = sorted_positions(np.asarray(text), np.asarray(ends, np.int64), lambda done: report(0.95 * done))
    report(1.0)
    return {"suffix_positions": positions}


class SuffixArray:
    """Finds runs of tokens in a corpus.

    text       int [n]; every document ends with the same token, the last one of the text.
    ends       int64 [d], the offset after each document.
    positions  int32 [n], as `build_part` makes it."""

    def __init__(self, text: NDArray[Any], ends: IntArray, positions: Positions):
        # Plain arrays: a mapped one is a class of its own, for which everything would be compiled again.
        self.text, self.ends, self.positions = np.asarray(text), np.asarray(ends), np.asarray(positions)

    @classmethod
    def of(cls, store: Store) -> SuffixArray:
        """The array of a corpus store; StoreError if the store was built without."""
        return cls(store.array("text"), store.array("ends"), store.array("suffix_positions"))

    @property
    def end_token(self) -> int:
        """The token every document ends with; -1 in an empty corpus."""
        return int(self.text[-1]) if len(self.text) else -1

    def find(self, key: Sequence[int] | IntArray) -> tuple[int, int]:
        """The range (lo, hi) of `positions` where `key` stands; hi - lo is how often. Empty: lo == hi."""
        lo, hi = _find(self.text, self.ends, self.positions, np.asarray(key, np.int64))
        return int(lo), int(hi)

    def longest(self, context: Sequence[int] | IntArray, most: int = 16, least: int = 2) -> tuple[int, int, int]:
        """(length, lo, hi) of the longest suffix of `context`, `least` to `most` tokens, that occurs; else 0, 0, 0."""
        key = np.asarray(context[-most:], np.int64)
        length, lo, hi = _longest(self.text, self.ends, self.positions, key, least)
        return int(length), int(lo), int(hi)

    def continuations(self, lo: int, hi: int, most: int, length: int, skip: int) -> NDArray[np.int32]:
        """int32 [m, length]: the tokens after at most `most` of the places lo..hi, -1 after a document's end.

        skip  tokens of the key, which the places begin with. Of more than `most` places, an even spread."""
        out = np.full((min(most, hi - lo), length), -1, np.int32)
        _gather(self.text, self.ends, self.positions, lo, hi, skip, out)
        return out

    def speculate(
        self,
        context: Sequence[int] | IntArray,
        most: int,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        branch: bool = False,
    ) -> Speculation:
        """What `SuffixTree.speculate` would, had the corpus been put into a tree: the same counts, read off ranges.

        Nothing is speculated after the end of a document. All of `context` is looked up, so cut it to a tree's depth
        beforehand; of continuations of one count the smaller token goes first."""
        key = np.asarray(context, np.int64)
        tokens, parent, probs, match = _speculate(
            self.text, self.ends, self.positions, key, most, float(factor), float(offset), float(min_prob), branch
        )
        return Speculation(tokens, parent, probs, float(probs.sum()), int(match))


# Looking up ----------------------------------------------------------------------------------------------------------


@njit(cache=True)
def _longest(text, ends, positions, key, least):  # type: ignore[no-untyped-def]
    """What occurs with n tokens occurs with n - 1, so the length is found by halving."""
    found, place, below, above = 0, 0, least - 1, len(key)
    while below < above:
        length = (below + above + 1) // 2
        suffix = key[len(key) - length :]
        lo = _first(text, ends, positions, suffix, 0, len(positions), 0)
        if lo < len(positions) and _compare(text, ends, positions[lo], suffix) == 0:
            found, place, below = length, lo, length
        else:
            above = length - 1
    return found, place, _behind(text, ends, positions, key[len(key) - found :], place) if found else 0


@njit(cache=True)
def _find(text, ends, positions, key):  # type: ignore[no-untyped-def]
    """Range of the suffixes that begin with `key`."""
    lo = _first(text, ends, positions, key, 0, len(positions), 0)
    return lo, _behind(text, ends, positions, key, lo)


@njit
def _behind(text, ends, positions, key, lo):  # type: ignore[no-untyped-def]
    """Where the range that begins at `lo` ends. Most ranges are short, so the search strides from there."""
    step = 1
    while lo + step < len(positions) and _compare(text, ends, positions[lo + step], key) < 1:
        step *= 2
    return _first(text, ends, positions, key, lo + step // 2, min(lo + step, len(positions)), 1)


@njit
def _first(text, ends, positions, key, lo, hi, least):  # type: ignore[no-untyped-def]
    """First place from `lo` on whose suffix compares `least` or more; `hi` if none below it does."""
    while lo < hi:
        middle = (lo + hi) // 2
        if _compare(text, ends, positions[middle], key) < least:
            lo = middle + 1
        else:
            hi = middle
    return lo


@njit
def _compare(text, ends, begin, key):  # type: ignore[no-untyped-def]
    """-1, 0 or 1: the suffix comes before the key, begins with it, or comes after. A document's end is before all."""
    end_token = text[len(text) - 1]
    for i in range(len(key)):
        token = np.int64(text[begin + i])
        if token != key[i]:
            return -1 if token < key[i] else 1
        # Only a key with an end token inside can reach over a document's end.
        if token == end_token and i + 1 < len(key):
            after = begin + i + 1
            if ends[np.searchsorted(ends, after)] == after:
                return -1
    return 0


@njit(cache=True)
def _gather(text, ends, positions, lo, hi, skip, out):  # type: ignore[no-untyped-def]
    """SuffixArray.continuations."""
    for i in range(len(out)):
        place = positions[lo + i * (hi - lo) // len(out)]
        begin, end = place + skip, ends[np.searchsorted(ends, place, side="right")]
        for j in range(min(out.shape[1], end - begin)):
            out[i, j] = text[begin + j]


# Speculating ---------------------------------------------------------------------------------------------------------


@njit(cache=True)
def _speculate(text, ends, positions, context, most, factor, offset, min_prob, branch):  # type: ignore[no-untyped-def]
    """SuffixArray.speculate: tokens, parents, probabilities and the length of the match."""
    best, match, best_score = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64)), 0, 0.0
    if len(text) == 0 or (len(context) and context[len(context) - 1] == text[len(text) - 1]):
        return best[0], best[1], best[2], match
    for length in range(1, len(context) + 1):
        lo, hi = _find(text, ends, positions, context[len(context) - length :])
        if lo == hi:
            break
        size = min(most, int(factor * length + offset))
        if size > 0:
            draft = _likeliest(text, positions, lo, hi, length, size, min_prob, branch)
            score = draft[2].sum()
            if len(draft[0]) and score >= best_score:
                best, match, best_score = draft, length, score
    return best[0], best[1], best[2], match


_TOKEN, _PARENT, _DEPTH, _LO, _HI = range(5)


@njit
def _likeliest(text, positions, lo, hi, skip, size, min_prob, branch):  # type: ignore[no-untyped-def]
    """One list in order of probability, read from the front: a node's children are put in after it.

    Places are sorted by what follows, so a token's places are a run. One that is likely enough is at least `stride`
    long, and looking at every place that far from the last run finds all of them."""
    nodes, probs = np.empty((size, 5), np.int64), np.empty(size, np.float64)
    num, read, prob, depth = 0, 0, 1.0, 0
    while True:
        stride = max(1, int(min_prob / prob * (hi - lo)))
        begin, heaviest = lo, (0, 0, 0)
        while begin + stride <= hi:
            token, first, begin = _run(text, positions, begin, begin + stride - 1, hi, skip + depth)
            share = prob * (begin - first) / (hi - lo)
            if share >= min_prob and branch:
                num = _insert(nodes, probs, num, (token, read, depth + 1, first, begin), share)
            elif begin - first > heaviest[2] - heaviest[1]:
                heaviest = (token, first, begin)
        share = prob * (heaviest[2] - heaviest[1]) / (hi - lo)
        if not branch and share >= min_prob:
            num = _insert(nodes, probs, num, (heaviest[0], read, depth + 1, heaviest[1], heaviest[2]), share)
        while read < num and nodes[read, _TOKEN] == text[len(text) - 1]:  # nothing follows an end token
            read += 1
        if read == num:
            return nodes[:num, _TOKEN], nodes[:num, _PARENT], probs[:num]
        depth, lo, hi, prob = nodes[read, _DEPTH], nodes[read, _LO], nodes[read, _HI], probs[read]
        read += 1


@njit
def _run(text, positions, lo, at, hi, offset):  # type: ignore[no-untyped-def]
    """The token `offset` after the place `at`, and the range of the places in lo..hi that have it there."""
    token = text[positions[at] + offset]
    first, last = lo, at
    while first < last:
        middle = (first + last) // 2
        if text[positions[middle] + offset] < token:
            first = middle + 1
        else:
            last = middle
    inside, outside = at, hi
    while outside - inside > 1:
        middle = (inside + outside) // 2
        if text[positions[middle] + offset] == token:
            inside = middle
        else:
            outside = middle
    return np.int64(token), first, outside


@njit
def _insert(nodes, probs, num, node, prob):  # type: ignore[no-untyped-def]
    """Put a node after all that are as likely or likelier; what does not fit falls off. How many there are then."""
    if num == len(nodes) and probs[num - 1] >= prob:
        return num
    i = min(num, len(nodes) - 1)
    while i > 0 and probs[i - 1] < prob:
        nodes[i] = nodes[i - 1]
        probs[i] = probs[i - 1]
        i -= 1
    for column in range(5):
        nodes[i, column] = node[column]
    probs[i] = prob
    return num + 1 if num < len(nodes) else num
