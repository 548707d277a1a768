"""Rules that decide each token of a rollout by an old answer to the same prompt.

    vanilla    draws from the policy and ignores the old answer
    residual   keeps an old token y with probability min(1, p(y) / q(y)), else draws from normalise(max(0, p - q));
               needs the old policy's best tokens. The default
    one-hot    draws a token from p and continues the old answer while it is the same: y is kept with probability p(y);
               needs the old tokens alone
    coupled    takes the token of p and of noise that belongs to the prompt's copy and the position, and is the same in
               every epoch (`paceline.core.noise`); needs the old tokens alone
    plain      the rule of SPEC-RL (Liu et al. 2025, arXiv 2509.23232, section 3): keeps y with probability
               min(1, lenience * p(y) / q(y)), else draws from p. NOT lossless, at any lenience

p is the policy's present distribution, q the one that the old answer was drawn from. The old answer proposes a token at
each position until the first token that differs from it; later tokens are drawn from p. This does not depend on the
drafter: a draft changes only how many positions one forward decides.

The residual rule (Leviathan et al. 2023) needs q of every token. The store has only the M best tokens of q, so the rule
is applied to bins: one for each of the M tokens, and one, the tail, for all others. The bin of y is distributed as q's
bins, so the rule returns a bin distributed as p's; inside the tail a new token is drawn from p. So the token is
distributed as p for any M. If the M tokens hold all of q's mass, this is the usual rule."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.accept import LOSSLESS, Cursor, Rule, follow, target_distributions
from paceline.core.noise import Noise
from paceline.core.request import Row
from paceline.core.sampling import distributions, is_compiled
from paceline.core.tree import DraftTree
from paceline.errors import PacelineError, meant
from paceline.rollout.store import Entry, Key, visit_after

log = logging.getLogger("paceline")

TOP = 20  # Best tokens to store for `residual` at each position: vLLM's default.
BLOCK = 1 << 16
"""Probabilities (positions * vocabulary) computed together. One position at a time costs ten times as much with small
vocabularies; a whole draft at once is wasted if a row leaves its old answer early."""
ROUNDING = 1e-6  # A smaller tail is rounding: the listed tokens hold all of the mass.


class OldToken(NamedTuple):
    """An old answer's token at one position, its probability under q, and q's M best tokens with theirs, [M] each."""

    token: int
    prob: float
    top_ids: NDArray[np.int32]
    top_probs: NDArray[Any]


class Distributions:
    """The policy's distributions after the nodes first..last-1 of a draft, and their best tokens.

    probs  [last - first, V]; top_ids, top_probs [last - first, top], NumPy, absent if `top` is 0."""

    def __init__(self, cursor: Cursor, top: int):
        params, node, logits = cursor.request.params, cursor.node, cursor.logits
        self.tree, self.first = cursor.tree, node
        if is_compiled(logits) and not params.shifts_logits:
            count = max(1, BLOCK // logits.shape[-1])
            self.probs: Any = distributions(logits[node : node + count], params)
        else:
            self.probs = torch.stack(list(target_distributions([cursor])))
        on_processor = self.probs.device.type == "cpu"
        self._numbers = self.probs.numpy() if on_processor else self.probs  # NumPy is faster for single numbers
        if top:
            best = self.probs.topk(min(top, self.probs.shape[-1]))
            self.top_ids, self.top_probs = best.indices.numpy(force=True), best.values.numpy(force=True)

    def has(self, tree: DraftTree, node: int) -> bool:
        """Whether the distribution after this node is one of them."""
        return self.tree is tree and self.first <= node < self.first + len(self.probs)

    def of(self, node: int, token: int) -> float:
        """The probability of a token after a node."""
        return float(self._numbers[node - self.first, token])


@dataclass(eq=False)
class Reuse:
    """How far a row follows its old answer, and the record of its new one.

    visit    number of earlier answers to its copy of the prompt.
    reused   leading tokens of the old answer that were kept; left: whether a different token has followed.
    looked   positions where the old answer proposed a token; drift: the sum of |p - q| of those tokens.
    probs, top_ids, top_probs   of each decided token, as in `Entry`."""

    key: Key
    old: Entry | None
    visit: int = 0
    reused: int = 0
    left: bool = False
    looked: int = 0
    drift: float = 0.0
    probs: list[float] = field(default_factory=list)
    top_ids: list[Any] = field(default_factory=list)
    top_probs: list[Any] = field(default_factory=list)
    distributions: Distributions | None = None

    def distributions_at(self, cursor: Cursor, top: int) -> Distributions:
        """Distributions that include the one at the cursor."""
        if self.distributions is None or not self.distributions.has(cursor.tree, cursor.node):
            self.distributions = Distributions(cursor, top)
        return self.distributions

    def proposal(self, position: int) -> OldToken | None:
        """The old answer's token at an output position; None after its end, or once the row has left it."""
        old = self.old
        if old is None or self.left or position >= len(old):
            return None
        ids, probs = old.top_ids[position], old.top_probs[position]
        return OldToken(int(old.tokens[position]), float(old.probs[position]), ids, probs)


