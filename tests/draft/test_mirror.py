"""`mirror`: windows drafted ahead are the windows that would have been drafted, and the answer is plain decoding's."""

import gc
import json
import multiprocessing
import os
import signal
import sys
from shutil import copytree
from threading import Thread
from time import sleep

import numpy as np
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.draft.methods import mirror
from paceline.draft.models import draft_worker
from paceline.draft.models.branches import Lookahead, Next
from paceline.draft.models.draft_worker import Closed, DraftWorker, Setup, facts_to_send
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.formats.heads.vocab import Vocabulary
from paceline.train.saving import save_vocabulary
from tests import models, native
from tests.asks import asked
from tests.draft.answered import target_and_close_draft
from tests.draft.drafting import drafter, like
from tests.fakes import TableTarget
from tests.pairs import paired

NEW = 14
TEXTS = ["the cat and the dog", "there was", "and then the little cat said: hello the cat", "a"]
GREEDY = SamplingParams(max_tokens=NEW)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a draft model that is nearly the same."""
    at = tmp_path_factory.mktemp("models")
    made = target_and_close_draft(at, 0.05)
    made["other"] = models.make("llama2", at / "other", **native.TINY)
    models.tokenizer(280).save_pretrained(made["other"])
    made["few"] = at / "few.safetensors"
    save_vocabulary(made["few"], Vocabulary(torch.arange(0, models.VOCAB_SIZE, 3)))
    return made


def answered(folders, spec, params=GREEDY, **options):
    engine = Engine(str(folders["target"]), spec.format(**folders), dtype="float32", device="cpu", **options)
    return engine, engine.generate(TEXTS, params)


@pytest.fixture(scope="module")
def alone(folders):
    return [done.tokens for done in answered(folders, "none")[1]]


LINE = "mirror:{close},where=line,"


@pytest.mark.parametrize(
    "options",
    [
        "candidates=0", "candidates=1", "candidates=3", "branches=5,stop=svip", "miss=empty",
        "source=early_exit", "source=early_exit,layer=1,candidates=40,draft=1", "source=early_exit,vocab={few}",
        "source=both,miss=empty", "stop=confidence",
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch", [3])
def test_writes_what_the_target_alone_writes(folders, alone, options, batch):
    _, out = answered(folders, LINE + options, max_batch=batch)
    assert [done.tokens for done in out] == alone
    assert sum(done.stats.draft_tokens for done in out) > 0


@pytest.mark.parametrize(
    ("options", "context"),
    paired(["candidates=2", "candidates=2,miss=empty", "source=early_exit", "candidates=0"], [15, 22, 30]),
)
def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_reads(folders, alone, options, context, tmp_path):
    """Some texts outgrow it, and one is longer from the beginning; nobody else suffers."""
    copytree(folders["close"], tmp_path / "short")
    config = tmp_path / "short" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": context}))
    spec = f"mirror:{tmp_path / 'short'},where=line,{options}"
    engine = Engine(str(folders["target"]), spec, dtype="float32", device="cpu", max_batch=3)
    model = engine.drafter.side.model.network
    usual = model.verify

    def verify(segments, *more):
        assert all(model.length(s.slot) + int(s.depth.max()) < model.max_context == context for s in segments)
        return usual(segments, *more)

    model.verify = verify
    out = engine.generate(TEXTS, GREEDY)
    assert [done.tokens for done in out] == alone
    assert sum(done.stats.draft_tokens for done in out) > 0


def test_a_window_drafted_ahead_is_the_one_that_would_have_been_drafted(folders):
    """Greedily every window equals a fresh one, so the rounds are the same, whatever was hit and missed."""
    for rule in ("stop=fixed", "stop=svip"):
        plainly = answered(folders, f"model:{{close}},{rule}")[1]
        engine, out = answered(folders, LINE + f"{rule},candidates=2")
        assert [done.stats.accepted for done in out] == [done.stats.accepted for done in plainly]
        assert [done.stats.drafted for done in out] == [done.stats.drafted for done in plainly]
        counts = engine.drafter.counts
        assert counts.hits
        assert counts.misses
        assert {0} <= {*counts.hits, *counts.misses} <= set(range(6)), "by how many of five tokens stood"
        assert 0 < engine.drafter.side.survival._trials[0, 1] <= counts.hits.total() + counts.misses.total()


def test_a_sampled_window_drafted_ahead_has_the_draws_of_the_round_that_verifies_it(folders):
    """So rounds are those of plain speculation seed for seed, whatever was hit and missed."""
    params = [SamplingParams(max_tokens=20, temperature=0.5, seed=seed, ignore_eos=True) for seed in range(len(TEXTS))]
    plainly = answered(folders, LINE + "candidates=0", params)[1]
    engine, out = answered(folders, LINE + "candidates=6", params)
    assert [done.tokens for done in out] == [done.tokens for done in plainly]
    assert [done.stats.accepted for done in out] == [done.stats.accepted for done in plainly]
    assert engine.drafter.counts.hits
    assert engine.drafter.counts.misses


def test_the_draft_has_the_noise_of_the_request(folders, monkeypatch):
    opened, usual = [], Lookahead.open
    monkeypatch.setattr(Lookahead, "open", lambda self, *row: (opened.append(row[2].seed), usual(self, *row)))
    seeds = range(len(TEXTS))
    each = [SamplingParams(max_tokens=2, temperature=1.0, seed=seed) for seed in seeds]
    answered(folders, LINE + "candidates=1", each)
    assert opened == [*seeds]


@pytest.mark.parametrize("source", ["draft", pytest.param("both", marks=pytest.mark.slow)])
def test_the_process_writes_the_same_and_its_death_leaves_plain_decoding(folders, alone, source, caplog):
    spec = f"mirror:{{close}},limit=60,source={source},candidates=3"
    engine, out = answered(folders, spec)
    try:
        assert [done.tokens for done in out] == alone
        assert engine.drafter.counts.hits
        warped = {"temperature": 0.8, "logit_bias": {5: 1.0}}
        params = [SamplingParams(max_tokens=NEW, seed=i, **warped) for i in range(len(TEXTS))]
        sampled = engine.generate(TEXTS, params)
        inline = answered(folders, LINE + f"source={source},candidates=3", params)[1]
        assert [done.tokens for done in sampled] == [done.tokens for done in inline]
        ends(engine, signal.SIGKILL, alone, caplog)
    finally:
        engine.drafter.close()


def ends(engine, how, alone, caplog):
    """Send a signal to the draft's process while answers are written: they stay the target's own."""
    process = engine.drafter.side.process
    Thread(target=lambda: (sleep(0.05), os.kill(process.pid, how))).start()
    for _ in range(40):
        assert [done.tokens for done in engine.generate(TEXTS, GREEDY)] == alone
        if engine.drafter.side is None:
            break
    assert "decoding goes on without drafts" in caplog.text
    assert [done.tokens for done in engine.generate(TEXTS, GREEDY)] == alone
    assert not process.is_alive()


@pytest.mark.slow
def test_a_process_that_hangs_leaves_plain_decoding(folders, alone, caplog):
    spec = "mirror:{close},limit=0.5"
    engine = Engine(str(folders["target"]), spec.format(**folders), dtype="float32", device="cpu")
    ends(engine, signal.SIGSTOP, alone, caplog)


def test_goes_quietly_when_the_interpreter_ends(monkeypatch):
    """The names of its module may be None by then."""
    drafter, seen = create("mirror:somewhere"), []
    drafter._resources.callback(seen.append, "closed")
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    for name in [name for name in vars(mirror) if not name.startswith("__")]:
        monkeypatch.setattr(mirror, name, None)
    del drafter
    gc.collect()
    monkeypatch.undo()
    assert seen == ["closed"]


# The draft's side ----------------------------------------------------------------------------------------------------


def test_after_a_hit_the_cache_is_that_of_a_fresh_reading(folders):
    """Keys and values of the committed tokens and of the window, against one forward over the same tokens."""
    target = Engine(str(folders["target"]), "none", dtype="float32", device="cpu").target
    drafter = create(f"model:{folders['close']},stop=fixed,draft=3")
    drafter.bind(target)
    ahead = Lookahead(drafter, num_candidates=3)
    ahead.open(7, list(range(5, 11)), SamplingParams(max_tokens=60, ignore_eos=True), 2048)
    new, seen = [12], 0
    for turn in range(8):
        with torch.inference_mode():
            (window,) = ahead.windows([Next(7, new)])
            ahead.look_ahead()
        state = ahead._states[7]
        keys = list(state.table)
        assert len(keys) == len(set(keys))
        assert all(a == len(window.tokens) or v != window.tokens[a] for a, v in keys)
        seen += bool(window.hit)
        a, v = keys[turn % len(keys)]
        new = [*window.tokens[:a], v]
        fresh = create(f"model:{folders['close']},stop=fixed,draft=3")
        fresh.bind(target)
        fresh.start(state.row)
        (tree,) = fresh.propose(asked(state.row))
        assert tree.tokens[1:].tolist() == window.tokens
        assert [top[0][0] for top in state.tops[: len(window.tokens)]] == window.tokens, "its own candidates"
        length = drafter.model.length(state.row)
        ours = drafter.model.network.cache.kv[:, :, drafter.model.slot(state.row), :, : length + 1 + len(window.tokens)]
        theirs = fresh.model.network.cache.kv[:, :, fresh.model.slot(state.row), :, : length + len(window.tokens)]
        torch.testing.assert_close(ours[..., : theirs.shape[3], :], theirs, atol=1e-4, rtol=1e-4)
    assert seen == 7


def test_of_a_window_that_another_drafters_draft_replaced_the_beginning_is_kept(folders):
    """What both have behind the first difference follows other tokens."""
    target = Engine(str(folders["target"]), "none", dtype="float32", device="cpu").target
    spec = f"model:{folders['close']},stop=fixed,draft=3"
    drafter, fresh = create(spec), create(spec)
    drafter.bind(target)
    fresh.bind(target)
    ahead = Lookahead(drafter, num_candidates=3)
    ahead.open(7, list(range(5, 11)), SamplingParams(max_tokens=60, ignore_eos=True), 2048)
    with torch.inference_mode():
        ((first, second, third),) = (window.tokens for window in ahead.windows([Next(7, [12])]))
        ahead.look_ahead()
        (window,) = ahead.windows([Next(7, [first, 5 + (second == 5), third, 9])])
    row = ahead._states[7].row
    fresh.start(row)
    (tree,) = fresh.propose(asked(row))
    assert (window.hit, window.tokens) == (None, tree.tokens[1:].tolist())
    caches = [one.model.network.cache.kv[:, :, one.model.slot(row), :, : len(row)] for one in (drafter, fresh)]
    torch.testing.assert_close(*caches, atol=1e-4, rtol=1e-4)


def test_branches_go_where_windows_end():
    """As many in all as `candidates` a position, and at most four times as many at one."""
    window, tops = [0, 0, 0], [[(v, 0.5**v) for v in range(40)]] * 4
    target = TableTarget(vocab_size=8)
    made = drafter(like(target))
    made.bind(target)
    ahead = Lookahead(made, num_candidates=3)
    for _ in range(400):
        ahead.survival.note_asked(len(window), len(window), 1, len(window))
    keys = ahead._outcomes(window, tops)
    assert len(keys) == len(set(keys)) == 12
    assert 6 < sum(a == 1 for a, _ in keys) <= 12


def test_branches_follow_what_a_row_that_is_there_may_go_on_from():
    """Also after a window without tokens; not after what ends the answer."""
    target = TableTarget(vocab_size=8)
    made = drafter(like(target), stop="fixed", draft=2)
    made.bind(target)
    ahead = Lookahead(made, num_candidates=8, fresh=False)
    for id in (1, 2):
        ahead.open(id, [1, 2, 3], SamplingParams(max_tokens=20, stop_token_ids=(5,)), 2048)
    first, _ = ahead.windows([Next(1, [4]), Next(2, [4])])
    ahead.drop(2)
    ahead.look_ahead()
    table = ahead._states[1].table
    assert {0, 1} <= {a for a, _ in table}
    assert not any(5 in (*first.tokens[:a], v) for a, v in table)
    table.clear()
    (window,) = ahead.windows([Next(1, [(first.tokens[0] + 1) % 8])])
    assert window.tokens == []
    ahead.look_ahead()
    assert {*ahead._states[1].table} == {(0, v) for v in range(8) if v != 5}


@pytest.fixture
def _forked(monkeypatch):
    """The draft's process is a copy of this one, which has imported all that it needs."""
    monkeypatch.setattr(draft_worker, "get_context", lambda how: multiprocessing.get_context("fork"))


