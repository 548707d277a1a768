"""Attention along paths: a node attends to its row's tokens and its ancestors, in the order of the text.

A library's attention reads keys in the order of memory, where siblings lie between the nodes of a path, and masks those
that a node does not see. Masked keys add nothing, but they shift the others, which changes the order of sums. Here a
query's keys are numbered by their position in its text and read 64 at a time, from position 0 on. So its result is that
of plain decoding, bit for bit, for any tree, any chunks of the prompt and any other rows in the batch.

The blocks of 64 keys are added as in FlashAttention (Dao et al. 2022, algorithm 1): with the highest score so far, the
sum of exponentials, and the sum of values; a higher score scales both sums down. Compiled by Numba, on the threads of
torch's OpenMP. The inner steps are intrinsics: LLVM instructions on vectors of 16 whose sums must not be reordered, so
that every call has the same order of sums:

    turn       16 keys, transposed: a register then holds one number of each
    soften     scores, and their exponentials
    gather4    the sum of values
"""

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils

from paceline.compiled import address, intrinsic, put, take, widened
from paceline.target.cache import CAPACITY, ENDS, HEADER, KEYS, LAYER, PLACES, TILES, TILES_AT, VALUES, Writer
from paceline.target.kernels import is_recording, on_threads
from paceline.target.layout import BLOCK, COUNT, FIRST, LIMIT, PATHS, SLOT, STRIDE, PathPlan

LANES = 16  # numbers in a vector
WORTH_SHARING = 8192  # fewest scores of a layer for more threads than one
NEXT, KV_HEADS, SHARED, DIM, NODES, NUMBER, QUERIES, OUT, FORWARD, WINDOW = range(10)
"""Places in the task of the compiled function. NEXT: number of the next piece of work; NUMBER: of the layer; QUERIES,
OUT, FORWARD: addresses, the last of `Writer.header`; WINDOW: most tokens that a node sees."""


def attend_paths(
    queries: torch.Tensor, plan: PathPlan, cache: Writer, layer: int, out: torch.Tensor, window: int | None
) -> None:
    """Attention of the packed queries [N, heads, head_dim] along their paths, into `out`, [N, heads * head_dim].

    window  most tokens that a node sees, itself included; None: its whole path."""
    queries = queries.contiguous()
    nodes, heads, dim = queries.shape
    kv_heads, header = cache.kv_heads, cache.header.buffer_info()[0]
    sizes = kv_heads, heads // kv_heads, dim, nodes, layer
    task = array("q", (0, *sizes, queries.data_ptr(), out.data_ptr(), header, window or 1 << 62))
    # In a recorded forward, which later contexts will be longer is not known, and sharing costs little.
    few = plan.scores * heads < WORTH_SHARING and not is_recording()
    on_threads(_ATTENTION[queries.dtype], task, 1 if few else torch.get_num_threads())


# One query against 64 keys -------------------------------------------------------------------------------------------

_VECTORS = BLOCK // LANES
_float, _word = ir.FloatType(), ir.IntType(32)
_floats, _words = ir.VectorType(_float, LANES), ir.VectorType(_word, LANES)
_LOWEST = -87.0  # e**x is 0 below this: e**-87 is near the smallest normal float32


def _all(value: float) -> ir.Constant:
    return ir.Constant(_floats, [value] * LANES)


def _integers(values: list[int]) -> ir.Constant:
    return ir.Constant(_words, values)


def _splat(builder: Any, value: Any, kind: Any = _floats) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_word, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _integers([0] * LANES))


def _called(builder: Any, name: str, *values: Any) -> Any:
    """Call an LLVM intrinsic over vectors of 16 floats."""
    kind = ir.FunctionType(_floats, [_floats] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), values)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _called(builder, "fma", a, b, c)


def _folded(builder: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """The 16 numbers joined to one, first the halves, always in the same order."""
    undefined = ir.Constant(_floats, ir.Undefined)
    for width in (8, 4, 2, 1):
        mask = _integers([(lane + width) % LANES for lane in range(LANES)])
        vector = join(vector, builder.shuffle_vector(vector, undefined, mask))
    return builder.extract_element(vector, ir.Constant(_word, 0))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two numbers; `b` if one is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exponential(builder: Any, x: Any) -> Any:
    """e**x of 16 numbers up to 0: 2**k times a polynomial, relative error below 1e-6; 0 far below 0, NaN for NaN."""
    near = builder.select(builder.fcmp_ordered(">", x, _all(_LOWEST)), x, _all(_LOWEST))
    k = _called(builder, "floor", _fma(builder, near, _all(1.4426950408889634), _all(0.5)))
    r = _fma(builder, k, _all(-0.693359375), near)
    r = _fma(builder, k, _all(2.12194440e-4), r)
    p = _all(1.3981999507e-3)
    for factor in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(builder, p, r, _all(factor))
    p = _fma(builder, builder.fmul(p, r), r, builder.fadd(r, _all(1.0)))
    power = builder.shl(builder.add(builder.fptosi(k, _words), _integers([127] * LANES)), _integers([23] * LANES))
    value = builder.fmul(p, builder.bitcast(power, _floats))
    value = builder.select(builder.fcmp_ordered("<", x, _all(_LOWEST)), _all(0.0), value)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, value)


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Pointer to number `at` of a flat array."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def _load(builder: Any, pointer: Any) -> Any:
    return builder.load(builder.bitcast(pointer, _floats.as_pointer()), align=4)


