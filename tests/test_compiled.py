"""Compiling says in the log that it takes long."""

import logging

import numba
import pytest

from paceline import compiled


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> compiled.Compiling:
    """The one that hears of what numba compiles, as at a start."""
    caplog.set_level(logging.INFO, compiled.log.name)
    for name, value in vars(compiled.Compiling()).items():
        monkeypatch.setattr(compiled.compiling, name, value)
    return compiled.compiling


def test_a_line_when_something_is_compiled_and_one_for_each_ten_seconds(
    listener: compiled.Compiling, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(compiled, "monotonic", lambda: now[0])
    numba.njit(lambda x: x + 1)(1)
    (first,) = (record.message for record in caplog.records)
    assert first == "compiling for this processor what has not run here yet; it is kept; up to half a minute"
    for seconds in (4, 7, 3, 7, 1):
        with listener, listener:  # functions that are compiled for others count once
            now[0] += seconds
    assert [record.message[-11:] for record in caplog.records[1:]] == ["11 s so far", "21 s so far"]


def test_what_is_compiled_already_is_no_line(listener: compiled.Compiling, caplog: pytest.LogCaptureFixture) -> None:
    twice = numba.njit(lambda x: 2 * x)
    twice(1)
    caplog.clear()
    listener._said = -listener.EVERY
    assert twice(3) == 6
    assert not caplog.records
