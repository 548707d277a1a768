"""The law of drafting beside the target, against two threads that sleep as long as it says."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from time import perf_counter, sleep

import pytest

from paceline.cost.mirror import Law, law_on, pays_from, size_that_pays
from paceline.cost.model import DEVICES, Machine, Size

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


def test_sides_that_share_caches_lose_while_both_work() -> None:
    hidden = Law(0.0, 0.02, 0.012, 0.008, 1.0, together=1.5)
    assert hidden.round == pytest.approx(0.02 + 0.5 * 0.012)
    assert Law(0.0, 0.01, 0.03, 0.008, 1.0, together=2.0).round == pytest.approx(0.01 + 0.03), "they take turns"
    assert Law(0.0, 0.02, 0.012, 0.01, 0.5, late=0.004).exposed == pytest.approx(0.5 * 0.004)


LARGE = Size(7e9, 32, 4096, 2 * 32 * 1024 * 2)
SMALL = Size(0.5e9, 24, 896, 2 * 24 * 128 * 2)


def test_by_datasheets_a_second_device_hides_drafting() -> None:
    one = Machine(DEVICES["H100-SXM"])
    law = law_on(one, one, LARGE, SMALL, hit=1.0, branches=1, rendezvous=0.0)
    assert law.late == law.fresh
    assert law.ahead == pytest.approx(law.fresh * 6 / 5), "the window's last token, then a window"
    assert law_on(one, one, LARGE, SMALL, hit=0.9).speedup > law_on(one, one, LARGE, SMALL, hit=0.3).speedup
    slow = law_on(one, Machine(DEVICES["L4"]), LARGE, SMALL, hit=0.5)
    assert slow.fresh == law.fresh, "plain speculation has the first device"
    assert slow.late > slow.fresh


def test_the_size_that_pays_by_datasheets() -> None:
    one = Machine(DEVICES["H100-SXM"])
    size = size_that_pays(one, one, LARGE, SMALL, hit=0.5)
    assert size is not None

    def gain(parameters: float) -> float:
        target = Size(parameters, LARGE.layers, LARGE.width, LARGE.cache_bytes)
        return law_on(one, one, target, SMALL, hit=0.5).speedup

    assert gain(size) > 1 > gain(0.7 * size)
    assert size_that_pays(one, one, LARGE, SMALL, hit=0.0) is None
