"""The gated delta rule, compiled: a call computes all nodes of a forward for a layer, or applies the updates of a path.

A thread takes a value head of a row at a time, and goes through its nodes in order, with the state in its own memory.
A node's state is saved if any of its children is not the next node. The same loop computes the convolution, the lengths
of queries and keys, the norm and the gate. All is in float32 without fastmath: sums have a fixed order, so a node's
output is the same, bit for bit, in any tree, batch or piece, on any number of threads."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, njit

from paceline.compiled import address, exponential, fetch_add, float_of, logarithm, power, put, widened
from paceline.kernels import on_threads
from paceline.kernels.records import IntArray, Sizes, record

WORTH_SHARING = 1 << 16
"""If nodes change fewer numbers of states, a single thread runs."""


class Task(NamedTuple):
    """The task of the compiled rule.

    next                counter, 0 to items - 1: item i is head i % value_heads of job i // value_heads.
    jobs, qkvz to norm  addresses. eps: bits of float32."""

    next: int
    items: int
    jobs: int
    layer: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    neighbours: int
    qkvz: int = 0
    ba: int = 0
    out: int = 0
    conv: int = 0
    rate: int = 0
    shift: int = 0
    norm: int = 0
    eps: int = 0


class Job(NamedTuple):
    """A row's nodes in a forward.

    begin                 number of the first packed node. start: number of the row's nodes that were run earlier.
    more                  number to add to `Task.layer`.
    state, inputs, store  addresses, for all layers: the row's state, the inputs before its nodes, and the nodes'
                          records.
    stride                bytes of a layer in the store.
    rows [nodes]          each node's row in the store.
    after [nodes]         number of the saved state that a node follows; -1: the state of the node before it.
    save [nodes]          number under which a node's state is saved; -1: not at all. saved: how many are saved.
    taps [nodes, kernel]  nodes whose inputs a node reads; negative: inputs before the row's nodes.
    ends [num_ends, 2]    a number of nodes, and the address to which the state after them is written."""

    begin: int
    nodes: int
    start: int
    more: int
    state: int
    inputs: int
    store: int
    stride: int
    rows: int
    after: int
    save: int
    saved: int
    taps: int
    ends: int
    num_ends: int


TASK, JOB = record(Task), record(Job)


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
        task, taken = carray(at, (1,), TASK)[0], carray(at, (1,), np.int64)
        heads, wide, deep, kernel = task.value_heads, task.key_dim, task.value_dim, task.kernel
        keys, values, share = task.key_heads * wide, heads * deep, task.neighbours
        channels, many = 2 * keys + values, 1 << 32  # The true sizes are not known here.
        jobs = carray(address(task.jobs), (many,), JOB)
        qkvz = carray(address(task.qkvz), (many, channels + values), kind)
        ba = carray(address(task.ba), (many, 2 * heads), kind)
        out = carray(address(task.out), (many, values), kind)
        conv = carray(address(task.conv), (kernel, channels), np.float32)
        rate = carray(address(task.rate), (heads,), np.float32)
        shift = carray(address(task.shift), (heads,), np.float32)
        norm, eps = carray(address(task.norm), (deep,), np.float32), float_of(np.uint32(task.eps))
        state = np.empty((wide, deep), np.float32)
        query, key = np.zeros((2, wide), np.float32)
        value, update, output = np.zeros((3, deep), np.float32)
        while True:
            item = fetch_add(taken, 1)
            if item >= task.items:
                return
            job, head = jobs[item // heads], item % heads
            turn, layer = head // share, task.layer + job.more
            group = turn % task.key_heads
            place = 4 * (layer * heads + head) * wide * deep
            begin, start, nodes = job.begin, job.start, job.nodes
            before = carray(address(job.state + place), (wide, deep), np.float32)
            inputs_at = job.inputs + 4 * layer * (kernel - 1) * channels
            inputs = carray(address(inputs_at), (kernel, channels), np.float32)
            store_at = job.store + layer * job.stride
            store = carray(address(store_at), (many, channels + keys + values + heads), np.float32)
            rows = carray(address(job.rows), (nodes,), np.int64)
            after = carray(address(job.after), (nodes,), np.int64)
            save = carray(address(job.save), (nodes,), np.int64)
            taps = carray(address(job.taps), (nodes, kernel), np.int64)
            ends, ended = carray(address(job.ends), (job.num_ends, 2), np.int64), 0
            saved = np.empty((job.saved, wide, deep), np.float32)
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
                if i >= start and job.store != 0:
                    node = store[rows[i]]
                    node[log_at] = log
                    node[update_at : update_at + deep] = update
                    for c in range(deep):
                        node[of_v + c] = widened(qkvz[row, of_v + c])
                    if head % share == 0 and turn == group:  # One head writes what several share.
                        node[key_at : key_at + wide] = key
                        for r in range(wide):
                            node[of_q + r], node[of_k + r] = widened(qkvz[row, of_q + r]), widened(qkvz[row, of_k + r])
                while ended < len(ends) and ends[ended, 0] == i + 1:
                    carray(address(ends[ended, 1] + place), (wide, deep), np.float32)[:] = state
                    ended += 1

    return rule


_RULES = {torch.bfloat16: _rule(np.uint16), torch.float32: _rule(np.float32)}


def job(
    begin: int, start: int, places: IntArray, parent: IntArray, taps: IntArray, ends: Sequence[tuple[int, int]],
    at: Sequence[int],
) -> tuple[Job, IntArray]:  # fmt: skip
    """Make the job of a row whose nodes have these places in its store. Also returns the array to which the job points.

    parent  int64 [n], -1 at a root. ends: (number of nodes, address). at: state, inputs, store and its stride."""
    apart = parent != np.arange(-1, len(parent) - 1)
    branches = np.unique(parent[apart])  # nodes with a child that is not the next node
    save = np.full(len(parent), -1)
    save[branches] = np.arange(len(branches))
    after = np.where(apart, save[parent], -1)
    parts = [places, after, save, taps.ravel(), np.array(ends, np.int64).ravel()]
    joined = np.concatenate(parts, dtype=np.int64)
    rows, afters, saves, reads, last, _ = (joined.ctypes.data + 8 * np.cumsum([0, *map(len, parts)])).tolist()
    state, inputs, store, stride = at
    counts = begin, len(parent), start, 0
    made = Job(*counts, state, inputs, store, stride, rows, afters, saves, len(branches), reads, last, len(ends))
    return made, joined


def run(
    jobs: IntArray, layer: int, sizes: Sizes, qkvz: torch.Tensor, ba: torch.Tensor, vectors: Sequence[torch.Tensor],
    eps: float,
) -> torch.Tensor:  # fmt: skip
    """Compute a layer's output for the packed nodes, normed and gated, [N, values]. It is 0 for nodes without a job.

    jobs  int64 [jobs, fields of Job]. vectors: weights of the convolution, rate, shift and norm."""
    qkvz, ba = qkvz.contiguous(), ba.contiguous()
    out = qkvz.new_zeros(len(qkvz), sizes.values)
    tensors = (one.data_ptr() for one in (qkvz, ba, out, *vectors))
    _run(jobs, layer, sizes, qkvz.dtype, (*tensors, int(np.float32(eps).view(np.uint32))))
    return out


def advance(made: Job, layers: int, sizes: Sizes) -> None:
    """Write, for all layers, the states at the ends of a job whose nodes were all run."""
    table = np.tile(np.array(made, np.int64), (layers, 1))
    table[:, Job._fields.index("more")] = np.arange(layers)
    _run(table, 0, sizes, torch.float32, ())


def _run(jobs: IntArray, layer: int, sizes: Sizes, kind: torch.dtype, rest: Sequence[int]) -> None:
    """Run the jobs for a layer. rest: the task's fields from qkvz on."""
    task = array("q", Task(0, len(jobs) * sizes.value_heads, jobs.ctypes.data, layer, *sizes, *rest))
    nodes = int(jobs[:, Job._fields.index("nodes")].sum())
    is_shared = nodes * sizes.values * sizes.key_dim >= WORTH_SHARING
    on_threads(_RULES[kind], task, torch.get_num_threads() if is_shared else 1)
