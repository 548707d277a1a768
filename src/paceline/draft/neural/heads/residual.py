"""Residual blocks: what draft heads put between the target's state and an output head.

Cai et al. 2024, "Medusa" (arXiv 2401.10774, section 2.1.1): head k is x + SiLU(W x + b), repeated, then an output head.
W begins at 0, so that an untrained head says what the target's own head says. So does b here; the authors leave it
random. Names of the parameters are those of their files.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu


class ResBlock(nn.Module):
    """x + SiLU(W x + b), [..., width]. An input of another width is projected: A x + SiLU(W x + b), which is the first
    block of Hydra's heads (Ankner et al. 2024, arXiv 2402.05109)."""

    def __init__(self, width: int, inputs: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs or width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection = nn.Identity() if inputs is None else nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.res_connection(x) + silu(self.linear(x))
        return y


class ResidualHeads(nn.ModuleList):
    """K heads of `layers` blocks each over one state. Parameters are called `{head}.{layer}.linear.weight`."""

    def __init__(self, heads: int, layers: int, width: int) -> None:
        super().__init__(nn.Sequential(*(ResBlock(width) for _ in range(layers))) for _ in range(heads))
