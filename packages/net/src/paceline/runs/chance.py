"""Test counts of events with known probabilities, each given all events before it, for too many or too few hits.

Chernoff's bound: exp(t * hits) has at most the expectation prod(1 + high (e^t - 1)). It holds for any number of trials,
however rare hits are, and also where an earlier trial decides what the next one is."""

from math import exp

import numpy as np
from numpy.typing import NDArray

TILTS = np.geomspace(1e-3, 30, 80)
"""Exponents tried for the bound of `excess`; the best one of any set gives a valid bound."""

Floats = NDArray[np.float64]


def bounds(hits: float, high: Floats) -> Floats:
    """The logarithm of the bound at each of TILTS, [T]. Those of further trials add up; then each is a martingale that
    is e^-x or lower with a probability of at most e^-x at any time, so the lowest of all counts TILTS times as much."""
    logs: Floats = np.log1p(np.multiply.outer(np.expm1(TILTS), high)).sum(-1)
    return logs - TILTS * hits


def excess(hits: float, high: Floats) -> float:
    """p-value: so many hits or more in trials with probabilities of at most `high` [n]."""
    if hits <= high.sum():
        return 1.0
    return 0.0 if hits and not high.any() else min(1.0, exp(bounds(hits, high).min()))


def outside(hits: float, low: Floats, high: Floats) -> float:
    """p-value: so many hits, too many or too few, in trials with probabilities of low..high [n]."""
    return min(1.0, 2 * min(excess(hits, high), excess(len(low) - hits, 1 - low)))


def is_tie(gap: float, noise: float) -> bool:
    """Whether rounding may have moved two logits across the gap between them."""
    return gap <= 2 * noise
