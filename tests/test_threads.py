"""Threads: rounds get fewer of them while a process wants the cores, and all of them again afterwards."""

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.target import threads
from paceline.target.load import load
from paceline.target.threads import REST, TRIAL, WINDOW, Threads
from tests.fakes import TableTarget

ALL = 4


@pytest.fixture(autouse=True)
def _all():
    before = torch.get_num_threads()
    torch.set_num_threads(ALL)
    yield
    torch.set_num_threads(before)


class Machine:
    """A clock, on which rounds take as long as a machine says.

    alone, busy  milliseconds of a round by its number of threads, without a neighbour and with one."""

    alone = {1: 4.0, 2: 2.5, 4: 2.0}
    busy = {1: 4.0, 2: 3.0, 4: 200.0}

    def __init__(self, most_alone=True, free=(ALL, ALL)):
        self.now = self.worked = 0.0
        self.is_alone = most_alone
        self.threads = Threads(now=lambda: self.now, worked=lambda: self.worked, free=iter(free).__next__)
        self.ran = []

    def rounds(self, count, keep=None):
        """Seconds of so many rounds."""
        began = self.now
        for _ in range(count):
            on = self.threads.begin(keep)
            assert torch.get_num_threads() == on
            seconds = (self.alone if self.is_alone else self.busy)[on] / 1e3
            self.now += seconds
            self.worked += seconds * (on if self.is_alone or on == 1 else on - 0.5)
            self.threads.end("plain")
            assert torch.get_num_threads() == ALL
            self.ran.append(on)
        return self.now - began


def test_a_first_round_that_is_slow_takes_no_threads_away():
    """It loads code, on one thread: beside it, rounds on fewer threads would look fast."""
    machine = Machine()
    machine.threads.begin()
    machine.now, machine.worked = 1.0, 1.1
    machine.threads.end("plain")
    machine.rounds(1000)
    assert set(machine.ran) == {ALL}


@pytest.mark.parametrize(("free", "begins"), [((1, 0), 2), ((0, ALL), ALL), ((ALL, 0), ALL), ((None, None), ALL)])
def test_half_as_many_threads_begin_beside_others_that_stay(free, begins):
    machine = Machine(most_alone=False, free=free)
    machine.rounds(1)
    assert machine.ran == [begins]


def test_threads_that_began_few_are_all_back_on_a_quiet_machine():
    machine = Machine(free=(0, 0))
    machine.rounds(20 * WINDOW)
    assert machine.ran[-1] == ALL


@pytest.mark.parametrize(("line", "free"), [("0.1 0.2 0.3 1/99 7", 4), ("9 9 9 4/99 7", 1), ("what?", None)])
def test_cores_that_are_free_are_counted(line, free, monkeypatch):
    """Beside the process that counts them."""
    monkeypatch.setattr(threads.Path, "read_text", lambda path: line)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 4)
    assert threads.free_cores() == free


def test_a_quiet_machine_is_left_alone():
    machine = Machine()
    machine.rounds(1000)
    assert set(machine.ran) == {ALL}


def test_a_neighbour_costs_a_few_rounds_and_no_more():
    machine = Machine(most_alone=False)
    machine.rounds(WINDOW + 4 * TRIAL)
    assert machine.threads.number == 2
    # What trials of all threads cost, a hundred times as slow as they are now.
    assert machine.rounds(20_000) <= 20_000 * machine.busy[2] / 1e3 * (1 + 2 / REST)


def test_when_the_neighbour_is_gone_all_threads_are_back():
    machine = Machine(most_alone=False)
    machine.rounds(200)
    machine.is_alone = True
    machine.rounds(20_000)
    assert machine.threads.number == ALL
    assert machine.ran[-100:] == [ALL] * 100


def test_fewer_threads_that_are_no_faster_are_not_kept():
    machine = Machine(most_alone=False)
    machine.busy = {1: 9.0, 2: 9.0, 4: 5.0}
    seconds = machine.rounds(5000)
    assert machine.threads.number == ALL
    assert seconds <= 5000 * 5e-3 * (1 + 2 / REST)


