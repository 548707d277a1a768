"""Room: which requests fit into the cache's memory, and which rows are preempted when rows outgrow it."""

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

import torch
from rich.filesize import decimal

from paceline.core.request import Row
from paceline.core.rules import parse_bytes
from paceline.engine.prefixes import MOST_STATES, Prefixes
from paceline.errors import PromptError, printable
from paceline.target.base import Target
from paceline.target.cache import RaggedCache, in_granules

log = logging.getLogger("paceline.memory")

SLACK = 64
"""Places in the cache after a row's tokens, for its draft and padding; a larger draft raises the number."""
SHARE = 0.5
"""Default share of free memory for the cache."""
STATES = 4
"""A prefix's recurrent states may take one part in STATES of the memory."""
MOST_PREFIXES = 64
"""Largest number of prefixes, or four times the batch if that is more."""


class Room:
    """The memory of a target's cache. A target without a `RaggedCache` has room for all rows.

    budget       largest number of bytes; None: SHARE of the free memory.
    state_bytes  largest number of bytes kept for a token beside its keys and values: states for drafters.
    prefixes     prefixes kept beside the cache. They make room when rows need it."""

    def __init__(self, target: Target, budget: int | str | None, *, max_batch: int, state_bytes: int = 0):
        self.target, self.max_batch, self._beside = target, max_batch, state_bytes
        self.cache = target.cache if isinstance(target.cache, RaggedCache) else None
        self.budget = int(SHARE * free_memory(target.device)) if budget is None else parse_bytes(budget)
        state = self.cache.empty_state() if self.cache is not None else None
        most = max(self.budget // STATES // state.nbytes, 2) if state is not None else 0
        self.prefixes = Prefixes(max(MOST_PREFIXES, 4 * max_batch), min(most, MOST_STATES))
        self._slack = SLACK

    @property
    def longest(self) -> int:
        """Largest number of tokens, prompt and answer, of a row that has all the memory to itself."""
        lengths = range(self.target.max_context + 1)
        if self.cache is None:
            return lengths[-1]
        return max(bisect_right(lengths, self.budget, key=lambda n: self._size(1, n + SLACK)) - 1, 0)

    def check(self, length: int) -> None:
        """Raise PromptError if a prompt of `length` tokens leaves no memory for an answer, even alone."""
        if self.cache is None or length < (most := self.longest):
            return
        need = self._size(1, length + 1 + SLACK)
        raise PromptError(
            f"The prompt of {length} tokens and one new one need {decimal(need)} of cache, and cache_memory is "
            f"{decimal(self.budget)}, which holds {most}: shorten the prompt, or give it more."
        )

    def has_room(self, row: Row, running: Sequence[Row], joining: int = 1) -> bool:
        """Make the cache large enough for `row`; if it must grow, at once for all rows that are `joining`. Returns
        False if the row must wait for others to end."""
        if self.cache is None:
            return True
        need = max(r.expected_length for r in (*running, row)) + self._slack
        return self._fit(len(self.cache.held) + 1, need, running, joining - 1) or not running

    def enter(self, row: Row) -> None:
        """Give a row its slot."""
        if self.cache is not None:  # A lone row may exceed the budget if it must.
            self.cache.reserve(min(row.expected_length, self.cache.max_context), len(self.cache.held) + 1, double=False)
        row.slot = self.target.add_row(row.expected_length)
        row.cached = 0

    @property
    def _cache(self) -> RaggedCache:
        assert self.cache is not None
        return self.cache

    def _size(self, slots: int, capacity: int) -> int:
        """Bytes of a cache with `slots` slots of `capacity` tokens, and of the states beside it."""
        return self._cache.nbytes_of(slots, capacity) + slots * in_granules(capacity) * self._beside

    @property
    def _used(self) -> int:
        """Bytes of the cache as it is, and of the states beside it."""
        return self._size(self._cache.num_slots, self._cache.capacity)

    def preempt(self, running: Sequence[Row]) -> list[Row]:
        """Make the cache large enough for this round. Returns the rows that lost their slots: each time, the youngest
        row of the client with the most rows."""
        if self.cache is None or not running:
            return []
        rows, preempted = list(running), list[Row]()
        while (need := max(map(len, rows)) + self._slack) > self.cache.capacity or self._used > self.budget:
            if self._fit(len(self.cache.held), need, rows) or len(rows) == 1:
                break
            held = Counter(row.client for row in rows)
            row = max(rows, key=lambda row: (held[row.client], row.id))
            rows.remove(row)
            self.release(row)
            preempted.append(row)
        return preempted

    def note_draft(self, row: Row, nodes: int) -> None:
        """Make room for a draft of `nodes` nodes after `row`. The first large draft may exceed the budget; from the
        next round on, the slack covers its size."""
        if nodes + SLACK // 2 > self._slack:
            self._slack = in_granules(nodes) + SLACK
            if self.cache is not None:
                self.cache.reserve(min(len(row) + nodes + SLACK // 2, self.cache.max_context + 1), double=False)

    def release(self, row: Row) -> None:
        """Free the slot of a row that will be run again."""
        self.target.drop_row(row.slot)
        row.slot, row.cached = -1, 0
        row.preempted += 1

    def _fit(self, slots: int, capacity: int, running: Sequence[Row], more: int = 0) -> bool:
        """Reshape the cache to `slots` rows of `capacity` tokens, and if the budget allows, for `more` rows that will
        join. Rows may move to other slots. Returns False if there is no memory."""
        cache = self._cache
        if len(cache.held) > len(running) and cache.held:
            slots = max(slots, cache.held[-1] + 1)  # Another engine's rows must not move.
        if slots <= cache.num_slots and capacity <= cache.capacity and self._used <= self.budget:
            return True
        many = max(slots, min(max(2 * cache.num_slots, slots + more), self.max_batch))
        slot_counts = many, max(slots, cache.num_slots), slots
        lengths = max(capacity, min(2 * cache.capacity, cache.max_context + 1)), max(capacity, cache.capacity), capacity
        left = self.budget - self.prefixes.nbytes
        shapes = [shape for shape in product(slot_counts, lengths) if self._size(*shape) <= left]
        for shape in dict.fromkeys([*shapes, (slots, capacity)]):
            if self._size(*shape) > self.budget:
                return False
            while len(self.prefixes) and self._size(*shape) + self.prefixes.nbytes > self.budget:
                self.prefixes.forget()
            try:
                moved = cache.reshape(*shape)
            except (MemoryError, RuntimeError) as error:  # The machine has less memory than the budget.
                log.warning("no memory for a cache of %s: %s", decimal(self._size(*shape)), printable(error))
                continue
            for row in running:
                row.slot = moved[row.slot]
            return True
        return False

    def make_room(self, length: int, more: int = 0) -> bool:
        """Forget prefixes until a prefix of `length` tokens and `more` bytes fits into the budget. Returns whether it
        fits."""
        left = self.budget - self._used - length * (self._cache.token_bytes + self._beside) - more
        while left >= 0 and self.prefixes.nbytes > left:
            self.prefixes.forget()
        return left >= 0


def free_memory(device: torch.device) -> int:
    """Free bytes of the accelerator, or of this machine or container; 4 GB if they are unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = []
    with suppress(OSError):  # Only Linux has these files.
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return min([*free, *_free_in_group(Path("/sys/fs/cgroup"))], default=4 * 10**9)


def _free_in_group(group: Path) -> list[int]:
    """Free bytes within each limit of a control group, version 2 or 1. The group counts cached pages of files as used,
    but they make room when memory is needed, so they count as free here."""
    free = []
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # The group has another version, or no limit ("max").
            most, now = (int((group / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (group / used).with_name("memory.stat").read_text().splitlines())
            free.append(most - now + int(stat.get(cached, 0)))
    return free
