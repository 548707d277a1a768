"""Suffix tree of bounded depth with counts: how often any run of tokens has been seen, and what goes on from it.

Knows sequences of tokens and nothing of rows or drafters. A token appended costs O(depth); the oldest sequence can be
taken out again, which leaves the tree as if it had never been there.

    tree = SuffixTree(depth=24)
    tree.append([1, 2, 3, 1, 2])
    tree.speculate([1, 2], most=4)            # 3 1: two tokens after two that match

The structure is suffix decoding's (Oliaro et al. 2025, arXiv 2411.04975; github.com/snowflakedb/ArcticInference), on
arrays: see `suffix_nodes.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.draft.text import suffix_nodes
from paceline.draft.text.suffix_nodes import COUNT, LENGTH, NODES, NONE, ROOT, START, TEXT
from paceline.tree import IntArray


class Speculation(NamedTuple):
    """What may follow a context.

    tokens  int64 [n]; parent int64 [n], 0 for the root and 1 for the first token; probs float64 [n], how likely the
    tree holds each to be. score: the sum of `probs`, the tokens it expects to be accepted. match: tokens of the
    context that it goes on from."""

    tokens: IntArray
    parent: IntArray
    probs: NDArray[np.float64]
    score: float
    match: int


class SuffixTree:
    """Counts of all runs of up to `depth` tokens in the sequences it holds.

    depth     longest run that is counted; a context and what is drafted after it share it.
    capacity  tokens to make room for, 92 bytes each at most; the arrays double when there are more."""

    def __init__(self, depth: int, capacity: int = 64):
        self.depth = depth
        self._lengths: deque[int] = deque()
        self._open = 0
        self._text = np.empty(0, np.int32)
        self._nodes = np.full((1, 9), NONE, np.int32)
        self._nodes[ROOT, COUNT] = self._nodes[ROOT, LENGTH] = 0
        self._heads = np.empty(0, np.int32)
        self._counts = np.array([1, NONE, 0], np.int64)
        # Entry k is the node of the last k tokens of the open sequence.
        self._active = np.full(depth + 1, NONE, np.int32)
        self._active[0] = ROOT
        self._make_room(max(capacity, 1))

    def __len__(self) -> int:
        return sum(self._lengths) + self._open

    def append(self, tokens: Sequence[int] | IntArray) -> None:
        """Put `tokens`, each 0 or more, after the open sequence."""
        if self._counts[TEXT] + len(tokens) > len(self._text):
            self._make_room(len(tokens))
        # A fresh int32 array whatever comes in, so that only one version is ever compiled.
        new = np.array(tokens, np.int32)
        suffix_nodes.append(self._nodes, self._heads, self._text, self._counts, self._active, new)
        self._open += len(tokens)

    def close(self) -> None:
        """End the open sequence; what is appended next begins another."""
        self._lengths.append(self._open)
        self._open = 0
        self._active[1:] = NONE

    def remove(self) -> None:
        """Take out the oldest closed sequence."""
        length = self._lengths.popleft()
        start = int(self._counts[TEXT]) - self._open - sum(self._lengths) - length
        suffix_nodes.remove(self._nodes, self._heads, self._text, self._counts, start, length, self.depth)

    def speculate(
        self,
        context: Sequence[int] | IntArray,
        most: int,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        branch: bool = False,
    ) -> Speculation:
        """The continuation of the highest score, of all that begin after a suffix of `context`, of equals that of the
        longest suffix.

        After m matched tokens min(most, floor(factor * m + offset)) tokens, each at least `min_prob` likely: the
        heaviest path, or the likeliest nodes of all with `branch`. A match at the very end of the open sequence is not
        counted, for nothing has followed it yet."""
        key = np.array(context[-(self.depth - 1) :] if self.depth > 1 else context[:0], np.int32)
        sizes = float(factor), float(offset), float(min_prob)
        tokens, parent, probs, match = suffix_nodes.speculate(
            self._nodes, self._heads, self._text, self._active, key, most, *sizes, branch
        )
        return Speculation(tokens, parent, probs, float(probs.sum()), int(match))

    def _make_room(self, more: int) -> None:
        """Room for `more` tokens; the text of sequences that were taken out goes."""
        live = len(self)
        capacity = max(2 * (live + more), len(self._text))
        gone = int(self._counts[TEXT]) - live
        text = np.empty(capacity, np.int32)
        text[:live] = self._text[gone : gone + live]
        nodes = np.empty((2 * capacity + 2, 9), np.int32)
        nodes[: len(self._nodes)] = self._nodes
        nodes[: len(self._nodes), START] -= gone
        self._text, self._nodes = text, nodes
        self._counts[TEXT] = live
        self._heads = np.full(1 << (2 * capacity).bit_length(), NONE, np.int32)
        suffix_nodes.hash_all(self._nodes, self._heads, self._text, self._counts[NODES])


def warm_up() -> None:
    """Compile, or load from the cache of earlier runs, so that no later call has to."""
    tree = SuffixTree(4, 1)
    tree.append([0, 1, 0, 1, 2])
    tree.close()
    tree.speculate([0, 1], 2)
    tree.remove()
