"""What every drafter of the registry must do, whatever it drafts with. What is special of a method is in its own file.

The oracle is transformers, one forward over the whole text for every token, without a cache and without our engine.
"""

import re
import shutil
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree
from paceline.draft.base import UNLIMITED, stamp
from paceline.draft.cost import Prices, Table
from paceline.draft.fallback import Fallback
from paceline.draft.methods.s2d import Sorted
from paceline.draft.models import states as of_states
from paceline.draft.registry import by_request, create, describe, names
from paceline.engine.budget import Budget
from paceline.engine.engine import Engine
from paceline.errors import MethodError, PacelineError
from paceline.formats.heads.vocab import Vocabulary
from paceline.target.cache import RaggedCache
from paceline.target.hf import HFTarget
from paceline.train.saving import save_vocabulary
from tests import drafters, models, native
from tests.asks import asked
from tests.draft.folders import SILENT, SPECS, Folders, specs
from tests.draft.test_grammar import NoRepeats
from tests.enumerated import texts
from tests.fakes import Restless
from tests.held import held
from tests.plain import decode
from tests.preempting import preempt_often

NEW = 8
GREEDY = SamplingParams(max_tokens=NEW)
SAMPLED = [SamplingParams(max_tokens=NEW, temperature=0.8, top_p=0.95, seed=seed) for seed in range(4)]
PENALISED = SamplingParams(max_tokens=NEW, repetition_penalty=1.3)
SAMPLED_PENALISED = [replace(one, repetition_penalty=1.1, top_k=40) for one in SAMPLED]

MODELS = ("model", "s2d", "kangaroo", "eagle", "eagle3", "dflash", "mtp")
"""They draft token by token: any stop rule, chains and trees."""
HEADS = ("medusa", "hydra", "amphista")
STATES = ("kangaroo", "eagle", "eagle3", "dflash", "mtp", *HEADS)
"""They read the target's states."""
EVERY = {
    **specs(),
    **{f"{name}, chain": f"{SPECS[name]},tree=0,stop=heuristic" for name in MODELS},
    **{f"{name}, tree": f"{SPECS[name]},tree=9,width=3,stop=fixed,draft=4" for name in MODELS},
    **{f"{name}, one node": f"{SPECS[name]},tree=1" for name in (*MODELS, *HEADS)},
    "eagle3, parallel": "eagle3:{peagle}",
    "eagle3, parallel chain": "eagle3:{peagle},tree=0,stop=svip",
    "s2d, mixed": "s2d:{model},exits=1,2,4,thresholds=0.3,0.2,stop=heuristic",
    "model, context": "model:{model},context=6",
    "model, tli": "model:{foreign},tokenizer=tli,stop=heuristic",
    "model, tli tree": "model:{foreign},tokenizer=tli,tree=9,width=3,context=9",
    "model, slem": "model:{foreign},tokenizer=slem,stop=heuristic",
    "model, slem context": "model:{foreign},tokenizer=slem,stop=confidence,context=6",
    "mirror, early exit": "mirror:{model},where=line,source=both,miss=empty",
    "prompt-lookup, transformers": "prompt-lookup,variant=transformers",
    "mtp, assistant": "mtp:{assistant}",
    "mtp, assistant, chain": "mtp:{assistant},tree=0,stop=heuristic",
    "mtp, assistant, tree": "mtp:{assistant},tree=9,width=3,stop=fixed,draft=4",
}
ROWS = {name: spec for name, spec in EVERY.items() if not name.endswith((", chain", ", one node"))}
"""Every way in which drafters keep what they know of a row: the other variants keep it as the method itself does."""


def kind(name):
    """The drafter's own name."""
    return name.partition(",")[0]


def is_quick(name, alone):
    """What keeps its rows as another does is left to the tests of rows below; so is what has weights, alone."""
    return name in ROWS and not (alone and kind(name) in SPECS)


ASSISTANT = "mtp, assistant"
REST = ("none", "suffix")
"""What requests may choose beside the drafter in question."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Targets whose layers count, so that a wrong key or value shows: a Llama, and a Gemma 4 for its assistant."""
    usual, gemma = (tmp_path_factory.mktemp(name) for name in ("drafters", "gemma"))
    return Folders(usual, share=0.25), Folders(gemma, share=0.25, family="gemma4", final_logit_softcapping=None)


