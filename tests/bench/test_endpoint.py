"""Running servers under load: two in turn, arrival times, failures, stopping and going on, figures and page."""

import json
from dataclasses import replace
from http.client import HTTPConnection
from statistics import median
from time import perf_counter, sleep

import pytest
from tests.bench.turns import reply
from tests.served import Served
from tests.web import Handler, serving

from paceline.bench.endpoint import bench_endpoints, windows, workload
from paceline.bench.metrics import accepted_by_position, goodput, summarize, token_seconds
from paceline.bench.options import Benchmark, Load, Options
from paceline.bench.page import page
from paceline.bench.record import Answer
from paceline.bench.report import markdown, read_run
from paceline.cli import main
from paceline.errors import PacelineError
from paceline.logs.conversations import Reading
from paceline.net.servers import Request, Server
from paceline.runs.progress import Progress

QUICK = Options(max_tokens=8, warm_up=0)


@pytest.fixture
def log(tmp_path):
    lines = [{"prompt": f"question {n}", "time": 100 + 0.05 * n} for n in range(40)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "log.jsonl"


def test_two_servers_in_turn(log, tmp_path):
    with Served(seconds=lambda n: 0.03) as slow, Served(seconds=lambda n: 0.03, accepted=(3, 1)) as fast:
        load = Load(f"{slow.url},{fast.url}", concurrency=2, token_ms=23.0)
        asked = Benchmark(suite=str(log), limit=20, load=load, options=QUICK, out=tmp_path / "run")
        outcome = bench_endpoints(asked)
        assert (slow.most_running, fast.most_running) == (2, 2)
        assert len(slow.asked) == len(fast.asked) == 20
        again = bench_endpoints(asked)
        assert len(slow.asked) == 20  # a whole run asks nothing
    assert outcome.complete
    assert again.complete
    assert again.results[1]["tokens_per_second"] == pytest.approx(outcome.results[1]["tokens_per_second"], rel=1e-4)
    first, second = [one for one in outcome.results if one["category"] == "overall"]
    assert first["speedup"] == 1
    assert 1.2 < second["speedup"] < 4  # 8 tokens in 8 rounds, and in 4
    assert second["speedup_low"] is None or second["speedup_low"] > 1  # few windows make no interval
    assert (second["identical"], second["errors"], first["goodput"]) == (1, 0, 0)
    assert second["goodput"] > 0.5
    assert first["draft_tokens_accepted"] is None
    assert second["draft_tokens_accepted"] == pytest.approx(4 / 3, abs=0.01)  # 3, 1 and, at the end, 0
    assert second["accepted_by_position"] == pytest.approx([2 / 3, 1 / 3, 1 / 3], abs=0.01)
    assert "times the tokens a second" in outcome.notes[0]
    run = read_run(tmp_path / "run")
    assert [one.kind for one in run.servers] == ["ours", "plain"]
    text = page(run)
    assert "Under load" in text
    assert "plain decoding" not in text.partition("<main>")[0]
    assert "tokens/s" in markdown(run)


def test_two_processes_send_the_same_requests(log, tmp_path):
    asked, texts = [], []
    for processes in (1, 2):
        with Served(seconds=lambda n: 0.01, words=[f"{n} " for n in range(8)]) as fake:
            load = Load(fake.url, concurrency=3, processes=processes)
            benchmark = Benchmark(suite=str(log), limit=20, load=load, options=QUICK, out=tmp_path / str(processes))
            [overall, *_] = bench_endpoints(benchmark).results
            asked.append(sorted(json.dumps(body, sort_keys=True) for body in fake.asked))
            texts.append([overall[name] for name in ("answers", "new_tokens", "errors")])
            assert fake.most_running == 3
    assert asked[0] == asked[1]
    assert texts[0] == texts[1] == [20, 160, 0]


FIRST, GAP = 0.15, 0.02


class Timed(Handler):
    """A first token after FIRST seconds, and one each GAP."""

    wbufsize = 0

    def do_POST(self):
        self.body()
        self.begin(Content_Type="text/event-stream", Connection="close")
        self.close_connection = True
        for n in range(5):
            sleep(GAP if n else FIRST)
            said = {"index": 0, "delta": {"content": "a "}, "finish_reason": "length" if n == 4 else None}
            self.wfile.write(f"data: {json.dumps({'choices': [said]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


def test_first_tokens_come_when_a_minimal_client_sees_them():
    """A few lines over a socket, on the same server in turn; thrice, for whoever else has the processor."""
    def seen(host):
        began, connection = perf_counter(), HTTPConnection(host)
        connection.request("POST", "/v1/chat/completions", b"{}")
        connection.getresponse().readline()
        return perf_counter() - began

    with serving(Timed) as url:
        server, apart = Server(url, "timed"), 1.0
        body = server.body(Request("0", [{"role": "user", "content": "go"}]), 5)
        for _ in range(3):
            pairs = [(server.send([body])[0].times[0], seen(server.name)) for _ in range(5)]
            ours, theirs = (median(times) for times in zip(*pairs, strict=True))
            if (apart := min(apart, abs(ours / theirs - 1))) < 0.1:
                break
        assert theirs >= FIRST
        assert apart < 0.1


def test_requests_keep_the_logs_times(log, tmp_path):
    with Served(seconds=lambda n: 0.002) as fake:
        load = Load(fake.url, arrivals=1.0)
        asked = Benchmark(suite=str(log), limit=20, load=load, options=QUICK, out=tmp_path / "run")
        bench_endpoints(asked)
        assert fake.when[-1] - fake.when[0] > 19 * 0.05 - 0.4
    (tmp_path / "timeless.jsonl").write_text('{"prompt": "when?"}\n')
    with pytest.raises(PacelineError, match="does not say when"):
        workload(Benchmark(suite=str(tmp_path / "timeless.jsonl"), load=Load(arrivals=1.0)), Reading())


def test_requests_that_fail_are_counted(log, tmp_path):
    with Served(fails=lambda number: number % 4 == 0) as fake:
        load = Load(fake.url, concurrency=4, first_ms=1000)
        outcome = bench_endpoints(Benchmark(suite=str(log), load=load, options=QUICK, out=tmp_path / "run"))
    [overall] = [one for one in outcome.results if one["category"] == "overall"]
    assert (overall["errors"], overall["goodput"]) == (10, 0.75)
    with Served(fails=lambda number: True) as fake:
        load = Load(fake.url)
        outcome = bench_endpoints(Benchmark(suite=str(log), load=load, options=QUICK, out=tmp_path / "none"))
    assert "500" in outcome.results[0]["failed"]


def test_a_window_that_was_stopped_is_asked_again(log, tmp_path):
    with Served(seconds=lambda n: 0.005) as fake:
        asked = Benchmark(suite=str(log), load=Load(fake.url, concurrency=2), options=QUICK, out=tmp_path / "run")
        stopped = bench_endpoints(asked, Progress(stopped=lambda: len(fake.asked) > 20))
        assert not stopped.complete
        assert stopped.results[0]["answers"] == 16
        whole = bench_endpoints(asked)
        assert whole.complete
        assert whole.results[0]["answers"] == 40
        with pytest.raises(PacelineError, match="another run"):
            bench_endpoints(replace(asked, load=Load(fake.url, concurrency=3)))


TIMINGS = {"draft_n": 5, "draft_n_accepted": 3}
SPECULATION = {"num_spec_steps": 2, "num_draft_tokens": 5, "num_accepted_draft_tokens": 3,
               "acceptance_histogram": [0, 1, 1], "by_drafter": {"sam": {"drafted": 5, "accepted": 3}}}  # fmt: skip


@pytest.mark.parametrize(("told", "drafter", "rounds", "by"), [
    ({}, "", 2, {}), ({}, "sam", 2, {"sam": (6, 4)}),  # by its counters: 3 and, at the end, 1
    ({"timings": TIMINGS}, "", 4, {}), ({"metrics": {"speculative_decoding": SPECULATION}}, "", 2, {"sam": (5, 3)}),
], ids=["counters", "counters by drafter", "llama.cpp", "ours"])
def test_what_is_said_of_drafts_is_counted(log, tmp_path, capsys, told, drafter, rounds, by):
    """By the answers themselves, else by the counters; in JSON, and in words."""
    with Served(accepted=(3, 1), told=told, drafter=drafter) as fake:
        asked = ["bench", "server", fake.url, "--log", str(log), "--limit", "4", "-n", "7", "--warm-up", "0"]
        assert main([*asked, "--out", str(tmp_path / "run")]) == 0
    name = fake.url.split("/")[2]
    drafted, accepted = next(iter(by.values()), (5, 3) if told else (6, 4))
    own = {who: {"drafted": 4 * of[0], "accepted": 4 * of[1]} for who, of in by.items()}
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    [overall] = [one for one in summary["results"] if one["category"] == "overall"]
    assert overall["server_drafts"] == {
        "rounds": 4 * rounds, "drafted": 4 * drafted, "accepted": 4 * accepted, "by_drafter": own
    }
    line = f"{name}: {4 * accepted} of {4 * drafted} drafted tokens accepted in {4 * rounds} drafts"
    line += "".join(f"; {who} {of['accepted']} of {of['drafted']}" for who, of in own.items())
    assert f"{line}." in " ".join(capsys.readouterr().out.split())


def test_the_command(log, tmp_path, capsys):
    with Served(accepted=(2,)) as fake:
        arguments = ["bench", "server", fake.url, "--log", str(log), "--limit", "6", "-n", "4"]
        assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
        out = capsys.readouterr().out
        assert "goodput" in out
        assert fake.url.split("/")[2] in out
    assert main(["bench", "server", "http://127.0.0.1:9", "a-model"]) == 2
    assert "'a-model' is no address of a server" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0


def test_lines_of_a_log_that_cannot_be_read_are_skipped_and_told(log, tmp_path, capsys):
    draft = "a text of more words than a label has"
    with log.open("a") as lines:
        lines.write('{"prompt": "cut off\n' + json.dumps({"prompt": "one more", "scratch": draft}) + "\n")
    with Served() as fake:
        arguments = ["bench", "server", fake.url, "--log", str(log), "-n", "2", "--warm-up", "0"]
        assert (main([*arguments, "--out", str(tmp_path / "run")]), len(fake.asked)) == (0, 40)
        assert f"2 of 42 lines skipped: first at {log}, line 41" in capsys.readouterr().out
        assert main([*arguments, "--ignore", "scratch", "--out", str(tmp_path / "other")]) == 0
        assert len(fake.asked) == 81
        assert "1 of 42 lines skipped" in capsys.readouterr().out
    log.write_text("no log\n" * 3)
    with pytest.raises(PacelineError, match="line 1"):
        workload(Benchmark(suite=str(log)), Reading())


def turn(times, count, **batch):
    return reply(3, [], "said", 1.0, times=times, count=count, batch=batch)


def test_figures_of_requests():
    good, late, slow = turn([0.1, 0.2, 0.3], 5), turn([0.6, 0.7], 2), turn([0.1, 0.9], 3)
    assert token_seconds(good) == pytest.approx(0.05)
    assert token_seconds(turn([0.1], 1)) is None
    answers = [Answer("a", 0, str(n), "all", "all", 0, [one]) for n, one in enumerate((good, late, slow))]
    answers.append(Answer("a", 0, "3", "all", "all", 0, [turn(None, 0)]))
    assert goodput(answers, token_ms=100) == pytest.approx(2 / 4)
    answers.pop()
    assert goodput(answers, first_ms=500, token_ms=100) == pytest.approx(1 / 3)
    assert goodput(answers, token_ms=100) == pytest.approx(2 / 3)
    answers[0].turns[0].batch = {"drafts": 4, "accepted": 5, "accepted_0": 3, "accepted_1": 2}
    assert accepted_by_position(answers) == [0.75, 0.5]
    [overall, _] = summarize(answers, {"a": {"baseline": True, "settings": {"goals": {"first_ms": 50}}}})
    assert (overall["goodput"], overall["looping"], overall["new_tokens"]) == (0, None, 10)


def test_windows_hold_every_request_once():
    found = windows([str(n) for n in range(100)], 3)
    assert [len(one.questions) for one in found] == [24, 24, 24, 24, 4]
    assert len({question.id for one in found for question in one.questions}) == 100
