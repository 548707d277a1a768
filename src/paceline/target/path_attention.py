"""Attention along paths: what a node attends to is its row's tokens and its ancestors, in the order of the text.

Attention of a library reads keys as they lie in memory, where siblings lie between the nodes of a path, and masks what
a node does not see. Masked keys count for nothing, but they shift the others, and sums get another order. Here a
query's keys are numbered by their position in its text and taken 64 at a time, from position 0 on. So its result is,
bit for bit, that of plain decoding: whatever tree it stands in, however a prompt was cut, and whichever rows run beside
it.

Compiled by Numba (`paceline.target.kernels.flash`), on the threads of torch's OpenMP.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils

from paceline.compiled import address, intrinsic, put, widened
from paceline.target.cache import Writer
from paceline.target.kernels.flash import BLOCK, LANES, gather1, gather4, soften, turn, widen
from paceline.target.kernels.products import parallel
from paceline.target.paths import COUNT, FIRST, LIMIT, PATHS, SLOT, STRIDE, TILE, PathPlan

WORTH_SHARING = 8192
"""Scores of a layer from which more threads than one are used."""
(
    NEXT, TILES, KV_HEADS, SHARED, DIM, CAPACITY, QUERIES, OUT, KEYS, VALUES, TILES_AT, LOWS, ENDS, PLACES, NODES
) = range(15)  # fmt: skip
"""Places in the task of the compiled function. NEXT: the next piece of work; QUERIES to PLACES: addresses."""


def attend_paths(queries: torch.Tensor, plan: PathPlan, cache: Writer, layer: int) -> torch.Tensor:
    """Attention of the packed queries [N, heads, head_dim] along their paths; [N, heads * head_dim]."""
    queries = queries.contiguous()
    nodes, heads, dim = queries.shape
    out = queries.new_empty(nodes, heads * dim)
    keys_at, values_at, capacity = cache.addresses(layer)
    kv_heads = cache.kv_heads
    task = array(
        "q",
        (
            0, len(plan.tiles), kv_heads, heads // kv_heads, dim, capacity, queries.data_ptr(), out.data_ptr(),
            keys_at, values_at, *plan.addresses, nodes,
        ),
    )  # fmt: skip
    on_this_thread, where = _compiled(queries.dtype)
    threads = torch.get_num_threads() if plan.scores * heads >= WORTH_SHARING else 1
    fork = _fork()
    if threads == 1 or fork is None:
        on_this_thread(task.buffer_info()[0])
    else:
        fork(where, task.buffer_info()[0], threads, 0)
    return out


@cache
def _compiled(dtype: torch.dtype) -> tuple[Any, int]:
    """The compiled function, as Python calls it, and its address."""
    function: Any = _attend_bfloat16 if dtype == torch.bfloat16 else _attend_float32
    return function.ctypes, function.address


@cache
def _fork() -> Any:
    """GOMP_parallel: runs a function on several threads. None where torch has another OpenMP."""
    where = parallel()
    kinds = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    return None if where is None else ctypes.CFUNCTYPE(None, *kinds)(where)


# Compiled ------------------------------------------------------------------------------------------------------------


@intrinsic
def _take(typingctx: Any, counter: Any) -> Any:
    """The value of counter[0] before one is added to it, once for every caller on any thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(cgutils.intp_t, 1), "monotonic")

    return types.int64(counter), generate


@njit
def _aligned(size):  # type: ignore[no-untyped-def]
    """Zeros, float32 [size], on a boundary of 64 bytes."""
    numbers = np.zeros(size + LANES, np.float32)
    shift = (-numbers.ctypes.data % 64) // 4
    return numbers[shift : shift + size]


@njit
def _read_block(keys, values, places, count, dim, padded, turned, wide):  # type: ignore[no-untyped-def]
    """`count` keys, transposed, and their values as float32; places int64 [BLOCK]."""
    for i in range(count, BLOCK):
        places[i] = places[count - 1]
    if dim < LANES:
        for i in range(count):
            for d in range(dim):
                turned[d * BLOCK + i] = widened(keys[places[i] * dim + d])
                wide[i * padded + d] = widened(values[places[i] * dim + d])
        return
    for begin in range(0, dim, LANES):
        at = min(begin, dim - LANES)  # the last vector begins earlier where the size is no multiple of 16
        for i in range(0, count, LANES):
            turn(keys, places, i, dim, at, turned, i)
        for i in range(count):
            widen(values, places[i] * dim + at, wide, i * padded + at)


