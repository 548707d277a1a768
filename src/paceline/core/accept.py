"""Acceptance: which drafted tokens stand, and which token the target adds. Losslessness lives here.

At each place of a text the target has one token: for greedy requests the argmax of its logits, else the token that the
row's noise takes from the target's warped distribution (`paceline.core.noise`). A drafted token is accepted if it is
the target's token. So whatever is drafted or cut, the text is that of plain decoding.

Each row has a cursor, which starts at the root of its tree. At each step the target's token is decided, and the cursor
steps to the drafted child with this token; without such a child the row is done. On an accelerator the tokens of all
nodes are decided together, so that the walk waits for the device only once."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from paceline.core import sampling
from paceline.core.noise_rows import tokens_of_rows
from paceline.core.request import Request
from paceline.core.round import Accepted as Accepted
from paceline.core.round import Failed as Failed
from paceline.core.round import Outcome as Outcome
from paceline.core.round import Plan
from paceline.core.segment import Verdict
from paceline.core.tree import DraftTree, IntArray
from paceline.errors import NumericError, PacelineError
from paceline.kernels.rows import BROKEN, best_token


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
        """All tokens before the token to be decided."""
        return np.concatenate([self.request.tokens, np.array(self.done.tokens, np.int64)])


class Rule(Protocol):
    """An acceptance rule.

    name      its name in reports.
    lossless  whether answers keep the target's distribution."""

    name: str
    lossless: bool

    def decide(self, cursors: Sequence[Cursor]) -> list[Cursor]:
        """Append a token to `done.tokens` of each cursor, and the drafted child with this token, if any, to
        `done.path`.

        Returns the cursors that stepped to a child. Raises PacelineError before it changes any cursor."""


class Lossless:
    """The lossless rule, which the module's docstring describes."""

    name, lossless = "lossless", True

    def decide(self, cursors: Sequence[Cursor]) -> list[Cursor]:
        """As `Rule.decide`. All rows are of the same group of `_alike`."""
        return [w for w, token in zip(cursors, self.tokens(cursors), strict=True) if follow(w, token)]

    def tokens(self, cursors: Sequence[Cursor]) -> list[int]:
        """The target's token at each cursor."""
        params = cursors[0].request.params
        if not params.is_greedy:
            return chosen(cursors, target_distributions(cursors))
        if not params.shifts_logits:
            return [best_token(w.logits, w.node) for w in cursors]
        return _best(sampling.warp(_checked(cursors), params, [w.context for w in cursors]))


LOSSLESS = Lossless()


def accept(
    requests: Sequence[Request], trees: Sequence[DraftTree], logits: Sequence[torch.Tensor], rule: Rule = LOSSLESS,
) -> list[Outcome]:  # fmt: skip
    """Decide all rows of a round. logits[i] [len(trees[i]), V]: the target's prediction after each node.

    A row fails, without effect on others, if its logits have NaN or infinity, or its request allows no token."""
    failed: dict[int, Failed] = {}
    cursors = [Cursor(*of_row, Accepted([0], [])) for of_row in zip(requests, trees, logits, strict=True)]
    active = cursors
    if cursors and rule is LOSSLESS and sampling.on_accelerator(cursors[0].logits):
        active = _decide_at_once(cursors)
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
    """Decide one step of a group of rows. If that fails, each row is decided alone, so that each has its own error.

    failed  gets the failures, by the identity of the cursor's `done`."""
    try:
        return rule.decide(cursors)
    except PacelineError as error:
        if len(cursors) > 1:
            return [stepped for w in cursors for stepped in _decide(rule, [w], failed)]
        failed[id(cursors[0].done)] = Failed(error)
        return []


def _decide_at_once(cursors: Sequence[Cursor]) -> list[Cursor]:
    """Decide all tokens of rows whose logits are not shifted, in a single wait for each group. Returns the rows that
    remain: those with shifted logits, and groups in which any logits have NaN or infinity."""
    left = [w for w in cursors if w.request.params.shifts_logits]
    for group in _alike([w for w in cursors if not w.request.params.shifts_logits]):
        try:
            tokens = iter(_tokens_of_nodes(group))
        except NumericError:
            left += group
            continue
        for cursor in group:
            of_node = [next(tokens) for _ in range(len(cursor.tree))]
            while follow(cursor, of_node[cursor.node]):
                pass
    return left


