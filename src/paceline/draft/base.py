"""Drafter: the interface of every method. It knows rows and rounds, never the engine.

A new drafter is one file with one class:

    class LastTokenAgain(Drafter):
        name = "again"
        def draft(self, row):
            return DraftTree.chain(row.last_token, [row.last_token] * min(4, row.max_draft))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from paceline.core.accept import Accepted
from paceline.core.request import Request
from paceline.core.round import Plan, Round
from paceline.core.tree import DraftTree, IntArray
from paceline.errors import RowError
from paceline.target.base import Facts, Needs

if TYPE_CHECKING:
    from paceline.draft.cost import Table


class Drafter:
    """Proposes tokens for rows and observes what was accepted.

    name            name in the registry and in reports.
    lossless        "yes", or a description of the distribution that answers have instead of the target's.
    paper           source of the method.
    Config          a frozen dataclass of its options (`paceline.draft.spec.Options`), its only argument; or None.
    needs           outputs and hooks of the target's forward that it needs.
    weight_bytes    bytes of weights that one forward of its model reads; 0: it has no model.
    wants           description of the input, beside tokens, that a request must have for a draft; "": none.
    times_rounds    its drafts depend on the duration of the engine's rounds. Set by `bind`.
    eos_token_ids   the target's end tokens. Set by `bind`.
    prefill_tokens  number of prompt tokens that this round's forward runs with the drafts. Set by `begin_round`.
    budget          `Unlimited` through which it asks other drafters. Set by `begin_round`.
    price_table     prices of rounds that its options give; None: they are learnt. Set by `bind`.
    notes           lines that a user should read. Set by `bind`.

    The engine calls `bind`, then `start(row)`; each round `begin_round`, `propose(rows)` and `observe(round)`; at
    the end `drop(row)`, for every row that was started, also if `start` or `propose` failed. It calls `restart(row)`
    when a row has lost its place in the cache and is run again. Row ids are unique in an engine.

    Whatever a drafter proposes, the text is the target's. One with a distribution q of its own may ask for the noise
    by which the target chooses at a temperature: `row.noise.guess(q, position)` is the token that the target takes
    where it agrees with q. `position` counts from the answer's first token: `row.num_new` for the first drafted one."""

    name: str = ""
    lossless: str = "not stated"
    paper: str = "not stated"
    Config: ClassVar[type[Any] | None] = None
    needs: Needs = Needs()
    weight_bytes: int = 0
    wants: str = ""
    times_rounds: bool = False
    eos_token_ids: Sequence[int] = ()
    prefill_tokens: int = 0
    budget: Unlimited
    price_table: Table | None = None
    notes: Sequence[str] = ()

    def bind(self, target: Facts) -> None:
        """Prepare for a target, before the first row. Overrides call this method, and raise MethodError for a target
        that they cannot use.

        A drafter that reads the target's states or runs its layers (`needs`) is bound again, between rows, to a target
        with other weights, whose fingerprint is empty then. It keeps what it has learnt."""
        self.eos_token_ids = target.eos_token_ids

    @property
    def drafts(self) -> bool:
        """Whether it can propose anything, that is, overrides `draft` or `propose`."""
        return type(self).draft is not Drafter.draft or type(self).propose is not Drafter.propose

    @property
    def choices(self) -> Sequence[Drafter]:
        """The drafters among which requests choose."""
        return (self,)

    def of(self, row: Request) -> Drafter:
        """The drafter that a row has chosen. Its `needs` hold for the row."""
        return self

    def start(self, row: Request) -> None:
        """Called when a row joins; `row.tokens` is its prompt."""

    def begin_round(self, prefill_tokens: int, budget: Unlimited | None = None) -> None:
        """Called when a round begins. Its forward will also run `prefill_tokens` prompt tokens; `budget` has its
        prices.
        """
        self.prefill_tokens, self.budget = prefill_tokens, budget or UNLIMITED

    def draft(self, row: Request) -> DraftTree:
        """Draft a tree for one row, whose `max_draft` is above 0. Methods that draft many rows at once override
        `propose` instead."""
        return DraftTree.root(row.last_token)

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        """Draft a tree for each row, rooted at `row.last_token`. Nodes deeper than `row.max_draft` are cut off.

        `DraftTree.root(row.last_token)` is no draft; in `a+b` the next drafter is then asked."""
        return [self._draft_or_blame(row) for row in rows]

    def observe(self, round: Round) -> None:
        """Called after a round, when `row.tokens` ends with the new tokens. Rows that failed are not in the round."""

    def on_layer(self, layer: int, hidden: torch.Tensor, round: Plan) -> None:
        """Called during the forward, if `needs.callback_layer` is set, when `layer` layers are done.

        hidden  [N, H], the states of all nodes of the round; those of row i are `hidden[round.spans()[i]]`."""

    def restart(self, row: Request) -> None:
        """Called when a preempted row joins again: its tokens so far are run again, like a prompt.

        A drafter that reads the forward's states gets all of them again, so it starts anew. Others keep their data.
        """
        if self.needs.whole_prompt:
            self.drop(row)
            self.start(row)

    def drop(self, row: Request) -> None:
        """Forget a row that has ended, failed or was aborted. A drafter may learn from it if `row.is_complete`."""

    def end_tokens(self, row: Request) -> frozenset[int]:
        """Tokens that end this row's answer, so that nothing after them can be accepted."""
        own, ends = row.params.stop_token_ids, frozenset(() if row.params.ignore_eos else self.eos_token_ids)
        return ends.union(own) if own else ends

    def chain_after(self, row: Request, tokens: IntArray) -> DraftTree:
        """Make a chain of `tokens` int64 [n]."""
        return DraftTree.chain(row.last_token, tokens, source=self.name if len(tokens) else "")

    def tree_after(self, row: Request, tokens: IntArray, parent: IntArray) -> DraftTree:
        """Make a tree of `tokens` int64 [n], without the nodes below a token that ends the row's answer.

        parent  number of each token's parent, int64 [n]: 0 is the row's last token, 1 the first drafted one."""
        tokens, parent = up_to_ends(tokens, parent, self.end_tokens(row))
        nodes = np.empty((2, len(tokens) + 1), np.int64)
        nodes[:, 0] = row.last_token, -1
        nodes[0, 1:], nodes[1, 1:] = tokens, parent
        return DraftTree(nodes[0], nodes[1], source=self.name if len(tokens) else "")

    def _draft_or_blame(self, row: Request) -> DraftTree:
        try:
            return self.draft(row) if row.max_draft > 0 else DraftTree.root(row.last_token)
        except Exception as error:
            raise RowError(row.id) from error


