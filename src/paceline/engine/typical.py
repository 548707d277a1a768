"""Typical acceptance: a rule that is NOT lossless, for comparison with reports that used it.

Cai et al. 2024, "Medusa" (arXiv 2401.10774, section 2.3.1). p is the target's distribution at the request's
temperature, H its entropy. A drafted token x stands if p(x) > min(eps, delta exp(-H)); of all paths that stand the
longest is taken, of equally long ones the most probable, and the token after it is the target's most probable one.
Nothing is drawn: answers are the same at every seed, and not distributed as the target's. Greedy requests are decided
as ever. Drafts that were drawn are refused.

    Engine("models/demo", draft="medusa:models/demo-medusa", rule=Typical())     # or medusa:PATH,accept=typical
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.engine.accept import LOSSLESS, Walker, follow
from paceline.engine.sampling import probabilities
from paceline.errors import PacelineError


@dataclass
class Typical:
    """epsilon: a token of that probability always stands. delta: of the bound that falls with the entropy; the authors
    take the root of epsilon."""

    epsilon: float = 0.09
    delta: float = 0.3
    name: str = "typical"
    lossless: bool = False

    def decide(self, walkers: Sequence[Walker]) -> list[Walker]:
        """As `Rule.decide`."""
        if walkers[0].request.params.is_greedy:
            return LOSSLESS.decide(walkers)
        if any(walker.tree.draft_probs is not None for walker in walkers):
            raise PacelineError("typical acceptance is for trees of guesses, not for drafts that were drawn")
        return [walker for walker in walkers if self._step(walker)]

    def _step(self, walker: Walker) -> bool:
        """Step to the child with which the best path begins; without one, add the most probable token: the end."""
        p = _distribution(walker, walker.node, [])
        _, child = self._best(walker, walker.node, p, [])
        if child is not None:
            return follow(walker, int(walker.tree.tokens[child]))
        walker.done.tokens.append(int(p.argmax()))
        return False

    def _best(self, walker: Walker, node: int, p: torch.Tensor, way: list[int]) -> tuple[tuple[int, float], int | None]:
        """(length and log-probability of the best path that stands below `node`, its first node), given p there and
        the tokens on the way to it."""
        best: tuple[tuple[int, float], int | None] = ((0, 0.0), None)
        bound = self._bound(p)
        for child in walker.tree.children(node):
            token = int(walker.tree.tokens[child])
            if float(p[token]) <= bound:
                continue
            here = [*way, token]
            below = _distribution(walker, child, here) if walker.tree.children(child) else p
            (length, score), _ = self._best(walker, child, below, here)
            value = (length + 1, score + float(p[token].log()))
            if best[1] is None or value > best[0]:
                best = (value, child)
        return best

    def _bound(self, p: torch.Tensor) -> float:
        entropy = -float((p * (p + 1e-5).log()).sum())
        return min(self.epsilon, self.delta * float(np.exp(-entropy)))


def _distribution(walker: Walker, node: int, way: Sequence[int]) -> torch.Tensor:
    """The target's warped distribution [V] after `node`, the tokens on the way to which are `way`."""
    params = walker.request.params
    context = [np.concatenate([walker.context, np.array(way, np.int64)])] if params.shifts_logits else []
    scores = walker.logits[node : node + 1]
    return probabilities(scores if scores.dtype == torch.float64 else scores.float(), params, context)[0]
