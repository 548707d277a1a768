"""Calibration from the outside: a contestant whose rounds take a known time, and what of it is found out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from paceline.bench.calibrate_peer import PeerCalibrator, PeerSweep
from paceline.bench.contestant import Ask, Contestant
from paceline.bench.record import Answer, Turn
from paceline.cost.calibration import Calibration
from paceline.cost.predict import predict_run

DRAFTED = 4


def calibrate_peer(
    contestant: Contestant, vocab_size: int, max_context: int, *, rounds: int = 5, **more: Any
) -> Calibration | None:
    """At once, one sweep to warm up; None if the contestant does not tell its rounds."""
    calibrator = PeerCalibrator(contestant, vocab_size, max_context, **more)
    told = all(calibrator.sweep() for _ in range(rounds + 1))
    return calibrator.result() if told else None


class Engine(Contestant):
    """A prompt of n tokens takes 2 + 0.1 n ms; a round over n tokens 5 + 0.1 n, 2 us a token of context, and 1.5 ms
    more if it drafts, which is where the prompt repeats itself, or always. each: ms of a drafted token; it then drafts
    one token fewer in every other round."""

    def __init__(self, copies: bool = True, always: bool = False, tells: bool = True, each: float = 0.0):
        super().__init__("peer:x")
        self.copies, self.always, self.tells, self.each = copies, always, tells, each
        self.learnt: list[int] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        before, self.learnt = self.learnt, []
        yield
        self.learnt = before

    def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Turn]:
        [prompt] = prompts
        self.learnt.append(len(prompt))
        drafts = self.always or (self.copies and list(prompt[16:32]) == list(prompt[:16]) and len(prompt) >= 32)
        nodes, now = [0], 2 + 0.1 * len(prompt)
        times = [now]
        for turn in range(ask.max_tokens - 1):
            nodes.append(DRAFTED - (turn % 2 if self.each else 0) if drafts else 0)
            now += 5 + 0.1 * (nodes[-1] + 1) + 0.002 * (len(prompt) - 200) + 1.5 * drafts + self.each * nodes[-1]
            times.append(now)
        seconds = [t / 1000 for t in times]
        told = nodes if self.tells else None
        return [Turn(len(prompt), [1] * len(nodes), "", seconds[-1], [1] * len(nodes), seconds, told, told)]


class Slow(Engine):
    """On a machine that is half as fast, or as many times slower as `times` says."""

    times = 2.0

    def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Turn]:
        turns, by = super().answer(prompts, ask), self.times
        return [replace(t, seconds=by * t.seconds, times=[by * s for s in t.times or []]) for t in turns]


def test_rounds_and_drafting_are_told_apart() -> None:
    engine = Engine()
    found = calibrate_peer(engine, 100, 2000, context=200, rounds=2)
    assert found is not None
    assert [found.round_ms(n) for n in (1, 5, 96)] == pytest.approx([5.1, 5.5, 14.6])
    assert found.drafting_ms == pytest.approx(1.5)
    assert found.round_ms(1, context=800) == pytest.approx(5.1 + 1.2)
    assert found.prompt_ms_per_token == pytest.approx(0.1)
    assert engine.learnt == []


def test_one_that_always_drafts_and_one_that_never_does() -> None:
    always, never = (calibrate_peer(e, 100, 2000, context=200) for e in (Engine(always=True), Engine(copies=False)))
    assert always is not None
    assert never is not None
    assert (always.round_ms(DRAFTED + 1), always.drafting_ms) == pytest.approx((5.5 + 1.5, 0))
    assert (never.round_ms(1), never.drafting_ms) == pytest.approx((5.1, 0))


def test_drafted_tokens_have_a_price_of_their_own() -> None:
    some, always = (calibrate_peer(Engine(always=a, each=2.0), 100, 2000, context=200) for a in (False, True))
    assert some is not None
    assert (some.round_ms(1), some.drafting_ms, some.drafted_ms) == pytest.approx((5.1, 1.5, 2.0))
    assert always is not None
    assert (always.round_ms(1), always.drafting_ms, always.drafted_ms) == pytest.approx((5.1 + 1.5, 0, 2.0))


def test_drafts_so_dear_that_a_round_without_them_would_take_less_than_nothing() -> None:
    """Four drafted tokens take so much longer than three that the line through both is below 0 at none."""

    class Steep(Engine):
        def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Turn]:
            [turn] = super().answer(prompts, ask)
            [first, *_], nodes = turn.times or [0.0], turn.nodes or []
            rounds = np.where(np.array(nodes[1:]) == DRAFTED, 0.080, 0.040)
            times = [first, *(first + np.cumsum(rounds)).tolist()]
            return [replace(turn, seconds=times[-1], times=times)]

    found = calibrate_peer(Steep(always=True, each=2.0), 100, 2000, context=200)
    assert found is not None
    assert found.round_ms(1) == 0
    rounds = [found.round_ms(n + 1) + n * found.drafted_ms for n in (DRAFTED - 1, DRAFTED)]
    assert rounds == pytest.approx([40, 80], rel=0.4)
    assert sum(rounds) == pytest.approx(120, rel=0.1)


def test_of_a_slow_model_shorter_answers_say_the_same() -> None:
    asked = []

    class Watched(Engine):
        def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Turn]:
            asked.append(ask.max_tokens)
            return super().answer(prompts, ask)

    found = calibrate_peer(Watched(), 100, 2000, context=200, rounds=2, tokens=8)
    assert found is not None
    assert set(asked) == {1, 9}  # short prompts, long answers
    assert [found.round_ms(n) for n in (1, 5, 96)] == pytest.approx([5.1, 5.5, 14.6], rel=0.02)


def test_sweeps_are_kept_as_text_and_the_first_does_not_count() -> None:
    peer = Slow()
    calibrator = PeerCalibrator(peer, 100, 2000, context=200)
    for peer.times in (9.0, 1.0, 2.0, 2.0, 1.0):
        peer.learnt = [1, 2]
        assert calibrator.sweep()
        assert peer.learnt == [1, 2]
    again = PeerCalibrator(peer, 100, 2000, context=200)
    again.sweeps = [PeerSweep(**json.loads(json.dumps(asdict(sweep)))) for sweep in calibrator.sweeps]
    assert again.result() == calibrator.result()
    assert [again.result().round_ms(n) for n in (1, 5, 96)] == pytest.approx([1.5 * ms for ms in (5.1, 5.5, 14.6)])


def test_a_first_drafted_token_may_be_cheaper_than_the_others() -> None:
    """Rounds of 10, 11, 21 and 31 ms over 0 to 3 drafted tokens: the table and the prediction are right for all."""

    class Cheap(Engine):
        def answer(self, prompts: Sequence[Sequence[int]], ask: Ask) -> list[Turn]:
            [turn] = super().answer(prompts, ask)
            drafted = [0, *(i % 4 for i in range(ask.max_tokens - 1))]
            rounds = [0.010 if not n else 0.001 + 0.010 * n for n in drafted]
            times = np.cumsum(rounds).tolist()
            return [replace(turn, seconds=times[-1], times=times, nodes=drafted, depths=drafted)]

    peer = Cheap()
    found = calibrate_peer(peer, 100, 2000, sizes=(1,), context=200)
    assert found is not None
    assert (found.round_ms(1), found.drafting_ms, found.drafted_ms) == pytest.approx((10, -9, 10))
    [plain] = Engine(copies=False).answer([[*range(200)]], Ask(max_tokens=21))
    ours = calibrate_peer(Engine(copies=False), 100, 2000, context=200)
    assert ours is not None
    answer = Answer("none", 0, "q", "qa", "qa", 0, [plain])
    others = replace(answer, method="peer:x", turns=peer.answer([[*range(200)]], Ask(max_tokens=21)))
    predicted = predict_run([answer, others], {"paceline": ours, "peer:x": found})
    assert predicted["peer:x", "overall"] == pytest.approx(answer.seconds / others.seconds, rel=0.01)


def test_one_that_does_not_tell_its_rounds() -> None:
    assert calibrate_peer(Engine(tells=False), 100, 2000) is None


def test_a_small_context() -> None:
    found = calibrate_peer(Engine(), 100, 128)
    assert found is not None
    assert found.nodes[-1] == 32


@pytest.mark.parametrize("each", [0.0, 2.0])
def test_a_peer_is_predicted_by_its_own_calibration(each: float) -> None:
    engine = Engine(each=each)
    table = calibrate_peer(engine, 100, 2000, context=200)
    assert table is not None
    answer = Answer("none", 0, "q", "qa", "qa", 0, engine.answer([[*range(200)]], Ask(max_tokens=21)))
    [turn] = engine.answer([[*range(16)] * 13], Ask(max_tokens=21))
    assert turn.nodes is not None
    assert sum(turn.nodes) == 20 * DRAFTED - (10 if each else 0)
    peer = replace(answer, method="peer:x", turns=[replace(turn, tokens=[1] * 61, lengths=[1] + [3] * 20)])
    calibrations = {"paceline": replace(table, drafting_ms=0.0, drafted_ms=0.0), "peer:x": table}
    predicted = predict_run([answer, peer], calibrations)
    measured = (61 / peer.seconds) / (21 / answer.seconds)
    assert predicted["peer:x", "overall"] == pytest.approx(measured, rel=0.01)  # its context grows meanwhile
