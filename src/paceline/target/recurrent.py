"""Recurrent state: the memory of layers of the gated delta rule, beside the KV cache.

Such a layer (Yang et al. 2024, arXiv 2412.06464) does not keep the keys and values of tokens. For each value head it
has a matrix S [key_dim, value_dim], and for its convolution the last inputs. A token with query q, key k, value v,
strength b and decay a changes S and reads it:

    S = a S + k u,   u = b (v - a k S),   output q S

A row's state is the state after its committed tokens. Running nodes does not change it; each node stores its key, its
update u, its log decay and its input of the convolution. A node's state is its parent's state with its own update. So a
tree runs as a chain does, rejected nodes leave nothing behind, and `commit` adds the accepted path's updates. A piece
of a prompt is committed whole, so only the state after it is stored. Unlike keys and values, states cannot be cut back,
so they are kept at `mark`s, for rows that begin alike.

On CPUs `kernels/delta.py` computes; the code here does the same in torch, for other devices and float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from paceline.core.segment import Segment
from paceline.core.tree import IntArray, ancestors
from paceline.formats.shape import Delta

if TYPE_CHECKING:
    from paceline.target.layout import Layout

ROOM = 16  # The memory for a row's nodes grows by this number of nodes.


@dataclass(eq=False)
class State:
    """A row's state after some of its tokens.

    matrices  [layers, value_heads, key_dim, value_dim].
    inputs    [layers, kernel - 1, channels]: the last inputs of the convolutions."""

    matrices: torch.Tensor
    inputs: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.matrices.nbytes + self.inputs.nbytes

    def clone(self) -> State:
        return State(self.matrices.clone(), self.inputs.clone())


@dataclass(eq=False)
class RecurrentRow:
    """A row: its state `now`, and the nodes that were run after it.

    nodes  [layers, room, input | key | update | log decay] of nodes that are not committed, from place `first` on.
    whole  number of tokens of the piece of a prompt that was run, if any; `after` is the state after it.
    marks  lengths at which states will be kept; kept: states by length."""

    now: State
    nodes: torch.Tensor
    first: int = 0
    whole: int = 0
    after: State | None = None
    marks: set[int] = field(default_factory=set)
    kept: dict[int, State] = field(default_factory=dict)


@dataclass(eq=False)
class RecurrentSegment:
    """A segment in a forward. Its nodes `start` to n - 1 are the packed nodes from `begin` on.

    parent  int64 [n]. ends: (number of nodes, `State` to write after so many nodes of a piece of a prompt)."""

    row: RecurrentRow
    begin: int
    start: int
    parent: IntArray
    ends: list[tuple[int, State]]
    kernel: int

    @cached_property
    def taps(self) -> IntArray:
        """The nodes that each node's convolution reads, int64 [n, kernel], with the node itself last. Numbers below 0
        are inputs of the state; -1 is the last."""
        node = np.arange(len(self.parent))
        taps = np.empty((len(node), self.kernel), np.int64)
        for i in reversed(range(self.kernel)):
            taps[:, i] = node
            node = np.where(node >= 0, self.parent[np.maximum(node, 0)], node - 1)
        return taps

    def keep_inputs(self, layer: int, inputs: torch.Tensor) -> None:
        """Write the last of a layer's inputs [n, channels] into the states of `ends`."""
        for count, state in self.ends:
            last = inputs[max(count - self.kernel + 1, 0) : count].to(state.inputs.dtype)
            state.inputs[layer] = torch.cat([self.row.now.inputs[layer, len(last) :], last])


