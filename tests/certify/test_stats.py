"""Chi-square tests and their power, against known values and by simulation."""

import numpy as np
import pytest
from scipy.stats import chi2

from paceline.certify import stats


def test_what_cannot_happen_proves_everything() -> None:
    assert stats.tail(stats.chi_square(np.array([5.0, 1.0]), np.array([1.0, 0.0])), 1) == 0.0


def test_a_shift_of_the_stated_size_is_found_with_the_stated_power() -> None:
    """The worst shift there is: spread over all outcomes as their probabilities ask for."""
    probs, shift, level, df = np.array([0.3, 0.3, 0.2, 0.2]), 0.05, 1e-3, 3
    count = stats.samples_for(df, shift, level)
    sides = np.array([1, -1, 1, -1])
    moved = probs + shift * 2 * sides * np.array([0.3, 0.3, 0.2, 0.2])
    assert np.abs(moved - probs).sum() / 2 == pytest.approx(shift)
    rng = np.random.default_rng(0)
    bound = chi2.isf(level, df)
    found = np.mean([stats.chi_square(c, probs) > bound for c in rng.multinomial(count, moved / moved.sum(), 2000)])
    assert found == pytest.approx(stats.POWER, abs=0.02)
    assert stats.detectable(count, df, level) == pytest.approx(shift, rel=1e-3)
    assert stats.power(count, df, shift, level) == pytest.approx(stats.POWER, abs=1e-3)


def test_lossless_engines_are_accused_at_the_level_alone() -> None:
    probs, rng = np.array([0.5, 0.3, 0.2]), np.random.default_rng(1)
    p = [stats.tail(stats.chi_square(c, probs), 2) for c in rng.multinomial(500, probs, 4000)]
    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=0.012)
    pairs = zip(rng.multinomial(500, probs, 4000), rng.multinomial(700, probs, 4000), strict=True)
    p = [stats.tail(stats.chi_square_of_two(a, b), 2) for a, b in pairs]
    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=0.012)


def test_the_worst_of_many_cases_is_corrected_for_their_number() -> None:
    assert stats.worst([0.5, 0.01, 0.3]) == pytest.approx(0.03)
    assert stats.worst([0.5, 0.9]) == stats.worst([]) == 1.0
    cases = np.random.default_rng(2).random((4000, 30))
    assert np.mean([stats.worst(p) < 0.05 for p in cases.tolist()]) == pytest.approx(0.05, abs=0.012)


def test_pooled_outcomes_have_the_least_probability() -> None:
    probs = np.array([0.5, 0.01, 0.02, 0.3, 0.07, 0.1])
    bins = stats.pooled(probs, 0.08)
    assert stats.by_bin(probs, bins).min() >= 0.08
    assert stats.by_bin(probs, bins).sum() == pytest.approx(1)
