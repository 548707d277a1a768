"""Times of rounds, learned or read from a file, and the sizes of trees that pay at them."""

import itertools
import json

import numpy as np
import pytest

from paceline.draft.cost import DraftTimes, Prices, Table, _nonnegative, forward_times

# Times ----------------------------------------------------------------------------------------------------------------


def test_the_terms_are_the_best_of_all_that_are_not_below_zero():
    rng = np.random.default_rng(0)
    for _ in range(100):
        factors, targets = rng.normal(size=(8, 5)), rng.normal(size=5)
        products = factors.T @ factors + 1e-3 * np.eye(5)

        def loss(x):
            return float(x @ products @ x / 2 - targets @ x)  # noqa: B023

        best = 0.0
        for chosen in itertools.product([False, True], repeat=5):
            x, some = np.zeros(5), np.array(chosen)
            x[some] = np.linalg.solve(products[np.ix_(some, some)], targets[some])
            best = min(best, loss(x)) if (x >= 0).all() else best
        found = _nonnegative(products, targets)
        assert (found >= 0).all()
        assert loss(found) == pytest.approx(best)


def test_a_table_survives_a_file():
    table = Table(Prices({"fixed": 1e-3, "node": 2e-5}), {"sam": DraftTimes(1e-6, 5e-6)}, {"sam": [0.5, 0.8]})
    again = Table.from_json(json.loads(json.dumps(table.to_json())))
    assert again.prices.seconds(1, 5) == pytest.approx(table.prices.seconds(1, 5))
    assert again.prices.is_fixed
    assert again.drafting["sam"].seconds(2) == pytest.approx(11e-6)
    assert again.acceptance == {"sam": [0.5, 0.8]}


def test_forwards_are_read_between_and_after_their_sizes():
    times = forward_times({1: 20, 16: 25, 64: 40})
    assert times[[0, 1, 16, 40, 64, 112]] == pytest.approx([20, 20, 25, 32.5, 40, 55])
    assert forward_times({1: 3.0})[[1, 50]] == pytest.approx([3, 3])
    assert forward_times({1: 5, 2: 9, 4: 6})[[2, 3, 100]] == pytest.approx([9, 7.5, 6]), "never down"