@pytest.fixture
def folders(request, worlds):
    """The target for which the drafter of a test drafts."""
    name = request.node.callspec.params.get("name", "") if hasattr(request.node, "callspec") else ""
    return worlds[name.startswith(ASSISTANT)]


def made(folders, spec):
    drafter = create(spec.format_map(folders))
    if "tokenizer=" in spec:
        drafter.bind = lambda target, bind=drafter.bind: bind(folders.spoken)
    return drafter


def answered(folders, drafter, params, *, every=0, count=4, **options):
    """The engine, what it writes, and how many tokens were drafted; the request brings what some drafters want.

    every  rows are preempted in one of so many rounds; 0: in none. count: so many prompts."""
    each = [params] * len(folders.prompts) if isinstance(params, SamplingParams) else params
    each = [replace(one, prediction=tuple(a.tokens)) for one, a in zip(each, folders.answers(params), strict=True)]
    engine = Engine(folders.target, drafter, **options)
    out = (preempt_often(engine, every) if every else engine).generate(folders.prompts[:count], each[:count])
    return engine, [done.tokens for done in out], sum(done.stats.draft_tokens for done in out)


def expected(folders, params):
    return [answer.tokens for answer in folders.answers(params)]


def proposed(engine):
    """The trees that the engine's drafter will propose."""
    trees, usual = list[DraftTree](), engine.drafter.propose
    engine.drafter.propose = lambda rows: trees.extend(made := usual(rows)) or made
    return trees


# Losslessness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        pytest.param(name, alone, marks=[] if is_quick(name, alone) else [pytest.mark.slow])
        for name in EVERY for alone in (False, True)
    ],
)  # fmt: skip
def test_greedy_text_is_the_targets_in_any_batch(folders, name, alone):
    """Alone, and with rows joining and leaving and prompts in pieces."""
    params, batch, chunk = (replace(GREEDY, max_tokens=12), 1, 512) if alone else (PENALISED, 3, 8)
    drafter = made(folders, EVERY[name])
    _, tokens, drafted = answered(folders, drafter, params, max_batch=batch, prefill_chunk=chunk)
    assert tokens == expected(folders, params)
    may_copy = alone or (drafter.weight_bytes and kind(name) != "sam")  # which copies first
    assert drafted > 0 or not may_copy or name in (*SILENT, "past-answer")  # that has seen no answer yet


@pytest.mark.parametrize("name", [*SPECS, *(f"{name}, tree" for name in MODELS), "auto", "sam", ASSISTANT])
def test_greedy_text_is_the_targets_however_prices_change(folders, name):
    """Drafts are cut, or not asked for, by a clock that goes at random."""
    engine = Engine(folders.target, made(folders, EVERY[name]), max_batch=2)
    engine.budget = Budget(now=Restless())
    params = replace(GREEDY, max_tokens=12)
    assert [done.tokens for done in engine.generate(folders.prompts, params)] == expected(folders, params)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        pytest.param(name, alone, marks=[] if is_quick(name, alone) else [pytest.mark.slow])
        for name in EVERY for alone in (False, True)
    ],
)  # fmt: skip
def test_a_seed_gives_the_text_of_plain_decoding(folders, name, alone):
    """Some rows are preempted, and run again."""
    params, drafter = SAMPLED[:2] + SAMPLED_PENALISED[2:], made(folders, EVERY[name])
    batch = {"max_batch": 1} if alone else {"every": 2, "max_batch": 3}
    assert answered(folders, drafter, params, **batch)[1] == expected(folders, params)


