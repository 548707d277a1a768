"""From logits to tokens on the CPU, compiled: the best token, the k best, softmax, filters.

Between two forwards, every operator starts with cold caches and takes tens of microseconds, whatever its size. Each
function here is a single call; torch and NumPy need 5 to 24 operators. `warp` of `paceline.core.sampling` does the same
in torch. Logits are bfloat16 or float32.

Results have the same bits on every processor: the order of sums does not depend on the width of vectors, and
multiply-adds are fused only where the code says so."""

import math

import numpy as np
import torch
from numba import carray, njit

from paceline.compiled import (
    LOWEST_EXPONENT,
    address,
    bits_of,
    exponential,
    float_of,
    halves,
    logarithm,
    power,
    widened,
)
from paceline.errors import NumericError

BLOCK = 256  # numbers in a block. Its maximum or sum is computed without an index, so that the inner loop vectorises
BEST_BLOCK = 512  # numbers in a block of the search for the best token
BROKEN = "The target's logits are NaN or infinite; its weights or dtype are broken."

# float32 as bits that order as the numbers.
INFINITY = np.int32(0x7F800000)
MINUS_INFINITY_BITS = np.int32(-0x800000)
MINUS_INFINITY = np.int32(-0x7F800001)
LOWEST = np.int32(-0x80000000)


def _row(logits: torch.Tensor, row: int) -> tuple[torch.Tensor, int, bool]:
    """Make logits[row] contiguous. Returns its tensor, the row's address, and whether it is float32."""
    if logits.stride(1) != 1:
        logits, row = logits[row : row + 1].contiguous(), 0
    return logits, logits.data_ptr() + row * logits.stride(0) * logits.element_size(), logits.dtype == torch.float32


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap). What is infinite becomes NaN, so that damage shows."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return cap * torch.tanh(logits / cap) + (logits - logits)
    logits, out = logits.contiguous(), torch.empty_like(logits)
    _cap(logits.data_ptr(), out.data_ptr(), logits.numel(), np.float32(cap))
    return out


@njit(cache=True, error_model="numpy")
def _cap(logits_at, out_at, size, cap):  # type: ignore[no-untyped-def]
    logits, out = carray(address(logits_at), (size,), np.float32), carray(address(out_at), (size,), np.float32)
    for i in range(size):
        x = logits[i]
        power = exponential(np.float32(-2) * abs(x) / cap)
        size_of = cap * (np.float32(1) - power) / (np.float32(1) + power)
        out[i] = (size_of if x > 0 else -size_of) + (x - x)


# The best token, and the k best ---------------------------------------------------------------------------------------


def best_token(logits: torch.Tensor, row: int) -> int:
    """The most probable token by logits[row], of equals the lowest id. logits: [n, V] of any dtype.

    Raises NumericError if the row has NaN or infinity, or only minus infinity."""
    token = best_or_none(logits, row)
    if token is None:
        raise NumericError(BROKEN)
    return token


def best_or_none(logits: torch.Tensor, row: int) -> int | None:
    """Like `best_token`, but None instead of NumericError."""
    if logits.dtype not in (torch.bfloat16, torch.float32):
        logits, row = logits[row : row + 1].float(), 0
    logits, where, is_wide = _row(logits, row)
    token = int(_best_at(where, logits.shape[1], is_wide))
    return token if token >= 0 else None


def top_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and token ids of the k best tokens of each row of logits [n, V], both [n, k], best first.

    On a CPU it is several times as fast as torch.topk: a vectorised pass finds the best of each block, and only few
    blocks are searched."""
    is_wide = logits.dtype == torch.float32
    compiled = logits.device.type == "cpu" and logits.is_contiguous() and k <= logits.shape[1]
    if not compiled or not (is_wide or logits.dtype == torch.bfloat16):
        return torch.topk(logits, k)
    best = torch.empty(len(logits), k, dtype=torch.int64)
    rows, size = logits.shape
    _top_at(logits.data_ptr(), best.data_ptr(), rows, size, int(k), is_wide)
    return logits.gather(1, best), best


# Floats are compared as integers, because integer maxima vectorise. If the lower bits of negative numbers are flipped,
# the bits have the floats' order. The largest magnitude shows whether there is a NaN or an infinity.


@njit(inline="always")
def _key(bits):  # type: ignore[no-untyped-def]
    """Turn the bits of a float32 into an int32 with the same order; minus zero is below zero."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(inline="always")
