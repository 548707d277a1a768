"""Exact enumeration: the probability of everything a piece of random code can do, by walking all of its branches.

`outcomes(run)` calls `run` again and again, each time with a `Branches` that answers the random decisions differently,
until every branch has been walked, and adds up the probability of each result. No sampling, no tolerance but
rounding: two distributions that differ by 1e-9 are told apart.

    outcomes(lambda branches: (BranchingNoise(branches).happens(0.25, 0), branches.decide([0.5, 0.5])))
    # {(True, 0): 0.125, (True, 1): 0.125, (False, 0): 0.375, (False, 1): 0.375}
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from paceline.core.accept import accept
from paceline.core.noise import Noise
from paceline.core.sampling import SamplingParams
from paceline.core.tree import DraftTree


class Branches:
    """One way through all random decisions: the branches in `script` first, then the first possible ones."""

    def __init__(self, script=()):
        self.probability = 1.0
        self.trail = []
        self.script = script

    def decide(self, weights):
        """An index into `weights`, which are as probable as they are heavy; one of weight 0 is never taken."""
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        assert possible, "nothing can happen"
        at = len(self.trail)
        branch = self.script[at] if at < len(self.script) else 0
        self.trail.append((branch, len(possible)))
        self.probability *= weights[possible[branch]] / sum(weights)
        return possible[branch]

    def next_script(self):
        """The way after this one: the last decision that has another branch left takes it."""
        trail = list(self.trail)
        while trail and trail[-1][0] == trail[-1][1] - 1:
            trail.pop()
        return [branch for branch, _ in trail[:-1]] + [trail[-1][0] + 1] if trail else None


def outcomes(run):
    """Probability of each result of `run`, which must take all its randomness from what it is given."""
    found = defaultdict(float)
    script = []
    while script is not None:
        branches = Branches(script)
        result = run(branches)
        found[result] += branches.probability
        script = branches.next_script()
    assert abs(sum(found.values()) - 1) < 1e-6  # a float32 model does not round alike under every load
    return dict(found)


class BranchingNoise(Noise):
    """Noise that branches at every decision. It couples drafts and target as real noise does, in a way that can be
    walked: a place in the text has one uniform number, from which every distribution takes a token by its cumulative
    sums. Each decision leaves the part of the number's range that agrees with it."""

    def __init__(self, branches):
        self.seed = self.key = 0
        self.branches = branches
        self.decided = set()
        self._left = {}

    def copied(self, branches):
        """The same noise, as far as it is decided, on another way that begins alike."""
        branches.trail, branches.probability = [*self.branches.trail], self.branches.probability
        made = BranchingNoise(branches)
        made.decided, made._left = {*self.decided}, {**self._left}
        return made

    def choose(self, probs, position):
        # The noise of a position decides one token: used twice, it would tie together what must be independent.
        assert position not in self.decided, f"output position {position} was decided twice"
        self.decided.add(position)
        return self._taken(probs, position)

    def guess(self, probs, position, count=1, tokens=None):
        given = probs.tolist()
        possible = sum(p > 0 for p in given)
        if not possible or not all(map(math.isfinite, given)):
            return np.empty(0, np.int64), np.empty(0)
        first = self._taken(probs, position)
        others = [i for i in sorted(range(len(given)), key=given.__getitem__, reverse=True) if i != first]
        best = np.array([first, *others][: min(count, possible)])
        return best, np.arange(1.0, len(best) + 1)

    def happens(self, probability, position):
        assert 0 <= probability <= 1
        return self.branches.decide([probability, 1 - probability]) == 0

    def _taken(self, probs, position):
        low, high = self._left.get(position, (0.0, 1.0))
        given = probs.tolist()
        total = sum(given)
        ends = [part / total for part in accumulate(given)]
        parts = [(max(low, begin), min(high, end)) for begin, end in zip([0.0, *ends], ends, strict=False)]
        widths = zip(parts, given, strict=True)
        wide = [end - begin if end - begin > 1e-12 and p > 0 else 0.0 for (begin, end), p in widths]
        token = self.branches.decide(wide)
        self._left[position] = parts[token]
        return token


class Request:
    """The little that acceptance asks of a row."""

    def __init__(self, prompt, answer, params, noise):
        self.params = params
        self.noise = noise
        self.tokens = np.array([*prompt, *answer], np.int64)
        self.num_new = len(answer)


Draft = Callable[[Sequence[int], int, Noise], DraftTree]
"""A drafter without state: the tree it proposes after some tokens, of which so many are the answer's, by this noise."""

