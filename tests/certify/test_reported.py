"""Sampled tokens judged by the log-probabilities reported with them: honest servers, and one sampling step wrong."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from paceline.certify import asking
from paceline.certify.conditional import (
    EVERYWHERE,
    NORMAL,
    Conditional,
    Words,
    _difference,
    _often,
    _variance,
    drawn,
    is_raw,
    read_places,
)
from paceline.certify.verdict import LEVEL, LONG
from paceline.core.sampling import SamplingParams, probabilities, warp
from paceline.net.completion import Completion

SIZE, TOP, ANSWERS = 60, 20, 28
Asked = tuple[tuple[str, Any], ...]


@cache
def after(context):
    """Log-probabilities of the next token [SIZE], and the best as they are reported."""
    logits = 2.5 * np.random.default_rng(context).normal(size=SIZE)
    logits[context[-1]] += 3
    logprobs = logits - np.log(np.exp(logits).sum())
    return logprobs, [(str(i), float(logprobs[i])) for i in np.argsort(-logprobs)[:TOP]]


@cache
def drawn_from(context, counted, frequency, asked):
    """What a token is drawn from, [SIZE]. counted: tokens that a penalty counts, and how often each came."""
    scores = torch.tensor(after(context)[0], dtype=torch.float32)[None]
    for token, times in counted:
        scores[0, token] -= frequency * times
    p = probabilities(scores, SamplingParams(**{"temperature": 1.0} | dict(asked)), [])[0].double().numpy()
    return p / p.sum()


def places(fields, rng, *, wrong="", length=40):
    """An answer of a random model over two tokens of context; wrong: what its sampler does wrongly."""
    text, made = [0, 1], []
    frequency = fields.get("frequency_penalty", 0.0)
    asked = () if wrong == "plain" else tuple((k, v) for k, v in fields.items() if k != wrong and "penalty" not in k)
    for n in range(length):
        context = (text[-2] % 3, text[-1])
        counted = Counter(text[2:-1] if wrong == "penalty a token late" else text[2:]) if frequency else {}
        p = drawn_from(context, frozenset(counted.items()), frequency, asked)
        token = int(rng.choice(SIZE, p=p))
        if wrong == "best after 20" and n >= 20 and rng.random() < 0.2:
            token = int(p.argmax())
        logprobs, best = after(context)
        made.append((str(token), float(logprobs[token]), best))
        text.append(token)
    return made


@cache
def plain_answers():
    """Of an honest sampler that nothing is asked of."""
    rng = np.random.default_rng(0)
    return [places({}, rng) for _ in range(ANSWERS)]


def judged(fields, wrong=""):
    counts, words, rng = Conditional(), Words(), np.random.default_rng(0)
    answers = [places(fields, rng, wrong=wrong) for _ in range(ANSWERS)] if fields or wrong else plain_answers()
    for answer in answers:
        read_places(answer, fields, counts, words, "a way")
    return counts


WAYS = [{}, {"top_p": 0.8}, {"top_k": 10}, {"min_p": 0.01}, {"frequency_penalty": 1.0}]


@pytest.mark.parametrize("kept", [TOP, TOP - 1], ids=["beside the last", "in place of the last"])
def test_a_token_that_a_server_adds_to_the_best_is_none_of_them(kept):
    """vLLM reports the token that came: then it would come each time that it is reported."""
    counts, words = Conditional(), Words()
    for answer in plain_answers():
        reported = []
        for said, logprob, top in answer:
            best = top if (said, logprob) in top else [*top[:kept], (said, logprob)]
            listed = [{"token": token, "logprob": value} for token, value in best]
            reported.append({"token": said, "logprob": logprob, "top_logprobs": listed})
        read_places(asking.places(Completion("", "", logprobs=reported), TOP), {}, counts, words, "a way")
    assert counts.tokens == ANSWERS * 40
    assert not counts.findings(1e-3)


@pytest.mark.parametrize("fields", WAYS, ids=str)
def test_an_honest_sampler_is_not_accused(fields):
    counts = judged(fields)
    assert not counts.findings(1e-3)
    assert counts.tokens == ANSWERS * 40
    assert counts.facts(1e-3)["detectable"] < 0.2


@pytest.mark.parametrize(("fields", "wrong"), [
    ({}, "best after 20"), ({"top_p": 0.8}, "top_p"), ({"top_k": 10}, "top_k"), ({"min_p": 0.05}, "min_p"),
    ({"frequency_penalty": 1.0}, "penalty a token late"),
], ids=str)
def test_a_wrong_step_is_found_without_a_reference(fields, wrong):
    found = judged(fields, wrong).findings(1e-3)
    assert found, wrong
    assert found[0].p < 1e-3


SAMPLINGS = [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 10}, {"min_p": 0.02}]
FLATTER = 0.77  # exponent of a drafter's probabilities: it is less sure than its target


@cache
def target_of(context, asked):
    return drawn_from(context, frozenset(), 0.0, asked)


@cache
def draft_of(context, asked):
    q = target_of(context, asked) ** FLATTER
    return q / q.sum()


def speculated(fields, rng, wrong, length=40):
    """An answer whose tokens are drafted and verified one by one; wrong: what verification does wrongly."""
    text, made, asked = [0, 1], [], tuple(fields.items())
    for _ in range(length):
        context = (text[-2] % 3, text[-1])
        p, q = target_of(context, asked), draft_of(context, asked)
        others = tuple(one for one in asked if one[0] != "temperature")
        verified = target_of(context, others) if wrong == "accepted at temperature 1" else p
        token = int(rng.choice(SIZE, p=q))
        if rng.random() * q[token] >= verified[token]:
            rest = verified if wrong == "residual not used" else np.maximum(verified - q, 0.0)
            token = int(rng.choice(SIZE, p=rest / rest.sum()))
        logprobs, best = after(context)
        made.append((str(token), float(logprobs[token]), best))
        text.append(token)
    return made


@pytest.mark.parametrize(("wrong", "seed", "few", "many"), [
    ("", 0, -2, 2), ("", 1, -2, 2), ("residual not used", 1, -8, -4), ("residual not used", 6, -8, -4),
    ("accepted at temperature 1", 0, -8, -2),
])
def test_a_small_shift_shows_over_all_samplings_together(wrong, seed, few, many):
    """few, many: how far the best token is from what is right, in standard deviations."""
    counts, words, rng = Conditional(), Words(), np.random.default_rng(seed)
    for fields in SAMPLINGS:
        for _ in range(15):
            read_places(speculated(fields, rng, wrong), fields, counts, words, str(fields))
    hits, low, high = counts._of(*EVERYWHERE)
    assert few < (hits - (low + high).sum() / 2) / _variance(low, high) ** 0.5 < many
    found = counts.findings(LEVEL * LONG)
    assert bool(found) == bool(wrong)
    if wrong == "residual not used":  # in no sampling alone
        assert all(one.what.endswith("(however sampled)") for one in found)


def test_hits_that_hang_together_are_taken_for_normal_at_their_level():
    """Each trial's probability hangs on the one before."""
    rng, p = np.random.default_rng(0), []
    noise = rng.random((3000, 400))
    for row in noise:
        hits, high, last = 0, np.zeros(400), False
        for i, one in enumerate(row):
            high[i] = 0.7 if last else 0.2
            last = bool(one < high[i])
            hits += last
        assert _variance(high, high) > NORMAL
        p.append(_often(hits, high, high))
    assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=0.015)
    assert np.mean(np.array(p) < 0.002) < 0.006


