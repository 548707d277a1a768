"""The memory of finished requests that drafters share which copy from them."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from paceline.core.request import Request
from paceline.core.tree import IntArray
from paceline.errors import MethodError


class TextMemory(Protocol):
    """Holds texts, so many tokens."""

    def __len__(self) -> int: ...
    def learn(self, text: IntArray) -> None: ...


M = TypeVar("M", bound=TextMemory)


class TwoHalves(Generic[M]):
    """Finished requests in two halves of a memory of `tokens` tokens, the newer half first; none for 0 or 1 tokens.

    Texts go into the newer half. When it is full, it replaces the older one, so the last tokens / 2 or more are always
    known. make: an empty memory for a number of tokens."""

    def __init__(self, tokens: int, make: Callable[[int], M]):
        self._half, self._make = tokens // 2, make
        try:
            self.halves = [make(self._half), make(self._half)] if self._half else []
        except (MemoryError, ValueError, OverflowError):  # the latter two: beyond the address space
            raise MethodError(f"past is {tokens}; there is no memory for that many tokens.") from None

    def learn(self, row: Request, *more: int) -> None:
        """Remember the last tokens / 2 of a request, and the tokens `more` after it, if it is complete."""
        if not (self.halves and row.is_complete):
            return
        text = np.append(row.tokens, np.array(more, np.int64))[-self._half :]
        newer = self.halves[0]
        if len(newer) and len(newer) + len(text) > self._half:
            self.halves = [self._make(self._half), newer]
        self.halves[0].learn(text)
