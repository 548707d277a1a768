"""Warping equals transformers' own processors, in torch and compiled."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from paceline.core.sampling import SamplingParams, distributions, nucleus, probabilities, warp
from paceline.errors import NumericError, PacelineError, shortened
from paceline.kernels.rows import best_token, softmax

seeds = st.integers(0, 2**31)
FLOATS = [torch.float32, torch.float64]


# Warping --------------------------------------------------------------------------------------------------------


def processors(params):
    """What transformers' generate() builds for these parameters, in its order."""
    made = hf.LogitsProcessorList()
    if params.logit_bias:
        made.append(hf.SequenceBiasLogitsProcessor({(i,): float(b) for i, b in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        made.append(hf.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.bad_words:
        made.append(hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.is_greedy:
        return made
    if params.temperature != 1:
        made.append(hf.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        made.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        made.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        made.append(hf.MinPLogitsWarper(params.min_p))
    return made


def reference(logits, params, contexts):
    """`logits` after transformers' processors, row by row: contexts may differ in length."""
    rows = [
        processors(params)(torch.from_numpy(context)[None], row[None].clone())
        for row, context in zip(logits, contexts, strict=True)
    ]
    return torch.cat(rows)


def agree(ours, theirs):
    """Exactly the same tokens dropped, and the same scores for the others."""
    assert torch.equal(ours == -torch.inf, theirs == -torch.inf)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def logits_of(seed, rows, vocab_size, *, ties, dtype):
    """Random logits; with `ties` on a coarse grid, as bfloat16 makes them."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(rows, vocab_size)) * 3
    return torch.from_numpy(np.round(values * 2) / 2 if ties else values).to(dtype)


ALONE = {
    "temperature": st.sampled_from([1e-6, 0.1, 0.7, 1.0, 5.0]),
    "top_k": st.sampled_from([1, 2, 5, 40, 1000]),
    "top_p": st.sampled_from([1e-9, 0.01, 0.3, 0.9, 0.99, 0.9999, 1 - 1e-9]),
    "min_p": st.sampled_from([1e-9, 0.01, 0.2, 1.0]),
    "repetition_penalty": st.sampled_from([0.5, 1.1, 3.0]),
    "logit_bias": st.dictionaries(st.integers(0, 39), st.sampled_from([-np.inf, -3.0, 0.5, 9.0]), max_size=4),
    "bad_words": st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=4, unique=True),
}


@st.composite
def wishes(draw_):
    """Any parameters at all."""
    chosen = {name: draw_(values) for name, values in ALONE.items() if draw_(st.booleans())}
    return SamplingParams(**{"temperature": draw_(st.sampled_from([0.0, 1.0])), **chosen})


def compare(params, seed, ties, dtype):
    dtype = torch.float64 if params.top_p > 0.9999 else dtype  # 1 - 1e-9 is 1 in float32
    logits = logits_of(seed, 3, 40, ties=ties, dtype=dtype)
    random = np.random.default_rng(seed)
    contexts = [random.integers(0, 3 if params.bad_words else 40, n) for n in (1, 2, 30)]
    before = logits.clone()
    ours, theirs = warp(logits, params, contexts), reference(logits, params, contexts)
    assert torch.equal(logits, before)
    if ties and params.top_p < 1:
        # Which of equal tokens go at the border of the nucleus is chance in transformers' sort; how many is not.
        ours, theirs = ours.sort().values, theirs.sort().values
    agree(ours, theirs)


@pytest.mark.parametrize("name", ALONE)
@settings(max_examples=40)
@given(seeds, st.booleans(), st.sampled_from(FLOATS), st.data())
def test_each_warp_alone_is_transformers(name, seed, ties, dtype, data):
    compare(SamplingParams(**{"temperature": 1.0, name: data.draw(ALONE[name])}), seed, ties, dtype)


@settings(max_examples=150)
@given(wishes(), seeds, st.booleans())
def test_all_warps_together_are_transformers(params, seed, ties):
    # On float64: in float32 two ways of adding up may differ at the border of the nucleus.
    compare(params, seed, ties, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_warped_in_float32(dtype):
    logits = logits_of(0, 2, 40, ties=False, dtype=dtype)
    params = SamplingParams(temperature=0.7, top_p=0.9)
    warped = warp(logits, params, [])
    assert warped.dtype == torch.float32
    agree(warped, reference(logits.float(), params, [np.array([0])] * 2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_openais_penalties_and_min_tokens_look_at_the_answer_alone(temperature):
    """https://platform.openai.com/docs/api-reference: mu -= count * frequency + (count > 0) * presence."""
    wish = SamplingParams(temperature, presence_penalty=0.5, frequency_penalty=0.25, min_tokens=3)
    of_row, logits = wish.of_row(4, frozenset({5, 6, 10**400})), torch.zeros(1, 6)  # a request may name any end
    prompt, answer = [1, 1, 5, 2], [2, 3, 3]
    short, long = (warp(logits, of_row, [np.array([*prompt, *answer[:n]])])[0] for n in (2, 3))
    assert short.tolist() == [0, 0, -0.75, -0.75, 0, -math.inf]
    assert long.tolist() == [0, 0, -0.75, -1.0, 0, 0]


def test_the_nucleus_of_equal_tokens():
    """A quarter each: half the probability is two tokens, and a little more is three. Higher ids stay."""
    scores = torch.zeros(1, 4)
    for top_p, kept in ((0.25, [3]), (0.5, [2, 3]), (0.51, [1, 2, 3]), (0.76, [0, 1, 2, 3])):
        assert torch.isfinite(nucleus(scores, top_p)[0]).nonzero()[:, 0].tolist() == kept


def test_ids_the_model_cannot_write():
    """Images in a prompt: the penalty passes over them, as transformers does."""
    logits, context = torch.tensor([[1.0, -1.0, 2.0]]), [np.array([2, 7, 3])]
    params = SamplingParams(repetition_penalty=2.0)
    agree(warp(logits, params, context), reference(logits, params, context))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"logit_bias": {40: 1.0}}, "logit_bias names token 40; this model's tokens are 0 to 39"),
        ({"bad_words": [[1], [2, 55]]}, "bad_words names token 55"),
        ({"logit_bias": dict.fromkeys(range(40), -np.inf)}, "ban every token"),
        ({"bad_words": [[i] for i in range(40)]}, "ban every token"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_wishes_no_model_can_grant(wish, message, temperature):
    with pytest.raises(PacelineError, match=message):
        warp(torch.zeros(1, 40), SamplingParams(**wish, temperature=temperature), [np.array([1])])


def test_probabilities():
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([[0.0, math.log(3.0), -torch.inf], [5.0, 5.0, 0.0]], dtype=dtype)
        warm = SamplingParams(temperature=1.0)
        assert probabilities(logits[:1], warm, []).tolist() == [pytest.approx([0.25, 0.75, 0])]
        assert probabilities(logits, SamplingParams(), []).tolist() == [[0, 1, 0], [1, 0, 0]]


# The compiled distributions of a CPU ----------------------------------------------------------------------------


def close(ours, theirs):
    """The same distributions [R, V] but for float32's rounding, and exactly the same tokens in them."""
    assert ours.dtype == torch.float32
    assert torch.allclose(ours.double().sum(-1), torch.ones(len(ours), dtype=torch.float64), atol=3e-6)
    assert torch.equal(ours > 0, theirs > 1e-37)
    assert torch.allclose(ours.double(), theirs, rtol=3e-5, atol=1e-37)


def nearest(ours, logits, params, context):
    """The right distribution [1, V] of float64 `logits`; of those whose nucleus ends earlier or later by the rounding
    of a sum in float32, the one with the tokens of `ours`, if there is one."""
    edges = [params.top_p] if params.top_p == 1 else [params.top_p + step for step in (0, -1e-6, 1e-6)]
    found = [warp(logits, replace(params, top_p=top_p), [context]).softmax(-1) for top_p in edges if top_p > 0]
    return next((right for right in found if torch.equal(ours > 0, right[0] > 1e-37)), found[0])


@settings(max_examples=150)
@given(wishes(), seeds, st.booleans(), st.sampled_from([1, 2, 3, 40, 700]), st.sampled_from([0.3, 3.0, 30.0]))
@example(SamplingParams(temperature=1.0, top_p=0.9999), 0, False, 700, 0.3)  # a token at the edge of the nucleus
def test_compiled_distributions_are_the_warped_ones(params, seed, ties, size, spread):
    if params.is_greedy or params.top_p > 0.9999 or (size < 40 and params.shifts_logits):
        return
    random = np.random.default_rng(seed)
    for dtype in (torch.bfloat16, torch.float32):
        logits = logits_of(seed, 3, size, ties=ties, dtype=dtype) * spread
        logits[:, random.random(size) < 0.2] = -torch.inf
        logits[:, int(random.integers(size))] = 1.0
        before, contexts = logits.clone(), [random.integers(0, size, n) for n in (1, 2, 30)]
        ours = probabilities(logits, params, contexts)
        assert torch.equal(logits, before)
        for row, context in enumerate(contexts):
            close(ours[row : row + 1], nearest(ours[row], logits[row : row + 1].double(), params, context))
        if not params.shifts_logits:
            assert torch.equal(distributions(logits, params, 1), ours[1])
            apart = torch.zeros(size, 3).to(dtype).T.copy_(logits)
            assert torch.equal(distributions(apart, params, 1), ours[1])


@pytest.mark.parametrize("spread", [0.2, 3.0, 30.0])
@pytest.mark.parametrize("wish", [{"top_p": 0.05}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 50}, {"min_p": 0.01}])
def test_a_vocabulary_of_true_size(spread, wish):
    """Sums over fifty thousand tokens, ties everywhere (bfloat16), and up to all of them candidates."""
    torch.manual_seed(0)
    params = SamplingParams(temperature=0.9, **wish)
    logits = (torch.randn(1, 50_003) * spread).bfloat16()
    ours, theirs = probabilities(logits, params, [])[0].double(), warp(logits.double(), params, [])[0].softmax(-1)
    # Tokens within rounding of the border, which processors do differently, may go the other way: they hold next to
    # nothing.
    other_way = (ours > 0) != (theirs > 0)
    assert float((ours - theirs).abs().sum()) < 2e-5
    assert int(other_way.sum()) <= 20
    assert set(ours.topk(20).indices.tolist()) == set(theirs.topk(20).indices.tolist())


def test_equal_tokens_at_the_border():
    """A quarter each: top-k keeps all that are as good as the k-th, top-p the higher ids."""
    logits = torch.zeros(1, 4)
    for wish, kept in (
        ({"top_k": 1}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [3]),
        ({"top_p": 0.25}, [3]),
        ({"top_p": 0.5}, [2, 3]),
        ({"top_p": 0.51}, [1, 2, 3]),
        ({"top_p": 0.76}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.5}, [2, 3]),
        ({"min_p": 1.0}, [0, 1, 2, 3]),
        ({"min_p": 1.0, "top_p": 0.5}, [2, 3]),
    ):
        for dtype in (torch.float32, torch.float64):
            probs = probabilities(logits.to(dtype), SamplingParams(temperature=1.0, **wish), [])[0]
            assert probs.tolist() == pytest.approx([1 / len(kept) if i in kept else 0 for i in range(4)]), wish


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.6, 2), (0.95, 2)])
def test_filters_come_one_after_another(dtype, top_p, kept):
    """top-p asks for its share of what top-k left, min-p takes from what top-p left: 0.15 is its least here."""
    logits = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1, 1e-6]], dtype=dtype).log()
    params = SamplingParams(temperature=1.0, top_k=5, top_p=top_p, min_p=0.3)
    assert int((probabilities(logits, params, []) > 0).sum()) == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_top_p_is_a_share_of_what_top_k_left(dtype):
    """Of .4 .3 .2 .1 top-k leaves .57 .43, and half of that is the first token alone."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().to(dtype)
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    assert probabilities(logits, params, [])[0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_to_float32s_last_bits(dtype):
    logits = torch.linspace(-90, 0, 5000).to(dtype)[None]
    ours, theirs = softmax(logits, row=0).double(), logits[0].double().softmax(-1)
    assert (ours[logits[0] <= -87] == 0).all()
    usual = theirs > 1.2e-38  # below, float32 has fewer bits
    assert float(((ours - theirs).abs() / theirs)[usual].max()) < 5e-7
    # Temperature is a division; what rounding does to x / T it does to e^(x / T), times x / T.
    ours, theirs = softmax(logits, 3.0, 0).double(), (logits[0].double() / 3).softmax(-1)
    assert float(((ours - theirs).abs() / theirs).max()) < 5e-6


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [1.0, math.inf], [-math.inf, -math.inf]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_of_what_is_not_numbers(bad, dtype):
    with pytest.raises(NumericError, match="NaN or infinite"):
        softmax(torch.tensor([[0.0, 1.0], bad], dtype=dtype), row=1)


@settings(max_examples=100)
@given(seeds, st.sampled_from([1, 7, 513, 3000]), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_the_best_token_is_the_first_of_the_best(seed, size, dtype):
    logits = logits_of(seed, 2, size, ties=True, dtype=dtype)
    for row in range(2):
        assert best_token(logits, row) == int((logits[row] == logits[row].max()).nonzero()[0])


# Parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", -0.1, "0 (greedy), or 1e-06 or more"),
        ("temperature", 1e-9, "0 (greedy), or 1e-06 or more"),
        ("temperature", math.inf, "0 (greedy), or 1e-06 or more"),
        ("temperature", math.nan, "0 (greedy), or 1e-06 or more"),
        ("temperature", 10**400, "0 (greedy), or 1e-06 or more"),
        ("logit_bias", {1: 10**400}, "a mapping from token ids to numbers (-inf bans a token)"),
        ("repetition_penalty", 10**400, "above 0 (1 is off)"),
        ("top_k", 10**30, "a whole number, 0 (all tokens) to 2,147,483,647"),
        ("max_tokens", 10**30, "a whole number, 1 or more (at most 2,147,483,647)"),
        ("temperature", "hot", "0 (greedy), or 1e-06 or more"),
        ("top_k", -1, "a whole number, 0 (all tokens) to 2,147,483,647"),
        ("top_k", 2.5, "a whole number, 0 (all tokens) to 2,147,483,647"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("min_p", -0.01, "between 0 and 1"),
        ("min_p", None, "between 0 and 1"),
        ("repetition_penalty", 0, "above 0 (1 is off)"),
        ("logit_bias", {3: math.nan}, "a mapping from token ids to numbers (-inf bans a token)"),
        ("logit_bias", {3: math.inf}, "a mapping from token ids to numbers (-inf bans a token)"),
        ("logit_bias", {"3": 1.0}, "a mapping from token ids to numbers (-inf bans a token)"),
        ("logit_bias", [3], "a mapping from token ids to numbers (-inf bans a token)"),
        ("bad_words", [[1], []], "sequences of at least one token id"),
        ("bad_words", [[-1]], "sequences of at least one token id"),
        ("bad_words", ["no"], "sequences of at least one token id"),
        ("max_tokens", 0, "a whole number, 1 or more (at most 2,147,483,647)"),
        ("max_tokens", 9.5, "a whole number, 1 or more (at most 2,147,483,647)"),
        ("seed", -1, "a whole number, 0 to 2**64 - 1, or None"),
        ("seed", 2**64, "a whole number, 0 to 2**64 - 1, or None"),
        ("stop", "end", "a list of non-empty strings"),
        ("stop", ["end", ""], "a list of non-empty strings"),
        ("stop", [3], "a list of non-empty strings"),
        ("stop_token_ids", ["</s>"], "a list of token ids"),
    ],
    ids=str,
)
def test_errors_name_the_field_the_value_and_the_rule(field, value, rule):
    with pytest.raises(PacelineError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value) == f"{field} is {shortened(repr(value))}; it must be {rule}."


@pytest.mark.parametrize(
    "wish",
    [{"temperature": 1}, {"top_p": 1}, {"min_p": 1}, {"logit_bias": {3: -math.inf}}, {"stop": ("x",)}, {"seed": 0},
     {"seed": 2**64 - 1}],
    ids=str,
)
def test_values_at_the_edge_are_fine(wish):
    assert SamplingParams(**wish)


def test_rows_that_warp_alike():
    """Seeds and ends do not matter for the distribution; anything else does."""
    one = SamplingParams(temperature=0.7, seed=1, max_tokens=9, stop=["x"])
    assert one.warps_like(SamplingParams(temperature=0.7, seed=2, ignore_eos=True, stop_token_ids=[4]))
    for name, value in {
        "temperature": 0.8, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "logit_bias": {1: 1.0},
        "bad_words": [[1]],
    }.items():  # fmt: skip
        assert not one.warps_like(SamplingParams(**{"temperature": 0.7, name: value}))


def test_the_option_names_are_the_fields():
    assert "temperature" in SamplingParams.option_names()
    assert SamplingParams(**{name: getattr(SamplingParams(), name) for name in SamplingParams.option_names()})