def test_what_the_model_excludes_and_both_servers_say_is_no_difference():
    """Once here and never in the control is chance; often here is not."""
    none = np.zeros(1000)
    assert _difference((1.0, none, none), (0.0, none, none)) > 0.1
    assert _difference((60.0, none, none), (0.0, none, none)) < 1e-9


def test_log_probabilities_after_the_temperature_are_noticed():
    hot, cold = [("a", -0.4, [("a", -0.4), ("b", -1.5)])], [("a", -0.1, [("a", -0.1), ("b", -2.4)])]
    assert is_raw(hot, hot)
    assert not is_raw(hot, cold)


def test_filters_of_reported_tokens_are_those_of_the_engine():
    """Groups of equally probable tokens, at once, as the engine would filter them one by one."""
    rng = np.random.default_rng(0)
    for _ in range(400):
        count, number = int(rng.integers(1, 12)), int(rng.integers(0, 30))
        best = np.sort(np.log(rng.dirichlet(np.ones(count + 3))))[::-1][:count]
        scores, counts = np.append(best, [best[-1], -9.0 + rng.normal()]), np.array([1] * count + [number, 1])
        asked: dict[str, Any] = {
            "temperature": float(rng.choice([1, 0.5, 1.7])), "top_k": int(rng.choice([0, 1, 2, 5, 40])),
            "top_p": float(rng.choice([1, 0.9, 0.5, 0.1])), "min_p": float(rng.choice([0, 0.05, 0.3])),
        }  # fmt: skip
        each = torch.tensor(np.repeat(scores, counts))[None]
        probs = warp(each, SamplingParams(**asked), [])[0].softmax(-1).numpy()
        ends = np.cumsum(counts)
        expected = [probs[end - size : end].sum() for end, size in zip(ends, counts, strict=True)]
        np.testing.assert_allclose(drawn(scores, counts, **asked), expected, atol=1e-12)
