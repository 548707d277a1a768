"""A transformers model over rectangles: rows of a forward are padded on the left and realigned where they part.

What EQSPEC and EXSPEC run on (Zhang et al. 2025, arXiv 2510.22876). Trees are verified as well as chains: the path that
was accepted is brought together when the row is realigned. The time of realigning is booked as "align".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from paceline.errors import ModelError
from paceline.round import Segment
from paceline.schedules.cache import Block, RectangularCache
from paceline.target.base import Target
from paceline.target.hf import HFTarget, Padding
from paceline.tree import IntArray, ancestors


def rectangular(target: Target) -> RectangularTarget:
    """`target` with a rectangular cache of its own; the weights are shared. ModelError if it is not a transformers
    target."""
    if isinstance(target, RectangularTarget):
        return target
    if not isinstance(target, HFTarget):
        raise ModelError(
            f"{target.name} runs in the native decoder, which has no rectangular cache; "
            "load it with native=False for this schedule, or use the schedule ragged"
        )
    return RectangularTarget(target)


class RectangularTarget(HFTarget):
    """A transformers target, which has proved itself on loading, with rows in rectangles."""

    cache: RectangularCache  # type: ignore[assignment]

    def __init__(self, inner: HFTarget):
        vars(self).update(vars(inner) | {"threads": inner.threads})
        layers, _, _, heads, _, size = inner.cache.shape
        self.cache = RectangularCache(layers, heads, size, inner.cache.dtype, inner.device)

    def _forwards(self, segments: Sequence[Segment]) -> Iterator[list[int]]:
        yield list(range(len(segments)))

    def _forward(
        self, segments: Sequence[Segment], hidden_layers: Sequence[int]
    ) -> list[tuple[torch.Tensor, dict[int, torch.Tensor]]]:
        lengths = [self.cache.length(s.slot) for s in segments]
        block = self.cache.arrange([s.slot for s in segments], [s.num_run for s in segments])
        self.clock.lap("align")
        padding = Padding(segments, self.device)
        tokens = self._packed([s.tokens for s in segments])
        positions = self._packed([length + s.depth for length, s in zip(lengths, segments, strict=True)])
        mask = self._additive(_visible(segments, block))
        self.clock.lap("prepare")
        return self._run(segments, padding, tokens, positions, mask, _Columns(block), hidden_layers)

    def _packed(self, of_segments: Sequence[IntArray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(of_segments)).to(self.device)


def _visible(segments: Sequence[Segment], block: Block) -> NDArray[np.bool_]:
    """Which columns each query sees, bool [rows, queries, columns]: its row's tokens, its ancestors and itself; from
    lengths, whatever the tokens are. Padding sees the first column, or its softmax would be NaN."""
    columns = block.end + block.width
    visible = np.zeros((len(segments), block.width, columns), np.bool_)
    visible[:, :, 0] = True
    for row, (segment, pad) in enumerate(zip(segments, block.pads, strict=True)):
        n = segment.num_run
        visible[row, -n:, 0] = False
        visible[row, -n:, pad : block.end] = True
        visible[row, -n:, columns - n :] = ancestors(segment.parent)
    return visible


class _Columns(Cache):
    """A block as a cache of transformers, for one forward."""

    def __init__(self, block: Block):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._block = block

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [rows, kv_heads, queries, head_dim]; return those of all columns."""
        return self._block.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before this forward; models that are given positions and a mask do not use it."""
        return self._block.end

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number and offset of the columns that `update` returns."""
        return self._block.end + self._block.width, 0
