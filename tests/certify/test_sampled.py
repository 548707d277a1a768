"""The sampling test by itself, against engines that only draw tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.certify.engines import UnderTest
from paceline.certify.sampled import Case, Distribution, Sampled, sample
from paceline.certify.stats import Floats, chi_square, tail
from paceline.engine.sampling import SamplingParams
from paceline.workbench.contestant import Reply

FINE = np.tile([0.02, 0.03], 20)
"""Forty tokens; each four are a coarse bin."""
DISTRIBUTION = Distribution({(): 0, **{(token,): token for token in range(40)}}, FINE, np.arange(40) // 4, 1)


class Draws(UnderTest):
    """Answers with one token, drawn from `probs`, the same for all."""

    def __init__(self, probs: Floats, seed: int):
        self.probs, self.rng = probs, np.random.default_rng(seed)

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Reply]:
        return [Reply(0, [int(token)], "", 0.0) for token in self.rng.choice(40, len(prompts), p=self.probs)]


def run(probs: Floats, seed: int, requests: int) -> Sampled:
    cases = [Case(str(i), [i], SamplingParams(temperature=1.0), DISTRIBUTION) for i in range(3)]
    return sample(Draws(probs, seed), cases, requests, np.random.default_rng(seed))


def moved(within: bool) -> Floats:
    """A tenth of the probability moved, within coarse bins or between them."""
    sides = np.tile([1, -1], 20) if within else np.repeat([1, -1], 20)
    probs = FINE + 0.005 * sides
    assert np.abs(probs - FINE).sum() / 2 == pytest.approx(0.1)
    return probs


def test_what_moves_within_coarse_bins_is_found() -> None:
    found = run(moved(within=True), 0, 9000)
    assert not found.facts()["lossless"]
    assert found.requests < 9000  # in the second look: the first has too few for fine bins
    for case, counts in zip(found.cases, found.counts, strict=True):
        coarse = np.bincount(case.distribution.coarse, counts)
        assert tail(chi_square(coarse, case.distribution.coarse_probs), case.distribution.df) > 0.01


def test_what_moves_between_them_is_found() -> None:
    assert not run(moved(within=False), 0, 9000).facts()["lossless"]


def test_the_right_distribution_is_not_accused() -> None:
    """Far more rarely than once in 20 times."""
    found = [run(FINE, seed, 2000).facts() for seed in range(20)]
    assert all(one["lossless"] for one in found)
    assert min(one["p"] for one in found) < 0.2
