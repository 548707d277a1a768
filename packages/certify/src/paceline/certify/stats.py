"""Tests of counts whose null hypothesis leaves room for rounding, their power, and the samples they need.

**The null hypothesis is an interval.** Rounding gives every outcome a range of probabilities, `low` to `high`. An
engine is lossless if every request has a distribution within these ranges, not necessarily the same one, since rounding
depends on which other rows are in its batch. Then the mean distribution of n requests lies in the ranges too, and the
covariance of the counts is at most that of n draws from the mean. So Pearson's statistic against the mean, whichever it
is, is at most a chi-square variable, and the smallest statistic over the ranges is smaller still: p-values are too
large, never too small.

**Power.** A shift is a total variation: the share of the probability that lies on the wrong outcomes. By the
inequality of Cauchy and Schwarz, any shift of `d` between the outcomes counted gives the chi-square statistic of n
samples a noncentrality of at least 4 n d^2. So the power stated here holds for every shift of that size, whichever
outcomes it moves (up to the chi-square approximation, which counts of 5 or more an outcome make good). Ranges take at
most their radius (`radius`) from the root of the statistic, by the triangle inequality."""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from paceline.certify import laws
from paceline.runs.chance import Floats

POWER = 0.95  # A shift of the stated size is found with this probability.
LEAST_COUNT = 5.0  # Smallest expected count of an outcome.


def chi_square(counts: Floats, worlds: Floats) -> float:
    """Pearson's statistic of `counts` [B] against the nearest expected counts in the range of `worlds` [W,
    B] or [B]."""
    low, high = _range(worlds)
    number = counts.sum()
    if counts[high == 0].any():
        return inf
    expected = number * np.clip(counts / max(number, 1), low, high)
    there = expected > 0
    return float((((counts - expected) ** 2)[there] / expected[there]).sum())


def chi_square_of_two(counts: Floats, others: Floats, slack: Floats | float = 0.0) -> float:
    """The statistic of two samples [B] of one unknown distribution. Degrees of freedom are those of one sample.

    slack: how much an outcome's two log-probabilities may differ by rounding, [B] or one number."""
    total = counts + others
    n, m = counts.sum(), others.sum()
    # Given the sum of both counts of an outcome, the first count is binomial, with odds of n r to m.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.clip((counts / n) / (others / m), np.exp(-np.asarray(slack)), np.exp(slack))
    share = n * ratio / (n * ratio + m)
    there = total > 0
    return float(((counts - total * share) ** 2 / (total * share * (1 - share)))[there].sum())


def tail(statistic: float, df: int) -> float:
    """The probability that chance alone gives a chi-square statistic this large: the p-value."""
    return laws.chi_square_tail(statistic, df) if df else float(statistic < inf)


def more_often(events: int, others: int) -> float:
    """p-value: `events` in a sample, if another sample of the same size had `others` at the same rate.

    The other sample is given one event more, so that a sample without events proves little."""
    return laws.heads_tail(events, events + others + 1) if events else 1.0


def slack_of(worlds: Floats) -> Floats:
    """The largest difference of two log-probabilities in the range of worlds [W, B], for each bin [B]."""
    low, high = _range(worlds)
    with np.errstate(divide="ignore"):
        return np.log(high) - np.log(low)


def radius(worlds: Floats) -> float:
    """The greatest distance of the range of worlds [W, B] from the first world,
    as the root of chi-square per sample."""
    (low, high), probs = _range(worlds), worlds[0]
    reach = np.maximum(probs - low, high - probs)
    return float(np.sqrt((reach**2 / probs)[probs > 0].sum()))


def _range(worlds: Floats) -> tuple[Floats, Floats]:
    worlds = np.atleast_2d(worlds)
    return worlds.min(0), worlds.max(0)


def power(count: float, df: int, shift: float, level: float, *, samples: int = 1, rounding: float = 0.0) -> float:
    """The probability of finding `shift` in `count` samples at `level`.

    samples   2 if the distribution is known only by another `count` samples, which halves the noncentrality.
    rounding  the radius of the ranges of all cases together."""
    return laws.shifted_tail(_bound(count, df, level, rounding), df, 4 * count * shift**2 / samples)


def samples_for(df: int, shift: float, level: float, *, samples: int = 1) -> int:
    """The number of samples that find `shift` with probability POWER if nothing is rounded."""
    return int(np.ceil(samples * _noncentrality(_bound(1, df, level, 0.0), df) / (4 * shift**2)))


def detectable(count: float, df: int, level: float, *, samples: int = 1, rounding: float = 0.0) -> float:
    """The smallest shift that `count` samples find with probability POWER; 1 if they find none."""
    if not count:
        return 1.0
    noncentrality = _noncentrality(_bound(count, df, level, rounding), df)
    return min(1.0, float(np.sqrt(samples * noncentrality / (4 * count))))


def _bound(count: float, df: int, level: float, rounding: float) -> float:
    """The statistic against the first world above which the statistic against the whole range passes `level`."""
    return float((np.sqrt(laws.chi_square_bound(level, df)) + rounding * np.sqrt(count)) ** 2)


def _noncentrality(bound: float, df: int) -> float:
    """The noncentrality with which the statistic exceeds `bound` with probability POWER."""
    return laws.above(lambda x: laws.shifted_tail(bound, df, x), POWER, 0.0, 10 * (bound + df + 10))


def total_variation(counts: Floats, probs: Floats) -> float:
    """Total variation: half the sum of the absolute differences between shares and probabilities."""
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
    """Sums of probabilities or counts [..., N] by bin."""
    return np.apply_along_axis(lambda of: np.bincount(bins, of), -1, values).astype(np.float64)


def worst(p_values: Sequence[float]) -> float:
    """The smallest of several p-values, corrected for their number (Bonferroni)."""
    return min(1.0, min(p_values, default=1.0) * max(len(p_values), 1))