@pytest.mark.parametrize("name", [*SPECS, *(f"{name}, tree" for name in MODELS), "auto", "sam", ASSISTANT])
def test_a_seed_gives_it_however_prices_change(folders, name):
    engine = Engine(folders.target, made(folders, EVERY[name]), max_batch=2)
    engine.budget = Budget(now=Restless())
    assert [done.tokens for done in engine.generate(folders.prompts, SAMPLED)] == expected(folders, SAMPLED)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A target of five tokens, for which some drafts are wrong."""
    return Folders(tmp_path_factory.mktemp("few"), share=0.7, sureness=1, vocab_size=5, seed=3, **native.TINY)


WAYS = {
    **dict.fromkeys(
        ("eagle", "eagle3", "mtp"), ("tree=0,stop=fixed", "tree=3,width=2", "tree=0,stop=fixed,vocab={two}")
    ),
    "kangaroo": ("threshold=0", "threshold=0.5", "threshold=1"),
    "model": ("tree=0,stop=heuristic", "tree=0,stop=svip,threshold=0.3", "tree=0,stop=fixed,vocab={two}"),
    "s2d": ("stop=fixed", "stop=fixed,tree=4,width=2"),
    "dflash": ("tree=0,stop=fixed", "tree=0,threshold=0.4", "tree=3,width=2"),
    "dflash2": ("tree=0,stop=fixed", "tree=0,stop=svip", "tree=3,width=3"),
    "peagle": ("tree=0,stop=fixed", "tree=0,stop=svip,threshold=0.4", "tree=3,width=2"),
    **dict.fromkeys(("medusa", "hydra", "amphista"), ("tree=6", "tree=4,vocab={two}")),
}


@cache
def plainly(few, grammar):
    return texts(few.target, create("none"), [1, 3, 2], 4, grammar)


@pytest.mark.parametrize(("name", "options"), [(name, one) for name, each in WAYS.items() for one in each])
@pytest.mark.parametrize("grammar", [None, NoRepeats()], ids=["free", "grammar"])
def test_many_seeds_give_plain_decodings_texts(few, name, options, grammar):
    save_vocabulary(two := few.folder / "two.safetensors", Vocabulary(torch.tensor([1, 4])))
    exits = ",exits=1,2,4,thresholds=0.4,0.45" if name == "s2d" else ""
    kind, folder = {**SPECS, "dflash2": "dflash:{dflash2}", "peagle": "eagle3:{peagle}"}[name].split("{")
    depth = "" if name in ("medusa", "hydra", "amphista") else "draft=2,"
    drafter = create(f"{kind}{few[folder.split('}')[0]]},{depth}{options.format(two=two)}{exits}")
    assert texts(few.target, drafter, [1, 3, 2], 4, grammar) == plainly(few, grammar)
    if isinstance(drafter, Sorted):
        assert sum(section.exits_taken > 0 for section in drafter.sections) > 1, "tokens leave at several exits"


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    """Targets whose layers add nothing: their next token depends on the last one alone."""
    usual, gemma = (tmp_path_factory.mktemp(name) for name in ("knowing", "gemma"))
    other = Folders(gemma, share=0.0, sureness=1, family="gemma4", final_logit_softcapping=None)
    return Folders(usual, share=0.0, sureness=1), other


@pytest.mark.parametrize("name", ["model", "kangaroo", "eagle", "eagle3", "mtp", ASSISTANT])
@pytest.mark.parametrize(("options", "deep"), [("tree=0,draft=3", 3), ("tree=6,width=2,draft=2", 2)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_knows_everything_is_accepted_whole(knowing, name, options, deep, temperature):
    """At a temperature, too: it has the target's noise, each token at its place."""
    if temperature and name == "eagle":
        pytest.skip("its best token is the target's, and its distribution is not")
    folders = knowing[name == ASSISTANT]
    engine = Engine(folders.target, made(folders, f"{EVERY[name]},stop=fixed,{options}"), budget=False)
    wish = SamplingParams(max_tokens=1 + 3 * (deep + 1), ignore_eos=True, temperature=temperature, seed=4)
    engine.add(folders.prompts[0], wish)
    rounds = []
    while engine.has_work:
        rounds += [len(delta.tokens) for delta in engine.step()]
    assert rounds == [1] + [deep + 1] * 3


@pytest.mark.parametrize("name", STATES)
def test_a_target_that_transformers_runs_is_drafted_for_by_heads_without_layers_of_its_kind(folders, name):
    target, drafter = HFTarget(folders.model, eos_token_ids=(models.EOS,)), made(folders, SPECS[name])
    if name in ("kangaroo", "mtp", "amphista"):
        with pytest.raises(MethodError, match=r"runs in transformers: it needs a model of a family that .*[^\n]$"):
            Engine(target, drafter)
        return
    out = Engine(target, drafter).generate(folders.prompts[:2], GREEDY)
    assert [done.tokens for done in out] == expected(folders, GREEDY)[:2]
    assert sum(done.stats.draft_tokens for done in out) > 0