def _store(builder: Any, vector: Any, pointer: Any) -> None:
    builder.store(vector, builder.bitcast(pointer, _floats.as_pointer()), align=4)


def _i64(value: int) -> ir.Constant:
    return ir.Constant(ir.IntType(64), value)


def _read(builder: Any, pointer: Any, dtype: Any) -> Any:
    """16 numbers, bfloat16 bits or float32, to float32."""
    if dtype == types.float32:
        return _load(builder, pointer)
    halves = ir.VectorType(ir.IntType(16), LANES)
    bits = builder.zext(builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2), _words)
    return builder.bitcast(builder.shl(bits, _integers([16] * LANES)), _floats)


@intrinsic
def turn(typingctx: Any, states: Any, places: Any, first: Any, size: Any, at: Any, turned: Any, column: Any) -> Any:
    """turned[d, column + i] = states[places[first + i], at + d] for 16 i and 16 d.

    states  bfloat16 bits or float32 [rows * size], turned float32 [size, BLOCK], both flat; places int64."""

    def _build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        _, places, first, size, at, turned, column = arguments
        rows = []
        for i in range(LANES):
            place = builder.load(_address(context, builder, kinds[1], places, builder.add(first, _i64(i))))
            begin = builder.add(builder.mul(place, size), at)
            rows.append(_read(builder, _address(context, builder, kinds[0], arguments[0], begin), kinds[0].dtype))
        for i, row in enumerate(_transposed(builder, rows)):
            to = builder.add(builder.mul(builder.add(at, _i64(i)), _i64(BLOCK)), column)
            _store(builder, row, _address(context, builder, kinds[5], turned, to))
        return context.get_dummy_value()

    return types.void(states, places, types.int64, types.int64, types.int64, turned, types.int64), _build


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16, transposed: squares of 8 are exchanged, then of 4, 2 and 1."""
    for width in (8, 4, 2, 1):
        upper = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
        lower = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
        for i in range(LANES):
            if not i & width:
                a, b = rows[i], rows[i + width]
                rows[i] = builder.shuffle_vector(a, b, _integers(upper))
                rows[i + width] = builder.shuffle_vector(a, b, _integers(lower))
    return rows


@intrinsic
def widen(typingctx: Any, states: Any, begin: Any, wide: Any, at: Any) -> Any:
    """wide[at : at + 16] = states[begin : begin + 16], as float32."""

    def _build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        numbers = _read(builder, _address(context, builder, kinds[0], arguments[0], arguments[1]), kinds[0].dtype)
        _store(builder, numbers, _address(context, builder, kinds[2], arguments[2], arguments[3]))
        return context.get_dummy_value()

    return types.void(states, types.int64, wide, types.int64), _build


@intrinsic
def soften(
    _: Any, query: Any, at: Any, turned: Any, size: Any, begin: Any, end: Any, state: Any, row: Any, weights: Any
) -> Any:
    """weights[i] = e**(score of key i - the highest score so far), 0 outside begin..end - 1.

    Updates the highest score, state[2 * row], and the sum of exponentials, state[2 * row + 1]. Returns the factor that
    scales earlier sums.

    query float32 [size] from `at` on, turned float32 [size, BLOCK], weights float32 [BLOCK], all flat."""

    def _build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        query, at, turned, size, begin, end, state, row, weights = arguments
        from_query = _address(context, builder, kinds[0], query, at)
        from_keys = _address(context, builder, kinds[2], turned, _i64(0))
        scores = [cgutils.alloca_once_value(builder, _all(0.0)) for _ in range(_VECTORS)]
        sums = _products(builder, size, from_query, from_keys, scores)
        inside = [_between(builder, vector, begin, end) for vector in range(_VECTORS)]
        lowest = _all(float("-inf"))
        sums = [builder.select(mask, s, lowest) for mask, s in zip(inside, sums, strict=True)]
        best = _larger(builder, _larger(builder, sums[0], sums[1]), _larger(builder, sums[2], sums[3]))
        highest = _folded(builder, best, lambda a, b: _larger(builder, a, b))
        held = _address(context, builder, kinds[6], state, builder.mul(row, _i64(2)))
        before = builder.load(held)
        highest = _larger(builder, before, highest)
        shift = _splat(builder, highest)
        powers = [_exponential(builder, builder.fsub(s, shift)) for s in sums]
        powers = [builder.select(mask, p, _all(0.0)) for mask, p in zip(inside, powers, strict=True)]
        for vector, power in enumerate(powers):
            _store(builder, power, _address(context, builder, kinds[8], weights, _i64(LANES * vector)))
        four = builder.fadd(builder.fadd(powers[0], powers[1]), builder.fadd(powers[2], powers[3]))
        total = _folded(builder, four, builder.fadd)
        scale = builder.extract_element(
            _exponential(builder, _splat(builder, builder.fsub(before, highest))), ir.Constant(_word, 0)
        )
        builder.store(highest, held)
        to = builder.gep(held, [_i64(1)])
        builder.store(builder.fadd(builder.fmul(builder.load(to), scale), total), to)
        return scale

    signature = types.float32(
        query, types.int64, turned, types.int64, types.int64, types.int64, state, types.int64, weights
    )
    return signature, _build


def _products(builder: Any, size: Any, query: Any, keys: Any, places: list[Any]) -> list[Any]:
    """Four vectors of scores: query [size] times keys [size, BLOCK], in the order of the query's numbers."""
    with cgutils.for_range(builder, size) as loop:
        number = _splat(builder, builder.load(builder.gep(query, [loop.index])))
        line = builder.gep(keys, [builder.mul(loop.index, _i64(BLOCK))])
        for vector, place in enumerate(places):
            part = _load(builder, builder.gep(line, [_i64(LANES * vector)]))
            builder.store(_fma(builder, number, part, builder.load(place)), place)
    return [builder.load(place) for place in places]


