"""Drafting with a model, token by token: the one loop of every drafter that has one.

    run the model -> draw a token -> does the stop rule say enough? -> run the model on it -> ...

A drafter says how its model runs (`run`), and gets drafting, stopping, batches of rows that stop at different lengths,
sampling with the distribution it drew from, trees, and its own cache kept in step with the row. The cache needs no
rollback: drafted tokens lie after the row's committed ones, and `keep` commits those that were accepted. Committed
tokens that the model has not run come first: usually one, two after a draft that was accepted whole, more where another
drafter drafted in between. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch

from paceline.core.request import Request
from paceline.core.round import Round
from paceline.core.sampling import best_of_rows, probabilities, warp
from paceline.core.tree import DraftTree, IntArray
from paceline.draft.base import Drafter
from paceline.draft.cost import RoundTimes, best_sizes, time_forwards
from paceline.draft.models import stop
from paceline.draft.models.drafts import Draft, Growth, chain_tree
from paceline.draft.models.stop import Outcome
from paceline.draft.spec import Options, option
from paceline.errors import PacelineError
from paceline.target.base import Facts

TREE = "drafted nodes of a tree of the most probable tokens; auto: as many as pay; 0: a chain"
VOCAB = "draft only these tokens: the K the target writes most, or a file of `paceline train vocab`"


@dataclass(frozen=True, kw_only=True)
class SteppingConfig(Options):
    """Options of every drafter that has a model."""

    stop: stop.Name = option("svip", "when to stop: at a fixed length, or where the draft is no longer sure")
    draft: int | None = option(None, "most tokens drafted a round; none: the stop rule's own", least=1)
    threshold: float | None = option(None, "of the stop rule; none: its own")
    tree: int | Literal["auto"] = option(0, TREE, least=0)
    width: int = option(10, "of a tree: nodes expanded together, and children of each", least=1)
    sample: Literal["draw", "best"] = option(
        "draw", "at a temperature: draw drafted tokens, or take the most probable ones"
    )
    vocab: str | None = option(None, VOCAB)


Watch = Callable[[Sequence[Draft], torch.Tensor], None]


class Stepping(Drafter):
    """Base of drafters with a model. Subclasses fill in `run`, `cached` and `keep`.

    columns       tokens int64 [K] of the logits' columns, set in `bind`; None: all tokens.
    drafts_ahead  whether it can draft for outcomes still to come: `arrange` works without the target's forward."""

    lossless = "yes"  # the distributions that tokens were drawn from go with the draft; others are point masses
    drafts_ahead = False

    def __init__(self, config: SteppingConfig):
        self.config = config
        self.rule = stop.RULES[config.stop](config.draft, config.threshold)
        self.columns: torch.Tensor | None = None
        self._watch: Watch | None = None
        self._vocab_size = 0
        self._times = RoundTimes()
        self._asked: set[int] = set()
        self._drafts: dict[int, Draft] = {}

    # What a drafter fills in ----------------------------------------------------------------------------------

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """Run all drafts' nodes from `done` on; logits [sum(num_logits), K] after the last `num_logits[i]` of each."""
        raise NotImplementedError

    def cached(self, row: Request) -> int:
        """The number of a row's tokens that the model has run and kept."""
        raise NotImplementedError

    def keep(self, draft: Draft, nodes: Sequence[int]) -> None:
        """Commit `nodes` (ascending, from 0), of those of `draft` that were run, and forget the others."""
        raise NotImplementedError

    def draft_limit(self, row: Request) -> int:
        """Most tokens that may be drafted for a row; 0: none, and its model is not run."""
        return row.max_draft

    def catch_up(self, row: Request) -> None:
        """Feed the model its backlog, such as a prompt, in chunks, before the round's draft begins."""

    def arrange(self, row: Request, nodes: Sequence[int]) -> None:
        """Move the keys and values of `nodes`, run but not committed, to the places after the row, in that order.

        nodes: how far after the row's last committed token each lies, from 0. For `branches.py`."""
        raise NotImplementedError

    # The loop -------------------------------------------------------------------------------------------------

    def bind(self, target: Facts) -> None:
        super().bind(target)
        self._vocab_size = target.vocab_size
        if self.config.tree == "auto":
            self._times = time_forwards(target)

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        self._asked = {row.id for row in rows}
        able = [row for row in rows if min(self.rule.most(row.id), self.draft_limit(row)) > 0]
        for row in able:
            self.catch_up(row)
        drafts = [self.begin(row) for row in able]
        self._drafts = {draft.row.id: draft for draft in drafts}
        trees = self._trees(drafts) if self.config.tree else self._chains(drafts)
        made = dict(zip(self._drafts, trees, strict=True))
        return [made.get(row.id) or DraftTree.root(row.last_token) for row in rows]

    def begin(self, row: Request) -> Draft:
        """An empty draft."""
        return Draft.chain(row, row.tokens[self.cached(row) :].tolist(), self.end_tokens(row))

    def most(self, draft: Draft) -> int:
        """Most tokens to draft, by the stop rule and the row."""
        return min(self.rule.most(draft.row.id), self.draft_limit(draft.row) - draft.ahead)

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Meanwhile call `watch` with the logits [R, K] that a token of each of R chains is drawn from."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def hand_over(self) -> dict[int, Draft]:
        """The drafts just made, by row id, to a caller that will call `keep` in the place of `observe`."""
        drafts, self._drafts, self._asked = self._drafts, {}, set()
        return drafts

    def _chains(self, drafts: Sequence[Draft]) -> list[DraftTree]:
        active = list(drafts)
        while active:
            active = self.grow(active, self.run_nodes(active, [1 + draft.guessed for draft in active]))
        return [chain_tree(draft, self.name) for draft in drafts]

    def grow(self, drafts: Sequence[Draft], logits: torch.Tensor) -> list[Draft]:
        """Add a token to every chain from its row of logits [R, K]; those that go on."""
        if self._watch is not None:
            self._watch(drafts, logits)
        signals = self.signals(drafts, logits)
        drew = self._draw(drafts, logits)
        return [
            draft
            for draft, signal, more in zip(drafts, signals, drew, strict=True)
            if more and not self._enough(draft, draft.length, signal) and draft.tokens[-1] not in draft.ends
        ]

    def signals(self, drafts: Sequence[Draft], logits: torch.Tensor) -> list[float]:
        """What the stop rule decides by, for the next token of every chain. logits [R, K]: what it is drawn from."""
        return self.rule.signals(logits)

    def run_nodes(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """`run`, and count it."""
        logits = self.run(drafts, num_logits)
        for draft in drafts:
            draft.done = len(draft.tokens)
            draft.calls += 1
        return logits

    def _enough(self, draft: Draft, drafted: int, signal: float) -> bool:
        # Ask the rule after every token: some rules learn from the signals they get.
        return self.rule.stop(draft.row.id, drafted, signal) or drafted >= self.most(draft)

    def _trees(self, drafts: Sequence[Draft]) -> list[DraftTree]:
        """Trees of the most probable tokens, level by level (EAGLE-2, Li et al. 2024, section 4).

        The `width` most probable children of every node that was run become candidates, scored by the probability of
        their whole path; the `width` best of a level are run next; in the end the best `tree` candidates of all levels
        are verified. The stop rule looks at the best node of a level, and its children stay candidates. No token is
        drawn, so at a temperature the tree counts as a set of point masses."""
        auto = self.config.tree == "auto"
        growths = [Growth(draft, self.config.width, 0 if auto else int(self.config.tree)) for draft in drafts]
        active = list(growths)
        while active:
            levels = [len(growth.level) for growth in active]
            logits = self.run_nodes([growth.draft for growth in active], levels)
            signals = self.rule.signals(logits[[0, *accumulate(levels[:-1])]])
            for growth, of_row in zip(active, logits.split(levels), strict=True):
                growth.expand(of_row, self.columns)
            if auto:
                for growth, size in zip(growths, self.fitting([one.chances() for one in growths]), strict=True):
                    growth.size = size
            active = [
                growth
                for growth, signal in zip(active, signals, strict=True)
                if not self._enough(growth.draft, growth.depth, signal) and growth.descend()
            ]
        return [growth.tree(self.name) for growth in growths]

    def fitting(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many of the likeliest candidates of each row pay together, with whatever else runs in the round."""
        return best_sizes(chances, self._times, self.prefill_tokens + len(self._asked) - len(chances))

    # Drawing a token ------------------------------------------------------------------------------------------

    def _draw(self, drafts: Sequence[Draft], logits: torch.Tensor) -> list[bool]:
        """Add a token to every draft, drawn from its row of logits [R, K]; False where they are no distribution."""
        best = best_of_rows(logits) if any(self._takes_best(draft.row) for draft in drafts) else []
        drew = []
        for r, draft in enumerate(drafts):
            if self._takes_best(draft.row):
                token = self._token(best[r])
            else:
                token = self._warped(draft, logits[r : r + 1])
            if token is not None:
                draft.add(token)
            drew.append(token is not None)
        return drew

    def _takes_best(self, row: Request) -> bool:
        """Whether a row's token is the best one as the logits come."""
        return not row.params.shifts_logits and (row.params.is_greedy or self.config.sample == "best")

    def _warped(self, draft: Draft, logits: torch.Tensor) -> int | None:
        """A token from logits [1, K], warped as the row wants it; None where none can be drawn."""
        params, shifts = draft.row.params, draft.row.params.shifts_logits
        if shifts:  # penalties are the tokens' own, whatever column they have
            logits = self._spread(logits, -torch.inf)
        context = [draft.context] if shifts else []
        try:
            if params.is_greedy or self.config.sample == "best":
                (best,) = best_of_rows(warp(logits, params, context))
                return best if shifts else self._token(best)
            q = probabilities(logits, params, context)[0]
            drawn = draft.row.random.draft(q)
        except PacelineError:  # no numbers, or all that has a column is banned: the target will say what follows
            return None
        draft.probs.append(q if shifts else self._spread(q, 0.0))
        return drawn if shifts else self._token(drawn)

    def _token(self, column: int | None) -> int | None:
        """The token of a column of the logits."""
        return column if column is None or self.columns is None else int(self._tokens[column])

    @cached_property
    def _tokens(self) -> IntArray:
        """`columns` on the CPU, where looking one up waits for nothing."""
        assert self.columns is not None
        return self.columns.cpu().numpy()

    def _spread(self, values: torch.Tensor, nothing: float) -> torch.Tensor:
        """Values [..., K] over the columns as values [..., V] over all tokens, `nothing` for those without a column."""
        if self.columns is None:
            return values
        out = values.new_full((*values.shape[:-1], self._vocab_size), nothing)
        out[..., self.columns] = values
        return out

    # After a round --------------------------------------------------------------------------------------------

    def observe(self, round: Round) -> None:
        outcomes: list[Outcome] = []
        for i, (row, tree) in enumerate(zip(round.rows, round.trees, strict=True)):
            path, is_own = round.accepted[i].path, round.is_from(i, self)
            draft = self._drafts.pop(row.id, None)
            if draft is not None:
                self.keep(draft, draft.accepted(tree.proposed(path) if is_own else ()))
            if is_own or (row.id in self._asked and not tree.num_drafted):
                outcomes.append(Outcome(row.id, tree.max_depth, len(path) - 1))
        if outcomes:
            self.rule.learn(outcomes)
        self._asked = set()

    def drop(self, row: Request) -> None:
        self._drafts.pop(row.id, None)
        self.rule.drop(row.id)