# Rows ----------------------------------------------------------------------------------------------------------------


class Watching(Fallback):
    """Checks every tree of a drafter against its row."""

    def __init__(self, inner):
        super().__init__([inner])
        self.inner, self.drafted = inner, set[int]()

    def propose(self, asks):
        trees = stamp(self.inner.propose(asks), self.inner)
        assert len(trees) == len(asks)
        for (row, most), tree in zip(asks, trees, strict=True):
            assert tree.tokens[0] == row.last_token
            assert tree.max_depth <= max(most, 0), "no deeper than the row has room for"
            assert not tree.num_drafted or tree.source
            inner_nodes = set(tree.parent.tolist()) - {-1, 0}
            if self.inner.weight_bytes:
                assert not any(int(tree.tokens[node]) in row.ends for node in inner_nodes), "nothing after an end"
            self.drafted |= set(tree.tokens[1:].tolist())
        return trees


@pytest.mark.parametrize("name", EVERY)
def test_drafts_fit_the_row_whatever_ends_it(folders, name):
    """Budgets that end inside a draft, end tokens inside one, and the end of the context."""
    watching = Watching(made(folders, EVERY[name]))
    free = folders.answers(replace(GREEDY, ignore_eos=True))
    end = max({t for one in free for t in one.tokens[2:]}, key=lambda t: sum(t in one.tokens for one in free))
    params = [SamplingParams(max_tokens=budget, stop_token_ids=(end,)) for budget in (5, 1, 2, 5)]
    assert "stop" in [one.finish_reason for one in folders.answers(params)]
    assert answered(folders, watching, params)[1] == expected(folders, params)
    long, params, alone = folders.long
    out = Engine(folders.target, watching).generate(long, params)
    assert [(done.tokens, done.finish_reason) for done in out] == [(one.tokens, one.finish_reason) for one in alone]
    assert out[0].finish_reason == "context"


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_preempted_are_run_again(folders, name):
    """Of drafters whose rows are not preempted above."""
    assert answered(folders, made(folders, EVERY[name]), GREEDY, every=2, max_batch=3)[1] == expected(folders, GREEDY)


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_another_drafter_drafted_meanwhile(folders, name, monkeypatch):
    """Alone, and in a batch where what waits for a head is read in small pieces."""
    right = expected(folders, GREEDY)
    answers = {tuple(prompt): [*prompt, *one] for prompt, one in zip(folders.prompts, right, strict=True)}
    for batch, chunk, prompts in ((1, of_states.CHUNK, 2), (3, 3, 4)):
        monkeypatch.setattr(of_states, "CHUNK", chunk)
        both = Fallback([drafters.Idle(answers, error=0.3, branches=1), made(folders, EVERY[name])])
        _, tokens, _ = answered(folders, both, GREEDY, count=prompts, max_batch=batch, prefill_chunk=8)
        assert tokens == right[:prompts]


OFFERED = {
    **specs(),
    "mirror, early exit": EVERY["mirror, early exit"],
    "inside auto": "auto:sam|kangaroo:{kangaroo}",
    "after another": "sam+eagle3:{eagle3}",
    ASSISTANT: EVERY[ASSISTANT],
}


@cache
def beside(folders):
    """Requests that choose another drafter, and what each gets alone."""
    drawn = SamplingParams(max_tokens=NEW, temperature=1.0)
    others = [replace(drawn, seed=seed, draft=draft) for seed in (1, 2) for draft in REST]
    return others, [Engine(folders.target).generate(folders.prompts[:1], one)[0].tokens for one in others]


