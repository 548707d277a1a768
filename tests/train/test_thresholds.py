"""Thresholds for the exits of a draft: what they should bring, and that the best are found."""

from itertools import product

import numpy as np
import pytest

from paceline.draft.methods.s2d import NEVER
from paceline.train.s2d import GRID, ExitRecord


def fastest(rate, call):
    """Speed-up of the best chain of at most 16 tokens, each accepted at this rate."""
    return max((1 - rate ** (n + 1)) / (1 - rate) / (1 + n * call) for n in range(1, 17))


def watched(sure, right, layers, head=0.02):
    return ExitRecord(sure, right, layers, head, np.full(len(sure), 1 / len(sure)))


def made(count=3000, seed=0):
    """The first exit is right as often as it is sure, the next half as often wrong, the last nearly always right."""
    rng = np.random.default_rng(seed)
    sure = rng.beta(0.6, 0.6, (count, 1)) ** [1.0, 0.8, 0.6]
    first = sure[:, 0]
    right = np.column_stack([first, (1 + first) / 2, np.full(count, 0.95)])
    return watched(sure, rng.random((count, 3)) < right, [0.03, 0.06, 0.2])


def test_the_speed_up_is_that_of_the_exits_taken():
    sure = np.array([[0.9, 0.1, 0.3], [0.4, 0.8, 0.3], [0.4, 0.4, 0.3], [0.4, 0.4, 0.3]])
    right = np.array([[True, False, False], [False, True, False], [True, True, True], [True, True, False]])
    one = watched(sure, right, [0.1, 0.2, 0.4], head=0.05)
    # Three of four tokens are right; one left at each of the first two exits, two at the last, all heads before tried.
    call = (0.15 + 0.3 + 2 * 0.55) / 4
    assert one.speed((0.5, 0.5)) == pytest.approx(fastest(0.75, call))
    # An exit that nothing leaves at is not tried.
    call = (0.1 + 0.05 + 3 * (0.4 + 0.1)) / 4
    assert one.speed((0.5, NEVER)) == pytest.approx(fastest(0.5, call))
    call = 0.1 + 0.05
    assert one.speed((0.0, 0.5)) == pytest.approx(fastest(0.75, call))


def test_tokens_count_by_their_share():
    sure, right = np.full((2, 1), 0.5), np.array([[True], [False]])
    one = ExitRecord(sure, right, [0.1], 0.0, np.array([0.9, 0.1]))
    assert one.speed(()) == pytest.approx(fastest(0.9, 0.1))
    assert one.best() == ((), one.speed(()))


@pytest.mark.parametrize("seed", range(4))
def test_none_of_the_grid_is_faster_than_the_best(seed):
    one = made(seed=seed)
    thresholds, speed = one.best()
    assert speed == one.speed(thresholds)
    assert speed >= max(one.speed(grid) for grid in product(GRID, repeat=2)) * 0.999
    assert speed > max(one.speed(fixed) for fixed in product((0.0, NEVER), repeat=2)), "no single exit is as fast"


def test_what_costs_nothing_is_used_and_what_gains_nothing_is_not():
    rng = np.random.default_rng(1)
    sure = rng.random((500, 2))
    right = np.column_stack([rng.random(500) < 0.3, rng.random(500) < 0.8])
    assert watched(sure, right, [0.1, 0.1001], head=0.0).best()[0][0] >= 0.9
    right = np.column_stack([right[:, 1], right[:, 1]])
    assert watched(sure, right, [0.1, 0.4]).best()[0] == (0.0,)