def test_answers_that_keep_the_number_of_a_failed_trial_cost_no_more_than_trials():
    machine = Machine(most_alone=False)
    machine.busy = {1: 9.0, 2: 9.0, 4: 5.0}
    seconds = 0.0
    for _ in range(200):
        seconds += machine.rounds(1)
        seconds += machine.rounds(99, keep=machine.ran[-1])
    assert 2 in machine.ran
    assert seconds <= 20_000 * 5e-3 * (1 + 3 / REST)


def test_a_row_under_way_keeps_its_number():
    machine = Machine(most_alone=False)
    machine.rounds(100, keep=ALL)
    assert set(machine.ran) == {ALL}
    machine.rounds(100)
    assert machine.ran[-1] == 2


def test_rounds_of_other_kinds_are_not_compared():
    """Short rounds of a trial are no reason for its number if the rounds before it were long ones."""
    machine = Machine(most_alone=False)
    for kind in ["short"] * 4 + ["long"] * 12 + ["short"] * 16:
        machine.threads.begin()
        machine.now += {"short": 0.001, "long": 0.1}[kind]
        machine.threads.end(kind)
    assert machine.threads.number == ALL


def test_what_the_caller_sets_counts():
    machine = Machine(most_alone=False)
    machine.rounds(100)
    torch.set_num_threads(1)
    assert machine.threads.begin() == 1
    machine.threads.end("plain")
    assert Threads(fixed=3).begin() == 3


class Spy(Threads):
    def __init__(self):
        super().__init__()
        self.kept = []
        self.kinds = []

    def begin(self, keep=None):
        self.kept.append(keep)
        return super().begin(keep)

    def end(self, kind):
        self.kinds.append(kind)
        super().end(kind)


@pytest.mark.parametrize("same", [True, False])
def test_threads_change_within_an_answer_only_where_that_changes_no_bit(same):
    target = TableTarget()
    target.same_on_any_threads = same
    engine = Engine(target, "none")
    engine.threads = spy = Spy()
    engine.generate([[1, 2]], SamplingParams(max_tokens=6))
    assert spy.kept == [None] * 6 if same else [None, *[ALL] * 5]
    assert spy.kinds == [None, *[("none", 1, 1)] * 5], "a round with a prompt in it is like no other"


def test_engines_of_a_target_share_what_was_learnt_but_for_one_with_a_number_of_its_own():
    target = TableTarget()
    one, other, own = Engine(target, "none"), Engine(target, "sam"), Engine(target, threads=2)
    assert one.threads is other.threads is target.threads
    assert (own.threads.fixed, target.threads.fixed) == (2, None)


def test_a_target_runs_on_other_threads_for_a_while_or_for_good(demo):
    target = load(demo, threads=2)
    learnt = target.threads
    assert learnt.fixed == 2
    with learnt.at(1):
        assert learnt.begin() == 1
        learnt.end(None)
    assert learnt.fixed == 2
    with learnt.at(1):
        learnt.fix(3)
    assert target.threads.fixed == 3, "a number that was fixed meanwhile stays"
    learnt.fix(None)
    assert (learnt.fixed, learnt.number) == (None, ALL)


def test_the_demo_model_says_the_same_bit_for_bit_on_any_number_of_threads(demo):
    import numpy as np

    from paceline.core.segment import Segment

    target = load(demo)
    if not target.same_on_any_threads:
        pytest.skip("products are not our own on this CPU")
    logits = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        slot = target.add_row(400)
        for tokens in (range(300), range(1), range(5), range(33)):
            segment = Segment.chunk(slot, np.array(tokens) + 100, last=True)
            segment.num_logits = len(tokens)
            logits.append(target.verify([segment]).of(0).clone())
            target.commit(slot, range(len(tokens)))
        target.drop_row(slot)
    assert all(torch.equal(logits[i], logits[i % 4]) for i in range(len(logits)))
