"""The loop of drafters that have a model: lossless whatever the rule, and just the drafts that rules and rooms say."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import models, native
from tests.asks import asked
from tests.draft.answered import disturbed
from tests.draft.drafting import SPECS, DraftTable, OnModel, Replaying, drafter, like, positions
from tests.draft.prompts import PROMPTS, plain
from tests.fakes import TableTarget
from tests.lossless_enumeration import largest_difference, speculative
from tests.lossless_enumeration import plain as plainly
from tests.pairs import paired

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.draft.base import UNLIMITED, Allowance, Unlimited
from paceline.draft.fallback import Fallback
from paceline.draft.likeliest import Likeliest
from paceline.draft.models.draft_model import Draft as Growing
from paceline.draft.models.proposers import Growth
from paceline.draft.models.stop import Svip
from paceline.engine.engine import Engine

GREEDY = SamplingParams(max_tokens=40)


def answers(target, made, params=GREEDY, prompts=PROMPTS, **options):
    return Engine(target, made, **options).generate(prompts, params)


def tokens(out):
    return [(one.tokens, one.finish_reason) for one in out]


# Lossless ------------------------------------------------------------------------------------------------------------


SMALL = {"vocab_size": 3, "order": 1, "scale": 1.5}


def exact(draft, target, params, max_tokens=3):
    """Largest difference of the probability of any answer from plain decoding's."""
    law = speculative(target, [1], params, draft, max_tokens)
    return largest_difference(law, plainly(target, [1], params, max_tokens))


WAYS = {
    "fixed": {"stop": "fixed", "draft": 3},
    "confidence": {"stop": "confidence", "threshold": 0.45},
    "svip, stops early": {"stop": "svip", "threshold": 0.3},
    "svip, stops late": {"stop": "svip", "threshold": 0.43},
    "heuristic": {"stop": "heuristic"},
    "tree": {"stop": "fixed", "tree": 4, "width": 2, "draft": 2},
    "reads one token": {"stop": "fixed", "draft": 3, "context": 1},
}
WARPED = {
    "as it is": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.7, top_k=2, top_p=0.95),
    "penalised": SamplingParams(temperature=1.3, repetition_penalty=1.4),
}


@pytest.mark.parametrize(
    ("kind", "warped"),
    [
        *((kind, "as it is") for kind in WAYS),
        *((kind, "filtered") for kind in ("fixed", "heuristic", "tree")),
        ("svip, stops late", "penalised"),
    ],
)
def test_every_answer_has_the_targets_probability(kind, warped):
    """By enumeration of all noise: nothing is left to chance, the last token included."""
    target, params = TableTarget(seed=3, **SMALL), WARPED[warped]
    made = drafter(like(target, 1.0), **WAYS[kind])
    assert exact(Replaying(made, target, params), target, params) < 1e-9


# A perfect draft -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.4}], ids=str)
@pytest.mark.parametrize("options", [{"stop": "fixed"}, {"stop": "fixed", "draft": 3}, {"stop": "svip"}])
def test_the_target_as_its_own_draft_is_accepted_whole(options, wish):
    """With a penalty, too: drafted tokens count among those that are repeated."""
    target = TableTarget(vocab_size=8, order=2, seed=4)
    params = SamplingParams(max_tokens=60, seed=1, **wish)
    for done in answers(target, drafter(like(target, 0.0), **options), params, PROMPTS[1:]):
        rejected = done.stats.draft_tokens - sum(n * count for n, count in enumerate(done.stats.accepted))
        assert rejected == 0
        if options["stop"] == "fixed":  # the first token comes with the prompt, a round brings one more than is drafted
            assert done.rounds == 1 + math.ceil(59 / (1 + options.get("draft", 5)))


# Where a draft ends --------------------------------------------------------------------------------------------------

SURE = np.array([9.0, 0.0, 0.0, 0.0, 0.0, 0.0])
UNSURE = np.zeros(6)


