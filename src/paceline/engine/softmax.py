"""From one row of logits to a token, on the CPU: softmax, filters, draw. Knows nothing of rows or drafts.

Compiled for the reason given in `paceline.engine.argmax`: these three calls replace two dozen operators.
`warp` and `draw_rows` of `paceline.engine.sampling` are the same in torch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import carray, njit

from paceline.compiled import address, bits_of, float_of, halves, wide
from paceline.engine.argmax import _best
from paceline.errors import NumericError

# Sums may be added up in any order, and there are no NaNs: `_best` has looked. There are infinities.
FREELY = {"nnan", "nsz", "reassoc", "contract", "arcp"}

BLOCK = 256


def softmax_of_row(logits: torch.Tensor, row: int, temperature: float = 1.0) -> torch.Tensor:
    """softmax(logits[row] / temperature), float32 [V], for logits [n, V] in bfloat16 or float32 on the CPU.

    Probabilities below e^-87 of the largest are 0. Raises NumericError if the row has NaN or infinity, or nothing
    above minus infinity."""
    if logits.stride(1) != 1:
        logits, row = logits[row : row + 1].contiguous(), 0
    probs = torch.empty(logits.shape[1])
    where = logits.data_ptr() + row * logits.stride(0) * logits.element_size()
    kernel = _softmax_float32 if logits.dtype == torch.float32 else _softmax_bfloat16
    if not kernel(where, logits.shape[1], temperature, probs.data_ptr()):
        raise NumericError("The target's logits are NaN or infinite; its weights or dtype are broken.")
    return probs


def softmax_of_rows(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """`softmax_of_row` of all rows of logits [n, V] in one call, bit for bit the same; [n, V]."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    count, size = logits.shape
    probs = torch.empty(count, size)
    kernel = _softmaxes_float32 if logits.dtype == torch.float32 else _softmaxes_bfloat16
    stride = logits.stride(0) * logits.element_size()
    if not kernel(logits.data_ptr(), stride, count, size, temperature, probs.data_ptr()):
        raise NumericError("The target's logits are NaN or infinite; its weights or dtype are broken.")
    return probs


def certainty_of_row(logits: torch.Tensor, row: int) -> tuple[float, float]:
    """Of softmax(logits[row]): the entropy in nats, never negative, and the best token's probability.

    logits  [n, V], bfloat16 or float32 on the CPU. The distribution itself is not written down. Raises NumericError if
    the row has NaN or infinity, or nothing above minus infinity."""
    if logits.stride(1) != 1:
        logits, row = logits[row : row + 1].contiguous(), 0
    where = logits.data_ptr() + row * logits.stride(0) * logits.element_size()
    kernel = _certainty_float32 if logits.dtype == torch.float32 else _certainty_bfloat16
    entropy, best = kernel(where, logits.shape[1])
    if entropy < 0:
        raise NumericError("The model's logits are NaN or infinite; its weights or dtype are broken.")
    return entropy, best


def token_at(probs: torch.Tensor, noise: float) -> int:
    """The token at `noise` in [0, 1) of the cumulative distribution `probs` [V], float32 or float64 on the CPU.

    Raises NumericError if `probs` are not numbers, or all 0."""
    probs = probs.contiguous()
    kernel = _token_at_float32 if probs.dtype == torch.float32 else _token_at_float64
    token = int(kernel(probs.data_ptr(), len(probs), noise))
    if token < 0:
        raise NumericError("Cannot draw a token: the probabilities are not numbers, or all 0.")
    return token


def keep_best(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """Filter `probs` [V], a float32 distribution on the CPU, in place: top-k, then top-p, then min-p.

    As in `SamplingParams`; 0, 1 and 0 filter nothing."""
    _keep_best(probs.data_ptr(), len(probs), top_k, top_p, min_p)


@njit(fastmath={"contract"})  # in another order the two parts of ln 2 would be one
def _exp(x):  # type: ignore[no-untyped-def]
    """e^x for x <= 0, to float32's last bit or two; 0 below -87. (Cephes' expf.)"""
    x = max(x, np.float32(-88))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = (y * r * r + r) + np.float32(1)
    power = float_of(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))
    return y * power if x > np.float32(-87) else np.float32(0)


