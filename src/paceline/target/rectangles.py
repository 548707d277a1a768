"""A transformers target whose rows lie in rectangles, as in the schedules EQSPEC and EXSPEC, for comparison.

Zhang et al. 2025, arXiv 2510.22876. The rows of a forward lie right-aligned in a block, padded on the left. `arrange`
keeps the method's invariant: p + c = L for each row, with p columns of padding before its c tokens. Padding follows
from lengths alone, never from token ids. If all rows committed the same number of tokens, they stay where they are.
Otherwise all rows are copied into a new block, all layers in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.core.clock import Clock
from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.errors import ModelError
from paceline.target.base import Target
from paceline.target.hf import HFTarget, OneForward, Padding, Results, visible

GRANULE = 16  # The number of a block's columns is a multiple of this.


@dataclass(eq=False)
class Block:
    """A rectangle of rows.

    kv     [layers, 2, rows, kv_heads, columns, head_dim].
    slots  the cache's slots of its rows, in order.
    end    number of columns in use, L.
    pads   number of unused columns before each row's tokens.
    width  number of columns that the current forward writes after `end`."""

    kv: torch.Tensor
    slots: list[int]
    end: int
    pads: list[int] = field(default_factory=list)
    width: int = 0


@dataclass(eq=False)
class _Row:
    """The place of a row's tokens: row `index` of `block`.

    runs  ranges of columns, (begin, end), in the order of the text.
    new   the column of node 0 of the segment that was just run."""

    block: Block | None = None
    index: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    new: int = 0

    @property
    def length(self) -> int:
        return sum(end - begin for begin, end in self.runs)

    def keep(self, column: int) -> None:
        """Append a column of the block to the row's tokens."""
        if self.runs and self.runs[-1][1] == column:
            self.runs[-1] = (self.runs[-1][0], column + 1)
        else:
            self.runs.append((column, column + 1))


