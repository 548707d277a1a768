"""Turns: tables of rotary positions, of which rows are made when a position is first used."""

import numpy as np
import torch

from paceline.compiled import cosines_and_sines

STEP = 1024
"""Rows are made so many at a time."""


class Turns:
    """cos and sin of positions, [positions, head_dim]. The first half of sin is negated.

    Models know up to millions of positions, and most texts are short. On a CPU the tables are allocated whole, but
    memory that nobody has written takes no room, and compiled code may keep the addresses. Elsewhere all is made at
    once.

    frequencies  float32 [up to head_dim / 2], in radians a position; the other dimensions do not rotate.
    scale        factor of cos and sin where they rotate. factor: of all."""

    def __init__(
        self, count: int, head_dim: int, frequencies: torch.Tensor, scale: float = 1.0, factor: float = 1.0,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ):  # fmt: skip
        self.frequencies, self.scale, self.factor = frequencies.float().cpu(), scale, factor
        self.cos, self.sin = (torch.empty(count, head_dim, dtype=dtype, device=device) for _ in range(2))
        self._made = 0
        if self.cos.device.type != "cpu":
            self.reach(count)

    @property
    def key(self) -> bytes:
        """Bytes that are the same for the same tables."""
        return self.frequencies.numpy().tobytes() + np.array([self.scale, self.factor, *self.cos.shape]).tobytes()

    def reach(self, count: int) -> None:
        """Make the rows of the first `count` positions, if they are not there."""
        if count <= self._made or self._made == len(self.cos):
            return
        last = min(-(-count // STEP) * STEP, len(self.cos))
        for first in range(self._made, last, STEP):
            self._make(first, min(first + STEP, last))
        self._made = last  # Another thread sees the rows before it sees the number.

    @torch.inference_mode()  # Tables that were made in this mode may be written in it alone.
    def _make(self, first: int, last: int) -> None:
        angle = torch.outer(torch.arange(first, last).float(), self.frequencies)
        rest = self.cos.shape[1] // 2 - angle.shape[1]
        still = torch.ones(last - first, rest), torch.zeros(last - first, rest)
        turns = (torch.from_numpy(table) for table in cosines_and_sines(angle.numpy()))
        cos, sin = (torch.cat([t * self.scale, other], -1) for t, other in zip(turns, still, strict=True))
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        self.cos[first:last], self.sin[first:last] = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
