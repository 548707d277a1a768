"""Grammars with drafts: the law is that of plain constrained decoding, and what is forced is drafted."""

from dataclasses import replace

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from paceline.core.sampling import SamplingParams
from paceline.draft.methods.grammar import Forced
from paceline.engine.engine import Engine
from paceline.serve.structure import Matched
from tests.draft.drafting import like
from tests.fakes import TableTarget
from tests.lossless_enumeration import coupled, fixed, largest_difference, plain, speculative


class NoRepeats:
    """A token never follows itself, and 0 comes third at the earliest."""

    def allowed(self, answer, size):
        mask = torch.ones(size, dtype=torch.bool)
        mask[0] = len(answer) >= 2
        mask[list(answer[-1:])] = False
        return mask


class Counting:
    """0 1 2 3 0 1 2 3 ... from wherever the answer begins: after the first token all is forced."""

    def allowed(self, answer, size):
        mask = torch.full((size,), not answer)
        mask[[(token + 1) % size for token in answer[-1:]]] = True
        return mask

    def forced(self, answer):
        return [(answer[-1] + 1 + i) % 4 for i in range(6)] if answer else []


class Letters:
    """A tokenizer of five tokens, as llguidance wants it."""

    eos_token_id, bos_token_id, special_token_ids = 4, None, (4,)
    tokens = (b"a", b"b", b"c", b"d", b"<end>")

    def __call__(self, text):
        return ["abcd".index(letter) for letter in text]


@pytest.fixture(scope="module")
def spoken():
    """A grammar of the server's kind: a, then b or cc as often as one likes, then d."""
    tokens = LLTokenizer(TokenizerWrapper(Letters()))
    return Matched(LLMatcher(tokens, LLMatcher.grammar_from_lark('start: "a" ("b" | "cc")* "d"')), [4])


class Only:
    """These tokens alone."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def allowed(self, answer, size):
        return torch.tensor([token in self.tokens for token in range(size)])


@pytest.mark.parametrize("shape", [[0], [0, 1], [0, 0], [0, 0, 1]])
@pytest.mark.parametrize("kind", ["no repeats", "spoken"])
def test_the_law_is_that_of_plain_constrained_decoding(shape, kind, spoken):
    """Whether q knows the grammar, so that it drafts nothing illegal, or acceptance refuses what is."""
    size, new = (4, 3) if kind == "no repeats" else (5, 4)
    new -= len(shape) > 1  # or it takes seconds
    target = TableTarget(vocab_size=size, order=2, seed=3, scale=1.0)
    free = SamplingParams(temperature=0.8)
    params = replace(free, grammar=NoRepeats() if kind == "no repeats" else spoken).of_row(1, frozenset())
    law, helper = plain(target, [1], params, new), like(target)
    assert largest_difference(law, plain(target, [1], free, new)) > 0.05
    for draft in (coupled(helper, shape, params=params), coupled(helper, shape, params=free), fixed(target, shape)):
        assert largest_difference(speculative(target, [1], params, draft, new), law) < 1e-9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_forced_is_drafted_and_accepted(temperature):
    target = TableTarget(vocab_size=4, order=2, seed=3)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=15, grammar=Counting()) for i in range(3)]
    prompts = [[1, 2], [3], [0, 0, 1]]
    expected = Engine(target).generate(prompts, params)
    done = Engine(target, Forced(), max_batch=3).generate(prompts, params)
    assert [one.tokens for one in done] == [one.tokens for one in expected]
    for one in done:
        assert all((b - a) % 4 == 1 for a, b in zip(one.tokens, one.tokens[1:], strict=False))
        assert one.rounds == 3  # one token, then seven at a time
