"""What our loggers warn of: once each in a command, once a minute of a kind in a server, with what was left out."""

import logging

import pytest

from paceline.cli import warned


@pytest.fixture
def log(monkeypatch):
    made, handler = logging.getLogger("paceline.a_test"), warned.Warned()
    monkeypatch.setattr(made, "propagate", False)
    made.addHandler(handler)
    yield made
    made.removeHandler(handler)


def fail(log, error, times=1):
    for _ in range(times):
        try:
            raise ValueError(error)
        except ValueError:
            log.exception("a round failed")


def test_a_command_shows_each_warning_once_and_leaves_errors_to_itself(log, capsys):
    for name in ("a", "b", "a\n\x1b[31m", "a"):
        log.warning("%s is damaged", name)
        log.error("request %s ended with an error", name)
        log.info("nothing")
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {name} is damaged" for name in ("a", "b", "a ?[31m")
    ]  # fmt: skip
    fail(log, "first", times=2)
    shown = capsys.readouterr().err
    assert (shown.count("error: a round failed\nTraceback"), shown.count("ValueError: first")) == (1, 1)


def test_a_server_shows_a_kind_once_a_minute(log, monkeypatch, capsys):
    now, lines = 0.0, list[str]()
    monkeypatch.setattr(warned, "monotonic", lambda: now)
    (handler,) = (one for one in log.handlers if isinstance(one, warned.Warned))
    with handler.serving(lines.append):
        for now in range(0, 130, 10):
            log.error("request %d ended with an error: %s", now, "bad")
        log.warning("%s is damaged", "a")
        fail(log, "first", times=3)
        assert lines[:3] == [
            "error: request 0 ended with an error: bad", "error: request 60 ended with an error: bad (5 more like it)",
            "error: request 120 ended with an error: bad (5 more like it)",
        ]
        assert lines[3] == "warning: a is damaged"
        assert lines[4].startswith("error: a round failed\nTraceback")
        assert len(lines) == 5
    assert (lines[5:], capsys.readouterr().err) == (["error: a round failed (1 more like it)"], "")
