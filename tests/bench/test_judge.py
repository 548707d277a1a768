"""Tie or bug: a differing token is a tie only if the dtype's own noise explains it."""

from typing import NamedTuple

import numpy as np
import pytest
from tests import models

from paceline.core.noise import Noise
from paceline.core.segment import Segment
from paceline.peers import reference
from paceline.peers.reference import PlainDecoding, Rounding, Sampled, distance
from paceline.runs.chance import is_tie
from paceline.target.load import load


class Judged(NamedTuple):
    gap: float
    noise: float

    @property
    def verdict(self):
        return "tie" if is_tie(*self) else "bug"


def judge_of(own, exact):
    same = own is exact
    return Rounding(PlainDecoding(exact, pieces=same), None if same else PlainDecoding(own, pieces=True))


def judged(judge, prefix, *tokens):
    return Judged(*distance(judge, prefix, tokens))


@pytest.fixture
def judge(pair):
    return judge_of(*pair)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = models.make("llama2", tmp_path_factory.mktemp("judge"))
    return load(folder, dtype="bfloat16"), load(folder, dtype="float32")


def logits(target, prefix):
    slot = target.add_row(len(prefix))
    try:
        return target.verify([Segment.chunk(slot, np.array(prefix), last=True)]).of(0)[-1].float()
    finally:
        target.drop_row(slot)


def test_a_token_far_below_the_best_is_a_bug_and_a_near_one_a_tie(pair, judge):
    found = {"tie": 0, "bug": 0}
    for seed in range(20):
        prefix = np.random.default_rng(seed).integers(2, 280, 30).tolist()
        exact = logits(pair[1], prefix)
        order = exact.argsort(descending=True).tolist()
        for other in (order[1], order[200]):
            said = judged(judge, prefix, order[0], other)
            assert said.gap == pytest.approx(float(exact[order[0]] - exact[other]), abs=1e-3)
            found[said.verdict] += 1
        assert judged(judge, prefix, order[0], order[200]).verdict == "bug"
        # What both chose may be as close as can be: it is a bug if a third is far above them.
        assert judged(judge, prefix, order[200], order[200]).verdict == "bug"
    assert found["tie"] > 0  # bfloat16 is coarse


def test_of_a_sampled_token_the_place_s_noise_decides(pair, judge):
    """The token that the noise takes has no gap, another one the gap of what decides there, and its rounding grows as
    the temperature falls."""
    for seed in range(10):
        prefix, noise, at = np.random.default_rng(seed).integers(2, 280, 30).tolist(), Noise(seed), seed + 3
        exact = logits(pair[1], prefix)
        for temperature in (0.5, 1.3):
            logs = (exact.double() / temperature).log_softmax(-1)
            taken = noise.choose(logs.exp(), at)
            other = int(logs.argsort()[100])
            scores = logs[[taken, other]].numpy() - np.log(noise.times(at, [taken, other]))
            sampled = Sampled(noise, at, temperature)
            same = Judged(*distance(judge, prefix, (taken, taken), sampled))
            said = Judged(*distance(judge, prefix, (taken, other), sampled))
            assert (same.gap, same.verdict) == (pytest.approx(0, abs=1e-3), "tie")
            assert said.gap == pytest.approx(scores[0] - scores[1], abs=1e-2)
            assert said.noise == pytest.approx(judged(judge, prefix, taken, other).noise / temperature)


def test_a_flip_that_bfloat16_really_makes_is_a_tie(pair, judge):
    flips = 0
    for seed in range(300):
        prefix = np.random.default_rng(seed).integers(2, 280, 12).tolist()
        rough, exact = (int(logits(target, prefix).argmax()) for target in pair)
        if rough != exact:
            flips += 1
            assert judged(judge, prefix, exact, rough).verdict == "tie"
        if flips == 3:
            return
    pytest.fail("bfloat16 flipped no near-tie, so nothing was tested")


def test_in_float32_next_to_nothing_is_a_tie(pair):
    ties = 0
    judge = judge_of(pair[1], pair[1])
    for seed in range(20):
        prefix = np.random.default_rng(seed).integers(2, 280, 30).tolist()
        order = logits(pair[1], prefix).argsort(descending=True).tolist()
        said = judged(judge, prefix, order[0], order[1])
        assert said.noise < 1e-3
        ties += said.verdict == "tie"
    assert ties <= 1


def test_rows_are_given_back(pair):
    judged(judge_of(*pair), list(range(2, 30)), 5, 6)
    for target in pair:
        slot = target.add_row(10)
        assert slot == 0
        target.drop_row(slot)


def test_a_beginning_in_chunks_says_the_same(pair, monkeypatch):
    prefix = list(range(2, 100))
    whole = judged(judge_of(*pair), prefix, 7, 9)
    monkeypatch.setattr(reference, "CHUNK", 8)
    assert judged(judge_of(*pair), prefix, 7, 9).gap == pytest.approx(whole.gap, abs=1e-3)
