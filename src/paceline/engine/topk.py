"""The k best tokens of every row of logits. Knows nothing of sampling or drafts.

For drafters that learn from every verified node (`Needs.top_k`). On a CPU torch.topk takes several times as long: here
one vectorised pass finds the best of each block, and only a block whose best is among the k best is searched.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from paceline.compiled import address

BLOCK = 256
"""Tokens in a block."""

LOWEST = np.int32(-0x80000000)


def top_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and token ids of the k best of each row of logits [n, V], both [n, k], the best first."""
    wide = logits.dtype == torch.float32
    compiled = logits.device.type == "cpu" and logits.is_contiguous() and k <= logits.shape[1]
    if not compiled or not (wide or logits.dtype == torch.bfloat16):
        return torch.topk(logits, k)
    best = torch.empty(len(logits), k, dtype=torch.int64)
    rows, size = logits.shape
    (_top_float32 if wide else _top_bfloat16)(logits.data_ptr(), best.data_ptr(), rows, size, k)
    return logits.gather(1, best), best


# Compared as integers, for integer maxima vectorise: floats in order are integers in order once negative ones have
# their lower bits flipped.


@njit(inline="always")
def _key(bits):  # type: ignore[no-untyped-def]
    """An int32 that orders float32 bits as the numbers."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit
def _top(numbers, shift, blocks, best, keys):  # type: ignore[no-untyped-def]
    """The ids of the largest numbers, each the bits of a float32 once shifted, the largest first, lower ids first
    among equals. Working space: blocks int32 [number of blocks], keys int32 [k]."""
    shift, k = np.int32(shift), len(best)
    for b in range(len(blocks)):
        top, block = LOWEST, numbers[b * BLOCK : (b + 1) * BLOCK]
        for i in range(len(block)):
            top = max(top, _key(np.int32(block[i]) << shift))
        blocks[b] = top
    count = 0
    for b in range(len(blocks)):
        if count == k and blocks[b] <= keys[k - 1]:
            continue
        for i in range(b * BLOCK, min((b + 1) * BLOCK, len(numbers))):
            key = _key(np.int32(numbers[i]) << shift)
            if count == k and key <= keys[k - 1]:
                continue
            at = count if count < k else k - 1
            while at > 0 and keys[at - 1] < key:
                keys[at], best[at] = keys[at - 1], best[at - 1]
                at -= 1
            keys[at], best[at] = key, i
            count = min(count + 1, k)


@njit("void(int64, int64, int64, int64, int64)", cache=True)
def _top_float32(where, out, rows, size, k):  # type: ignore[no-untyped-def]
    numbers, best = carray(address(where), (rows, size), np.int32), carray(address(out), (rows, k), np.int64)
    blocks, keys = np.empty((size + BLOCK - 1) // BLOCK, np.int32), np.empty(k, np.int32)
    for row in range(rows):
        _top(numbers[row], 0, blocks, best[row], keys)


@njit("void(int64, int64, int64, int64, int64)", cache=True)
def _top_bfloat16(where, out, rows, size, k):  # type: ignore[no-untyped-def]
    numbers, best = carray(address(where), (rows, size), np.int16), carray(address(out), (rows, k), np.int64)
    blocks, keys = np.empty((size + BLOCK - 1) // BLOCK, np.int32), np.empty(k, np.int32)
    for row in range(rows):
        _top(numbers[row], 16, blocks, best[row], keys)
