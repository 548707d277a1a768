"""Exact enumeration: the probability of everything a piece of random code can do, by walking all of its branches.

`outcomes(run)` calls `run` again and again, each time with a `Branches` that answers the random decisions differently,
until every branch has been walked, and adds up the probability of each result. No sampling, no tolerance but
rounding: two distributions that differ by 1e-9 are told apart.

    outcomes(lambda branches: (BranchingRandom(branches).keep(0.25), branches.decide([0.5, 0.5])))
    # {(True, 0): 0.125, (True, 1): 0.125, (False, 0): 0.375, (False, 1): 0.375}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from paceline.core.accept import accept
from paceline.core.sampling import RowRandom, SamplingParams
from paceline.core.tree import DraftTree
from tests.fakes import TableTarget


class Branches:
    """One way through all random decisions: the branches in `script` first, then the first possible ones."""

    def __init__(self, script: Sequence[int] = ()):
        self.probability = 1.0
        self.trail: list[tuple[int, int]] = []
        self._script = script

    def decide(self, weights: Sequence[float]) -> int:
        """An index into `weights`, which are as probable as they are heavy; one of weight 0 is never taken."""
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        assert possible, "nothing can happen"
        at = len(self.trail)
        branch = self._script[at] if at < len(self._script) else 0
        self.trail.append((branch, len(possible)))
        self.probability *= weights[possible[branch]] / sum(weights)
        return possible[branch]

    def next_script(self) -> list[int] | None:
        """The way after this one: the last decision that has another branch left takes it."""
        trail = list(self.trail)
        while trail and trail[-1][0] == trail[-1][1] - 1:
            trail.pop()
        return [branch for branch, _ in trail[:-1]] + [trail[-1][0] + 1] if trail else None


def outcomes(run: Callable[[Branches], Hashable]) -> dict[Any, float]:
    """Probability of each result of `run`, which must take all its randomness from what it is given."""
    found: dict[Any, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        branches = Branches(script)
        result = run(branches)
        found[result] += branches.probability
        script = branches.next_script()
    assert abs(sum(found.values()) - 1) < 1e-6  # a float32 model does not round alike under every load
    return dict(found)


class _NoNoise:
    """Where a round's noise would begin; there is none."""

    def begin(self, position: int) -> None:
        """Nothing to do: decisions are walked, not drawn."""

    def forget(self) -> None:
        """Nothing to do either."""

    def random(self) -> float:
        raise AssertionError("noise was asked for, and not a decision")


