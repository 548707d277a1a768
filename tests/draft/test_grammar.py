"""Grammars with drafts: the law is that of plain constrained decoding, and what is forced is drafted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.draft.methods.grammar import Forced
from paceline.engine.engine import Engine
from tests.draft.drafting import like
from tests.fakes import TableTarget
from tests.lossless_enumeration import drawn, fixed, largest_difference, plain, speculative


class NoRepeats:
    """A token never follows itself, and 0 comes third at the earliest."""

    def allowed(self, answer: Sequence[int], size: int) -> torch.Tensor:
        mask = torch.ones(size, dtype=torch.bool)
        mask[0] = len(answer) >= 2
        mask[list(answer[-1:])] = False
        return mask


class Counting:
    """0 1 2 3 0 1 2 3 ... from wherever the answer begins: after the first token all is forced."""

    def allowed(self, answer: Sequence[int], size: int) -> torch.Tensor:
        mask = torch.full((size,), not answer)
        mask[[(token + 1) % size for token in answer[-1:]]] = True
        return mask

    def forced(self, answer: list[int]) -> list[int]:
        return [(answer[-1] + 1 + i) % 4 for i in range(6)] if answer else []


@pytest.mark.parametrize("shape", [[0], [0, 1], [0, 0], [0, 0, 1]])
def test_the_law_is_that_of_plain_constrained_decoding(shape: list[int]) -> None:
    target = TableTarget(vocab_size=4, order=2, seed=3, scale=1.0)
    free = SamplingParams(temperature=0.8)
    params = SamplingParams(temperature=0.8, grammar=NoRepeats()).of_row(1, frozenset())
    law = plain(target, [1], params, 3)
    assert largest_difference(law, plain(target, [1], free, 3)) > 0.05
    for draft in (drawn(like(target), shape, params=params), fixed(target, shape)):
        assert largest_difference(speculative(target, [1], params, draft, 3), law) < 1e-9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_forced_is_drafted_and_accepted(temperature: float) -> None:
    target = TableTarget(vocab_size=4, order=2, seed=3)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=15, grammar=Counting()) for i in range(3)]
    prompts = [[1, 2], [3], [0, 0, 1]]
    expected = Engine(target).generate(prompts, params)
    done = Engine(target, Forced(), max_batch=3).generate(prompts, params)
    assert [one.tokens for one in done] == [one.tokens for one in expected]
    for one in done:
        assert all((b - a) % 4 == 1 for a, b in zip(one.tokens, one.tokens[1:], strict=False))
        assert one.rounds == 3  # one token, then seven at a time
