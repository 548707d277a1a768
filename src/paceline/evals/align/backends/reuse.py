"""Prefix reuse in our engine: a request whose prompt begins like an earlier one starts from its keys and values.

Align3's three requests share a growing prefix, Self-Refine's and a judge's begin with the same turns. When a row ends,
its slot of the cache is parked instead of freed; when a row starts, the parked slot that shares the longest beginning
with its prompt is wound back to it and taken over, and only the rest of the prompt is run.

It stands on three seams of the engine: `Decoder.cache` (here a cache that parks), `Drafter.start` and `Drafter.drop`
(which see a row between slot and first round), and `Row.slot` and `Row.cached`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from paceline.draft.base import Drafter
from paceline.errors import ModelError
from paceline.round import Round
from paceline.row import Request, Row
from paceline.target.base import Facts
from paceline.target.cache import RaggedCache
from paceline.target.decoder import Decoder
from paceline.tree import DraftTree, IntArray

SHORTEST, LEAST = 16, 0.25
"""Tokens, and the share of what a slot holds, that must be shared for it to be taken over: what is not shared is lost,
and another prompt might have gone on from it."""


class ParkingCache(RaggedCache):
    """A cache whose dropped rows stay until they are freed."""

    def drop_row(self, slot: int) -> None:
        """Keep the row; `free` is for good."""

    def free(self, slot: int) -> None:
        """Drop a row for good."""
        super().drop_row(slot)

    def wind_back(self, slot: int, length: int) -> None:
        """Forget all but the row's first `length` tokens; nothing is moved."""
        self._check(slot)
        self._lengths[slot] = min(length, self._lengths[slot])


class Reuse(Drafter):
    """Wraps a drafter and hands rows the parked slots. parked: slots kept at most; saved: tokens not run, by row id."""

    def __init__(self, inner: Drafter, parked: int):
        self.inner, self.name, self.needs = inner, inner.name, inner.needs
        self.weight_bytes = inner.weight_bytes
        self.saved: dict[int, int] = {}
        self._parked: OrderedDict[int, IntArray] = OrderedDict()
        self._most = parked
        self._cache: ParkingCache | None = None

    def bind(self, target: Facts) -> None:
        """Give the target a cache that parks. Raises ModelError unless target and drafter can do with it."""
        if not isinstance(target, Decoder):
            raise ModelError("prefix reuse needs a model that our own decoder runs; give --no-reuse")
        s = target.shape
        self._cache = ParkingCache(s.num_layers, s.num_kv_heads, s.head_dim, s.max_context, target.dtype, target.device)
        target.cache = self._cache
        self.inner.bind(target)
        self.needs = self.inner.needs
        if self.needs.hidden_layers or self.needs.callback_layer is not None or self.needs.resume_layer is not None:
            raise ModelError(f"{self.name} must see the states of every prompt token; give --no-reuse")

    def start(self, row: Request) -> None:
        assert isinstance(row, Row)  # this one runs in our engine alone
        slot, shared = self._best(row)
        if shared >= SHORTEST and shared >= LEAST * len(self._parked[slot]):
            self._take(row, slot, shared)
        self.saved[row.id] = row.cached
        self.inner.start(row)

    def _best(self, row: Row) -> tuple[int, int]:
        """The parked slot with the longest common beginning, and its length; the prompt's last token is always run."""
        shared = {slot: common(tokens, row.tokens[:-1]) for slot, tokens in self._parked.items()}
        slot = max(shared, key=lambda one: shared[one], default=-1)
        return slot, shared.get(slot, 0)

    def _take(self, row: Row, slot: int, shared: int) -> None:
        assert self._cache is not None
        self._cache.free(row.slot)
        del self._parked[slot]
        self._cache.wind_back(slot, shared)
        row.slot, row.cached = slot, shared

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        return self.inner.propose(rows)

    def observe(self, round: Round) -> None:
        self.inner.observe(round)

    def drop(self, row: Request) -> None:
        assert self._cache is not None
        assert isinstance(row, Row)
        self._parked[row.slot] = row.tokens[: row.cached].copy()
        while len(self._parked) > self._most:
            self._cache.free(self._parked.popitem(last=False)[0])
        self.inner.drop(row)


def common(a: IntArray, b: IntArray) -> int:
    """Length of the longest common beginning of two int64 arrays."""
    short = min(len(a), len(b))
    different = np.flatnonzero(a[:short] != b[:short])
    return int(different[0]) if len(different) else short
