"""The gated delta rule, compiled: all nodes of a forward in one call a layer, and the updates of a path in one call.

A thread takes a value head of a row at a time and goes through its nodes in order, with the state in its own memory.
A node's state is copied if a child is not the next node. The same loop computes the convolution, the lengths of queries
and keys, the norm and the gate. All is in float32, and without fastmath: sums have a fixed order, so a node's output is
the same, bit for bit, in any tree, batch or piece, on any number of threads."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray, cfunc, njit

from paceline.compiled import address, exponential, fetch_add, float_of, logarithm, power, put, widened
from paceline.core.tree import IntArray
from paceline.target.kernels import on_threads

if TYPE_CHECKING:
    from paceline.target.recurrent import GatedDelta, Recurrence, RecurrentRow, RecurrentSegment, RecurrentState, State

WORTH_SHARING = 1 << 16  # minimum amount of numbers that nodes change in states for more than one thread
NEXT, ITEMS, JOBS, LAYER, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL = range(9)
QKVZ, BA, OUT, CONV, RATE, SHIFT, NORM, EPS, TASK = range(9, 18)
"""Indices in the task of the compiled function, and their number. NEXT: number of the next piece of work, a head of a
job, out of ITEMS; JOBS, QKVZ to NORM: addresses."""
BEGIN, NODES, START, MORE, STATE, INPUTS, STORE, STRIDE = range(8)
ROWS, AFTER, SAVE, SAVED, TAPS, ENDS, NUM_ENDS, FIELDS = range(8, 16)
"""Columns of a job, and their number. BEGIN: the first packed node; MORE: number to add to LAYER; STATE, INPUTS, STORE:
addresses of the row's state and `RecurrentRow.nodes`, of all layers; STRIDE: bytes of a layer of the latter. Addresses
of int64: ROWS [nodes]: rows of STORE; AFTER [nodes]: index of the saved state that a node follows, or -1 for the state
of the node before it; SAVE [nodes]: index, of SAVED, under which a node's state is saved, or -1; TAPS as in
`RecurrentSegment`; ENDS [NUM_ENDS, 2]: a number of nodes, and the address to which the state after them is written."""


@njit
def _convolved(out, first, i, taps, start, begin, rows, inputs, store, qkvz, conv):  # type: ignore[no-untyped-def]
    """Compute SiLU of the convolution of node i, from channel `first` on."""
    kernel, count = len(conv), len(out)
    out[:] = 0
    for t in range(kernel):
        tap, weight = taps[i, t], conv[t]
        if tap >= start:
            new = qkvz[begin + tap - start]
            for c in range(count):
                out[c] += weight[first + c] * widened(new[first + c])
        else:
            old = store[rows[tap]] if tap >= 0 else inputs[kernel - 1 + tap]
            for c in range(count):
                out[c] += weight[first + c] * old[first + c]
    for c in range(count):
        out[c] = out[c] / (np.float32(1) + exponential(-out[c]))


@njit
def _change(state, decay, query, key, value, strength, update, is_new, output):  # type: ignore[no-untyped-def]
    """Compute state = decay * state + key * update and output = query * state. For a new node, first compute
    update = strength * (value - key * decay * state)."""
    found = np.zeros(len(update), np.float32)
    for r in range(len(key)):
        line = state[r]
        for c in range(len(update)):
            line[c] *= decay
            found[c] += line[c] * key[r]
    if is_new:
        for c in range(len(update)):
            update[c] = strength * (value[c] - found[c])
    output[:] = 0
    for r in range(len(key)):
        line = state[r]
        for c in range(len(update)):
            line[c] += key[r] * update[c]
            output[c] += line[c] * query[r]


def _rule(kind: Any) -> Any:
    """Compile the function for bfloat16 bits (uint16) or float32. Its argument is the address of its task."""

    @cfunc("void(voidptr)", cache=True, error_model="numpy")
    def rule(at):  # type: ignore[no-untyped-def]
        """Take the jobs of the task at this address."""
        task = carray(at, (TASK,), np.int64)
        heads, wide, deep, kernel = task[VALUE_HEADS], task[KEY_DIM], task[VALUE_DIM], task[KERNEL]
        keys, values, share = task[KEY_HEADS] * wide, heads * deep, heads // task[KEY_HEADS]
        channels, many = 2 * keys + values, 1 << 32  # the arrays' true sizes are not known here
        jobs = carray(address(task[JOBS]), (many, FIELDS), np.int64)
        qkvz = carray(address(task[QKVZ]), (many, channels + values), kind)
        ba = carray(address(task[BA]), (many, 2 * heads), kind)
        out = carray(address(task[OUT]), (many, values), kind)
        conv = carray(address(task[CONV]), (kernel, channels), np.float32)
        rate = carray(address(task[RATE]), (heads,), np.float32)
        shift = carray(address(task[SHIFT]), (heads,), np.float32)
        norm, eps = carray(address(task[NORM]), (deep,), np.float32), float_of(np.uint32(task[EPS]))
        state = np.empty((wide, deep), np.float32)
        query, key = np.zeros((2, wide), np.float32)
        value, update, output = np.zeros((3, deep), np.float32)
        while True:
            item = fetch_add(task, 1)
            if item >= task[ITEMS]:
                return
            job, head = jobs[item // heads], item % heads
            group, layer = head // share, task[LAYER] + job[MORE]
            place = 4 * (layer * heads + head) * wide * deep
            begin, start, nodes = job[BEGIN], job[START], job[NODES]
            before = carray(address(job[STATE] + place), (wide, deep), np.float32)
            inputs_at = job[INPUTS] + 4 * layer * (kernel - 1) * channels
            inputs = carray(address(inputs_at), (kernel, channels), np.float32)
            store_at = job[STORE] + layer * job[STRIDE]
            store = carray(address(store_at), (many, channels + keys + values + heads), np.float32)
            rows = carray(address(job[ROWS]), (nodes,), np.int64)
            after = carray(address(job[AFTER]), (nodes,), np.int64)
            save = carray(address(job[SAVE]), (nodes,), np.int64)
            taps = carray(address(job[TAPS]), (nodes, kernel), np.int64)
            ends, ended = carray(address(job[ENDS]), (job[NUM_ENDS], 2), np.int64), 0
            saved = np.empty((job[SAVED], wide, deep), np.float32)
            of_q, of_k, of_v = group * wide, keys + group * wide, 2 * keys + head * deep
            key_at, update_at = channels + group * wide, channels + keys + head * deep
            log_at = channels + keys + values + head
            state[:] = before
            for i in range(nodes):
                if after[i] >= 0:
                    state[:] = saved[after[i]]
                row = begin + i - start
                strength = log = np.float32(0)
                if i < start:
                    node = store[rows[i]]
                    log = node[log_at]
                    key[:] = node[key_at : key_at + wide]
                    update[:] = node[update_at : update_at + deep]
                else:
                    _convolved(query, of_q, i, taps, start, begin, rows, inputs, store, qkvz, conv)
                    _convolved(key, of_k, i, taps, start, begin, rows, inputs, store, qkvz, conv)
                    _convolved(value, of_v, i, taps, start, begin, rows, inputs, store, qkvz, conv)
                    query *= np.float32(1 / math.sqrt((np.sum(query * query) + np.float32(1e-6)) * np.float32(wide)))
                    key *= np.float32(1 / math.sqrt(np.sum(key * key) + np.float32(1e-6)))
                    strength = np.float32(1 / (1 + power(-np.float64(widened(ba[row, head])))))
                    z = np.float64(widened(ba[row, heads + head]) + shift[head])
                    log = np.float32(rate[head] * (z if z > 20 else logarithm(1 + power(z))))
                decay = np.float32(power(np.float64(log)))
                _change(state, decay, query, key, value, strength, update, i >= start, output)
                if save[i] >= 0:
                    saved[save[i]] = state
                if i >= start:
                    square, line = np.sum(output * output) / np.float32(deep), out[row]
                    scale = np.float32(1 / math.sqrt(square + eps))
                    for c in range(deep):
                        gate = widened(qkvz[row, channels + head * deep + c])
                        gate = gate / (np.float32(1) + exponential(-gate))
                        put(line, head * deep + c, output[c] * scale * norm[c] * gate)
                if i >= start and job[STORE] != 0:
                    node = store[rows[i]]
                    node[log_at] = log
                    node[update_at : update_at + deep] = update
                    for c in range(deep):
                        node[of_v + c] = widened(qkvz[row, of_v + c])
                    if head % share == 0:
                        node[key_at : key_at + wide] = key
                        for r in range(wide):
                            node[of_q + r], node[of_k + r] = widened(qkvz[row, of_q + r]), widened(qkvz[row, of_k + r])
                while ended < len(ends) and ends[ended, 0] == i + 1:
                    carray(address(ends[ended, 1] + place), (wide, deep), np.float32)[:] = state
                    ended += 1

    return rule


_RULES = {torch.bfloat16: _rule(np.uint16), torch.float32: _rule(np.float32)}


def _run(of: RecurrentState, table: IntArray, kind: torch.dtype, layer: int, rest: Sequence[int]) -> None:
    """Run the jobs of `table`, [jobs, FIELDS], for a layer. rest: QKVZ to EPS."""
    d = of.delta
    sizes = d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.kernel
    task = array("q", (0, len(table) * d.value_heads, table.ctypes.data, layer, *sizes, *rest))
    is_shared = int(table[:, NODES].sum()) * d.values * d.key_dim >= WORTH_SHARING
    on_threads(_RULES[kind], task, torch.get_num_threads() if is_shared else 1)


def _numbers(
    places: IntArray, parent: IntArray, taps: IntArray, ends: Sequence[tuple[int, State]]
) -> tuple[IntArray, list[int]]:
    """The int64 arrays to which a job points, joined, and its columns from ROWS on.

    A node saves its state if a child is not the next node."""
    apart = parent != np.arange(-1, len(parent) - 1)
    branches = np.unique(parent[apart])
    save = np.full(len(parent), -1)
    save[branches] = np.arange(len(branches))
    after = np.where(apart, save[parent], -1)
    last = np.array([(count, state.matrices.data_ptr()) for count, state in ends], np.int64)
    parts = [places, after, save, taps.ravel(), last.ravel()]
    joined = np.concatenate(parts, dtype=np.int64)
    at = (joined.ctypes.data + 8 * np.cumsum([0, *map(len, parts)])).tolist()
    return joined, [*at[:3], len(branches), *at[3:5], len(ends)]


def jobs_of(parts: Sequence[RecurrentSegment]) -> tuple[IntArray, list[IntArray]]:
    """The jobs of a forward, and the arrays to which they point."""
    table: list[list[int]] = []
    numbers: list[IntArray] = []
    for part in parts:
        row, count = part.row, len(part.parent)
        joined, columns = _numbers(row.first + np.arange(count), part.parent, part.taps, part.ends)
        numbers.append(joined)
        stored = (0, 0) if part.ends else (row.nodes.data_ptr(), row.nodes[0].nbytes)
        states = row.now.matrices.data_ptr(), row.now.inputs.data_ptr()
        table.append([part.begin, count, part.start, 0, *states, *stored, *columns])
    return np.array(table, np.int64), numbers


def run(forward: Recurrence, layer: int, qkvz: torch.Tensor, ba: torch.Tensor, rule: GatedDelta) -> torch.Tensor:
    qkvz, ba = qkvz.contiguous(), ba.contiguous()
    out = qkvz.new_zeros(len(qkvz), forward.memory.delta.values)
    tensors = qkvz, ba, out, rule.conv, rule.rate, rule.shift, rule.norm
    eps = int(np.float32(rule.eps).view(np.uint32))
    _run(forward.memory, forward.jobs[0], qkvz.dtype, layer, [*(tensor.data_ptr() for tensor in tensors), eps])
    return out


def advance(of: RecurrentState, row: RecurrentRow, places: IntArray, ends: Sequence[tuple[int, State]]) -> None:
    """In all layers, for each (count, state) in `ends`, write the state after the first `count` nodes at `places` of
    `RecurrentRow.nodes`, a path."""
    count = len(places)
    _alive, columns = _numbers(places, np.arange(-1, count - 1), places[:0], ends)
    states = row.now.matrices.data_ptr(), 0
    job = [0, count, count, 0, *states, row.nodes.data_ptr(), row.nodes[0].nbytes, *columns]
    table = np.tile(np.array(job, np.int64), (of.layers, 1))
    table[:, MORE] = np.arange(of.layers)
    _run(of, table, torch.float32, 0, [0] * (TASK - QKVZ))