def _key_of_zeros(bits):  # type: ignore[no-untyped-def]
    """Like `_key`, but minus zero is zero."""
    key = _key(bits)
    return np.int32(0) if key == np.int32(-1) else key


@njit
def _best(numbers, shift):  # type: ignore[no-untyped-def]
    """Index of the largest of numbers, which are shifted bits of float32; -1 if any is NaN or +inf, or all are -inf."""
    size, shift = len(numbers), np.int32(shift)
    best, best_block = MINUS_INFINITY, -1
    for begin in range(0, size, BEST_BLOCK):
        block = numbers[begin : begin + BEST_BLOCK]
        top, magnitude = LOWEST, np.int32(0)
        for i in range(len(block)):
            bits = np.int32(block[i]) << shift
            top = max(top, _key_of_zeros(bits))
            magnitude = max(magnitude, (np.int32(0) if bits == MINUS_INFINITY_BITS else bits) & np.int32(0x7FFFFFFF))
        if magnitude >= INFINITY:
            return -1
        if top > best:
            best, best_block = top, begin
    if best_block >= 0:
        for i in range(best_block, size):
            if _key_of_zeros(np.int32(numbers[i]) << shift) == best:
                return i
    return -1


@njit(cache=True)
def _best_at(where, size, is_wide):  # type: ignore[no-untyped-def]
    if is_wide:
        return _best(carray(address(where), (size,), np.int32), 0)
    return _best(carray(address(where), (size,), np.int16), 16)


