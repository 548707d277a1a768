"""Losslessness, proved: every branch of acceptance is walked, and the answers have the target's own probabilities.

Nothing here samples. `speculative` gives the probability of every answer of a few tokens, over all drafts that may be
drawn and all rounds that may be taken; `plain` multiplies the target's own probabilities. They agree to 1e-9, for
every kind of draft; and wrong rules, which look right on most days, do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline.core.accept as rules
from paceline.core import sampling
from paceline.core.accept import TOKENWISE, Cursor, accept, follow, residual, target_distributions
from paceline.core.sampling import RowRandom, SamplingParams, draw, draw_rows
from paceline.core.tree import DraftTree
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.errors import NumericError
from tests.fakes import TableTarget
from tests.lossless_enumeration import (
    Branches,
    BranchingRandom,
    Draft,
    Request,
    drawn,
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


tokenwise = partial(accept, rule=TOKENWISE)


def model(seed: int, vocab_size: int = 3, zeros: float = 0.0, scale: float = 1.2) -> TableTarget:
    """A target or a draft model in which every token of the prefix matters."""
    return TableTarget(vocab_size, order=None, seed=seed, zeros=zeros, scale=scale)


def error(target: TableTarget, params: SamplingParams, draft: Draft, max_tokens: int = 3) -> float:
    """How far the law of speculative answers is from the target's."""
    return largest_difference(
        speculative(target, PROMPT, params, draft, max_tokens), plain(target, PROMPT, params, max_tokens)
    )


# Lossless -----------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seeds, seeds, zeros, zeros, st.sampled_from(CHAINS), st.sampled_from([0.0, 0.4]))
def test_chains_drawn_from_q(a: int, b: int, p_zeros: float, q_zeros: float, shape: list[int], go_on: float) -> None:
    draft = drawn(model(b, zeros=q_zeros), shape, go_on=go_on)
    assert error(model(a, zeros=p_zeros), SAMPLING, draft) < EXACT


@settings(max_examples=10, deadline=None)
@given(seeds, seeds, zeros, zeros, st.sampled_from(CHAINS))
def test_token_after_token_is_lossless_too(a: int, b: int, p_zeros: float, q_zeros: float, shape: list[int]) -> None:
    draft = drawn(model(b, zeros=q_zeros), shape, go_on=0.4)
    target = model(a, zeros=p_zeros)
    answers = speculative(target, PROMPT, SAMPLING, draft, 3, rule=tokenwise)
    assert largest_difference(answers, plain(target, PROMPT, SAMPLING, 3)) < EXACT


def expected_length(target: TableTarget, draft: Draft, rule: Any) -> float:
    """Mean tokens of one round of at most four."""

    def run(branches: Branches) -> int:
        return len(one_round(target, PROMPT, (), SAMPLING, draft, 4, BranchingRandom(branches), rule))

    return sum(length * probability for length, probability in outcomes(run).items())


@settings(max_examples=20, deadline=None)
@given(seeds, seeds, zeros, zeros, st.sampled_from([0.0, 0.4]))
def test_block_verification_never_accepts_fewer(a: int, b: int, p_zeros: float, q_zeros: float, go_on: float) -> None:
    target, draft = model(a, zeros=p_zeros), drawn(model(b, zeros=q_zeros), [0, 1, 2], go_on=go_on)
    assert expected_length(target, draft, accept) > expected_length(target, draft, tokenwise) - EXACT


def test_block_verification_accepts_what_the_paper_says() -> None:
    """Sun et al. 2024, section 2: p is (1/3, 2/3) and q (2/3, 1/3) at every position, and two tokens are drafted."""
    target = TableTarget(2, logits=lambda _: np.log([1 / 3, 2 / 3]))
    helper = TableTarget(2, logits=lambda _: np.log([2 / 3, 1 / 3]))
    draft = drawn(helper, [0, 1])
    assert expected_length(target, draft, tokenwise) == pytest.approx(1 + 10 / 9)
    assert expected_length(target, draft, accept) == pytest.approx(1 + 11 / 9)


