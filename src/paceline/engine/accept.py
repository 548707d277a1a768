"""Acceptance rules: which drafted tokens stand, and which token the target adds. Losslessness lives here.

One walk serves every rule. All rows start at their roots; at each step the target's distribution at every row's
node is warped and a token is decided; a row whose token is a drafted child goes on from there, the others are
done.

* Greedy: the decided token is the argmax.
* Sampling, point-mass drafts (retrieval, argmax drafts; chain or tree): the token is drawn from the target's p.
  This has the law of rejection sampling: each child x is kept with probability p(x), and when none is, the token
  is distributed as p with the children struck out.
* Sampling, drafts drawn from q (chain or tree): the children are tried in the order they were drawn. Child x is
  kept with probability min(1, p(x) / q(x)); after a rejection p becomes normalise(max(p - q, 0)) and, if the
  children were drawn without replacement, x is struck out of q. If none is kept the token is drawn from what p
  has become. A child that q cannot have drawn is passed over.
  (Leviathan et al. 2023, section 2.3 for chains; SpecInfer, Miao et al. 2024, section 4.3 for trees with
  replacement; recursive rejection sampling, Jeon et al. 2024, for those without.)

This holds for any q, on one condition: every drafted child stays in the tree, whatever token was drawn. The number of
children and their q may depend on everything that was drawn before them.

If a row's logits are not numbers, its `Accepted` has the error, and the other rows are decided as if it were not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from paceline.engine.logits import best_token
from paceline.engine.request import Request
from paceline.engine.sampling import (
    TokenLogprob,
    distribution,
    draw_rows,
    is_compiled,
    on_accelerator,
    probabilities,
    warp,
)
from paceline.engine.tree import DraftTree, IntArray
from paceline.errors import NumericError, PacelineError


@dataclass(slots=True)
class Accepted:
    """What became of one row's tree.

    path      nodes that stand, root first; tokens[i] is the token decided at path[i].
    tokens    the new tokens: those of path[1:], then one the target added. Empty for a row still in its prompt.
    logprobs  one entry for each of `tokens` if the request wants them, else None.
    error     why no token could be decided; then path and tokens do not count.
    """

    path: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    error: Exception | None = None


class Walker(NamedTuple):
    """A row on its way through its tree; logits [len(tree), V]."""

    request: Request
    tree: DraftTree
    logits: torch.Tensor
    done: Accepted

    @property
    def node(self) -> int:
        """Where it stands."""
        return self.done.path[-1]

    @property
    def position(self) -> int:
        """Output position of the token to be decided."""
        return self.request.num_new + len(self.done.tokens)

    @property
    def context(self) -> IntArray:
        """Every token before the one to be decided."""
        return np.concatenate([self.request.tokens, np.array(self.done.tokens, np.int64)])


class Rule(Protocol):
    """An acceptance rule: it decides one token for each of some rows.

    name      for reports.
    lossless  whether answers keep the target's distribution; reports show it.
    """

    name: str
    lossless: bool

    def decide(self, walkers: Sequence[Walker]) -> list[Walker]:
        """Append a token to `done.tokens` of every walker, and, if it is a drafted child's, that child to `done.path`.
        Returns the walkers that stepped to a child. Raises PacelineError before it has changed any walker."""


class Lossless:
    """Greedy decoding and sampling as the module's docstring has them; trees may be chains."""

    name, lossless = "lossless", True

    def decide(self, walkers: Sequence[Walker]) -> list[Walker]:
        """As `Rule.decide`, for rows that are decided alike (`_alike`)."""
        params = walkers[0].request.params
        if params.is_greedy:
            return [w for w, token in zip(walkers, _greedy(walkers), strict=True) if follow(w, token)]
        probs = target_distributions(walkers)
        if walkers[0].tree.draft_probs is not None:
            return [w for w, p in zip(walkers, probs, strict=True) if _reject_or_follow(w, p)]
        return [w for w, token in zip(walkers, _choose(walkers, probs), strict=True) if follow(w, token)]


