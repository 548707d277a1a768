"""Drafting with a model, token by token: the one loop of every drafter that has one.

    run the model -> draw a token -> does the stop rule say enough? -> run the model on it -> ...

A drafter says how its model runs (`run`), and gets drafting, stopping, batches of rows that stop at different lengths,
sampling with the distribution it drew from, trees, and its own cache kept in step with the row. The cache needs no
rollback: what is drafted lies behind the row's committed tokens, and `keep` commits what was accepted of it. Tokens
that the model has not seen, one as a rule, two after a draft that was accepted whole, more where another drafter was
asked meanwhile, are run first. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import numpy as np
import torch

from paceline.accept import Accepted
from paceline.draft import stop
from paceline.draft.base import Drafter
from paceline.errors import MethodError
from paceline.row import Row
from paceline.sampling import probabilities, warp
from paceline.target.base import Segment, Target, Verdict
from paceline.tree import DraftTree, IntArray


@dataclass(frozen=True, kw_only=True)
class SteppingConfig:
    """Options of every drafter that has a model."""

    stop: stop.Name = field(
        default="svip", metadata={"help": "when to stop: at a fixed length, or where the draft is no longer sure"}
    )
    draft: int | None = field(default=None, metadata={"help": "most tokens drafted a round; none: the stop rule's own"})
    threshold: float | None = field(default=None, metadata={"help": "of the stop rule; none: its own"})
    tree: int = field(default=0, metadata={"help": "nodes of a tree of the most probable tokens; 0: a chain"})
    width: int = field(default=10, metadata={"help": "of a tree: nodes expanded together, and children of each"})
    sample: Literal["draw", "best"] = field(
        default="draw", metadata={"help": "at a temperature: draw drafted tokens, or take the most probable ones"}
    )


@dataclass
class Draft:
    """A row's draft in the making: nodes the model runs, in the order it runs them.

    tokens, parent  the first `known` nodes are committed tokens that the model has not run; the last of them is the
                    tree's root. The others are drafted.
    done            nodes that were run. calls: forwards that took.
    kept            for every node of the tree that was handed over, its number here; None: it was never run."""

    row: Row
    known: int
    tokens: list[int]
    parent: list[int]
    done: int = 0
    calls: int = 0
    kept: list[int | None] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, row: Row, cached: int) -> Draft:
        """Nothing drafted yet; the model has run `cached` of the row's tokens."""
        known = row.tokens[cached:].tolist()
        return cls(row, len(known), known, list(range(-1, len(known) - 1)))

    @property
    def drafted(self) -> list[int]:
        """Tokens drafted so far."""
        return self.tokens[self.known :]

    def add(self, token: int, parent: int | None = None) -> None:
        """Another node, behind the last one or behind node `parent`."""
        self.parent.append(len(self.tokens) - 1 if parent is None else parent)
        self.tokens.append(token)

    def segment(self, slot: int, num_logits: int) -> Segment:
        """The nodes not run yet, with logits for the last `num_logits`."""
        return Segment(slot, np.array(self.tokens), np.array(self.parent), start=self.done, num_logits=num_logits)


