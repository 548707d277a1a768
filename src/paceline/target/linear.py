"""Linear: a matrix product whose weights are stored in the order that streams fastest on their device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.target import products


class Linear:
    """x @ weight.T + bias. Weights are stored in `panels` where our kernel is `preferred`, in oneDNN's order on other
    CPUs with bfloat16 units, and else unchanged."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.bias = bias
        self.packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _has_bf16_units()
        self.panels = products.Panels(weight, bias) if products.fits(weight) and products.preferred() else None
        if self.panels is None:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.panels is not None:
            return self.panels(x)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def rows(self, ids: torch.Tensor) -> Linear:
        """The outputs `ids` alone, from a copy of their weights, so that less is read."""
        return Linear(self.dense()[ids], None if self.bias is None else self.bias[ids])

    def dense(self) -> torch.Tensor:
        """The weight [outputs, inputs] as it was."""
        if self.panels is not None:
            return self.panels.dense()
        return self.weight.to_dense() if self.packed else self.weight


def _has_bf16_units() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
