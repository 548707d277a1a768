"""Figures: oracle, constant, random, ties, transposition, orders, and cached against naive evaluation."""

import numpy as np
import pytest

from paceline.evals.vision.captions import VALUES
from paceline.evals.vision.dataset import Data
from paceline.evals.vision.evaluate import open_model, score
from paceline.evals.vision.options import read_model
from paceline.evals.vision.scores import case_credits, correct, overall, summarise
from paceline.evals.vision.towers import small

from .sets import data

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("model", [open_model("oracle", None), open_model("geometry", None)])
def test_who_knows_is_always_right(model):
    for one in score(model, data()).results():
        assert (one["i2t"], one["t2i"], one["mean"], one["group"], one["assignment"]) == (100,) * 5
        assert one["stderr"]["mean"] == 0
        assert np.array_equal(one["confusion"]["i2t"], np.eye(one["k"]))


def test_a_constant_scorer_is_at_chance_and_officially_at_the_share_of_label_0():
    scored = score(open_model("constant", None), data())
    for one in scored.results():
        assert one["i2t"] == one["t2i"] == pytest.approx(100 / one["k"], abs=1e-3)
        assert one["assignment"] == pytest.approx(100 / one["k"], abs=1e-3)
    for one in scored.results(ties="first"):
        cases = [case for case in data().cases if case.subset == one["subset"]]
        first = np.mean([case.i2t_keys[:, 0] == np.arange(case.k) for case in cases])
        assert one["i2t"] == pytest.approx(100 * first, abs=1e-3)


def test_random_scores_are_at_chance():
    for subset, values in VALUES.items():
        k = len(values)
        one = summarise(subset, [RNG.random((k, k)) for _ in range(400)], values)
        for way in ("i2t", "t2i"):
            assert abs(one[way] - 100 / k) < 4 * one["stderr"][way]
        expected = 100 / k**k
        assert abs(one["group_i2t"] - expected) <= 4 * max(one["stderr"]["group_i2t"], 0.1)


def test_a_model_that_takes_each_value_for_the_next():
    for one in score(open_model("swapped", None), data()).results():
        assert one["mean"] == one["group"] == 0
        assert np.array_equal(one["confusion"]["i2t"], np.roll(np.eye(one["k"]), 1, axis=1))
        if one["subset"] == "count":
            assert one["count_error"]["i2t"] == pytest.approx((8 * 1 + 8) / 9, abs=1e-3)


def test_transposing_swaps_the_directions():
    scores = RNG.random((5, 5))
    one, other = case_credits(scores), case_credits(scores.T)
    assert (one["i2t"], one["t2i"], one["group_i2t"]) == (other["t2i"], other["i2t"], other["group_t2i"])
    assert (one["mean"], one["group"], one["assignment"]) == (other["mean"], other["group"], other["assignment"])


def test_ties_share_their_credit():
    scores = np.array([[1.0, 1, 0], [0, 2, 1], [3, 3, 3]])
    assert correct(scores).tolist() == [0.5, 1.0, pytest.approx(1 / 3)]
    keys = np.array([[1, 0, 2], [0, 1, 2], [2, 1, 0]])
    assert correct(scores, keys).tolist() == [0, 1, 1]  # the first of the best in each query's own order
    assert correct(np.array([[np.nan, np.nan], [0, 1]])).tolist() == [0, 1]


def test_the_overall_mean_is_of_subsets_not_of_queries():
    results = score(open_model(*read_model("random,seed=3")), data()).results()
    assert overall(results)["i2t"] == pytest.approx(np.mean([one["i2t"] for one in results]), abs=1e-3)
    queries = np.average([one["i2t"] for one in results], weights=[one["k"] * one["cases"] for one in results])
    assert overall(results)["i2t"] != pytest.approx(queries, abs=0.1)


def test_errors_are_those_of_cases():
    """Nine queries of a case that are right or wrong together are one observation, not nine."""
    matrices = [np.eye(9) if n % 2 else np.roll(np.eye(9), 1, 0) for n in range(100)]
    assert summarise("count", matrices, VALUES["count"])["stderr"]["i2t"] == pytest.approx(5, rel=0.15)


def one_by_one(towers, data):
    """The matrices of a query at a time, as the official evaluation scores."""
    see, read = towers.encode_images, towers.encode_texts
    return {
        case.name: np.block([[see([picture]) @ read([caption]).T for caption in case.captions] for picture in pictures])
        for case in data.cases
        if (pictures := data.pictures(case, []))
    }


class Counted:
    """Counts what is encoded."""

    def __init__(self, towers):
        self.towers, self.pictures, self.captions = towers, 0, []

    def encode_images(self, pictures):
        self.pictures += len(pictures)
        return self.towers.encode_images(pictures)

    def encode_texts(self, captions):
        self.captions += captions
        return self.towers.encode_texts(captions)


def test_cached_is_naive_and_batches_do_not_matter():
    few = data()
    few = Data(few.source, few.root, [case for case in few.cases if case.id == "00000"], [])
    towers = small(size=32, patch=16, width=32, layers=1)
    naive = one_by_one(towers, few)
    for batch in (1, 7, 64):
        counted = Counted(towers)
        cached = score(counted, few, batch=batch)
        assert (cached.matrices.keys(), len(naive)) == (naive.keys(), 6)
        for name, matrix in cached.matrices.items():
            assert np.abs(matrix - naive[name]).max() < 1e-6
        assert (counted.pictures, len(set(counted.captions))) == (30, len(counted.captions))
