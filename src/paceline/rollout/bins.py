"""The residual rule where the old policy's distribution is known by its best tokens alone. Exact all the same.

Leviathan et al. 2023 keep a token y, drawn from q, with probability min(1, p(y) / q(y)) and else draw from
normalise(max(0, p - q)). That asks for q at every token. With the M best tokens of q and their probabilities it is
done on bins: each of the M tokens is one, and all other tokens together are one, the tail. The bin of y is drawn from
q's bins, so the same rule on bins gives a bin drawn from p's; inside the tail the token is drawn from p afresh. So the
token is drawn from p, whatever M is. With M tokens that hold all of q's mass this is the usual rule.

`decide` needs p at every token. `decide_between` does with the best tokens of p as well: the bins are then the tokens
that are in both lists, which depend on the two policies and not on y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.sampling import RowRandom

ROUNDING = 1e-6
"""A tail below this is what rounding leaves of lists that hold every token."""


class OldToken(NamedTuple):
    """An old answer's token at one place, its probability then, and the M best tokens of that time [M], [M]."""

    token: int
    prob: float
    top_ids: NDArray[np.int32]
    top_probs: NDArray[Any]


def decide(p: torch.Tensor, old: OldToken, random: RowRandom, position: int) -> int:
    """The token at output position `position`: distributed as p [V] if the old one was as its q."""
    is_listed = bool((old.top_ids == old.token).any())
    if is_listed and random.keep(min(1.0, float(p[old.token]) / old.prob)):
        return old.token
    ids = torch.from_numpy(old.top_ids.astype(np.int64)).to(p.device)
    q = torch.from_numpy(old.top_probs).to(p)
    # A list that goes down to 0 holds all of q; its rounding is no tail.
    q_tail = 0.0 if len(ids) == len(p) or float(q[-1]) == 0 else max(0.0, 1 - float(q.sum()))
    tail = p.index_fill(0, ids, 0.0)
    p_tail = float(tail.sum())
    if not is_listed and random.keep(min(1.0, p_tail / max(q_tail, old.prob))):
        return random.choose(tail, position)
    share = max(0.0, p_tail - q_tail) / p_tail if p_tail > 0 else 0.0
    rest = (tail * share).index_copy(0, ids, (p[ids] - q).clamp_min(0))
    # If p equals q nothing is rejected but by rounding; then p itself is the residual.
    return random.choose(rest if float(rest.sum()) > 0 else p, position)


def decide_between(
    p: Mapping[int, float], q: Mapping[int, float], token: int, random: RowRandom
) -> int | frozenset[int]:
    """The token; or, for one of the tail, the tokens that it is not: draw it from the new policy without those.

    p, q   probabilities of the best tokens of the new and of the old policy at this place. Which tokens are listed must
           not depend on the old answer.
    token  the old answer's."""
    shared = sorted(p.keys() & q.keys())
    p_tail, q_tail = (_tail(known, shared) for known in (p, q))
    if token in shared:
        if random.keep(min(1.0, p[token] / q[token])):
            return token
    elif q_tail <= 0 or random.keep(min(1.0, p_tail / q_tail)):
        return frozenset(shared)
    gains = torch.tensor([*(max(0.0, p[i] - q[i]) for i in shared), max(0.0, p_tail - q_tail)], dtype=torch.float64)
    if float(gains.sum()) <= 0:  # nothing but rounding was rejected
        return token
    choice = random.draft(gains)
    return shared[choice] if choice < len(shared) else frozenset(shared)


def _tail(known: Mapping[int, float], shared: Sequence[int]) -> float:
    tail = 1 - sum(known[i] for i in shared)
    return tail if tail > ROUNDING else 0.0
