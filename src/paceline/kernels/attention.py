"""Attention along paths: a node attends to its row's tokens and its ancestors, in the order of the text.

A library's attention reads keys in the order of memory, where siblings lie between the nodes of a path, and masks keys
that a node does not see. Masked keys add nothing, but they shift the others, which changes the order of sums. Here the
keys of a query are numbered by their position in its text and read 64 at a time, from position 0 on. So the result
equals that of plain decoding, bit for bit, for any tree, any chunks of the prompt and any other rows in the batch.

The blocks of 64 keys are added as in FlashAttention (Dao et al. 2022, algorithm 1): with the highest score so far, the
sum of exponentials, and the sum of values; a higher score scales both sums down. Numba compiles the loops. The inner
steps are written with `vectors.py`, on vectors of 16, so that no compiler reorders their sums:

    transpose16  transposes 16 keys: a register then holds a dimension of 16 keys
    soften       computes scores and their exponentials
    gather4      sums values
"""

import math
import operator
from array import array
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, njit, types

from paceline.compiled import (
    E0,
    E1,
    E2,
    E3,
    E4,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST_EXPONENT,
    address,
    fetch_add,
    put,
    widened,
)
from paceline.kernels import is_recording, on_threads
from paceline.kernels import vectors as v
from paceline.kernels.ops import Places
from paceline.kernels.records import BLOCK, FORWARD, TILE, record
from paceline.kernels.vectors import LANES, Value

WORTH_SHARING = 8192
"""A layer with fewer scores runs on a single thread."""


class Task(NamedTuple):
    """The task of `attend_paths`.

    next                   number of the next piece of work. number: index of the layer.
    queries, out, forward  addresses of the tensors, and of a `Forward`. window: as in `attend_paths`.
    sinks                  address of float32 [heads], or 0."""

    next: int
    kv_heads: int
    shared: int
    dim: int
    nodes: int
    number: int
    queries: int
    out: int
    forward: int
    window: int
    sinks: int


TASK = record(Task)


