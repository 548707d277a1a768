"""Rules that decide each token of a rollout with the help of an old answer to the same prompt.

    vanilla    draws from the policy; the old answer is not looked at
    residual   keeps an old token y with probability min(1, p(y) / q(y)), else draws from what p has more of than q
               (`bins.py`); needs the old policy's best tokens. The default
    one-hot    draws a token from p and goes on in the old answer while it is the same: y is kept with probability p(y);
               needs the old tokens alone
    coupled    takes argmax(log p + g) with Gumbel noise g that belongs to the prompt's copy and the position, and is
               the same in every epoch; needs the old tokens alone
    plain      the rule of SPEC-RL (Liu et al. 2025, arXiv 2509.23232, section 3): keeps y with probability
               min(1, lenience * p(y) / q(y)), else draws from p. NOT lossless, at any lenience

The old answer proposes at every place while all tokens before are its own, whether a drafter has drafted it or not: a
draft decides only how many places one forward decides. After the first other token, tokens are drawn from p.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from paceline.engine.accept import LOSSLESS, Cursor, Rule, follow, target_distributions
from paceline.engine.request import Row
from paceline.engine.sampling import distributions, is_compiled
from paceline.engine.tree import DraftTree
from paceline.errors import PacelineError, meant
from paceline.rollout.bins import OldToken, decide
from paceline.rollout.store import Entry, Key

log = logging.getLogger("paceline")

TOP = 20
"""Best tokens kept of each place for `residual`: as many as vLLM reports by default."""


BLOCK = 1 << 16
"""Numbers of the distributions of a draft's places that are worked out together. A place at a time costs ten times as
much where there are few tokens; all at once would be wasted where a row leaves its old answer early."""


class Laws:
    """The policy's distributions after the nodes first..last-1 of a draft, and their best tokens.

    probs  [last - first, V]; top_ids, top_probs [last - first, top], NumPy; not there if `top` is 0."""

    def __init__(self, walker: Cursor, top: int):
        params, node, logits = walker.request.params, walker.node, walker.logits
        self.tree, self.first = walker.tree, node
        if is_compiled(logits) and not params.shifts_logits:
            count = max(1, BLOCK // logits.shape[-1])
            self.probs: Any = distributions(logits[node : node + count], params)
        else:
            self.probs = torch.stack(list(target_distributions([walker])))
        on_processor = self.probs.device.type == "cpu"
        self._numbers = self.probs.numpy() if on_processor else self.probs  # NumPy reads one number faster
        if top:
            best = self.probs.topk(min(top, self.probs.shape[-1]))
            self.top_ids, self.top_probs = best.indices.numpy(force=True), best.values.numpy(force=True)

    def has(self, tree: DraftTree, node: int) -> bool:
        """Whether that node's distribution is here."""
        return self.tree is tree and self.first <= node < self.first + len(self.probs)

    def of(self, node: int, token: int) -> float:
        """The probability of a token after a node."""
        return float(self._numbers[node - self.first, token])


@dataclass(eq=False)
class Trail:
    """A row's way along its old answer, and what is written down of its new one.

    visit    how many answers to its copy of the prompt came before.
    reused   tokens of the old answer that were kept, from its first on.
    looked   places where the old answer proposed; drift: the sum of |p - q| of its tokens there.
    """

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
    laws: Laws | None = None

    def laws_at(self, walker: Cursor, top: int) -> Laws:
        """Distributions that have the one where the walker stands."""
        if self.laws is None or not self.laws.has(walker.tree, walker.node):
            self.laws = Laws(walker, top)
        return self.laws

    def proposal(self, position: int) -> OldToken | None:
        """The old answer's token at an output position; None after it was left, or where it ends."""
        old = self.old
        if old is None or self.left or position >= len(old):
            return None
        ids, probs = old.top_ids[position], old.top_probs[position]
        return OldToken(int(old.tokens[position]), float(old.probs[position]), ids, probs)


