"""Chi-square tests and their power, against known values and by simulation."""

import numpy as np
import pytest
from scipy.stats import chi2

from paceline.certify import stats
from paceline.certify.conditional import _difference, copied_token
from paceline.certify.verdict import Greedy, Look, sampled_facts
from paceline.runs import chance


def test_what_cannot_happen_proves_everything():
    assert stats.tail(stats.chi_square(np.array([5.0, 1.0]), np.array([1.0, 0.0])), 1) == 0.0


def test_a_shift_of_the_stated_size_is_found_with_the_stated_power():
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
    twice = stats.samples_for(df, shift, level, samples=2)  # the probabilities are known by a second sample alone
    assert twice == pytest.approx(2 * count, abs=2)
    assert stats.detectable(twice, df, level, samples=2) == pytest.approx(shift, rel=1e-3)
    assert stats.power(twice, df, shift, level, samples=2) == pytest.approx(stats.POWER, abs=1e-3)


def test_lossless_engines_are_accused_at_the_level_alone():
    probs, rng = np.array([0.5, 0.3, 0.2]), np.random.default_rng(1)
    p = [stats.tail(stats.chi_square(c, probs), 2) for c in rng.multinomial(500, probs, 4000)]
    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=0.012)
    pairs = zip(rng.multinomial(500, probs, 4000), rng.multinomial(700, probs, 4000), strict=True)
    p = [stats.tail(stats.chi_square_of_two(a, b), 2) for a, b in pairs]
    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=0.012)


def test_the_worst_of_many_cases_is_corrected_for_their_number():
    assert stats.worst([0.5, 0.01, 0.3]) == pytest.approx(0.03)
    assert stats.worst([0.5, 0.9]) == stats.worst([]) == 1.0
    cases = np.random.default_rng(2).random((4000, 30))
    assert np.mean([stats.worst(p) < 0.05 for p in cases.tolist()]) == pytest.approx(0.05, abs=0.012)


def test_pooled_outcomes_have_the_least_probability():
    probs = np.array([0.5, 0.01, 0.02, 0.3, 0.07, 0.1])
    bins = stats.pooled(probs, 0.08)
    assert stats.by_bin(probs, bins).min() >= 0.08
    assert stats.by_bin(probs, bins).sum() == pytest.approx(1)


def test_a_range_of_probabilities_accuses_no_mixture_of_them_more_often_than_the_level():
    """Every request has a distribution of its own inside the range; and a shift beyond the range is found as stated."""
    rng = np.random.default_rng(3)
    probs = np.array([0.3, 0.3, 0.2, 0.2])
    worlds = np.stack([probs, *(probs + side * np.array([0.02, -0.02, 0.01, -0.01]) for side in (1, -1))])
    p = []
    for _ in range(2000):
        share = rng.random()
        counts = rng.multinomial(int(600 * share), worlds[1]) + rng.multinomial(600 - int(600 * share), worlds[2])
        p.append(stats.tail(stats.chi_square(counts.astype(float), worlds), 3))
    assert np.mean(np.array(p) < 0.05) <= 0.06
    radius, count, level = stats.radius(worlds), 20_000, 1e-3
    shift = stats.detectable(count, 3, level, rounding=radius)
    assert shift > stats.detectable(count, 3, level) + 0.01
    far = probs + 2 * shift * np.array([1, -1, 1, -1]) * probs
    found = [stats.tail(stats.chi_square(c, worlds), 3) < level for c in rng.multinomial(count, far / far.sum(), 500)]
    assert np.mean(found) >= stats.POWER - 0.02


def test_a_tail_bound_holds_for_dependent_trials_and_finds_what_cannot_happen():
    """Trials whose probability hangs on the one before."""
    rng, p = np.random.default_rng(4), []
    for _ in range(2000):
        hits, high, last = 0, [], False
        for noise in rng.random(60):
            high.append(0.4 if last else 0.1)
            last = bool(noise < high[-1])
            hits += last
        p.append(chance.outside(hits, np.array(high), np.array(high)))
    assert np.mean(np.array(p) < 0.05) < 0.05
    assert min(p) < 0.1
    assert chance.excess(1, np.zeros(9)) == 0.0
    assert chance.excess(3, np.full(10, 0.3)) == 1.0
    assert chance.excess(60, np.full(100, 0.3)) < 1e-7
    assert chance.outside(10, np.full(100, 0.3), np.full(100, 0.35)) < 1e-3
    assert chance.outside(30, np.full(100, 0.3), np.full(100, 0.7)) == 1.0  # at the lower end of what is right


def test_ties_are_counted_against_those_of_the_reference():
    assert stats.more_often(3, 2) > 0.1
    assert stats.more_often(30, 2) < 1e-4
    assert stats.more_often(0, 0) == 1.0
    assert [one.p < 1e-4 for one in Greedy(tied=30, rounded=2).findings()] == [True]
    assert Greedy(tied=2, rounded=30).findings() == []


def test_two_samples_may_differ_by_the_slack():
    rng, probs = np.random.default_rng(5), np.array([0.5, 0.3, 0.2])
    moved = probs * np.exp([0.05, -0.05, -0.05])
    many, more = rng.multinomial(200_000, probs), rng.multinomial(200_000, moved / moved.sum())
    assert stats.tail(stats.chi_square_of_two(many, more), 2) < 1e-6
    assert stats.tail(stats.chi_square_of_two(many, more, 0.1), 2) > 0.05


def test_a_difference_that_rounding_may_have_made_is_none():
    wide, narrow = ((np.full(1000, 0.5 - reach), np.full(1000, 0.5 + reach)) for reach in (0.1, 0.0))
    assert _difference((600.0, *wide), (400.0, *wide)) == 1.0
    assert _difference((600.0, *narrow), (400.0, *narrow)) < 1e-9


def test_the_copied_token_followed_the_latest_and_longest_match():
    assert copied_token([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]) == 8
    assert copied_token([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]) == 7
    assert copied_token([4, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]) == 8
    assert copied_token([1, 2, 3]) is None


@pytest.mark.parametrize(("difference", "accused"), [(1e-9, True), (0.5, False)])
def test_plain_decoding_differs_where_drafts_are_not_to_blame(difference, accused):
    facts = sampled_facts([Look(100, 1e-9, 1.0, 1e-3, difference)], [])
    assert (facts["lossless"], facts["plain_differs"]) == (not accused, not accused)