def _between(builder: Any, vector: int, begin: Any, end: Any) -> Any:
    """Mask of the keys in a vector of the block that are among begin..end - 1."""
    keys = _integers([LANES * vector + lane for lane in range(LANES)])
    first, last = (_splat(builder, builder.trunc(number, _word), _words) for number in (begin, end))
    return builder.and_(builder.icmp_signed(">=", keys, first), builder.icmp_signed("<", keys, last))


def _gather(vectors: int) -> Any:
    @intrinsic
    def gather(
        _: Any, weights: Any, values: Any, size: Any, begin: Any, end: Any, scale: Any, sums: Any, at: Any, part: Any
    ) -> Any:
        """See `gather4`."""

        def _build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
            weights, values, size, begin, end, scale, sums, at, part = arguments
            to = [
                _address(context, builder, kinds[6], sums, builder.add(builder.add(at, part), _i64(LANES * vector)))
                for vector in range(vectors)
            ]
            factor = _splat(builder, scale)
            places = [cgutils.alloca_once_value(builder, builder.fmul(_load(builder, t), factor)) for t in to]
            with cgutils.for_range_slice(builder, begin, end, _i64(1), inc=True) as (key, _):
                weight = _splat(builder, builder.load(_address(context, builder, kinds[0], weights, key)))
                line = _address(context, builder, kinds[1], values, builder.add(builder.mul(key, size), part))
                for vector, place in enumerate(places):
                    value = _load(builder, builder.gep(line, [_i64(LANES * vector)]))
                    builder.store(_fma(builder, weight, value, builder.load(place)), place)
            for pointer, place in zip(to, places, strict=True):
                _store(builder, builder.load(place), pointer)
            return context.get_dummy_value()

        numbers = types.int64, types.int64, types.int64, types.float32
        return types.void(weights, values, *numbers, sums, types.int64, types.int64), _build

    return gather


gather4, gather1 = _gather(4), _gather(1)
"""sums[at + part + j] = scale * sums[at + part + j] + the sum of weights[key] * values[key, part + j] over keys begin
to end - 1 in order, for j below 64 (gather4) or 16 (gather1). values float32 [BLOCK, size], flat."""


# Tiles of queries ----------------------------------------------------------------------------------------------------


@njit
def _aligned(size):  # type: ignore[no-untyped-def]
    """Memory for float32 [size], aligned to 64 bytes. Numbers that no step sets are masked, or of no use."""
    numbers = np.empty(size + LANES, np.float32)
    shift = (-numbers.ctypes.data % 64) // 4
    return numbers[shift : shift + size]


