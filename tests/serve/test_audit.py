"""The audit: bugs of a cache, a mask or a draft raise the alarm, healthy answers do not, and requests come first."""

import asyncio
import json
import logging
import time
from contextlib import contextmanager, nullcontext
from itertools import cycle
from threading import Event
from unittest.mock import patch

import httpx2 as httpx
import numpy as np
import pytest
import torch

from paceline.core.accept import follow
from paceline.core.noise import Noise
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.prefixes import Prefix
from paceline.serve import audit as module
from paceline.serve.audit import Audit, judge
from paceline.serve.structure import Grammars, Matched
from paceline.serve.worker import Worker
from paceline.target.cache import RaggedCache
from tests.certify.planted import OneByOne, World
from tests.fakes import TableTarget
from tests.paths import REPOSITORY
from tests.serve.live import engine as live_engine
from tests.serve.live import serving

AT_ONCE = 8
SHAPE = {"type": "array", "items": {"type": "integer"}, "minItems": 4}
ASKS = (
    {}, {"temperature": 1.0}, {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
)  # fmt: skip
"""Greedy and sampled, with every kind of filter."""


class Accepting(OneByOne):
    """Whatever was drafted stands, in a share of the rounds."""

    def __init__(self, share):
        super().__init__()
        self.share, self.rng = share, np.random.default_rng(0)

    def step(self, walker):
        children = walker.tree.children(walker.node)
        if children and self.rng.random() < self.share:
            return follow(walker, int(walker.tree.tokens[children[0]]))
        return super().step(walker)


@contextmanager
def rarely(owner, name, broken, share):
    """A method that is broken in a share of its calls."""
    whole, rng = getattr(owner, name), np.random.default_rng(0)

    def call(*args):
        return (broken if rng.random() < share else whole)(*args)

    with patch.object(owner, name, call):
        yield


_take, _commit, _goes_on = Prefix.take, RaggedCache.commit, Matched.goes_on


def stale(prefix, length):
    """Values of other tokens. (With their keys they would be the same: attention adds pairs up in any order.)"""
    kv, state = _take(prefix, length)
    return torch.stack((kv[:, 0], kv[:, 1].flip(2)), 1), state


@torch.inference_mode()
def of_another_row(cache, slot, path):
    """Some keys and values of another row come into this one."""
    _commit(cache, slot, path)
    for other in cache.held:
        if other != slot and min(cache.length(slot), cache.length(other)) > 6:
            cache.kv[:, :, slot, :, :6] = cache.kv[:, :, other, :, :6]


def never_back(grammar, answer):
    """The mask after tokens that were drafted and have fallen."""
    for token in answer[len(grammar._read) :]:
        if grammar._matcher.is_stopped() or not grammar._matcher.try_consume_tokens([token]):
            return False
        grammar._read.append(token)
    return not grammar._matcher.is_stopped()


FAULTS = {
    "a stale prefix": (Prefix, "take", stale),
    "the cache of another row": (RaggedCache, "commit", of_another_row),
    "a mask that is not taken back": (Matched, "goes_on", never_back),
}


@pytest.fixture(scope="module")
def world():
    return World()


def answers(engine, count, seed=0, shape=None, asks=ASKS):
    """Rows that have ended: prompts that begin alike in part, in batches."""
    rng, asked = np.random.default_rng(seed), cycle(asks)
    stems = [rng.integers(4, 288, 24).tolist() for _ in range(3)]
    for _ in range(0, count, AT_ONCE):
        rows = []
        for _ in range(AT_ONCE):
            more = {} if shape is None else {"grammar": shape(), "temperature": 1.0}
            params = SamplingParams(**next(asked) | more, max_tokens=24)
            prompt = stems[int(rng.integers(3))] + rng.integers(4, 288, int(rng.integers(1, 9))).tolist()
            rows.append(engine.add(prompt, params))
            rows[-1].noise = Noise(int(rng.integers(1 << 30)))  # the engine's own seed, but the same each time
        for _ in engine.follow(rows):
            pass
        yield from rows


def audited(made, count, **options):
    """(the audit, answers until its first alarm, None without one)."""
    audit = Audit(made, 1.0)
    for number, row in enumerate(answers(made, count, **options), 1):
        done(audit, row)
        if audit.num_alarms:
            return audit, number
    return audit, None


def done(audit, *rows):
    for row in rows:
        audit.keep(row)
    while audit.step():
        pass


def planted(world, fault, share):
    """(a context with the fault, the engine's drafter and rule, how it is asked)."""
    if fault == "a draft accepted unread":
        return nullcontext(), {"rule": Accepting(share)}, {}
    options = {}
    if fault == "a mask that is not taken back":
        grammars = Grammars(world.tokenizer, 288, world.target.eos_token_ids)
        options["shape"] = lambda: grammars.json_schema(SHAPE)
    return rarely(*FAULTS[fault], share), {}, options


@pytest.mark.parametrize("share", [1.0, pytest.param(0.02, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", [*FAULTS, "a draft accepted unread"])
def test_a_fault_raises_the_alarm(world, fault, share):
    """Within 1,000 answers; share: of the calls that are broken."""
    share = max(share, 0.3) if "mask" in fault else share  # the next call takes it back
    plant, more, options = planted(world, fault, share)
    made = Engine(world.target, world.coupled(), max_batch=AT_ONCE, budget=False, **more)
    with plant:
        audit, number = audited(made, 1000 if share < 1 else 200, **options)
    assert number is not None
    assert audit.alarms[0]["verdict"] in ("mismatch", "impossible", "counts")


@pytest.mark.parametrize(("precision", "count"), [
    (None, 100), ("bfloat16", 50), ("int4", 50),
    *(pytest.param(precision, 4500, marks=pytest.mark.slow) for precision in (None, "bfloat16", "int4")),
])
def test_healthy_answers_raise_nothing(precision, count):
    world = World(precision=precision)
    for draft in (world.best(), world.coupled(), "prompt-lookup"):
        audit, number = audited(Engine(world.target, draft, max_batch=AT_ONCE), count // 3, seed=1)
        assert number is None, audit.alarms
        assert audit.tokens["same"] > 20 * (count // 3 - AT_ONCE)
        assert audit.tokens["mismatch"] == audit.tokens["impossible"] == 0
        assert audit.bad_of["reused"][0]
    if precision is None:
        assert audit.answers["near_tie"] == 0


def test_a_law_that_is_slightly_wrong_shows_in_the_counts(world):
    audit = Audit(Engine(world.target, "none", max_batch=AT_ONCE), 1.0)
    for row in answers(audit.engine, 160, asks=({"temperature": 1.5},)):
        row.params = SamplingParams(temperature=1.0)  # so it should have been drawn
        done(audit, row)
    assert {alarm["verdict"] for alarm in audit.alarms} == {"counts"}
    assert audit.p_value < 1.0


def test_what_waits_holds_tokens_and_not_what_was_told_of_them(world):
    audit = Audit(Engine(world.target, "none"), 1.0)
    row = audit.engine.add([5, 6, 7], SamplingParams(max_tokens=8, logprobs=4))
    for _ in audit.engine.follow([row]):
        pass
    audit.keep(row)
    assert len(row.logprobs) == row.num_new
    assert audit._waiting[0].logprobs == []


def test_answers_to_a_seed_that_was_given_do_not_count(world):
    """Whoever gives seeds can choose those that draw rare tokens, and would raise alarms at will."""
    audit = Audit(Engine(world.target, "none", max_batch=AT_ONCE), 1.0)
    for _ in range(20):
        asks = [SamplingParams(temperature=1.3, max_tokens=24, seed=seed) for seed in range(4)]
        rows = [audit.engine.add([5, 6, 7], ask) for ask in asks]
        for _ in audit.engine.follow(rows):
            pass
        done(audit, *rows)
    assert (audit.num_alarms, audit.window.tokens) == (0, 0)
    assert audit.answers["same"] == 80


@pytest.mark.parametrize(("params", "token", "noise", "verdict"), [
    ({}, 0, 0.0, "same"), ({}, 1, 0.3, "near_tie"), ({}, 1, 0.2, "mismatch"),
    ({"logit_bias": {1: float("-inf")}}, 1, 9.0, "impossible"),
    ({"temperature": 1.0}, 3, 0.0, "same"),
    ({"temperature": 1.0, "top_k": 1}, 1, 0.3, "near_tie"), ({"temperature": 1.0, "top_k": 1}, 1, 0.2, "impossible"),
    ({"temperature": 1.0, "top_p": 0.55}, 1, 0.02, "same"),  # the best one has 0.558
    ({"temperature": 1.0, "top_p": 0.55}, 1, 0.0, "impossible"),
    ({"temperature": 2.0, "min_p": 0.79}, 1, 0.02, "same"), ({"temperature": 2.0, "min_p": 0.79}, 1, 0.0, "impossible"),
])
def test_verdicts_at_the_borders(params, token, noise, verdict):
    """The best token of four lies 0.5 before the next, and far before the others."""
    logits, text = torch.tensor([[2.0, 1.5, 0.0, -1.0]]), np.array([0, token])
    assert judge(logits, SamplingParams(**params), text, 1, noise) == [verdict]


def test_prompts_in_pieces_of_any_width_raise_nothing():
    """A prompt's piece of more rows may run in another kernel, which rounds otherwise: here what follows a reused stem
    is read in a small one, and by the audit in a large one."""
    made = Engine(REPOSITORY / "models/demo", "none", dtype="bfloat16", exact=False, max_batch=AT_ONCE)
    audit, rng, noises = Audit(made, 1.0), np.random.default_rng(0), []
    stem = rng.integers(4, 1000, 150).tolist()
    for ask in ({"temperature": 0.0}, {"temperature": 1.0}):
        prompts = [stem[:20], *(stem + rng.integers(4, 1000, n).tolist() for n in (1, 5, 9, 14, 22, 31, 40))]
        for prompt in prompts:
            [row] = rows = [made.add(prompt, SamplingParams(**ask, max_tokens=24))]
            for _ in made.follow(rows):
                pass
            done(audit, row)
            noises.append(audit.noise)
    assert list(audit.alarms) == []
    assert audit.bad_of["reused"][0] > 6
    assert noises == sorted(noises)


def test_with_exact_logits_there_are_no_near_ties():
    world = World()
    world.target.make_exact()
    audit, number = audited(Engine(world.target, world.best(), max_batch=AT_ONCE), 32)
    assert (number, audit.noise, audit.answers["near_tie"]) == (None, 0.0, 0)


def test_it_computes_with_the_threads_of_the_engines_rounds(world, monkeypatch):
    made, seen = Engine(world.target, "none", threads=1), []
    rows, verify = [*answers(made, 8)], type(world.target).verify
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(type(world.target), "verify", lambda *a: seen.append(torch.get_num_threads()) or verify(*a))
        done(Audit(made, 1.0), rows[0])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert {*seen} == {1}


def test_the_newest_answers_wait_and_failed_ones_do_not(world):
    made = Engine(world.target, "none", max_batch=AT_ONCE)
    rows = [*answers(made, 16)]
    audit = Audit(made, 1.0, most=120)
    for row in rows:
        audit.keep(row)
    assert 60 < audit.backlog <= 120
    assert audit._waiting[-1].id == rows[-1].id
    rows[0].finish_reason = "error"
    for unread, share in ((rows[0], 1.0), (rows[1], 0.0)):
        audit = Audit(made, share)
        audit.keep(unread)
        assert not audit.step()


@pytest.mark.parametrize("texts", [False, True])
def test_the_alarm_repeats_the_request_and_its_text_only_if_asked(world, caplog, texts):
    audit = Audit(Engine(world.target, "none", max_batch=AT_ONCE), 1.0, texts=texts)
    row = next(answers(audit.engine, 1, asks=({"top_k": 3, "logit_bias": {5: 1.0}},)))
    row.new_tokens[4] = (row.new_tokens[4] + 1) % 288
    with caplog.at_level(logging.WARNING, "paceline.audit"):
        done(audit, row)
    [alarm] = audit.alarms
    assert (alarm["verdict"], alarm["token"], alarm["parameters"]["top_k"]) == ("mismatch", 4, 3)
    assert alarm["parameters"]["seed"] == row.noise.seed
    told = json.loads(caplog.messages[0].partition(": ")[2])
    assert (told.get("tokens") == row.new_tokens.tolist()) == ("logit_bias" in told["parameters"]) == texts


def test_a_request_waits_for_one_piece_at_most(monkeypatch):
    """It comes in the middle of an audit."""
    monkeypatch.setattr(module, "CHUNK", 8)
    made, order, inside, go_on = Engine(TableTarget(16), "none"), [], Event(), Event()
    worker, audit = Worker(made), Audit(made, 1.0)
    step = made.step

    def piece():
        if not audit.backlog and audit._work is None:
            return False
        order.append("audit")
        if order.count("audit") == 5:
            inside.set()
            assert go_on.wait(20)
        return audit.step()

    def round_():
        order.append("round")
        return step()

    made.step = round_
    worker.on_idle, worker.on_end = piece, lambda job: audit.keep(job.row)

    async def ask(length):
        job = worker.submit([1, 2, 3], SamplingParams(max_tokens=length), asyncio.get_running_loop())
        return [token async for delta in job for token in delta.tokens]

    async def both():
        await ask(60)
        await asyncio.to_thread(inside.wait, 20)
        asked = asyncio.create_task(ask(3))
        while worker._inbox.empty():
            await asyncio.sleep(0.001)
        go_on.set()
        await asked
        while audit.backlog or audit._work:
            await asyncio.sleep(0.001)

    asyncio.run(both())
    assert worker.stop()
    assert order[order.index("audit") :][:9] == ["audit"] * 5 + ["round"] * 3 + ["audit"]
    assert audit.answers["same"] == 2


def test_a_server_audits_what_it_may_keep(folder):
    with serving(live_engine(folder), audit=1.0) as address, httpx.Client(base_url=address, timeout=60) as client:
        asks = {"max_tokens": 6, "temperature": 0}
        for more in ({}, {"store": False}, {"stream": True}):
            assert client.post("/v1/completions", json={"prompt": "the cat", **asks, **more}).status_code == 200
        for store in ({}, {"store": False}):
            body = {"input": "a dog", "max_output_tokens": 4, **store}
            assert client.post("/v1/responses", json=body).status_code == 200
        until = time.monotonic() + 30
        while sum((told := client.get("/audit").json())["answers"].values()) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        told, page = client.get("/audit").json(), client.get("/metrics").text
    assert told["answers"] == {"same": 3, "near_tie": 0, "mismatch": 0, "impossible": 0}
    assert (told["alarms"], told["backlog_tokens"]) == ([], 0)
    for line in (
        'answers_total{verdict="same"} 3.0', 'tokens_total{verdict="mismatch"} 0.0', "alarms_total 0.0", "p_value 1.0",
        "backlog_tokens 0.0", "last_alarm_timestamp_seconds 0.0", "seconds_total",
    ):  # fmt: skip
        assert f"paceline:audit_{line}" in page
    with serving(live_engine(folder), api_keys=("k",), audit=0.5) as address:
        assert httpx.get(f"{address}/audit").status_code == 401
    with serving(live_engine(folder)) as address:
        assert httpx.get(f"{address}/audit").status_code == 404