LONG = np.random.default_rng(0).integers(4, models.VOCAB_SIZE, 1_000_000)
"""A prompt of 8 MB, more than a socket holds."""


def started(folders, drafter, **options):
    target = Engine(str(folders["target"]), "none", dtype="float32", device="cpu").target
    return DraftWorker(Setup(drafter, facts_to_send(target, target.device), {"num_candidates": 1}, **options))


@pytest.mark.usefixtures("_forked")
def test_the_process_takes_long_messages_and_answers_the_last_question_alone(folders):
    worker = started(folders, f"model:{folders['close']},stop=fixed")
    worker.open(1, [5, 6, 7], GREEDY, 2048)
    worker.open(2, LONG, GREEDY, 2_000_000)
    worker.drop(2)
    worker._send("windows", [Next(1, [])])  # nobody takes the answer
    (window,) = worker.windows([Next(1, [8])])
    assert window.id == 1
    assert len(window.tokens) == 5
    assert worker.windows([]) == []
    worker.close()
    assert not worker.process.is_alive()


@pytest.mark.usefixtures("_forked")
def test_a_process_that_hangs_is_waited_for_as_long_as_was_said(folders):
    """For what it sends, and for what it takes."""
    worker = started(folders, f"model:{folders['close']},stop=fixed", limit_s=0.2)
    os.kill(worker.process.pid, signal.SIGSTOP)
    with pytest.raises(Closed, match=r"^$"):
        worker.windows([])
    with pytest.raises(Closed):
        worker.open(1, LONG, GREEDY, 2048)
    worker.close()
    assert not worker.process.is_alive()


@pytest.mark.usefixtures("_forked")
def test_a_process_that_cannot_load_its_drafter_says_why(folders):
    with pytest.raises(Closed, match="there is no folder"):
        started(folders, "model:/nowhere")


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mirror:sam:{close}", "takes no checkpoint"),
        ("mirror:{close},where=line,source=early_exit,layer=99", "layer is 99"),
        ("mirror:model:{close},where=line,stop=heuristic", "stop is 'heuristic'"),
        ('mirror:"model:{other},tokenizer=tli",where=line', "a tokenizer of its own cannot draft ahead"),
        ("mirror", "needs a checkpoint"),
    ],
)
def test_what_cannot_be_mirrored(folders, spec, says):
    with pytest.raises(MethodError, match=says):
        Engine(str(folders["target"]), spec.format(**folders), dtype="float32", device="cpu")
