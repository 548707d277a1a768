"""Acceptance rules: which drafted tokens stand, and which token the target adds. Losslessness lives here.

One walk serves every rule. Every row has a cursor, which starts at the root of its tree. At each step the target's
distribution at the cursor is warped and a token is decided. The cursor steps to its drafted child, or the row is done.

* Greedy: the decided token is the argmax.
* Sampling, point-mass drafts (retrieval, argmax; chain or tree): the token is drawn from the target's p. Rejection
  sampling has the same distribution: each child x is accepted with probability p(x), and if none is, the token is drawn
  from p with the children struck out.
* Sampling, a chain drawn from q: block verification, which judges the chain, up to a token that was not drawn, as a
  whole and keeps the longest beginning that stands. It accepts at least as many tokens as one token after the other.
  (Sun et al. 2024, arXiv 2403.10444.)
* Sampling, a tree drawn from q: the children are tried in the order they were drawn. Child x is
  accepted with probability min(1, p(x) / q(x)). After a rejection p becomes normalise(max(p - q, 0)), and, if the
  children were drawn without replacement, x is struck out of q. If no child is accepted, the token is drawn from the
  last p, and where it is a child that was not drawn (q(x) = 0), the walk goes on there: that token has the target's law
  whatever was drafted.
  (SpecInfer, Miao et al. 2024, section 4.3 for trees with replacement; recursive rejection sampling, Jeon et al. 2024,
  for trees without. On a chain it is the rule of Leviathan et al. 2023, section 2.3: `TOKENWISE`.)

This holds for any q, if every drafted child stays in the tree, whatever token was drawn. The number of children and
their q may depend on everything that was drawn before them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from paceline.core import sampling
from paceline.core.logits import BROKEN, best_token, sum_of
from paceline.core.request import Request
from paceline.core.tree import DraftTree, IntArray
from paceline.errors import NumericError, PacelineError


@dataclass(slots=True)
class Accepted:
    """The part of a row's tree that was accepted, and the tokens that follow from it.

    path      accepted nodes, root first; tokens[i] is the token decided at path[i].
    tokens    the new tokens: those of path[1:], then the target's own. Empty for a row still in its prompt.
    logprobs  one entry for each of `tokens` if the request wants them, else None."""

    path: list[int]
    tokens: list[int]
    logprobs: list[sampling.TokenLogprob] | None = None


@dataclass(slots=True)
class Failed:
    """Why a row gained nothing in a round, and ends."""

    error: BaseException


Outcome = Accepted | Failed
"""The result of a round for one row."""


class Cursor(NamedTuple):
    """A row's position in its tree, and the decisions so far.

    logits  [len(tree), V], the target's prediction after each node."""

    request: Request
    tree: DraftTree
    logits: torch.Tensor
    done: Accepted

    @property
    def node(self) -> int:
        """The last node of the path."""
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
    """An acceptance rule.

    name      its name in reports.
    lossless  whether answers keep the target's distribution."""

    name: str
    lossless: bool

    def decide(self, cursors: Sequence[Cursor]) -> list[Cursor]:
        """Append a token to `done.tokens` of every cursor, and to `done.path` the drafted child that has this token, if
        there is one. Returns the cursors that stepped to a child. Raises PacelineError before it changes any cursor."""


class Lossless:
    """The rule of the module's docstring.

    block  judge drawn chains as a whole; False: token by token."""

    name, lossless = "lossless", True

    def __init__(self, block: bool = True):
        self.block = block

    def decide(self, cursors: Sequence[Cursor]) -> list[Cursor]:
        """As `Rule.decide`, for rows of one group of `_alike`."""
        params = cursors[0].request.params
        if params.is_greedy:
            return [w for w, token in zip(cursors, _greedy(cursors), strict=True) if follow(w, token)]
        stepped = list[Cursor]()
        if cursors[0].tree.draft_probs is not None and self.block:
            chains = [w for w in cursors if w.tree.is_chain and w.tree.probe is None]
            stepped = [w for w in chains if _verify_block(w)]
            cursors = [w for w in cursors if w not in chains]
            if not cursors:
                return stepped
        probs = target_distributions(cursors)
        if cursors[0].tree.draft_probs is not None:
            return stepped + [w for w, p in zip(cursors, probs, strict=True) if _reject_or_follow(w, p)]
        return [w for w, token in zip(cursors, _choose(cursors, probs), strict=True) if follow(w, token)]


LOSSLESS = Lossless()
TOKENWISE = Lossless(block=False)


