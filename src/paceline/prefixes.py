"""Prefixes: keys and values of requests that ended, for later ones that begin alike. Knows nothing of the engine.

Each is a copy as long as its row, outside the batch's cache: rows that run never read past it, and what it takes is
what it weighs. The least recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch

from paceline.tree import IntArray

SHORTEST = 16
"""Fewest tokens worth copying instead of running them."""


class Prefix(NamedTuple):
    """Tokens int64 [n], and their keys and values [layers, 2, kv_heads, n, head_dim]."""

    tokens: IntArray
    kv: torch.Tensor


class Prefixes:
    """At most `most` of them, each of SHORTEST tokens or more.

    They are found by their first SHORTEST tokens: comparing each with each takes longer than the forwards of a small
    model as soon as there are a hundred rows."""

    def __init__(self, most: int):
        self.most = most
        self.nbytes = 0
        self._kept: OrderedDict[int, Prefix] = OrderedDict()
        self._alike: dict[bytes, dict[int, Prefix]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    def best(self, tokens: IntArray) -> tuple[int, Prefix | None]:
        """The one with the longest common beginning with `tokens`, and its length; 0 and None if that is short."""
        alike = self._alike.get(beginning(tokens), {})
        shared = {number: common(prefix.tokens, tokens) for number, prefix in alike.items()}
        number = max(shared, key=lambda one: shared[one], default=-1)
        if number < 0 or shared[number] < SHORTEST:
            return 0, None
        self._kept.move_to_end(number)
        return shared[number], self._kept[number]

    def has(self, tokens: IntArray) -> bool:
        """Whether one of them begins with all of `tokens`."""
        alike = self._alike.get(beginning(tokens), {})
        return any(common(prefix.tokens, tokens) == len(tokens) for prefix in alike.values())

    def add(self, tokens: IntArray, kv: torch.Tensor) -> None:
        """Keep one more, in place of those that it goes on from."""
        begins = beginning(tokens)
        for number, prefix in list(self._alike.get(begins, {}).items()):
            if common(prefix.tokens, tokens) == len(prefix.tokens):
                self._remove(number)
        while self._kept and len(self._kept) >= self.most:
            self.forget()
        self._kept[self._next] = self._alike.setdefault(begins, {})[self._next] = Prefix(tokens, kv)
        self.nbytes += kv.nbytes
        self._next += 1

    def forget(self) -> None:
        """Drop the one that was not used for longest."""
        self._remove(next(iter(self._kept)))

    def _remove(self, number: int) -> None:
        prefix = self._kept.pop(number)
        begins = beginning(prefix.tokens)
        del self._alike[begins][number]
        if not self._alike[begins]:
            del self._alike[begins]
        self.nbytes -= prefix.kv.nbytes


def beginning(tokens: IntArray) -> bytes:
    """The first SHORTEST tokens: texts with another beginning have too little in common."""
    return tokens[:SHORTEST].tobytes()


def common(a: IntArray, b: IntArray) -> int:
    """Length of the longest common beginning of two int64 arrays."""
    short = min(len(a), len(b))
    different = np.flatnonzero(a[:short] != b[:short])
    return int(different[0]) if len(different) else short
