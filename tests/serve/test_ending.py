"""How the server ends: a signal, a grace, and an engine that fails. Nobody who was promised an answer hears nothing."""

import asyncio
import fcntl
import json
import re
import signal
import socket
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import dropwhile
from time import perf_counter, sleep

import httpx2 as httpx
import pytest

from paceline.cli import main
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.serve.said import once
from tests.serve.live import ending, engine
from tests.serve.process import start

LONG = {"prompt": "the cat", "max_tokens": 900, "min_tokens": 900, "ignore_eos": True}
HTTP = httpx.Client(timeout=60)


@pytest.fixture(scope="module", autouse=True)
def compiled(folder):
    """What has to be compiled is compiled."""
    engine(folder).generate(["the cat"], SamplingParams(max_tokens=8))


def slowly(made, seconds=0.02):
    """An engine whose rounds take at least this long."""
    step = made.step
    made.step = lambda: (sleep(seconds), step())[1]
    return made


@contextmanager
def asked(address, *bodies):
    """The replies to completions that are all asked at once, and that the server has begun."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        replies = [pool.submit(HTTP.post, f"{address}/v1/completions", json=body) for body in bodies]
        while sum(HTTP.get(f"{address}/stats").json()[what] for what in ("running", "waiting")) < len(bodies):
            sleep(0.01)
        yield replies


def events(reply):
    """The events of a stream, which ends as streams must."""
    lines = [line[6:] for line in reply.text.split("\n") if line]  # a text may have other ends of lines
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def is_refused(reply, code):
    """Whether an answer is an error object of status 503."""
    assert reply.json()["error"]["code"] == code
    return reply.status_code == 503 and reply.json()["error"]["type"] == "server_error"


def is_cut(reply, code):
    """Whether a stream ends with an error and then a reason for every choice."""
    *_, error, last = events(reply)
    return error["error"]["code"] == code and last["choices"][0]["finish_reason"] == "abort"


def test_what_is_open_when_the_grace_ends(folder, tmp_path, caplog):
    """Running and waiting ones, whole and streams, of one prompt and of several."""
    log = tmp_path / "log.jsonl"
    bodies = [LONG, {**LONG, "stream": True}, LONG, {**LONG, "stream": True}]
    with ending(slowly(engine(folder, max_batch=2)), log, grace=1.5) as (address, server, thread):
        with asked(address, *bodies) as replies:
            server.handle_exit(signal.SIGTERM, None)
            began = perf_counter()
            while HTTP.get(f"{address}/health").status_code == 200:
                sleep(0.01)
            assert is_refused(HTTP.get(f"{address}/health"), "shutting_down")
            late = HTTP.post(f"{address}/v1/completions", json=LONG)
            assert is_refused(late, "shutting_down")
            assert late.headers["retry-after"]
            assert not any(reply.done() for reply in replies)
        whole, stream, queued, queued_stream = [reply.result() for reply in replies]
        thread.join(15)
        assert perf_counter() - began >= 1.4
        assert not thread.is_alive()
    # Any two of the four were running: they are heard as far as they came.
    begun = sum(any(one["choices"][0].get("text") for one in events(reply)[:-2]) for reply in (stream, queued_stream))
    for reply in (whole, queued):
        if reply.status_code == 200:
            (choice,), begun = reply.json()["choices"], begun + 1
            assert (choice["finish_reason"], bool(choice["text"])) == ("abort", True)
            assert reply.json()["usage"]["completion_tokens"] > 0
        else:
            assert is_refused(reply, "shutting_down")
    assert begun == 2
    assert is_cut(stream, "shutting_down")
    assert is_cut(queued_stream, "shutting_down")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["finish_reason"] for record in records] == ["abort"] * 4
    assert sorted(bool(record["tokens"]) for record in records) == [False, False, True, True]
    assert all(record["prompt_tokens"] for record in records)
    assert not caplog.records


def test_every_prompt_of_a_request_is_in_the_log(folder, tmp_path):
    log = tmp_path / "log.jsonl"
    body = {**LONG, "prompt": ["the cat", "a dog"], "n": 2}
    with ending(slowly(engine(folder, max_batch=8)), log) as (address, server, _):
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(HTTP.post, f"{address}/v1/completions", json=body)
            while HTTP.get(f"{address}/stats").json()["running"] < 4:
                sleep(0.01)
            server.handle_exit(signal.SIGTERM, None)
        assert {choice["finish_reason"] for choice in reply.result().json()["choices"]} == {"abort"}
    assert len(log.read_text().splitlines()) == 4


def test_answers_that_end_within_the_grace(folder):
    with ending(slowly(engine(folder)), grace=30) as (address, server, thread):
        short = {**LONG, "max_tokens": 30, "min_tokens": 0}
        with asked(address, short, {**short, "stream": True}) as replies:
            server.handle_exit(signal.SIGTERM, None)
        whole, stream = [reply.result() for reply in replies]
        thread.join(15)  # half of the grace
        assert not thread.is_alive()
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert events(stream)[-1]["choices"][0]["finish_reason"] == "length"


def test_a_second_signal_ends_at_once_even_in_a_long_round(folder):
    made, go = engine(folder), threading.Event()
    step = made.step
    made.step = lambda: (go.wait(60), step())[1]
    with ending(made, grace=60) as (address, server, _):
        with asked(address, LONG, {**LONG, "stream": True}) as replies:
            server.handle_exit(signal.SIGTERM, None)
            server.handle_exit(signal.SIGTERM, None)
            whole, stream = [reply.result(30) for reply in replies]  # the round has not ended
        go.set()
    assert is_refused(whole, "shutting_down")
    assert is_cut(stream, "shutting_down")


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"


def test_half_a_request_is_answered_at_the_end(folder, caplog):
    with ending(engine(folder)) as (address, server, thread):
        url = httpx.URL(address)
        with socket.create_connection((url.host, url.port)) as half:
            half.sendall(HALF)
            sleep(0.2)
            server.handle_exit(signal.SIGTERM, None)
            thread.join(10)
            assert half.recv(100).startswith(b"HTTP/1.1 503 ")
    assert not [record for record in caplog.records if record.exc_info]


# An engine that fails ------------------------------------------------------------------------------------------------


def fail(*_):
    raise RuntimeError("the bus is off")


def test_a_round_that_fails_ends_its_requests_alone(folder):
    made = engine(folder)
    with ending(made) as (address, _, _):
        good, made.step = made.step, slowly(made, 0.5) and fail
        url = f"{address}/v1/completions"
        whole, stream = HTTP.post(url, json=LONG), HTTP.post(url, json={**LONG, "stream": True})
        made.step = good
        assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
        assert "failed" in events(stream)[-2]["error"]["message"]
        assert HTTP.get(f"{address}/health").status_code == 200
        assert HTTP.post(url, json={"prompt": "the cat", "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("where", ["abort", "step"])
def test_an_engine_that_has_failed_ends_the_server(folder, where):
    """A round that fails and cannot be cleaned up, and rounds that fail again and again."""
    made = slowly(engine(folder, max_batch=1))
    with ending(made, grace=60) as (address, server, thread):
        with asked(address, LONG, {**LONG, "stream": True}, LONG, LONG) as replies:
            made.step = fail
            made.abort = fail if where == "abort" else lambda row: None
            done = [reply.result() for reply in replies]
        thread.join(10)
        assert not thread.is_alive()
    assert isinstance(server.worker.error, RuntimeError)
    assert all("the engine failed" in reply.text for reply in done)
    assert [reply.status_code for reply in done][1:2] == [200]
    assert {reply.status_code for reply in (done[0], *done[2:])} <= {500, 503}


def test_health_and_calls_after_the_engine_failed(folder):
    """For servers that embed the application: it goes on, and says so."""
    made = engine(folder)
    made.add = made.abort = made.step = fail
    with ending(made) as (address, server, _):
        server.on_tick = lambda counter: sleep_forever(server)
        server.worker._inbox.put((fail, server))
        while server.worker.closed is None:
            sleep(0.01)
        assert is_refused(HTTP.get(f"{address}/health"), "engine_failed")
        assert is_refused(HTTP.post(f"{address}/v1/completions", json=LONG), "engine_failed")
        scored = {"prompt": "the cat", "echo": True, "logprobs": 1, "max_tokens": 0}
        assert is_refused(HTTP.post(f"{address}/v1/completions", json=scored), "engine_failed")


async def sleep_forever(server):
    """A tick that only looks for the end of the test."""
    return bool(server.signals)


# The command ---------------------------------------------------------------------------------------------------------


def command(folder, capsys, work, *options):
    """`paceline serve` in this process: its status, its lines after the four of its start, those of standard error, and
    what `work` made of its address meanwhile."""
    printed, made = "", []

    def client():
        nonlocal printed
        while not (where := re.search(r"http://\S+", printed)):
            sleep(0.02)
            printed += capsys.readouterr().out
        made.append(work(where[0]))

    other = threading.Thread(target=client, daemon=True)
    other.start()
    words = ("--port", "0", "--threads", "1", "--device", "cpu", "--dtype", "float32")
    status = main(["serve", str(folder), *words, *options])
    other.join(10)
    out, err = capsys.readouterr()
    lines = iter((printed + out).splitlines())
    return status, [*dropwhile(lambda line: "http://" not in line, lines)][4:], err.splitlines(), *made


def test_a_line_for_each_request_and_one_for_the_end(folder, capsys):
    def work(address):
        done = HTTP.post(f"{address}/v1/completions", json={**LONG, "max_tokens": 9, "min_tokens": 9})
        with asked(address, LONG) as replies:
            signal.raise_signal(signal.SIGINT)
        return done.status_code, [reply.result().status_code for reply in replies]

    status, lines, _, codes = command(folder, capsys, work)
    assert (status, codes) == (130, (200, [200]))
    first, stopping, last = lines
    assert re.fullmatch(r"[\d:]{8} \d tokens of prompt, 9 of answer in \d rounds \(.* a round\), .* s: length", first)
    assert stopping.endswith("stopping: 1 answers have 30 s to end; Ctrl-C again ends them now")
    assert "900 of answer" in last


def garbage(address, times):
    """Requests that are no HTTP, each of which is answered."""
    for _ in range(times):
        with socket.create_connection(("127.0.0.1", httpx.URL(address).port), timeout=10) as client:
            client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_whoever_reads_the_lines_holds_up_neither_requests_nor_the_end(folder):
    """A reader that stands still, and then one that has left."""
    server, address = start(folder, "--threads", "1", stderr=subprocess.PIPE)
    try:
        for pipe in (server.stdout, server.stderr):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
        garbage(address, times=100)
        for number in range(5):  # 60 lines each
            many = HTTP.post(f"{address}/v1/completions", json={"prompt": "the cat", "max_tokens": 1, "n": 60})
            assert len(many.json()["choices"]) == 60
            if number == 2:
                server.stdout.close()
        server.terminate()
        assert server.wait(20) in (0, 141)  # 141: lines were left in a buffer
        assert "Traceback" not in server.stderr.read()
    finally:
        server.kill()


def test_warnings_are_lines_of_a_kind_once_a_minute_and_are_counted(folder, capsys):
    def work(address):
        for _ in range(4):
            short = {**LONG, "max_tokens": 2, "min_tokens": 1}
            assert HTTP.post(f"{address}/v1/completions", json=short).status_code == 200
        garbage(address, times=3)
        counts = HTTP.get(f"{address}/metrics").text
        signal.raise_signal(signal.SIGTERM)
        return counts

    status, lines, errors, counts = command(folder, capsys, work, "--quiet", "--log", "/dev/full")
    assert 'paceline:warnings_total{kind="request_log"} 4.0' in counts
    assert 'paceline:warnings_total{kind="uvicorn.error"} 3.0' in counts
    said = "warning: a request is not in the log: /dev/full cannot be written: No space left on device"
    bad = "warning: Invalid HTTP request received."
    warnings = [line[9:] for line in errors if "warning: " in line]
    assert warnings == [said, bad, f"{said} (2 more like it)", f"{bad} (1 more like it)"]
    assert (status, lines) == (0, []), "it was to be quiet"


@pytest.mark.parametrize("quiet", [True, False])
def test_what_is_ignored_is_said_once_by_a_quiet_server_too(folder, capsys, quiet):
    once.cache_clear()

    def work(address):
        for _ in range(2):
            odd = {"prompt": "x", "max_tokens": 2, "odd": 1}
            assert HTTP.post(f"{address}/v1/completions", json=odd).status_code == 200
        signal.raise_signal(signal.SIGTERM)

    _, lines, _, _ = command(folder, capsys, work, "--lenient", *["--quiet"] * quiet)
    said = "odd is not a field that this server supports, and is ignored"
    assert sum(line.endswith(said) for line in lines) == 1
    assert sum("drafted" in line for line in lines) == (0 if quiet else 2)
    assert (len(lines) == 1) == quiet


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (None, 1)])
def test_the_status_of_the_command(folder, capsys, monkeypatch, sent, status):
    """None: no signal, but an engine that fails."""
    step = Engine.step
    monkeypatch.setattr(Engine, "step", (lambda made: (sleep(0.02), step(made))[1]) if sent else fail)
    if sent is None:
        monkeypatch.setattr(Engine, "abort", fail)

    def work(address):
        if sent is not None:
            threading.Timer(0.5, lambda: signal.raise_signal(sent)).start()
        return HTTP.post(f"{address}/v1/completions", json=LONG)

    found, _, errors, reply = command(folder, capsys, work, "--grace", "0.3")
    assert (found, reply.status_code) == (status, 503 if sent is None else 200)
    if sent is None:
        assert errors[-1] == "error: the engine failed: RuntimeError: the bus is off"
    else:
        assert not [line for line in errors if "model shards" not in line]


# Many clients --------------------------------------------------------------------------------------------------------


class Crowd:
    """Clients of every kind while the server ends. heard: by number of the request, what became of it."""

    def __init__(self, address, count, stop):
        self.address, self.count, self.stop = address, count, stop
        self.heard = {}
        self.unheard = {}

    @staticmethod
    def body(number):
        """Its prompt is its number, so that the log says which requests the engine had."""
        digits = [20 + int(digit) for digit in f"{number:05}"]
        long = {"max_tokens": 900, "min_tokens": 900} if number % 7 == 0 else {"max_tokens": 1 + number % 20}
        body = {"prompt": digits, "stream": number % 2 == 0, "n": 1 + (number % 5 == 0), "temperature": 1, **long}
        return body | ({"prompt": [digits, digits]} if number % 9 == 1 else {})

    async def run(self, clients):
        left = iter(range(self.count))
        async with httpx.AsyncClient(base_url=self.address, timeout=900) as http:

            async def client():
                for number in left:
                    self.heard[number] = await self.ask(http, number, self.body(number))
                    if len(self.heard) == self.count // 3:
                        self.stop()

            await asyncio.gather(*(client() for _ in range(clients)))

    async def ask(self, http, number, body):
        """What becomes of a request; AssertionError for an answer that breaks off."""
        began = False
        try:
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                began = True
                text = (await reply.aread()).decode()
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            assert not began, "an answer broke off"
            self.unheard[number] = repr(error)
            return "no connection"
        if reply.status_code != 200:
            assert json.loads(text)["error"]["message"]
            return str(reply.status_code)
        count = body["n"] * (2 if isinstance(body["prompt"][0], list) else 1)
        if not body["stream"]:
            choices = json.loads(text)["choices"]
        else:
            lines = [line[6:] for line in text.split("\n") if line]
            assert lines.pop() == "[DONE]"
            made = [json.loads(line) for line in lines]
            choices = [one for event in made for one in event.get("choices", []) if one["finish_reason"]]
            if any("error" in event for event in made):
                assert len(choices) == count
                return "cut"
        if any(one["finish_reason"] == "abort" for one in choices):
            return "cut"
        assert {one["finish_reason"] for one in choices} <= {"stop", "length"}
        assert len(choices) == count
        return "whole"

    def check(self, log):
        """Whoever had an answer begun has heard of its end."""
        begun = set()
        for line in log.read_text().splitlines():
            record = json.loads(line)
            begun.add(int("".join(str(token - 20) for token in record["prompt_tokens"])))
        assert sorted(self.heard) == list(range(self.count))
        lost = [number for number in begun if self.heard[number] == "no connection"]
        assert not lost, [(number, self.unheard[number]) for number in lost]
        assert all(number in begun for number, what in self.heard.items() if what in ("whole", "cut"))
        return Counter(self.heard.values())


def test_mixed_requests_and_a_signal_in_the_middle(folder, tmp_path):
    log = tmp_path / "log.jsonl"
    with ending(slowly(engine(folder, max_batch=8), 0.005), log, grace=0.5) as (address, server, thread):
        crowd = Crowd(address, 90, lambda: server.handle_exit(signal.SIGTERM, None))
        asyncio.run(crowd.run(24))
        thread.join(10)
        assert not thread.is_alive()
    outcomes = crowd.check(log)
    assert outcomes["whole"] >= 20
    assert outcomes["cut"]
    assert outcomes["503"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_mixed_requests_and_a_signal_in_the_middle(folder, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    server, address = start(folder, "--log", str(log), "--threads", "1", "--batch", "16", "--grace", "3")
    try:
        crowd = Crowd(address, 2000, server.terminate)
        asyncio.run(crowd.run(64))
        assert server.wait(20) == 0
    finally:
        server.kill()
    outcomes = crowd.check(log)
    with capsys.disabled():
        print(f"\n{dict(outcomes)}")
    assert outcomes["whole"] >= 600
    assert outcomes["cut"]
    assert outcomes["503"]