class Stepping(Drafter):
    """What drafters with a model have in common. Subclasses fill in `run`, `cached` and `keep`, and say in `bind` which
    tokens the logits' columns are, if they are not all."""

    def __init__(self, config: SteppingConfig):
        self.options = config
        self.rule = stop.stop_rule(config.stop, config.draft, config.threshold)
        if config.tree < 0 or config.width < 1:
            raise MethodError(f"tree is {config.tree} and width {config.width}; they are at least 0 and 1")
        self.columns: torch.Tensor | None = None
        self._ends: frozenset[int] = frozenset()
        self._vocab_size = 0
        self._drafts: dict[int, Draft] = {}
        self._since: dict[int, float] = {}

    # What a drafter fills in ----------------------------------------------------------------------------------

    def run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        """Run every draft's nodes from `done` on; logits [sum(num_logits), K] behind the last `num_logits[i]` nodes
        of each, columns as `columns` says."""
        raise NotImplementedError

    def cached(self, row: Row) -> int:
        """How many of a row's tokens the model has run and kept."""
        raise NotImplementedError

    def keep(self, draft: Draft, nodes: Sequence[int]) -> None:
        """Of the nodes of `draft` that were run, `nodes` (ascending, from 0) are committed now; forget the others."""
        raise NotImplementedError

    def room(self, row: Row) -> int:
        """Most tokens that may be drafted for a row; 0: none, and its model is not run."""
        return row.max_draft

    def catch_up(self, row: Row) -> None:
        """Run what is long known, a prompt say, before the round's draft begins with the few tokens that are left."""

    # The loop -------------------------------------------------------------------------------------------------

    def bind(self, target: Target) -> None:
        self._ends = frozenset(target.eos_token_ids)
        self._vocab_size = target.vocab_size

    def propose(self, rows: Sequence[Row]) -> list[DraftTree]:
        able = [row for row in rows if self.room(row) > 0]
        for row in able:
            self.catch_up(row)
        drafts = [Draft.of(row, self.cached(row)) for row in able]
        self._drafts = {draft.row.id: draft for draft in drafts}
        trees = self._trees(drafts) if self.options.tree else self._chains(drafts)
        made = dict(zip(self._drafts, trees, strict=True))
        return [made.get(row.id) or DraftTree.root(row.last_token) for row in rows]

    def _chains(self, drafts: Sequence[Draft]) -> list[DraftTree]:
        """Draft for every row until its stop rule, its end or its room says enough."""
        active = list(drafts)
        while active:
            logits = self._run(active, [1] * len(active))
            signals = self.rule.signals(logits)
            active = [
                draft
                for r, (draft, signal) in enumerate(zip(active, signals, strict=True))
                if self._draw(draft, logits[r : r + 1]) and not self._enough(draft, signal)
            ]
        return [self._chain(draft) for draft in drafts]

    def _run(self, drafts: Sequence[Draft], num_logits: Sequence[int]) -> torch.Tensor:
        began = perf_counter()
        logits = self.run(drafts, num_logits)
        for draft in drafts:
            draft.done = len(draft.tokens)
            draft.calls += 1
        self.rule.stepped(perf_counter() - began)
        return logits

    def _draw(self, draft: Draft, logits: torch.Tensor) -> bool:
        """Add a token drawn from logits [1, K]; whether another may follow."""
        params, context = draft.row.params, [_context(draft)]
        if params.shifts_logits:  # penalties are the tokens' own, whatever column they have
            logits = self._spread(logits, -torch.inf)
        if params.is_greedy or self.options.sample == "best":
            column = int(warp(logits, params, context)[0].argmax())
        else:
            q = probabilities(logits, params, context)[0]
            column = draft.row.random.draft(q)
            draft.probs.append(self._spread(q, 0.0))
        is_token = logits.shape[-1] == self._vocab_size or self.columns is None
        draft.add(column if is_token else int(self.columns[column]))  # type: ignore[index]
        return draft.tokens[-1] not in self._ends

    def _spread(self, values: torch.Tensor, nothing: float) -> torch.Tensor:
        """Values [..., K] over the columns as values [..., V] over all tokens, `nothing` for those without a column."""
        if self.columns is None or values.shape[-1] == self._vocab_size:
            return values
        out = values.new_full((*values.shape[:-1], self._vocab_size), nothing)
        out[..., self.columns] = values
        return out

    def _enough(self, draft: Draft, signal: float) -> bool:
        drafted, row = len(draft.drafted), draft.row
        return drafted >= min(self.rule.most(row.id), self.room(row)) or self.rule.stop(row.id, drafted, signal)

    def _chain(self, draft: Draft) -> DraftTree:
        """The draft as a chain, with the distributions its tokens were drawn from, if they were drawn."""
        draft.kept = [node if node < draft.done else None for node in range(draft.known - 1, len(draft.tokens))]
        tree = DraftTree.chain(draft.row.last_token, draft.drafted, source=self.name, calls=draft.calls)
        if draft.probs:
            tree.draft_probs = torch.stack([*draft.probs, torch.zeros_like(draft.probs[0])])
        return tree

    # Trees ----------------------------------------------------------------------------------------------------

    def _trees(self, drafts: Sequence[Draft]) -> list[DraftTree]:
        """Trees of the most probable tokens, level by level (EAGLE-2, Li et al. 2024, section 4).

        Of every node that was run the `width` most probable children become candidates, scored by the probability of
        their whole path; the `width` best of a level are run next; in the end the best `tree - 1` candidates of all
        levels are verified. The stop rule looks at the best node of a level, and its children stay candidates. No
        token is drawn, so at a temperature the tree counts as a set of plain guesses."""
        growths = [_Growth(draft, self.options.width) for draft in drafts]
        active = list(growths)
        while active:
            logits = self._run([g.draft for g in active], [len(g.level) for g in active])
            found = logits.split([len(g.level) for g in active])
            signals = self.rule.signals(torch.stack([of_row[0] for of_row in found]))
            for growth, of_row in zip(active, found, strict=True):
                growth.expand(of_row, self.columns)
            active = [
                growth
                for growth, signal in zip(active, signals, strict=True)
                if not self._deep_enough(growth, signal) and growth.descend(self._ends, self.options.tree - 1)
            ]
        return [growth.tree(self.options.tree - 1, self.name) for growth in growths]

    def _deep_enough(self, growth: _Growth, signal: float) -> bool:
        row = growth.draft.row
        return growth.depth >= min(self.rule.most(row.id), self.room(row)) or self.rule.stop(
            row.id, growth.depth, signal
        )

    # After a round --------------------------------------------------------------------------------------------

    def observe(
        self,
        rows: Sequence[Row],
        trees: Sequence[DraftTree],
        verdict: Verdict,
        accepted: Sequence[Accepted],
    ) -> None:
        now = perf_counter()
        for row, tree, done in zip(rows, trees, accepted, strict=True):
            draft = self._drafts.pop(row.id, None)
            if draft is None or not draft.done:  # the row was in its prompt, or had no room for a draft
                continue
            mine = tree.source == self.name
            nodes = list(range(draft.known))
            for node in done.path[1:] if mine else ():
                at = draft.kept[node]
                if at is None:
                    break
                nodes.append(at)
            self.keep(draft, nodes)
            if mine:
                self.rule.learn(row.id, tree.max_depth, len(done.path) - 1, now - self._since.get(row.id, now))
            self._since[row.id] = now

    def drop(self, row: Row) -> None:
        self._drafts.pop(row.id, None)
        self._since.pop(row.id, None)
        self.rule.drop(row.id)


