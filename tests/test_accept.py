"""Losslessness, proved: every branch of acceptance is walked, and the answers have the target's own probabilities.

Nothing here samples but the tests of seeds. `speculative` gives the probability of every answer of a few tokens, over
all the noise that a row may have and all rounds that may be taken; `plain` multiplies the target's own probabilities.
They agree to 1e-9, for every kind of draft; and wrong rules, which look right on most days, do not.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import sampling
from paceline.core.accept import Cursor, accept, follow, target_distributions
from paceline.core.noise import Noise
from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.errors import NumericError
from tests.fakes import TableTarget
from tests.lossless_enumeration import (
    Branches,
    BranchingNoise,
    Request,
    answer_of,
    coupled,
    fixed,
    largest_difference,
    one_round,
    outcomes,
    plain,
    speculative,
)

EXACT = 1e-9
PROMPT = [0, 1]

CHAINS = [[0], [0, 1], [0, 1, 2]]
BUSHES = [[0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1, 2], [0, 1, 0, 1]]
"""Shapes of trees as the parents of the drafted nodes; the last one does not list siblings side by side."""

WARPS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "logit_bias": {"logit_bias": {0: 1.5, 2: -1.0}},
    "bad_words": {"bad_words": [[1, 2], [0], [2, 1, 1]]},
    "all": {
        "temperature": 0.8,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "logit_bias": {1: 0.7},
        "bad_words": [[2, 2]],
    },
}
SAMPLING = SamplingParams(temperature=1.0)

seeds = st.integers(0, 10_000)
zeros = st.sampled_from([0.0, 0.3, 0.7])


def model(seed, vocab_size=3, zeros=0.0, scale=1.2):
    """A target or a draft model in which every token of the prefix matters."""
    return TableTarget(vocab_size, order=None, seed=seed, zeros=zeros, scale=scale)


def error(target, params, draft, max_tokens=3):
    """How far the law of speculative answers is from the target's."""
    return largest_difference(
        speculative(target, PROMPT, params, draft, max_tokens), plain(target, PROMPT, params, max_tokens)
    )


# Lossless -----------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(seeds, seeds, zeros, zeros, st.sampled_from(CHAINS + BUSHES), st.sampled_from([0.0, 0.4]))
def test_drafts_of_the_same_noise(a, b, p_zeros, q_zeros, shape, go_on):
    draft = coupled(model(b, zeros=q_zeros), shape, go_on=go_on)
    assert error(model(a, zeros=p_zeros), SAMPLING, draft) < EXACT


@settings(max_examples=20)
@given(seeds, seeds, st.integers(3, 5), zeros, st.sampled_from(CHAINS + BUSHES))
def test_drafts_without_noise(a, b, vocab_size, p_zeros, shape):
    assert error(model(a, vocab_size, p_zeros), SAMPLING, fixed(model(b, vocab_size), shape)) < EXACT


