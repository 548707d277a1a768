"""The ragged KV cache: each row has its own slot and length.

One tensor [layers, 2, slots, kv_heads, capacity, head_dim] holds all keys and values. A tree's nodes are written after
their row's tokens. `commit` moves the accepted path's nodes together; for a chain nothing moves. Rows are never
realigned, and never padded on the left. A cache that is too small doubles its capacity or its number of slots, so a
token is copied a constant number of times on average. `reshape` lays the rows out anew within a memory budget."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from paceline.core.clock import Clock
from paceline.kernels.ops import Pair
from paceline.kernels.records import PART, Forward, padded
from paceline.kernels.rows import top_tokens
from paceline.target.base import Needs, Target
from paceline.target.layout import Layout, PathPlan

if TYPE_CHECKING:
    from paceline.target.recurrent import Recurrence, RecurrentState, State

GRANULE = 64
"""The capacity is a multiple of this number of tokens."""


def in_granules(length: int) -> int:
    """Round a number of tokens up to a capacity."""
    return -(-length // GRANULE) * GRANULE


PerLayer = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
"""Views of each layer's keys, and of each layer's values."""


class RaggedCache:
    """Keys and values of rows that come and go.

    kv          [layers, 2, slots, kv_heads, capacity, head_dim]. When the cache grows, it is replaced. A layer with
                larger heads has each in several places of heads; a layer with fewer heads leaves places empty.
    recurrent   the states of layers without keys and values, if there are any."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, max_context: int, dtype: torch.dtype,
        device: torch.device | str,
    ):  # fmt: skip
        self.max_context = max_context
        self.recurrent: RecurrentState | None = None
        self._lengths: list[int] = []
        self._free: list[int] = []
        self._written: dict[int, int] = {}  # by slot: number of tokens up to the last write
        # Memory must be zeroed: masked values are multiplied by 0, and 0 times NaN is NaN.
        self.kv = torch.zeros(layers, 2, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._views_of: tuple[int, int, int] | None = None
        self._views: PerLayer = ((), ())

    def empty(self) -> RaggedCache:
        """Make a cache of the same layers, without rows and memory."""
        layers, _, _, heads, _, dim = self.kv.shape
        made = RaggedCache(layers, heads, dim, self.max_context, self.kv.dtype, self.kv.device)
        if self.recurrent is not None:
            made.recurrent = copy(self.recurrent)
            made.recurrent.rows = {}
        return made

    @property
    def capacity(self) -> int:
        """Number of tokens for which a slot has room."""
        return self.kv.shape[4]

    @property
    def num_slots(self) -> int:
        """Number of slots, used or free."""
        return self.kv.shape[2]

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + self.num_slots * self._slot_bytes

    @property
    def _slot_bytes(self) -> int:
        """Bytes of a row's three states: the present state, the state after a piece of a prompt, and a kept state."""
        return 0 if self.recurrent is None else 3 * self.recurrent.nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        layers, two, _, heads, _, dim = self.kv.shape
        return layers * two * heads * dim * self.kv.element_size()

    @property
    def held(self) -> list[int]:
        """Slots that hold a row, in order."""
        free = set(self._free)
        return [slot for slot in range(len(self._lengths)) if slot not in free]

    def nbytes_of(self, slots: int, capacity: int) -> int:
        """Bytes of a cache with `slots` slots of `capacity` tokens."""
        return slots * (self.token_bytes * in_granules(capacity) + self._slot_bytes)

    @torch.inference_mode()  # A cache that has grown in a forward is an inference tensor.
    def add_row(self, expected_length: int) -> int:
        """Take the lowest free slot for an empty row, with memory for `expected_length` tokens."""
        if not self._free:
            self._free.append(len(self._lengths))
            self._lengths.append(0)
        slot = min(self._free)
        self.reserve(min(expected_length, self.max_context))
        if self.recurrent is not None:
            self.recurrent.add_row(slot)
        self._free.remove(slot)  # This comes last, because `reserve` may find no memory.
        self._lengths[slot] = 0
        end = self._written.pop(slot, 0) if self.kv.device.type == "cpu" else None
        self.kv[:, :, slot, :, :end].zero_()  # An earlier row may have left NaN.
        return slot

    def drop_row(self, slot: int) -> None:
        self._check(slot)
        if self.recurrent is not None:
            self.recurrent.drop_row(slot)
        self._free.append(slot)
        while self._free and len(self._lengths) - 1 in self._free:
            self._free.remove(len(self._lengths) - 1)
            self._lengths.pop()

    def length(self, slot: int) -> int:
        """Number of committed tokens of a row."""
        self._check(slot)
        return self._lengths[slot]

    def _check(self, slot: int) -> None:
        if not 0 <= slot < len(self._lengths) or slot in self._free:
            raise ValueError(f"slot {slot} holds no row")

    def reserve(self, length: int, slots: int = 0, *, double: bool = True) -> None:
        """Grow until a row of `length` tokens and `slots` slots fit, and all slots in use.

        double  grow to twice the size, so that growing is rare; False: no further than needed."""
        wanted, slots, capacity = max(slots, len(self._lengths)), self.num_slots, self.capacity
        if wanted > slots:
            slots = max(wanted, 2 * slots if double else 0)
        if length > capacity:
            capacity = in_granules(max(length, min(2 * capacity, self.max_context + 1) if double else 0))
        if (slots, capacity) == (self.num_slots, self.capacity):
            return
        old = self.kv
        self._views_of = None
        self.kv = old.new_zeros(*old.shape[:2], slots, old.shape[3], capacity, old.shape[5])
        # All is copied, because uncommitted nodes may lie after the longest row.
        self.kv[:, :, : old.shape[2], :, : old.shape[4]] = old

    def take_memory(self, other: RaggedCache) -> None:
        """Take over the memory of another cache, if it has the same layers and no rows."""
        mine, theirs = ((kv.dtype, kv.device, *kv.shape[:2], kv.shape[3], kv.shape[5]) for kv in (self.kv, other.kv))
        if mine == theirs and not self.held and not other.held:
            self.kv, self._written = other.kv, other._written

    @torch.inference_mode()
    def reshape(self, slots: int, capacity: int) -> dict[int, int]:
        """Move the committed tokens of all rows to memory with `slots` slots of `capacity` tokens, and drop all else.

        Returns new slots by old slots: the same if all still exist, else 0, 1, 2 and so on. The old memory is freed
        before the new memory is allocated, but the rows' tokens exist twice for a moment. Without memory for the new
        shape, an error is raised and the cache stays as it was."""
        held = self.held
        slots, capacity = max(slots, len(held)), in_granules(max(capacity, *self._lengths, 0))
        new_slot = {old: new for new, old in enumerate(held)}
        if not held or held[-1] < slots:
            new_slot = {slot: slot for slot in held}
        rows = {slot: self.copy(slot, self._lengths[slot]) for slot in held}
        layers, two, old_slots, heads, old_capacity, dim = self.kv.shape
        self._views_of, self._views = None, ((), ())  # Views hold the old memory.
        self.kv = self.kv.new_empty(layers, two, 0, heads, 0, dim)
        try:
            self.kv = self.kv.new_zeros(layers, two, slots, heads, capacity, dim)
        except (MemoryError, RuntimeError):
            self.kv = self.kv.new_zeros(layers, two, old_slots, heads, old_capacity, dim)
            new_slot = {slot: slot for slot in held}
            raise
        finally:
            self._written.clear()
            self._lengths = [0] * (max(new_slot.values(), default=-1) + 1)
            self._free = sorted(set(range(len(self._lengths))) - set(new_slot.values()))
            for slot, kv in rows.items():
                self.paste(new_slot[slot], kv)
            if self.recurrent is not None:
                self.recurrent.move(new_slot)
        return new_slot

    @torch.inference_mode()
    def copy(self, slot: int, length: int) -> torch.Tensor:
        """Copy keys and values of a row's first `length` tokens: [layers, 2, kv_heads, length, head_dim]."""
        self._check(slot)
        return self.kv[:, :, slot, :, :length].clone(memory_format=torch.contiguous_format)

    @torch.inference_mode()
    def paste(self, slot: int, kv: torch.Tensor, state: State | None = None) -> None:
        """Replace the row's tokens by those of a `copy`, which must fit, and its state by a copy of `state`."""
        self._check(slot)
        if self.recurrent is not None and state is not None:
            self.recurrent.rows[slot].now = state.clone()
        length = kv.shape[3]
        self.kv[:, :, slot, :, :length] = kv
        self._lengths[slot] = length
        self._written[slot] = max(length, self._written.get(slot, 0))

    def states(self, slot: int) -> dict[int, State]:
        """The row's kept states and its present state, by number of tokens; none without recurrent layers. The row goes
        on to change its present state."""
        return {} if self.recurrent is None else self.recurrent.states(slot, self.length(slot))

    def empty_state(self) -> State | None:
        """A state of no tokens; None without recurrent layers."""
        return None if self.recurrent is None else self.recurrent.empty()

    def reusable(self, slot: int, most: int) -> int:
        """How many of a row's first `most` tokens another row can take over: with states, up to the last of them."""
        return most if self.recurrent is None else max((n for n in self.states(slot) if n <= most), default=0)

    def mark(self, slot: int, length: int) -> None:
        """Make the row's first `length` tokens `reusable`, as soon as it has them."""
        if self.recurrent is not None and length > self.length(slot):
            self.recurrent.mark(slot, length)

    def writer(self, layout: Layout, *, recorded: bool = False) -> Writer:
        """Open the cache for the planned forward. It grows if necessary.

        recorded  the forward is a CUDA graph: all rows fit, and it reads the places from the layout when it runs."""
        if not recorded:
            self.reserve(max(layout.reach.values()))
            for slot, end in layout.reach.items():
                self._written[slot] = max(end, self._written.get(slot, 0))
        groups = [self._read(g.first, g.last, g.keys) for g in layout.groups]
        made = Writer(self.kv, layout, groups, indexed=recorded)
        if self.recurrent is not None:
            made.recurrence = self.recurrent.begin(layout, [self._lengths[s.slot] for s in layout.segments])
        return made

    def _read(self, first: int, last: int, keys: int) -> PerLayer:
        """Keys and values of slots `first` to `last` - 1, up to `keys` tokens, layer by layer.

        The last result is kept, because decoding reads the same views many times, and making two views for each layer
        takes longer than all else between two forwards."""
        where = (first, last, keys)
        if where != self._views_of:
            whole = self.kv[:, :, first:last, :, :keys]
            self._views_of, self._views = where, (whole[:, 0].unbind(0), whole[:, 1].unbind(0))
        return self._views

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but a row's first `length` tokens. ValueError if the row has a state, which cannot forget."""
        if self.recurrent is not None and length < self.length(slot):
            raise ValueError("a recurrent state cannot forget its last tokens")
        self._lengths[slot] = min(length, self.length(slot))

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep nodes `path` (ascending from 0) of the segment just written to `slot` as the row's next tokens."""
        self._gather(slot, path)
        if self.recurrent is not None:
            self.recurrent.commit(slot, self._lengths[slot], path)
        self._lengths[slot] += len(path)

    def arrange(self, slot: int, nodes: Sequence[int]) -> None:
        """Move uncommitted `nodes`, numbered from the row's end, to the places right after the row, in order."""
        self._gather(slot, nodes)
        if self.recurrent is not None:
            self.recurrent.arrange(slot, nodes)

    @torch.inference_mode()  # A cache that has grown in a forward is an inference tensor.
    def _gather(self, slot: int, nodes: Sequence[int]) -> None:
        self._check(slot)
        length, row = self._lengths[slot], self.kv[:, :, slot]
        first = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        if first < len(nodes):
            source = torch.tensor(list(nodes[first:]), device=row.device) + length
            row[:, :, :, length + first : length + len(nodes)] = row.index_select(3, source)


class Writer:
    """A forward's access to the cache: `write` a layer's new keys and values, then `read` those of a group.

    indexed   whether to write by index on the device, never by slice."""

    def __init__(self, kv: torch.Tensor, layout: Layout, groups: Sequence[PerLayer], *, indexed: bool = False):
        self._kv, self._indexed = kv, indexed
        self._layout = layout
        self._groups = groups
        self._one: PerLayer | None = None
        self._here: dict[int, torch.Tensor] = {}
        self.recurrence: Recurrence | None = None

    def here(self, table: torch.Tensor) -> torch.Tensor:
        """The rows [N, 1, D] of a rotary table [positions, D] for the nodes' positions. All layers share them."""
        if id(table) not in self._here:
            self._here[id(table)] = table[self._layout.positions].unsqueeze(1)
        return self._here[id(table)]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of the packed nodes, [N + padding, kv_heads, head_dim] each."""
        keys, values = (one.reshape(len(one), -1, self._kv.shape[5]) for one in (keys, values))
        count = keys.shape[1]
        if len(self._layout.spans) == 1 and not self._indexed:
            to_keys, to_values = self._only_row()
            to_keys[layer][:count].copy_(keys.transpose(0, 1))
            to_values[layer][:count].copy_(values.transpose(0, 1))
        else:
            kv, slots, at = self._kv[layer], self._layout.slots, self._layout.at
            kv[0, slots, :count, at] = keys
            kv[1, slots, :count, at] = values

    def _only_row(self) -> PerLayer:
        """The slices, layer by layer, to which a forward with a single row writes."""
        if self._one is None:
            ((slot, end),) = self._layout.reach.items()
            here = self._kv[:, :, slot, :, end - self._layout.num_nodes - self._layout.padding : end]
            self._one = (here[:, 0].unbind(0), here[:, 1].unbind(0))
        return self._one

    @cached_property
    def header(self) -> array[int]:
        """This forward's addresses and sizes, a `Forward` of `kernels/records.py`, for compiled code."""
        kv, layout = self._kv, self._layout
        layer, values = (kv.stride(i) * kv.element_size() for i in (0, 1))
        nodes = (one.data_ptr() for one in (layout.positions, layout.slots, layout.at))
        paths = () if layout.paths is None else (*layout.paths.header, *self._spread(layout.paths))
        return array("q", Forward(kv.data_ptr(), layer, values, *kv.shape[3:], *nodes, *paths))

    def _spread(self, paths: PathPlan) -> tuple[int, ...]:
        """Set `Forward.spread`, and make the arrays of its parts, where whole key heads are too few for the threads."""
        spread, pieces = -(-int(paths.ends.max()) // PART), len(paths.tiles) * self._kv.shape[3]
        if spread == 1 or pieces >= 2 * torch.get_num_threads():
            return 1, 0, 0
        size = padded(self._kv.shape[5], self._kv.element_size())
        self._parts = np.empty(pieces * spread * paths.queries * (size + 2), np.float32), np.zeros(pieces, np.int64)
        return spread, *(one.ctypes.data for one in self._parts)

    def read(self, layer: int, group: int, heads: tuple[int, int] | None = None) -> Pair:
        """Keys and values of a group, [slots, kv_heads, keys, head_dim] each. heads: kv_heads and head_dim; None: those
        of the cache."""
        keys, values = (one[layer] for one in self._groups[group])
        if heads not in (None, (keys.shape[1], keys.shape[3])):
            kv_heads, places = heads[0], heads[1] // keys.shape[3]
            keys, values = (
                one[:, : kv_heads * places].unflatten(1, (kv_heads, places)).transpose(2, 3).flatten(3, 4)
                for one in (keys, values)
            )
        return keys, values


class CachedTarget(Target):
    """A target whose rows are in a `RaggedCache`. Subclasses add `verify`."""

    cache: RaggedCache

    def apart(self) -> Self:
        """The same model with its own cache, for rows that nothing else touches."""
        made = copy(self)
        made.cache = self.cache.empty()
        return made

    def add_row(self, expected_length: int) -> int:
        return self.cache.add_row(expected_length)

    def drop_row(self, slot: int) -> None:
        self.cache.drop_row(slot)

    def length(self, slot: int) -> int:
        return self.cache.length(slot)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        self.cache.commit(slot, path)

    def truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, length)

    def _best(self, logits: torch.Tensor, needs: Needs, clock: Clock) -> Pair | None:
        """Values and ids of the `needs.top_k` best logits. The clock books their time for the drafter."""
        if not needs.top_k:
            return None
        top = top_tokens(logits, needs.top_k)
        clock.lap("top_k")
        return top
