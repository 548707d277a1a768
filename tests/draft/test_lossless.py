"""Every method in the registry, through the engine: the answer is plain decoding's, token for token.

All that needs no checkpoint is here of itself; a method that does brings its own test.
"""

from functools import cache

import pytest

from paceline.draft.registry import describe, names
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from tests.draft.prompts import PARAMS, PROMPTS, plain
from tests.fakes import TableTarget

ALONE = [name for name in names() if describe(name).checkpoint != "required"]
SPECS = [
    *ALONE,
    "prompt-lookup,variant=transformers",
    "prompt-lookup,variant=vllm,min_ngram=2,max_ngram=4,draft=3",
    "sam,grow=0,source=earliest",
    "sam,min_match=3+prompt-lookup",
    "sam+none",
]
BRING = ("none", "prediction", "grammar", "past-answer")
"""They have nothing to draft unless the request brings it."""
KINDS = [
    *((params, ()) for params in ("greedy", "greedy, penalised", "sampled", "one token")),
    *((params, (0,)) for params in ("greedy", "sampled", "ends early", "two tokens")),
]
"""Names of PARAMS and end tokens: greedy and sampled text with both, the others with one."""


def answers(target, spec, params, **options):
    done = Engine(target, draft=spec, **options).generate(PROMPTS, params)
    return [(one.tokens, one.finish_reason) for one in done]


@cache
def case(kind, eos):
    """A target, parameters, and what plain decoding answers, for every drafter."""
    target, params = TableTarget(vocab_size=8, order=2, seed=4, eos=eos), PARAMS[kind]
    return target, params, plain(target, params)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("kind", "eos"), KINDS)
def test_equals_plain_decoding(spec, kind, eos):
    target, params, expected = case(kind, eos)
    assert answers(target, spec, params) == expected
    assert answers(target, spec, params, max_batch=2, prefill_chunk=4) == expected


@pytest.mark.parametrize("spec", SPECS)
def test_stops_at_the_end_of_the_context(spec):
    target = TableTarget(vocab_size=8, order=2, seed=4, max_context=45)
    params = SamplingParams(max_tokens=100)
    given = answers(target, spec, params)
    assert given == plain(target, params)
    assert {reason for _, reason in given} == {"context"}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in BRING])
def test_drafts_are_accepted(spec):
    """A target of few states soon repeats itself; a drafter that copies must profit."""
    target = TableTarget(vocab_size=8, order=2, seed=4)
    done = Engine(target, draft=spec).generate(PROMPTS, SamplingParams(max_tokens=200))
    assert sum(one.new_tokens for one in done) / sum(one.rounds for one in done) > 2
    sources = {who for one in done for who, _ in one.runs}
    assert spec == "auto" or sources - {""} <= set(spec.replace(",", "+").split("+"))
    assert len(sources) > 1


@pytest.mark.parametrize("spec", ["sam", "prompt-lookup"])
def test_requests_in_a_row_leave_nothing_behind(spec):
    target = TableTarget(vocab_size=8, order=2, seed=4)
    engine, params = Engine(target, draft=spec), SamplingParams(max_tokens=50)
    first, second = engine.generate(PROMPTS, params), engine.generate(PROMPTS, params)
    assert [one.tokens for one in first] == [one.tokens for one in second]
    assert [one.rounds for one in first] == [one.rounds for one in second]