@settings(max_examples=6, deadline=None)
@given(seeds, seeds, zeros, zeros, st.sampled_from(BUSHES), st.booleans())
def test_trees_drawn_from_q(a: int, b: int, p_zeros: float, q_zeros: float, shape: list[int], again: bool) -> None:
    draft = drawn(model(b, zeros=q_zeros), shape, replacement=again)
    assert error(model(a, zeros=p_zeros), SAMPLING, draft, max_tokens=2 if len(shape) > 3 else 3) < EXACT


@pytest.mark.parametrize("vocab_size", [4, 5])
@pytest.mark.parametrize("replacement", [False, True])
def test_more_siblings_than_q_has_tokens(vocab_size: int, replacement: bool) -> None:
    """Without replacement q runs dry; with replacement siblings are equal."""
    draft = drawn(model(1, vocab_size, zeros=0.6), [0, 0, 0], replacement=replacement)
    assert error(model(2, vocab_size), SAMPLING, draft, max_tokens=2) < EXACT


@settings(max_examples=20, deadline=None)
@given(seeds, seeds, st.integers(3, 5), zeros, st.sampled_from(CHAINS + BUSHES))
def test_point_masses(a: int, b: int, vocab_size: int, p_zeros: float, shape: list[int]) -> None:
    assert error(model(a, vocab_size, p_zeros), SAMPLING, fixed(model(b, vocab_size), shape)) < EXACT


@pytest.mark.parametrize("warp", WARPS.values(), ids=WARPS)
@pytest.mark.parametrize("shape", [[0, 1], [0, 0]], ids=["chain", "siblings"])
def test_warped_alike(warp: dict[str, Any], shape: list[int]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **warp})
    target, helper = model(5, 4), model(6, 4)
    assert error(target, params, drawn(helper, shape, params=params)) < EXACT
    assert error(target, params, fixed(helper, shape)) < EXACT


