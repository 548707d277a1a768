"""The instruments of the proofs, tested: enumeration and statistics must see what is there, and nothing else."""

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.core.noise import Noise
from paceline.core.sampling import SamplingParams
from tests.fakes import TableTarget
from tests.lossless_enumeration import (
    BranchingNoise,
    answer_of,
    coupled,
    largest_difference,
    outcomes,
    plain,
    speculative,
)
from tests.lossless_statistics import ENOUGH, fit, pooled, same


def test_enumeration_of_known_chances():
    def heads(branches):
        """Toss until tails, at most three times."""
        noise = BranchingNoise(branches)
        return next((i for i in range(3) if not noise.happens(0.25, i)), 3)

    assert outcomes(heads) == pytest.approx({0: 3 / 4, 1: 3 / 16, 2: 3 / 64, 3: 1 / 64})
    dice = outcomes(lambda branches: branches.decide([1, 2, 1]) + branches.decide([0, 1, 1]))
    assert dice == pytest.approx({1: 1 / 8, 2: 3 / 8, 3: 3 / 8, 4: 1 / 8})
    assert outcomes(lambda branches: "nothing random") == {"nothing random": 1.0}


def test_walked_noise_couples_what_is_alike():
    """Equal distributions take the same token of a place, and others agree as far as the walk's coupling lets them."""
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], dtype=torch.float64)

    def pair(branches, other, place):
        noise = BranchingNoise(branches)
        return int(noise.guess(p, 0)[0][0]), noise.choose(other, place)

    assert outcomes(lambda b: pair(b, p, 0)) == pytest.approx({(0, 0): 0.5, (1, 1): 0.3, (2, 2): 0.2})
    apart = {(i, j): float(p[i] * q[j]) for i in range(3) for j in range(3)}
    assert outcomes(lambda b: pair(b, q, 1)) == pytest.approx(apart)
    together = outcomes(lambda b: pair(b, q, 0))
    assert together == pytest.approx({(0, 0): 0.2, (0, 1): 0.3, (1, 2): 0.3, (2, 2): 0.2}, abs=1e-6)


def test_the_difference_of_two_laws():
    assert largest_difference({"a": 1.0}, {"a": 0.75, "b": 0.25}) == 0.25
    assert largest_difference({"a": 1.0}, {"b": 1.0}) == 1.0


def test_plain_answers_by_hand():
    laws = {0: [1.0, 1e-300, 1.0], 1: [1.0, 1.0, 2.0], 2: [0.0, 0.0, 1.0]}
    half = TableTarget(3, logits=lambda prefix: np.log(np.maximum(laws[prefix[-1]], 1e-300)))
    assert plain(half, [1], SamplingParams(temperature=1.0), 1) == pytest.approx({(0,): 0.25, (1,): 0.25, (2,): 0.5})
    assert plain(half, [1], SamplingParams(temperature=1.0), 2)[(0, 2)] == pytest.approx(0.125)


# Sampling and enumeration agree, so each is a check of the other ------------------------------------------------

TARGET = TableTarget(4, order=None, seed=1)
DRAFT = coupled(TableTarget(4, order=None, seed=2), [0, 0, 1])
SAMPLING = SamplingParams(temperature=1.0)


def sampled(rounds, first_seed):
    """Answers of two tokens with the real noise of rows, counted."""
    counts = {}
    for seed in range(first_seed, first_seed + rounds):
        answer = answer_of(TARGET, [0], SAMPLING, DRAFT, 2, Noise(seed))
        counts[answer] = counts.get(answer, 0) + 1
    return counts


def test_sampled_answers_have_the_enumerated_law():
    law = speculative(TARGET, [0], SAMPLING, DRAFT, 2)
    counts = sampled(1500, 0)
    answers = list(law)
    assert set(counts) <= set(answers)
    seen = [counts.get(answer, 0) for answer in answers]
    assert fit(seen, [law[answer] for answer in answers]) > 1e-3
    # And not some other law: two answers' probabilities swapped would show.
    likely = sorted(answers, key=law.__getitem__)[-3:]
    swapped = {**law, likely[0]: law[likely[2]], likely[2]: law[likely[0]]}
    assert fit(seen, [swapped[answer] for answer in answers]) < 1e-6


# Statistics -----------------------------------------------------------------------------------------------------


def samples(law, n, times):
    return np.random.default_rng(0).multinomial(n, law, size=times)


def long_tail(size):
    """A distribution like a language model's: most outcomes are very rare."""
    law = 1.0 / np.arange(1, size + 1) ** 1.3
    return law / law.sum()


def test_p_values_of_a_right_law_are_uniform():
    law = long_tail(500)
    counts = samples(law, 2000, 400)
    assert stats.kstest([fit(c, law) for c in counts], "uniform").pvalue > 1e-3
    others = np.random.default_rng(1).multinomial(1000, law, size=400)
    assert stats.kstest([same(c, o) for c, o in zip(counts, others, strict=True)], "uniform").pvalue > 1e-3


def test_a_wrong_law_is_noticed():
    law = long_tail(500)
    other = law**1.1 / (law**1.1).sum()
    for counts, others in zip(samples(law, 20_000, 20), samples(other, 20_000, 20), strict=True):
        assert fit(counts, other) < 1e-6
        assert same(counts, others) < 1e-6


def test_the_impossible_is_no_accident():
    assert fit([1, 999], [0.0, 1.0]) == 0
    assert fit([0, 1000], [0.0, 1.0]) == 1
    assert same([0, 10, 0], [0, 90, 0]) == 1


def test_bins_expect_enough():
    for expected in (long_tail(300) * 500, np.array([1.0, 1, 1]), np.array([100.0, 1, 1, 1]), np.full(7, 6.0)):
        held = np.bincount(pooled(expected), expected)
        assert (held >= ENOUGH).all() or len(held) == 1
    assert len(set(pooled(np.full(7, 6.0)).tolist())) == 7


def test_counts_must_fit_the_law():
    with pytest.raises(ValueError, match="shape"):
        fit([1, 2], [0.2, 0.3, 0.5])
    with pytest.raises(ValueError, match="sum to 1"):
        fit([1, 2], [0.2, 0.3])
