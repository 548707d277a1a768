"""The sampling test by itself, against engines that only draw tokens."""

from math import inf
from time import perf_counter

import numpy as np
import pytest

from paceline.certify.options import Scope
from paceline.certify.sampled import Distribution, KnownCase, Sampled, TextCase
from paceline.certify.stats import chi_square, tail
from paceline.net.completion import Completion
from paceline.net.endpoint import Endpoint

FINE = np.tile([0.02, 0.03], 20)
"""Forty tokens; each four are a coarse bin."""
OUTCOMES = {(): 0, **{(token,): token for token in range(40)}}


class Draws(Endpoint):
    """Answers with one token, drawn from `probs`, the same for all."""

    def __init__(self, probs, seed):
        super().__init__()
        self.probs, self.rng = probs, np.random.default_rng(seed)

    async def complete(self, body):
        raise NotImplementedError

    def ask(self, bodies, slots=None):
        drawn = self.rng.choice(40, len(bodies), p=self.probs).tolist()
        return [Completion(chr(97 + token // 4), tokens=[token]) for token in drawn]


def run(probs, seed, requests, worlds=FINE[None], control=None, until=inf):  # fmt: skip
    distribution = Distribution(OUTCOMES, worlds, np.arange(40) // 4, 1)
    sampled = Sampled([KnownCase(str(i), {}, distribution) for i in range(3)])
    plain = None if control is None else lambda: Draws(control, seed + 1)
    sampled.run(Draws(probs, seed), requests, np.random.default_rng(seed), control=plain, until=until)
    return sampled


def moved(within):
    """A tenth of the probability moved, within coarse bins or between them."""
    sides = np.tile([1, -1], 20) if within else np.repeat([1, -1], 20)
    probs = FINE + 0.005 * sides
    assert np.abs(probs - FINE).sum() / 2 == pytest.approx(0.1)
    return probs


def test_what_moves_within_coarse_bins_is_found():
    found = run(moved(within=True), 0, 9000)
    assert not found.facts()["lossless"]
    assert found.requests < 9000  # in the second look: the first has too few for fine bins
    for case in found.cases:
        coarse = np.bincount(case.distribution.coarse, case.counts[0])
        assert tail(chi_square(coarse, case.distribution.coarse_worlds), case.distribution.df) > 0.01


def test_what_moves_between_them_is_found():
    assert not run(moved(within=False), 0, 9000).facts()["lossless"]


def test_the_right_distribution_is_not_accused():
    """Far more rarely than once in 10 times."""
    found = [run(FINE, seed, 2000).facts() for seed in range(10)]
    assert all(one["lossless"] for one in found)
    assert min(one["p"] for one in found) < 0.2


def test_what_rounding_may_move_is_not_held_against_an_engine_and_more_is():
    """A tenth of the probability moves; the worlds move as much, or a fifth of that."""
    right, wide, narrow = moved(within=False), 2 * moved(within=False) - FINE, FINE + (moved(within=False) - FINE) / 5
    assert not run(right, 0, 9000).facts()["lossless"]
    allowed = [run(right, seed, 2000, np.stack([FINE, wide])) for seed in range(5)]
    assert all(one.facts()["lossless"] for one in allowed)
    assert not run(right, 0, 9000, np.stack([FINE, narrow])).facts()["lossless"]
    power = allowed[0].power(Scope(shift=0.02))
    assert power["hidden"] >= 0.2 - 1e-9
    assert power["detectable"] > power["hidden"]


def test_what_plain_decoding_does_too_is_not_held_against_drafts():
    off = moved(within=False)
    same = run(off, 0, 9000, control=off)
    assert same.facts()["lossless"]
    assert same.facts()["plain_differs"]
    assert not run(off, 0, 9000, control=FINE).facts()["lossless"]


def test_where_time_is_short_fewer_requests_are_asked_and_a_test_still_holds():
    found = run(FINE, 0, 9000, until=perf_counter())
    assert found.requests == found.planned == found.least < 1000
    whole = run(FINE, 0, 9000, until=perf_counter() + 3600)
    assert whole.requests == 9000
    assert found.power(Scope())["detectable"] > whole.power(Scope())["detectable"]


@pytest.mark.parametrize("within", [True, False])
def test_texts_are_compared_with_those_of_the_control(within):
    """Each letter is a coarse bin: what moves between them is found, and what moves within them does not show."""
    sampled = Sampled([TextCase(str(i), {}, 0.0) for i in range(3)], slack=0.0)
    sampled.run(Draws(moved(within), 0), 3000, np.random.default_rng(0), control=lambda: Draws(FINE, 1))
    assert sampled.facts()["lossless"] is within
    assert sum(case.requests for case in sampled.cases) == sampled.requests > 0
