"""The warning about other processes that hold up rounds: when it comes, how often, and when it does not."""

from time import sleep

import pytest

from paceline.core.sampling import SamplingParams
from paceline.draft.cost import Prices
from paceline.engine.crowded import ROUNDS, TIMES, Crowded
from paceline.engine.engine import Engine
from paceline.target.decoder import Decoder
from paceline.target.threads import Threads
from tests import models, native

LEARNT, USUAL = 40, 0.01


class Machine:
    """Two clocks: of the time, and of the work of a process on two threads."""

    def __init__(self):
        self.time = self.work = 100.0
        self.crowded = Crowded(Threads(fixed=2, now=self.now), now=self.now, worked=lambda: self.work)

    def now(self):
        return self.time

    def run(self, rounds, times, cores):
        """Run rounds that take so many times as long as usual, on so many cores."""
        for _ in range(rounds):
            self.time += times * USUAL
            self.work += times * USUAL * cores
            self.crowded.note(1, 0, 20, times * USUAL)


@pytest.mark.parametrize(("rounds", "times", "cores", "warned"), [
    (ROUNDS, 1.2 * TIMES, 1.0, True), (3 * ROUNDS, 5 * TIMES, 1.5, True),
    (ROUNDS - 1, 1.2 * TIMES, 1.0, False),  # a moment
    (3 * ROUNDS, 0.8 * TIMES, 1.0, False),
    (3 * ROUNDS, 1.2 * TIMES, 2.0, False),  # all of the cores were ours: a longer text, say
])  # fmt: skip
def test_it_comes_once_where_rounds_are_held_up(rounds, times, cores, warned, caplog):
    machine = Machine()
    for _ in range(3):
        machine.run(LEARNT, 1.0, 2.0)
        machine.run(rounds, times, cores)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warned
    if warned:
        assert said[0].startswith(f"rounds take {times:.0f} times as long as on the quiet machine")
        assert f"gets {cores:.1f} of the 2 cores" in said[0]


@pytest.mark.parametrize("price", [-7 * USUAL, 0.0, 1e-4 * USUAL])
def test_a_shape_of_round_that_seems_to_cost_next_to_nothing_is_not_judged(price, caplog):
    machine = Machine()
    machine.crowded._prices = Prices({"fixed": USUAL, "node": (price - USUAL) / 8})
    for _ in range(3 * ROUNDS):
        machine.time += USUAL
        machine.work += USUAL
        machine.crowded.note(1, 8, 20, USUAL)
    assert not caplog.records


def test_an_engine_says_it(monkeypatch, caplog):
    verify, rounds = Decoder.verify, 0

    def held_up(*args, **options):
        nonlocal rounds
        rounds += 1
        sleep(0.002 if rounds < LEARNT else 0.1)
        return verify(*args, **options)

    monkeypatch.setattr(Decoder, "verify", held_up)
    engine = Engine(native.of(models.model("llama2", **native.TINY), eos=()))
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=LEARNT + 2 * ROUNDS))
    assert len([one for one in caplog.records if "other processes want them" in one.getMessage()]) == 1
