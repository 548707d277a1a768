"""Memory: which requests fit into the cache, which rows are preempted, and whose keys and values are reused."""

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.filesize import decimal

from paceline.core.request import Row
from paceline.core.round import Round
from paceline.core.rules import parse_bytes
from paceline.core.tree import IntArray
from paceline.engine.prefix_cache import BLOCK, PrefixCache
from paceline.errors import PacelineError, PromptError, printable
from paceline.target.base import Target
from paceline.target.cache import RaggedCache, in_granules
from paceline.target.recurrent import State

log = logging.getLogger("paceline.memory")

SHORTEST = 16  # fewest tokens that are copied instead of run
MOST_STATES = 4  # recurrent states of a prefix, which are as large as a long text's keys and values
SLACK = 64  # cache tokens of a row beyond its own, for its draft and padding, until a larger draft comes
SHARE = 0.5  # default share of free memory for the cache
MOST_PREFIXES = 64  # most prefixes, or four times the batch if that is more


class Share(NamedTuple):
    """The conditions for sharing keys and values: the other request has the same salt, and the target's states of
    `layers`, which this one's drafter reads of every token."""

    salt: str = ""
    layers: frozenset[int] = frozenset()


@dataclass(eq=False)
class Prefix:
    """Tokens int64 [n], and their keys and values [layers, 2, kv_heads, n, head_dim]. begins: their `beginning`.

    hidden  states [n, H] by layer, for drafters that read them of every token.
    states  recurrent states by number of tokens, the least recently used first. The text can be reused up to one of
            them alone; without any, it can be reused up to every token."""

    tokens: IntArray
    kv: torch.Tensor
    begins: tuple[str, bytes]
    states: dict[int, State] = field(default_factory=dict)
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states."""
        states, hidden = self.states.values(), self.hidden.values()
        return self.kv.nbytes + sum(one.nbytes for one in states) + sum(one.nbytes for one in hidden)

    def reusable(self, most: int) -> int:
        """The number of the first `most` tokens that can be reused."""
        return max((n for n in self.states if n <= most), default=0) if self.states else most

    def take(self, length: int) -> tuple[torch.Tensor, State | None]:
        """Keys and values of the first `length` tokens, and the state after them."""
        state = self.states.pop(length, None)
        if state is not None:
            self.states[length] = state
        return self.kv[:, :, :, :length], state


class Prefixes:
    """Keys and values of requests that ended, for later ones that begin alike.

    most    largest number of prefixes, each of SHORTEST tokens or more; the least recently used is forgotten.
    nbytes  bytes of all prefixes.

    Each is a copy outside the batch's cache, so that attention does not read it. Texts whose first SHORTEST tokens
    differ are not compared further: with a hundred rows, that takes longer than the forwards of a small model."""

    def __init__(self, most: int):
        self.most = most
        self.nbytes = 0
        self._prefixes: list[Prefix] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._prefixes)

    def _shared(self, tokens: IntArray, share: Share) -> list[tuple[int, Prefix]]:
        """The prefixes with the `beginning` of `tokens`, each after the length of the common beginning."""
        begins, layers = beginning(tokens, share.salt), share.layers
        alike = (one for one in self._prefixes if one.begins == begins and layers <= one.hidden.keys())
        return [(common(one.tokens, tokens), one) for one in alike]

    def best(self, tokens: IntArray, share: Share = Share()) -> tuple[int, Prefix | None]:
        """The longest beginning of `tokens` that can be reused: (length, prefix), or (0, None) if it is too short."""
        every = ((prefix.reusable(shared), prefix) for shared, prefix in self._shared(tokens, share))
        shared, prefix = max(every, key=lambda pair: pair[0], default=(0, None))
        if prefix is None or shared < SHORTEST:
            return 0, None
        self._prefixes.remove(prefix)
        self._prefixes.append(prefix)
        return shared, prefix

    def common(self, tokens: IntArray, share: Share = Share()) -> int:
        """Length of the longest common beginning with `tokens`, reusable or not."""
        return max((shared for shared, _ in self._shared(tokens, share)), default=0)

    def add(
        self, tokens: IntArray, kv: torch.Tensor, states: Mapping[int, State] = {}, salt: str = "",
        hidden: Mapping[int, torch.Tensor] = {},
    ) -> None:  # fmt: skip
        """Add a prefix. It replaces those that are its own beginnings, and takes over their states."""
        states = {**states}
        for shared, prefix in self._shared(tokens, Share(salt)):
            if shared == len(prefix.tokens) and prefix.hidden.keys() <= hidden.keys():
                self._remove(prefix)
                states = prefix.states | states
        while self._prefixes and len(self._prefixes) >= self.most:
            self.forget()
        states = dict([*states.items()][-MOST_STATES:])
        self._prefixes.append(Prefix(tokens, kv, beginning(tokens, salt), states, hidden))
        self.nbytes += self._prefixes[-1].nbytes

    def forget(self) -> None:
        self._remove(self._prefixes[0])

    def _remove(self, prefix: Prefix) -> None:
        self._prefixes.remove(prefix)
        self.nbytes -= prefix.nbytes


def beginning(tokens: IntArray, salt: str) -> tuple[str, bytes]:
    """The key of a text: its salt and its first SHORTEST tokens. Texts with different keys share too little to be
    reused, or must not share."""
    return salt, tokens[:SHORTEST].tobytes()


def common(a: IntArray, b: IntArray) -> int:
    """Length of the longest common beginning of two int64 arrays."""
    short = min(len(a), len(b))
    different = np.flatnonzero(a[:short] != b[:short])
    return int(different[0]) if len(different) else short


class Memory:
    """The cache's memory in an engine. For a target without a `RaggedCache` it only adds and drops rows.

    budget  most bytes; None: SHARE of the free memory.
    reuse   prompts that begin alike share keys and values.
    disk    folder and most bytes of prompts' keys and values that later processes reuse; None: they are not stored.
    state_bytes  most bytes of the states that are kept for a token, for drafters that read them of every token."""

    def __init__(
        self, target: Target, budget: int | str | None, *, max_batch: int, reuse: bool,
        disk: tuple[str | Path, int] | None = None, state_bytes: int = 0,
    ):  # fmt: skip
        self.target, self.max_batch = target, max_batch
        cache = getattr(target, "cache", None)
        self.cache = cache if isinstance(cache, RaggedCache) else None
        self.budget = int(SHARE * free_memory(target.device)) if budget is None else parse_bytes(budget)
        self.reuse = reuse and self.cache is not None
        self.prefixes = Prefixes(max(MOST_PREFIXES, 4 * max_batch))
        self._slack = SLACK
        self._fresh: dict[int, tuple[Row | None, int]] = {}
        self._shares: dict[int, Share] = {}
        self._hidden: dict[int, list[torch.Tensor]] = {}  # by row: of its tokens in the cache, [n, L * H]
        self._recalled: list[tuple[Row, Mapping[int, torch.Tensor]]] = []
        self._beside = state_bytes if self.reuse else 0
        self.disk: PrefixCache | None = None
        if disk is not None:
            if target.recurrent:
                raise PacelineError(f"prefix_cache stores keys and values, and {target.name} has recurrent states too")
            if not self.reuse or self.cache is None:
                raise PacelineError(
                    "prefix_cache stores what prompts share, and here they share nothing: it needs reuse, a cache of "
                    "rows of any length, and a drafter that does not read whole prompts"
                )
            layers, two, _, heads, _, dim = self.cache.kv.shape
            self.disk = PrefixCache(disk[0], target, (layers, two, heads, BLOCK, dim), disk[1])

    @property
    def longest(self) -> int:
        """Most tokens of a row, prompt and answer, that is alone and has all the memory."""
        lengths = range(self.target.max_context + 1)
        if self.cache is None:
            return lengths[-1]
        return max(bisect_right(lengths, self.budget, key=lambda n: self._size(1, n + SLACK)) - 1, 0)

    def check(self, length: int) -> None:
        """Raise PromptError if a prompt of that many tokens leaves no memory for an answer's first, even alone."""
        if self.cache is None or length < (most := self.longest):
            return
        need = self._size(1, length + 1 + SLACK)
        raise PromptError(
            f"The prompt of {length} tokens and one new one need {decimal(need)} of cache, and cache_memory is "
            f"{decimal(self.budget)}, which holds {most}: shorten the prompt, or give it more."
        )

    def has_room(self, row: Row, running: Sequence[Row], joining: int = 1) -> bool:
        """Make the cache large enough for one more row; if it must grow, for all that are `joining`. Returns False if
        the row must wait for others to end."""
        if self.cache is None:
            return True
        need = max(r.expected_length for r in (*running, row)) + self._slack
        return self._fit(len(self.cache.held) + 1, need, running, joining - 1) or not running

    def start(self, row: Row, running: Sequence[Row], layers: Collection[int] | None = ()) -> None:
        """Give a row its slot. `ready` holds it back while an older row computes keys and values that both need.

        layers  layers whose states its drafter reads of every token. None: the row can reuse nothing."""
        if self.cache is not None:  # with nobody else there, a row may go above the budget, but no further than it must
            self.cache.reserve(min(row.expected_length, self.cache.max_context), len(self.cache.held) + 1, double=False)
        row.slot = self.target.add_row(row.expected_length)
        row.cached = 0
        self._shares[row.id] = share = Share(row.params.cache_salt, frozenset(layers or ()))
        if not self.reuse:
            return
        if share.layers:
            self._hidden[row.id] = []
        if layers is None or len(row) <= SHORTEST or row.params.prompt_logprobs is not None:
            return
        tokens = row.tokens[:-1]
        self._load(tokens, share)
        least, lead = self.prefixes.best(tokens, share)[0] + SHORTEST, None
        for other in self._alike(row, running):
            shared = common(other.tokens, tokens)
            if other.cached >= shared:  # else it will have them all
                shared = self._cache.reusable(other.slot, shared)
            if other.id < row.id and shared > least:
                least, lead = shared, other
        self._fresh[row.id] = lead, least
        if self.target.recurrent:
            # Later prompts may branch off at this prompt's end, and where it diverges from an earlier one.
            marks = [(row, len(tokens)), (row, self.prefixes.common(tokens, share)), *([(lead, least)] if lead else [])]
            for one, length in marks:
                self._cache.mark(one.slot, length)

    @property
    def _cache(self) -> RaggedCache:
        assert self.cache is not None
        return self.cache

    def _size(self, slots: int, capacity: int) -> int:
        """Bytes of a cache with `slots` slots of `capacity` tokens, and of the states beside it."""
        return self._cache.nbytes_of(slots, capacity) + slots * in_granules(capacity) * self._beside

    @property
    def _used(self) -> int:
        """Bytes of the cache, and of the states beside it."""
        return self._size(self._cache.num_slots, self._cache.capacity)

    def _load(self, tokens: IntArray, share: Share) -> None:
        """Load the stored prefix of `tokens` if it is longer than the one in memory. The disk has no states."""
        if self.disk is not None and not share.layers:
            kv = self.disk.load(tokens, self.prefixes.best(tokens, share)[0], share.salt)
            if kv is not None and self._make_room(kv.shape[3]):
                self.prefixes.add(tokens[: kv.shape[3]].copy(), kv, salt=share.salt)

    def keep_states(self, round: Round) -> None:
        """Keep the states of the tokens that a round committed, for rows whose drafters read them."""
        for i, row in enumerate(round.rows):
            if row.id in self._hidden:
                states = [round.committed(i, layer) for layer in sorted(self._shares[row.id].layers)]
                self._hidden[row.id].append(torch.cat(states, -1))

    def recalled(self) -> list[tuple[Row, Mapping[int, torch.Tensor]]]:
        """Rows that reuse tokens since the last call, with the states [reused, H] by layer that their drafters read."""
        recalled, self._recalled = self._recalled, []
        return recalled

    def ready(self, running: Sequence[Row]) -> Sequence[Row]:
        """The rows that may run in this round."""
        if not self._fresh:
            return running
        for row in running:
            lead, shared = self._fresh.get(row.id, (row, 1 << 62))
            if lead is None or lead not in running or lead.cached >= shared:
                del self._fresh[row.id]
                try:
                    self._take_over(row, running)
                except (MemoryError, RuntimeError):  # then its tokens are run
                    log.exception("request %d could not reuse the keys and values of its prompt", row.id)
        return [row for row in running if row.id not in self._fresh]

    def _take_over(self, row: Row, running: Sequence[Row]) -> None:
        """Copy the keys and values of the row or prefix with the longest common beginning. The last token is run."""
        tokens, cache = row.tokens[:-1], self._cache
        shared, prefix = self.prefixes.best(tokens, self._shares[row.id])
        reach = {r: cache.reusable(r.slot, min(r.cached, common(r.tokens, tokens))) for r in self._alike(row, running)}
        lead = max(reach, key=reach.__getitem__, default=row)
        live = reach.get(lead, 0)
        if max(shared, live) < SHORTEST:
            return
        if prefix is not None and shared >= live:
            (kv, state), hidden = prefix.take(shared), prefix.hidden
        else:
            kv, state = cache.copy(lead.slot, live), cache.states(lead.slot).get(live)
            hidden = self._states_of(lead) if row.id in self._hidden else {}
        cache.paste(row.slot, kv, state)
        row.cached = kv.shape[3]
        row.reused += row.cached
        if row.id in self._hidden:
            reused = {layer: hidden[layer][: row.cached] for layer in sorted(self._shares[row.id].layers)}
            self._hidden[row.id] = [torch.cat(list(reused.values()), -1)]
            self._recalled.append((row, reused))

    def _states_of(self, row: Row) -> dict[int, torch.Tensor]:
        """States [n, H] by layer of a row's tokens in the cache; none if its drafter reads none."""
        layers = sorted(self._shares[row.id].layers)
        if not layers or not self._hidden.get(row.id):
            return {}
        return dict(zip(layers, torch.cat(self._hidden[row.id]).chunk(len(layers), -1), strict=True))

    def _alike(self, row: Row, running: Sequence[Row]) -> list[Row]:
        """The running rows whose texts begin as that of `row`."""
        (salt, layers), shares = self._shares[row.id], self._shares
        begins, able = beginning(row.tokens, salt), [one for one in running if layers <= shares[one.id].layers]
        return [other for other in able if beginning(other.tokens, shares[other.id].salt) == begins]

    def preempt(self, running: Sequence[Row]) -> list[Row]:
        """Make the cache large enough for this round. Returns the rows that lost their slots for it: the youngest of
        the client with the most rows."""
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
        """Make room for a draft of `nodes` after `row`. The first large draft may take the cache above the budget; from
        the next round on the slack covers its size."""
        if nodes + SLACK // 2 > self._slack:
            self._slack = in_granules(nodes) + SLACK
            if self.cache is not None:
                self.cache.reserve(min(len(row) + nodes + SLACK // 2, self.cache.max_context + 1), double=False)

    def release(self, row: Row) -> None:
        """Free the slot of a row that will be run again."""
        self.target.drop_row(row.slot)
        self._fresh.pop(row.id, None)
        self._hidden.pop(row.id, None)
        row.slot, row.cached = -1, 0
        row.preempted += 1

    def _fit(self, slots: int, capacity: int, running: Sequence[Row], more: int = 0) -> bool:
        """Reshape the cache to `slots` rows of `capacity` tokens, or to more if the budget allows, for `more` rows that
        will join. Rows may move to other slots. Returns False if there is no memory."""
        cache = self._cache
        if len(cache.held) > len(running) and cache.held:
            slots = max(slots, cache.held[-1] + 1)  # another engine's rows must not move
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
            except (MemoryError, RuntimeError) as error:  # the machine has less than the budget says
                log.warning("no memory for a cache of %s: %s", decimal(self._size(*shape)), printable(error))
                continue
            for row in running:
                row.slot = moved[row.slot]
            return True
        return False

    def end(self, row: Row) -> None:
        """Free a row's slot. Its keys and values are copied for later requests if they fit into the budget."""
        self._fresh.pop(row.id, None)
        try:
            if self.reuse and row.finish_reason != "error" and row.cached >= SHORTEST:
                self._store(row)
                if self.disk is not None and self.cache is not None:
                    prompt = row.tokens[: min(row.cached, row.prompt_length)]
                    self.disk.store(prompt, partial(self.cache.copy, row.slot), row.params.cache_salt)
        except Exception:  # the row's answer stands, and other rows must not suffer
            log.exception("request %d is not kept for reuse", row.id)
        finally:
            self._hidden.pop(row.id, None)
            self._shares.pop(row.id, None)
            self.target.drop_row(row.slot)

    def _store(self, row: Row) -> None:
        tokens, share, states = row.tokens[: row.cached].copy(), self._shares[row.id], self._cache.states(row.slot)
        size = sum(state.nbytes for state in states.values())
        if self.prefixes.common(tokens, share) < len(tokens) and self._make_room(row.cached, size):
            kv, hidden = self._cache.copy(row.slot, row.cached), self._states_of(row)
            self.prefixes.add(tokens, kv, states, share.salt, hidden)

    def _make_room(self, length: int, more: int = 0) -> bool:
        """Forget prefixes until one of `length` tokens and `more` bytes fits into the budget. Returns whether it
        fits."""
        left = self.budget - self._used - length * (self._cache.token_bytes + self._beside) - more
        while left >= 0 and self.prefixes.nbytes > left:
            self.prefixes.forget()
        return left >= 0


def free_memory(device: torch.device) -> int:
    """Free bytes of the accelerator, or of this machine or container; 4 GB if that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = []
    with suppress(OSError):  # not Linux
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return min([*free, *_free_in_group(Path("/sys/fs/cgroup"))], default=4 * 10**9)


def _free_in_group(group: Path) -> list[int]:
    """Free bytes in the limits of a control group, of version 2 or 1. Pages of files that are not in use count as used
    there, but make room when memory is wanted. After a model was read, they are most of it."""
    free = []
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # no such version, or no limit in it ("max")
            most, now = (int((group / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (group / used).with_name("memory.stat").read_text().splitlines())
            free.append(most - now + int(stat.get(cached, 0)))
    return free
