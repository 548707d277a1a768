"""The noise of sampled answers: a number for each place in a text and each token, whatever was drafted.

A row with seed s takes at output position i the token v with the smallest E(s, i, v) / p(v), where p is the target's
distribution and E are independent exponential numbers. This token is distributed as p: of alarm clocks with rates p(v),
v rings first with probability p(v). With g = -log E it is the argmax of log p(v) + g(v), the Gumbel-max theorem.
E is a pure function of (s, i, v), so an answer depends on seed, prompt, parameters and target alone. A drafter that
uses the same noise with its own distribution q mostly proposes the same token where q is close to p (Daliri, Musco,
Suresh 2024, arXiv 2408.07978: drafter-invariant speculative decoding).

    E(s, i, v) = -log(1 - y)        y = (first * 2^32 + second + 1/2) / 2^64, uniform in (0, 1)

The words are Philox4x32-10's (Salmon et al. 2011): the key is the seed, the counter (v // 4, i, 0, 0) for `first` and
(v // 4, i, 1, 0) for `second`, and v % 4 the lane; other decisions have other counters. Only a token whose first word
is small can win, so `second` is computed for few tokens. With only 32 bits, two tokens of a flat distribution over
150,000 would tie in 2e-5 of all draws; with 64 bits, in 1e-14. Rounding E to float64 changes a token's probability by
at most 1e-16, and those of 150,000 tokens together by 2e-11.

The compiled functions give the same bits on every processor: they use integers, and our own logarithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from secrets import randbits
from typing import TYPE_CHECKING

import numpy as np
from numba import carray, njit

from paceline.compiled import address, logarithm
from paceline.core.tree import Floats, IntArray
from paceline.errors import NumericError
from paceline.moved import aliases

if TYPE_CHECKING:
    import torch

MASK = 2**32 - 1
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # These are added to the key in each round.
ROUNDS = 10
BLOCK = 256
"""Number of tokens that are hashed and compared together."""
NOTHING = "Cannot draw a token: the probabilities are not numbers, or all 0."


class Noise:
    """The noise of a row. `choose` gives the target's token; `guess` gives a drafter's tokens by the same noise.

    seed  any whole number from 0 on; its 64-bit words are folded into the key. None: a fresh seed."""

    def __init__(self, seed: int | None):
        self.seed = randbits(63) if seed is None else seed
        self.key = folded(self.seed)
        self._key = np.uint64(self.key)  # The compiled functions take this type.

    def choose(self, probs: torch.Tensor, position: int) -> int:
        """Choose the target's token at output position `position` (0 is the first new token).

        probs  [V], float32 or float64, not necessarily normalised. Tokens of probability 0 are never taken.

        Raises NumericError if `probs` has NaN or infinity, or only 0."""
        tokens, _ = self.guess(probs, position)
        if not len(tokens):
            raise NumericError(NOTHING)
        return int(tokens[0])

    def guess(
        self, probs: torch.Tensor, position: int, count: int = 1, tokens: IntArray | None = None
    ) -> tuple[IntArray, Floats]:
        """Guess the target's token at `position`: the `count` likeliest columns of `probs` [K], best first, and the
        times E / q of each, ascending. There are fewer if fewer have a probability above 0, none if `probs` has NaN.

        tokens  the target's token of each column, int64 [K]; None: column i is token i."""
        probs = _compact(probs.cpu())
        count = min(count, len(probs))
        best, times = np.empty(count, np.int64), np.empty(count)
        where, ids = probs.data_ptr(), 0 if tokens is None else tokens.ctypes.data
        out, is_single = (best.ctypes.data, times.ctypes.data, count), probs.element_size() == 4
        found = _best_at(where, ids, len(probs), self._key, position, *out, is_single)
        return best[:found], times[:found]

    def times(self, position: int, tokens: Sequence[int]) -> Floats:
        """E of tokens at an output position, float64 [n]. A token with a smaller E is likelier to be taken."""
        return np.array([_exponential(self._key, position, token) for token in tokens])

    def happens(self, probability: float, position: int) -> bool:
        """Decide whether an event of this probability happens at an output position, independently of the tokens'
        noise. There can be only one event at a position."""
        return bool(_uniform(self._key, position) < probability)


def folded(seed: int) -> int:
    """Fold a seed of any size into a key of 64 bits: the exclusive or of its 64-bit words."""
    key = 0
    while seed:
        key, seed = key ^ (seed & (2**64 - 1)), seed >> 64
    return key


