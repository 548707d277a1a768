"""Attention along paths: a node attends to its row's tokens and its ancestors, in the order of the text.

A library's attention reads keys in the order of memory, where siblings lie between the nodes of a path, and masks keys
that a node does not see. Masked keys add nothing, but they shift the others, which changes the order of sums. Here the
keys of a query are numbered by their position in its text and read 64 at a time, from position 0 on. So the result
equals that of plain decoding, bit for bit, for any tree, any chunks of the prompt and any other rows in the batch.

The blocks of 64 keys are added as in FlashAttention (Dao et al. 2022, algorithm 1): with the highest score so far, the
sum of exponentials, and the sum of values; a higher score scales both sums down. Numba compiles the loops. The inner
steps are written with `vectors.py`, on vectors of 16, so that no compiler reorders their sums:

The first argument of a step is an array of the keys' dtype; others are numbers and addresses.

    transpose16  transposes 16 keys: a register then holds a dimension, or two, of 16 keys
    scores       multiplies a few queries by a block's keys, so that a key is read once for all of them
    soften       makes exponentials of a query's scores
    gather       sums values, for the same queries
"""

import math
import operator
from array import array
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, njit, types

from paceline import processor
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
    exponential,
    fetch_add,
    put,
    widened,
)
from paceline.kernels import is_recording, on_threads
from paceline.kernels import vectors as v
from paceline.kernels.ops import Places
from paceline.kernels.records import BLOCK, FORWARD, PART, TILE, padded, record
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
def transpose16(dtype: Any, kind: Value, states: Value, size: Value, first: Value, word: Value, turned: Value) -> None:
    """Set turned[word + i, first + j] = the word `word` + i of state `first` + j, for i and j from 0 to 15.

    A word of 32 bits is a number of float32, or two neighbours of bfloat16.

    states  bfloat16 bits or float32 [BLOCK * size], flat. turned: words [size, BLOCK], flat."""
    line, side = size * (dtype.bitwidth // 8), 16 if processor.has("avx512f") else 8
    for down in range(0, LANES, side):
        for along in range(0, LANES, side):
            at = states + (first + down) * line + (word + along) * 4
            rows = [v.load(at + line * j, v.I32, side, align=2) for j in range(side)]
            for i, column in enumerate(_transposed(rows)):
                v.store(turned + ((word + along + i) * BLOCK + first + down) * 4, column)


def _transposed(rows: list[Value]) -> list[Value]:
    """Transpose n vectors of n, by exchanging squares of n / 2, then of n / 4, and so on."""
    count = width = len(rows)
    while width := width // 2:
        upper = [lane if not lane & width else count + lane - width for lane in range(count)]
        lower = [lane + width if not lane & width else count + lane for lane in range(count)]
        for i in range(count):
            if not i & width:
                a, b = rows[i], rows[i + width]
                rows[i], rows[i + width] = v.shuffled(a, b, upper), v.shuffled(a, b, lower)
    return rows


def _across(queries: int) -> int:
    """How many vectors of 16 sums each of a few queries has in registers, beside what is added to them."""
    return min(_VECTORS, (16 if processor.has("avx512f") else 4) // queries)


@v.step(types.void)
def prefetch(_: Any, kind: Value, at: Value, nbytes: Value) -> None:
    """Prefetch into the L2 cache. nbytes: a multiple of 1024."""

    def ahead(i: Value, _: list[Value]) -> list[Value]:
        v.prefetch(at + (i << 10), 1024)
        return []

    v.loop(nbytes >> 10, [], ahead)


def _scores(queries: int) -> Any:
    @v.step(types.void)
    def scores(dtype: Any, kind: Value, turned: Value, query: Value, row: Value, size: Value, to: Value) -> None:
        """Set to[q, key] = the product of query row + q and a key, for a number of `queries` and all keys of a block.

        Sums run over dimensions in order. query: float32 [rows, size], turned: as
        `transpose16` sets it, to: float32 [queries, BLOCK], all flat."""
        vectors = _across(queries)
        halves = 32 // dtype.bitwidth
        rows = [query + (row + q) * size * 4 for q in range(queries)]
        for first in range(0, BLOCK, LANES * vectors):

            def add(word: Value, sums: list[Value], first: int = first) -> list[Value]:
                line = turned + (word * BLOCK + first) * 4
                words = [v.load(line + 4 * LANES * k, v.I32) for k in range(vectors)]
                for half in range(halves):
                    keys = [_number(one, half, halves) for one in words]
                    numbers = [v.splat(v.load(at + (word * halves + half) * 4, v.F32, 1)) for at in rows]
                    pairs = [(number, key) for number in numbers for key in keys]
                    sums = [v.fma(number, key, total) for (number, key), total in zip(pairs, sums, strict=True)]
                return sums

            sums = v.loop(size // halves, [_all(0.0)] * (queries * vectors), add)
            for i, total in enumerate(sums):
                v.store(to + (i // vectors * BLOCK + first + LANES * (i % vectors)) * 4, total)

    return scores


def _number(word: Value, half: int, halves: int) -> Value:
    """The float32 that is a word, or one of the two bfloat16 numbers in it."""
    if halves == 1:
        return word.view(v.F32)
    return (word & -65536).view(v.F32) if half else (word << 16).view(v.F32)


@v.step(types.void)
def soften(
    _: Any, kind: Value, weights: Value, begin: Value, end: Value, state: Value, row: Value, scales: Value, q: Value
) -> None:
    """Replace the scores in weights[q] by e**(score - the highest score so far); by 0 outside `begin` to `end` - 1.

    Updates the highest score, state[2 * row], and the sum of exponentials, state[2 * row + 1]. Sets scales[q] to the
    factor that scales earlier sums. weights: float32 [queries, BLOCK], flat."""
    line = weights + q * (4 * BLOCK)
    scores = [v.load(line + 4 * LANES * k, v.F32) for k in range(_VECTORS)]
    inside = [_between(k, begin, end) for k in range(_VECTORS)]
    scores = [v.select(mask, score, _all(-math.inf)) for mask, score in zip(inside, scores, strict=True)]
    best = _larger(_larger(scores[0], scores[1]), _larger(scores[2], scores[3]))
    held = state + row * 8
    before, total = v.load(held, v.F32, 1), v.load(held + 4, v.F32, 1)
    highest = _larger(before, v.folded(best, _larger))
    powers = [_exponential(score - v.splat(highest)) for score in scores]
    powers = [v.select(mask, power, _all(0.0)) for mask, power in zip(inside, powers, strict=True)]
    for k, power in enumerate(powers):
        v.store(line + 4 * LANES * k, power)
    added = v.folded((powers[0] + powers[1]) + (powers[2] + powers[3]), operator.add)
    scale = _exponential(v.splat(before - highest)).lane(0)
    v.store(held, highest)
    v.store(held + 4, total * scale + added)
    v.store(scales + q * 4, scale)


def _between(vector: int, begin: Value, end: Value) -> Value:
    """The mask of keys `begin` to `end` - 1 in the block's vector of 16 keys with this number."""
    first, last = (v.splat(number.cast("trunc", v.I32)) for number in (begin, end))
    keys = [LANES * vector + lane for lane in range(LANES)]
    return first.below(v.literal(v.I32, *(key + 1 for key in keys))) & v.literal(v.I32, *keys).below(last)


def _gather(queries: int, vectors: int) -> Any:
    @v.step(types.void)
    def gather(
        dtype: Any, kind: Value, values: Value, size: Value, weights: Value, begin: Value, end: Value, scales: Value,
        sums: Value, row: Value, part: Value,
    ) -> None:  # fmt: skip
        """Scale a part of the sums of query row + q by scales[q], and add weights[q, key] * values[key] for the keys
        `begin` to `end` - 1, one or more, in order; for a number of `queries`, and 16 * `vectors` dimensions from
        `part` on.

        values: bfloat16 bits or float32 [BLOCK, size], sums: float32 [rows, size], both flat."""
        width = dtype.bitwidth // 8
        to = [sums + ((row + q) * size + part + LANES * k) * 4 for q in range(queries) for k in range(vectors)]

        def add(i: Value, totals: list[Value]) -> list[Value]:
            line = values + ((begin + i) * size + part) * width
            wide = [v.load_wide(line + LANES * k * width, width == 2) for k in range(vectors)]
            each = [v.splat(v.load(weights + (begin + i + q * BLOCK) * 4, v.F32, 1)) for q in range(queries)]
            pairs = [(weight, value) for weight in each for value in wide]
            return [v.fma(weight, value, total) for (weight, value), total in zip(pairs, totals, strict=True)]

        factors = [v.splat(v.load(scales + 4 * q, v.F32, 1)) for q in range(queries) for _ in range(vectors)]
        scaled = [v.load(place, v.F32) * factor for place, factor in zip(to, factors, strict=True)]
        for place, total in zip(to, v.loop(end - begin, scaled, add), strict=True):
            v.store(place, total)

    return gather


# Tiles of queries ----------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Addresses of a thread's memory. A row is a query: a node's heads follow each other, node after node.

    query         float32 [rows, size]: queries, scaled, and padded with 0.
    state         float32 [rows, 2]: the highest score so far, and the sum of exponentials.
    sums          float32 [rows, size]: sums of values.
    all_state     float32 [rows, 2], and all_sums, float32 [rows, size]: the same for all parts so far.
    turned        words [size, BLOCK], as `transpose16` makes them.
    weights       float32 [4, BLOCK], and scales, float32 [4], of the queries that `_adder` takes.
    keys, values  [BLOCK, size]: copies of states that do not lie in order.
    places        int64 [BLOCK]: where these states lie.
    seen          int64 [nodes, 2]: a node sees the keys of a block from the first number on, below the second."""

    query: int
    state: int
    sums: int
    all_state: int
    all_sums: int
    turned: int
    weights: int
    scales: int
    keys: int
    values: int
    places: int
    seen: int


@njit
def _lines(size, nodes, rows):  # type: ignore[no-untyped-def]
    """Lines of 64 bytes of each field of `Memory`."""
    row, block = (rows * size + 15) // 16, size * BLOCK // 16
    pair = (rows + 7) // 8
    return row, pair, row, pair, row, block, 4 * BLOCK // 16, 1, block, block, BLOCK // 8, (nodes + 3) // 4


@njit
def _floats(at, count):  # type: ignore[no-untyped-def]
    return carray(address(at), (count,), np.float32)


@njit
def _numbers(at, count):  # type: ignore[no-untyped-def]
    return carray(address(at), (count,), np.int64)


@njit
def _copy(states, row, further, places, count, dim, size, itemsize, to):  # type: ignore[no-untyped-def]
    """Copy `count` states of `dim` numbers to lines of `size` numbers, whose padding becomes 0.

    row  numbers of a state at a place. further: bytes from there to its next `row` numbers."""
    halves, size, where = itemsize // 2, size * itemsize // 2, _numbers(places, count)
    row, dim = row * halves, dim * halves
    copied = carray(address(to), (BLOCK * size,), np.uint16)
    for i in range(count):
        for begin in range(0, dim, row):
            one = carray(address(states + begin // row * further + 2 * row * where[i]), (row,), np.uint16)
            for d in range(row):
                copied[i * size + begin + d] = one[d]
        for d in range(dim, size):
            copied[i * size + d] = 0


def _adder(queries: int) -> Any:
    wide = LANES * _across(queries)
    scores, gather, gather1 = _scores(queries), _gather(queries, _across(queries)), _gather(queries, 1)

    @njit
    def add(kind, values, size, row, begin, end, m):  # type: ignore[no-untyped-def]
        """Add keys `begin` to `end` - 1 of a block to the state and the sums of `queries` queries from `row` on."""
        scores(kind, m.turned, m.query, row, size, m.weights)
        for q in range(queries):
            soften(kind, m.weights, begin, end, m.state, row + q, m.scales, q)
        part = 0
        while part + wide <= size:
            gather(kind, values, size, m.weights, begin, end, m.scales, m.sums, row, part)
            part += wide
        while part < size:
            gather1(kind, values, size, m.weights, begin, end, m.scales, m.sums, row, part)
            part += LANES

    return add


_add4, _add2, _add1 = _adder(4), _adder(2), _adder(1)


@njit
def _add_block(kind, keys, values, size, shared, row, last, m):  # type: ignore[no-untyped-def]
    """Add a block, keys and values [BLOCK, size], to queries `row` to `last` - 1, as far as they see it (`m.seen`)."""
    seen = _numbers(m.seen, 2 * ((last - 1) // shared + 1))
    for first in range(0, BLOCK, LANES):
        for word in range(0, size * kind.itemsize // 4, LANES):
            transpose16(kind, keys, size, first, word, m.turned)
    while row < last:
        node = row // shared
        begin, end = seen[2 * node], seen[2 * node + 1]
        count = 1  # Queries from `row` on that see the same keys.
        while count < 4 and row + count < last:
            node = (row + count) // shared
            if seen[2 * node] != begin or seen[2 * node + 1] != end:
                break
            count += 1
        if begin >= end:
            row += count
        elif count == 4:
            _add4(kind, values, size, row, begin, end, m)
            row += 4
        elif count >= 2:
            _add2(kind, values, size, row, begin, end, m)
            row += 2
        else:
            _add1(kind, values, size, row, begin, end, m)
            row += 1


@njit
def _clear(rows, size, state, sums):  # type: ignore[no-untyped-def]
    """Set state and sums to those of no keys."""
    states, totals = _floats(state, 2 * rows), _floats(sums, rows * size)
    for row in range(rows):
        states[2 * row], states[2 * row + 1] = -np.inf, 0
    for i in range(len(totals)):
        totals[i] = 0


@njit
def _add_part(kind, begin, end, tile, window, ends, paths, keys, values, row, further, dim, size, shared, m):  # type: ignore[no-untyped-def]
    """Set state and sums of a tile's queries to those of the positions `begin`, a multiple of BLOCK, to `end` - 1.

    keys, values  of the tile's slot and a key head. row, further: as in `_copy`."""
    first, rows, line = tile.first, tile.nodes * shared, dim * kind.itemsize
    places, seen = _numbers(m.places, BLOCK), _numbers(m.seen, 2 * tile.nodes)
    _clear(rows, size, m.state, m.sums)
    for base in range(begin, min(end, tile.limit), BLOCK):
        length = min(BLOCK, min(end, tile.limit) - base)
        for node in range(tile.nodes):
            seen[2 * node] = max(ends[first + node] - window - base, 0)
            seen[2 * node + 1] = min(ends[first + node] - base, length)
        block_keys, block_values = keys + base * line, values + base * line
        is_whole = size == row
        if is_whole and base + 2 * BLOCK <= min(end, tile.limit):
            prefetch(kind, block_keys + BLOCK * line, BLOCK * line)
            prefetch(kind, block_values + BLOCK * line, BLOCK * line)
        if length < BLOCK or not is_whole:
            for i in range(length):
                places[i] = base + i
            block_keys, block_values = m.keys, m.values
            _copy(keys, row, further, m.places, length, dim, size, kind.itemsize, m.keys)
            _copy(values, row, further, m.places, length, dim, size, kind.itemsize, m.values)
        _add_block(kind, block_keys, block_values, size, shared, np.int64(0), rows, m)
    for node in range(tile.nodes):
        last = ends[first + node]
        low = max(begin, tile.limit, (last - window) // BLOCK * BLOCK)
        for base in range(low, min(end, last), BLOCK):
            length = min(BLOCK, last - base)
            for i in range(length):
                places[i] = paths[node * tile.stride + base - tile.limit + i]
            seen[2 * node], seen[2 * node + 1] = max(last - window - base, 0), length
            _copy(keys, row, further, m.places, length, dim, size, kind.itemsize, m.keys)
            _copy(values, row, further, m.places, length, dim, size, kind.itemsize, m.values)
            _add_block(kind, m.keys, m.values, size, shared, node * shared, (node + 1) * shared, m)


@njit
def _begin(rows, size, shared, sinks, m):  # type: ignore[no-untyped-def]
    """Set the state and sums of all parts to those of no keys. sinks: address of a key head's sinks [shared], or 0."""
    _clear(rows, size, m.all_state, m.all_sums)
    if sinks != 0:
        state, scores = _floats(m.all_state, 2 * rows), _floats(sinks, shared)
        for row in range(rows):
            state[2 * row], state[2 * row + 1] = scores[row % shared], 1


@njit
def _join(rows, size, state, sums, m):  # type: ignore[no-untyped-def]
    """Add a part's state and sums to those of the parts before it."""
    part, added = _floats(state, 2 * rows), _floats(sums, rows * size)
    joined, totals = _floats(m.all_state, 2 * rows), _floats(m.all_sums, rows * size)
    for row in range(rows):
        before, here = joined[2 * row], part[2 * row]
        if here == -np.inf:  # The query sees no key of this part.
            continue
        highest = max(before, here)
        old = exponential(before - highest) if before > -np.inf else np.float32(0)
        new = exponential(here - highest)
        joined[2 * row] = highest
        joined[2 * row + 1] = joined[2 * row + 1] * old + part[2 * row + 1] * new
        for d in range(row * size, (row + 1) * size):
            totals[d] = totals[d] * old + added[d] * new


@njit
def _is_last(header, which, part, size, rows, most, shared, sinks, m):  # type: ignore[no-untyped-def]
    """Keep a part of key head `which` for the thread that does its last part; join all parts if this is that thread.

    most  largest number of rows of a key head."""
    each = 4 * most * (size + 2)
    parts = header.parts + each * header.spread * which
    kept, state, sums = _floats(parts + each * part, rows * (size + 2)), m.all_state, m.all_sums
    states, totals = _floats(state, 2 * rows), _floats(sums, rows * size)
    for i in range(2 * rows):
        kept[i] = states[i]
    for i in range(rows * size):
        kept[2 * rows + i] = totals[i]
    done = _numbers(header.done + 8 * which, 1)
    if fetch_add(done, 1) < header.spread - 1:
        return False
    done[0] = 0
    _begin(rows, size, shared, sinks, m)
    for part in range(header.spread):
        _join(rows, size, parts + each * part, parts + each * part + 8 * rows, m)
    return True


@njit
def _work(taken, task, header, queries, out, keys, values):  # type: ignore[no-untyped-def]
    """Allocate a thread's memory, and take pieces of work. keys, values: addresses of the layer's."""
    size = padded(task.dim, queries.itemsize)
    tiles = carray(address(header.tiles_at), (header.tiles,), TILE)
    most = 0
    for i in range(len(tiles)):
        most = max(most, tiles[i].nodes)
    lines = _lines(size, most, most * task.shared)
    memory = np.empty(sum(lines) * 16 + 16, np.float32)
    _take_pieces(memory, lines, taken, task, header, size, most * task.shared, queries, out, keys, values)


@njit
def _take_pieces(memory, lines, taken, task, header, size, most, queries, out, keys, values):  # type: ignore[no-untyped-def]
    """Take pieces of work until none is left: a key head of a tile, or a part of it (`Forward.spread`).

    memory  is an argument so that it lives until the end. most: largest number of rows of a tile."""
    kv_heads, shared, dim, spread = task.kv_heads, task.shared, task.dim, header.spread
    tiles = carray(address(header.tiles_at), (header.tiles,), TILE)
    ends = _numbers(header.ends, task.nodes)
    at = [(np.int64(memory.ctypes.data) + 63) // 64 * 64]
    for count in lines[:-1]:
        at.append(at[-1] + 64 * count)
    m = Memory(at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9], at[10], at[11])
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    while True:
        piece = fetch_add(taken, 1)
        if piece >= len(tiles) * kv_heads * spread:
            return
        which = piece // spread
        tile, head = tiles[which // kv_heads], which % kv_heads
        rows = tile.nodes * shared
        further = header.capacity * header.row * queries.itemsize
        begin = (tile.slot * header.heads + head * (dim // header.row)) * further
        sinks = task.sinks + 4 * head * shared if task.sinks != 0 else 0
        paths = _numbers(header.places + 8 * tile.paths, tile.nodes * tile.stride)
        low, end = ends[tile.first], 0
        query = _floats(m.query, rows * size)
        for node in range(tile.nodes):
            last = ends[tile.first + node]
            low, end = min(low, max(last - task.window, 0)), max(end, last)
            for row in range(node * shared, (node + 1) * shared):
                from_ = (((tile.first + node) * kv_heads + head) * shared + row % shared) * dim
                for d in range(dim):
                    query[row * size + d] = widened(queries[from_ + d]) * scale
                for d in range(dim, size):
                    query[row * size + d] = 0
        _begin(rows, size, shared, sinks if spread == 1 else 0, m)
        for part in range(low // PART, (end + PART - 1) // PART):
            if spread == 1 or part == piece % spread:
                positions = max(part * PART, low // BLOCK * BLOCK), min((part + 1) * PART, end)
                _add_part(
                    queries, positions[0], positions[1], tile, task.window, ends, paths, keys + begin, values + begin,
                    header.row, further, dim, size, shared, m,
                )  # fmt: skip
                _join(rows, size, m.state, m.sums, m)
        if spread > 1 and not _is_last(header, which, piece % spread, size, rows, most, shared, sinks, m):
            continue
        states, totals = _floats(m.all_state, 2 * rows), _floats(m.all_sums, rows * size)
        for row in range(rows):
            to = (((tile.first + row // shared) * kv_heads + head) * shared + row % shared) * dim
            for d in range(dim):
                put(out, to + d, totals[row * size + d] / states[2 * row + 1])


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
            keys_at,
            keys_at + header.values,
        )

    return attend


_ATTENTION = {torch.bfloat16: _attention(np.uint16), torch.float32: _attention(np.float32)}
