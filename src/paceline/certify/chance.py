"""What counts prove: chi-square tests, their power, and how many samples a shift of a given size takes.

    p = tail(chi_square(counts, law), df)
    samples(df, shift=0.02, level=3.5e-4)     # so that a shift of 2 % of the probability is found with 95 %

A shift is a total variation: the share of the probability that lies on other outcomes than it should. By the
inequality of Cauchy and Schwarz, any shift of `d` between the outcomes counted gives the chi-square statistic of n
samples a noncentrality of at least 4 n d^2. So the power stated here holds for every shift of that size, whichever
outcomes it moves (up to the chi-square approximation, which counts of 5 or more an outcome make good).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf, lgamma, log

import numpy as np
import torch
from numpy.typing import NDArray

POWER = 0.95
"""With this probability a shift of the stated size is found."""
ENOUGH = 5.0
"""Smallest expected count of an outcome."""

Floats = NDArray[np.float64]


def chi_square(counts: Floats, law: Floats) -> float:
    """Pearson's statistic of `counts` [B] against probabilities `law` [B]; infinite where the impossible happened."""
    expected = law * counts.sum()
    if counts[law == 0].any():
        return inf
    there = expected > 0
    return float((((counts - expected) ** 2)[there] / expected[there]).sum())


def chi_square_of_two(counts: Floats, others: Floats) -> float:
    """The statistic of two samples [B] of one law, whatever it is; its degrees of freedom are those of one sample."""
    total = counts + others
    there = total > 0
    n, m = counts.sum(), others.sum()
    return float((((counts * np.sqrt(m / n) - others * np.sqrt(n / m)) ** 2)[there] / total[there]).sum())


def tail(statistic: float, df: int) -> float:
    """The probability that chance alone gives a chi-square statistic this large: the p-value."""
    if statistic == inf:
        return 0.0
    if df == 0:
        return 1.0
    return float(torch.special.gammaincc(_double(df / 2), _double(statistic / 2)))


def tail_of_shifted(statistic: float, df: int, noncentrality: float) -> float:
    """The same of the noncentral chi-square distribution: a mixture of central ones by Poisson weights."""
    half = noncentrality / 2
    middle, width = int(half), int(10 * half**0.5 + 20)
    terms = range(max(0, middle - width), middle + width)
    weights = [exp(-half + j * log(half) - lgamma(j + 1)) if half > 0 else float(j == 0) for j in terms]
    return min(1.0, sum(w * tail(statistic, df + 2 * j) for j, w in zip(terms, weights, strict=True)))


def critical(df: int, level: float) -> float:
    """The statistic that chance exceeds with probability `level`."""
    return _solve(lambda x: tail(x, df) < level)


def power(count: int, df: int, shift: float, level: float, *, samples: int = 1) -> float:
    """The probability of finding a shift in `count` samples at `level`. samples: 2 where the law is known by another
    `count` samples alone, which halves the noncentrality."""
    return tail_of_shifted(critical(df, level), df, 4 * count * shift**2 / samples)


def samples(df: int, shift: float, level: float, *, samples: int = 1) -> int:
    """The number of samples that find `shift` with probability POWER."""
    bound = critical(df, level)
    needed = _solve(lambda x: tail_of_shifted(bound, df, x) >= POWER)
    return int(np.ceil(samples * needed / (4 * shift**2)))


def detectable(count: int, df: int, level: float, *, samples: int = 1) -> float:
    """The smallest shift that `count` samples find with probability POWER; 1 where they find none."""
    if count == 0:
        return 1.0
    bound = critical(df, level)
    needed = _solve(lambda x: tail_of_shifted(bound, df, x) >= POWER)
    return min(1.0, float(np.sqrt(samples * needed / (4 * count))))


def total_variation(counts: Floats, law: Floats) -> float:
    """Half the sum of differences between shares and probabilities."""
    return float(np.abs(counts / counts.sum() - law).sum() / 2) if counts.sum() else 0.0


def noise(law: Floats, count: int) -> float:
    """The total variation that chance alone gives `count` samples on average (each share is nearly normal)."""
    return float(np.sqrt(2 * law * (1 - law) / (np.pi * max(count, 1))).sum() / 2)


def pooled(law: Floats, least: float) -> NDArray[np.int64]:
    """The bin of every outcome [N]: the rarest are put together until each bin has a probability of `least`."""
    bins = np.zeros(len(law), np.int64)
    held, bin = 0.0, 0
    for i in np.argsort(law, kind="stable"):
        if held >= least:
            held, bin = 0.0, bin + 1
        bins[i] = bin
        held += law[i]
    if held < least and bin > 0:
        bins[bins == bin] = bin - 1
    return bins


def bins_of(law: Floats, bins: NDArray[np.int64]) -> Floats:
    """Sums of `law` [N], or of counts, by bin."""
    return np.bincount(bins, law).astype(np.float64)


def worst(p_values: Sequence[float]) -> float:
    """The smallest of several p-values, corrected for their number (Bonferroni)."""
    return min(1.0, min(p_values, default=1.0) * max(len(p_values), 1))


def _solve(reached: Callable[[float], bool]) -> float:
    """The least x above 0 for which `reached`, which stays true from there on."""
    high = 1.0
    while not reached(high):
        high *= 2
    low = 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _double(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
