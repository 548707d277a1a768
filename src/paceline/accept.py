"""Acceptance rules: which drafted tokens stand, and which token the target adds. Losslessness lives here.

One walk serves every rule. All rows start at their roots; at each step the target's distribution at every row's
node is warped and a token is decided; a row whose token is a drafted child goes on from there, the others are done.

* Greedy: the decided token is the argmax.
* Sampling, point-mass drafts (retrieval, argmax drafts; chain or tree): the token is drawn from the target's p.
  This has the law of rejection sampling: each child x is kept with probability p(x), and when none is, the token is
  distributed as p with the children struck out.
* Sampling, drafts drawn from q (chain or tree): the children are tried in the order they were drawn. Child x is kept
  with probability min(1, p(x) / q(x)); after a rejection p becomes normalise(max(p - q, 0)) and, if the children
  were drawn without replacement, x is struck out of q. If none is kept the token is drawn from what p has become.
  (Leviathan et al. 2023, section 2.3 for chains; SpecInfer, Miao et al. 2024, section 4.3 for trees with
  replacement; recursive rejection sampling, Jeon et al. 2024, for those without.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from paceline.errors import NumericError
from paceline.sampling import RowRandom, SamplingParams, draw, probabilities, warp
from paceline.tree import DraftTree, IntArray


@dataclass(slots=True)
class Accepted:
    """What became of one row's tree.

    path    nodes that stand, root first; tokens[i] is the token decided at path[i].
    tokens  the new tokens: those of path[1:], then one the target added. Empty for a row still in its prompt.
    """

    path: list[int]
    tokens: list[int]


class Request(Protocol):
    """What acceptance needs to know of a row."""

    params: SamplingParams
    random: RowRandom

    @property
    def tokens(self) -> IntArray:
        """Every committed token."""

    @property
    def num_new(self) -> int:
        """Output position of the next token."""


def accept(
    requests: Sequence[Request], trees: Sequence[DraftTree], logits: Sequence[torch.Tensor]
) -> list[Accepted]:
    """Decide every row of a round. logits[i] is [len(trees[i]), V]: what the target predicts behind each node.

    Raises NumericError if the logits at a node are not numbers."""
    accepted = [Accepted([0], []) for _ in trees]
    walking = list(range(len(trees)))
    while walking:
        for group in _alike(walking, requests):
            _decide([(requests[i], trees[i], accepted[i]) for i in group], [logits[i] for i in group])
        walking = [i for i in walking if len(accepted[i].path) > len(accepted[i].tokens)]
    return accepted


Walker = tuple[Request, DraftTree, Accepted]


def _alike(walking: Sequence[int], requests: Sequence[Request]) -> Iterator[list[int]]:
    """Rows that share their parameters, so that their logits are warped in one go."""
    groups: list[list[int]] = []
    for i in walking:
        for group in groups:
            if requests[group[0]].params == requests[i].params:
                group.append(i)
                break
        else:
            groups.append([i])
    yield from groups


def _decide(walkers: Sequence[Walker], logits: Sequence[torch.Tensor]) -> None:
    """One step of rows that share their parameters: a token for each, and its node if it was drafted."""
    params = walkers[0][0].params
    here = [done.path[-1] for _, _, done in walkers]
    if len(walkers) == 1:
        scores = logits[0][here[0]].unsqueeze(0)
    else:
        scores = torch.stack([rows[node] for rows, node in zip(logits, here, strict=True)])
    best = scores.max(-1)
    if not bool(torch.isfinite(best.values).all()):
        raise NumericError("The target's logits are NaN or infinite; its weights or dtype are broken.")
    contexts = [_context(walker) for walker in walkers] if params.shifts_logits else [np.empty(0, np.int64)] * len(walkers)
    if params.is_greedy:
        tokens = warp(scores, params, contexts).argmax(-1) if params.shifts_logits else best.indices
        for walker, token in zip(walkers, tokens.tolist(), strict=True):
            _follow(walker, token)
        return
    for walker, p in zip(walkers, probabilities(scores, params, contexts), strict=True):
        request, tree, done = walker
        if tree.draft_probs is None:
            _follow(walker, draw(p, request.random.emit(request.num_new + len(done.tokens))))
        else:
            _reject_or_follow(walker, p)


def _context(walker: Walker) -> IntArray:
    """Every token before the position being decided."""
    request, _, done = walker
    return np.concatenate([request.tokens, np.array(done.tokens, np.int64)])


def _follow(walker: Walker, token: int) -> None:
    """Commit `token` and step to the drafted child that carries it, if there is one."""
    _, tree, done = walker
    done.tokens.append(token)
    for child in tree.children(done.path[-1]).tolist():
        if tree.tokens[child] == token:
            done.path.append(child)
            return


def _reject_or_follow(walker: Walker, p: torch.Tensor) -> None:
    """Try the children in turn against p [V]; without one that stands, draw from the residual."""
    request, tree, done = walker
    node = done.path[-1]
    q = tree.draft_probs[node].to(p.dtype)
    for child in tree.children(node).tolist():
        token = int(tree.tokens[child])
        if request.random.free.random() * q[token] < p[token]:
            done.tokens.append(token)
            done.path.append(child)
            return
        p, q = residual(p, q, token, tree.replacement)
    done.tokens.append(draw(p, request.random.emit(request.num_new + len(done.tokens))))


def residual(
    p: torch.Tensor, q: torch.Tensor, token: int, replacement: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q, both [V], after `token`, drawn from q, was rejected: normalise(max(p - q, 0)), and q without it."""
    rest = (p - q).clamp_min(0)
    if not replacement:
        q = q.clone()
        q[token] = 0
        q = q / q.sum() if q.sum() > 0 else q
    # p can only equal q where nothing is ever rejected; what rounding leaves there is p itself.
    return (rest / rest.sum() if rest.sum() > 0 else p), q
