"""The latency model of drafting while the target runs, against two threads that sleep for its times."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from time import perf_counter, sleep

import pytest

from paceline.cost.mirror import LatencyModel, latency_on, pays_from, size_that_pays
from paceline.cost.model import DEVICES, Machine, Size

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


def test_from_which_size_on_it_pays() -> None:
    latency = LatencyModel(0.0, 0.001, 0.02, 0.005, 0.8)
    assert latency.speedup < 1
    factor = pays_from(latency)
    assert factor is not None
    assert latency.times_larger(factor).speedup > 1 > latency.times_larger(0.9 * factor).speedup
    assert pays_from(LatencyModel(0.0, 0.001, 0.02, 0.005, 0.0)) is None


def test_sides_that_share_caches_lose_while_both_work() -> None:
    hidden = LatencyModel(0.0, 0.02, 0.012, 0.008, 1.0, together=1.5)
    assert hidden.round == pytest.approx(0.02 + 0.5 * 0.012)
    in_turn = LatencyModel(0.0, 0.01, 0.03, 0.008, 1.0, together=2.0)
    assert in_turn.round == pytest.approx(0.01 + 0.03)
    assert LatencyModel(0.0, 0.02, 0.012, 0.01, 0.5, late=0.004).exposed == pytest.approx(0.5 * 0.004)


LARGE = Size(7e9, 32, 4096, 2 * 32 * 1024 * 2)
SMALL = Size(0.5e9, 24, 896, 2 * 24 * 128 * 2)


def test_by_datasheets_a_second_device_hides_drafting() -> None:
    one = Machine(DEVICES["H100-SXM"])
    latency = latency_on(one, one, LARGE, SMALL, hit=1.0, branches=1, rendezvous=0.0)
    assert latency.late == latency.fresh
    assert latency.ahead == pytest.approx(latency.fresh * 6 / 5), "the window's last token, then a window"
    assert latency_on(one, one, LARGE, SMALL, hit=0.9).speedup > latency_on(one, one, LARGE, SMALL, hit=0.3).speedup
    slow = latency_on(one, Machine(DEVICES["L4"]), LARGE, SMALL, hit=0.5)
    assert slow.fresh == latency.fresh, "plain speculation has the first device"
    assert slow.late > slow.fresh


def test_the_size_that_pays_by_datasheets() -> None:
    one = Machine(DEVICES["H100-SXM"])
    size = size_that_pays(one, one, LARGE, SMALL, hit=0.5)
    assert size is not None

    def gain(parameters: float) -> float:
        target = Size(parameters, LARGE.layers, LARGE.width, LARGE.cache_bytes)
        return latency_on(one, one, target, SMALL, hit=0.5).speedup

    assert gain(size) > 1 > gain(0.7 * size)
    assert size_that_pays(one, one, LARGE, SMALL, hit=0.0) is None