@pytest.mark.parametrize("name", OFFERED)
def test_a_drafter_that_requests_may_choose_is_nothing_to_those_that_do_not(folders, name):
    """Beside it others get the samples that they get alone, and reuse prompts, its own among them."""
    spec, prompt = OFFERED[name].format_map(folders), folders.prompts[0]
    others, alone = beside(folders)
    engine = Engine(folders.target, by_request([*REST, spec]))
    assert engine.rule.lossless
    for _ in range(2):
        mine, *theirs = engine.generate([prompt] * (1 + len(others)), [replace(GREEDY, draft=spec), *others])
        assert mine.tokens == expected(folders, GREEDY)[0]
        assert [done.tokens for done in theirs] == alone
        assert {done.reused for done in theirs} == {len(prompt) - 1}


@cache
def second_turn(folders, text):
    return decode(folders.model, text, GREEDY, eos=(models.EOS,)).tokens


@pytest.mark.parametrize("name", [*STATES, "inside auto", "after another", ASSISTANT])
def test_prompts_are_reused_with_the_states_that_a_head_reads(folders, name):
    """It drafts as if it had seen them run: of a prompt that runs, and of an answer that has ended."""
    drafted = []
    for reuse in (False, True):
        engine, wish = Engine(folders.target, made(folders, OFFERED[name]), reuse=reuse, max_batch=3), GREEDY
        first = engine.generate([folders.prompts[0]] * 2, wish)
        turn = [*folders.prompts[0], *first[0].tokens, *folders.prompts[3]]
        every = [*first, *engine.generate([turn], wish)]
        assert every[2].tokens == second_turn(folders, tuple(turn))
        assert [done.reused > 0 for done in every] == [False, reuse, reuse]
        drafted.append([(done.tokens, done.stats.accepted) for done in every])
    assert drafted[0] == drafted[1] or name == "inside auto"  # which learns


@pytest.mark.parametrize(
    "name", [*SPECS, *(f"{name}, tree" for name in MODELS), "model, tli", "model, slem", ASSISTANT]
)
def test_rows_that_have_left_leave_nothing_behind(folders, name):
    drafter = made(folders, EVERY[name])
    engine, first, _ = answered(folders, drafter, GREEDY, max_batch=3)
    after = held(drafter)
    engine.add(folders.prompts[0], GREEDY)
    engine.step()
    during = held(drafter)
    for row in list(engine.rows):
        engine.abort(row)
    while engine.has_work:
        engine.step()
    second = [done.tokens for done in engine.generate(folders.prompts, GREEDY)]
    assert first == second
    assert held(drafter) == after
    assert during > after or name == "rest", "the test sees what is held of a row"


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("rest", "medusa")])
@pytest.mark.parametrize("fails", [1, 2])
def test_a_row_that_found_no_memory_to_start_is_dropped(folders, name, fails, monkeypatch):
    """The drafter's first or second cache has none; afterwards it holds nothing, and rows can start again."""
    drafter = made(folders, SPECS[name])
    drafter.bind(folders.target)
    row = Row(0, folders.prompts[0], GREEDY, max_context=models.MAX_CONTEXT)
    usual, calls = RaggedCache.add_row, count(1)

    def failing(cache, expected_length):
        if next(calls) == fails:
            raise MemoryError
        return usual(cache, expected_length)

    before = held(drafter)
    with monkeypatch.context() as patched:
        patched.setattr(RaggedCache, "add_row", failing)
        with suppress(MemoryError):
            drafter.start(row)
    drafter.drop(row)
    assert held(drafter) == before
    drafter.start(row)
    drafter.drop(row)


