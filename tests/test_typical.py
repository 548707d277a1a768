"""Typical acceptance: it takes the path its definition names, and the test of losslessness catches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from paceline.core.accept import accept
from paceline.core.sampling import RowRandom, SamplingParams
from paceline.core.tree import DraftTree
from paceline.core.typical import Typical
from paceline.errors import PacelineError
from tests.fakes import TableTarget
from tests.lossless_enumeration import Request, largest_difference, plain, speculative

HOT = SamplingParams(temperature=1.0, max_tokens=9, seed=0)


def row(params: SamplingParams) -> Any:
    return Request([1], [], params, RowRandom(0))


def decided(tree: DraftTree, probs: list[list[float]], params: SamplingParams = HOT, **bounds: float) -> list[int]:
    (done,) = accept([row(params)], [tree], [torch.tensor(probs).log()], Typical(**bounds))
    return done.tokens


def test_the_longest_path_that_stands_is_taken_and_nothing_is_drawn() -> None:
    tree = DraftTree.of(0, [1, 2, 3], [0, 0, 2])
    probs = [[0.1, 0.5, 0.4, 0.0], [0.7, 0.1, 0.1, 0.1], [0.0, 0.1, 0.2, 0.7], [0.1, 0.2, 0.6, 0.1]]
    assert decided(tree, probs) == [2, 3, 2]
    probs[2] = [0.9, 0.04, 0.03, 0.03]  # 3 does not stand any more: of the paths of one token the more probable
    assert decided(tree, probs) == [1, 0]
    assert decided(tree, probs, epsilon=1.0, delta=3.0) == [1]  # nothing stands: the most probable token


def test_the_bound_falls_with_the_entropy() -> None:
    tree = DraftTree.of(0, [3], [0])
    flat = [[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]
    assert decided(tree, flat)[0] == 3
    assert decided(tree, flat, epsilon=0.5, delta=2.0)[0] == 0


def test_it_fails_the_test_that_the_lossless_rule_passes() -> None:
    """Every outcome of two tokens after a tree of guesses, against ancestral sampling; at T, top-p and top-k too."""
    target = TableTarget(4, order=1, seed=0)

    def draft(tokens: Sequence[int], random: RowRandom) -> DraftTree:
        return DraftTree.of(tokens[-1], [1, 2, 3, 1], [0, 0, 1, 1])

    for params in (HOT, replace(HOT, temperature=0.5), replace(HOT, top_p=0.9), replace(HOT, top_k=3)):
        exact = plain(target, [0], params, 2)
        assert largest_difference(speculative(target, [0], params, draft, 2), exact) < 1e-6
        typical = speculative(target, [0], params, draft, 2, rule=partial(accept, rule=Typical()))
        assert len(typical) == 1, "nothing is drawn"
        assert largest_difference(typical, exact) > 0.05


def test_drawn_drafts_are_refused() -> None:
    tree = DraftTree.chain(0, [1], draft_probs=torch.ones(2, 4) / 4)
    (done,) = accept([row(HOT)], [tree], [torch.zeros(2, 4)], Typical())
    assert isinstance(done.error, PacelineError)


def test_greedy_is_greedy() -> None:
    tree = DraftTree.of(0, [2], [0])
    probs = [[0.3, 0.4, 0.3, 0.0], [1.0, 0.0, 0.0, 0.0]]
    assert decided(tree, probs, SamplingParams()) == [1]
    with pytest.raises(TypeError):
        Typical(threshold=1)  # type: ignore[call-arg]