def accept(
    requests: Sequence[Request], trees: Sequence[DraftTree], logits: Sequence[torch.Tensor], rule: Rule = LOSSLESS,
) -> list[Outcome]:  # fmt: skip
    """Decide every row of a round. logits[i] [len(trees[i]), V]: the target's prediction after each node.

    A row whose logits are no numbers, or whose request allows no token, fails; the others are not affected."""
    failed: dict[int, Failed] = {}
    cursors = [Cursor(*of_row, Accepted([0], [])) for of_row in zip(requests, trees, logits, strict=True)]
    active = cursors
    if cursors and rule is LOSSLESS and sampling.on_accelerator(cursors[0].logits):
        active = _greedy_at_once(cursors)
    while active:
        active = [w for group in _alike(active) for w in _decide(rule, group, failed)]
    for cursor in cursors:
        if cursor.request.params.logprobs is not None and id(cursor.done) not in failed:
            path, tokens = cursor.done.path, cursor.done.tokens
            scores = cursor.logits[path[: len(tokens)]]
            scores = scores if sampling.is_compiled(scores) else scores.double()
            cursor.done.logprobs = sampling.token_logprobs(scores, tokens, cursor.request.params.logprobs)
    return [failed.get(id(w.done), w.done) for w in cursors]


def _decide(rule: Rule, cursors: Sequence[Cursor], failed: dict[int, Failed]) -> list[Cursor]:
    """Decide one step of rows that are decided alike. If that fails, each row is decided alone, and has its own error.

    failed  the failures, by the identity of a cursor's `done`; they are added here."""
    try:
        return rule.decide(cursors)
    except PacelineError as error:
        if len(cursors) > 1:
            return [stepped for w in cursors for stepped in _decide(rule, [w], failed)]
        failed[id(cursors[0].done)] = Failed(error)
        return []


def _greedy_at_once(cursors: Sequence[Cursor]) -> list[Cursor]:
    """Decide all tokens of the greedy rows whose logits are not shifted; returns the other rows.

    On an accelerator, that is one wait, whatever the trees' depth. Decides no row if a node's logits are no numbers."""
    plain = [w for w in cursors if w.request.params.is_greedy and not w.request.params.shifts_logits]
    if plain:
        try:
            best = iter(_best(torch.cat([w.logits for w in plain])))
        except NumericError:
            return list(cursors)
        for cursor in plain:
            of_node = [next(best) for _ in range(len(cursor.tree))]
            while follow(cursor, of_node[cursor.node]):
                pass
    return [w for w in cursors if not w.done.tokens]


def _alike(active: Sequence[Cursor]) -> list[list[Cursor]]:
    """Group the rows that are decided together. On a CPU each row is a group. On an accelerator, rows of a group have
    logits that are warped alike, and drafts that are all drawn or all point masses."""
    if not sampling.on_accelerator(active[0].logits):
        return [[cursor] for cursor in active]
    groups: list[list[Cursor]] = []
    for cursor in active:
        is_drawn, params = cursor.tree.draft_probs is not None, cursor.request.params
        for group in groups:
            first = group[0]
            if (first.tree.draft_probs is not None) == is_drawn and first.request.params.warps_like(params):
                group.append(cursor)
                break
        else:
            groups.append([cursor])
    return groups


def _greedy(cursors: Sequence[Cursor]) -> list[int]:
    params = cursors[0].request.params
    if not params.shifts_logits:
        return [best_token(w.logits, w.node) for w in cursors]
    return _best(sampling.warp(_checked(cursors), params, [w.context for w in cursors]))


def target_distributions(cursors: Sequence[Cursor]) -> torch.Tensor | list[torch.Tensor]:
    """The target's warped distribution at each cursor, [R, V]."""
    params = cursors[0].request.params
    if sampling.is_compiled(cursors[0].logits) and not params.shifts_logits:
        return [sampling.distributions(w.logits, params, w.node) for w in cursors]
    contexts = [w.context for w in cursors] if params.shifts_logits else []
    return sampling.probabilities(_checked(cursors), params, contexts)


def _checked(cursors: Sequence[Cursor]) -> torch.Tensor:
    """The target's logits at each cursor, float32 or float64 [R, V].

    Raises NumericError as `_best`, because filters would hide NaNs."""
    here = [w.logits[w.node] for w in cursors]
    scores = torch.stack(here) if len(here) > 1 else here[0].unsqueeze(0)
    _best(scores)
    return scores if scores.dtype == torch.float64 else scores.float()


def _best(scores: torch.Tensor) -> list[int]:
    """The best token of each row of `scores` [R, V]; the lowest id of equals.

    Raises NumericError if a row has NaN or infinity, or only minus infinity."""
    best = [token for token in sampling.best_of_rows(scores) if token is not None]
    if len(best) < len(scores):
        raise NumericError(BROKEN)
    return best


