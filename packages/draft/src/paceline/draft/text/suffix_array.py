"""Suffix array of a corpus: all places of a run of tokens are one range of a sorted array.

It is built by prefix doubling (Larsson and Sadakane 1999, "Faster Suffix Sorting"). When suffixes are sorted by their
first n tokens, the ranks of the suffixes n tokens later sort them by their first 2n. Suffixes that already differ from
all others keep their place."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.core.tree import IntArray
from paceline.draft.text.store import Progress, Store, silent
from paceline.draft.text.suffix_tree import Speculator, insert
from paceline.errors import StoreError

Positions = NDArray[np.int32]


def sorted_positions(text: NDArray[Any], ends: IntArray, report: Progress) -> Positions:
    """Sort the suffixes of `text` int [n]. Returns the start of each, int32 [n]. A suffix ends with its document.

    ends  the offset after each document, int64 [d]."""
    # Each document is followed by its own symbol, below all tokens, so that two suffixes differ there at the latest.
    string = np.insert(text.astype(np.int32) + np.int32(len(ends)), ends, np.arange(len(ends), dtype=np.int32))
    order = np.argsort(string, kind="stable").astype(np.int32)
    # rank[s]: index in `order` of the first suffix with the same first `length` tokens as suffix s.
    rank = np.empty(len(string), np.int32)
    open_ = np.arange(len(string), dtype=np.int32)  # indices in `order` of suffixes that still equal others
    key: NDArray[Any] = string[order]
    length = 1
    while len(open_):
        is_first = np.append(True, key[1:] != key[:-1])
        rank[order[open_]] = np.maximum.accumulate(np.where(is_first, open_, 0))
        open_ = open_[~(is_first & np.append(is_first[1:], True))]
        suffix = order[open_]
        key = (rank[suffix].astype(np.int64) << 32) + rank[suffix + length]
        sorting = np.argsort(key, kind="stable")
        order[open_], key = suffix[sorting], key[sorting]
        length *= 2
        report(1 - len(open_) / len(string))
    place = np.cumsum(string >= len(ends), dtype=np.int32) - np.int32(1)  # place in the text, without the symbols
    return place[order[len(ends) :]]


MOST_TOKENS = 2**31 - 1
HITS = 1000
"""Default largest number of a key's places that are read."""


def build_part(
    text: NDArray[Any], ends: IntArray, vocab_size: int, progress: Progress = silent
) -> dict[str, NDArray[Any]]:
    """Make the array of a corpus store: `suffix_positions` int32 [n], the start of each suffix, in sorted order.

    text  int [n], documents one after another, each ending with the end token; ends as in `sorted_positions`.

    Raises StoreError for a corpus of 2^31 tokens or more."""
    if len(text) + len(ends) > MOST_TOKENS:
        raise StoreError(f"a suffix array holds {MOST_TOKENS:,} tokens, and the corpus has {len(text):,}; split it")
    positions = sorted_positions(np.asarray(text), np.asarray(ends, np.int64), lambda done: progress(0.95 * done))
    progress(1.0)
    return {"suffix_positions": positions}