def _compact(probs: torch.Tensor) -> torch.Tensor:
    return (probs if probs.element_size() >= 4 else probs.float()).contiguous()


# On a CPU, compiled ---------------------------------------------------------------------------------------------------


@njit(inline="always")
def _philox(key, c0, c1, c2, c3):  # type: ignore[no-untyped-def]
    """Philox4x32-10: four words below 2^32. Arguments and results are uint64."""
    mask, half = np.uint64(MASK), np.uint64(32)
    k0, k1 = key & mask, key >> half
    for _ in range(ROUNDS):
        a, b = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & mask, (a >> half) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + np.uint64(WEYL[0])) & mask, (k1 + np.uint64(WEYL[1])) & mask
    return c0, c1, c2, c3


@njit(inline="always")
def _lane(words, lane):  # type: ignore[no-untyped-def]
    return words[0] if lane == 0 else words[1] if lane == 1 else words[2] if lane == 2 else words[3]


@njit
def _exponential(key, position, token):  # type: ignore[no-untyped-def]
    """E of a token at a position, float64."""
    counter, at, lane, zero = np.uint64(token // 4), np.uint64(position), token % 4, np.uint64(0)
    first = np.float64(_lane(_philox(key, counter, at, zero, zero), lane))
    second = np.float64(_lane(_philox(key, counter, at, np.uint64(1), zero), lane))
    y = (first + (second + 0.5) * 2.0**-32) * 2.0**-32
    if y < 2.0**-10:  # 1 - y would lose the digits of a small y.
        return y * (1 + y * (1 / 2 + y * (1 / 3 + y * (1 / 4 + y * (1 / 5)))))
    return -logarithm(max(1 - y, 2.0**-54))


@njit
def _hash_block(key, position, begin, words):  # type: ignore[no-untyped-def]
    """Write the first word of the hash of BLOCK tokens, from `begin` on, into words [BLOCK], lane after lane. Words are
    halved to fit into int32."""
    at, zero, one, first = np.uint64(position), np.uint64(0), np.uint64(1), np.uint64(begin // 4)
    for i in range(BLOCK // 4):
        a, b, c, d = _philox(key, first + np.uint64(i), at, zero, zero)
        words[i] = np.int32(a >> one)
        words[i + BLOCK // 4] = np.int32(b >> one)
        words[i + BLOCK // 2] = np.int32(c >> one)
        words[i + 3 * BLOCK // 4] = np.int32(d >> one)


@njit
def _may_win(words, probs, limit):  # type: ignore[no-untyped-def]
    """Whether any token of a block can win: its first word is at most `limit` times its probability.

    words  from `_hash_block`. probs: [BLOCK]."""
    found = np.int32(0)
    for lane in range(4):
        for i in range(BLOCK // 4):
            found |= np.int32(np.float32(words[lane * (BLOCK // 4) + i]) <= np.float32(probs[4 * i + lane]) * limit)
    return found != 0


@njit
def _insert(best, times, found, column, time):  # type: ignore[no-untyped-def]
    """Insert a column into the `found` best columns, by time, then by number. Returns the new `found`."""
    at = found
    while at > 0 and (times[at - 1] > time or (times[at - 1] == time and best[at - 1] > column)):
        if at < len(best):
            best[at], times[at] = best[at - 1], times[at - 1]
        at -= 1
    if at == len(best):
        return found
    best[at], times[at] = column, time
    return min(found + 1, len(best))


@njit
def _tops(numbers, tops):  # type: ignore[no-untyped-def]
    """Write the largest of each BLOCK of numbers into `tops`. numbers: bits of floats as unsigned integers, which
    vectorise. They have the floats' order from 0 on; negative floats and NaN are above infinity."""
    for b in range(len(tops)):
        here, top = numbers[b * BLOCK : (b + 1) * BLOCK], numbers[b * BLOCK]
        for i in range(len(here)):
            top = max(top, here[i])
        tops[b] = top


@njit
def _start(probs, tops, most):  # type: ignore[no-untyped-def]
    """Find the highest of `probs`. Returns its number, or -1 if it is 0 or above `most`, which NaN is. probs: bits of
    floats. tops: from `_tops`."""
    highest = tops[0]
    for top in tops:
        highest = max(highest, top)
    if highest > most or not highest > 0:
        return -1
    b = 0
    while tops[b] != highest:
        b += 1
    at = b * BLOCK
    while probs[at] != highest:
        at += 1
    return at


@njit
def _limit(times, found):  # type: ignore[no-untyped-def]
    """The largest ratio of halved first word to probability with which a token may still be among the best, float32,
    rounded up. It follows from y <= E and E / p <= the worst of the best times."""
    bound = times[len(times) - 1] if found == len(times) else math.inf
    return np.float32(min(bound, 2.0**60) * 2.0**31 * (1 + 2.0**-20))


@njit
def _race(probs, tops, start, key, position, best, times):  # type: ignore[no-untyped-def]
    """Find the tokens with the smallest times E / p. Writes them and their times into `best` and `times`, in ascending
    order, and returns their number, which may be smaller than len(best).

    tops   0 for a block of `probs` without any probability.
    start  the likeliest token. The race begins with it, so that few others need a second word."""
    words = np.empty(BLOCK, np.int32)
    found = _insert(best, times, 0, start, _exponential(key, position, start) / probs[start])
    for b in range(len(tops)):
        begin, here = b * BLOCK, probs[b * BLOCK : (b + 1) * BLOCK]
        if not tops[b] > 0:
            continue
        limit = _limit(times, found)
        _hash_block(key, position, begin, words)
        if len(here) == BLOCK and not _may_win(words, here, limit):
            continue
        for i in range(len(here)):
            word = np.float32(words[(i % 4) * (BLOCK // 4) + i // 4])
            if begin + i != start and here[i] > 0 and word <= np.float32(here[i]) * limit:
                time = _exponential(key, position, begin + i) / here[i]
                found = _insert(best, times, found, begin + i, time)
    return found


@njit
def _hash_tokens(key, position, tokens, words):  # type: ignore[no-untyped-def]
    """Write the halved first words of tokens int64 [n] into words [n]."""
    at, zero, one = np.uint64(position), np.uint64(0), np.uint64(1)
    for i in range(len(tokens)):
        a, b, c, d = _philox(key, np.uint64(tokens[i] >> 2), at, zero, zero)
        lane = tokens[i] & 3
        low, high = (b if lane & 1 else a), (d if lane & 1 else c)
        words[i] = np.int32((high if lane & 2 else low) >> one)


@njit
def _race_of(probs, tokens, start, key, position, best, times):  # type: ignore[no-untyped-def]
    """Like `_race`, but column i of `probs` is token tokens[i]. `best` gets columns."""
    words = np.empty(BLOCK, np.int32)
    found = _insert(best, times, 0, start, _exponential(key, position, tokens[start]) / probs[start])
    for begin in range(0, len(probs), BLOCK):
        here = probs[begin : begin + BLOCK]
        _hash_tokens(key, position, tokens[begin : begin + BLOCK], words)
        for i in range(len(here)):
            limit = _limit(times, found)
            if begin + i != start and here[i] > 0 and np.float32(words[i]) <= np.float32(here[i]) * limit:
                time = _exponential(key, position, tokens[begin + i]) / here[i]
                found = _insert(best, times, found, begin + i, time)
    return found


@njit(cache=True)
def _best_at(where, ids, size, key, position, out, out_times, count, is_single):  # type: ignore[no-untyped-def]
    best, times = carray(address(out), (count,), np.int64), carray(address(out_times), (count,), np.float64)
    blocks = (size + BLOCK - 1) // BLOCK
    if is_single:
        probs, bits = carray(address(where), (size,), np.float32), carray(address(where), (size,), np.uint32)
        tops = np.empty(blocks, np.uint32)
        _tops(bits, tops)
        start = _start(bits, tops, np.uint32(0x7F7FFFFF))
        if start < 0:
            return 0
        if ids == 0:
            return _race(probs, tops, start, key, position, best, times)
        return _race_of(probs, carray(address(ids), (size,), np.int64), start, key, position, best, times)
    doubles, bits_of = carray(address(where), (size,), np.float64), carray(address(where), (size,), np.uint64)
    wide = np.empty(blocks, np.uint64)
    _tops(bits_of, wide)
    start = _start(bits_of, wide, np.uint64(0x7FEFFFFFFFFFFFFF))
    if start < 0:
        return 0
    if ids == 0:
        return _race(doubles, wide, start, key, position, best, times)
    return _race_of(doubles, carray(address(ids), (size,), np.int64), start, key, position, best, times)


@njit(cache=True)
def _uniform(key, position):  # type: ignore[no-untyped-def]
    words = _philox(key, np.uint64(0), np.uint64(position), np.uint64(0), np.uint64(1))
    return np.float64(words[0] << np.uint64(21) | words[1] >> np.uint64(11)) * 2.0**-53


aliases(__name__)
