"""The steps of a decoder layer between its matrix products, in plain torch: the reference, for any device and dtype.

`paceline.target.kernels.steps` does the same in one pass each for bfloat16 on CPUs; a test compares the two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.target.cache import Writer
from paceline.target.layout import Layout


class TorchOps:
    """The elementwise steps of a layer.

    cos, sin  [positions, head_dim]; the first half of sin is negated, so that rotating is x * cos + swapped(x) * sin.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, eps: float):
        self.cos, self.sin, self.eps = cos, sin, eps

    def begin(self, layout: Layout) -> None:
        """Look up what every layer of this forward shares."""
        self._cos = self.cos[layout.positions].unsqueeze(1)
        self._sin = self.sin[layout.positions].unsqueeze(1)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of x [N, H] with `weight` [H]."""
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta, both [N, H], and its RMS norm."""
        x = x + delta
        return x, self.norm(x, weight)

    def rotate(
        self, qkv: torch.Tensor, heads: int, kv_heads: int, qk_norm: torch.Tensor | None, cache: Writer, layer: int
    ) -> torch.Tensor:
        """Queries [N, heads, D] of qkv [N, heads + 2 kv_heads, D], normed if asked and rotated to their positions.

        Keys get the same and go to the cache with the values."""
        qk = qkv[:, : heads + kv_heads]
        if qk_norm is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], None, self.eps) * qk_norm
        qk = torch.addcmul(qk * self._cos, qk.roll(qk.shape[-1] // 2, -1), self._sin)
        cache.write(layer, qk[:, heads:], qkv[:, heads + kv_heads :])
        return qk[:, :heads]

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [N, M] from [N, 2 M]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