class BranchingRandom(RowRandom):
    """A row's randomness that branches at every decision. Randomness taken any other way is an error."""

    def __init__(self, branches: Branches):
        self.seed = 0
        self.branches = branches
        self.asked: set[int] = set()

    def emit(self, position: int) -> float:
        raise AssertionError("noise was asked for, and not a decision")

    @property
    def free(self) -> Any:  # type: ignore[override]
        return _NoNoise()

    def choose(self, probs: torch.Tensor, position: int) -> int:
        # Noise belongs to a position: used twice, it would tie together what must be independent.
        assert position not in self.asked, f"output position {position} was decided twice"
        self.asked.add(position)
        return self.branches.decide(probs.tolist())

    def keep(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return self.branches.decide([probability, 1 - probability]) == 0

    def draft(self, probs: torch.Tensor) -> int:
        return self.branches.decide(probs.tolist())


class Request:
    """The little that acceptance asks of a row."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, random: RowRandom):
        self.params = params
        self.random = random
        self.tokens = np.array([*prompt, *answer], np.int64)
        self.num_new = len(answer)


Draft = Callable[[Sequence[int], RowRandom], DraftTree]
"""A drafter without state: the tree it proposes behind some tokens, drawing from the randomness given."""

Rule = Callable[..., list[Any]]


def one_round(
    target: TableTarget,
    prompt: Sequence[int],
    answer: tuple[int, ...],
    params: SamplingParams,
    draft: Draft,
    max_tokens: int,
    random: RowRandom,
    rule: Rule = accept,
) -> tuple[int, ...]:
    """Tokens that one round adds behind `answer`, the tree cut and the tokens counted as in the engine."""
    request = Request(prompt, answer, params, random)
    tree = draft(request.tokens.tolist(), random).clipped(max_tokens - len(answer) - 1)
    paths: list[list[int]] = []
    for token, above in zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True):
        paths.append([*(paths[above] if above >= 0 else request.tokens[:-1].tolist()), token])
    logits = torch.stack([target.logits_after(path) for path in paths])
    [done] = rule([request], [tree], [logits])
    return tuple(done.tokens)


def speculative(
    target: TableTarget,
    prompt: Sequence[int],
    params: SamplingParams,
    draft: Draft,
    max_tokens: int,
    rule: Rule = accept,
) -> dict[tuple[int, ...], float]:
    """Probability of every answer of `max_tokens` tokens, over all rounds it takes and all drafts there may be.

    A round depends on nothing but the answer so far, so each is enumerated once for every answer it may begin at."""
    finished: dict[tuple[int, ...], float] = defaultdict(float)
    begun: dict[tuple[int, ...], float] = {(): 1.0}
    while begun:
        answer = min(begun, key=len)
        so_far = begun.pop(answer)
        of_round = outcomes(
            lambda branches, answer=answer: one_round(  # type: ignore[misc]
                target, prompt, answer, params, draft, max_tokens, BranchingRandom(branches), rule
            )
        )
        for tokens, probability in of_round.items():
            longer = (*answer, *tokens)
            assert len(tokens) > 0
            assert len(longer) <= max_tokens
            to = finished if len(longer) == max_tokens else begun
            to[longer] = to.get(longer, 0.0) + so_far * probability
    return dict(finished)


def plain(
    target: TableTarget, prompt: Sequence[int], params: SamplingParams, max_tokens: int
) -> dict[tuple[int, ...], float]:
    """Probability of every answer of `max_tokens` tokens when the target decodes alone: a product, nothing else."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(max_tokens):
        answers = {
            (*answer, token): before * p
            for answer, before in answers.items()
            for token, p in enumerate(target.probabilities_after([*prompt, *answer], params).tolist())
            if p > 0
        }
    return answers


def largest_difference(one: dict[Any, float], other: dict[Any, float]) -> float:
    """Largest difference of the probabilities of any outcome."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())


# Drafters -----------------------------------------------------------------------------------------------------


def drawn(
    model: TableTarget,
    parent: Sequence[int],
    *,
    replacement: bool = False,
    params: SamplingParams = SamplingParams(temperature=1.0),
    go_on: float = 0.0,
) -> Draft:
    """Trees of shape `parent` (of the drafted nodes, as in DraftTree.of) drawn from a draft model warped by `params`.

    go_on  nothing is drafted behind a token less probable than this: a stop rule."""

    @cache
    def law_behind(tokens: tuple[int, ...]) -> torch.Tensor:
        return model.probabilities_after(tokens, params)

    def draft(tokens: Sequence[int], random: RowRandom) -> DraftTree:
        paths, node_of = [tuple(tokens)], [0]
        above, q, left = [-1], [law_behind(paths[0])], {}
        probability = [1.0]
        for shaped in parent:
            node = node_of[shaped]
            if node < 0 or probability[node] < go_on:
                node_of.append(-1)
                continue
            law = left.get(node, q[node])
            if law.sum() == 0:  # every token there is has been drawn
                node_of.append(-1)
                continue
            token = random.draft(law)
            if not replacement:
                left[node] = law.clone()
                left[node][token] = 0
            node_of.append(len(paths))
            paths.append((*paths[node], token))
            above.append(node)
            probability.append(float(q[node][token]))
            q.append(law_behind(paths[-1]))
        nodes = [path[-1] for path in paths[1:]]
        return DraftTree.of(tokens[-1], nodes, above[1:], draft_probs=torch.stack(q), replacement=replacement)

    return draft


def fixed(model: TableTarget, parent: Sequence[int]) -> Draft:
    """Point-mass trees of shape `parent`: siblings are a draft model's best tokens, best first."""

    def draft(tokens: Sequence[int], random: RowRandom) -> DraftTree:
        paths = [list(tokens)]
        children: dict[int, int] = defaultdict(int)
        for node in parent:
            ranked = model.logits_after(paths[node]).argsort(descending=True).tolist()
            paths.append([*paths[node], ranked[children[node] % len(ranked)]])
            children[node] += 1
        return DraftTree.of(tokens[-1], [path[-1] for path in paths[1:]], parent)

    return draft