@pytest.mark.parametrize("name", [*STATES, *(f"{name}, tree" for name in STATES if name in MODELS)])
def test_after_every_round_a_head_holds_what_a_fresh_reading_gives(folders, name):
    """Keys, values and states that wait are those of the target's own states, whoever drafted."""
    right = expected(folders, GREEDY)
    answers = {tuple(prompt): [*prompt, *one] for prompt, one in zip(folders.prompts, right, strict=True)}
    drafter, fresh, target = made(folders, EVERY[name]), made(folders, EVERY[name]), native.of(folders.model)
    fresh.bind(target)
    engine = Engine(folders.target, Fallback([drafters.Idle(answers, error=0.3, branches=1), drafter]), max_batch=2)
    for prompt in folders.prompts[:3]:
        engine.add(prompt, GREEDY)
    checked = 0
    while engine.has_work:
        engine.step()
        held, own = drafter.model.pending, fresh.model.pending
        for row in engine.rows:
            text, count = row.tokens[:-1], held.cached(row)
            slot, other = target.add_row(len(text)), Row(0, row.tokens, GREEDY, max_context=models.MAX_CONTEXT)
            verdict = target.verify([Segment.chunk(slot, text, last=False)], fresh.needs)
            kv = target.cache.kv[:, :, slot, :, : len(text)]
            torch.testing.assert_close(engine.target.cache.kv[:, :, row.slot, :, : len(text)], kv, atol=1e-4, rtol=1e-4)
            states = torch.cat([verdict.hidden[layer] for layer in own.layers], -1)
            torch.testing.assert_close(held.of(row), states[count:], atol=1e-4, rtol=1e-4)
            own.start(other)
            if count:
                own.read([other], [states[:count]])
                mine, theirs = (
                    part.cache.kv[:, :, part.slot(of), :, :count] for part, of in ((held, row), (own, other))
                )
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
                checked += 1
            own.drop(other)
            target.drop_row(slot)
    assert checked >= 6


