"""Shared by drafters that copy: continuations, cuts at end tokens, and memories of finished requests.

    self._past = BySalt(lambda: TwoHalves(config.past, make))
    self._past.of(row.params.cache_salt).learn(row)"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from paceline.core.request import Request
from paceline.core.tree import IntArray
from paceline.errors import MethodError


def continuation(text: IntArray, start: int, count: int) -> IntArray:
    """The `count` tokens that follow `text[:start]`, start < len(text).

    At the end of the text the copy goes on from its own beginning, as in LZ77, so a periodic text continues its period.
    """
    return text[start : start + count] if start + count <= len(text) else np.resize(text[start:], count)


def up_to_end(drafted: IntArray, ends: frozenset[int], *, keep: bool) -> IntArray:
    """Cut `drafted` before its first token of `ends`, or after it if `keep`."""
    for i, token in enumerate(drafted.tolist()):
        if token in ends:
            return drafted[: i + keep]
    return drafted


class TextMemory(Protocol):
    """A memory of texts. Its length is their number of tokens."""

    def __len__(self) -> int: ...
    def learn(self, text: IntArray) -> None: ...


M = TypeVar("M", bound=TextMemory)


class TwoHalves(Generic[M]):
    """A memory of the last finished requests, in two halves, the newer half first.

    Texts go into the newer half. When it is full, it becomes the older half, so at least the last tokens / 2 are known.

    tokens  number of tokens of both halves; there are no halves for 0 or 1.
    make    function that returns an empty memory for a number of tokens."""

    def __init__(self, tokens: int, make: Callable[[int], M]):
        self._half, self._make = tokens // 2, make
        try:
            self.halves = [make(self._half), make(self._half)] if self._half else []
        except (MemoryError, ValueError, OverflowError):  # The latter two mean: beyond the address space.
            raise MethodError(f"past is {tokens}; there is no memory for that many tokens.") from None

    def learn(self, row: Request, *more: int) -> None:
        """Remember the last tokens / 2 tokens of a request, if it is complete. more: tokens to add after it."""
        if not (self.halves and row.is_complete):
            return
        text = np.append(row.tokens, np.array(more, np.int64))[-self._half :]
        newer = self.halves[0]
        if len(newer) and len(newer) + len(text) > self._half:
            self.halves = [self._make(self._half), newer]
        self.halves[0].learn(text)


SALTS = 16
"""Largest number of salts that are remembered; clients may send any number."""

L = TypeVar("L")


class BySalt(Generic[L]):
    """Keeps what a drafter learns apart by `cache_salt`. Otherwise the number of drafted tokens would tell a client
    about another client's answers. Of more than SALTS salts, the least recently used is forgotten.

    make  function that returns an empty memory."""

    def __init__(self, make: Callable[[], L]):
        self._make, self._kept = make, {"": make()}

    def of(self, salt: str) -> L:
        """Return the memory of the requests with this salt."""
        learnt = self._kept.pop(salt) if salt in self._kept else self._make()
        self._kept[salt] = learnt
        if len(self._kept) > SALTS:
            del self._kept[next(iter(self._kept))]
        return learnt