def propose(made, prompt, params=GREEDY, **target):
    made.bind(TableTarget(vocab_size=6, **target))
    row = Row(0, prompt, params, max_context=4096, eos_token_ids=target.get("eos", ()))
    made.start(row)
    (tree,) = made.propose(asked(row))
    return tree


@pytest.mark.parametrize("spike", range(1, 6))
def test_the_uncertain_token_is_the_last_and_stays(spike):
    """Entropy rises at the `spike`th drafted token: that many are drafted, the first in any case."""
    prompt = [1, 2, 3]
    table = DraftTable(6, order=None, logits=positions({len(prompt) + spike - 1: UNSURE}, SURE))
    for rule in ("svip", "confidence"):
        assert propose(drafter(table, stop=rule), prompt).num_drafted == spike
    assert propose(drafter(table, stop="svip", draft=2), prompt).num_drafted == min(spike, 2), "the cap"
    assert propose(drafter(table, stop="svip", threshold=5), prompt, replace(GREEDY, max_tokens=9)).num_drafted == 8


@pytest.mark.parametrize("temperature", [0.01, 1.0, 5.0])
def test_uncertainty_is_that_of_temperature_one(temperature):
    """A cold row's distribution has no entropy, a hot one's is never sure; the draft's own is what counts."""
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=50)
    half_sure = np.array([3.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    table = DraftTable(6, order=None, logits=positions({4: half_sure}, SURE))
    assert propose(drafter(table, stop="svip"), [1, 2, 3], params).num_drafted == 2


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", SPECS.values(), ids=SPECS.keys())
def test_nothing_is_drafted_from_what_is_no_distribution(options, broken):
    """Never runs on, never fails: what was drafted before stands."""
    table = DraftTable(6, order=None, logits=positions({5: np.full(6, broken)}, SURE))
    at_once = DraftTable(6, order=None, logits=lambda prefix: np.full(6, broken))
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=30)
        tree = propose(drafter(table, **{**options, "draft": 9}), [1, 2, 3], params)
        assert tree.max_depth == 2
        assert propose(drafter(at_once, **options), [1, 2, 3], params).num_drafted == 0


def test_what_the_row_bans_is_not_drafted():
    ranked = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    table = DraftTable(6, order=None, logits=lambda prefix: ranked)
    for params in (replace(GREEDY, logit_bias={0: -np.inf}), SamplingParams(1.0, bad_words=[[0]], seed=0)):
        tree = propose(drafter(table, stop="fixed"), [3], params)
        assert 0 not in tree.tokens
        assert tree.num_drafted == 5


# Rounds as they can be foretold --------------------------------------------------------------------------------------


def foretold(target, draft, prompt, new, threshold, cap):
    """Rounds of greedy decoding with svip from one pass over the answer: which of its tokens the draft would name,
    and how uncertain it would be there."""
    text = [*prompt, *target.plain(prompt, SamplingParams(max_tokens=new)).new_tokens.tolist()]
    rule, rounds = Svip(cap, threshold), 1
    at = len(prompt) + 1  # the first token comes with the prompt
    while at < len(text):
        drafted, k = list(text[:at]), 0
        most = min(cap, len(text) - at - 1)
        while k < most:
            logits = draft.logits_after(drafted)[None]
            drafted.append(int(logits.argmax()))
            k += 1
            if rule.stop(0, k, rule.signals(logits)[0]):
                break
        stands = next((n for n in range(k) if drafted[at + n] != text[at + n]), k)
        at, rounds = at + stands + 1, rounds + 1
    return rounds


def test_greedy_rounds_are_those_of_a_replay_and_fall_with_threshold_and_cap():
    target = TableTarget(vocab_size=8, order=2, seed=4, scale=4.0)
    draft = like(target, 1.5)
    for prompt in PROMPTS[1:3]:
        by_cap = []
        for cap in (1, 3, 40):
            rounds = []
            for threshold in (0.0, 0.2, 0.3, 1.0):
                made = drafter(like(target, 1.5), stop="svip", threshold=threshold, draft=cap)
                (done,) = answers(target, made, prompts=[prompt])
                assert done.rounds == foretold(target, draft, prompt, 40, threshold, cap)
                rounds.append(done.rounds)
            assert rounds == sorted(rounds, reverse=True)
            assert cap > 1 or len(set(rounds)) == 1, "with one token a round the threshold has no say"
            by_cap.append(rounds)
        assert all((np.diff(rounds) <= 0).all() for rounds in np.array(by_cap).T)


# In step with the row ------------------------------------------------------------------------------------------------


def test_what_the_draft_model_has_not_seen_is_run_first():
    """A prompt, then a token a round; two after a draft that was accepted whole."""
    target = TableTarget(vocab_size=8, order=2, seed=4)
    table = like(target, 0.0)
    made = drafter(table, stop="fixed", draft=3)
    answers(target, made, replace(GREEDY, max_tokens=13), [[1, 2, 3, 4, 5]])
    assert table.ran == [[6], [1], [1], [2], [1], [1], [2], [1], [1]]
    assert made.lags == [5, 1, 1]
    worse = like(target, 20.0)
    made = drafter(worse, stop="fixed", draft=3)
    (done,) = answers(target, made, replace(GREEDY, max_tokens=30), [[1, 2, 3, 4, 5]])
    assert sum(done.stats.accepted[3:]) == 0
    assert set(made.lags[1:]) == {0}


def test_rows_stop_at_different_lengths_and_the_others_go_on():
    """A forward a token, whatever the first of them has to read before."""
    ends = {1: 3, 2: 6, 3: 2}
    table = DraftTable(6, order=None, logits=lambda p: UNSURE if len(p) == ends[p[0]] else SURE)
    made = drafter(table, stop="svip")
    made.bind(TableTarget(vocab_size=6))
    rows = [Row(i, [first, 0], GREEDY, max_context=4096) for i, first in enumerate(ends)]
    for row in rows:
        made.start(row)
    trees = made.propose(asked(*rows))
    assert [tree.num_drafted for tree in trees] == [2, 5, 1]
    assert [tree.calls for tree in trees] == [2, 5, 1]
    assert table.ran == [[2, 2, 2], [1, 1], [1], [1], [1]]


def test_the_rule_hears_how_many_drafted_tokens_stood():
    target, heard = TableTarget(vocab_size=8, order=2, seed=4), []
    made = drafter(like(target), stop="fixed", draft=3)
    made.rule.learn = lambda outcomes: heard.extend(outcomes)
    out = answers(target, made)
    stood = [n * times for one in out for n, times in enumerate(one.stats.accepted)]
    assert sum(one.accepted for one in heard) == sum(stood) > 0
    assert sum(one.drafted for one in heard) == sum(one.stats.draft_tokens for one in out)


def test_two_of_a_kind_do_not_take_each_others_drafts():
    """Both are called the same, and the first has been asked before the second."""
    target = TableTarget(vocab_size=8, order=2, seed=4)
    broken = DraftTable(8, order=2, logits=lambda prefix: np.full(8, np.nan))
    first, second = drafter(broken, stop="fixed"), drafter(like(target, 0.5), stop="fixed")
    out = answers(target, Fallback([first, second]))
    assert tokens(out) == plain(target, GREEDY)
    assert sum(sum(done.stats.accepted[2:]) for done in out) > 0


class Last(Fallback):
    """Asks all of its parts, and takes what the last one drafts."""

    def propose(self, asks):
        return [self.budget.ask(part, asks) for part in self.parts][-1]


def test_of_a_draft_that_another_took_the_place_of_nothing_is_kept():
    target = TableTarget(vocab_size=8, order=2, seed=4)
    out = answers(target, Last([drafter(like(target, noise), stop="fixed") for noise in (2.0, 0.0)]))
    assert tokens(out) == plain(target, GREEDY)
    assert sum(sum(done.stats.accepted[2:]) for done in out) > 0


# Trees ---------------------------------------------------------------------------------------------------------------


def brute_force(table, prompt, width, depth, size):
    """Paths of the best `size` nodes, with the logarithms of their chances: level by level the `width` best nodes get
    their `width` best children."""
    best = {}
    level = [((), 0.0)]
    for _ in range(depth):
        found = []
        for path, score in level:
            logs = table.logits_after([*prompt, *path]).float().log_softmax(-1)
            best_first = logs.argsort(descending=True)[:width].tolist()
            found += [((*path, token), score + float(logs[token])) for token in best_first]
        best |= dict(found)
        level = sorted(found, key=lambda node: -node[1])[:width]
    return dict(sorted(best.items(), key=lambda node: -node[1])[:size])


def paths(tree):
    found = [()]
    for token, above in zip(tree.tokens[1:].tolist(), tree.parent[1:].tolist(), strict=True):
        found.append((*found[above], token))
    return found[1:]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 30))