@njit
def _top(numbers, shift, best):  # type: ignore[no-untyped-def]
    """Write the ids of the k largest of numbers [rows, V] into best [rows, k], largest first, of equals the lower
    id."""
    (rows, size), shift, k = numbers.shape, np.int32(shift), best.shape[1]
    blocks, keys = np.empty((size + BLOCK - 1) // BLOCK, np.int32), np.empty(k, np.int32)
    for row in range(rows):
        _top_of_row(numbers[row], shift, blocks, best[row], keys)


@njit
def _top_of_row(numbers, shift, blocks, best, keys):  # type: ignore[no-untyped-def]
    """`_top` of a row. Working space: blocks int32 [number of blocks], keys int32 [k]."""
    k = len(best)
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


@njit(cache=True)
def _top_at(where, out, rows, size, k, is_wide):  # type: ignore[no-untyped-def]
    best = carray(address(out), (rows, k), np.int64)
    if is_wide:
        _top(carray(address(where), (rows, size), np.int32), 0, best)
    else:
        _top(carray(address(where), (rows, size), np.int16), 16, best)


# Softmax and entropy --------------------------------------------------------------------------------------------------


def softmax(
    logits: torch.Tensor, temperature: float = 1.0, row: int | None = None, checked: bool = True
) -> torch.Tensor:
    """softmax(logits / temperature), float32 [n, V], for logits [n, V] on the CPU; or [V] for `row` alone.

    Probabilities below e^-87 of the largest are 0. A row with NaN or infinity, or only minus infinity, raises
    NumericError; unless `checked`, it becomes NaN."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    count, size = logits.shape
    is_wide, stride, where = logits.dtype == torch.float32, logits.stride(0) * logits.element_size(), logits.data_ptr()
    if row is not None:
        count, where = 1, where + row * stride
    probs = torch.empty(size) if row is not None else torch.empty(count, size)
    if not _softmax_at(where, stride, count, size, float(temperature), probs.data_ptr(), is_wide) and checked:
        raise NumericError(BROKEN)
    return probs


def certainty_of_row(logits: torch.Tensor, row: int) -> tuple[float, float]:
    """Entropy of softmax(logits[row]) in nats, 0 or more, and the best token's probability, without storing the
    softmax. Both are NaN if `softmax` would raise NumericError."""
    logits, where, is_wide = _row(logits, row)
    entropy, best = _certainty_at(where, logits.shape[1], is_wide)
    return entropy, best


def log_total(logits: torch.Tensor) -> torch.Tensor:
    """ln of the sum of e**logits, float64 [n], for logits [n, V] on the CPU; NaN for a row with NaN or infinity, or
    only minus infinity."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (count, size), out = logits.shape, torch.empty(len(logits), dtype=torch.float64)
    stride, is_wide = logits.stride(0) * logits.element_size(), logits.dtype == torch.float32
    _log_total_at(logits.data_ptr(), stride, count, size, out.data_ptr(), is_wide)
    return out


@njit
def _exp(x):  # type: ignore[no-untyped-def]
    """e^x for x <= 0; 0 below -87."""
    return exponential(x) if x > LOWEST_EXPONENT else np.float32(0)


@njit
def _folded(numbers):  # type: ignore[no-untyped-def]
    """The sum of numbers, float64 [BLOCK / 2]. It overwrites them: one half is added to the other until a single number
    is left. Loops have independent steps and a known length, so that they vectorise."""
    for i in range(64):
        numbers[i] += numbers[i + 64]
    for i in range(32):
        numbers[i] += numbers[i + 32]
    for i in range(16):
        numbers[i] += numbers[i + 16]
    for i in range(8):
        numbers[i] += numbers[i + 8]
    for i in range(4):
        numbers[i] += numbers[i + 4]
    return (numbers[0] + numbers[2]) + (numbers[1] + numbers[3])


@njit
def _sum(numbers, least, space):  # type: ignore[no-untyped-def]
    """The sum, float64, of up to BLOCK numbers, without numbers below `least`. space: float64 [BLOCK / 2]."""
    if len(numbers) == BLOCK:
        for i in range(BLOCK // 2):
            low = 0.0 if numbers[i] < least else np.float64(numbers[i])
            high = 0.0 if numbers[i + BLOCK // 2] < least else np.float64(numbers[i + BLOCK // 2])
            space[i] = low + high
    else:
        space[:] = 0
        for i in range(len(numbers)):
            space[i % (BLOCK // 2)] += 0.0 if numbers[i] < least else np.float64(numbers[i])
    return _folded(space)


@njit
def _total(numbers, least):  # type: ignore[no-untyped-def]
    """The sum, float64, of numbers, without numbers below `least`."""
    total, space = 0.0, np.empty(BLOCK // 2)
    for begin in range(0, len(numbers), BLOCK):
        total += _sum(numbers[begin : begin + BLOCK], least, space)
    return total


@njit
def _softmax(logits, best, temperature, probs):  # type: ignore[no-untyped-def]
    """Write softmax(logits / temperature) into probs. logits: float32, or bfloat16 bits; best: index of the largest."""
    top, colder = widened(logits[best]), np.float32(1 / temperature)
    for i in range(len(probs)):
        probs[i] = _exp((widened(logits[i]) - top) * colder)
    share = np.float32(1 / _total(probs, np.float32(0)))
    for i in range(len(probs)):
        probs[i] *= share


@njit
def _log_total(logits, best):  # type: ignore[no-untyped-def]
    top, total, space, powers = np.float64(widened(logits[best])), 0.0, np.empty(BLOCK // 2), np.empty(BLOCK)
    for begin in range(0, len(logits), BLOCK):
        here = logits[begin : begin + BLOCK]
        for i in range(len(here)):
            powers[i] = power(np.float64(widened(here[i])) - top)
        total += _sum(powers[: len(here)], 0.0, space)
    return top + logarithm(total)


@njit(cache=True)
def _log_total_at(where, stride, count, size, out, is_wide):  # type: ignore[no-untyped-def]
    logs = carray(address(out), (count,), np.float64)
    for r in range(count):
        at = where + r * stride
        best = _best_at(at, size, is_wide)
        if best < 0:
            logs[r] = math.nan
        elif is_wide:
            logs[r] = _log_total(carray(address(at), (size,), np.float32), best)
        else:
            logs[r] = _log_total(halves(at, size), best)


@njit(cache=True)
def _softmax_at(where, stride, count, size, temperature, out, is_wide):  # type: ignore[no-untyped-def]
    good = 1
    for r in range(count):
        at, probs = where + r * stride, carray(address(out + 4 * r * size), (size,), np.float32)
        best = _best_at(at, size, is_wide)
        if best < 0:
            probs[:], good = np.nan, 0
        elif is_wide:
            _softmax(carray(address(at), (size,), np.float32), best, temperature, probs)
        else:
            _softmax(halves(at, size), best, temperature, probs)
    return good


@njit
def _certainty(logits, best):  # type: ignore[no-untyped-def]
    """Entropy and best probability. With x = logit - best and Z = sum e^x, the entropy is ln Z - sum e^x x / Z."""
    top, total, spread, space = widened(logits[best]), 0.0, 0.0, np.empty(BLOCK // 2)
    powers, products = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for begin in range(0, len(logits), BLOCK):
        here = logits[begin : begin + BLOCK]
        for i in range(len(here)):
            x = max(widened(here[i]) - top, np.float32(-88))
            e = _exp(x)
            powers[i], products[i] = e, e * x
        total += _sum(powers[: len(here)], -math.inf, space)
        spread += _sum(products[: len(here)], -math.inf, space)
    return logarithm(total) - spread / total, 1 / total


@njit(cache=True)
def _certainty_at(where, size, is_wide):  # type: ignore[no-untyped-def]
    best = _best_at(where, size, is_wide)
    if best < 0:
        return math.nan, math.nan
    if is_wide:
        return _certainty(carray(address(where), (size,), np.float32), best)
    return _certainty(halves(where, size), best)


# Filters --------------------------------------------------------------------------------------------------------------


def keep_best(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """Filter `probs` [V], a float32 distribution on the CPU, in place: top-k, then top-p, then min-p.

    As in `SamplingParams`; 0, 1 and 0 filter nothing."""
    _keep_best(probs.data_ptr(), len(probs), int(top_k), float(top_p), float(min_p))


@njit
def _candidates(probs, highest, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    """The probabilities of the few tokens that the filters may keep, and a lower bound of these probabilities."""
    values = np.empty(len(probs), np.float32)
    # Which of the best k tokens top-p keeps depends on the sum of all k.
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


@njit
def _held(values, least, each):  # type: ignore[no-untyped-def]
    """The sum of the values that are `least` or more; their number if `each`."""
    if not each:
        return _total(values, least)
    count = 0
    for i in range(len(values)):
        count += values[i] >= least
    return float(count)


@njit
def _cut(values, least, most, goal, each):  # type: ignore[no-untyped-def]
    """The highest of `values`, which lie between `least` and `most`, for which `_held` reaches `goal`; else `least`.

    It bisects the bits, which have the numbers' order. Sorting would take much longer."""
    low, high = np.int64(bits_of(least)), np.int64(bits_of(most)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _held(values, float_of(np.uint32(middle)), each) >= goal:
            low = middle
        else:
            high = middle
    return float_of(np.uint32(low))


@njit
def _scale(probs, cut, factor):  # type: ignore[no-untyped-def]
    for i in range(len(probs)):
        probs[i] = probs[i] * factor if probs[i] >= cut else np.float32(0)


@njit(cache=True)
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
    if top_p < 1:  # Of equals at the border, lower ids are dropped first.
        equals, i = np.count_nonzero(values == cut), 0
        while equals > 1 and total - np.float64(cut) >= goal:
            if probs[i] == cut:
                probs[i] = 0
                total, equals = total - np.float64(cut), equals - 1
            i += 1
    _scale(probs, cut, np.float32(1 / total))