class RolloutRule:
    """A `paceline.core.accept.Rule` for the rows passed to `begin`; the rule `others` decides all other rows.

    top  best tokens to record of each position."""

    name = ""
    lossless = True
    uses_old = True  # Whether the rule uses old answers.
    compares = False
    """Whether it compares old probabilities, which must then have the present temperature and filters."""

    def __init__(self, top: int = 0):
        self.top = top
        self.others: Rule = LOSSLESS
        self._reuse: dict[int, Reuse] = {}

    def begin(self, row: Row, key: Key, old: Entry | None) -> Reuse:
        """Decide `row`'s tokens from now on, with `old` as the old answer."""
        self._reuse[row.id] = Reuse(key, old if self.uses_old else None, visit_after(old))
        return self._reuse[row.id]

    def end(self, row: Row) -> None:
        self._reuse.pop(row.id, None)

    def decide(self, cursors: Sequence[Cursor]) -> list[Cursor]:
        others = [w for w in cursors if w.request.id not in self._reuse]
        ours = [w for w in cursors if w.request.id in self._reuse]
        # All distributions first: errors come before any change.
        known = [self._reuse[w.request.id].distributions_at(w, self.top) for w in ours]
        stepped = self.others.decide(others) if others else []
        return [*stepped, *(w for w, of in zip(ours, known, strict=True) if follow(w, self._step(w, of)))]

    def _step(self, cursor: Cursor, known: Distributions) -> int:
        """Decide a token and record it."""
        reuse, at, node = self._reuse[cursor.request.id], cursor.node - known.first, cursor.node
        old, p = reuse.proposal(cursor.position), known.probs[at]
        if old is None:
            token = self.draw(p, cursor, reuse)
        else:
            reuse.looked += 1
            reuse.drift += abs(known.of(node, old.token) - old.prob)
            token = self.choose(p, old, cursor, reuse)
            if token == old.token and not reuse.left:
                reuse.reused += 1
            else:
                reuse.left = True
        reuse.probs.append(known.of(node, token))
        if self.top:
            reuse.top_ids.append(known.top_ids[at])
            reuse.top_probs.append(known.top_probs[at])
        return token

    def draw(self, p: torch.Tensor, cursor: Cursor, reuse: Reuse) -> int:
        """A token without a proposal; `choose` calls it too, by default."""
        return cursor.request.noise.choose(p, cursor.position)

    def choose(self, p: torch.Tensor, old: OldToken, cursor: Cursor, reuse: Reuse) -> int:
        """A token at a position where the old answer proposes `old`."""
        return self.draw(p, cursor, reuse)


class Vanilla(RolloutRule):
    """Every token is drawn from the policy."""

    name, uses_old = "vanilla", False


class OneHot(RolloutRule):
    """The residual rule with all of q on the old token y: keep y with probability p(y), else draw from p without y. A
    plain draw from p does the same, so nothing is overridden."""

    name = "one-hot"


class Residual(RolloutRule):
    """See `paceline.rollout.rules`."""

    name = "residual"
    compares = True

    def __init__(self, top: int = TOP):
        super().__init__(top)

    def choose(self, p: torch.Tensor, old: OldToken, cursor: Cursor, reuse: Reuse) -> int:
        if not len(old.top_ids):
            return self.draw(p, cursor, reuse)  # The old rule recorded no best tokens: decide as `one-hot`.
        return decide(p, old, cursor.request.noise, cursor.position)


class Coupled(RolloutRule):
    """The same noise in every epoch: the token changes only where p changes enough. Each epoch is exact by itself;
    epochs are not independent of each other.

    seed  of the noise. With another seed old tokens agree only by chance."""

    name = "coupled"

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self._noise: dict[int, Noise] = {}

    def begin(self, row: Row, key: Key, old: Entry | None) -> Reuse:
        self._noise[row.id] = Noise(key.seed(self.seed, key.copy))
        return super().begin(row, key, old)

    def end(self, row: Row) -> None:
        super().end(row)
        self._noise.pop(row.id, None)

    def draw(self, p: torch.Tensor, cursor: Cursor, reuse: Reuse) -> int:
        return self._noise[cursor.request.id].choose(p, cursor.position)