def attend_paths(
    queries: torch.Tensor, kv_heads: int, scores: int, places: Places, layer: int, out: torch.Tensor,
    window: int | None, sinks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write the attention of packed queries [N, heads, head_dim] along their paths to `out`, [N, heads * head_dim].

    scores  number of scores of a query head, without a window. kv_heads: number of key heads.
    window  largest number of tokens that a node sees, itself included; None: its whole path.
    sinks   float32 [heads]: a score that takes part in the softmax, and has no value; None: there is none."""
    queries = queries.contiguous()
    nodes, heads, dim = queries.shape
    forward = places.header.buffer_info()[0]
    sizes, sinks_at = (kv_heads, heads // kv_heads, dim, nodes, layer), 0 if sinks is None else sinks.data_ptr()
    task = array("q", Task(0, *sizes, queries.data_ptr(), out.data_ptr(), forward, window or 1 << 62, sinks_at))
    # A recorded forward will be run again with longer contexts, and there sharing costs little.
    few = scores * heads < WORTH_SHARING and not is_recording()
    on_threads(_ATTENTION[queries.dtype], task, 1 if few else torch.get_num_threads())


# One query against 64 keys -------------------------------------------------------------------------------------------

_VECTORS = BLOCK // LANES
_LOWEST = float(LOWEST_EXPONENT)


def _all(number: float) -> Value:
    return v.literal(v.F32, *[number] * LANES)


def _larger(a: Value, b: Value) -> Value:
    """The larger of two numbers; `b` if either is NaN."""
    return v.select(a > b, a, b)


def _exponential(x: Value) -> Value:
    """e**x for 16 numbers x <= 0, as 2**k times a polynomial, with a relative error below 1e-6. Far below 0 it is 0;
    for NaN it is NaN.

    The polynomial is that of `compiled.exponential` without its highest term, which this error does not need."""
    near = _larger(x, _all(_LOWEST))
    k = v.intrinsic(f"llvm.floor.v{LANES}f32", v.vector(v.F32), v.fma(near, float(LOG2_E), 0.5))
    r = v.fma(k, -float(LN2_LOW), v.fma(k, -float(LN2_HIGH), near))
    p = _all(float(E4))
    for factor in (E3, E2, E1, E0):
        p = v.fma(p, r, float(factor))
    p = v.fma(p * r, r, r + 1.0)
    value = p * ((k.cast("fptosi", v.I32) + 127) << 23).view(v.F32)
    return v.select(x.is_nan(), x, v.select(x < _LOWEST, _all(0.0), value))


@v.step(types.void)
def transpose16(
    dtype: Any, states: Value, places: Value, first: Value, size: Value, at: Value, turned: Value, column: Value
) -> None:
    """Set turned[d, column + i] = states[places[first + i], at + d] for i and d from 0 to 15.

    states  bfloat16 bits or float32 [rows * size], flat. turned: float32 [size, BLOCK], flat. places: int64."""
    width = dtype.bitwidth // 8
    rows = []
    for i in range(LANES):
        place = v.load(places + (first + i) * 8, v.I64, 1, align=8)
        rows.append(v.load_wide(states + (place * size + at) * width, dtype != types.float32))
    for i, row in enumerate(_transposed(rows)):
        v.store(turned + ((at + i) * BLOCK + column) * 4, row)


def _transposed(rows: list[Value]) -> list[Value]:
    """Transpose 16 vectors of 16, by exchanging squares of 8, then of 4, 2 and 1."""
    for width in (8, 4, 2, 1):
        upper = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
        lower = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
        for i in range(LANES):
            if not i & width:
                a, b = rows[i], rows[i + width]
                rows[i], rows[i + width] = v.shuffled(a, b, upper), v.shuffled(a, b, lower)
    return rows


@v.step(types.void)
def widen(dtype: Any, states: Value, begin: Value, wide: Value, at: Value) -> None:
    """Set wide[at : at + 16] = states[begin : begin + 16], as float32."""
    v.store(wide + at * 4, v.load_wide(states + begin * (dtype.bitwidth // 8), dtype != types.float32))


@v.step(types.float32)
def soften(
    _: Any, query: Value, at: Value, turned: Value, size: Value, begin: Value, end: Value, state: Value, row: Value,
    weights: Value,
) -> Value:  # fmt: skip
    """Set weights[i] = e**(score of key i - the highest score so far), or 0 for keys outside `begin` to `end` - 1.

    Updates the highest score, state[2 * row], and the sum of exponentials, state[2 * row + 1]. Returns the factor that
    scales earlier sums.

    query float32 [size] from `at` on, turned float32 [size, BLOCK], weights float32 [BLOCK], all flat."""

    def add(i: Value, scores: list[Value]) -> list[Value]:
        number, line = v.splat(v.load(query + (at + i) * 4, v.F32, 1)), turned + i * (4 * BLOCK)
        return [v.fma(number, v.load(line + 4 * LANES * k, v.F32), score) for k, score in enumerate(scores)]

    scores = v.loop(size, [_all(0.0)] * _VECTORS, add)
    inside = [_between(k, begin, end) for k in range(_VECTORS)]
    scores = [v.select(mask, score, _all(-math.inf)) for mask, score in zip(inside, scores, strict=True)]
    best = _larger(_larger(scores[0], scores[1]), _larger(scores[2], scores[3]))
    held = state + row * 8
    before, total = v.load(held, v.F32, 1), v.load(held + 4, v.F32, 1)
    highest = _larger(before, v.folded(best, _larger))
    powers = [_exponential(score - v.splat(highest)) for score in scores]
    powers = [v.select(mask, power, _all(0.0)) for mask, power in zip(inside, powers, strict=True)]
    for k, power in enumerate(powers):
        v.store(weights + 4 * LANES * k, power)
    added = v.folded((powers[0] + powers[1]) + (powers[2] + powers[3]), operator.add)
    scale = _exponential(v.splat(before - highest)).lane(0)
    v.store(held, highest)
    v.store(held + 4, total * scale + added)
    return scale


def _between(vector: int, begin: Value, end: Value) -> Value:
    """The mask of keys `begin` to `end` - 1 in the block's vector of 16 keys with this number."""
    first, last = (v.splat(number.cast("trunc", v.I32)) for number in (begin, end))
    keys = [LANES * vector + lane for lane in range(LANES)]
    return first.below(v.literal(v.I32, *(key + 1 for key in keys))) & v.literal(v.I32, *keys).below(last)


def _gather(vectors: int) -> Any:
    @v.step(types.void)
    def gather(
        _: Any, weights: Value, values: Value, size: Value, begin: Value, end: Value, scale: Value, sums: Value,
        at: Value, part: Value,
    ) -> None:  # fmt: skip
        """Described at `gather4`."""
        to = [sums + (at + part + LANES * k) * 4 for k in range(vectors)]

        def add(i: Value, totals: list[Value]) -> list[Value]:
            key = begin + i
            weight, line = v.splat(v.load(weights + key * 4, v.F32, 1)), values + (key * size + part) * 4
            return [v.fma(weight, v.load(line + 4 * LANES * k, v.F32), total) for k, total in enumerate(totals)]

        totals = v.loop(end - begin, [v.load(place, v.F32) * v.splat(scale) for place in to], add)
        for place, total in zip(to, totals, strict=True):
            v.store(place, total)

    return gather


gather4, gather1 = _gather(4), _gather(1)
"""Set sums[at + part + j] = scale * sums[at + part + j] + the sum of weights[key] * values[key, part + j] over keys
`begin` to `end` - 1, one or more, in order, for j below 64 (gather4) or 16 (gather1). values: float32 [BLOCK, size]."""


# Tiles of queries ----------------------------------------------------------------------------------------------------


@njit
def _aligned(size):  # type: ignore[no-untyped-def]
    """Allocate float32 [size] at a multiple of 64 bytes. Numbers that no step sets are masked or not used."""
    numbers = np.empty(size + LANES, np.float32)
    shift = (-numbers.ctypes.data % 64) // 4
    return numbers[shift : shift + size]


@njit
def _read_block(  # type: ignore[no-untyped-def]
    keys, values, places, count, dim, row, next_place, padded, turned, wide
):
    """Read the keys at `count` places, transposed, and their values, as float32. places: int64 [BLOCK].

    row         numbers of a key at a place. next_place: how many numbers away a key's next `row` numbers are."""
    for i in range(count, BLOCK):
        places[i] = places[count - 1]
    if row < LANES:
        for i in range(count):
            for d in range(dim):
                at = d // row * next_place + places[i] * row + d % row
                turned[d * BLOCK + i] = widened(keys[at])
                wide[i * padded + d] = widened(values[at])
        return
    for first in range(0, dim, row):
        away = first // row * (next_place - row)
        keys_here = keys[away:]
        for begin in range(first, first + row, LANES):
            at = min(begin, first + row - LANES)  # The last vector may overlap the one before.
            for i in range(0, count, LANES):
                transpose16(keys_here, places, i, row, at, turned, i)
            for i in range(count):
                widen(values, away + places[i] * row + at, wide, i * padded + at)


@njit
def _add_block(query, row, dim, padded, turned, wide, begin, end, state, weights, sums):  # type: ignore[no-untyped-def]
    """Add keys `begin` to `end` - 1 of the block to a query's state and sums."""
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
def _work(taken, task, header, queries, out, keys, values):  # type: ignore[no-untyped-def]
    """Take pieces of work until none is left. A piece is a key head of a tile."""
    kv_heads, shared, dim, row_size = task.kv_heads, task.shared, task.dim, header.row
    window = task.window
    heads, next_place, places_of_head = kv_heads * shared, header.capacity * row_size, dim // row_size
    size = places_of_head * next_place
    padded = (dim + LANES - 1) // LANES * LANES
    tiles = carray(address(header.tiles_at), (header.tiles,), TILE)
    ends = carray(address(header.ends), (task.nodes,), np.int64)
    most = 0
    for i in range(len(tiles)):
        most = max(most, tiles[i].nodes * shared)
    query, sums, state = _aligned(most * dim), _aligned(most * padded), _aligned(2 * most)
    turned, wide, weights = _aligned(padded * BLOCK), _aligned(padded * BLOCK), _aligned(BLOCK)
    places = np.empty(BLOCK, np.int64)
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    sinks = carray(address(task.sinks), (heads,), np.float32)
    while True:
        piece = fetch_add(taken, 1)
        if piece >= len(tiles) * kv_heads:
            return
        tile, head = tiles[piece // kv_heads], piece % kv_heads
        first, count, limit = tile.first, tile.nodes, tile.limit
        whole = (tile.slot * header.heads + head * places_of_head) * next_place
        own_keys, own_values = keys[whole : whole + size], values[whole : whole + size]
        low, end = max(ends[first] - window, 0), ends[first]
        for node in range(first, first + count):
            low, end = min(low, max(ends[node] - window, 0)), max(end, ends[node])
            for h in range(shared):
                row = (node - first) * shared + h
                state[2 * row], state[2 * row + 1] = -np.inf, 0
                if task.sinks != 0:
                    state[2 * row], state[2 * row + 1] = sinks[head * shared + h], 1
                sums[row * padded : (row + 1) * padded] = 0
                begin = (node * heads + head * shared + h) * dim
                for d in range(dim):
                    query[row * dim + d] = widened(queries[begin + d]) * scale
        for base in range(low // BLOCK * BLOCK, min(end, limit), BLOCK):
            length = min(BLOCK, min(end, limit) - base)
            for i in range(length):
                places[i] = base + i
            _read_block(own_keys, own_values, places, length, dim, row_size, next_place, padded, turned, wide)
            for row in range(count * shared):
                node = first + row // shared
                begin, stop = max(ends[node] - window - base, 0), min(ends[node] - base, length)
                _add_block(query, row, dim, padded, turned, wide, begin, stop, state, weights, sums)
        if end > limit:
            paths = carray(address(header.places + 8 * tile.paths), (count, tile.stride), np.int64)
            for node in range(first, first + count):
                for base in range(max(limit, (ends[node] - window) // BLOCK * BLOCK), ends[node], BLOCK):
                    length = min(BLOCK, ends[node] - base)
                    for i in range(length):
                        places[i] = paths[node - first, base - limit + i]
                    _read_block(own_keys, own_values, places, length, dim, row_size, next_place, padded, turned, wide)
                    for row in range((node - first) * shared, (node - first + 1) * shared):
                        begin = max(ends[node] - window - base, 0)
                        _add_block(query, row, dim, padded, turned, wide, begin, length, state, weights, sums)
        for row in range(count * shared):
            begin = ((first + row // shared) * heads + head * shared + row % shared) * dim
            for d in range(dim):
                put(out, begin + d, sums[row * padded + d] / state[2 * row + 1])


def _attention(kind: Any) -> Any:
    """Compile the function for bfloat16 bits (uint16) or float32. Its argument is the address of its task."""

    @cfunc("void(voidptr)", cache=True, error_model="numpy")  # Fastmath would reorder sums.
    def attend(at):  # type: ignore[no-untyped-def]
        task = carray(at, (1,), TASK)[0]
        header = carray(address(task.forward), (1,), FORWARD)[0]
        keys_at = header.keys + task.number * header.layer
        size = 1 << 60  # The true sizes are not known here.
        _work(
            carray(at, (1,), np.int64),
            task,
            header,
            carray(address(task.queries), (size,), kind),
            carray(address(task.out), (size,), kind),
            carray(address(keys_at), (size,), kind),
            carray(address(keys_at + header.values), (size,), kind),
        )

    return attend


_ATTENTION = {torch.bfloat16: _attention(np.uint16), torch.float32: _attention(np.float32)}
