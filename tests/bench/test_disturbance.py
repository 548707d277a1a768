"""Disturbance: a run that was not alone says so, a quiet one does not."""

import pytest
from tests.bench.turns import reply

from paceline.bench.checks import ROUNDS, disturbances, is_impossible
from paceline.bench.metrics import OVERALL
from paceline.bench.record import Answer


def row(method, speedup, accepted):
    return {"method": method, "category": OVERALL, "speedup": speedup, "mean_accepted_tokens": accepted}


def answer(waits, method="none", load=None):
    times = [sum(waits[:i]) for i in range(len(waits) + 1)]
    turn = reply(3, [1] * len(times), "x", times[-1], lengths=[1] * len(times), times=times)
    return Answer(method, 0, "q", "c", "t", 0, [turn], load=load)


QUIET = [0.002, 0.0021, 0.0022, 0.0025, 0.003] * 20


def test_a_quiet_run_has_nothing_to_say():
    rows = [row("none", 1.0, 1.0), row("sam", 1.35, 1.29), row("peer:vllm", 3.0, 1.0), row("x", None, None)]
    assert disturbances([answer(QUIET, load=2.4), answer(QUIET, load=2.1)], rows, threads=2) == []
    assert disturbances([], rows) == []


def test_a_speed_up_above_the_mean_accepted_tokens():
    """What another process did to a run: 2.48 times plain decoding's speed at 1.29 tokens a round."""
    (line,) = disturbances([], [row("none", 1.0, 1.0), row("sam", 2.48, 1.29)], threads=2)
    assert "not reliable" in line
    assert "sam has 2.48 times plain decoding's speed at 1.29 mean accepted tokens" in line
    assert is_impossible(2.48, 1.29)
    assert not is_impossible(1.2, 1.29)
    assert not is_impossible(None, 1.29)


@pytest.mark.parametrize(
    ("method", "count", "is_said"), [("none", 100, True), ("sam", 100, False), ("none", 10, False)]
)
def test_plain_rounds_that_scatter(method, count, is_said):
    """Rounds with drafts may take what they like, and of a few plain ones one may be unlucky."""
    waits = [0.002, 0.002, 0.002, 0.016] * (count // 4)
    assert (len(waits) >= ROUNDS) == (count == 100)
    found = disturbances([answer(waits, method)], [], threads=2)
    assert bool(found) == is_said
    if is_said:
        assert "5.5 ms in the mean, the fastest tenth 2.0 ms" in found[0]


def test_a_load_average_above_the_run_s_own_threads():
    loads = [answer(QUIET, load=load) for load in (2.0, 2.9, 3.1)]
    (line,) = disturbances(loads, [], threads=2)
    assert "the load average was 2.9 with 2 threads of its own" in line
    assert disturbances(loads, [], threads=3) == []
    assert disturbances(loads, []) == [], "whose threads they were is not known"