class RolloutRule:
    """An acceptance rule of the engine (`paceline.engine.accept.Rule`) for rows that have begun with `begin`; all other
    rows are decided by the rule `others`.

    top  best tokens to keep of each place."""

    name = ""
    lossless = True
    looks_back = True
    """Whether it looks at old answers."""
    same_law = False
    """Whether old probabilities count, so that they must be of the law that is sampled now."""

    def __init__(self, top: int = 0):
        self.top = top
        self.others: Rule = LOSSLESS
        self._trails: dict[int, Trail] = {}

    def begin(self, row: Row, key: Key, old: Entry | None) -> Trail:
        """Decide `row`'s tokens from here on, with `old` as the old answer."""
        visit = old.visit + 1 if old is not None else 0
        self._trails[row.id] = Trail(key, old if self.looks_back else None, visit)
        return self._trails[row.id]

    def end(self, row: Row) -> None:
        """Forget a row."""
        self._trails.pop(row.id, None)

    def decide(self, walkers: Sequence[Cursor]) -> list[Cursor]:
        """As `Rule.decide`."""
        others = [w for w in walkers if w.request.id not in self._trails]
        ours = [w for w in walkers if w.request.id in self._trails]
        laws = [self._trails[w.request.id].laws_at(w, self.top) for w in ours]  # errors come before any change
        stepped = self.others.decide(others) if others else []
        return [*stepped, *(w for w, of in zip(ours, laws, strict=True) if follow(w, self._step(w, of)))]

    def _step(self, walker: Cursor, laws: Laws) -> int:
        """Decide a token and write it down."""
        trail, at, node = self._trails[walker.request.id], walker.node - laws.first, walker.node
        old, p = trail.proposal(walker.position), laws.probs[at]
        if old is None:
            token = self.draw(p, walker, trail)
        else:
            trail.looked += 1
            trail.drift += abs(laws.of(node, old.token) - old.prob)
            token = self.choose(p, old, walker, trail)
            if token == old.token and not trail.left:
                trail.reused += 1
            else:
                trail.left = True
        trail.probs.append(laws.of(node, token))
        if self.top:
            trail.top_ids.append(laws.top_ids[at])
            trail.top_probs.append(laws.top_probs[at])
        return token

    def draw(self, p: torch.Tensor, walker: Cursor, trail: Trail) -> int:
        """A token where no old one is proposed."""
        return walker.request.random.choose(p, walker.position)

    def choose(self, p: torch.Tensor, old: OldToken, walker: Cursor, trail: Trail) -> int:
        """A token where the old answer proposes one."""
        return self.draw(p, walker, trail)


class Vanilla(RolloutRule):
    """Every token is drawn from the policy."""

    name, looks_back = "vanilla", False


class OneHot(RolloutRule):
    """A token drawn from p is the old one with probability p(y), and else distributed as p without y: the rule for
    point masses needs no more than the draw."""

    name = "one-hot"


class Residual(RolloutRule):
    """See `paceline.rollout.bins`."""

    name = "residual"
    same_law = True

    def __init__(self, top: int = TOP):
        super().__init__(top)

    def choose(self, p: torch.Tensor, old: OldToken, walker: Cursor, trail: Trail) -> int:
        """See the class."""
        if not len(old.top_ids):
            return self.draw(p, walker, trail)  # written by a rule that keeps no best tokens: exact as `one-hot` is
        return decide(p, old, walker.request.random, walker.position)


class Coupled(RolloutRule):
    """Shared noise: argmax(log p + g) is distributed as p for any fixed p, and changes only where p does. Every epoch
    alone is exact; epochs depend on each other.

    seed  of the noise. It must stay the same as long as old answers are to be met again."""

    name = "coupled"

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def draw(self, p: torch.Tensor, walker: Cursor, trail: Trail) -> int:
        """The token that wins the race of exponential clocks with rates p, which is the Gumbel maximum."""
        words = [self.seed, *np.frombuffer(trail.key.digest, "<u4").tolist(), trail.key.copy, walker.position]
        times = np.random.Generator(np.random.Philox(np.random.SeedSequence(words))).standard_exponential(len(p))
        rates = p.double().numpy(force=True)
        return int(np.argmax(rates / times))


class PlainNotLossless(RolloutRule):
    """SPEC-RL's published rule: it does not keep the policy's distribution, also at lenience 1.

    lenience  above 1 keeps more of the old answer; 0 keeps nothing, infinity everything."""

    lossless = False
    same_law = True

    def __init__(self, lenience: float = 1.0):
        if not lenience >= 0:
            raise PacelineError(f"lenience is {lenience}; it must be 0 or more.")
        super().__init__()
        self.lenience = lenience
        self.name = f"plain, lenience {lenience:.4g}, not lossless"
        _warn(self.name)

    def choose(self, p: torch.Tensor, old: OldToken, walker: Cursor, trail: Trail) -> int:
        """See the class."""
        kept = math.isinf(self.lenience) or walker.request.random.keep(
            min(1.0, self.lenience * float(p[old.token]) / old.prob)
        )
        if kept:
            return old.token
        trail.left = True  # also where the draw is the old token again
        return self.draw(p, walker, trail)


@cache
def _warn(name: str) -> None:
    """Once for each rule: a trainer makes thousands of calls."""
    log.warning("rollouts by the rule %r: answers do not have the policy's distribution", name)


RULES = ("residual", "one-hot", "coupled", "plain", "vanilla")


def rule_of(name: str, *, lenience: float | None = None, seed: int = 0, top: int = TOP) -> RolloutRule:
    """The rule of that name. Raises PacelineError for another name, or a lenience for a rule that has none."""
    if name not in RULES:
        raise PacelineError(f"There is no rollout rule {name!r}.{meant(name, RULES)} Rules: {', '.join(RULES)}.")
    if name != "plain" and lenience is not None:
        raise PacelineError(f"{name} has no lenience, for it is exact; only the rule plain, which is not, takes one.")
    if name == "plain":
        return PlainNotLossless(1.0 if lenience is None else lenience)
    if name == "residual":
        if top < 1:
            raise PacelineError(f"top is {top}; residual needs 1 or more of the old policy's best tokens.")
        return Residual(top)
    return Coupled(seed) if name == "coupled" else OneHot() if name == "one-hot" else Vanilla()
