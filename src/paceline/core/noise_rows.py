"""The noise of many rows at once, on an accelerator: the same tokens as `paceline.core.noise` chooses one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.noise import MASK, MULTIPLIERS, NOTHING, ROUNDS, WEYL
from paceline.errors import NumericError

TIED = 8
"""How many tokens of a row get a second word on an accelerator. In a flat distribution over 150,000, more tokens have
nearly the same first word once in 1e40 draws."""
PIECE = 1 << 24
"""Number of probabilities whose times are computed together. Each of a dozen temporary tensors then has 128 MiB."""


def tokens_of_rows(probs: torch.Tensor, keys: Sequence[int], positions: Sequence[int]) -> list[int]:
    """`Noise.choose` for each row of `probs` [R, V], with the row's key and position, in a single wait."""
    signed = [key - 2**64 if key >= 2**63 else key for key in keys]
    key, at = (torch.tensor(numbers, device=probs.device).unsqueeze(-1) for numbers in (signed, list(positions)))
    size = max(PIECE // probs.shape[-1], 1)
    pieces = zip(*(of.split(size) for of in (probs, key, at)), strict=True)
    tokens: list[int] = torch.cat([_tokens_of(*piece) for piece in pieces]).tolist()
    if min(tokens) < 0:
        raise NumericError(NOTHING)
    return tokens


def _tokens_of(probs: torch.Tensor, key: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The token of each row, int64 [R]; -1 if the row of `probs` [R, V] has NaN or infinity, or only 0.

    key, at  keys and positions, int64 [R, 1]."""
    size, rates = probs.shape[-1], probs.double()
    ids = torch.arange(size, device=probs.device).unsqueeze(0)
    bad = ~torch.isfinite(rates).all(-1) | (rates.amax(-1) <= 0)
    rates = torch.where(rates > 0, rates, 0.0)
    # The first words give lower bounds of the times. The second words decide between the smallest.
    lower = torch.log1p(-_words(key, ids, at, 0).double() * 2.0**-32).neg() / rates
    lower = torch.where(rates > 0, lower, torch.inf)
    near = lower.topk(min(TIED, size), largest=False).indices.sort(-1).values
    first, second = (_words(key, near, at, word).double() for word in (0, 1))
    y = (first + (second + 0.5) * 2.0**-32) * 2.0**-32
    exact = torch.log1p(-y.clamp_max(1 - 2.0**-53)).neg() / rates.gather(-1, near)
    chosen = near.gather(-1, exact.nan_to_num(torch.inf, torch.inf).argmin(-1, keepdim=True))[:, 0]
    return chosen.masked_fill(bad, -1)


def _words(key: torch.Tensor, ids: torch.Tensor, position: torch.Tensor, word: int) -> torch.Tensor:
    """The first (word 0) or second (1) words of tokens `ids` [R or 1, n], int64 [R, n]. key, position: int64 [R, 1]."""

    def high(product: torch.Tensor) -> torch.Tensor:  # upper 32 of the product's 64 bits
        return (product >> 32) & MASK

    c0, c1, c2, c3 = ids >> 2, position, torch.full_like(position, word), torch.zeros_like(position)
    k0, k1 = key & MASK, (key >> 32) & MASK
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = high(b) ^ c1 ^ k0, b & MASK, high(a) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    lane = (ids & 3).expand_as(c0)
    return torch.stack([c0, *(c.expand_as(c0) for c in (c1, c2, c3))]).gather(0, lane.unsqueeze(0))[0]