@njit
def _read_block(keys, values, places, count, dim, padded, turned, wide):  # type: ignore[no-untyped-def]
    """Read the keys at `count` places, transposed, and their values, as float32; places int64 [BLOCK]."""
    for i in range(count, BLOCK):
        places[i] = places[count - 1]
    if dim < LANES:
        for i in range(count):
            for d in range(dim):
                turned[d * BLOCK + i] = widened(keys[places[i] * dim + d])
                wide[i * padded + d] = widened(values[places[i] * dim + d])
        return
    for begin in range(0, dim, LANES):
        at = min(begin, dim - LANES)  # the last vector overlaps the one before if the size is no multiple of 16
        for i in range(0, count, LANES):
            turn(keys, places, i, dim, at, turned, i)
        for i in range(count):
            widen(values, places[i] * dim + at, wide, i * padded + at)


@njit
def _add_block(query, row, dim, padded, turned, wide, begin, end, state, weights, sums):  # type: ignore[no-untyped-def]
    """Add keys begin..end - 1 of the block to one query's state and sums."""
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
def _work(task, header, queries, out, keys, values):  # type: ignore[no-untyped-def]
    """Take pieces of work, a key head of a tile each, until none is left."""
    kv_heads, shared, dim, capacity = task[KV_HEADS], task[SHARED], task[DIM], header[CAPACITY]
    window = task[WINDOW]
    heads, size = kv_heads * shared, capacity * dim
    padded = (dim + LANES - 1) // LANES * LANES
    tiles = carray(address(header[TILES_AT]), (header[TILES], 6), np.int64)
    ends = carray(address(header[ENDS]), (task[NODES],), np.int64)
    most = 0
    for tile in tiles:
        most = max(most, tile[COUNT] * shared)
    query, sums, state = _aligned(most * dim), _aligned(most * padded), _aligned(2 * most)
    turned, wide, weights = _aligned(padded * BLOCK), _aligned(padded * BLOCK), _aligned(BLOCK)
    places = np.empty(BLOCK, np.int64)
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    while True:
        piece = take(task, 1)
        if piece >= len(tiles) * kv_heads:
            return
        tile, head = tiles[piece // kv_heads], piece % kv_heads
        first, count, limit = tile[FIRST], tile[COUNT], tile[LIMIT]
        whole = (tile[SLOT] * kv_heads + head) * size
        own_keys, own_values = keys[whole : whole + size], values[whole : whole + size]
        low, end = max(ends[first] - window, 0), ends[first]
        for node in range(first, first + count):
            low, end = min(low, max(ends[node] - window, 0)), max(end, ends[node])
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
                begin, stop = max(ends[node] - window - base, 0), min(ends[node] - base, length)
                _add_block(query, row, dim, padded, turned, wide, begin, stop, state, weights, sums)
        if end > limit:
            paths = carray(address(header[PLACES] + 8 * tile[PATHS]), (count, tile[STRIDE]), np.int64)
            for node in range(first, first + count):
                for base in range(max(limit, (ends[node] - window) // BLOCK * BLOCK), ends[node], BLOCK):
                    length = min(BLOCK, ends[node] - base)
                    for i in range(length):
                        places[i] = paths[node - first, base - limit + i]
                    _read_block(own_keys, own_values, places, length, dim, padded, turned, wide)
                    for row in range((node - first) * shared, (node - first + 1) * shared):
                        begin = max(ends[node] - window - base, 0)
                        _add_block(query, row, dim, padded, turned, wide, begin, length, state, weights, sums)
        for row in range(count * shared):
            begin = ((first + row // shared) * heads + head * shared + row % shared) * dim
            for d in range(dim):
                put(out, begin + d, sums[row * padded + d] / state[2 * row + 1])


def _attention(kind: Any) -> Any:
    """The compiled function for bfloat16 bits (uint16) or float32. Its argument is the address of its task."""

    @cfunc("void(voidptr)", cache=True, error_model="numpy")  # without fastmath: sums must not be reordered
    def attend(at):  # type: ignore[no-untyped-def]
        task = carray(at, (10,), np.int64)
        header = carray(address(task[FORWARD]), (HEADER,), np.int64)
        keys_at = header[KEYS] + task[NUMBER] * header[LAYER]
        size = 1 << 60  # the arrays' true sizes are not known here
        _work(
            task,
            header,
            carray(address(task[QUERIES]), (size,), kind),
            carray(address(task[OUT]), (size,), kind),
            carray(address(keys_at), (size,), kind),
            carray(address(keys_at + header[VALUES]), (size,), kind),
        )

    return attend


_ATTENTION = {torch.bfloat16: _attention(np.uint16), torch.float32: _attention(np.float32)}