class PlainNotLossless(RolloutRule):
    """SPEC-RL's published rule: it does not keep the policy's distribution, not even at lenience 1.

    lenience  above 1 keeps more of the old answer; 0 keeps nothing, infinity everything."""

    lossless = False
    compares = True

    def __init__(self, lenience: float = 1.0):
        if not lenience >= 0:
            raise PacelineError(f"lenience is {lenience}; it must be 0 or more.")
        super().__init__()
        self.lenience = lenience
        self.name = f"plain, lenience {lenience:.4g}, not lossless"
        _warn(self.name)

    def choose(self, p: torch.Tensor, old: OldToken, cursor: Cursor, reuse: Reuse) -> int:
        chance = math.inf if math.isinf(self.lenience) else self.lenience * float(p[old.token]) / old.prob
        if cursor.request.noise.happens(min(1.0, chance), cursor.position):
            return old.token
        reuse.left = True  # The row leaves the old answer even if the draw gives the old token.
        return self.draw(p, cursor, reuse)


@cache
def _warn(name: str) -> None:
    """Warn once for each rule, because a trainer makes thousands of calls."""
    log.warning("rollouts by the rule %r: answers do not have the policy's distribution", name)


def decide(p: torch.Tensor, old: OldToken, noise: Noise, position: int) -> int:
    """The residual rule: a token for the output position, distributed as p [V] if the old one was drawn from q."""
    is_listed = bool((old.top_ids == old.token).any())
    if is_listed and noise.happens(min(1.0, float(p[old.token]) / old.prob), position):
        return old.token
    ids = torch.from_numpy(old.top_ids.astype(np.int64)).to(p.device)
    q = torch.from_numpy(old.top_probs).to(p)
    # A list that ends with probability 0 holds all of q; the rest is rounding, not a tail.
    q_tail = 0.0 if len(ids) == len(p) or float(q[-1]) == 0 else max(0.0, 1 - float(q.sum()))
    tail = p.index_fill(0, ids, 0.0)
    p_tail = float(tail.sum())
    if not is_listed and noise.happens(min(1.0, p_tail / max(q_tail, old.prob)), position):
        return noise.choose(tail, position)
    share = max(0.0, p_tail - q_tail) / p_tail if p_tail > 0 else 0.0
    rest = (tail * share).index_copy(0, ids, (p[ids] - q).clamp_min(0))
    # If p equals q, only rounding rejects; then p itself is the residual.
    return noise.choose(rest if float(rest.sum()) > 0 else p, position)


def decide_between(
    p: Mapping[int, float], q: Mapping[int, float], token: int, noise: Noise, position: int
) -> int | frozenset[int]:
    """The residual rule if only the best tokens of p are known too: bins are the tokens in both lists, whatever y is.

    Returns the token; or, if it is in the tail, the tokens to exclude when it is drawn from the new policy.

    p, q   probabilities of the best tokens of the new and of the old policy at this position. Which tokens are listed
           must not depend on the old answer.
    token  the old answer's."""
    shared = sorted(p.keys() & q.keys())
    p_tail, q_tail = (_tail(known, shared) for known in (p, q))
    if token in shared:
        if noise.happens(min(1.0, p[token] / q[token]), position):
            return token
    elif q_tail <= 0 or noise.happens(min(1.0, p_tail / q_tail), position):
        return frozenset(shared)
    gains = torch.tensor([*(max(0.0, p[i] - q[i]) for i in shared), max(0.0, p_tail - q_tail)], dtype=torch.float64)
    if float(gains.sum()) <= 0:  # Only rounding rejected it.
        return token
    choice = noise.choose(gains, position)
    return shared[choice] if choice < len(shared) else frozenset(shared)


def _tail(known: Mapping[int, float], shared: Sequence[int]) -> float:
    tail = 1 - sum(known[i] for i in shared)
    return tail if tail > ROUNDING else 0.0


RULES = ("residual", "one-hot", "coupled", "plain", "vanilla")


def rule_of(name: str, *, lenience: float | None = None, seed: int = 0) -> RolloutRule:
    """The rule of that name. Raises PacelineError for another name, or a lenience for a rule that has none."""
    if name not in RULES:
        raise PacelineError(f"There is no rollout rule {name!r}.{meant(name, RULES)} Rules: {', '.join(RULES)}.")
    if name != "plain" and lenience is not None:
        raise PacelineError(f"{name} has no lenience, for it is exact; only the rule plain, which is not, takes one.")
    if name == "plain":
        return PlainNotLossless(1.0 if lenience is None else lenience)
    if name == "coupled":
        return Coupled(seed)
    return {"residual": Residual, "one-hot": OneHot, "vanilla": Vanilla}[name]()
