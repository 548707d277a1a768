"""Tie or bug: a differing token is a tie only if the dtype's own noise explains it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests import models

from paceline.bench.judge import Judge
from paceline.target.base import Segment, Target
from paceline.target.load import load


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Target]:
    folder = models.make("llama2", tmp_path_factory.mktemp("judge"))
    return load(folder, dtype="bfloat16"), load(folder, dtype="float32")


def logits(target: Target, prefix: list[int]) -> torch.Tensor:
    slot = target.add_row(len(prefix))
    try:
        return target.verify([Segment.chunk(slot, np.array(prefix), last=True)]).of(0)[-1].float()
    finally:
        target.drop_row(slot)


def test_a_token_far_below_the_best_is_a_bug_and_a_near_one_a_tie(pair: tuple[Target, Target]) -> None:
    judge = Judge(*pair)
    found = {"tie": 0, "bug": 0}
    for seed in range(20):
        prefix = np.random.default_rng(seed).integers(2, 280, 30).tolist()
        exact = logits(pair[1], prefix)
        order = exact.argsort(descending=True).tolist()
        for other in (order[1], order[200]):
            said = judge.verdict(prefix, order[0], other)
            assert said.gap == pytest.approx(float(exact[order[0]] - exact[other]), abs=1e-3)
            assert said.verdict == ("tie" if said.gap <= 2 * said.noise else "bug")
            found[said.verdict] += 1
        assert judge.verdict(prefix, order[0], order[200]).verdict == "bug"
        # What both chose may be as close as can be: it is a bug if a third is far above them.
        assert judge.verdict(prefix, order[200], order[200]).verdict == "bug"
    assert found["tie"] > 0  # bfloat16 is coarse


def test_a_flip_that_bfloat16_really_makes_is_a_tie(pair: tuple[Target, Target]) -> None:
    judge, flips = Judge(*pair), 0
    for seed in range(300):
        prefix = np.random.default_rng(seed).integers(2, 280, 12).tolist()
        rough, exact = (int(logits(target, prefix).argmax()) for target in pair)
        if rough != exact:
            flips += 1
            assert judge.verdict(prefix, exact, rough).verdict == "tie"
    assert flips > 0


def test_in_float32_next_to_nothing_is_a_tie(pair: tuple[Target, Target]) -> None:
    judge = Judge(pair[1], pair[1])
    ties = 0
    for seed in range(20):
        prefix = np.random.default_rng(seed).integers(2, 280, 30).tolist()
        order = logits(pair[1], prefix).argsort(descending=True).tolist()
        said = judge.verdict(prefix, order[0], order[1])
        assert said.noise < 1e-3
        ties += said.verdict == "tie"
    assert ties <= 1


def test_rows_are_given_back(pair: tuple[Target, Target]) -> None:
    judge = Judge(*pair, chunk=8)
    judge.verdict(list(range(2, 30)), 5, 6)
    slot = pair[0].add_row(10)
    assert slot == 0
    pair[0].drop_row(slot)


def test_a_chunked_prefix_says_the_same(pair: tuple[Target, Target], tmp_path: Path) -> None:
    prefix = list(range(2, 100))
    whole, cut = Judge(*pair).verdict(prefix, 7, 9), Judge(*pair, chunk=8).verdict(prefix, 7, 9)
    assert cut.gap == pytest.approx(whole.gap, abs=1e-3)
