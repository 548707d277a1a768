"""Chi-square tests and their power, against known values and by simulation."""

import numpy as np
import pytest
from scipy import stats

from paceline.certify import sampled as chance


def test_tails_are_scipys() -> None:
    for x, df in ((0.5, 1), (7.3, 3), (80.0, 40), (0.0, 5)):
        assert chance.tail(x, df) == pytest.approx(stats.chi2.sf(x, df), rel=1e-9)
    for x, df, shift in ((7.3, 3, 4.0), (80.0, 40, 30.0), (3.0, 1, 0.0), (500.0, 20, 400.0)):
        assert chance.tail_of_shifted(x, df, shift) == pytest.approx(stats.ncx2.sf(x, df, shift), rel=1e-6)
    assert chance.critical(7, 1e-3) == pytest.approx(stats.chi2.isf(1e-3, 7), rel=1e-5)


def test_what_cannot_happen_proves_everything() -> None:
    assert chance.tail(chance.chi_square(np.array([5.0, 1.0]), np.array([1.0, 0.0])), 1) == 0.0


def test_a_shift_of_the_stated_size_is_found_with_the_stated_power() -> None:
    """The worst shift there is: spread over all outcomes as their probabilities ask for."""
    law, shift, level, df = np.array([0.3, 0.3, 0.2, 0.2]), 0.05, 1e-3, 3
    count = chance.samples(df, shift, level)
    sides = np.array([1, -1, 1, -1])
    moved = law + shift * 2 * sides * np.array([0.3, 0.3, 0.2, 0.2])
    assert np.abs(moved - law).sum() / 2 == pytest.approx(shift)
    rng = np.random.default_rng(0)
    bound = chance.critical(df, level)
    found = np.mean([chance.chi_square(c, law) > bound for c in rng.multinomial(count, moved / moved.sum(), 2000)])
    assert found == pytest.approx(chance.POWER, abs=0.02)
    assert chance.detectable(count, df, level) == pytest.approx(shift, rel=1e-3)
    assert chance.power(count, df, shift, level) == pytest.approx(chance.POWER, abs=1e-3)


def test_lossless_engines_are_accused_at_the_level_alone() -> None:
    law, rng = np.array([0.5, 0.3, 0.2]), np.random.default_rng(1)
    p = [chance.tail(chance.chi_square(c, law), 2) for c in rng.multinomial(500, law, 4000)]
    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=0.012)
    pairs = zip(rng.multinomial(500, law, 4000), rng.multinomial(700, law, 4000), strict=True)
    p = [chance.tail(chance.chi_square_of_two(a, b), 2) for a, b in pairs]
    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=0.012)


def test_the_worst_of_many_cases_is_corrected_for_their_number() -> None:
    assert chance.worst([0.5, 0.01, 0.3]) == pytest.approx(0.03)
    assert chance.worst([0.5, 0.9]) == chance.worst([]) == 1.0
    cases = np.random.default_rng(2).random((4000, 30))
    assert np.mean([chance.worst(p) < 0.05 for p in cases.tolist()]) == pytest.approx(0.05, abs=0.012)


def test_pooled_outcomes_have_the_least_probability() -> None:
    law = np.array([0.5, 0.01, 0.02, 0.3, 0.07, 0.1])
    bins = chance.pooled(law, 0.08)
    assert chance.bins_of(law, bins).min() >= 0.08
    assert chance.bins_of(law, bins).sum() == pytest.approx(1)
