"""Typical acceptance: a rule that is NOT lossless, for comparison with reports that used it.

Cai et al. 2024, "Medusa" (arXiv 2401.10774, section 2.3.1). p is the target's distribution at the request's
temperature, H its entropy. A drafted token x is accepted if p(x) > min(eps, delta exp(-H)). The longest accepted path
is taken, the most probable one of equals; the target's most probable token follows it. Nothing is drawn: answers are
the same at every seed. Greedy requests are decided by the lossless rule. Drafts that were drawn are refused."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.core.accept import LOSSLESS, Accepted, Cursor, follow, target_distributions
from paceline.errors import PacelineError


@dataclass
class Typical:
    """The rule.

    epsilon  probability from which on a token is always accepted.
    delta    factor of the bound; the paper has epsilon ** 0.5."""

    epsilon: float = 0.09
    delta: float = 0.3
    name: str = "typical"
    lossless: bool = False

    def decide(self, cursors: Sequence[Cursor]) -> list[Cursor]:
        if cursors[0].request.params.is_greedy:
            return LOSSLESS.decide(cursors)
        if any(cursor.tree.draft_probs is not None for cursor in cursors):
            raise PacelineError("typical acceptance is for trees of guesses, not for drafts that were drawn")
        return [cursor for cursor in cursors if self._step(cursor)]

    def _step(self, cursor: Cursor) -> bool:
        """Step to the first node of the best path; without one, add the most probable token and return False."""
        p = _distribution(cursor, cursor.node, [])
        _, child = self._best(cursor, cursor.node, p, [])
        if child is not None:
            return follow(cursor, int(cursor.tree.tokens[child]))
        cursor.done.tokens.append(int(p.argmax()))
        return False

    def _best(self, cursor: Cursor, node: int, p: torch.Tensor, way: list[int]) -> tuple[tuple[int, float], int | None]:
        """((length, log-probability), first node) of the best accepted path below `node`.

        p: the distribution at `node`; way: the tokens from the cursor to it."""
        best: tuple[tuple[int, float], int | None] = ((0, 0.0), None)
        entropy = -float((p * (p + 1e-5).log()).sum())
        bound = min(self.epsilon, self.delta * float(np.exp(-entropy)))
        for child in cursor.tree.children(node):
            token = int(cursor.tree.tokens[child])
            if float(p[token]) <= bound:
                continue
            here = [*way, token]
            below = _distribution(cursor, child, here) if cursor.tree.children(child) else p
            (length, score), _ = self._best(cursor, child, below, here)
            value = (length + 1, score + float(p[token].log()))
            if best[1] is None or value > best[0]:
                best = (value, child)
        return best


def _distribution(cursor: Cursor, node: int, way: Sequence[int]) -> torch.Tensor:
    """The target's warped distribution [V] after `node`; way: the tokens from the cursor to it."""
    return target_distributions([cursor._replace(done=Accepted([node], [*cursor.done.tokens, *way]))])[0]
