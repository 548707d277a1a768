"""What counts prove: chi-square tests, their power, and how many samples a shift of a given size takes.

    p = tail(chi_square(counts, probs), df)
    samples_for(df, shift=0.02, level=3.5e-4)     # so that a shift of 2 % of the probability is found with 95 %

A shift is a total variation: the share of the probability that lies on other outcomes than it should. By the
inequality of Cauchy and Schwarz, any shift of `d` between the outcomes counted gives the chi-square statistic of n
samples a noncentrality of at least 4 n d^2. So the power stated here holds for every shift of that size, whichever
outcomes it moves (up to the chi-square approximation, which counts of 5 or more an outcome make good).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

POWER = 0.95
"""With this probability a shift of the stated size is found."""
LEAST_COUNT = 5.0
"""Smallest expected count of an outcome."""

Floats = NDArray[np.float64]


def chi_square(counts: Floats, probs: Floats) -> float:
    """Pearson's statistic of `counts` [B] against probabilities [B]; infinite where the impossible happened."""
    expected = probs * counts.sum()
    if counts[probs == 0].any():
        return inf
    there = expected > 0
    return float((((counts - expected) ** 2)[there] / expected[there]).sum())


def chi_square_of_two(counts: Floats, others: Floats) -> float:
    """The statistic of two samples [B] of one distribution, whatever it is; degrees of freedom as of one sample."""
    total = counts + others
    there = total > 0
    n, m = counts.sum(), others.sum()
    return float((((counts * np.sqrt(m / n) - others * np.sqrt(n / m)) ** 2)[there] / total[there]).sum())


def tail(statistic: float, df: int) -> float:
    """The probability that chance alone gives a chi-square statistic this large: the p-value."""
    return float(chi2.sf(statistic, df)) if df else float(statistic < inf)


def power(count: int, df: int, shift: float, level: float, *, samples: int = 1) -> float:
    """The probability of finding a shift in `count` samples at `level`. samples: 2 where the distribution is known by
    another `count` samples alone, which halves the noncentrality."""
    return float(ncx2.sf(chi2.isf(level, df), df, 4 * count * shift**2 / samples))


def samples_for(df: int, shift: float, level: float, *, samples: int = 1) -> int:
    """The number of samples that find `shift` with probability POWER."""
    return int(np.ceil(samples * _noncentrality(df, level) / (4 * shift**2)))


def detectable(count: int, df: int, level: float, *, samples: int = 1) -> float:
    """The smallest shift that `count` samples find with probability POWER; 1 where they find none."""
    return min(1.0, float(np.sqrt(samples * _noncentrality(df, level) / (4 * count)))) if count else 1.0


def _noncentrality(df: int, level: float) -> float:
    """What a test at `level` finds with probability POWER."""
    bound = float(chi2.isf(level, df))
    return float(brentq(lambda x: ncx2.sf(bound, df, x) - POWER, 0.0, 10 * (bound + df + 10)))


def total_variation(counts: Floats, probs: Floats) -> float:
    """Half the sum of differences between shares and probabilities."""
    return float(np.abs(counts / counts.sum() - probs).sum() / 2) if counts.sum() else 0.0


def noise(probs: Floats, count: int) -> float:
    """The total variation that chance alone gives `count` samples on average (each share is nearly normal)."""
    return float(np.sqrt(2 * probs * (1 - probs) / (np.pi * max(count, 1))).sum() / 2)


def pooled(probs: Floats, least: float) -> NDArray[np.int64]:
    """The bin of every outcome [N]: the rarest are put together until each bin has a probability of `least`."""
    bins = np.zeros(len(probs), np.int64)
    total, bin = 0.0, 0
    for i in np.argsort(probs, kind="stable"):
        if total >= least:
            total, bin = 0.0, bin + 1
        bins[i] = bin
        total += probs[i]
    if total < least and bin > 0:
        bins[bins == bin] = bin - 1
    return bins


def by_bin(values: Floats, bins: NDArray[np.int64]) -> Floats:
    """Sums of probabilities or counts [N] by bin."""
    return np.bincount(bins, values).astype(np.float64)


def worst(p_values: Sequence[float]) -> float:
    """The smallest of several p-values, corrected for their number (Bonferroni)."""
    return min(1.0, min(p_values, default=1.0) * max(len(p_values), 1))
