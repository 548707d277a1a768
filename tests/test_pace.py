"""Prompt tokens beside rows that are decoding: as many as the bound on a round's time allows, by measured times."""

from types import SimpleNamespace

import pytest

from paceline.core import clock
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.scheduler import LEAST, Pace, Ragged
from paceline.errors import PacelineError
from tests.fakes import TableTarget

USUAL = 0.05
"""Seconds of a round without prompt tokens."""


def rounds(pace, price, prompt=3000, beside=True):
    """Prompt tokens of each round until a prompt is read, on a machine where each costs `price` seconds more."""
    reading = SimpleNamespace(id=2, is_decoding=False, pending=range(prompt))
    decoding = [SimpleNamespace(id=1, is_decoding=True)] if beside else []
    schedule, counts = Ragged(4, 512, pace), list[int]()
    while reading.pending:
        counts.append(sum(turn.chunk for turn in schedule.select([*decoding, reading])))
        pace.note(counts[-1], USUAL + price * counts[-1])
        reading.pending = reading.pending[counts[-1] :]
    return counts


def paced(max_slowdown, price):
    """One that has seen a short prompt, and a row that decodes."""
    pace = Pace(max_slowdown)
    for tokens in (40, 0, 0, 0):
        pace.note(tokens, USUAL + price * tokens)
    return pace


@pytest.mark.parametrize(("price", "tokens"), [(1e-4, 512), (1e-3, 150), (2e-2, LEAST)])
def test_a_round_takes_at_most_the_bound_if_that_leaves_the_least(price, tokens):
    counts = rounds(paced(4.0, price), price)
    assert sum(counts) == 3000
    assert counts[:-1] == [pytest.approx(tokens, abs=1)] * (len(counts) - 1)


def test_without_a_bound_or_without_decoding_rows_the_chunk_is_whole():
    assert rounds(paced(None, 1e-3), 1e-3)[:-1] == [512] * 5
    assert rounds(paced(4.0, 1e-3), 1e-3, beside=False)[:-1] == [512] * 5


def test_it_follows_the_machine_and_one_slow_round_is_forgotten():
    pace = paced(4.0, 1e-3)
    assert rounds(pace, 3e-3)[20:40] == [pytest.approx(50, abs=2)] * 20
    pace.note(50, 10.0)
    assert rounds(pace, 3e-3)[0] == LEAST
    assert rounds(pace, 3e-3)[40:50] == [pytest.approx(50, abs=2)] * 10


class Timed(TableTarget):
    """A target whose forwards take USUAL, and a millisecond more for each token of a prompt."""

    now = 0.0

    def verify(self, segments, *more):
        self.pieces.append(sum(s.num_run for s in segments if s.is_prompt))
        self.now += USUAL + 1e-3 * self.pieces[-1]
        return super().verify(segments, *more)

    def __init__(self):
        super().__init__()
        self.pieces = []


@pytest.mark.parametrize(("max_slowdown", "piece"), [(None, 512), (4.0, 150), (2.0, 50)])
def test_the_engine_times_its_rounds(max_slowdown, piece, monkeypatch):
    target = Timed()
    monkeypatch.setattr(clock, "perf_counter", lambda: target.now)
    engine = Engine(target, max_slowdown=max_slowdown)
    short = engine.add([1, 2, 3], SamplingParams(max_tokens=1000))
    for _ in range(8):
        engine.step()
    long = engine.add([3] * 2000, SamplingParams(max_tokens=1))
    engine.finish([long])
    engine.abort(short)
    assert sum(target.pieces) == 2003
    assert all(tokens == pytest.approx(piece, abs=1) for tokens in target.pieces[8:-1])


def test_a_bound_that_is_no_number_is_refused():
    with pytest.raises(PacelineError, match="max_slowdown is nan"):
        Engine(TableTarget({}), max_slowdown=float("nan"))