LOSSLESS = Lossless()


def accept(
    requests: Sequence[Request],
    trees: Sequence[DraftTree],
    logits: Sequence[torch.Tensor],
    rule: Rule = LOSSLESS,
) -> list[Accepted]:
    """Decide every row of a round. logits[i] is [len(trees[i]), V]: what the target predicts after each node.

    A row whose logits are not numbers, or whose request leaves no token, has that error in its `Accepted`."""
    walkers = [Walker(*of_row, Accepted([0], [])) for of_row in zip(requests, trees, logits, strict=True)]
    walking = walkers
    if walkers and rule is LOSSLESS and on_accelerator(walkers[0].logits):
        walking = _greedy_at_once(walkers)
    while walking:
        walking = [w for group in _alike(walking) for w in _decide(rule, group)]
    for walker in walkers:
        if walker.request.params.logprobs is not None and walker.done.error is None:
            walker.done.logprobs = _logprobs(walker, walker.request.params.logprobs)
    return [w.done for w in walkers]


def _decide(rule: Rule, walkers: Sequence[Walker]) -> list[Walker]:
    """One step of rows that are decided alike. If that fails, each is decided alone: a row that fails alone gets the
    error, the others go on."""
    try:
        return rule.decide(walkers)
    except PacelineError as error:
        if len(walkers) > 1:
            return [stepped for w in walkers for stepped in _decide(rule, [w])]
        walkers[0].done.error = error
        return []


def _logprobs(walker: Walker, count: int) -> list[TokenLogprob]:
    """The log-probability of every decided token, with the `count` most probable ones at its place."""
    scores = walker.logits[walker.done.path[: len(walker.done.tokens)]].double().log_softmax(-1)
    tokens = torch.tensor(walker.done.tokens, device=scores.device)
    chosen = scores.gather(-1, tokens.unsqueeze(-1))[:, 0].tolist()
    best = scores.topk(min(count, scores.shape[-1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(*top, strict=True)))
        for token, logprob, top in zip(walker.done.tokens, chosen, tops, strict=True)
    ]


def _greedy_at_once(walkers: Sequence[Walker]) -> list[Walker]:
    """Walk the rows that are plainly greedy to their ends; returns the others.

    For accelerators: one wait fetches the best tokens of all nodes, whatever the depth of the trees. If any node's
    logits are not numbers, no row is walked here."""
    plain = [w for w in walkers if w.request.params.is_greedy and not w.request.params.shifts_logits]
    if plain:
        try:
            best = iter(_best(torch.cat([w.logits for w in plain])))
        except NumericError:
            return list(walkers)
        for walker in plain:
            of_node = [next(best) for _ in range(len(walker.tree))]
            while follow(walker, of_node[walker.node]):
                pass
    return [w for w in walkers if not w.done.tokens]


def _alike(walking: Sequence[Walker]) -> list[list[Walker]]:
    """Groups of rows that are decided together: on a CPU one by one, elsewhere all that are decided alike."""
    if not on_accelerator(walking[0].logits):
        return [[walker] for walker in walking]
    groups: list[list[Walker]] = []
    for walker in walking:
        group = next((g for g in groups if _decided_alike(g[0], walker)), None)
        if group is None:
            groups.append([walker])
        else:
            group.append(walker)
    return groups


def _decided_alike(first: Walker, other: Walker) -> bool:
    return (
        on_accelerator(first.logits)
        and (first.tree.draft_probs is None) == (other.tree.draft_probs is None)
        and first.request.params.warps_like(other.request.params)
    )


def _greedy(walkers: Sequence[Walker]) -> list[int]:
    """The best token for each row."""
    params = walkers[0].request.params
    if not params.shifts_logits:
        return [best_token(w.logits, w.node) for w in walkers]
    return _best(warp(_checked(walkers), params, [w.context for w in walkers]))


