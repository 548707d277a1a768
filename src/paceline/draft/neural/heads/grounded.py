"""Grounded heads: each one reads the drafted tokens before it, so the tree is drafted level by level.

Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv 2402.05109). Head k, counted
from 0, reads the state s and the embeddings of the k + 1 tokens after it, (k + 2) widths in all:

    z = A u + SiLU(B u), then Medusa's residual blocks, which share one set of weights, then the output head

Names of the parameters are those of the authors' files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.draft.neural.heads.residual import ResBlock

PREFIX = "prefix_embeding_layer"
"""What the authors' files call the prefix layer, misspelt as there."""


class GroundedHeads(nn.Module):
    """K heads of `layers` blocks. Head k's first block begins as the identity on the state, so an untrained head says
    what the target's own head says.

    tied  the blocks after the first are one block, run again and again, as the authors' are."""

    def __init__(self, heads: int, layers: int, width: int, tied: bool = True) -> None:
        super().__init__()
        self.width = width
        self.hydra_mlp = nn.ModuleList(_head(k, layers, width, tied) for k in range(heads))

    def __len__(self) -> int:
        return len(self.hydra_mlp)

    def forward(self, k: int, state: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        """What head k's output head reads, [N, width], from a state [N, width] and the embeddings [N, width] of the
        k + 1 tokens that follow it."""
        y: Tensor = self.hydra_mlp[k](torch.cat([state, *tokens], -1))
        return y


def _head(k: int, layers: int, width: int, tied: bool) -> nn.Sequential:
    first = ResBlock(width, (k + 2) * width)
    connection = first.res_connection
    assert isinstance(connection, nn.Linear)
    with torch.no_grad():  # the state itself, and nothing of the tokens
        connection.weight.zero_()
        connection.weight[:, :width].copy_(torch.eye(width))
        connection.bias.zero_()
    again = ResBlock(width)
    rest = [again if tied else ResBlock(width) for _ in range(layers - 1)]
    return nn.Sequential(first, *rest)