@njit("int64(int64, int64, float64, int64)", cache=True, fastmath=FREELY)
def _softmax_float32(where, size, temperature, out):  # type: ignore[no-untyped-def]
    best = _best(carray(address(where), (size,), np.int32), 0)
    if best < 0:
        return 0
    logits, probs = carray(address(where), (size,), np.float32), carray(address(out), (size,), np.float32)
    top, colder, total = logits[best], np.float32(1 / temperature), np.float32(0)
    for i in range(size):
        probs[i] = _exp((logits[i] - top) * colder)
        total += probs[i]
    for i in range(size):
        probs[i] /= total
    return 1


@njit("int64(int64, int64, int64, int64, float64, int64)", cache=True)
def _softmaxes_float32(where, stride, count, size, temperature, out):  # type: ignore[no-untyped-def]
    for r in range(count):
        if not _softmax_float32(where + r * stride, size, temperature, out + 4 * r * size):
            return 0
    return 1


@njit("int64(int64, int64, float64, int64)", cache=True, fastmath=FREELY)
def _softmax_bfloat16(where, size, temperature, out):  # type: ignore[no-untyped-def]
    best = _best(carray(address(where), (size,), np.int16), 16)
    if best < 0:
        return 0
    logits, probs = halves(where, size), carray(address(out), (size,), np.float32)
    top, colder, total = wide(logits[best]), np.float32(1 / temperature), np.float32(0)
    for i in range(size):
        probs[i] = _exp((wide(logits[i]) - top) * colder)
        total += probs[i]
    for i in range(size):
        probs[i] /= total
    return 1


@njit("int64(int64, int64, int64, int64, float64, int64)", cache=True)
def _softmaxes_bfloat16(where, stride, count, size, temperature, out):  # type: ignore[no-untyped-def]
    for r in range(count):
        if not _softmax_bfloat16(where + r * stride, size, temperature, out + 4 * r * size):
            return 0
    return 1


# With x = logit - best and Z = sum e^x, the entropy is ln Z - sum e^x x / Z: two sums, both of terms of one sign.
@njit("UniTuple(float64, 2)(int64, int64)", cache=True, fastmath=FREELY)
def _certainty_float32(where, size):  # type: ignore[no-untyped-def]
    best = _best(carray(address(where), (size,), np.int32), 0)
    if best < 0:
        return -1.0, 0.0
    logits = carray(address(where), (size,), np.float32)
    top, total, spread = logits[best], np.float32(0), np.float32(0)
    for i in range(size):
        x = max(logits[i] - top, np.float32(-88))
        e = _exp(x)
        total += e
        spread += e * x
    return math.log(total) - np.float64(spread) / np.float64(total), 1 / np.float64(total)


@njit("UniTuple(float64, 2)(int64, int64)", cache=True, fastmath=FREELY)
def _certainty_bfloat16(where, size):  # type: ignore[no-untyped-def]
    best = _best(carray(address(where), (size,), np.int16), 16)
    if best < 0:
        return -1.0, 0.0
    logits = halves(where, size)
    top, total, spread = wide(logits[best]), np.float32(0), np.float32(0)
    for i in range(size):
        x = max(wide(logits[i]) - top, np.float32(-88))
        e = _exp(x)
        total += e
        spread += e * x
    return math.log(total) - np.float64(spread) / np.float64(total), 1 / np.float64(total)


