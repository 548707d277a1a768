"""`paceline watch`: what it makes of counters, and the command on a fake server."""

import json
import os
import signal

import numpy as np
import pytest
from tests.served import Served

from paceline.cli.watch import reading
from paceline.net.completion import CompletionError
from paceline.net.servers import Drafting
from paceline.replay.advice import DRAWS, Costs

OWN = {
    "num_spec_steps": 60, "num_draft_tokens": 90, "num_accepted_draft_tokens": 54, "acceptance_histogram": [30, 6, 24],
    "by_drafter": {"sam": {"drafted": 70, "accepted": 44}, "copy": {"drafted": 20, "accepted": 10}},
}  # fmt: skip
"""Of an answer, as our server tells it."""


@pytest.mark.parametrize(("engine", "by_position", "cost", "says"), [
    ("vllm", (80, 60, 50), 0.05, "pay at every position; more tokens may pay too"),
    ("vllm", (80, 20, 2), 0.15, 'after position 1 do not pay now: in its --speculative-config "num_speculative'),
    ("vllm", (10, 2, 1), 0.3, "do not pay now: no --speculative-config"),
    ("sglang", (80, 10, 1), 0.15, "--speculative-num-steps 1"),
    ("llamacpp", (80, 10, 1), 0.15, "--spec-draft-n-max 1"),
    ("paceline", (5, 1, 1), 0.3, "--draft none"),
    ("", (5, 1, 1), 0.3, "turn them off"),
])
def test_advice(engine, by_position, cost, says):
    new = Drafting(engine, 4, 500, 100, 300, sum(by_position), by_position)
    plain = np.tile(np.array([[1.0], [1.0], [1.0 + cost]]), (DRAWS, 1, 1))  # of 1, 4 and 8 requests; 4 are running
    found = reading(new, Costs([1, 4, 8], [0.0], plain, np.zeros_like(plain)))
    assert says in found["advice"]
    assert found["token_cost"] == cost
    assert reading(new, Costs.assumed(cost)) == found
    assert found["gain"] == pytest.approx((1 + sum(by_position) / 100) / (1 + 3 * cost), abs=1e-4)


def test_what_cannot_be_judged():
    costs = Costs.assumed(0.05)
    assert reading(Drafting("vllm"), costs)["advice"] == "there were no drafts"
    assert "2.50 tokens a round" in reading(Drafting("sglang", length=2.5), costs)["advice"]
    assert "too few" in reading(Drafting("vllm", 1, 9, 4, 8, 4, (4,)), costs)["advice"]
    for drafted, why in ((150, "they vary in length (1.5 tokens)"), (500, "none accepted behind position 3 (trees")):
        advice = reading(Drafting("vllm", 4, 500, 100, drafted, 60, (40, 15, 5)), costs)["advice"]
        assert advice.startswith("drafts pay as a whole; ")
        assert why in advice


def test_the_command(command):
    with Served(accepted=(1, 0)) as fake:
        fake.counts.update({"tokens": 300, "drafts": 100, "draft_tokens": 300, "accepted_tokens": 50, "at 0": 50})
        told = command("watch", fake.url, "--once", "--json")
        assert told.code == 0
        facts = json.loads(told.out)
        assert facts["accepted_by_position"] == [0.5, 0, 0]
        assert "after position 1" in facts["advice"]
        told = command("watch", fake.url.removesuffix("/v1"), "--once", "--token-cost", "0.9")
        assert "100 drafts, 50 of 300 accepted, accepted by position 50% 0% 0%" in told.out
        assert "do not pay now" in told.out
    for more in ("--once", "--json"):  # a server that could never be read
        told = command("watch", "http://127.0.0.1:9", more)
        assert (told.code, len(told.err.splitlines())) == (2, 1)


def test_what_an_answer_says_of_its_own_drafts(command):
    timings = {"predicted_n": 128, "draft_n": 90, "draft_n_accepted": 68}
    with Served("llamacpp", told={"timings": timings, "usage": {"completion_tokens": 128}}) as fake:
        facts = json.loads(command("watch", fake.url, "--once", "--json", "--ask", "hi").out)
        assert (facts["engine"], facts["drafts"], facts["drafted"], facts["accepted"]) == ("llamacpp", 60, 90, 68)
        assert fake.asked[0]["messages"] == [{"role": "user", "content": "hi"}]
    with Served("paceline", told={"metrics": {"speculative_decoding": OWN}}) as fake:
        facts = json.loads(command("watch", fake.url, "--once", "--json", "--ask", "hi").out)
        assert (facts["drafts"], facts["by_drafter"]) == (60, OWN["by_drafter"])
        assert facts["accepted_by_position"] == [0.5, 0.4]
        told = command("watch", fake.url, "--once", "--ask", "hi")
        assert "60 drafts, 54 of 90 accepted, sam 44 of 70 accepted, copy 10 of 20 accepted, accepted by" in told.out
    with Served() as fake:
        told = command("watch", fake.url, "--once", "--ask", "hi")
        assert (told.code, len(told.err.splitlines())) == (2, 1)
        assert "tells nothing of its drafts" in told.err


def test_a_reading_that_fails_ends_nothing(command, monkeypatch):
    reads = iter([100, 200, "no server", None, 500, "no server"])

    def read(url, key):
        match next(reads, "end"):
            case int() as tokens:
                return Drafting("vllm", tokens=tokens)
            case None:
                return None
            case "end":
                os.kill(os.getpid(), signal.SIGINT)
        raise CompletionError("no server")

    monkeypatch.setattr(Drafting, "read", read)
    told = command("watch", "http://h", "--every", "0.1", "--json")
    assert told.code == 0
    first, second = map(json.loads, told.out.splitlines())
    assert first["tokens_per_second"] == pytest.approx(1000, rel=0.5)
    assert second["tokens_per_second"] == pytest.approx(1000, rel=0.5)  # of three readings' time
    assert [line.partition(";")[0] for line in told.err.splitlines()[:2]] == ["no server", "http://h has no /metrics"]
