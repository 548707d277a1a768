"""Whole sessions on servers: what is asked, in which order, what is written down, and what is computed of it."""

import json
from itertools import pairwise
from time import perf_counter

import pytest
from tests.served import Served

from paceline.bench.options import check_pause
from paceline.bench.sessions import Sessions, measure, page, read_sessions, summarize
from paceline.errors import PacelineError
from paceline.logs.conversations import Reading
from paceline.runs.progress import Progress

CALL = {"type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
SAID = [
    {"role": "system", "content": "You mend programs."}, {"role": "user", "content": "Rename f."},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "def f()"},
    {"role": "tool", "content": "def g()"}, {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Hm."},
    {"role": "assistant", "content": "What is it?"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "sessions.jsonl"
    records = [{"id": "a", "messages": SAID, "tools": TOOLS}, {"id": "b", "messages": SAID[:6]}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_turns_are_asked_with_the_recorded_messages_before_them(log):
    first, second = read_sessions(Sessions(log, max_tokens=7), Reading())
    assert (first.name, second.name) == ("a", "b")
    assert [len(body["messages"]) for body in first.turns] == [2, 5, 7]
    assert [len(body["messages"]) for body in second.turns] == [2, 5]
    body = first.turns[1]
    assert (body["max_tokens"], body["temperature"], body["stream"], body["tools"]) == (7, 0.0, True, TOOLS)
    assert "tools" not in second.turns[0]
    calls = body["messages"][2]["tool_calls"]
    assert [message["tool_call_id"] for message in body["messages"][3:]] == [call["id"] for call in calls]
    assert len({call["id"] for call in calls}) == 2
    assert body["messages"][2]["content"] == ""


def test_servers_take_turns_and_sessions_are_asked_side_by_side(log, tmp_path):
    told = {"timings": {"cache_n": 4, "draft_n": 9, "draft_n_accepted": 3}}
    with Served(told=told) as one, Served() as other:
        asked = Sessions(log, urls={"one": one.url, "other": other.url}, max_tokens=6, out=tmp_path / "run")
        outcome = measure(asked)
        assert outcome.complete
        assert [len(body["messages"]) for body in one.asked] == [2, 5, 7, 2, 5]
        assert one.when[2] < other.when[0] < other.when[2] < other.when[3] < one.when[3], "the second begins with b"
        assert one.most_running == 1
        mine, theirs = outcome.results
        assert (mine["turns"], mine["failed"], mine["new"], mine["reused"]) == (5, 0, 30, 20)
        assert mine["reused_of_before"] == pytest.approx(4 / 5)
        assert mine["tokens_a_round"] == pytest.approx(2.0), "six tokens, three of them drafted"
        assert (theirs["reused"], theirs["reused_of_before"], theirs["tokens_a_round"]) == (None, None, None)
        assert (mine["over"], theirs["over"]) == (1.0, pytest.approx(theirs["waiting"] / mine["waiting"], abs=0.01))
        assert sum(mine["sessions"].values()) == pytest.approx(mine["waiting"], abs=0.01)
        again = measure(asked)
        assert again.results == outcome.results
        assert len(one.asked) == 5, "a run that is over asks nothing"
        both = measure(Sessions(log, urls={"one": one.url}, batch=2, max_tokens=60, out=tmp_path / "both"))
        assert (both.results[0]["turns"], one.most_running) == (5, 2)
    text = page(tmp_path / "run")
    assert all(word in text for word in ("one", "other", "<svg"))


def test_a_run_that_was_stopped_goes_on(log, tmp_path):
    with Served() as server:
        asked = Sessions(log, urls={"one": server.url}, max_tokens=3, out=tmp_path / "run")
        first = measure(asked, Progress(stopped=lambda: len(server.asked) >= 2))
        assert not first.complete
        assert first.results[0]["turns"] == 2
        assert measure(asked).complete
        assert [len(body["messages"]) for body in server.asked] == [2, 5, 2, 5, 7, 2, 5], "a session is asked whole"
        with pytest.raises(PacelineError, match="holds another run"):
            measure(Sessions(log, urls={"one": server.url}, max_tokens=4, out=tmp_path / "run"))


def test_a_turn_under_way_is_given_up(log, tmp_path):
    """Ctrl-C need not wait for an answer of minutes, and the turn is asked again."""
    with Served(seconds=lambda running: 0.05) as server:
        asked = Sessions(log, urls={"one": server.url}, max_tokens=200, out=tmp_path / "run")
        began = perf_counter()
        assert not measure(asked, Progress(stopped=lambda: bool(server.asked))).complete
        assert perf_counter() - began < 5
    assert not (tmp_path / "run" / "turns.jsonl").read_text()


def test_a_turn_that_fails_is_counted_and_compared_with_nothing(log, tmp_path):
    said = []
    with Served(fails=lambda number: number == 2) as server, Served() as other:
        urls = {"one": server.url, "other": other.url}
        outcome = measure(Sessions(log, urls=urls, max_tokens=3, out=tmp_path / "r"), Progress(note=said.append))
    mine, theirs = outcome.results
    assert (mine["failed"], mine["turns"], theirs["failed"], theirs["turns"]) == (1, 4, 0, 4)
    assert len(said) == 1
    assert "one: a, turn 2 failed" in said[0]


def test_keys_go_to_their_own_server(log, tmp_path):
    with Served() as one, Served() as other:
        urls = {"1": one.url, "2": other.url}
        measure(Sessions(log, urls=urls, keys={"1": "secret"}, out=tmp_path / "r", max_tokens=2))
        assert [headers.get("Authorization") for headers in one.headers][-1] == "Bearer secret"
        assert not any("secret" in str(headers) for headers in other.headers)


def test_a_server_that_is_begun_stands_still_while_another_is_asked(log, tmp_path, monkeypatch):
    paused = []

    class Begun:
        key = None

        def __init__(self, command):
            self.name, self.server = command, Served()

        def __enter__(self):
            self.url = self.server.__enter__().url
            return self

        def __exit__(self, *left):
            self.server.__exit__(*left)

        def pause(self, on):
            paused.append((self.name, on))

    monkeypatch.setattr("paceline.bench.sessions.Started", Begun)
    asked = Sessions(log, commands={"one": "first", "two": "second"}, max_tokens=2, out=tmp_path / "run")
    assert measure(asked).complete
    assert paused[:2] == [("first", True), ("second", True)]
    assert paused[2:] == [(name, on) for name in ("first", "second", "second", "first") for on in (False, True)]


def test_nothing_to_ask_or_nobody(tmp_path, log):
    with pytest.raises(PacelineError, match="no server is named"):
        measure(Sessions(log, out=tmp_path / "run"))
    assert summarize([], ["one"])[0]["turns"] == 0


def test_pauses_are_those_of_the_log(log, tmp_path):
    """From an answer to what the next answer was asked with, not to the next answer; at most a minute."""
    times = [1000, 1001, 1010, 1012, 1015.5, 1020, 2000, 2003]
    timed = tmp_path / "timed.jsonl"
    said = [one | {"timestamp": 1.7e9 + at} for one, at in zip(SAID, times, strict=True)]
    timed.write_text(json.dumps({"id": "a", "messages": said}) + "\n")
    (session,) = read_sessions(Sessions(timed, pause="log"), Reading())
    assert session.pauses == [0.0, 5.5, 60.0]
    began = perf_counter()
    with Served() as server:
        measure(Sessions(log, urls={"one": server.url}, max_tokens=2, pause="0.3", limit=1, out=tmp_path / "run"))
        assert min(b - a for a, b in pairwise(server.when)) >= 0.3
        asked = Sessions(log, urls={"one": server.url}, max_tokens=2, pause="1000", out=tmp_path / "long")
        assert not measure(asked, Progress(stopped=lambda: len(server.asked) >= 4)).complete
    assert perf_counter() - began < 60, "Ctrl-C does not wait for a pause to end"
    with pytest.raises(PacelineError, match="has no times of its messages"):
        read_sessions(Sessions(log, pause="log"), Reading())
    for wrong in ("-1", "nan", "soon"):
        with pytest.raises(PacelineError, match=f"--pause is '{wrong}'"):
            check_pause(wrong)