@pytest.mark.parametrize("tree", ["tree=0", "tree=9,width=3"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_a_drafted_token_reads_what_the_head_made_of_the_one_before(folders, name, tree):
    drafter = made(folders, f"{SPECS[name]},{tree},stop=fixed,draft=4")
    engine = Engine(folders.target, drafter)
    network, checked = drafter.model.network, 0
    forward, read, wrote = network.forward, list[torch.Tensor](), list[torch.Tensor]()

    def watched(embedded, features, segments):
        nonlocal checked
        (segment,), out = segments, forward(embedded, features, segments)
        if not segment.start:
            read.clear()
            wrote.clear()
        read.extend(features)
        wrote.extend(out[0])
        for node in range(segment.start, len(segment.tokens)) if segment.start else ():
            assert torch.equal(read[node], wrote[segment.parent[node]])
            checked += 1
        return out

    network.forward = watched
    engine.generate(folders.prompts[:1], GREEDY)
    assert checked > 10


@pytest.mark.parametrize("name", [name for name in STATES if name != "kangaroo"])
def test_nothing_is_drafted_of_a_text_that_the_target_has_not_run(folders, name):
    drafter = made(folders, EVERY[name])
    drafter.bind(folders.target)
    row = Row(0, folders.prompts[0], GREEDY, max_context=models.MAX_CONTEXT)
    drafter.start(row)
    assert not drafter.propose(asked(row))[0].num_drafted


@pytest.mark.parametrize("name", STATES)
def test_text_that_a_head_reads_in_pieces_is_drafted_for_alike(folders, name, monkeypatch):
    """No drafted token depends on the pieces in which prompt and states were read."""
    rounds = []
    for chunk, prefill in ((of_states.CHUNK, 512), (7, 16)):
        monkeypatch.setattr(of_states, "CHUNK", chunk)
        engine = Engine(folders.target, made(folders, EVERY[name]), prefill_chunk=prefill)
        rounds.append([done.stats.accepted for done in engine.generate(folders.prompts, GREEDY)])
    assert rounds[0] == rounds[1]


RENEWED = {
    **{name: SPECS[name] for name in (*STATES, "model", "s2d", "mirror")},
    "mirror, early exit": EVERY["mirror, early exit"],
    "one after another": "kangaroo:{kangaroo},threshold=0.9+medusa:{medusa}",
    "inside auto": "auto:kangaroo:{kangaroo}",
    ASSISTANT: EVERY[ASSISTANT],
}


@cache
def renewed(folders):
    """The target with other weights, and what it says."""
    changed = deepcopy(folders.model)
    with torch.no_grad():
        for weight in changed.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return changed, [decode(changed, prompt, GREEDY, eos=(models.EOS,)).tokens for prompt in folders.prompts]


@pytest.mark.parametrize("name", RENEWED)
def test_with_new_weights_a_drafter_drafts_as_one_that_never_had_others(folders, name):
    """What reads the target's states, its embedding or its head reads the new ones."""
    (changed, plain), engines, drafted = renewed(folders), [], []
    for target in (folders.target, native.of(changed)):
        drafter = made(folders, RENEWED[name])
        target.weights_fingerprint, known = "", target.weights_fingerprint
        engines.append(Engine(target, drafter))
        target.weights_fingerprint = known
    engines[0].generate(folders.prompts, GREEDY)
    engines[0].with_weights_of(native.of(changed))
    assert engines[0].target.weights_fingerprint
    for engine in engines:
        trees = proposed(engine)
        assert [done.tokens for done in engine.generate(folders.prompts, GREEDY)] == plain
        drafted.append([tree.tokens[1:].tolist() for tree in trees])
    assert any(drafted[0])
    if name != "inside auto":  # which has learnt
        assert drafted[0] == drafted[1]


# What it learns ------------------------------------------------------------------------------------------------------

PAST = {name for name in names() if any(option.name == "past" for option in describe(name).options)}
TAUGHT = {
    name: f"{spec},past=4000" if kind(name) in PAST and ">" not in spec else spec for name, spec in ROWS.items()
} | {"three": "sam,past=4000+suffix,past=4000+recycling"}
"""Those with `past` or a matrix learn from requests."""


@pytest.mark.parametrize("name", [name for name in TAUGHT if name not in (*SILENT, "auto")])  # auto times rounds
def test_what_the_requests_of_one_client_teach_is_nothing_to_another(folders, name):
    """Another one that asks the same is drafted for as if it came first; the same one is not if a drafter learns."""
    drafted = {}
    for before in ("nobody", "another", "itself"):
        engine = Engine(folders.target, made(folders, TAUGHT[name]), budget=False)
        if before != "nobody":
            engine.generate(folders.prompts, replace(GREEDY, cache_salt=before))
        trees = proposed(engine)
        engine.generate(folders.prompts, replace(GREEDY, cache_salt="itself"))
        drafted[before] = [(tree.tokens.tolist(), tree.parent.tolist()) for tree in trees]
    assert drafted["another"] == drafted["nobody"]
    learns = any(word in TAUGHT[name] for word in ("past", "recycling"))
    assert (drafted["itself"] != drafted["nobody"]) == learns


# Options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MODELS, *HEADS])
def test_with_a_small_vocabulary_nothing_else_is_drafted(folders, name, tmp_path):
    keep = torch.from_numpy(np.unique(np.concatenate(expected(folders, GREEDY)))[::2].astype(np.int64))
    save_vocabulary(tmp_path / "few.safetensors", Vocabulary(keep))
    variants = ["tree=6", "tree=0,stop=fixed"] if name in MODELS else ["tree=6"]
    for options in variants:
        spec = f"{SPECS[name]},{options},vocab={tmp_path / 'few.safetensors'}"
        watching = Watching(made(folders, spec))
        assert answered(folders, watching, GREEDY)[1] == expected(folders, GREEDY)
        assert watching.drafted
        assert watching.drafted <= set(keep.tolist())
        whole = made(folders, SPECS[name])
        whole.bind(folders.target)
        assert watching.inner.weight_bytes < whole.weight_bytes
        if name in HEADS:
            few, every = (set(one.model.outputs) for one in (watching.inner, whole))
            assert len(few) == len(every), "an output head that heads share stays one"


@pytest.mark.parametrize("name", names())
def test_wrong_specs_are_refused_in_one_line(folders, name):
    info = describe(name)
    checkpoint = f":{folders[SPECS[name].split('{')[1].split('}')[0]]}" if name in SPECS else ""
    wrong = [(f"{name}{checkpoint},no_such_option=1", f"{name} has no option 'no_such_option'")]
    if info.checkpoint == "required":
        wrong.append((name, f"{name} needs a checkpoint: write {name}:PATH"))
    elif info.checkpoint == "no":
        wrong.append((f"{name}:somewhere", f"{name} takes no checkpoint"))
    for option in info.options:
        spec = f"{name}{checkpoint},{option.name}"
        if option.choices and "str" not in option.type and "int" not in option.type:
            wrong.append((f"{spec}=unheard-of", f"{name}: {option.name} is 'unheard-of'; it must be"))
        elif option.type == "int":
            wrong.append((f"{spec}=many", f"{name}: {option.name} is 'many'; it must be a whole number"))
            wrong.append((f"{spec}=-7", f"{option.name} is -7"))
        elif option.type == "bool":
            wrong.append((f"{spec}=perhaps", f"{name}: {option.name} is 'perhaps'; it must be true or false"))
    for spec, says in wrong:
        with pytest.raises(MethodError) as error:
            create(spec).bind(folders.target)
        assert says in str(error.value), spec
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", SPECS)
def test_a_checkpoint_that_is_not_there_or_of_another_target_is_refused_in_one_line(folders, name):
    other = native.of(models.model("llama2", hidden_size=48, num_attention_heads=4, head_dim=12, seed=9))
    cases = [(SPECS[name].replace("{", "/nowhere/{"), folders.target)]
    if name in STATES:
        cases.append((SPECS[name], other))
    for spec, target in cases:
        with pytest.raises(PacelineError) as error:
            made(folders, spec).bind(target)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in SPECS if name != "rest"])