@pytest.mark.parametrize("warp", WARPS.values(), ids=WARPS)
def test_a_draft_that_is_not_warped_is_slower_and_just_as_exact(warp: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **warp})
    assert error(model(5), params, drawn(model(6), [0, 0, 1], replacement=True)) < EXACT


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", [drawn, fixed])
def test_greedy_has_one_answer(kind: Any, warp: str) -> None:
    """Half of the drafts are the target's own, so that a token hangs on those accepted before it in its round."""
    greedy = SamplingParams(**{**WARPS[warp], "temperature": 0.0, "max_tokens": 3})
    for seed, shape in enumerate(CHAINS + BUSHES):
        target = model(seed)
        answer = tuple(target.plain(PROMPT, greedy).new_tokens.tolist())
        for helper in (target, model(seed + 1)):
            assert speculative(target, PROMPT, greedy, kind(helper, shape), 3) == pytest.approx({answer: 1.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warp", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "all"])
@pytest.mark.parametrize("kind", ["drawn", "fixed"])
def test_what_a_cpu_really_runs(dtype: torch.dtype, warp: str, kind: str) -> None:
    """Logits as models give them take the compiled ways; what is left then is float32's rounding."""
    params = SamplingParams(**{"temperature": 1.0, **WARPS[warp]})
    helper, rounded = model(6, 4), model(5, 4)
    draft = drawn(helper, [0, 0], params=params) if kind == "drawn" else fixed(helper, [0, 0, 1])
    target = TableTarget(4, order=None, logits=lambda prefix: rounded.logits_after(prefix).to(dtype).double().numpy())

    def rule(requests: Any, trees: Any, logits: Any) -> Any:
        return accept(requests, trees, [rows.to(dtype) for rows in logits])

    answers = speculative(target, PROMPT, params, draft, 2, rule)
    assert largest_difference(answers, plain(target, PROMPT, params, 2)) < 1e-6


def with_probes(draft: Draft, tokens: list[int]) -> Draft:
    """Hang a chain of probes behind the root, before every drafted node, that carries `tokens`."""

    def probing(prefix: Any, random: RowRandom) -> DraftTree:
        tree, n = draft(prefix, random), len(tokens)
        new = np.concatenate([tree.tokens[:1], tokens, tree.tokens[1:]])
        parent = [-1, *range(n), *(0 if p == 0 else p + n for p in tree.parent[1:].tolist())]
        probs = tree.draft_probs
        if probs is not None:
            probs = torch.cat([probs[:1], probs[:1].expand(n, -1), probs[1:]])
        probe = np.array([False] + [True] * n + [False] * tree.num_drafted)
        return DraftTree(new, np.array(parent), probs, tree.replacement, probe)

    return probing


@pytest.mark.parametrize("draft", [drawn(model(8), [0, 0, 1]), fixed(model(8), [0, 0, 1])], ids=["drawn", "fixed"])
def test_probes_change_nothing(draft: Draft) -> None:
    target, probing = model(7), with_probes(draft, [2, 0])
    with_them = speculative(target, PROMPT, SAMPLING, probing, 3)
    assert largest_difference(with_them, plain(target, PROMPT, SAMPLING, 3)) < EXACT
    # Not even which draft tokens are accepted.
    for seed in range(20):
        one, other = (one_round(target, PROMPT, (), SAMPLING, d, 9, RowRandom(seed)) for d in (draft, probing))
        assert one == other


@pytest.mark.parametrize("kind", ["drawn", "fixed"])
def test_a_child_that_q_cannot_have_drawn_is_passed_over(kind: str) -> None:
    """A drafter that adds a guess of its own to a drawn tree breaks its promise, and still nothing is bent."""
    helper = TableTarget(3, logits=lambda prefix: np.array([0.3, 0.0, -np.inf]))

    def draft(tokens: Any, random: RowRandom) -> DraftTree:
        q = helper.probabilities_after(tokens, SAMPLING)
        drafted = [2, random.draft(q)] if kind == "drawn" else [2]
        return DraftTree.of(tokens[-1], drafted, [0] * len(drafted), draft_probs=torch.stack([q] * (len(drafted) + 1)))

    target = model(3)
    assert target.probabilities_after(PROMPT, SAMPLING)[2] > 0.05
    assert error(target, SAMPLING, draft) < EXACT


@pytest.mark.parametrize("shape", [[0, 0], [0, 0, 0], [0, 0, 1]])
def test_tokens_drawn_again_but_declared_struck_out_are_passed_over(shape: list[int]) -> None:
    """The other way round is a bug (`never_strikes` below); this way only fewer tokens are accepted: what is left of
    independent draws without the repetitions has the law of draws without replacement."""
    draft = drawn(model(8), shape, replacement=True)

    def declared(tokens: Any, random: RowRandom) -> DraftTree:
        tree = draft(tokens, random)
        tree.replacement = False
        return tree

    assert error(model(7), SAMPLING, declared) < EXACT
    assert accepted_share(model(7), declared) < accepted_share(model(7), draft)


# Just as good as it can be --------------------------------------------------------------------------------------


def accepted_share(target: TableTarget, draft: Draft) -> float:
    """Probability that a round accepts a draft token."""
    return sum(
        probability
        for tokens, probability in outcomes(
            lambda branches: one_round(target, PROMPT, (), SAMPLING, draft, 9, BranchingRandom(branches))
        ).items()
        if len(tokens) > 1
    )


@settings(max_examples=10, deadline=None)
@given(seeds, seeds)
def test_one_drawn_token_is_accepted_as_often_as_can_be(a: int, b: int) -> None:
    """With probability sum(min(p, q)): no coupling of two distributions agrees more often (Leviathan et al., 3.2)."""
    target, helper = model(a, 4), model(b, 4)
    p, q = (m.probabilities_after(PROMPT, SAMPLING) for m in (target, helper))
    best = float(torch.minimum(p, q).sum())
    assert accepted_share(target, drawn(helper, [0])) == pytest.approx(best)
    assert accepted_share(target, drawn(target, [0])) == pytest.approx(1)


def test_point_masses_are_accepted_with_their_probability() -> None:
    target, helper = model(1, 4), model(2, 4)
    p = target.probabilities_after(PROMPT, SAMPLING)
    children = helper.logits_after(PROMPT).argsort(descending=True)[:2]
    assert accepted_share(target, fixed(helper, [0, 0])) == pytest.approx(float(p[children].sum()))


def test_striking_out_what_was_drawn_accepts_more() -> None:
    """Jeon et al. 2024: drawing without replacement never offers what was just rejected."""
    target, helper = model(1, 4), model(2, 4)
    one, again, without = (
        accepted_share(target, drawn(helper, shape, replacement=replacement))
        for shape, replacement in (([0], False), ([0, 0], True), ([0, 0], False))
    )
    assert one < again < without
    assert accepted_share(target, drawn(helper, [0] * 4)) == pytest.approx(1)


# A whole engine -------------------------------------------------------------------------------------------------


class Drafting(Drafter):
    """A drafter made of a function, for the engine."""

    name = "drafting"

    def __init__(self, draft: Draft):
        self.draft = draft

    def propose(self, rows: Any) -> list[DraftTree]:
        return [self.draft(row.tokens.tolist(), row.random) for row in rows]


ENDING = SamplingParams(temperature=1.0, max_tokens=3, stop_token_ids=(1,))


def answered(target: TableTarget, drafter: Drafter, wishes: list[SamplingParams], branches: Branches) -> Any:
    """Answers of an engine whose every random decision branches: a pair (tokens, why it ended) for each row."""
    engine = Engine(target, drafter)
    rows = [engine.add(PROMPT, params) for params in wishes]
    for row in rows:
        row.random = BranchingRandom(branches)
    while engine.has_work:
        engine.step()
    return tuple((tuple(row.new_tokens.tolist()), row.finish_reason) for row in rows)


@pytest.mark.parametrize(
    "draft",
    [drawn(model(8), [0, 1]), drawn(model(8), [0, 0]), fixed(model(8), [0, 1, 0])],
    ids=["chain", "siblings", "point masses"],
)
def test_an_engine_round_after_round(draft: Draft) -> None:
    """All rounds in one walk, with the real rows, cut at end tokens and at max_tokens: no round leans on another."""
    target = TableTarget(3, order=None, seed=7, eos=[2])
    alone = outcomes(lambda branches: answered(target, Drafter(), [ENDING], branches))
    drafted = outcomes(lambda branches: answered(target, Drafting(draft), [ENDING], branches))
    assert largest_difference(drafted, alone) < EXACT
    of_prompt = target.probabilities_after(PROMPT, ENDING)
    assert alone[(((2,), "stop"),)] == pytest.approx(float(of_prompt[2]))
    assert len(alone) == 1 + 1 + (2 + 3)  # 2; 1; 0 and then 1, 2 or another 0 before one of three


def test_rows_of_a_batch_are_independent() -> None:
    """Two rows with different parameters in one batch: the law of the pair is the product of the laws."""
    target = TableTarget(3, order=None, seed=7, eos=[2])
    wishes = [
        SamplingParams(temperature=1.0, max_tokens=2),
        SamplingParams(temperature=0.5, repetition_penalty=1.5, max_tokens=2),
    ]
    drafter = Drafting(drawn(model(8), [0]))
    pair = outcomes(lambda branches: answered(target, drafter, wishes, branches))
    one, other = (outcomes(lambda branches, w=w: answered(target, Drafter(), [w], branches)) for w in wishes)
    product = {(*a, *b): p * q for a, p in one.items() for b, q in other.items()}
    assert largest_difference(pair, product) < EXACT


@settings(max_examples=25, deadline=None)
@given(seeds, seeds, st.sampled_from(CHAINS + BUSHES), st.sampled_from(list(WARPS)), st.integers(1, 12))
def test_point_masses_give_the_very_tokens_of_plain_sampling(
    seed: int, helper: int, shape: list[int], warp: str, max_tokens: int
) -> None:
    """Seed for seed, for any draft: a position's noise does not know in which round it is used."""
    params = SamplingParams(**{"temperature": 1.0, **WARPS[warp]}, seed=seed, max_tokens=max_tokens)
    target = TableTarget(5, order=3, seed=seed)
    [completion] = Engine(target, Drafting(fixed(model(helper, 5), shape))).generate([PROMPT], params)
    assert completion.tokens == target.plain(PROMPT, params).new_tokens.tolist()


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_without_a_child_to_try_a_drawn_draft_gives_them_too(seed: int) -> None:
    target, params = TableTarget(5, order=3, seed=seed), SamplingParams(temperature=1.0, seed=seed, max_tokens=9)
    [completion] = Engine(target, Drafting(drawn(model(1, 5), []))).generate([PROMPT], params)
    assert completion.tokens == target.plain(PROMPT, params).new_tokens.tolist()


# Wrong rules are found out ----------------------------------------------------------------------------------------


def keeps_p(p: torch.Tensor, q: torch.Tensor, token: int, replacement: bool) -> Any:
    """The token after a rejection from p, and not from what is left of it."""
    return p, residual(p, q, token, replacement)[1]


def never_strikes(p: torch.Tensor, q: torch.Tensor, token: int, replacement: bool) -> Any:
    """q as it was, although what was drawn was struck out of it."""
    return residual(p, q, token, True)


def strikes_the_token(p: torch.Tensor, q: torch.Tensor, token: int, replacement: bool) -> Any:
    """The residual of a point mass, for a token that was drawn."""
    rest = p.clone()
    rest[token] = 0
    return rest / rest.sum(), residual(p, q, token, replacement)[1]


@pytest.mark.parametrize(
    ("wrong", "draft"),
    [
        (keeps_p, drawn(model(8), [0, 0])),
        (strikes_the_token, drawn(model(8), [0, 0])),
        (never_strikes, drawn(model(8), [0, 0])),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_a_wrong_residual_is_found_out(monkeypatch: pytest.MonkeyPatch, wrong: Any, draft: Draft) -> None:
    assert error(model(7), SAMPLING, draft, max_tokens=2) < EXACT
    monkeypatch.setattr(rules, "residual", wrong)
    assert error(model(7), SAMPLING, draft, max_tokens=2) > 1e-3


@pytest.mark.parametrize("replacement", [False, True])
def test_another_order_of_siblings_is_found_out(monkeypatch: pytest.MonkeyPatch, replacement: bool) -> None:
    draft, children = drawn(model(8), [0, 0], replacement=replacement), DraftTree.children

    def by_token(tree: DraftTree, node: int) -> Any:
        return sorted(children(tree, node), key=lambda child: tree.tokens[child])

    monkeypatch.setattr(DraftTree, "children", by_token)
    assert error(model(7), SAMPLING, draft, max_tokens=2) > 1e-3


def test_a_wrong_chance_to_be_kept_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token kept with the square root of its probability: lenient, faster, and not the target any more."""
    keep = BranchingRandom.keep
    monkeypatch.setattr(BranchingRandom, "keep", lambda self, probability: keep(self, probability**0.5))
    assert error(model(7), SAMPLING, drawn(model(8), [0]), max_tokens=2) > 1e-3


def test_drawn_tokens_that_vanish_are_found_out() -> None:
    """The mistake of a drafter, not of the rule: what was drawn and looks improbable does not come into the tree."""
    draft = drawn(model(8), [0])

    def choosy(tokens: Any, random: RowRandom) -> DraftTree:
        tree = draft(tokens, random)
        return tree if tree.draft_probs[0][tree.tokens[1]] > 0.3 else DraftTree.root(tokens[-1])

    assert error(model(7), SAMPLING, draft, max_tokens=2) < EXACT
    assert error(model(7), SAMPLING, choosy, max_tokens=2) > 1e-3


def test_noise_that_is_used_twice_is_found_out() -> None:
    random = BranchingRandom(Branches())
    random.choose(torch.tensor([0.5, 0.5]), 4)
    with pytest.raises(AssertionError, match="position 4"):
        random.choose(torch.tensor([0.5, 0.5]), 4)


# Details ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_takes_the_first_of_equal_tokens(dtype: torch.dtype) -> None:
    """As NumPy and transformers do; bfloat16 has many ties."""
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.integers(0, 4, (50, 40))).to(dtype)
    row: Any = Request(PROMPT, [], SamplingParams(), RowRandom(0))
    for scores in logits:
        [done] = accept([row], [DraftTree.root(1)], [scores.unsqueeze(0)])
        assert done.tokens == [int((scores == scores.max()).nonzero()[0])]


@pytest.mark.parametrize("bad", [[np.nan, 1, 0], [np.inf, 1, 0], [-np.inf] * 3], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("warp", WARPS.values(), ids=WARPS)
def test_logits_that_are_not_numbers_fail_the_row_alone(
    bad: list[float], temperature: float, warp: dict[str, Any]
) -> None:
    params = SamplingParams(**{**warp, "temperature": temperature})
    row: Any = Request(PROMPT, [], params, RowRandom(0))
    fine: Any = Request(PROMPT, [], params, RowRandom(0))
    logits = [torch.tensor([bad]), torch.tensor([[0.0, 5.0, 1.0]])]
    [done, other] = accept([row, fine], [DraftTree.root(1)] * 2, logits)
    assert isinstance(done.error, NumericError)
    assert "NaN or infinite" in str(done.error)
    assert len(other.tokens) == 1


def test_only_visited_nodes_are_looked_at() -> None:
    """A node off the path may hold anything: kernels need not fill what nobody reads."""
    row: Any = Request(PROMPT, [], SamplingParams(), RowRandom(0))
    logits = torch.tensor([[0.0, 1.0], [torch.nan, torch.nan]])
    [done] = accept([row], [DraftTree.chain(1, [0])], [logits])
    assert (done.path, done.tokens) == ([0], [1])


def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the ways made for accelerators: whole batches, and few answers fetched. They run on any device."""
    monkeypatch.setattr(sampling, "on_accelerator", lambda tensor: True)


@settings(max_examples=60, deadline=None)
@given(seeds, st.data())
def test_a_batch_on_an_accelerator_is_decided_like_its_rows_alone(seed: int, data: st.DataObject) -> None:
    target, helper = model(seed, 6), model(seed + 1, 6)
    shapes = data.draw(st.lists(st.sampled_from([[], *CHAINS, *BUSHES]), min_size=1, max_size=5))
    wishes = [{}, {"temperature": 1.0}, *({**warp, "temperature": t} for warp in WARPS.values() for t in (0.0, 0.9))]

    def batch() -> tuple[list[Any], list[DraftTree], list[torch.Tensor]]:
        rows: list[Any] = []
        trees: list[DraftTree] = []
        for i, (shape, kind, wish) in enumerate(zip(shapes, kinds, chosen, strict=True)):
            rows.append(Request(PROMPT, [i], SamplingParams(**wish, seed=i), RowRandom(seed + i)))
            trees.append((drawn if kind else fixed)(helper, shape)([*PROMPT, i], rows[-1].random))
        logits = [torch.stack([target.logits_after([i, n]) for n in range(len(t))]) for i, t in enumerate(trees)]
        return rows, trees, logits

    kinds = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    chosen = data.draw(st.lists(st.sampled_from(wishes), min_size=len(shapes), max_size=len(shapes)))
    alone = [accept([row], [tree], [logits])[0] for row, tree, logits in zip(*batch(), strict=True)]
    assert accept(*batch()) == alone
    with pytest.MonkeyPatch.context() as monkeypatch:
        as_on_an_accelerator(monkeypatch)
        assert accept(*batch()) == alone


def test_an_accelerator_notices_bad_logits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_an_accelerator(monkeypatch)
    for temperature in (0.0, 1.0):
        rows: Any = [Request(PROMPT, [], SamplingParams(temperature=temperature), RowRandom(0))] * 2
        logits = [torch.tensor([[0.0, 1.0]]), torch.tensor([[torch.nan, 1.0]])]
        [fine, done] = accept(rows, [DraftTree.root(1)] * 2, logits)
        assert isinstance(done.error, NumericError)
        assert len(fine.tokens) == 1


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 6))
def test_rows_drawn_together_are_the_rows_drawn_alone(seed: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    probs = torch.from_numpy(random.dirichlet([0.3] * 700, rows))
    noise = random.random(rows).tolist()
    assert draw_rows(probs, noise) == [draw(p, u) for p, u in zip(probs, noise, strict=True)]


class Lenient:
    """A rule that keeps every drafted token whose probability is at least half of what the draft gave it: a rule that
    one number a node is enough for, and one that says it is lossy."""

    name, lossless = "lenient", False

    def decide(self, cursors: Sequence[Cursor]) -> list[Cursor]:
        stepped = []
        for cursor, p in zip(cursors, target_distributions(cursors), strict=True):
            children, q = cursor.tree.children(cursor.node), cursor.tree.chances
            assert q is not None
            kept = [c for c in children if p[cursor.tree.tokens[c]] >= 0.5 * q[c]]
            token = int(cursor.tree.tokens[kept[0]]) if kept else int(p.argmax())
            stepped += [cursor] if follow(cursor, token) else []
        return stepped


def test_another_rule_decides_with_one_probability_a_node() -> None:
    row: Any = Request(PROMPT, [], SamplingParams(temperature=1.0), RowRandom(0))
    p = torch.tensor([0.5, 0.3, 0.2]).log().repeat(3, 1)
    for q, path in ((0.6, [0, 1, 2]), (0.7, [0])):
        tree = DraftTree.chain(0, [1, 1], chances=np.array([1.0, q, 0.4]))
        [done] = accept([row], [tree], [p], Lenient())
        assert done.path == path
        assert done.tokens == [1] * (len(path) - 1) + [0]
    assert tree.clipped(1).chances.tolist() == [1.0, 0.7]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_the_targets_own_whatever_warps_the_choice(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=1, logit_bias={2: 5.0}, logprobs=2)
    row: Any = Request(PROMPT, [], params, RowRandom(0))
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
def test_log_probabilities_are_those_of_the_nodes_that_stand(
    tree: str, temperature: float, on_accelerator: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    row: Any = Request(PROMPT, [], SamplingParams(temperature=temperature, logprobs=2), RowRandom(0))
    [done] = accept([row], [DraftTree(np.array([1, *tokens]), np.array([-1, *parents]))], [logits])
    assert (done.path, done.tokens) == (path, [3, 4, 2])
    expected = logits[path].double().log_softmax(-1)
    found = [[entry.logprob, *(logprob for _, logprob in entry.top)] for entry in done.logprobs]
    second = expected.topk(2).values
    right = torch.cat([expected[[0, 1, 2], done.tokens].unsqueeze(1), second], 1)
    assert torch.allclose(torch.tensor(found, dtype=torch.float64), right, atol=1e-5)
