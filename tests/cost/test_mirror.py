"""The law of drafting beside the target, against two threads that sleep as long as it says."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from time import perf_counter, sleep

import pytest

from paceline.cost.mirror import Law, pays_from

REGIMES = {
    "hidden": Law(0.0, 0.02, 0.012, 0.008, 1.0),
    "exposed": Law(0.0, 0.012, 0.03, 0.008, 1.0),
    "missed": Law(0.0, 0.02, 0.012, 0.016, 0.5),
    "early exit": Law(0.01, 0.01, 0.02, 0.01, 0.75, proxy=0.004),
}


def simulated(law: Law, rounds: int = 24) -> float:
    """Seconds a round: a target that sleeps, and a draft that sleeps in another thread."""
    asked: SimpleQueue[bool | None] = SimpleQueue()
    answered: SimpleQueue[None] = SimpleQueue()
    candidates: SimpleQueue[None] = SimpleQueue()

    def draft() -> None:
        while (hit := asked.get()) is not None:
            if not hit:
                sleep(law.fresh)
            answered.put(None)
            candidates.get()
            sleep(law.ahead)

    thread = Thread(target=draft)
    thread.start()
    began, owed = perf_counter(), 0.0
    for _ in range(rounds):
        owed += law.hit
        hit, owed = owed >= 1, owed % 1
        asked.put(hit)
        answered.get()
        sleep(law.before + law.proxy)
        candidates.put(None)
        sleep(law.after)
    took = (perf_counter() - began) / rounds
    asked.put(None)
    thread.join()
    return took


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_the_law_is_what_a_simulation_takes(regime: str) -> None:
    """Within 5 %, on a machine that has time for threads that sleep."""
    law = REGIMES[regime]
    assert min(simulated(law) for _ in range(3)) == pytest.approx(law.round, rel=0.05)


def test_the_law_in_numbers() -> None:
    law = REGIMES["missed"]
    assert law.round == pytest.approx(0.02 + 0.5 * 0.016)
    assert law.plain_round == pytest.approx(0.036)
    assert REGIMES["exposed"].round == pytest.approx(0.03)
    assert REGIMES["exposed"].exposed == pytest.approx(0.018)
    assert REGIMES["early exit"].round == pytest.approx(0.01 + 0.004 + 0.02 + 0.25 * 0.01)


def test_from_which_size_on_it_pays() -> None:
    law = Law(0.0, 0.001, 0.02, 0.005, 0.8)
    assert law.speedup < 1
    factor = pays_from(law)
    assert factor is not None
    assert law.times_larger(factor).speedup > 1 > law.times_larger(0.9 * factor).speedup
    assert pays_from(Law(0.0, 0.001, 0.02, 0.005, 0.0)) is None