class Unlimited:
    """Asks drafters for drafts without prices: every drafter for every row, and for as much as it likes.

    `paceline.engine.budget.Budget` knows prices and acceptance, and asks for drafts that pay. Drafters that ask others
    (`parts`) do so through `Drafter.budget`, so that each part has a price of its own. The engine's loop, or another,
    calls `begin`, `ask`, `cut` and `observe` in a round, and `drop` when a row leaves."""

    now: Callable[[], float] = staticmethod(perf_counter)

    def begin(self, rows: Sequence[Request]) -> None:
        """Called when a round of `rows`, which are decoding, begins."""

    def ask(self, drafter: Drafter, rows: Sequence[Request]) -> list[DraftTree]:
        """Ask `drafter` for drafts of `rows`. A row for which it is not asked gets the root alone."""
        return stamp(drafter.propose(rows), drafter)

    def gain(self, drafter: Drafter, row: Request) -> float:
        """Expected tokens, beyond their price, of a draft of `drafter`; they depend on earlier rounds alone."""
        return inf

    def value(self, tree: DraftTree, row: Request) -> float:
        """Expected tokens, beyond their price, of a draft that was made."""
        return inf

    def cut(self, rows: Sequence[Request], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The trees to verify. Trees may lose nodes (`may_be_cut`); here none does."""
        return list(trees)

    def observe(
        self, rows: Sequence[Request], trees: Sequence[DraftTree], accepted: Sequence[Accepted], seconds: float | None
    ) -> None:
        """Learn from a round of rows that did not fail: its trees, and the accepted part of each.

        seconds  time of the forward and of acceptance; None: something else ran at the same time."""

    def drop(self, row: Request) -> None:
        """Forget a row."""


UNLIMITED = Unlimited()
Drafter.budget = UNLIMITED


class View:
    """A request with some attributes of its own; the others are those of `row`. It is as long as its tokens."""

    def __init__(self, row: Request, **own: Any):
        self._row = row
        vars(self).update(own)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)


def up_to_ends(tokens: IntArray, parent: IntArray, ends: frozenset[int]) -> tuple[IntArray, IntArray]:
    """Tokens and parents int64 [n] (0 is the root, 1 the first token) without the nodes below a token of `ends`."""
    if ends.isdisjoint(tokens.tolist()):
        return tokens, parent
    nodes: list[int] = []
    number = {0: 0}
    for i, (token, above) in enumerate(zip(tokens.tolist(), parent.tolist(), strict=True)):
        if above in number:
            nodes.append(i)
            if token not in ends:
                number[i + 1] = len(nodes)
    return tokens[nodes], np.array([number[above] for above in parent[nodes].tolist()], np.int64)


def rebind(drafter: Drafter, target: Facts) -> None:
    """Bind a drafter and its parts to a target with new weights, if they read its states or run its layers."""
    for part in (parts := getattr(drafter, "parts", ())):
        rebind(part, target)
    if not parts and (drafter.needs.whole_prompt or drafter.needs.resume_layer is not None):
        drafter.bind(target)


def stamp(trees: list[DraftTree], drafter: Drafter) -> list[DraftTree]:
    """Set `owner` and `source` of `trees` to `drafter`, unless they are set."""
    for tree in trees:
        if tree.owner is None:
            tree.owner = drafter
        tree.source = tree.source or drafter.name
    return trees


def unmet(drafter: Drafter) -> str:
    """A message on the inputs that a drafter's parts need in a request, for when nothing was drafted; "" for none."""
    parts: Sequence[Drafter] = getattr(drafter, "parts", (drafter,))
    return "; ".join(f"{part.name} needs {part.wants}" for part in parts if part.wants)


def rooted(tree: DraftTree, row: Request, drafter: Drafter) -> DraftTree:
    """Return `tree`, or raise RowError if its root is not the row's last token."""
    if tree.tokens[0] != row.last_token:
        raise RowError(row.id) from ValueError(f"{drafter.name} proposed a tree whose root is not the row's last token")
    return tree
