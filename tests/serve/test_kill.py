"""A server that is killed while it answers: its clients hear of it, its log is whole lines, and it starts again."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import httpx2 as httpx
import pytest

from paceline.errors import PacelineError
from paceline.serve.metrics import RequestLog
from tests.serve.process import start, started

openai = pytest.importorskip("openai")
LONG = {"model": "tiny", "temperature": 1.0, "max_tokens": 900, "extra_body": {"ignore_eos": True, "min_tokens": 900}}


def answered(address, stream):
    """How a client of OpenAI learns that its answer will not come; "ended" if it comes."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=60)
    try:
        reply = client.completions.create(prompt="the cat", stream=stream, **LONG)
        for chunk in reply if stream else ():
            if chunk.choices[0].finish_reason:
                return "ended"
    except (openai.APIConnectionError, httpx.TransportError) as error:
        return type(error).__name__
    return "ended" if not stream else "a stream that just stopped"


def lines(log):
    """The number of lines of a log, all of which are whole."""
    text = log.read_text()
    assert not text or text.endswith("\n")
    return len([json.loads(line) for line in text.splitlines()])


@pytest.mark.slow
def test_killed_in_the_middle_and_started_again(folder, tmp_path):
    log = tmp_path / "requests.jsonl"
    options = ("--log", str(log), "--name", "tiny", "--threads", "1")
    server, address = start(folder, *options)
    short = {"prompt": "the cat", "max_tokens": 3}
    with ThreadPoolExecutor(8) as pool:
        try:
            for _ in range(3):
                httpx.post(f"{address}/v1/completions", json=short, timeout=60).raise_for_status()
            waiting = [pool.submit(answered, address, bool(i % 2)) for i in range(8)]
            while httpx.get(f"{address}/stats").json()["running"] < 8:
                sleep(0.01)
        finally:
            os.kill(server.pid, signal.SIGKILL)
        heard = [one.result() for one in waiting]
    assert set(heard) <= {"APIConnectionError", "RemoteProtocolError", "ReadError"}
    server.wait()
    assert lines(log) == 3
    with log.open("a") as file:  # as a power cut may leave it
        file.write('{"time": 1, "prompt_tok')
    with started(folder, *options, port=httpx.URL(address).port) as (_, again):
        assert again == address
        httpx.post(f"{address}/v1/completions", json=short, timeout=60).raise_for_status()
        assert lines(log) == 4


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(folder):
    with started(folder) as (_, address):
        port = str(httpx.URL(address).port)
        command = [sys.executable, "-m", "paceline", "serve", str(folder), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"cannot listen on 127.0.0.1, port {port}" in done.stderr


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(PacelineError, match="cannot be written"):
        RequestLog(tmp_path)