def target_distributions(walkers: Sequence[Walker]) -> torch.Tensor | list[torch.Tensor]:
    """The target's warped distribution for each row, [R, V]."""
    params = walkers[0].request.params
    if is_compiled(walkers[0].logits) and not params.shifts_logits:
        return [distribution(w.logits, w.node, params) for w in walkers]
    return probabilities(_checked(walkers), params, [w.context for w in walkers] if params.shifts_logits else [])


def _checked(walkers: Sequence[Walker]) -> torch.Tensor:
    """What the target predicts where each row stands, float32 or float64 [R, V].

    Raises NumericError as `_best` does: filters would turn NaNs into anything."""
    here = [w.logits[w.node] for w in walkers]
    scores = torch.stack(here) if len(here) > 1 else here[0].unsqueeze(0)
    _best(scores)
    return scores if scores.dtype == torch.float64 else scores.float()


def _best(scores: torch.Tensor) -> list[int]:
    """The best token of each row of `scores` [R, V]; the lowest of several.

    Raises NumericError if a row has NaN or infinity, or nothing above minus infinity."""
    if not on_accelerator(scores):
        return [best_token(scores, r) for r in range(len(scores))]
    values, indices = scores.max(-1)
    # Both in one wait; float64 holds every token id exactly.
    finite, best = torch.stack([torch.isfinite(values).double(), indices.double()]).tolist()
    if not all(finite):
        raise NumericError("The target's logits are NaN or infinite; its weights or dtype are broken.")
    return [int(token) for token in best]


def _choose(walkers: Sequence[Walker], probs: torch.Tensor | list[torch.Tensor]) -> list[int]:
    """The target's token for each row, drawn from `probs` [R, V]; on an accelerator in one wait."""
    if isinstance(probs, torch.Tensor) and on_accelerator(probs):
        return draw_rows(probs, [w.request.random.emit(w.position) for w in walkers])
    return [w.request.random.choose(p, w.position) for w, p in zip(walkers, probs, strict=True)]


def follow(walker: Walker, token: int) -> bool:
    """Commit `token` and step to the drafted child that carries it; False if there is none and the walk ends."""
    tree, done = walker.tree, walker.done
    done.tokens.append(token)
    for child in tree.children(walker.node):
        if tree.tokens[child] == token:
            done.path.append(child)
            return True
    return False


def sample_from(walker: Walker, p: torch.Tensor) -> bool:
    """Decide a token of a row that samples from p [V], a distribution of the caller's own making; as `follow`."""
    if walker.tree.draft_probs is not None:
        return _reject_or_follow(walker, p)
    return follow(walker, walker.request.random.choose(p, walker.position))


def _reject_or_follow(walker: Walker, p: torch.Tensor) -> bool:
    """Try the children in turn against p [V] and step to the first that stands; without one, draw from the
    residual and return False: the walk ends."""
    request, tree, _, done = walker
    children = tree.children(walker.node)
    q = tree.draft_probs[walker.node].to(p) if children else p
    for child in children:
        token = int(tree.tokens[child])
        p_token, q_token = torch.stack([p[token], q[token]]).tolist()
        if q_token == 0:  # not drawn from q; using it in any way would change the distribution
            continue
        if request.random.keep(min(1.0, p_token / q_token)):
            done.tokens.append(token)
            done.path.append(child)
            return True
        last = child == children[-1]  # then q is not needed any more
        p, q = residual(p, q, token, tree.replacement or last)
    done.tokens.append(request.random.choose(p, walker.position))
    return False


def residual(
    p: torch.Tensor, q: torch.Tensor, token: int, replacement: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q, both [V], after `token`, drawn from q, was rejected: normalise(max(p - q, 0)), and q without it."""
    rest = (p - q).clamp_min(0)
    total = float(rest.sum())
    if not replacement:
        q = q.clone()
        q[token] = 0
        left = float(q.sum())
        q = q / left if left > 0 else q
    # If p equals q nothing is rejected but by rounding; then p itself is the residual.
    return (rest / total if total > 0 else p), q