Rule = Callable[..., list[Any]]


def one_round(target, prompt, answer, params, draft, max_tokens, noise, rule=accept):
    """Tokens that one round adds after `answer`, the tree cut and the tokens counted as in the engine."""
    request = Request(prompt, answer, params, noise)
    tree = draft(request.tokens.tolist(), len(answer), noise).clipped(max_tokens - len(answer) - 1)
    paths = []
    for token, above in zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True):
        paths.append([*(paths[above] if above >= 0 else request.tokens[:-1].tolist()), token])
    logits = torch.stack([target.logits_after(path) for path in paths])
    [done] = rule([request], [tree], [logits])
    return tuple(done.tokens)


def answer_of(target, prompt, params, draft, max_tokens, noise, rule=accept, answer=(), after=lambda answer: None):
    """The answer of `max_tokens` tokens, round by round, by one row's noise.

    answer  its tokens so far. after: called with it after each round."""
    while len(answer) < max_tokens:
        gained = one_round(target, prompt, answer, params, draft, max_tokens, noise, rule)
        assert gained
        answer += gained
        after(answer)
    return answer


def speculative(target, prompt, params, draft, max_tokens, rule=accept):
    """Probability of every answer of `max_tokens` tokens, over all the noise that there can be. A round's drafts read
    the noise of places that later rounds decide, so whole answers are walked; but a way goes on from the last round in
    which all was decided as on the way before."""
    rounds = []

    def run(branches):
        while rounds and len(rounds[-1][0].branches.trail) >= len(branches.script):
            rounds.pop()
        noise, answer = BranchingNoise(branches), tuple[int, ...]()
        if rounds:
            before, answer = rounds[-1]
            noise = before.copied(branches)
        return answer_of(
            target, prompt, params, draft, max_tokens, noise, rule, answer,
            lambda answer: rounds.append((noise.copied(Branches()), answer)),
        )  # fmt: skip

    return outcomes(run)


def plain(target, prompt, params, max_tokens):
    """Probability of every answer of `max_tokens` tokens when the target decodes alone: a product, nothing else."""
    answers = {(): 1.0}
    for _ in range(max_tokens):
        answers = {
            (*answer, token): before * p
            for answer, before in answers.items()
            for token, p in enumerate(target.probabilities_after([*prompt, *answer], params).tolist())
            if p > 0
        }
    return answers


def largest_difference(one, other):
    """Largest difference of the probabilities of any outcome."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())


# Drafters -----------------------------------------------------------------------------------------------------


def coupled(model, parent, *, params=SamplingParams(temperature=1.0), go_on=0.0, late=0):
    """Trees of shape `parent` (of the drafted nodes, as in DraftTree.of) that a draft model, warped by `params`, makes
    of the row's noise: siblings are its likeliest tokens.

    go_on  nothing is drafted after a token less probable than this: a stop rule.
    late   the noise is that of so many places later: a mistake."""

    @cache
    def law_after(tokens):
        return model.probabilities_after(tokens, params)

    def draft(tokens, new, noise):
        paths, node_of, above, children = [tuple(tokens)], [0], [-1], defaultdict[int, int](int)
        wanted = {node: list(parent).count(node) for node in parent}
        found = {}
        for shaped in parent:
            node = node_of[shaped]
            law = law_after(paths[node]) if node >= 0 else None
            if law is None or (node and float(law_after(paths[above[node]])[paths[node][-1]]) < go_on):
                node_of.append(-1)
                continue
            if node not in found:
                place = new + len(paths[node]) - len(tokens) + late
                found[node] = noise.guess(law, place, wanted[shaped])[0].tolist()
            if children[node] == len(found[node]):
                node_of.append(-1)
                continue
            node_of.append(len(paths))
            paths.append((*paths[node], found[node][children[node]]))
            children[node] += 1
            above.append(node)
        return DraftTree.of(tokens[-1], [path[-1] for path in paths[1:]], above[1:])

    return draft


def fixed(model, parent):
    """Trees of shape `parent` without noise: siblings are a draft model's best tokens, best first."""

    def draft(tokens, new, noise):
        paths = [list(tokens)]
        children = defaultdict(int)
        for node in parent:
            ranked = model.logits_after(paths[node]).argsort(descending=True).tolist()
            paths.append([*paths[node], ranked[children[node] % len(ranked)]])
            children[node] += 1
        return DraftTree.of(tokens[-1], [path[-1] for path in paths[1:]], parent)

    return draft