def _choose(cursors: Sequence[Cursor], probs: torch.Tensor | list[torch.Tensor]) -> list[int]:
    """The target's token for each row, drawn from `probs` [R, V]; on an accelerator in one wait."""
    if isinstance(probs, torch.Tensor) and sampling.on_accelerator(probs):
        return sampling.draw_rows(probs, [w.request.random.emit(w.position) for w in cursors])
    return [w.request.random.choose(p, w.position) for w, p in zip(cursors, probs, strict=True)]


def follow(cursor: Cursor, token: int) -> bool:
    """Add `token` and step to the drafted child with this token. Returns False if there is no such child, so that the
    row is done."""
    tree, done = cursor.tree, cursor.done
    done.tokens.append(token)
    for child in tree.children(cursor.node):
        if tree.tokens[child] == token:
            done.path.append(child)
            return True
    return False


def sample_from(cursor: Cursor, p: torch.Tensor) -> bool:
    """Decide a token of a row that samples from p [V]; returns as `follow`."""
    if cursor.tree.draft_probs is not None:
        return _reject_or_follow(cursor, p)
    return follow(cursor, cursor.request.random.choose(p, cursor.position))


def _reject_or_follow(cursor: Cursor, p: torch.Tensor) -> bool:
    """Step to the first child that p [V] accepts; else draw from the residual, and return as `follow`."""
    request, tree, _, done = cursor
    children = tree.children(cursor.node)
    q = tree.draft_probs[cursor.node].to(p) if children else p
    for child in children:
        token = int(tree.tokens[child])
        p_token, q_token = torch.stack([p[token], q[token]]).tolist()
        if q_token == 0:  # not drawn from q, so it stands where the target says the same
            continue
        if request.random.keep(min(1.0, p_token / q_token)):
            done.tokens.append(token)
            done.path.append(child)
            return True
        is_last = child == children[-1]  # then q is not needed any more
        p, q = residual(p, q, token, tree.replacement or is_last)
    return follow(cursor, request.random.choose(p, cursor.position))


def _verify_block(cursor: Cursor) -> bool:
    """Decide the next tokens of a row whose draft is a chain, up to one that was not drawn from q (Sun et al. 2024,
    algorithm 2). Returns whether the row goes on there: all before it stood, and the target says the same.

    With w = 1 at its root and w = min(1, w p(x) / q(x)) after a drafted token x, a beginning of the chain stands with
    probability s / (s + 1 - w), where s is the sum of max(w p - q, 0) at its end; the whole chain stands with
    probability w. The longest beginning that stands is accepted. The next token is drawn from max(w p - q, 0) there, or
    from p after the whole chain. Altogether a beginning is accepted with probability w, wherever the chain ends, so
    its length may depend on all tokens before its end."""
    request, tree, logits, done = cursor
    tokens, weight = tree.tokens.tolist(), 1.0
    for node in range(cursor.node, len(tree)):
        path = list(range(node + 1))
        [p] = target_distributions([Cursor(request, tree, logits, Accepted(path, tokens[1 : node + 1]))])
        q = tree.draft_probs[node].to(p)
        q_token = float(q[tokens[node + 1]]) if node + 1 < len(tree) else 0.0
        if q_token == 0:  # the chain ends here, or the next token was not drawn from q
            chance, rest = weight, p
        else:
            rest = (weight * p - q).clamp_min(0)
            total = sum_of(rest)
            chance = total / (total + 1 - weight) if weight < 1 else 1.0
            # If p equals q, only rounding rejects what follows; then p itself is the residual.
            rest = rest / total if total > 0 else p
        if request.random.keep(chance):
            done.path, after = path, rest
        if q_token == 0:
            break
        weight = min(1.0, weight * float(p[tokens[node + 1]]) / q_token)
        if weight == 0:
            break
    length = len(done.path) - 1
    done.tokens = tokens[1 : length + 1]
    return follow(cursor, request.random.choose(after, request.num_new + length))  # a token that fell has 0 in `after`


def residual(p: torch.Tensor, q: torch.Tensor, token: int, replacement: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The next p and q, both [V], after the rejection of `token`: normalise(max(p - q, 0)), and q without the token.

    replacement  siblings are drawn independently, so q stays as it is."""
    rest = (p - q).clamp_min(0)
    total = sum_of(rest)
    if not replacement:
        q = q.clone()
        q[token] = 0
        left = sum_of(q)
        q = q / left if left > 0 else q
    # If p equals q, only rounding rejects a token; then p itself is the residual.
    return (rest / total if total > 0 else p), q