def test_a_tree_is_the_best_of_all_candidates(seed, width, depth, size):
    table = DraftTable(5, order=None, seed=seed)
    tree = propose(drafter(table, stop="fixed", draft=depth, tree=size, width=width), [1, 2])
    assert len(set(paths(tree))) == tree.num_drafted
    found = dict(zip(paths(tree), np.log(tree.chances[1:]), strict=True))
    assert found == pytest.approx(brute_force(table, [1, 2], width, depth, size), abs=1e-4)
    assert len(table.ran) == tree.calls <= depth


@pytest.mark.parametrize("threshold", [0.2, 0.4])
def test_a_tree_one_node_wide_is_the_chain(threshold):
    target = TableTarget(vocab_size=8, order=2, seed=4)
    chain = answers(target, drafter(like(target), stop="svip", threshold=threshold))
    tree = answers(target, drafter(like(target), stop="svip", threshold=threshold, tree=40, width=1))
    assert tokens(tree) == tokens(chain)
    assert [done.stats.drafted for done in tree] == [done.stats.drafted for done in chain]
    assert [done.stats.accepted for done in tree] == [done.stats.accepted for done in chain]


def test_the_rule_looks_at_the_best_node_of_a_level_and_keeps_its_children():
    table = DraftTable(6, order=None, logits=positions({2: UNSURE}, SURE))
    tree = propose(drafter(table, stop="svip", tree=50, width=3), [1])
    assert tree.max_depth == 2
    assert tree.num_drafted == 3 + 9
    at_once = propose(drafter(table, stop="svip", tree=50, width=3), [1, 2])
    assert (at_once.max_depth, at_once.num_drafted) == (1, 3), "as many as there are, not as many as are wanted"