class SuffixArray(Speculator):
    """Finds and continues runs of tokens in a corpus.

    text       int [n]; every document ends with the same token, the last token of the text.
    ends       int64 [d], the offset after each document.
    positions  int32 [n], as `build_part` makes it.
    end_token  the token with which every document ends; -1 in an empty corpus."""

    def __init__(self, text: NDArray[Any], ends: IntArray, positions: Positions):
        # Mapped arrays have another type, for which everything would be compiled again.
        self.text, self.ends, self.positions = np.asarray(text), np.asarray(ends), np.asarray(positions)
        self.end_token = int(self.text[-1]) if len(self.text) else -1

    @classmethod
    def of(cls, store: Store) -> Self:
        """Open the suffix array of a corpus store. StoreError if the store was built without one."""
        return cls(store.array("text"), store.array("ends"), store.array("suffix_positions"))

    def warm_up(self) -> None:
        """Compile `longest` and `heaviest` now, or load them from the cache of earlier runs."""
        self.longest([0, 0])
        self.heaviest(0, 0, 0, 1, 1, frozenset())

    def find(self, key: Sequence[int] | IntArray) -> tuple[int, int]:
        """The range (lo, hi) of the `positions` at which `key` occurs, hi - lo times."""
        lo, hi = _find(self.text, self.ends, self.positions, np.asarray(key, np.int64))
        return int(lo), int(hi)

    def longest(self, context: Sequence[int] | IntArray, most: int = 16, least: int = 2) -> tuple[int, int, int]:
        """The longest suffix of `context`, `least` to `most` tokens, that occurs: (length, lo, hi), or (0, 0, 0)."""
        key = np.asarray(context[-most:], np.int64)
        length, lo, hi = _longest(self.text, self.ends, self.positions, key, least)
        return int(length), int(lo), int(hi)

    def places(self, lo: int, hi: int, most: int) -> Positions:
        """The places lo to hi - 1; if there are more than `most`, that many in even steps."""
        count = min(most, hi - lo)
        return self.positions[lo + np.arange(count) * (hi - lo) // max(count, 1)]

    def heaviest(
        self, lo: int, hi: int, skip: int, size: int, depth: int, ends: frozenset[int], most: int = HITS
    ) -> tuple[IntArray, IntArray, IntArray]:
        """A tree of the tokens that most often follow a key.

        lo, hi  range of the key's places, as of `find`. skip: number of the key's tokens.

        Returns tokens, parents (0 is the root, 1 the first node) and weights, int64 [n] each, heaviest first: at most
        `size` nodes, at most `depth` deep, none after a token of `ends` or the end of a document.

        most  number of places to read."""
        stop = np.array([self.end_token, *ends], np.int64)
        nodes, _ = likeliest(self.text, self.places(lo, hi, most), skip, size, depth, stop, 0.0, True)
        return nodes[:, TOKEN], nodes[:, PARENT], nodes[:, HI] - nodes[:, LO]

    def continuations(self, lo: int, hi: int, most: int, length: int, skip: int) -> NDArray[np.int32]:
        """The tokens after a key's places lo to hi - 1, int32 [m, length], with -1 after the end of a document.

        most  number of places to read.
        skip  number of the key's tokens."""
        places = self.places(lo, hi, most)
        ends = self.ends[np.searchsorted(self.ends, places, side="right")]
        read = places[:, None] + skip + np.arange(length)
        inside = read < ends[:, None]
        return np.where(inside, self.text[np.where(inside, read, 0)].astype(np.int32), -1)

    def _speculate(self, context: Sequence[int] | IntArray, *sizes: float) -> tuple[Any, ...]:
        """Draft as a suffix tree of the corpus would: sizes of ranges are its counts.

        Nothing follows the end of a document. The caller cuts `context` to the tree's depth. Of equally frequent
        continuations the smaller token comes first."""
        return _speculate(self.text, self.ends, self.positions, np.asarray(context, np.int64), *sizes)


@njit(cache=True)
def _longest(text, ends, positions, key, least):  # type: ignore[no-untyped-def]
    """SuffixArray.longest, by bisection: a suffix of n tokens occurs only if the suffix of n - 1 tokens does."""
    matched, place, below, above = 0, 0, least - 1, len(key)
    while below < above:
        length = (below + above + 1) // 2
        suffix = key[len(key) - length :]
        lo = _first(text, ends, positions, suffix, 0, len(positions), 0)
        if lo < len(positions) and _compare(text, ends, positions[lo], suffix) == 0:
            matched, place, below = length, lo, length
        else:
            above = length - 1
    return matched, place, _end_of(text, ends, positions, key[len(key) - matched :], place) if matched else 0


@njit(cache=True)
def _find(text, ends, positions, key):  # type: ignore[no-untyped-def]
    """The range of the suffixes that begin with `key`."""
    lo = _first(text, ends, positions, key, 0, len(positions), 0)
    return lo, _end_of(text, ends, positions, key, lo)


@njit
def _end_of(text, ends, positions, key, lo):  # type: ignore[no-untyped-def]
    """The end of the key's range, which begins at `lo`. Most ranges are short, so steps double from there."""
    step = 1
    while lo + step < len(positions) and _compare(text, ends, positions[lo + step], key) < 1:
        step *= 2
    return _first(text, ends, positions, key, lo + step // 2, min(lo + step, len(positions)), 1)


@njit
def _first(text, ends, positions, key, lo, hi, least):  # type: ignore[no-untyped-def]
    """The first index from `lo` on whose suffix compares as `least` or more; `hi` if there is none below `hi`."""
    while lo < hi:
        middle = (lo + hi) // 2
        if _compare(text, ends, positions[middle], key) < least:
            lo = middle + 1
        else:
            hi = middle
    return lo


@njit
def _compare(text, ends, begin, key):  # type: ignore[no-untyped-def]
    """Compare a suffix with a key: -1 is before, 0 begins with it, 1 is after. A document's end comes before tokens."""
    end_token = text[len(text) - 1]
    for i in range(len(key)):
        token = np.int64(text[begin + i])
        if token != key[i]:
            return -1 if token < key[i] else 1
        # Only a key with an end token inside can cross a document's end.
        if token == end_token and i + 1 < len(key):
            after = begin + i + 1
            if ends[np.searchsorted(ends, after)] == after:
                return -1
    return 0


@njit(cache=True)
def _speculate(text, ends, positions, context, most, factor, offset, min_prob, branch):  # type: ignore[no-untyped-def]
    best, match, best_score = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64)), 0, 0.0
    if len(text) == 0 or (len(context) and context[len(context) - 1] == text[len(text) - 1]):
        return best[0], best[1], best[2], match
    for length in range(1, len(context) + 1):
        lo, hi = _find(text, ends, positions, context[len(context) - length :])
        if lo == hi:
            break
        size = min(most, int(factor * length + offset))
        if size > 0:
            stop, depth = text[len(text) - 1 :].astype(np.int64), size  # Nothing follows an end token.
            nodes, probs = likeliest(text, positions[lo:hi], length, size, depth, stop, min_prob, branch)
            score = probs.sum()
            if len(nodes) and score >= best_score:
                best, match, best_score = (nodes[:, TOKEN].copy(), nodes[:, PARENT].copy(), probs), length, score
    return best[0], best[1], best[2], match