@njit
def _add_block(query, row, dim, padded, turned, wide, begin, end, state, weights, sums):  # type: ignore[no-untyped-def]
    """Bring one query's state and sum up to date by keys begin..end - 1 of the block."""
    if begin >= end:
        return
    scale = soften(query, row * dim, turned, dim, begin, end, state, row, weights)
    part = 0
    while part + 4 * LANES <= padded:
        gather4(weights, wide, padded, begin, end, scale, sums, row * padded, part)
        part += 4 * LANES
    while part < padded:
        gather1(weights, wide, padded, begin, end, scale, sums, row * padded, part)
        part += LANES


@njit
def _work(task, queries, out, keys, values):  # type: ignore[no-untyped-def]
    """Take pieces of work, a key head of a tile each, until there are none left."""
    kv_heads, shared, dim, capacity = task[KV_HEADS], task[SHARED], task[DIM], task[CAPACITY]
    heads, size = kv_heads * shared, capacity * dim
    padded = (dim + LANES - 1) // LANES * LANES
    tiles = carray(address(task[TILES_AT]), (task[TILES], 6), np.int64)
    lows = carray(address(task[LOWS]), (task[NODES],), np.int64)
    ends = carray(address(task[ENDS]), (task[NODES],), np.int64)
    most = max(shared, TILE)
    query, sums, state = _aligned(most * dim), _aligned(most * padded), _aligned(2 * most)
    turned, wide, weights = _aligned(padded * BLOCK), _aligned(padded * BLOCK), _aligned(BLOCK)
    places = np.empty(BLOCK, np.int64)
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    while True:
        piece = _take(task)
        if piece >= task[TILES] * kv_heads:
            return
        tile, head = tiles[piece // kv_heads], piece % kv_heads
        first, count, limit = tile[FIRST], tile[COUNT], tile[LIMIT]
        whole = (tile[SLOT] * kv_heads + head) * size
        own_keys, own_values = keys[whole : whole + size], values[whole : whole + size]
        low, end = lows[first], ends[first]
        for node in range(first, first + count):
            low, end = min(low, lows[node]), max(end, ends[node])
            for h in range(shared):
                row = (node - first) * shared + h
                state[2 * row], state[2 * row + 1] = -np.inf, 0
                sums[row * padded : (row + 1) * padded] = 0
                begin = (node * heads + head * shared + h) * dim
                for d in range(dim):
                    query[row * dim + d] = widened(queries[begin + d]) * scale
        for base in range(low // BLOCK * BLOCK, min(end, limit), BLOCK):
            length = min(BLOCK, min(end, limit) - base)
            for i in range(length):
                places[i] = base + i
            _read_block(own_keys, own_values, places, length, dim, padded, turned, wide)
            for row in range(count * shared):
                node = first + row // shared
                begin, stop = max(lows[node] - base, 0), min(ends[node] - base, length)
                _add_block(query, row, dim, padded, turned, wide, begin, stop, state, weights, sums)
        if end > limit:
            paths = carray(address(task[PLACES] + 8 * tile[PATHS]), (count, tile[STRIDE]), np.int64)
            for node in range(first, first + count):
                for base in range(max(limit, lows[node] // BLOCK * BLOCK), ends[node], BLOCK):
                    length = min(BLOCK, ends[node] - base)
                    for i in range(length):
                        places[i] = paths[node - first, base - limit + i]
                    _read_block(own_keys, own_values, places, length, dim, padded, turned, wide)
                    for row in range((node - first) * shared, (node - first + 1) * shared):
                        begin = max(lows[node] - base, 0)
                        _add_block(query, row, dim, padded, turned, wide, begin, length, state, weights, sums)
        for row in range(count * shared):
            begin = ((first + row // shared) * heads + head * shared + row % shared) * dim
            for d in range(dim):
                put(out, begin + d, sums[row * padded + d] / state[2 * row + 1])


STRICT: Any = {"cache": True, "error_model": "numpy"}
"""No leave to reorder sums: the order is the one that is written."""


@cfunc("void(voidptr)", **STRICT)
def _attend_bfloat16(at):  # type: ignore[no-untyped-def]
    task = carray(at, (15,), np.int64)
    size = 1 << 60  # the cache's end is not known here
    _work(
        task,
        carray(address(task[QUERIES]), (size,), np.uint16),
        carray(address(task[OUT]), (size,), np.uint16),
        carray(address(task[KEYS]), (size,), np.uint16),
        carray(address(task[VALUES]), (size,), np.uint16),
    )


@cfunc("void(voidptr)", **STRICT)
def _attend_float32(at):  # type: ignore[no-untyped-def]
    task = carray(at, (15,), np.int64)
    size = 1 << 60
    _work(
        task,
        carray(address(task[QUERIES]), (size,), np.float32),
        carray(address(task[OUT]), (size,), np.float32),
        carray(address(task[KEYS]), (size,), np.float32),
        carray(address(task[VALUES]), (size,), np.float32),
    )