def test_the_rule_looks_at_the_best_node_of_every_row():
    """The first row's level has three nodes, of which the best alone is sure; the second row's has one."""
    table = DraftTable(6, order=None, logits=lambda prefix: UNSURE if prefix[-1] else SURE)
    made = drafter(table, stop="svip", draft=4, tree=50, width=3)
    made.bind(TableTarget(vocab_size=6))
    rows = [
        Row(i, [0], replace(GREEDY, stop_token_ids=ends), max_context=99) for i, ends in enumerate([(), range(1, 6)])
    ]
    for row in rows:
        made.start(row)
    assert [tree.max_depth for tree in made.propose(asked(*rows))] == [4, 4]


def test_nothing_hangs_on_what_ends_the_answer():
    table = DraftTable(6, order=None, logits=lambda prefix: np.array([3.0, 2.9, 0.0, 0.0, 0.0, 0.0]))
    tree = propose(drafter(table, stop="fixed", draft=3, tree=14, width=2), [5], eos=(0,))
    assert {path for path in paths(tree) if 0 in path[:-1]} == set()
    assert (1, 1, 0) in paths(tree)


def test_the_kept_nodes_hang_together_whatever_ties():
    """Where every probability is 1 or the same, a child scores as its parent does: no node is kept without it."""
    rng = np.random.default_rng(0)
    for trial in range(200):
        row = Row(0, [1, 2, 3], SamplingParams(max_tokens=40), max_context=100)
        growth = Growth(Growing.chain(row, row.tokens[2:].tolist()), width=3, size=int(rng.integers(1, 12)))
        for _ in range(4):
            logits = torch.full((len(growth.level), 6), -30.0)
            for node in range(len(growth.level)):
                if rng.random() < 0.6:
                    logits[node, int(rng.integers(6))] = 30.0  # saturated: the logarithm is exactly 0
                else:
                    logits[node] = 0.0
            growth.expand(logits, Likeliest(6, None))
            if not growth.descend():
                break
        tree, _ = growth.proposal()
        assert len(tree) - 1 == min(growth.size, len(growth.found)), trial
        assert (tree.parent[1:] < np.arange(1, len(tree))).all()
        assert all(tree.depth[node] == tree.depth[tree.parent[node]] + 1 for node in range(1, len(tree)))


