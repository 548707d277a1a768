"""The steps of a decoder layer between its matrix products, in one pass each, compiled by Numba for CPUs.

A forward of a small model is hundreds of operators over a few kilobytes, and launching them takes longer than running
them. Each kernel here replaces four to ten of torch's operators (`TorchOps` is the reference). It computes in float32
with one rounding at the end, on one thread, because the arrays are small. Rows are computed one by one, so a row's
result does not depend on their number. Kernels are for bfloat16, and for float32 where results must be exact
(docs/exact.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, njit

from paceline.compiled import address, float_of, put, widened
from paceline.target.attention import TorchOps
from paceline.target.cache import Writer
from paceline.target.layout import Layout

# Sums may be reordered and products fused, but NaN stays NaN: broken weights must not look like numbers.
# NumPy's division does not check for zeros; a check would keep loops from vectorising.
FAST: Any = {"cache": True, "fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}


@njit(inline="always")
def _exp(x: Any) -> Any:
    """e**x in float32, relative error below 1e-6: 2**k times a polynomial, without calls, so that loops vectorise."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    k = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = np.float32(1.3981999507e-3) + r * np.float32(1.9875691500e-4)
    p = np.float32(8.3334519073e-3) + r * p
    p = np.float32(4.1665795894e-2) + r * p
    p = np.float32(1.6666665459e-1) + r * p
    p = np.float32(5.0000001201e-1) + r * p
    p = np.float32(1.0) + r + r * r * p
    return p * float_of(np.uint32((np.int32(k) + np.int32(127)) << np.int32(23)))


@njit(inline="always")
def _at(where: Any, size: Any, kind: Any) -> Any:
    """`size` numbers at an address; kind: np.uint16 for the bits of bfloat16, or np.float32."""
    return carray(address(where), (size,), kind)


@njit(inline="always")
def _widen(where: Any, kind: Any, out: Any) -> None:
    """Fill `out`, float32, with the numbers at an address."""
    numbers = _at(where, len(out), kind)
    for i in range(len(out)):
        out[i] = widened(numbers[i])


@njit(inline="always")
def _inverse_rms(x: Any, eps: Any) -> Any:
    """1 / sqrt(mean(x**2) + eps)."""
    square = np.float32(0)
    for i in range(len(x)):
        square += x[i] * x[i]
    return np.float32(1) / np.sqrt(square / np.float32(len(x)) + eps)


class _Kernels(NamedTuple):
    """The compiled functions for one dtype."""

    add_norm: Any
    rotate: Any
    gate: Any