TOKEN, PARENT, _DEPTH, LO, HI = range(5)
"""Columns of a node. PARENT is 0 for the root, 1 for the first node. LO to HI - 1 are its places."""


@njit(cache=True)
def likeliest(text, positions, skip, size, deepest, stop, min_prob, branch):  # type: ignore[no-untyped-def]
    """Find up to `size` tokens that follow the places of a key of `skip` tokens. Returns nodes int64 [n, 5] and their
    probabilities.

    The nodes are the most frequent path, or with `branch` the likeliest nodes of all. Their probability is at least
    `min_prob`; they are at most `deepest` deep, and none is below a token of `stop`.

    A list in order of probability is read from the front, and the children of each node read are inserted. Places are
    sorted by what follows, so those of a token are a run. A run that is likely enough has at least `stride` places, so
    reading every `stride`th place after the last run finds all such runs."""
    nodes, probs = np.empty((size, 5), np.int64), np.empty(size, np.float64)
    num, read, prob, depth, lo, hi = 0, 0, 1.0, 0, 0, len(positions)
    while lo < hi:
        stride = max(1, int(min_prob / prob * (hi - lo)))
        begin, heaviest = lo, (0, 0, 0)
        while begin + stride <= hi:
            token, first, begin = _run(text, positions, begin, begin + stride - 1, hi, skip + depth)
            share = prob * ((begin - first) / (hi - lo))  # A ratio cannot round above `prob`.
            if share >= min_prob and branch:
                num = insert(nodes, probs, num, (token, read, depth + 1, first, begin), share)
            elif begin - first > heaviest[2] - heaviest[1]:
                heaviest = (token, first, begin)
        share = prob * ((heaviest[2] - heaviest[1]) / (hi - lo))
        if not branch and share >= min_prob:
            num = insert(nodes, probs, num, (heaviest[0], read, depth + 1, heaviest[1], heaviest[2]), share)
        while read < num and (nodes[read, _DEPTH] >= deepest or (stop == nodes[read, TOKEN]).any()):
            read += 1
        if read == num:
            break
        depth, lo, hi, prob = nodes[read, _DEPTH], nodes[read, LO], nodes[read, HI], probs[read]
        read += 1
    return nodes[:num], probs[:num]


@njit
def _run(text, positions, lo, at, hi, offset):  # type: ignore[no-untyped-def]
    """The token at `offset` from place `at`, and the range of the places within lo to hi - 1 that have it there."""
    token = text[positions[at] + offset]
    first, last = lo, at
    while first < last:
        middle = (first + last) // 2
        if text[positions[middle] + offset] < token:
            first = middle + 1
        else:
            last = middle
    step = 1
    while at + step < hi and text[positions[at + step] + offset] == token:
        step *= 2
    inside, outside = at + step // 2, min(at + step, hi)
    while outside - inside > 1:
        middle = (inside + outside) // 2
        if text[positions[middle] + offset] == token:
            inside = middle
        else:
            outside = middle
    return np.int64(token), first, outside