# Keys and values -----------------------------------------------------------------------------------------------------


class Checking(OnModel):
    """Compares its cache, before every draft, with that of a model that has just read the row."""

    checked = 0

    def propose(self, asks):
        rows = [row for row, _ in asks]
        for row in rows:
            n = self.model.length(row)
            if n:
                fresh = self.network.add_row(n)
                self.network.verify([Segment.chunk(fresh, row.tokens[:n], last=False)])
                kv = self.network.cache.kv[..., :n, :]
                torch.testing.assert_close(kv[:, :, self.model.slot(row)], kv[:, :, fresh], atol=2e-5, rtol=1e-4)
                self.network.drop_row(fresh)
                self.checked += 1
        return super().propose(asks)


class Pruned(Allowance):
    """Cuts the first leaf of every tree that may be cut, so that the nodes behind it have other numbers."""

    def cut(self, trees):
        return [self.pruned(tree) if tree.may_be_cut and tree.num_drafted > 1 else tree for tree in trees]

    def pruned(self, tree):
        leaf = next(node for node in range(1, len(tree)) if not tree.children(node))
        return tree.keeping(np.delete(np.arange(len(tree)), leaf))


class Pruning(Unlimited):
    def open(self, rows):
        return Pruned()


GROWN = {"stop": "fixed", "tree": 16, "width": 4}


@pytest.mark.parametrize(
    ("options", "temperature", "budget"),
    [*paired([SPECS["svip"], GROWN], [(0.0, UNLIMITED), (1.0, UNLIMITED)]), (GROWN, 0.0, Pruning())],
)
def test_the_draft_models_cache_is_that_of_a_fresh_prefill(options, temperature, budget):
    one = models.model("qwen3", **native.TINY)
    target, other = native.of(one, eos=()), disturbed(models.model("qwen3", **native.TINY), 0.04)  # half of it right
    made = Checking(native.of(other, eos=()), drafter(target, **options).config)
    params = [SamplingParams(max_tokens=20, temperature=temperature, seed=i) for i in range(3)]
    engine = Engine(target, made, max_batch=2)
    engine.budget = budget
    out = engine.generate([[5, 6, 7], [8], list(range(10, 40))], params)
    accepted = [n for done in out for n, count in enumerate(done.stats.accepted) for _ in range(count)]
    assert made.checked > 8
    assert 0 < sum(accepted) < sum(done.stats.draft_tokens for done in out)
    if temperature == 0:
        rounds = Engine(target, "none").generate([[5, 6, 7], [8], list(range(10, 40))], params)
        assert tokens(out) == tokens(rounds)
