"""The steps of a decoder layer between its matrix products. Each is a single pass, compiled by Numba for CPUs.

A forward of a small model is hundreds of operators over a few kilobytes, and launching them takes longer than running
them. Each kernel here replaces four to ten of torch's operators (`TorchOps` is the reference). It computes in float32,
and rounds once at the end. Rows are computed one by one, so a row's result does not depend on their number; many rows
are shared among threads. Kernels are for bfloat16, and for float32 if results must be exact (docs/exact.md)."""

import operator
import struct
from array import array
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, njit, types

from paceline.compiled import address, exponential, fetch_add, float_of, put, widened
from paceline.kernels import on_threads
from paceline.kernels import vectors as v
from paceline.kernels.ops import SILU, Activation, Pair, Places, TorchOps
from paceline.kernels.records import FORWARD, record
from paceline.kernels.rows import softmax
from paceline.kernels.turns import Turns
from paceline.kernels.vectors import Value

# With NumPy's errors, division does not check for 0; a check would keep loops from vectorising. There is no fastmath,
# because the order of sums and fused multiply-adds must not depend on the processor's vectors.
FAST: Any = {"cache": True, "error_model": "numpy"}


@njit(inline="always")
def _at(where: Any, size: Any, kind: Any) -> Any:
    """View `size` numbers at an address; kind: np.uint16 for the bits of bfloat16, or np.float32."""
    return carray(address(where), (size,), kind)


@njit(inline="always")
def _widen(where: Any, kind: Any, out: Any) -> None:
    """Fill `out`, float32, with the numbers at an address."""
    numbers = _at(where, len(out), kind)
    for i in range(len(out)):
        out[i] = widened(numbers[i])


@v.step(types.float32)
def _squares(_: Any, numbers: Value, turns: Value) -> Value:
    """Sum the squares of float32 [64 * turns]."""

    def add(i: Value, sums: list[Value]) -> list[Value]:
        here = [v.load(numbers + i * 256 + 64 * k, v.F32) for k in range(4)]
        return [v.fma(x, x, total) for x, total in zip(here, sums, strict=True)]

    a, b, c, d = v.loop(turns, [v.literal(v.F32, *[0.0] * v.LANES)] * 4, add)
    return v.folded((a + b) + (c + d), operator.add)


