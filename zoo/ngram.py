"""A 5-gram language model with interpolated modified Kneser-Ney smoothing: the baseline a trained model has to beat.

Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 4. Counts are NumPy
arrays sorted by a 64-bit hash of the n-gram, so tens of millions of tokens take a minute and a few gigabytes.

    model = NgramModel.fit(tokens, vocabulary=8192)
    model.log_probs(row)                 # natural logarithm of p(row[i] | row[:i]), i = 1, 2, ...

Doesn't know: text, tokenizers, neural networks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Floats = NDArray[np.float64]

_MIX = np.uint64(0x9E3779B97F4A7C15)


def _hashes(tokens: NDArray[np.integer], n: int) -> Keys:
    """Hash of every n-gram, in order: [len - n + 1]. Among 10^8 n-grams, collisions have a probability of 10^-3."""
    count = max(len(tokens) - n + 1, 0)
    keys = np.zeros(count, np.uint64)
    for place in range(n):
        keys = (keys ^ (keys >> np.uint64(29))) * _MIX + tokens[place : place + count].astype(np.uint64) + np.uint64(1)
    return (keys ^ (keys >> np.uint64(32))) * _MIX


@dataclass
class _Order:
    """Counts of one length: of n-grams, and of what follows each context of n - 1 tokens."""

    keys: Keys  # sorted
    counts: NDArray[np.int64]
    contexts: Keys  # sorted
    totals: Floats  # sum of the counts after a context
    left_over: Floats  # mass that the discounts free, sum over what follows
    discounts: Floats  # [4], by min(count, 3)

    @classmethod
    def of(cls, grams: Keys, contexts: Keys, counts: NDArray[np.int64]) -> _Order:
        """grams, contexts, counts: of every distinct n-gram."""
        order = np.argsort(grams)
        discounts = _discounts(counts)
        keys, where = np.unique(contexts, return_inverse=True)
        totals = np.bincount(where, weights=counts).astype(np.float64)
        freed = np.bincount(where, weights=discounts[np.minimum(counts, 3)]).astype(np.float64)
        return cls(grams[order], counts[order], keys, totals, freed, discounts)

    def mix(self, grams: Keys, contexts: Keys, lower: Floats) -> Floats:
        """p of each n-gram's last token: discounted counts, and what they leave of the shorter n-gram's `lower`."""
        count = _look_up(self.keys, self.counts, grams)
        total = _look_up(self.contexts, self.totals, contexts)
        freed = _look_up(self.contexts, self.left_over, contexts)
        kept = np.maximum(count - self.discounts[np.minimum(count, 3).astype(np.int64)], 0)
        return np.where(total > 0, (kept + freed * lower) / np.maximum(total, 1), lower)


def _discounts(counts: NDArray[np.int64]) -> Floats:
    """D for counts of 0, 1, 2 and 3 or more (Chen and Goodman 1999, equation 17); 0.75 where the text is too small."""
    n1, n2, n3, n4 = (int((counts == c).sum()) for c in (1, 2, 3, 4))
    if min(n1, n2, n3, n4) == 0:
        return np.array([0.0, 0.75, 0.75, 0.75])
    y = n1 / (n1 + 2 * n2)
    discounts = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    return np.clip(discounts, 0.0, [0.0, 1.0, 2.0, 3.0])


def _look_up(keys: Keys, values: NDArray[np.number], wanted: Keys) -> NDArray[np.number]:
    """values[k] where keys[k] is wanted, 0 where it is not there."""
    if not len(keys):
        return np.zeros(len(wanted), values.dtype)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    matches: NDArray[np.number] = np.where(keys[at] == wanted, values[at], 0)
    return matches


@dataclass
class NgramModel:
    """orders[n - 1] are the counts of length n: times seen for the longest, distinct left neighbours for the rest."""

    orders: list[_Order]
    vocabulary: int

    @classmethod
    def fit(cls, tokens: NDArray[np.integer], vocabulary: int, longest: int = 5) -> NgramModel:
        """tokens: one sequence, int [n]."""
        orders: list[_Order] = []
        first: NDArray[np.int64] | None = None  # first place of each distinct (n + 1)-gram
        for n in range(longest, 0, -1):
            if first is None:
                _, first, counts = np.unique(_hashes(tokens, n), return_index=True, return_counts=True)
                grams = _hashes(tokens, n)[first]
            else:
                inner = _hashes(tokens, n)[first + 1]
                grams, at, counts = np.unique(inner, return_index=True, return_counts=True)
                first = first[at] + 1
            contexts = _hashes(tokens, n - 1)[first] if n > 1 else np.zeros(len(first), np.uint64)
            orders.append(_Order.of(grams, contexts, counts))
        return cls(orders[::-1], vocabulary)

    def log_probs(self, row: NDArray[np.integer]) -> Floats:
        """log p(row[i] | row[:i]) for i = 1 .. len - 1; near the beginning, of the context there is."""
        p = np.full(len(row), 1 / self.vocabulary)
        for n, order in enumerate(self.orders, start=1):
            if len(row) < n:
                break
            contexts = _hashes(row, n - 1)[: len(row) - n + 1] if n > 1 else np.zeros(len(row), np.uint64)
            p[n - 1 :] = order.mix(_hashes(row, n), contexts, p[n - 1 :])
        logs: Floats = np.log(p[1:])
        return logs
