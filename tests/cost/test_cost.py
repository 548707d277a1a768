"""The round of `mirror` by its latency model, against two threads that sleep for its times."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from time import perf_counter, sleep

import pytest
from benchmarks.latency import LatencyModel

# The round of mirror --------------------------------------------------------------------------------------------------

REGIMES = {
    "hidden": LatencyModel(0.0, 0.02, 0.012, 0.008, 1.0),
    "exposed": LatencyModel(0.0, 0.012, 0.03, 0.008, 1.0),
    "missed": LatencyModel(0.0, 0.02, 0.012, 0.016, 0.5),
    "early exit": LatencyModel(0.01, 0.01, 0.02, 0.01, 0.75, proxy=0.004),
}


def simulated(latency: LatencyModel, rounds: int = 24) -> float:
    """Seconds a round: a target that sleeps, and a draft that sleeps in another thread."""
    asked: SimpleQueue[bool | None] = SimpleQueue()
    answered: SimpleQueue[None] = SimpleQueue()
    candidates: SimpleQueue[None] = SimpleQueue()

    def draft() -> None:
        while (hit := asked.get()) is not None:
            if not hit:
                sleep(latency.fresh)
            answered.put(None)
            candidates.get()
            sleep(latency.ahead)

    thread = Thread(target=draft)
    thread.start()
    began, owed = perf_counter(), 0.0
    for _ in range(rounds):
        owed += latency.hit
        hit, owed = owed >= 1, owed % 1
        asked.put(hit)
        answered.get()
        sleep(latency.before + latency.proxy)
        candidates.put(None)
        sleep(latency.after)
    took = (perf_counter() - began) / rounds
    asked.put(None)
    thread.join()
    return took


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_the_model_is_what_a_simulation_takes(regime: str) -> None:
    """Within 5 %, on a machine that has time for threads that sleep."""
    latency = REGIMES[regime]
    assert min(simulated(latency) for _ in range(3)) == pytest.approx(latency.round, rel=0.05)


def test_the_model_in_numbers() -> None:
    latency = REGIMES["missed"]
    assert latency.round == pytest.approx(0.02 + 0.5 * 0.016)
    assert latency.plain_round == pytest.approx(0.036)
    assert REGIMES["exposed"].round == pytest.approx(0.03)
    assert REGIMES["exposed"].exposed == pytest.approx(0.018)
    assert REGIMES["early exit"].round == pytest.approx(0.01 + 0.004 + 0.02 + 0.25 * 0.01)


def test_sides_that_share_caches_lose_while_both_work() -> None:
    hidden = LatencyModel(0.0, 0.02, 0.012, 0.008, 1.0, together=1.5)
    assert hidden.round == pytest.approx(0.02 + 0.5 * 0.012)
    in_turn = LatencyModel(0.0, 0.01, 0.03, 0.008, 1.0, together=2.0)
    assert in_turn.round == pytest.approx(0.01 + 0.03)