@njit(inline="always")
def _zeros(size: Any) -> Any:
    """Allocate zeros for `size` numbers, for `_inverse_rms`."""
    return np.zeros((size + 63) // 64 * 64, np.float32)


@njit(inline="always")
def _inverse_rms(x: Any, size: Any, eps: Any) -> Any:
    """1 / sqrt(mean(x**2) + eps) of the first `size` numbers of x, from `_zeros`; the others are 0."""
    return np.float32(1) / np.sqrt(_squares(x, len(x) // 64) / np.float32(size) + eps)


@njit(inline="always")
def _inverse_rms_at(where: Any, size: Any, kind: Any, eps: Any) -> Any:
    """`_inverse_rms` of `size` numbers at an address."""
    numbers = _zeros(size)
    _widen(where, kind, numbers[:size])
    return _inverse_rms(numbers, size, eps)


@njit(inline="always")
def _at_most(x: Any, limit: Any) -> Any:
    """The smaller of two numbers; NaN if x is NaN."""
    return limit if x > limit else x


ROWS = 4  # number of rows that a thread takes at a time
WORTH_SHARING = 8192  # A step over fewer numbers runs on a single thread.


class Norm(NamedTuple):
    """The task of `add_norm`. next: number of the next row. eps, factor: bits of float32."""

    next: int
    rows: int
    x: int
    delta: int
    weight: int
    sum: int
    out: int
    width: int
    eps: int
    factor: int


class Rotation(NamedTuple):
    """The task of `rotate`. next: number of the next node. forward: address of a `Forward`. eps: bits of float32.
    normed: number of heads with weights at `norm`."""

    next: int
    nodes: int
    heads: int
    kv_heads: int
    dim: int
    layer: int
    qkv: int
    out: int
    cos: int
    sin: int
    norm: int
    forward: int
    eps: int
    normed: int
    whole: int


class Gate(NamedTuple):
    """The task of `gate`. next: number of the next row. The last five are of an `Activation`: bits of float32, and
    `alone`."""

    next: int
    rows: int
    gate_up: int
    out: int
    width: int
    linear: int
    cubic: int
    alone: int
    limit: int
    shift: int


NORM, ROTATION, GATE = record(Norm), record(Rotation), record(Gate)


def _kernels(kind: Any, size: int) -> tuple[Any, Any, Any]:
    """Compile `add_norm`, `rotate` and `gate` for a dtype.

    kind: np.uint16 for the bits of bfloat16, or np.float32. size: bytes of a number."""

    @cfunc("void(voidptr)", **FAST)
    def add_norm(at):  # type: ignore[no-untyped-def]
        """Write sum = x + factor * delta, and out = RMS norm of sum. If delta's address is 0, sum is x, and is not
        written. If weight's address is 0, out is not written."""
        task, taken = carray(at, (1,), NORM)[0], carray(at, (1,), np.int64)
        rows, x_at, delta_at, weight_at = task.rows, task.x, task.delta, task.weight
        sum_at, out_at, width = task.sum, task.out, task.width
        eps, factor = float_of(np.uint32(task.eps)), float_of(np.uint32(task.factor))
        # Of copies in float32 the compiler knows that they do not overlap, so it vectorises all loops.
        weight, numbers = np.empty(width, np.float32), _zeros(width)
        if weight_at != 0:
            _widen(weight_at, kind, weight)
        while True:
            first = fetch_add(taken, ROWS)
            if first >= rows:
                return
            for row in range(first, min(first + ROWS, rows)):
                begin = size * row * width
                x = _at(x_at + begin, width, kind)
                if delta_at != 0:
                    delta, total = _at(delta_at + begin, width, kind), _at(sum_at + begin, width, kind)
                    for i in range(width):
                        put(total, i, widened(x[i]) + factor * widened(delta[i]))
                    x = total
                if weight_at == 0:
                    continue
                for i in range(width):
                    numbers[i] = widened(x[i])
                scale = _inverse_rms(numbers, width, eps)
                out = _at(out_at + begin, width, kind)
                for i in range(width):
                    put(out, i, numbers[i] * scale * weight[i])

    @cfunc("void(voidptr)", **FAST)
    def rotate(at):  # type: ignore[no-untyped-def]
        """Norm the first `normed` heads, and rotate q and k. Write q to `out`, and k and v to their places in the
        cache. whole: norm all q together, and all k together."""
        task, taken = carray(at, (1,), ROTATION)[0], carray(at, (1,), np.int64)
        nodes, heads, kv_heads, dim, whole = task.nodes, task.heads, task.kv_heads, task.dim, task.whole
        qkv_at, out_at, cos_at, sin_at, norm_at = task.qkv, task.out, task.cos, task.sin, task.norm
        normed = task.normed
        header, eps = carray(address(task.forward), (1,), FORWARD)[0], float_of(np.uint32(task.eps))
        positions = carray(address(header.positions), (nodes,), np.int64)
        slots = carray(address(header.slots), (nodes,), np.int64)
        places = carray(address(header.at), (nodes,), np.int64)
        capacity, keys_at = header.capacity, header.keys + task.layer * header.layer
        half, row = dim // 2, header.row
        places_of_head = dim // row
        cos, sin, turned, weight = np.empty((4, dim), np.float32)
        numbers = _zeros(dim)
        head = numbers[:dim]
        while True:
            first = fetch_add(taken, ROWS)
            if first >= nodes:
                return
            for node in range(first, min(first + ROWS, nodes)):
                _widen(cos_at + size * positions[node] * dim, kind, cos)
                _widen(sin_at + size * positions[node] * dim, kind, sin)
                source = qkv_at + size * node * (heads + 2 * kv_heads) * dim
                place = size * (slots[node] * header.heads * capacity + places[node]) * row
                of_q = of_k = np.float32(0)
                if whole != 0:
                    of_q = _inverse_rms_at(source, heads * dim, kind, eps)
                    of_k = _inverse_rms_at(source + size * heads * dim, kv_heads * dim, kind, eps)
                for h in range(heads + 2 * kv_heads):
                    _widen(source + size * h * dim, kind, head)
                    if h < normed:
                        _widen(norm_at + size * h * dim, kind, weight)
                        scale = of_q if h < heads else of_k
                        if whole == 0:
                            scale = _inverse_rms(numbers, dim, eps)
                        for i in range(dim):
                            head[i] *= scale * weight[i]
                    if h < heads + kv_heads:
                        for i in range(half):
                            turned[i] = head[i] * cos[i] + head[i + half] * sin[i]
                        for i in range(half):
                            turned[i + half] = head[i + half] * cos[i + half] + head[i] * sin[i + half]
                    else:
                        turned[:] = head
                    if h < heads:
                        to = _at(out_at + size * (node * heads + h) * dim, dim, kind)
                        for i in range(dim):
                            put(to, i, turned[i])
                        continue
                    to_at, own = keys_at + place, h - heads
                    if own >= kv_heads:
                        to_at, own = to_at + header.values, own - kv_heads
                    for part in range(places_of_head):
                        to = _at(to_at + size * (own * places_of_head + part) * capacity * row, row, kind)
                        for i in range(row):
                            put(to, i, turned[part * row + i])

    @cfunc("void(voidptr)", **FAST)
    def gate(at):  # type: ignore[no-untyped-def]
        """Write an `Activation` of gate and up."""
        task, taken = carray(at, (1,), GATE)[0], carray(at, (1,), np.int64)
        rows, gate_up_at, out_at, width = task.rows, task.gate_up, task.out, task.width
        linear, cubic, alone = float_of(np.uint32(task.linear)), float_of(np.uint32(task.cubic)), task.alone != 0
        limit, shift = float_of(np.uint32(task.limit)), float_of(np.uint32(task.shift))
        numbers = np.empty(width, np.float32)  # The compiler knows that this copy overlaps nothing.
        while True:
            first = fetch_add(taken, ROWS)
            if first >= rows:
                return
            for row in range(first, min(first + ROWS, rows)):
                begin = 2 * size * row * width
                gate, up = _at(gate_up_at + begin, width, kind), _at(gate_up_at + begin + size * width, width, kind)
                out = _at(out_at + size * row * width, width, kind)
                for i in range(width):
                    x = _at_most(widened(gate[i]), limit)
                    # A bound on the square keeps 0 times it at 0. The sigmoid is 0 or 1 long before the bound.
                    z = x * (linear + cubic * min(x * x, np.float32(1e9)))
                    numbers[i] = np.float32(1) / (np.float32(1) + exponential(-z))
                if not alone:
                    for i in range(width):
                        numbers[i] *= _at_most(widened(gate[i]), limit)
                for i in range(width):
                    put(out, i, numbers[i] * (-_at_most(-_at_most(widened(up[i]), limit), limit) + shift))

    return add_norm, rotate, gate


_BY_DTYPE = {torch.bfloat16: _kernels(np.uint16, 2), torch.float32: _kernels(np.float32, 4)}


def _run(kernel: Any, task: Norm | Rotation | Gate, numbers: int) -> None:
    """Run a kernel, on a single thread if it has few `numbers`."""
    on_threads(kernel, array("q", task), torch.get_num_threads() if numbers >= WORTH_SHARING else 1)


def _bits(number: float) -> int:
    """The bits of a float32, for a task."""
    return int(struct.unpack("I", struct.pack("f", number))[0])


_ONE = _bits(1.0)


@cache
def _words(activation: Activation) -> tuple[int, ...]:
    """An activation's fields of `Gate`."""
    return tuple(value if isinstance(value, bool) else _bits(value) for value in activation)


class FusedOps(TorchOps):
    """`TorchOps` for contiguous bfloat16 or float32 tensors on the CPU."""

    compiled = True

    def __init__(self, turns: Turns, eps: float):
        super().__init__(turns, eps)
        self._add_norm, self._rotate, self._gate = _BY_DTYPE[self.cos.dtype]
        self._tables = (self.cos.data_ptr(), self.sin.data_ptr())
        self._eps = _bits(eps)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, width = x.shape
        at = (x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr())
        _run(self._add_norm, Norm(0, rows, *at, width, self._eps, _ONE), rows * width)
        return out

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor | None, scale: float = 1.0) -> Pair:
        total = torch.empty_like(delta)
        out, weight_at = (total, 0) if weight is None else (torch.empty_like(delta), weight.data_ptr())
        rows, width = delta.shape
        at = (x.data_ptr(), delta.data_ptr(), weight_at, total.data_ptr(), out.data_ptr())
        _run(self._add_norm, Norm(0, rows, *at, width, self._eps, _bits(scale)), rows * width)
        return total, out

    def rotate(
        self, qkv: torch.Tensor, heads: int, kv_heads: int, qk_norm: torch.Tensor | None, places: Places, layer: int
    ) -> torch.Tensor:
        """As `TorchOps.rotate`, in a single pass."""
        nodes, every, dim = qkv.shape
        queries = qkv.new_empty(nodes, heads, dim)
        norm_at, normed, whole = 0, 0, False
        if qk_norm is not None:
            norm_at, normed, whole = qk_norm.data_ptr(), qk_norm.numel() // dim, qk_norm.ndim == 1
        at = (qkv.data_ptr(), queries.data_ptr(), *self._tables, norm_at, places.header.buffer_info()[0])
        task = Rotation(0, nodes, heads, kv_heads, dim, layer, *at, self._eps, normed, whole)
        _run(self._rotate, task, nodes * every * dim)
        return queries

    def gate(self, gate_up: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        task = Gate(0, rows, gate_up.data_ptr(), out.data_ptr(), width // 2, *_words(activation))
        _run(self._gate, task, rows * width)
        return out

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        return softmax(x, checked=False)
