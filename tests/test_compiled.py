"""Compiling says in the log that it takes long."""

import logging
import math

import numba
import numpy as np
import pytest

from paceline import compiled


@pytest.fixture
def listener(monkeypatch, caplog):
    """The one that hears of what numba compiles, as at a start."""
    caplog.set_level(logging.INFO, compiled.log.name)
    for name, value in vars(compiled.Compiling()).items():
        monkeypatch.setattr(compiled.compiling, name, value)
    return compiled.compiling


def test_a_line_when_something_is_compiled_and_one_for_each_ten_seconds(listener, caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(compiled, "monotonic", lambda: now[0])
    numba.njit(lambda x: x + 1)(1)
    (first,) = (record.message for record in caplog.records)
    said = "usually 10 to 60 s (`paceline doctor --compile` does it for all commands)"
    assert first == f"compiling kernels that run here for the first time; they are kept; {said}"
    for seconds in (4, 7, 3, 7, 1):
        with listener, listener:  # functions that are compiled for others count once
            now[0] += seconds
    assert [record.message[-11:] for record in caplog.records[1:]] == ["11 s so far", "21 s so far"]


def test_what_is_compiled_already_is_no_line(listener, caplog):
    twice = numba.njit(lambda x: 2 * x)
    twice(1)
    caplog.clear()
    listener._said = -listener.EVERY
    assert twice(3) == 6
    assert not caplog.records


def test_powers_logarithms_and_angles_are_right_to_the_last_bits():
    rng = np.random.default_rng(0)
    of_x = {compiled.power: math.exp, compiled.logarithm: math.log}
    for ours, theirs in of_x.items():
        call = numba.njit(lambda x, f=ours: f(x))
        numbers = np.concatenate([rng.uniform(-30, 30, 500), rng.uniform(-690, 690, 500)])
        for x in np.exp(numbers) if ours is compiled.logarithm else numbers:
            assert call(x) == pytest.approx(theirs(x), rel=1e-15, abs=1e-15)
    power = numba.njit(lambda x: compiled.power(x))
    assert [power(x) for x in (0.0, -math.inf, -1e9, math.inf)] == [1, 0, 0, math.inf]
    assert math.isnan(power(math.nan))
    angles = np.concatenate([[0], rng.uniform(0, 10, 500), rng.uniform(0, 1e6, 500)]).astype(np.float32)[:, None]
    for ours, theirs in zip(compiled.cosines_and_sines(angles), (np.cos, np.sin), strict=True):
        assert np.abs(ours - theirs(angles.astype(np.float64))).max() < 6e-8