@pytest.mark.parametrize("warp", WARPS.values(), ids=WARPS)
@pytest.mark.parametrize("shape", [[0, 1], [0, 0]], ids=["chain", "siblings"])
def test_warped_or_not(warp, shape):
    params = SamplingParams(**{"temperature": 1.0, **warp})
    target, helper = model(5, 4), model(6, 4)
    for draft in (coupled(helper, shape, params=params), coupled(helper, shape), fixed(helper, shape)):
        assert error(target, params, draft) < EXACT


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", [coupled, fixed])
def test_greedy_has_one_answer(kind, warp):
    """Half of the drafts are the target's own, so that a token hangs on those accepted before it in its round."""
    greedy = SamplingParams(**{**WARPS[warp], "temperature": 0.0, "max_tokens": 3})
    for seed, shape in enumerate(CHAINS + BUSHES):
        target = model(seed)
        answer = tuple(target.plain(PROMPT, greedy).new_tokens.tolist())
        for helper in (target, model(seed + 1)):
            assert speculative(target, PROMPT, greedy, kind(helper, shape), 3) == pytest.approx({answer: 1.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warp", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "all"])
@pytest.mark.parametrize("kind", ["coupled", "fixed"])
def test_what_a_cpu_really_runs(dtype, warp, kind):
    """Logits as models give them take the compiled ways; what is left then is float32's rounding."""
    params = SamplingParams(**{"temperature": 1.0, **WARPS[warp]})
    helper, rounded = model(6, 4), model(5, 4)
    draft = coupled(helper, [0, 0], params=params) if kind == "coupled" else fixed(helper, [0, 0, 1])
    target = TableTarget(4, order=None, logits=lambda prefix: rounded.logits_after(prefix).to(dtype).double().numpy())

    def rule(requests, trees, logits):
        return accept(requests, trees, [rows.to(dtype) for rows in logits])

    answers = speculative(target, PROMPT, params, draft, 2, rule)
    assert largest_difference(answers, plain(target, PROMPT, params, 2)) < 1e-6


def with_probes(draft, tokens):
    """Hang a chain of probes behind the root, before every drafted node, that carries `tokens`."""

    def probing(prefix, new, noise):
        tree, n = draft(prefix, new, noise), len(tokens)
        nodes = np.concatenate([tree.tokens[:1], tokens, tree.tokens[1:]])
        parent = [-1, *range(n), *(0 if p == 0 else p + n for p in tree.parent[1:].tolist())]
        probe = np.array([False] + [True] * n + [False] * tree.num_drafted)
        return DraftTree(nodes, np.array(parent), probe)

    return probing


@pytest.mark.parametrize("draft", [coupled(model(8), [0, 0, 1]), fixed(model(8), [0, 0, 1])], ids=["noise", "fixed"])
def test_probes_change_nothing(draft):
    target, probing = model(7), with_probes(draft, [2, 0])
    with_them = speculative(target, PROMPT, SAMPLING, probing, 3)
    assert largest_difference(with_them, plain(target, PROMPT, SAMPLING, 3)) < EXACT
    # Not even which draft tokens are accepted.
    for seed in range(20):
        one, other = (one_round(target, PROMPT, (), SAMPLING, d, 9, Noise(seed)) for d in (draft, probing))
        assert one == other


# As good as it can be -------------------------------------------------------------------------------------------


def share(target, draft, draws=4000):
    """How often a round accepts a draft token, by real noise."""
    return sum(len(one_round(target, PROMPT, (), SAMPLING, draft, 9, Noise(s))) > 1 for s in range(draws)) / draws


def coupled_share(p, q):
    """Daliri, Musco, Suresh 2024: the chance that p and q take the same token from the same noise."""
    pairs = [(a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True) if a > 0 and b > 0]
    return sum(1 / float(torch.maximum(p / a, q / b).sum()) for a, b in pairs)


@pytest.mark.parametrize("seed", range(3))
def test_a_drafted_token_stands_as_often_as_the_law_says(seed):
    target, helper = model(seed, 4), model(seed + 1, 4)
    p, q = (m.probabilities_after(PROMPT, SAMPLING) for m in (target, helper))
    expected = coupled_share(p, q)
    distance = 1 - float(torch.minimum(p, q).sum())
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
    assert share(target, coupled(helper, [0])) == pytest.approx(expected, abs=0.03)
    assert share(target, coupled(target, [0]), 100) == 1


def test_a_guess_stands_with_its_probability():
    target, helper = model(1, 4), model(2, 4)
    p = target.probabilities_after(PROMPT, SAMPLING)
    children = helper.logits_after(PROMPT).argsort(descending=True)[:2]
    assert share(target, fixed(helper, [0, 0])) == pytest.approx(float(p[children].sum()), abs=0.03)
    assert share(target, coupled(helper, [0] * 4), 100) == 1


# A whole engine -------------------------------------------------------------------------------------------------


class Drafting(Drafter):
    """A drafter made of a function, for the engine."""

    name = "drafting"

    def __init__(self, draft):
        self.draft = draft

    def propose(self, asks):
        return [self.draft(row.tokens.tolist(), row.num_new, row.noise) for row, _ in asks]


ENDING = SamplingParams(temperature=1.0, max_tokens=3, stop_token_ids=(1,))


def answered(target, drafter, wishes, branches):
    """Answers of an engine whose every random decision branches: a pair (tokens, why it ended) for each row."""
    engine = Engine(target, drafter, budget=False)
    rows = [engine.add(PROMPT, params) for params in wishes]
    for row in rows:
        row.noise = BranchingNoise(branches)
    while engine.has_work:
        engine.step()
    return tuple((tuple(row.new_tokens.tolist()), row.finish_reason) for row in rows)


@pytest.mark.parametrize(
    "draft",
    [coupled(model(8), [0, 1]), coupled(model(8), [0, 0]), fixed(model(8), [0, 1, 0])],
    ids=["chain", "siblings", "without noise"],
)
def test_an_engine_round_after_round(draft):
    """All rounds in one walk, with the real rows, cut at end tokens and at max_tokens: no round leans on another."""
    target = TableTarget(3, order=None, seed=7, eos=[2])
    alone = outcomes(lambda branches: answered(target, Drafter(), [ENDING], branches))
    drafted = outcomes(lambda branches: answered(target, Drafting(draft), [ENDING], branches))
    assert largest_difference(drafted, alone) < EXACT
    of_prompt = target.probabilities_after(PROMPT, ENDING)
    assert alone[(((2,), "stop"),)] == pytest.approx(float(of_prompt[2]))
    assert len(alone) == 1 + 1 + (2 + 3)  # 2; 1; 0 and then 1, 2 or another 0 before one of three


def test_rows_of_a_batch_are_independent():
    """Two rows with different parameters in one batch: the law of the pair is the product of the laws."""
    target = TableTarget(3, order=None, seed=7, eos=[2])
    wishes = [
        SamplingParams(temperature=1.0, max_tokens=2),
        SamplingParams(temperature=0.5, repetition_penalty=1.5, max_tokens=2),
    ]
    drafter = Drafting(coupled(model(8), [0]))
    pair = outcomes(lambda branches: answered(target, drafter, wishes, branches))
    one, other = (outcomes(lambda branches, w=w: answered(target, Drafter(), [w], branches)) for w in wishes)
    product = {(*a, *b): p * q for a, p in one.items() for b, q in other.items()}
    assert largest_difference(pair, product) < EXACT


@settings(max_examples=40)
@given(
    seeds, seeds, st.sampled_from(CHAINS + BUSHES), st.sampled_from(list(WARPS)), st.integers(1, 12), st.booleans(),
    st.sampled_from([coupled, fixed]), st.integers(0, 2),
)  # fmt: skip
def test_a_seed_gives_the_tokens_of_plain_decoding(seed, helper, shape, warp, max_tokens, budget, kind, late):
    """For any draft, cut by a budget or not, and made of the right noise or of another place's."""
    params = SamplingParams(**{"temperature": 1.0, **WARPS[warp]}, seed=seed, max_tokens=max_tokens)
    target = TableTarget(5, order=3, seed=seed)
    draft = kind(model(helper, 5), shape, **({"late": late} if kind is coupled else {}))
    [completion] = Engine(target, Drafting(draft), budget=budget).generate([PROMPT], params)
    assert completion.tokens == target.plain(PROMPT, params).new_tokens.tolist()


def test_the_noise_of_another_place_loses_acceptance_alone():
    target = model(3, 6)
    right, wrong = coupled(target, [0]), coupled(target, [0], late=1)
    assert share(target, right, 200) == 1
    assert share(target, wrong, 1000) < 0.6
    assert error(target, SAMPLING, wrong, 2) < EXACT


# Wrong rules are found out ----------------------------------------------------------------------------------------


def same_texts(target, draft, rule=accept):
    """Whether fifty seeds give the texts of plain decoding."""
    texts = [
        [answer_of(target, PROMPT, SAMPLING, d, 4, Noise(seed), r) for seed in range(50)]
        for d, r in ((draft, rule), (fixed(target, []), accept))
    ]
    return texts[0] == texts[1]


def test_a_rule_that_keeps_what_is_probable_is_found_out():
    draft, target = coupled(model(8), [0, 1]), model(7)
    lenient = lambda *args: accept(*args, Lenient(0.2))  # noqa: E731
    assert same_texts(target, draft)
    assert not same_texts(target, draft, lenient)
    answers = speculative(target, PROMPT, SAMPLING, draft, 2, lenient)
    assert largest_difference(answers, plain(target, PROMPT, SAMPLING, 2)) > 1e-3


@pytest.mark.parametrize("draft", [coupled(model(8), [0, 1]), fixed(model(8), [0, 1])], ids=["noise", "fixed"])
def test_noise_by_the_depth_of_a_draft_is_found_out(monkeypatch, draft):
    monkeypatch.setattr(Cursor, "position", property(lambda cursor: len(cursor.done.tokens)))
    assert not same_texts(model(7), draft)
    with pytest.raises(AssertionError, match="decided twice"):
        error(model(7), SAMPLING, draft)


def test_a_drafter_that_decides_by_the_noise_is_found_out():
    """Acceptance that takes the drafter's word: its q, not the target's p, decides."""
    draft = coupled(model(8), [0])

    def believing(requests, trees, logits):
        [done] = accept(requests, trees, logits)
        if len(trees[0]) > 1:
            done.tokens[0] = int(trees[0].tokens[1])
        return [done]

    answers = speculative(model(7), PROMPT, SAMPLING, draft, 2, believing)
    assert largest_difference(answers, plain(model(7), PROMPT, SAMPLING, 2)) > 1e-3
    assert not same_texts(model(7), draft, believing)


def test_noise_that_is_used_twice_is_found_out():
    noise = BranchingNoise(Branches())
    noise.choose(torch.tensor([0.5, 0.5]), 4)
    with pytest.raises(AssertionError, match="position 4"):
        noise.choose(torch.tensor([0.5, 0.5]), 4)


# Details ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_takes_the_first_of_equal_tokens(dtype):
    """As NumPy and transformers do; bfloat16 has many ties."""
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.integers(0, 4, (50, 40))).to(dtype)
    row = Request(PROMPT, [], SamplingParams(), Noise(0))
    for scores in logits:
        [done] = accept([row], [DraftTree.root(1)], [scores.unsqueeze(0)])
        assert done.tokens == [int((scores == scores.max()).nonzero()[0])]


@pytest.mark.parametrize("bad", [[np.nan, 1, 0], [np.inf, 1, 0], [-np.inf] * 3], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("warp", WARPS.values(), ids=WARPS)
def test_logits_that_are_not_numbers_fail_the_row_alone(bad, temperature, warp):
    params = SamplingParams(**{**warp, "temperature": temperature})
    row = Request(PROMPT, [], params, Noise(0))
    fine = Request(PROMPT, [], params, Noise(0))
    logits = [torch.tensor([bad]), torch.tensor([[0.0, 5.0, 1.0]])]
    [done, other] = accept([row, fine], [DraftTree.root(1)] * 2, logits)
    assert isinstance(done.error, NumericError)
    assert "NaN or infinite" in str(done.error)
    assert len(other.tokens) == 1


def test_only_visited_nodes_are_looked_at():
    """A node off the path may hold anything: kernels need not fill what nobody reads."""
    row = Request(PROMPT, [], SamplingParams(), Noise(0))
    logits = torch.tensor([[0.0, 1.0], [torch.nan, torch.nan]])
    [done] = accept([row], [DraftTree.chain(1, [0])], [logits])
    assert (done.path, done.tokens) == ([0], [1])


def as_on_an_accelerator(monkeypatch):
    """Take the ways made for accelerators: whole batches, and few answers fetched. They run on any device."""
    monkeypatch.setattr(sampling, "on_accelerator", lambda tensor: True)


@settings(max_examples=60)
@given(seeds, st.data())
def test_a_batch_on_an_accelerator_is_decided_like_its_rows_alone(seed, data):
    target, helper = model(seed, 6), model(seed + 1, 6)
    shapes = data.draw(st.lists(st.sampled_from([[], *CHAINS, *BUSHES]), min_size=1, max_size=5))
    wishes = [{}, {"temperature": 1.0}, *({**warp, "temperature": t} for warp in WARPS.values() for t in (0.0, 0.9))]

    def batch():
        rows = []
        trees = []
        for i, (shape, kind, wish) in enumerate(zip(shapes, kinds, chosen, strict=True)):
            rows.append(Request(PROMPT, [i], SamplingParams(**wish, seed=i), Noise(seed + i)))
            trees.append((coupled if kind else fixed)(helper, shape)([*PROMPT, i], 1, rows[-1].noise))
        logits = [torch.stack([target.logits_after([i, n]) for n in range(len(t))]) for i, t in enumerate(trees)]
        return rows, trees, logits

    kinds = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    chosen = data.draw(st.lists(st.sampled_from(wishes), min_size=len(shapes), max_size=len(shapes)))
    alone = [accept([row], [tree], [logits])[0] for row, tree, logits in zip(*batch(), strict=True)]
    assert accept(*batch()) == alone
    with pytest.MonkeyPatch.context() as monkeypatch:
        as_on_an_accelerator(monkeypatch)
        assert accept(*batch()) == alone


def test_an_accelerator_notices_bad_logits_too(monkeypatch):
    as_on_an_accelerator(monkeypatch)
    for temperature in (0.0, 1.0):
        rows = [Request(PROMPT, [], SamplingParams(temperature=temperature), Noise(0))] * 2
        logits = [torch.tensor([[0.0, 1.0]]), torch.tensor([[torch.nan, 1.0]])]
        [fine, done] = accept(rows, [DraftTree.root(1)] * 2, logits)
        assert isinstance(done.error, NumericError)
        assert len(fine.tokens) == 1


class Lenient:
    """A rule that keeps every drafted token that is not too improbable: one that says it is lossy."""

    name, lossless = "lenient", False

    def __init__(self, least):
        self.least = least

    def decide(self, cursors):
        stepped = []
        for cursor, p in zip(cursors, target_distributions(cursors), strict=True):
            tokens = cursor.tree.tokens[cursor.tree.children(cursor.node)].tolist()
            kept = [token for token in tokens if p[token] >= self.least]
            token = kept[0] if kept else cursor.request.noise.choose(p, cursor.position)
            stepped += [cursor] if follow(cursor, token) else []
        return stepped


@pytest.mark.parametrize(("least", "path"), [(0.2, [0, 1, 2]), (0.4, [0])])
def test_another_rule_decides(least, path):
    row = Request(PROMPT, [], SamplingParams(temperature=1.0), Noise(2))
    p = torch.tensor([0.5, 0.3, 0.2]).log().repeat(3, 1)
    [done] = accept([row], [DraftTree.chain(0, [1, 1])], [p], Lenient(least))
    assert done.path[: len(path)] == path[: len(done.path)]
    assert (least < 0.3) == (done.tokens[:2] == [1, 1])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_the_targets_own_whatever_warps_the_choice(temperature):
    params = SamplingParams(temperature=temperature, top_k=1, logit_bias={2: 5.0}, logprobs=2)
    row = Request(PROMPT, [], params, Noise(0))
    p = [0.5, 0.3, 0.2]
    [done] = accept([row], [DraftTree.chain(0, [2, 1])], [torch.tensor(p).log().repeat(3, 1)])
    assert done.tokens == [2, 2]
    assert done.logprobs is not None
    for entry in done.logprobs:
        assert entry.logprob == pytest.approx(np.log(0.2))
        assert [token for token, _ in entry.top] == [0, 1]
        assert [logprob for _, logprob in entry.top] == pytest.approx(np.log([0.5, 0.3]))


LOGPROB_TREES = {
    "a chain": ([0, 1], [3, 4]), "siblings, the first": ([0, 0, 1], [3, 5, 4]),
    "siblings, the second": ([0, 0, 2], [5, 3, 4]), "siblings twice": ([0, 0, 0, 3, 3, 3], [5, 6, 3, 7, 6, 4]),
    "listed apart": ([0, 1, 0, 2, 3], [5, 6, 3, 7, 4]),
}  # fmt: skip
"""Parents and tokens of drafted nodes; the target says 3, 4 and 2."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", LOGPROB_TREES)
def test_log_probabilities_are_those_of_the_nodes_that_stand(tree, temperature, on_accelerator, dtype, monkeypatch):
    """Wherever these lie among their siblings: each node has a distribution of its own."""
    if on_accelerator:
        as_on_an_accelerator(monkeypatch)
    parents, tokens = LOGPROB_TREES[tree]
    logits = torch.randn(len(tokens) + 1, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    path, at = [0], 0
    for token in (3, 4):
        logits[at, token] = 40.0
        at = next(i for i, (parent, drafted) in enumerate(zip(parents, tokens, strict=True), 1)
                  if (parent, drafted) == (at, token))  # fmt: skip
        path.append(at)
    logits[at, 2] = 40.0
    row = Request(PROMPT, [], SamplingParams(temperature=temperature, logprobs=2), Noise(0))
    [done] = accept([row], [DraftTree(np.array([1, *tokens]), np.array([-1, *parents]))], [logits])
    assert (done.path, done.tokens) == (path, [3, 4, 2])
    expected = logits[path].double().log_softmax(-1)
    found = [[entry.logprob, *(logprob for _, logprob in entry.top)] for entry in done.logprobs]
    second = expected.topk(2).values
    right = torch.cat([expected[[0, 1, 2], done.tokens].unsqueeze(1), second], 1)
    assert torch.allclose(torch.tensor(found, dtype=torch.float64), right, atol=1e-5)
