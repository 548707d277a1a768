"""The elementwise steps of a layer: their interface, and an implementation in torch. `steps.py` has them compiled."""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from paceline.kernels.turns import Turns

Pair = tuple[torch.Tensor, torch.Tensor]
"""Two tensors of a forward, such as the summands of a layer's output."""


ALL_ROWS = 1 << 62
"""`Product.own_rows` of our kernels."""


class Activation(NamedTuple):
    """A gate's function: x * sigmoid(x * (linear + cubic * x**2)) * (up + shift).

    alone  without the first factor x.
    limit  largest x; up is between -limit and limit."""

    linear: float = 1.0
    cubic: float = 0.0
    alone: bool = False
    limit: float = math.inf
    shift: float = 0.0


_SLOPE = 2 * (2 / math.pi) ** 0.5
SILU, GELU, SIGMOID = Activation(), Activation(_SLOPE, 0.044715 * _SLOPE), Activation(alone=True)
"""GELU's (1 + tanh(u)) / 2 is sigmoid(2 u)."""


class Places(Protocol):
    """The places of the keys and values of a forward's packed nodes. header: a `Forward`, for compiled code."""

    @property
    def header(self) -> array[int]: ...

    def here(self, table: torch.Tensor) -> torch.Tensor:
        """The rows [N, 1, D] of a rotary table [positions, D] for the nodes' positions."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of the nodes, [N, kv_heads, head_dim] each."""


class TorchOps:
    """The elementwise steps of a layer in torch, for any device and dtype; the reference for `kernels/steps.py`.

    turns     a rotation is x * cos + swapped(x) * sin. Whoever plans a forward calls its `reach`.
    compiled  whether the steps are compiled, and attention with them."""

    compiled = False

    def __init__(self, turns: Turns, eps: float):
        self.turns, self.cos, self.sin, self.eps = turns, turns.cos, turns.sin, eps

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of x [N, H] with `weight` [H]."""
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor | None, scale: float = 1.0) -> Pair:
        """Compute total = x + scale * delta, all [N, H]. Returns total and its RMS norm; without a weight, total
        twice."""
        x = torch.add(x, delta, alpha=scale)
        return x, x if weight is None else self.norm(x, weight)

    def rotate(
        self, qkv: torch.Tensor, heads: int, kv_heads: int, qk_norm: torch.Tensor | None, places: Places, layer: int
    ) -> torch.Tensor:
        """Rotate queries and keys of qkv [N, heads + 2 kv_heads, D], and write keys and values to the cache. Returns
        the queries [N, heads, D].

        qk_norm  weights [heads + kv_heads, D] of an RMS norm of queries and keys before the rotation, or None. With
                 more rows, values are normed too. A vector [(heads + kv_heads) * D] norms all queries of a node
                 together, and all keys."""
        if qk_norm is not None and qk_norm.ndim == 2:
            normed = F.rms_norm(qkv[:, : len(qk_norm)], qkv.shape[-1:], None, self.eps) * qk_norm
            qkv = torch.cat([normed, qkv[:, len(qk_norm) :]], 1)
        qk = qkv[:, : heads + kv_heads]
        if qk_norm is not None and qk_norm.ndim == 1:
            parts = (part.flatten(1) for part in qk.split([heads, kv_heads], 1))
            normed = torch.cat([F.rms_norm(part, part.shape[1:], None, self.eps) for part in parts], 1)
            qk = (normed * qk_norm).view_as(qk)
        qk = torch.addcmul(qk * places.here(self.cos), qk.roll(qk.shape[-1] // 2, -1), places.here(self.sin))
        if kv_heads:
            places.write(layer, qk[:, heads:], qkv[:, heads + kv_heads :])
        return qk[:, :heads]

    def gate(self, gate_up: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
        """activation(gate, up), [N, M] from [N, 2 M]."""
        gate, up = gate_up.chunk(2, -1)
        if activation == SIGMOID:
            return up * gate.sigmoid()
        if activation in (SILU, GELU):
            return up * (F.silu(gate) if activation == SILU else F.gelu(gate, approximate="tanh"))
        linear, cubic, _, limit, shift = activation
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + shift
        return up * gate * (gate * (linear + cubic * gate.square())).sigmoid()

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        """The softmax of each row of x [N, M], in float32."""
        return x.softmax(-1, torch.float32)

    def scale_by_sigmoid(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x [N, M] times the sigmoid of gate, [N, M] or [N, 1]."""
        return self.gate(torch.cat([gate.expand_as(x), x], 1), SIGMOID)