def _context(draft: Draft) -> IntArray:
    """Every token before the next one to be drafted."""
    return np.concatenate([draft.row.tokens, np.array(draft.drafted, np.int64)])


class _Growth:
    """A tree in the making. Candidates are numbered as they are found; -1 is the root.

    token, parent, score  of every candidate: score is the logarithm of the probability of its path.
    level                 candidates that are run next, best first; at first the root."""

    def __init__(self, draft: Draft, width: int):
        self.draft, self.width = draft, width
        self.token: list[int] = []
        self.parent: list[int] = []
        self.score: list[float] = []
        self.depths: list[int] = []
        self.level = [-1]
        self.depth = 1
        self._node = {-1: draft.known - 1}
        self._new: list[int] = []

    def expand(self, logits: torch.Tensor, columns: torch.Tensor | None) -> None:
        """Children of the level from logits [len(level), K]."""
        logs = logits.float().log_softmax(-1)
        best = logs.topk(min(self.width, logs.shape[-1]))
        tokens = best.indices if columns is None else columns[best.indices]
        self._new = []
        for above, of_node, scores in zip(self.level, tokens.tolist(), best.values.tolist(), strict=True):
            so_far = self.score[above] if above >= 0 else 0.0
            for token, score in zip(of_node, scores, strict=True):
                self._new.append(len(self.token))
                self.token.append(token)
                self.parent.append(above)
                self.score.append(so_far + score)
                self.depths.append(self.depth)

    def descend(self, ends: frozenset[int], nodes: int) -> bool:
        """Make the best new candidates the next level; whether there are any that could still be verified."""
        least = sorted(self.score, reverse=True)[:nodes][-1]
        open_ = [c for c in self._new if self.token[c] not in ends and self.score[c] >= least]
        self.level = sorted(open_, key=lambda c: -self.score[c])[: self.width]
        for candidate in self.level:
            self._node[candidate] = len(self.draft.tokens)
            self.draft.add(self.token[candidate], self._node[self.parent[candidate]])
        self.depth += 1
        return bool(self.level)

    def tree(self, nodes: int, source: str) -> DraftTree:
        """The best `nodes` candidates; a parent's score is never below its children's, so they hang together."""
        chosen = sorted(sorted(range(len(self.token)), key=lambda c: (-self.score[c], self.depths[c]))[:nodes])
        number = {-1: 0} | {candidate: n for n, candidate in enumerate(chosen, 1)}
        self.draft.kept = [self._node.get(candidate) for candidate in (-1, *chosen)]
        tokens = [self.token[candidate] for candidate in chosen]
        parents = [number[self.parent[candidate]] for candidate in chosen]
        return DraftTree.of(
            self.draft.row.last_token, tokens, parents, source=source, calls=self.draft.calls
        )