class RectangularCache:
    """Keys and values of rows that come and go, in blocks that are made anew when their rows change.

    moved_bytes  bytes of keys and values that were read and written to realign rows.
    realigned    number of realignments."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str):
        self._shape = (layers, 2, kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self._bytes_per_token = 2 * layers * kv_heads * head_dim * dtype.itemsize
        self._rows: dict[int, _Row] = {}
        self.moved_bytes = self.realigned = 0

    def add_row(self, expected_length: int) -> int:
        """Take the lowest free slot for an empty row. Memory is allocated when the row is first run."""
        slot = next(i for i in range(len(self._rows) + 1) if i not in self._rows)
        self._rows[slot] = _Row()
        return slot

    def drop_row(self, slot: int) -> None:
        """Free a slot. The block's memory is freed when its last row leaves."""
        self._row(slot)
        del self._rows[slot]

    def length(self, slot: int) -> int:
        """Number of committed tokens of a row."""
        return self._row(slot).length

    def _row(self, slot: int) -> _Row:
        if slot not in self._rows:
            raise ValueError(f"slot {slot} holds no row")
        return self._rows[slot]

    def arrange(self, slots: Sequence[int], counts: Sequence[int]) -> Block:
        """Find or make the block of exactly these rows, right-aligned. Row i will run counts[i] tokens, which are
        right-aligned, too."""
        rows, width = [self._row(slot) for slot in slots], max(counts)
        block, length = _aligned(rows, slots), sum(row.length for row in rows)
        if block is None:
            self.realigned += length > 0
            self.moved_bytes += 2 * length * self._bytes_per_token
        if block is None or block.end + width > block.kv.shape[4]:
            block = self._moved(rows, slots, width)
        block.width, block.pads = width, [block.end - row.length for row in rows]
        for row, count in zip(rows, counts, strict=True):
            row.new = block.end + width - count
        return block

    def _moved(self, rows: Sequence[_Row], slots: Sequence[int], width: int) -> Block:
        """Copy the tokens of `rows` to a new block."""
        end = max(row.length for row in rows)
        columns = -(-(end + width + end // 8) // GRANULE) * GRANULE
        layers, two, heads, size = self._shape
        kv = torch.empty(layers, two, len(rows), heads, columns, size, dtype=self._dtype, device=self._device)
        block = Block(kv, list(slots), end)
        for i, row in enumerate(rows):
            pad = end - row.length
            kv[:, :, i, :, :pad] = 0  # Masked values must not be NaN, because 0 times NaN is NaN.
            at = pad
            for begin, stop in row.runs:
                assert row.block is not None
                kv[:, :, i, :, at : at + stop - begin] = row.block.kv[:, :, row.index, :, begin:stop]
                at += stop - begin
            row.block, row.index, row.runs = block, i, [(pad, end)] if end > pad else []
        return block

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep nodes `path` (ascending from 0) of the segment just run as the row's next tokens."""
        row = self._row(slot)
        for node in path:
            row.keep(row.new + node)


def _aligned(rows: Sequence[_Row], slots: Sequence[int]) -> Block | None:
    """The block of exactly these rows in this order, if each is a single run up to the same column; else None."""
    block = rows[0].block
    if block is None or block.slots != list(slots) or any(row.block is not block for row in rows):
        return None
    if any(len(row.runs) != 1 or row.runs[0][1] != rows[0].runs[0][1] for row in rows):
        return None
    block.end = rows[0].runs[0][1]
    return block


def rectangular(target: Target) -> RectangularTarget:
    """Make a target with a rectangular cache and the weights of `target`. ModelError for other than transformers
    targets."""
    if isinstance(target, RectangularTarget):
        return target
    if not isinstance(target, HFTarget):
        instead = "load it with native=False for this schedule, or use the schedule ragged"
        raise ModelError(f"{target.name} runs in the native decoder, which has no rectangular cache; {instead}")
    return RectangularTarget(target)


class RectangularTarget(HFTarget):
    """A transformers target with a rectangular cache and the weights of `inner`, which was checked on loading."""

    cache: RectangularCache  # type: ignore[assignment]

    def __init__(self, inner: HFTarget):
        vars(self).update(vars(inner))
        layers, _, _, heads, _, size = inner.cache.kv.shape
        self.cache = RectangularCache(layers, heads, size, inner.cache.kv.dtype, inner.device)

    def _forwards(self, segments: Sequence[Segment]) -> Iterator[list[int]]:
        yield list(range(len(segments)))

    def _forward(self, segments: Sequence[Segment], hidden_layers: Sequence[int], clock: Clock) -> Results:
        lengths = [self.cache.length(s.slot) for s in segments]
        block = self.cache.arrange([s.slot for s in segments], [s.num_run for s in segments])
        clock.lap("align")
        padding = Padding([s.num_run for s in segments], self.device)
        tokens = self._packed(s.tokens for s in segments)
        positions = self._packed(length + s.depth for length, s in zip(lengths, segments, strict=True))
        columns = block.end + block.width
        places = [(pad, block.end, columns - s.num_run) for pad, s in zip(block.pads, segments, strict=True)]
        mask = self._additive(visible(segments, places, block.width, columns))
        clock.lap("prepare")
        return self._run(segments, padding, tokens, positions, mask, _Columns(block), hidden_layers, clock)

    def _packed(self, of_segments: Iterable[IntArray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([*of_segments])).to(self.device)


class _Columns(OneForward):
    """A block as a transformers cache."""

    def __init__(self, block: Block):
        super().__init__(block.end + block.width, block.width)
        self._block = block

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [rows, kv_heads, queries, head_dim]. Returns those of all columns."""
        begin, kv = self._block.end, self._block.kv[layer_idx, :, :, :, : self._keys]
        kv[0, :, :, begin:], kv[1, :, :, begin:] = key_states, value_states
        return kv[0], kv[1]
