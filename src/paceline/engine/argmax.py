"""The best token of one row of logits, on the CPU. Knows nothing of sampling or drafts.

Between two forwards every operator starts with cold caches and costs tens of microseconds, whatever its size; this is
one call where torch and NumPy need five. It also finds NaN and infinity at no cost.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from paceline.compiled import address
from paceline.errors import NumericError

BLOCK = 512
"""Tokens in a block. Its maximum is taken without the index, so that the inner loop vectorises."""

INFINITY = np.int32(0x7F800000)
MINUS_INFINITY_BITS = np.int32(-0x800000)
MINUS_INFINITY = np.int32(-0x7F800001)
LOWEST = np.int32(-0x80000000)


def best_token(logits: torch.Tensor, row: int) -> int:
    """The most probable token in `logits[row]`, logits [n, V] on the CPU; the lowest of several.

    Raises NumericError if the row has NaN or infinity, or nothing above minus infinity."""
    if logits.dtype not in (torch.bfloat16, torch.float32) or logits.stride(1) != 1:
        logits, row = logits[row : row + 1].float().contiguous(), 0
    wide = logits.dtype == torch.float32
    where = logits.data_ptr() + row * logits.stride(0) * logits.element_size()
    token = int((_best_float32 if wide else _best_bfloat16)(where, logits.shape[1]))
    if token < 0:
        raise NumericError("The target's logits are NaN or infinite; its weights or dtype are broken.")
    return token


# Compared as integers, for integer maxima vectorise: floats in order are integers in order once negative ones have
# their lower bits flipped. The largest magnitude tells whether there is a NaN or an infinity.


@njit(inline="always")
def _key(bits):  # type: ignore[no-untyped-def]
    """An int32 that orders float32 bits as the numbers; minus zero is zero."""
    key = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
    return np.int32(0) if key == np.int32(-1) else key


@njit
def _best(numbers, shift):  # type: ignore[no-untyped-def]
    """Index of the largest number, each the bits of a float32 once shifted; -1 if one is NaN or +inf, or all -inf."""
    size, shift = len(numbers), np.int32(shift)
    best, best_block = MINUS_INFINITY, -1
    for begin in range(0, size, BLOCK):
        block = numbers[begin : begin + BLOCK]
        top, magnitude = LOWEST, np.int32(0)
        for i in range(len(block)):
            bits = np.int32(block[i]) << shift
            top = max(top, _key(bits))
            magnitude = max(magnitude, (np.int32(0) if bits == MINUS_INFINITY_BITS else bits) & np.int32(0x7FFFFFFF))
        if magnitude >= INFINITY:
            return -1
        if top > best:
            best, best_block = top, begin
    if best_block >= 0:
        for i in range(best_block, size):
            if _key(np.int32(numbers[i]) << shift) == best:
                return i
    return -1


@njit("int64(int64, int64)", cache=True)
def _best_bfloat16(where, size):  # type: ignore[no-untyped-def]
    return _best(carray(address(where), (size,), np.int16), 16)


@njit("int64(int64, int64)", cache=True)
def _best_float32(where, size):  # type: ignore[no-untyped-def]
    return _best(carray(address(where), (size,), np.int32), 0)