def _kernels(kind: Any, size: int) -> _Kernels:
    """kind: np.uint16 for the bits of bfloat16, or np.float32. size: bytes of a number. Arguments are addresses, then
    sizes."""

    @njit("void(int64, int64, int64, int64, int64, int64, int64, float32)", **FAST)
    def add_norm(x_at, delta_at, weight_at, sum_at, out_at, rows, width, eps):  # type: ignore[no-untyped-def]
        """sum = x + delta, out = RMS norm of sum. If delta_at is 0, sum is x and is not written."""
        # With copies in float32 the compiler knows that nothing overlaps, and vectorises every loop.
        weight, numbers = np.empty(width, np.float32), np.empty(width, np.float32)
        _widen(weight_at, kind, weight)
        for row in range(rows):
            begin = size * row * width
            x = _at(x_at + begin, width, kind)
            if delta_at != 0:
                delta, total = _at(delta_at + begin, width, kind), _at(sum_at + begin, width, kind)
                for i in range(width):
                    put(total, i, widened(x[i]) + widened(delta[i]))
                x = total
            for i in range(width):
                numbers[i] = widened(x[i])
            scale = _inverse_rms(numbers, eps)
            out = _at(out_at + begin, width, kind)
            for i in range(width):
                put(out, i, numbers[i] * scale * weight[i])

    @njit(f"void({'int64, ' * 15}float32)", **FAST)
    def rotate(  # type: ignore[no-untyped-def]
        qkv_at, out_at, cos_at, sin_at, norm_at, positions_at, slots_at, places_at, keys_at, values_at,
        nodes, heads, kv_heads, dim, capacity, eps,
    ):  # fmt: skip
        """Norm (unless norm_at is 0) and rotate q and k; write q to `out`, k and v to their places in the cache."""
        positions = carray(address(positions_at), (nodes,), np.int64)
        slots = carray(address(slots_at), (nodes,), np.int64)
        places = carray(address(places_at), (nodes,), np.int64)
        half = dim // 2
        cos, sin, head, turned, weight = np.empty((5, dim), np.float32)
        for node in range(nodes):
            _widen(cos_at + size * positions[node] * dim, kind, cos)
            _widen(sin_at + size * positions[node] * dim, kind, sin)
            source = qkv_at + size * node * (heads + 2 * kv_heads) * dim
            place = size * (slots[node] * kv_heads * capacity + places[node]) * dim
            for h in range(heads + kv_heads):
                _widen(source + size * h * dim, kind, head)
                if norm_at != 0:
                    _widen(norm_at + size * h * dim, kind, weight)
                    scale = _inverse_rms(head, eps)
                    for i in range(dim):
                        head[i] *= scale * weight[i]
                for i in range(half):
                    turned[i] = head[i] * cos[i] + head[i + half] * sin[i]
                for i in range(half):
                    turned[i + half] = head[i + half] * cos[i + half] + head[i] * sin[i + half]
                to_at = out_at + size * (node * heads + h) * dim
                if h >= heads:
                    to_at = keys_at + place + size * (h - heads) * capacity * dim
                to = _at(to_at, dim, kind)
                for i in range(dim):
                    put(to, i, turned[i])
            for h in range(kv_heads):
                value = _at(source + size * (heads + kv_heads + h) * dim, dim, kind)
                to = _at(values_at + place + size * h * capacity * dim, dim, kind)
                for i in range(dim):
                    to[i] = value[i]

    @njit("void(int64, int64, int64, int64)", **FAST)
    def gate(gate_up_at, out_at, rows, width):  # type: ignore[no-untyped-def]
        """out = silu(gate) * up."""
        for row in range(rows):
            begin = 2 * size * row * width
            gate, up = _at(gate_up_at + begin, width, kind), _at(gate_up_at + begin + size * width, width, kind)
            out = _at(out_at + size * row * width, width, kind)
            for i in range(width):
                x = widened(gate[i])
                put(out, i, x / (np.float32(1) + _exp(-x)) * widened(up[i]))

    return _Kernels(add_norm, rotate, gate)


_BY_DTYPE = {torch.bfloat16: _kernels(np.uint16, 2), torch.float32: _kernels(np.float32, 4)}


class FusedOps(TorchOps):
    """`TorchOps` for contiguous bfloat16 or float32 tensors on the CPU."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, eps: float):
        super().__init__(cos.contiguous(), sin.contiguous(), eps)
        self._kernels = _BY_DTYPE[cos.dtype]
        self._tables = (self.cos.data_ptr(), self.sin.data_ptr())

    def begin(self, layout: Layout) -> None:
        self._nodes = (layout.positions.data_ptr(), layout.slots.data_ptr(), layout.at.data_ptr())

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, width = x.shape
        self._kernels.add_norm(x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr(), rows, width, self.eps)
        return out

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, out = torch.empty_like(delta), torch.empty_like(delta)
        rows, width = delta.shape
        at = (x.data_ptr(), delta.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr())
        self._kernels.add_norm(*at, rows, width, self.eps)
        return total, out

    def rotate(
        self, qkv: torch.Tensor, heads: int, kv_heads: int, qk_norm: torch.Tensor | None, cache: Writer, layer: int
    ) -> torch.Tensor:
        """As `TorchOps.rotate`, into the cache and a new tensor in one pass."""
        nodes, _, dim = qkv.shape
        queries = qkv.new_empty(nodes, heads, dim)
        keys_at, values_at, capacity = cache.addresses(layer)
        norm_at = 0 if qk_norm is None else qk_norm.data_ptr()
        self._kernels.rotate(
            qkv.data_ptr(), queries.data_ptr(), *self._tables, norm_at, *self._nodes, keys_at, values_at,
            nodes, heads, kv_heads, dim, capacity, self.eps,
        )  # fmt: skip
        return queries

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._kernels.gate(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out
