"""The cost model: times learned from rounds and read from a file, and the nodes that pay at them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from paceline.draft.cost import (
    DEFAULT_SIZE,
    RoundTimes,
    _nonnegative,
    best_size,
    best_sizes,
    choose,
    time_forwards,
)
from tests import native
from tests.draft.head_worlds import World


def times_of(**terms: float) -> RoundTimes:
    """A fixed table of these terms, in milliseconds; the others are 0."""
    full = {name: terms.get(name, 0.0) for name in RoundTimes().names}
    return RoundTimes.from_json({"forward_ms": full, "drafting_us": {}})


# Times ----------------------------------------------------------------------------------------------------------------


def test_times_are_learned_from_rounds() -> None:
    rng, times = np.random.default_rng(0), RoundTimes()

    def truth(rows: int, nodes: int, widest: int, prompt: int) -> float:
        return 1e-3 * (1.5 + 0.02 * rows + 0.05 * max(nodes + prompt - 12, 0) + 0.004 * rows * widest)

    for _ in range(600):
        rows = int(rng.choice([1, 4, 16]))
        sizes = rng.integers(1, 12, rows)
        prompt = int(rng.integers(0, 60)) if rng.random() < 0.2 else 0
        shape = rows, int(sizes.sum()), int(sizes.max()), prompt
        spike = 20 if rng.random() < 0.02 else 1
        times.note(*shape, truth(*shape) * rng.normal(1, 0.03) * spike)
    for shape in ((1, 1, 1, 0), (1, 10, 10, 0), (4, 30, 9, 0), (16, 16, 1, 0), (16, 100, 8, 40)):
        assert times.seconds(*shape) == pytest.approx(truth(*shape), rel=0.15)


@pytest.mark.parametrize("share", [0.0, 1 / 16])
def test_more_tokens_read_more_of_the_experts(share: float) -> None:
    """The first drafted tokens read experts of their own, later ones those that others have chosen: without a term for
    that, the price of the first is taken for that of all."""
    rng, times = np.random.default_rng(0), RoundTimes(expert_share=share)

    def truth(nodes: int) -> float:
        return 1e-3 * (1.0 + 0.5 * 16 * (1 - (1 - 1 / 16) ** nodes))

    for _ in range(600):
        nodes = int(rng.integers(1, 65))
        times.note(1, nodes, nodes, 0, truth(nodes) * rng.normal(1, 0.03))
    off = max(abs(times.seconds(1, nodes, nodes) / truth(nodes) - 1) for nodes in (1, 4, 16, 64))
    assert off < 0.06 if share else off > 0.2
    if share:
        again = RoundTimes.from_json(times.to_json())
        assert again.seconds(1, 8, 8) == pytest.approx(times.seconds(1, 8, 8), rel=1e-3)
        assert times.slope(1, 40) < 0.2 * times.slope(1, 1)


def test_a_batch_that_never_drafted_guesses_low_what_a_node_costs() -> None:
    times = RoundTimes()
    for _ in range(64):
        times.note(8, 8, 1, 0, 4e-3)
    assert times.seconds(8, 8, 1) == pytest.approx(4e-3, rel=0.02)
    assert 0 < times.slope(8, 8) < 0.05 * 4e-3


def test_the_terms_are_the_best_of_all_that_are_not_below_zero() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        factors, targets = rng.normal(size=(8, 5)), rng.normal(size=5)
        products = factors.T @ factors + 1e-3 * np.eye(5)

        def loss(x: np.ndarray) -> float:
            return float(x @ products @ x / 2 - targets @ x)  # noqa: B023

        best = 0.0
        for chosen in itertools.product([False, True], repeat=5):
            x, some = np.zeros(5), np.array(chosen)
            x[some] = np.linalg.solve(products[np.ix_(some, some)], targets[some])
            best = min(best, loss(x)) if (x >= 0).all() else best
        found = _nonnegative(products, targets)
        assert (found >= 0).all()
        assert loss(found) == pytest.approx(best)


def test_times_survive_a_file(tmp_path: Path) -> None:
    times = RoundTimes()
    for n in range(64):
        times.note(1, 1 + n % 9, 1 + n % 9, 0, 1e-3 + 2e-5 * (n % 9))
    again = RoundTimes.from_json(json.loads(json.dumps({**times.to_json()})))
    assert again.seconds(1, 5, 5) == pytest.approx(times.seconds(1, 5, 5), rel=1e-3)
    before = again.seconds(2, 9, 5)
    again.note(2, 9, 5, 0, 1.0)
    assert again.is_fixed
    assert again.seconds(2, 9, 5) == before


def test_forwards_are_read_between_and_after_their_sizes() -> None:
    times = RoundTimes.of_forwards({1: 20, 16: 25, 64: 40})
    assert times.of(1)[[0, 1, 16, 40, 64, 112]] == pytest.approx([20, 20, 25, 32.5, 40, 55])
    assert RoundTimes.of_forwards({1: 3.0}).of(1)[[1, 50]] == pytest.approx([3, 3])
    assert RoundTimes.of_forwards({1: 5, 2: 9, 4: 6}).of(1)[[2, 3, 100]] == pytest.approx([9, 7.5, 6]), "never down"


# The choice -----------------------------------------------------------------------------------------------------------


def num_paying(drafts: list[np.ndarray], rows: int, times: RoundTimes, rate: float) -> int:
    threshold, _ = choose(drafts, rows, times, rate)
    return sum(int((draft >= threshold).sum()) for draft in drafts)


def test_the_choice_is_the_best_of_all_prefixes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = int(rng.integers(1, 9))
        times = times_of(round=1.5, row=0.02, token_after_0=0.03, token_after_12=0.05)
        drafts = [np.cumprod(rng.uniform(0.3, 1, int(rng.integers(1, 9)))) for _ in range(rows)]
        rate = rows / times.seconds(rows, rows, 1)
        line = np.sort(np.concatenate(drafts))[::-1]

        def net(k: int) -> float:
            return float(line[:k].sum()) - rate * times.seconds(rows, rows + k, 1)  # noqa: B023

        assert net(num_paying(drafts, rows, times, rate)) == pytest.approx(max(map(net, range(len(line) + 1))))


def test_drafts_shrink_as_the_batch_grows_down_to_none() -> None:
    times = times_of(round=2.0, row=0.01, token_after_0=0.02, token_after_12=0.08)
    draft = 0.6 ** np.arange(1.0, 17.0)
    sizes = [
        num_paying([draft] * rows, rows, times, rows / times.seconds(rows, rows, 1)) / rows
        for rows in (1, 2, 4, 8, 16, 32, 128)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 6
    assert sizes[-1] == 0


def test_the_first_draft_pays_for_making_the_round_uneven() -> None:
    smooth = times_of(round=2.0, token_after_0=0.01)
    uneven = times_of(round=2.0, token_after_0=0.01, row_if_uneven=0.1)
    assert uneven.seconds(8, 8, 1) == smooth.seconds(8, 8, 1)
    rate, few, many = 8 / smooth.seconds(8, 8, 1), [np.array([0.5, 0.2])], [np.array([0.5, 0.2])] * 8
    assert num_paying(few, 8, smooth, rate) == 2
    assert num_paying(few, 8, uneven, rate) == 0
    assert num_paying(many, 8, uneven, rate) > 0


def test_a_wide_row_pays_for_the_padding_of_all() -> None:
    flat = times_of(round=2.0, row=0.01, token_after_0=0.001)
    padded = times_of(round=2.0, row=0.01, token_after_0=0.001, row_times_widest=0.02)
    draft = 0.9 ** np.arange(1.0, 21.0)
    assert num_paying([draft], 16, padded, 5e3) < num_paying([draft], 16, flat, 5e3)


# The size that pays ---------------------------------------------------------------------------------------------------


def test_the_size_that_pays() -> None:
    assert best_size([0, 0.5, 0.6], RoundTimes.of_forwards({1: 1.0, 2: 1.1, 3: 1.9})) == 1
    assert best_size([0, 0.5, 0.6], RoundTimes.of_forwards({1: 1.0, 2: 1.01, 3: 1.02})) == 2
    assert best_size([0, 0.1, 0.2], RoundTimes.of_forwards({1: 1.0, 2: 2.0, 3: 3.0})) == 0
    assert best_size([0, 0.5, 0.6], RoundTimes.of_forwards({1: 1.0, 2: 1.0, 3: 1.0}), drafting=0.7) == 0
    assert best_size([0.01 * n for n in range(99)], RoundTimes()) == DEFAULT_SIZE


def test_rows_that_are_verified_together_share_what_pays() -> None:
    sure, unsure = [0.9, 0.8, 0.7], [0.3, 0.1]
    assert best_sizes([unsure, sure], RoundTimes.of_forwards({1: 1.0, 64: 1.001})) == [2, 3]
    assert best_sizes([unsure, sure], RoundTimes.of_forwards({2: 1.0, 5: 1.01, 6: 9.0})) == [0, 3]
    assert best_sizes([unsure, sure], RoundTimes.of_forwards({2: 1.0, 5: 1.01, 6: 9.0}), fixed=2) == [0, 1]
    assert best_sizes([unsure, sure], RoundTimes.of_forwards({1: 1.0, 64: 64.0})) == [0, 0]
    assert best_sizes([[0.01] * 99], RoundTimes.of_forwards({1: 1.0, 64: 1.0})) == [63]
    assert best_sizes([[0.1] * 30, sure], RoundTimes()) == [29, 3]  # DEFAULT_SIZE for each, the likeliest of all first
    assert best_sizes([], RoundTimes.of_forwards({1: 1.0})) == []


def test_verifying_is_timed_and_changes_nothing() -> None:
    target = native.of(World().model)
    times = time_forwards(target)
    assert times.known
    assert (times.of(1)[[1, 2, 4, 8, 16, 32, 64, 4000]] > 0).all()
    assert target.length(target.add_row(4)) == 0
    assert not time_forwards(object()).known  # type: ignore[arg-type]