class RecurrentState:
    """The states of rows that come and go, for `layers` layers. Slots and lengths are those of the KV cache."""

    def __init__(self, delta: Delta, layers: int, dtype: torch.dtype, device: torch.device | str):
        self.delta, self.layers, self.device = delta, layers, torch.device(device)
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.is_compiled = self.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
        self.rows: dict[int, RecurrentRow] = {}
        self.widths = [delta.channels, delta.keys, delta.values, delta.value_heads]
        """Columns of `RecurrentRow.nodes`."""

    @property
    def nbytes(self) -> int:
        d = self.delta
        numbers = d.values * d.key_dim + (d.kernel - 1) * d.channels
        return self.layers * numbers * self.dtype.itemsize

    def empty(self) -> State:
        """The state of no tokens."""
        d = self.delta
        sizes = (self.layers, d.value_heads, d.key_dim, d.value_dim), (self.layers, d.kernel - 1, d.channels)
        return State(*(torch.zeros(size, dtype=self.dtype, device=self.device) for size in sizes))

    @torch.inference_mode()
    def add_row(self, slot: int) -> None:
        """Add an empty row."""
        nodes = torch.empty(self.layers, 0, sum(self.widths), dtype=self.dtype, device=self.device)
        self.rows[slot] = RecurrentRow(self.empty(), nodes)

    def drop_row(self, slot: int) -> None:
        del self.rows[slot]

    def move(self, new_slot: Mapping[int, int]) -> None:
        """Move rows to new slots. new_slot: new slots by old slots."""
        self.rows = {new_slot[slot]: row for slot, row in self.rows.items()}

    def mark(self, slot: int, length: int) -> None:
        """Keep the row's state after `length` tokens, as soon as it has them."""
        self.rows[slot].marks.add(length)

    def states(self, slot: int, length: int) -> dict[int, State]:
        """A row's kept states by length, and its present state, at `length`, which goes on to change."""
        row = self.rows[slot]
        return {n: state for n, state in row.kept.items() if n < length} | {length: row.now}

    @torch.inference_mode()
    def arrange(self, slot: int, nodes: Sequence[int]) -> None:
        """Move uncommitted `nodes` to the places right after the row, in order."""
        row = self.rows[slot]
        places = torch.tensor(nodes, dtype=torch.int64, device=self.device) + row.first
        row.nodes[:, row.first : row.first + len(nodes)] = row.nodes.index_select(1, places)

    def begin(self, layout: Layout, lengths: Sequence[int]) -> Recurrence:
        """Begin a forward over the segments of `layout`, whose rows have `lengths` committed tokens."""
        segments = zip(layout.segments, layout.spans, lengths, strict=True)
        return Recurrence(self, [self._part(segment, begin, length) for segment, (begin, _), length in segments])

    def _part(self, segment: Segment, begin: int, length: int) -> RecurrentSegment:
        row, count = self.rows[segment.slot], len(segment.tokens)
        ends: list[tuple[int, State]] = []
        if segment.is_prompt:
            row.whole, row.after = count, row.after or self.empty()
            ends = [*self._marked(row, length, count), (count, row.after)]
        else:
            row.whole = 0
            row.first = row.first if segment.start else 0
            missing = row.first + count - row.nodes.shape[1]
            if missing > 0:
                row.nodes = F.pad(row.nodes, (0, 0, 0, -(-missing // ROOM) * ROOM))
        return RecurrentSegment(row, begin, segment.start, segment.parent, ends, self.delta.kernel)

    def _marked(self, row: RecurrentRow, length: int, count: int) -> list[tuple[int, State]]:
        """For each mark within the row's next `count` tokens: how many of them come before it, and the state to
        fill."""
        marks = sorted(mark for mark in row.marks if length < mark <= length + count)
        return [(mark - length, row.kept.setdefault(mark, self.empty())) for mark in marks]

    @torch.inference_mode()
    def commit(self, slot: int, length: int, path: Sequence[int]) -> None:
        """Add nodes `path` of the segment that was just run to the state of a row of `length` tokens. ValueError if
        only a part of a prompt's piece is committed."""
        row = self.rows[slot]
        if row.whole:
            if len(path) != row.whole or row.after is None:
                raise ValueError(f"a piece of a prompt of {row.whole} tokens is committed whole, not {len(path)} of it")
            row.now, row.after, row.whole = row.after, row.now, 0
        elif len(path):
            ends = [*self._marked(row, length, len(path)), (len(path), row.now)]
            self._advance(row, np.array(path) + row.first, ends)
            row.first, row.after = row.first + len(path), None
        row.marks = {mark for mark in row.marks if mark > length + len(path)}

    def _advance(self, row: RecurrentRow, places: IntArray, ends: list[tuple[int, State]]) -> None:
        """For each (count, state) in `ends`, write into `state` the state after the first `count` nodes at `places`.
        The last pair has the row's own state."""
        before = row.now.inputs
        for count, state in ends:
            last = places[max(count - self.delta.kernel + 1, 0) : count]
            state.inputs = torch.cat([before[:, len(last) :], row.nodes[:, last, : self.delta.channels]], 1)
        if self.is_compiled:
            from paceline.kernels.delta import advance, job

            count, at = len(places), (row.now.matrices.data_ptr(), 0, row.nodes.data_ptr(), row.nodes[0].nbytes)
            made, _alive = job(0, count, places, np.arange(-1, count - 1), places[:0], _addresses(ends), at)
            advance(made, self.layers, self.delta.sizes)
            return
        _, keys, updates, logs = row.nodes[:, places].split(self.widths, -1)
        keys, updates = (t.unflatten(-1, (n, -1)) for t, n in ((keys, self.delta.key_heads), (updates, logs.shape[-1])))
        keys = keys[..., self.delta.key_head_of, :]
        before = row.now.matrices
        for count, state in ends:
            state.matrices = _advanced(before, keys[:, :count], updates[:, :count], logs[:, :count])


class Rule(Protocol):
    """The weights of a layer's rule: its convolution [kernel, channels], decays and norm."""

    conv: torch.Tensor
    rate: torch.Tensor
    shift: torch.Tensor
    norm: torch.Tensor
    eps: float


class Recurrence:
    """A forward over the recurrent layers."""

    def __init__(self, memory: RecurrentState, parts: Sequence[RecurrentSegment]):
        self.memory, self.parts = memory, parts

    @cached_property
    def jobs(self) -> tuple[IntArray, list[IntArray]]:
        """Make jobs of `kernels/delta.py` of the segments, int64 [segments, fields]. Also returns the arrays to which
        they point."""
        from paceline.kernels.delta import job

        made, arrays = [], []
        for part in self.parts:
            row, stored = part.row, (0, 0)
            if not part.ends:
                stored = row.nodes.data_ptr(), row.nodes[0].nbytes
            at = row.now.matrices.data_ptr(), row.now.inputs.data_ptr(), *stored
            places = row.first + np.arange(len(part.parent))
            of, joined = job(part.begin, part.start, places, part.parent, part.taps, _addresses(part.ends), at)
            made.append(of)
            arrays.append(joined)
        return np.array(made, np.int64), arrays

    def run(self, layer: int, qkvz: torch.Tensor, ba: torch.Tensor, rule: Rule) -> torch.Tensor:
        """Compute a layer's output for the packed nodes, normed and gated, [N, values]; 0 for padding.

        qkvz  [N, queries | keys | values | gates]. ba: [N, strengths | decays]. layer: its index in the state."""
        for part in self.parts:
            part.keep_inputs(layer, qkvz[part.begin :, : self.memory.delta.channels])
        if self.memory.is_compiled:
            from paceline.kernels.delta import run

            vectors = rule.conv, rule.rate, rule.shift, rule.norm
            return run(self.jobs[0], layer, self.memory.delta.sizes, qkvz, ba, vectors, rule.eps)
        out = qkvz.new_zeros(len(qkvz), self.memory.delta.values)
        for part in self.parts:
            own = slice(part.begin, part.begin + len(part.parent) - part.start)
            out[own] = self._part(part, layer, qkvz[own].to(self.memory.dtype), ba[own].to(self.memory.dtype), rule)
        return out

    def _part(
        self, part: RecurrentSegment, layer: int, qkvz: torch.Tensor, ba: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        d, row, start = self.memory.delta, part.row, part.start
        x, gate = qkvz.split([d.channels, d.values], -1)
        nodes = row.nodes[layer, row.first : row.first + len(part.parent)]
        inputs = torch.cat([row.now.inputs[layer], nodes[:start, : d.channels], x])
        taps = torch.from_numpy(part.taps[start:] + d.kernel - 1).to(x.device)
        q, k, v = F.silu((inputs[taps] * rule.conv).sum(1)).split([d.keys, d.keys, d.values], -1)
        q, k = (_normed(t.unflatten(-1, (d.key_heads, -1))) for t in (q, k))
        q, v = q * d.key_dim**-0.5, v.unflatten(-1, (d.value_heads, -1))
        strength, rate = ba.chunk(2, -1)
        strength, log = strength.sigmoid(), rule.rate * F.softplus(rate + rule.shift)
        _, keys, updates, logs = nodes[:start].split(self.memory.widths, -1)
        keys, logs = torch.cat([keys.unflatten(-1, (d.key_heads, -1)), k]), torch.cat([logs, log])
        sees = torch.from_numpy(ancestors(part.parent)).to(x.device)
        state, known = row.now.matrices[layer], updates.unflatten(-1, v.shape[1:])
        shared = q[:, d.key_head_of], keys[:, d.key_head_of]
        output, updates = _rule(*shared, v, logs, strength, state, sees, known)
        for count, end in part.ends:
            end.matrices[layer] = _advanced(state, shared[1][:count], updates[:count], logs[:count])
        if not part.ends:
            nodes[start:] = torch.cat([x, k.flatten(1), updates.flatten(1), log], -1)
        output = F.rms_norm(output, output.shape[-1:], rule.norm, rule.eps).flatten(1)
        return output * F.silu(gate)


def _addresses(ends: Sequence[tuple[int, State]]) -> list[tuple[int, int]]:
    return [(count, state.matrices.data_ptr()) for count, state in ends]


def _normed(x: torch.Tensor) -> torch.Tensor:
    """Scale x to length 1 in its last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log: torch.Tensor, strength: torch.Tensor, state: torch.Tensor,
    sees: torch.Tensor, known: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute outputs and updates, [m, value_heads, value_dim] each, of the last m of n nodes after `state`. The
    updates solve a triangular system, because a node depends on its ancestors.

    q [m, value_heads, key_dim], k [n, ...], v [m, value_heads, value_dim], log decays [n, value_heads], strength
    [m, ...]. sees: bool [n, n], a node's ancestors and itself. known: updates of the first n - m nodes."""
    first = len(known)
    q, k, v, known = (t.transpose(0, 1) for t in (q, k, v, known))
    strength = strength.T[..., None]
    total = (sees.to(log.dtype) @ log).T[..., None]
    decay = (total - total.mT).masked_fill(~sees, -torch.inf).exp()[:, first:]
    total = total[:, first:].exp()
    among = strength * decay * (k[:, first:] @ k.mT)
    updates = strength * (v - total * (k[:, first:] @ state)) - among[..., :first] @ known
    updates = torch.linalg.solve_triangular(among[..., first:], updates, upper=False, unitriangular=True)
    output = total * (q @ state) + (decay * (q @ k.mT)) @ torch.cat([known, updates], 1)
    return output.transpose(0, 1), updates.transpose(0, 1)


def _advanced(state: torch.Tensor, k: torch.Tensor, updates: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    """Compute the state [..., value_heads, key_dim, value_dim] after the updates of a path of n nodes.

    k [..., n, value_heads, key_dim], updates [..., n, value_heads, value_dim], log decays [..., n, value_heads]."""
    left = log.flip(-2).cumsum(-2).flip(-2)
    k = k * (left - log).exp()[..., None]
    return left[..., 0, :].exp()[..., None, None] * state + torch.einsum("...nhk,...nhv->...hkv", k, updates)
