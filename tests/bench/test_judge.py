"""Tie or bug: a differing token is a tie only if the dtype's own noise explains it."""


import numpy as np
import pytest
from tests import models

from paceline.bench.checks import Judge
from paceline.core.segment import Segment
from paceline.target.load import load


@pytest.fixture
def judge(pair):
    with Judge(*pair) as one:
        yield one


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
            said = judge.verdict(prefix, order[0], other)
            assert said.gap == pytest.approx(float(exact[order[0]] - exact[other]), abs=1e-3)
            assert said.verdict == ("tie" if said.gap <= 2 * said.noise else "bug")
            found[said.verdict] += 1
        assert judge.verdict(prefix, order[0], order[200]).verdict == "bug"
        # What both chose may be as close as can be: it is a bug if a third is far above them.
        assert judge.verdict(prefix, order[200], order[200]).verdict == "bug"
    assert found["tie"] > 0  # bfloat16 is coarse


def test_a_flip_that_bfloat16_really_makes_is_a_tie(pair, judge):
    flips = 0
    for seed in range(300):
        prefix = np.random.default_rng(seed).integers(2, 280, 12).tolist()
        rough, exact = (int(logits(target, prefix).argmax()) for target in pair)
        if rough != exact:
            flips += 1
            assert judge.verdict(prefix, exact, rough).verdict == "tie"
        if flips == 3:
            return
    pytest.fail("bfloat16 flipped no near-tie, so nothing was tested")


def test_in_float32_next_to_nothing_is_a_tie(pair):
    ties = 0
    with Judge(pair[1], pair[1]) as judge:
        for seed in range(20):
            prefix = np.random.default_rng(seed).integers(2, 280, 30).tolist()
            order = logits(pair[1], prefix).argsort(descending=True).tolist()
            said = judge.verdict(prefix, order[0], order[1])
            assert said.noise < 1e-3
            ties += said.verdict == "tie"
    assert ties <= 1


def test_rows_are_given_back(pair):
    with Judge(*pair, chunk=8) as judge:
        judge.verdict(list(range(2, 30)), 5, 6)
        judge.verdict(list(range(3, 30)), 5, 6)
    for target in pair:
        slot = target.add_row(10)
        assert slot == 0
        target.drop_row(slot)


def test_what_was_read_is_not_read_again(pair, monkeypatch):
    """The verdicts of prefixes of one text, shorter ones first, are those that each has alone."""
    text, other = list(range(2, 100)), [7, *range(3, 60)]
    prefixes = [text[:20], text[:24], text[:80], other, text[:80], text[:30]]
    alone = []
    for prefix in prefixes:
        with Judge(*pair) as judge:
            alone.append(judge.verdict(prefix, 7, 9))
    read = []
    for target in pair:
        verify = target.verify
        counted = lambda segments, verify=verify: (read.append(len(segments[0].tokens)), verify(segments))[1]  # noqa: E731
        monkeypatch.setattr(target, "verify", counted)
    with Judge(*pair) as judge:
        together = []
        for prefix in prefixes:
            read.clear()
            together.append(judge.verdict(prefix, 7, 9))
            if prefix == text[:24]:
                assert sum(read) == 2 * (4 + 1) + (4 + 16), "four more tokens, and those behind"
            if len(together) == 5:
                assert not read, "it is known already"
    for one, two in zip(alone, together, strict=True):
        assert two.gap == pytest.approx(one.gap, abs=1e-3)
        assert two.verdict == one.verdict


def test_a_chunked_prefix_says_the_same(pair, tmp_path):
    prefix = list(range(2, 100))
    with Judge(*pair) as one, Judge(*pair, chunk=8) as other:
        whole, cut = one.verdict(prefix, 7, 9), other.verdict(prefix, 7, 9)
    assert cut.gap == pytest.approx(whole.gap, abs=1e-3)
