"""Log-probabilities of a prompt's own tokens: in the engine, and as lm-eval asks a server for them."""

import json
from threading import Event

import httpx2 as httpx
import numpy as np
import pytest

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.engine.engine import Engine
from paceline.serve.worker import Worker
from tests import models, native
from tests.serve.live import engine, serving

PROMPTS = [np.random.default_rng(0).integers(2, models.VOCAB_SIZE, n).tolist() for n in (1, 2, 9, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.make("qwen3", tmp_path_factory.mktemp("m") / "tiny", **native.TINY)


def expected(target, prompt):
    """Of every token but the first: its log-probability, and that of the best one there; a forward for each."""
    found = []
    for n in range(1, len(prompt)):
        slot = target.add_row(n)
        logs = target.verify([Segment.chunk(slot, np.array(prompt[:n]), last=True)]).logits[0].float().log_softmax(-1)
        found.append((float(logs[prompt[n]]), float(logs.max())))
        target.drop_row(slot)
    return found


def check(row, target):
    prompt = row.tokens[: row.prompt_length].tolist()
    assert row.prompt_logprobs[0] is None
    scored = [one for one in row.prompt_logprobs if one is not None]
    assert [one.token for one in scored] == prompt[1:]
    own = [value for one in scored for value in (one.logprob, one.top[0][1])]
    assert own == pytest.approx([value for pair in expected(target, prompt) for value in pair], abs=1e-4)


def run(made, prompts, **params):
    rows = [made.add(prompt, SamplingParams(**{"max_tokens": 3, **params})) for prompt in prompts]
    while made.has_work:
        made.step()
    return rows


@pytest.mark.parametrize("draft", ["none", "recycling", "sam"])
def test_prompts_are_scored_in_pieces_beside_others(folder, draft):
    made = Engine(str(folder), draft, dtype="float32", device="cpu", threads=1, max_batch=3, prefill_chunk=7)
    plain = run(made, PROMPTS[2:])  # what is kept of these prompts must not be taken over
    rows = run(made, [*PROMPTS, *PROMPTS[2:]], prompt_logprobs=1)
    for row in rows:
        assert row.error == ""
        check(row, made.target)
    assert [row.new_tokens.tolist() for row in rows[2:4]] == [row.new_tokens.tolist() for row in plain]


def test_a_prompt_that_loses_its_place_is_scored_once(folder):
    made = Engine(str(folder), dtype="float32", device="cpu", threads=1, max_batch=3, prefill_chunk=7)
    row = made.add(PROMPTS[3], SamplingParams(max_tokens=3, prompt_logprobs=1))
    for rounds in (3, 9):
        for _ in range(rounds):
            made.step()
        if row in made.rows:
            made.rows.remove(row)
            made.room.release(row)
            made.waiting.appendleft(row)
    while made.has_work:
        made.step()
    assert row.preempted
    check(row, made.target)


def test_likelihoods_are_the_engines(folder):
    made = engine(folder, max_batch=4)
    with serving(made) as address:
        body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        reply = httpx.post(f"{address}/v1/completions", json={"model": "tiny", **body}, timeout=60).json()
        streamed = httpx.post(f"{address}/v1/completions", json={**body, "prompt": PROMPTS[2], "stream": True}).text
    alone = engine(folder)
    for i, (prompt, choice) in enumerate(zip(PROMPTS, reply["choices"], strict=True)):
        assert choice["index"] == i
        columns = choice["logprobs"]
        assert len(columns["token_logprobs"]) == len(columns["top_logprobs"]) == len(prompt) + 1
        assert columns["token_logprobs"][0] is None
        wanted = expected(alone.target, prompt)
        assert columns["token_logprobs"][1:-1] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-4)
        best = [max(top.values()) for top in columns["top_logprobs"][1:-1]]
        assert best == pytest.approx([best for _, best in wanted], abs=1e-4)
        # The new token is the most probable one, and told as such: lm-eval compares the two numbers.
        assert columns["token_logprobs"][-1] == max(columns["top_logprobs"][-1].values())
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    columns = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    values = [value for some in columns if some is not None for value in some["token_logprobs"]]
    assert values == pytest.approx(reply["choices"][2]["logprobs"]["token_logprobs"])
    assert not made.target.cache.held


def called(monkeypatch, name):
    """Set once the worker has done what the method of this name does."""
    method, done = getattr(Worker, name), Event()
    monkeypatch.setattr(Worker, name, lambda *args: (method(*args), done.set()))
    return done


def test_scoring_waits_its_turn_and_ends_with_its_client(folder, monkeypatch):
    made = engine(folder, max_batch=1, prefill_chunk=2)
    step, go = made.step, Event()
    made.step = lambda: (go.wait(30), step())[1]
    left, ended = called(monkeypatch, "abort"), called(monkeypatch, "_abort")
    body = {"prompt": PROMPTS[3], "max_tokens": 0, "logprobs": 1, "echo": True}
    with serving(made, most_waiting=1) as address:
        url = f"{address}/v1/completions"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=1.5)
        assert httpx.post(url, json=body, timeout=1.5).status_code == 429
        assert left.wait(30)
        go.set()
        assert ended.wait(30)  # until then its place is taken
        assert httpx.post(url, json=body, timeout=30).status_code == 200
        assert made.rounds < 30, "a prompt was run to its end though its client had left"