def _tokens_of_nodes(cursors: Sequence[Cursor]) -> list[int]:
    """The target's token after each node of each tree, on an accelerator, for rows that are warped alike."""
    logits, params = torch.cat([w.logits for w in cursors]), cursors[0].request.params
    if params.is_greedy:
        return _best(logits)
    probs = sampling.probabilities(logits, params, [])
    keys = [w.request.noise.key for w in cursors for _ in range(len(w.tree))]
    return tokens_of_rows(probs, keys, [w.request.num_new + int(d) for w in cursors for d in w.tree.depth])


def _alike(active: Sequence[Cursor]) -> list[list[Cursor]]:
    """Group the rows that are decided together: on an accelerator those that are warped alike, on a CPU each alone."""
    if active and not sampling.on_accelerator(active[0].logits):
        return [[cursor] for cursor in active]
    groups: list[list[Cursor]] = []
    for cursor in active:
        for group in groups:
            if group[0].request.params.warps_like(cursor.request.params):
                group.append(cursor)
                break
        else:
            groups.append([cursor])
    return groups


def target_distributions(cursors: Sequence[Cursor]) -> torch.Tensor | list[torch.Tensor]:
    """The target's warped distribution at each cursor, [R, V]."""
    params = cursors[0].request.params
    if sampling.is_compiled(cursors[0].logits) and not params.shifts_logits:
        return [sampling.distributions(w.logits, params, w.node) for w in cursors]
    contexts = [w.context for w in cursors] if params.shifts_logits else []
    return sampling.probabilities(_checked(cursors), params, contexts)


def _checked(cursors: Sequence[Cursor]) -> torch.Tensor:
    """The target's logits at each cursor, float32 or float64 [R, V].

    Raises NumericError as `_best` does, because filters would hide NaN."""
    here = [w.logits[w.node] for w in cursors]
    scores = torch.stack(here) if len(here) > 1 else here[0].unsqueeze(0)
    _best(scores)
    return scores if scores.dtype == torch.float64 else scores.float()


def _best(scores: torch.Tensor) -> list[int]:
    """The best token of each row of `scores` [R, V], of equals the lowest id.

    Raises NumericError if a row has NaN or infinity, or only minus infinity."""
    best = [token for token in sampling.best_of_rows(scores) if token is not None]
    if len(best) < len(scores):
        raise NumericError(BROKEN)
    return best


def chosen(cursors: Sequence[Cursor], probs: torch.Tensor | Sequence[torch.Tensor]) -> list[int]:
    """The token that each row's noise takes from `probs` [R, V]; on an accelerator in a single wait."""
    if isinstance(probs, torch.Tensor) and sampling.on_accelerator(probs):
        return tokens_of_rows(probs, [w.request.noise.key for w in cursors], [w.position for w in cursors])
    return [w.request.noise.choose(p, w.position) for w, p in zip(cursors, probs, strict=True)]


def follow(cursor: Cursor, token: int) -> bool:
    """Add `token`, and step to the drafted child with this token. Returns False if there is no such child: the row is
    done."""
    tree, done = cursor.tree, cursor.done
    done.tokens.append(token)
    for child in tree.children(cursor.node):
        if tree.tokens[child] == token:
            done.path.append(child)
            return True
    return False


def score_prompts(plan: Plan, verdict: Verdict) -> Verdict:
    """Give rows the log-probabilities of their prompts' tokens. Returns the verdict without the logits that only these
    needed."""
    deciding = [slice(*verdict.logits_at[s : s + 2]) for s in range(len(plan))]
    for i, (row, segment) in enumerate(zip(plan.rows, plan.segments, strict=True)):
        if row.count_unscored(len(segment.tokens)):
            end = row.cached + len(segment.tokens)
            own = row.tokens[end - segment.num_logits + 1 : min(end + 1, row.prompt_length)].tolist()
            logits = verdict.of(i)[: len(own)].float()
            row.prompt_logprobs += sampling.token_logprobs(logits, own, row.params.prompt_logprobs or 0)
            last = int(not row.num_new and end == row.prompt_length)
            deciding[i] = slice(deciding[i].stop - last, deciding[i].stop)
    return verdict.select(deciding)
