"""Clients of every kind at once: no answer lost or mixed up, nothing left behind. The long form is slow."""

import json
import os
from time import perf_counter, sleep

import httpx2 as httpx
import pytest

from tests.serve.live import engine, serving
from tests.serve.process import memory_mb, started
from tests.serve.traffic import Traffic

COUNT = int(os.environ.get("PACELINE_LOAD", "10000"))
"""Requests of the long form."""


def idle(made):
    """Whether nothing is left of any request in an engine: no row, no slot of the cache."""
    return not made.rows and not made.waiting and not made.target.cache.held


def test_many_kinds_of_clients_at_once(folder):
    traffic, made = Traffic(80, kinds=40, seed=1), engine(folder, max_batch=16)
    with serving(made, most_waiting=256, api_keys=("right",), max_body=60_000) as address:
        traffic.run(address, "right")
        for _ in range(100):
            if idle(made):
                break
            sleep(0.05)
        assert idle(made)
        facts = httpx.get(f"{address}/stats").json()
        assert (facts["running"], facts["waiting"]) == (0, 0)
    traffic.check(engine(folder, max_batch=1))
    assert set(traffic.outcomes) == {"whole", "stream", "leave", "malformed", "key", "half"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_requests(folder, tmp_path, capsys):
    """In a process of its own, whose memory is looked at: after the first tenth, and at the end."""
    log = tmp_path / "requests.jsonl"
    options = ("--api-key", "right", "--limit", "body=60000", "--log", str(log), "--threads", "1")
    parts = [Traffic(COUNT // 10, kinds=COUNT // 100, seed=seed) for seed in range(10)]
    with started(folder, *options) as (server, address):
        began, memory = perf_counter(), [memory_mb(server.pid)]
        for part in parts:
            part.run(address, "right")
            memory.append(memory_mb(server.pid))
        seconds = perf_counter() - began
        sleep(1)
        metrics = httpx.get(f"{address}/metrics").text
        assert "paceline:num_requests_running 0.0" in metrics
        assert "paceline:num_requests_waiting 0.0" in metrics
    alone = engine(folder, max_batch=1)
    for part in parts:
        part.check(alone)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) >= sum(len(answer) for part in parts for answer in part.answers.values())
    with capsys.disabled():
        outcomes = sum((part.outcomes for part in parts), start=type(parts[0].outcomes)())
        print(f"\n{dict(outcomes)} in {seconds:.0f} s; MB before and after each tenth: {memory}")
    assert memory[-1] < 1.1 * memory[2] + 20, f"memory grows: {memory}"