def test_a_damaged_checkpoint_is_refused_in_one_line(folders, name, tmp_path):
    """The line names the tensor that is missing or has another shape."""
    key = SPECS[name].partition("{")[2].partition("}")[0]
    file = Path(shutil.copytree(folders[key], tmp_path / "damaged")) / "model.safetensors"
    whole, weights = file.read_bytes(), load_file(file)
    (tensor,) = [n for n, t in weights.items() if t.ndim == 2 and not re.search("embed|head|markov|confidence", n)][-1:]
    narrow = {tensor: weights[tensor][:, :-1].contiguous()}
    for data, words in (
        (whole[:-100], ["cut off or damaged"]),
        (save({n: t for n, t in weights.items() if n != tensor}, {"format": "pt"}), [tensor.split(".")[-2]]),
        (save(weights | narrow, {"format": "pt"}), [tensor.split(".")[-2], " where "]),
    ):
        file.write_bytes(data)
        with pytest.raises(PacelineError) as error:
            create(SPECS[name].format_map({key: file.parent})).bind(folders.target)
        assert all(word in str(error.value) for word in words), error.value
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", SPECS)
def test_a_drafter_with_weights_says_how_many_bytes_a_forward_reads(folders, name):
    drafter = made(folders, SPECS[name])
    drafter.bind(folders.target)
    assert (0 < drafter.weight_bytes <= folders.target.weight_bytes * 2) == (name != "rest")


@pytest.mark.parametrize("name", STATES)
def test_heads_in_blocks_of_fewer_bits_read_less(folders, name):
    whole = made(folders, SPECS[name])
    whole.bind(folders.target)
    read = [whole.weight_bytes]
    for dtype in ("int8", "int4"):
        blocks = made(folders, f"{SPECS[name]},dtype={dtype}")
        blocks.bind(folders.target)
        read.append(blocks.weight_bytes)
    assert answered(folders, blocks, GREEDY)[1] == expected(folders, GREEDY)
    assert sorted(read, reverse=True) == read
    assert len(set(read)) == 3


# Inside auto ---------------------------------------------------------------------------------------------------------

WITHIN = {name: spec.replace(",", ";") for name, spec in specs().items() if name != "auto"} | {
    "kangaroo, trees": "kangaroo:{kangaroo};tree=9;width=3",
    "kangaroo, after sam": "sam|kangaroo:{kangaroo}",
}


@pytest.mark.parametrize("name", WITHIN)
def test_inside_auto_a_drafter_is_asked_and_changes_no_answer(folders, name):
    auto, drafted = made(folders, f"auto:{WITHIN[name]}"), 0
    params = replace(GREEDY, ignore_eos=True, max_tokens=12)
    for given in (True, False, True):  # some remember the first time
        engine = Engine(folders.target, auto, max_batch=3)
        engine.budget = Budget(Table(Prices({"fixed": 1e-3, "node": 5e-5}), {})) if given else UNLIMITED
        wishes = [replace(params, prediction=tuple(answer)) for answer in expected(folders, params)]
        out = engine.generate(folders.prompts, wishes)
        assert [done.tokens for done in out] == expected(folders, params)
        drafted += sum(done.stats.draft_tokens for done in out)
    assert drafted or name in SILENT