@njit
def _candidates(probs, highest, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    """The probabilities of all tokens that may be kept, and a lower bound of them: far fewer than there are tokens."""
    values = np.empty(len(probs), np.float32)
    # What top-p keeps of the best k depends on what all k hold.
    lowest = 0.0 if top_k > 0 and top_p < 1 else min_p
    ratio = 2.0**-10
    while True:
        least = max(np.float32(highest * max(ratio, lowest)), np.float32(1e-45))
        count, held = 0, 0.0
        for i in range(len(probs)):
            if probs[i] >= least:
                values[count] = probs[i]
                count += 1
                held += np.float64(probs[i])
        enough = count >= top_k if top_k > 0 else held >= top_p
        if enough or ratio <= lowest or ratio == 0:
            return values[:count], least
        ratio = ratio * ratio if ratio > 2.0**-40 else 0.0


@njit(fastmath=FREELY)
def _held(values, least, each):  # type: ignore[no-untyped-def]
    """What values of at least `least` hold: their sum, or if `each`, their number."""
    total = 0.0
    if each:
        for i in range(len(values)):
            total += 1.0 if values[i] >= least else 0.0
    else:
        for i in range(len(values)):
            total += np.float64(values[i]) if values[i] >= least else 0.0
    return total


@njit
def _cut(values, least, most, goal, each):  # type: ignore[no-untyped-def]
    """The highest of `values`, all from `least` to `most`, such that those not below it hold `goal`; or `least`.

    By halving: numbers in order are bits in order. Sorting takes much longer, and a random order is its worst."""
    low, high = np.int64(bits_of(least)), np.int64(bits_of(most)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _held(values, float_of(np.uint32(middle)), each) >= goal:
            low = middle
        else:
            high = middle
    return float_of(np.uint32(low))


@njit(fastmath=FREELY)
def _scale(probs, cut, factor):  # type: ignore[no-untyped-def]
    for i in range(len(probs)):
        probs[i] = probs[i] * factor if probs[i] >= cut else np.float32(0)


@njit("void(int64, int64, int64, float64, float64)", cache=True)
def _keep_best(where, size, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    probs = carray(address(where), (size,), np.float32)
    highest = probs[_best(carray(address(where), (size,), np.int32), 0)]
    values, cut = _candidates(probs, highest, top_k, top_p, min_p)
    goal = 1.0
    if top_k > 0:
        cut = _cut(values, cut, highest, float(top_k), True)
        goal = _held(values, cut, False)
    if top_p < 1:
        goal *= top_p
        cut = _cut(values, cut, highest, goal, False)
    cut = max(cut, np.float32(min_p * highest))
    total = _held(values, cut, False)
    if top_p < 1:  # of equals at the border of the nucleus, lower ids go first
        equals, i = np.count_nonzero(values == cut), 0
        while equals > 1 and total - np.float64(cut) >= goal:
            if probs[i] == cut:
                probs[i] = 0
                total, equals = total - np.float64(cut), equals - 1
            i += 1
    _scale(probs, cut, np.float32(1 / total))


@njit(fastmath=FREELY)
def _sum(probs, begin, end):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(begin, end):
        total += np.float64(probs[i])
    return total


@njit
def _token_at(probs, noise):  # type: ignore[no-untyped-def]
    """First the block, then the token in it: sums of blocks vectorise, running sums do not."""
    size = len(probs)
    ends = np.empty((size + BLOCK - 1) // BLOCK)
    total = 0.0
    for b in range(len(ends)):
        total += _sum(probs, b * BLOCK, min((b + 1) * BLOCK, size))
        ends[b] = total
    if not 0 < total < math.inf:
        return -1
    at = noise * total
    b = np.searchsorted(ends, at, side="right")
    running, last = ends[b - 1] if b > 0 else 0.0, -1
    for i in range(b * BLOCK, min((b + 1) * BLOCK, size)):
        if probs[i] > 0:
            running, last = running + np.float64(probs[i]), i
            if running > at:
                return i
    return last  # the two ways of adding up differ in the last bit


@njit("int64(int64, int64, float64)", cache=True)
def _token_at_float32(where, size, noise):  # type: ignore[no-untyped-def]
    return _token_at(carray(address(where), (size,), np.float32), noise)


@njit("int64(int64, int64, float64)", cache=True)
def _token_at_float64(where, size, noise):  # type: ignore[no-untyped-def]
    return _token_at(carray(address(where), (size,), np.float64), noise)
