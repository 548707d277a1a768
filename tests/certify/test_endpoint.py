"""Servers, as they are certified: a scripted one of a small language model, honest, biased and wrong."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from paceline.certify.endpoint import Server, certify_endpoint
from paceline.certify.options import Scope
from paceline.certify.page import findings, page

WORDS = [f" w{i}" for i in range(12)]


@lru_cache
def probs(context: tuple[int, ...]) -> np.ndarray:
    """What may follow two words."""
    seed = int(hashlib.sha256(repr(context).encode()).hexdigest()[:8], 16)
    weights = np.exp(1.5 * np.random.default_rng(seed).normal(size=len(WORDS)))
    return weights / weights.sum()


class Model:
    """bias: the share of drafted words that are kept without asking; wrong: every so many greedy words, which are then
    of this rank, from 0."""

    def __init__(self, bias: float = 0.0, wrong: int = 0, rank: int = 1, logprobs: bool = True):
        self.bias, self.wrong, self.rank, self.logprobs = bias, wrong, rank, logprobs

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(body.get("seed"))
        text: list[int] = [len(body["messages"][-1]["content"]) % len(WORDS)]
        content = []
        for n in range(body["max_tokens"]):
            p = probs(tuple(text[-2:]))
            order = np.argsort(-p)
            temperature = body.get("temperature", 1.0)
            if temperature == 0:
                token = int(order[self.rank if self.wrong and n % self.wrong == self.wrong - 1 else 0])
            else:
                hot = p ** (1 / temperature)
                draft = int(order[0])
                token = int(rng.choice(len(WORDS), p=hot / hot.sum()))
                token = draft if n and rng.random() < self.bias else token
            top = [{"token": WORDS[i], "logprob": math.log(p[i])} for i in order[: body.get("top_logprobs", 0)]]
            content.append({"token": WORDS[token], "logprob": math.log(p[token]), "top_logprobs": top})
            text.append(token)
        said = "".join(WORDS[i] for i in text[1:])
        shown = {"logprobs": {"content": content}} if body.get("logprobs") and self.logprobs else {}
        choice = {"message": {"content": said}, "finish_reason": "length", **shown}
        return {"choices": [choice], "usage": {"completion_tokens": body["max_tokens"]}}


@contextmanager
def served(model: Model) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.say({"data": [{"id": "words"}]})

        def do_POST(self) -> None:
            self.say(model.reply(json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def say(self, value: dict[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}/v1")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


PROMPTS = [({"role": "user", "content": "x" * n},) for n in (3, 8)]
PLAN = Scope(shift=0.1, requests=120, max_tokens=12)


def certified(model: Model, reference: Model | None = None, plan: Scope = PLAN) -> dict[str, Any]:
    with served(model) as server:
        if reference is None:
            return certify_endpoint(server, None, PROMPTS, plan)
        with served(reference) as other:
            return certify_endpoint(server, other, PROMPTS, plan)


REFERENCES = [
    pytest.param(None, id="by its own log-probabilities"),
    pytest.param(Model(), id="by a reference", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("reference", REFERENCES)
def test_an_honest_server_is_not_accused(reference: Model | None) -> None:
    found = certified(Model(), reference)
    assert found["lossless"], findings(found)
    assert found["greedy"]["tokens"] == 2 * len(PROMPTS) * PLAN.max_tokens
    assert found["sampled"]["requests"] == PLAN.requests
    assert 0 < found["power"]["detectable"] < 1
    assert "not_tested" in found
    assert "Lossless, as far" in page({"environment": {}, "target": "words", **found})


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_planted_bias_is_found(reference: Model | None) -> None:
    found = certified(Model(bias=0.5 if reference is None else 0.9), reference, Scope(requests=180, max_tokens=4))
    assert not found["sampled"]["lossless"]
    assert found["sampled"]["tv"] > 2 * found["sampled"]["tv_by_chance"]
    assert not found["lossless"]


def test_a_wrong_greedy_token_is_a_bug_and_a_near_one_a_tie() -> None:
    for reference in (None, Model()):
        greedy = certified(Model(wrong=5), reference, Scope(requests=0, max_tokens=12))["greedy"]
        verdicts = {one["verdict"] for one in greedy["shown"]}
        assert not greedy["lossless"]
        assert "bug" in verdicts
        assert all(one["gap"] <= 0.25 for one in greedy["shown"] if one["verdict"] == "tie")


def test_a_wrong_token_that_the_reference_does_not_rank_is_a_bug() -> None:
    """There is no gap then, for the reference reports its two best tokens alone."""
    found = certified(Model(wrong=5, rank=2), Model(), Scope(requests=0, max_tokens=12))
    assert {(one["verdict"], one["gap"]) for one in found["greedy"]["shown"]} == {("bug", None)}
    assert findings(found)[0].endswith("token 4, alone: the reference has another token, and this one is not among its "
                                       "two best.")  # fmt: skip
    assert "gap None" not in page({"environment": {}, "target": "words", **found})


def test_a_server_without_log_probabilities_cannot_be_certified() -> None:
    found = certified(Model(logprobs=False), None, Scope(requests=0, max_tokens=4))
    assert not found["lossless"]
    assert "reports no log-probabilities" in findings(found)[0]
