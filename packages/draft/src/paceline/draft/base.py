"""Drafter: the interface of every method. It knows rows and rounds, never the engine.

A new drafter is one file with one class:

    class LastTokenAgain(Drafter):
        name = "again"
        def draft(self, row, most):
            return DraftTree.chain(row.last_token, [row.last_token] * min(4, most))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from paceline.core.request import Request
from paceline.core.round import Accepted, Plan, Round
from paceline.core.segment import Needs
from paceline.core.tree import DraftTree, IntArray
from paceline.errors import RowError
from paceline.formats.facts import Facts

if TYPE_CHECKING:
    import torch


class Ask(NamedTuple):
    """A request for a draft of one row.

    most  largest depth: the tokens that the answer may still have, or fewer if deeper drafts do not pay."""

    row: Request
    most: int


class Allowance:
    """Decides what is drafted in one round. This class has no limits; that of `engine/budget.py` asks for what pays.

    The engine's loop, or another, opens an allowance for each round, and calls `ask`, `cut` and `close`. Drafters that
    ask others (`parts`) do so through `Drafter.budget`, so that each part has a price of its own."""

    def ask(self, drafter: Drafter, asks: Sequence[Ask]) -> list[DraftTree]:
        """Ask `drafter` for drafts. Rows that are not worth a draft get a tree of the root alone."""
        return stamp(drafter.propose(asks), drafter)

    def gain(self, drafter: Drafter, ask: Ask) -> float:
        """Estimate, from earlier rounds alone, the tokens that a draft of `drafter` gains, less its price."""
        return inf

    def value(self, tree: DraftTree, row: Request) -> float:
        """Estimate the tokens that a finished draft gains, less the price of verifying it."""
        return inf

    def cut(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Return the trees to verify, for all rows of the round. Subclasses may cut nodes (`may_be_cut`)."""
        return list(trees)

    def close(
        self, rows: Sequence[Request], trees: Sequence[DraftTree], accepted: Sequence[Accepted], seconds: float | None
    ) -> None:
        """Learn from the round: the trees of the rows that did not fail, and the accepted part of each.

        seconds  time of the forward and of acceptance; None: something else ran at the same time."""


class Unlimited:
    """A budget without limits. `paceline.engine.budget.Budget` sets limits by prices."""

    now: Callable[[], float] = staticmethod(perf_counter)

    def open(self, rows: Sequence[Request]) -> Allowance:
        """Begin a round. rows: all rows that are decoding."""
        return Allowance()

    def drop(self, row: Request) -> None:
        """Forget a row."""


UNLIMITED = Unlimited()


class Drafter:
    """Proposes tokens for rows and observes what was accepted.

    name            name in the registry and in reports.
    lossless        "yes", or a description of the distribution that answers have instead of the target's.
    paper           source of the method.
    Config          a frozen dataclass of its options (`paceline.draft.spec.Options`), its only argument; or None.
    needs           outputs and hooks of the target's forward that it needs.
    weight_bytes    bytes of weights that a forward of its model reads; 0: it has no model.
    wants           description of the input that a request needs for a draft, beside its tokens; "": none.
    times_rounds    whether its drafts depend on the duration of the engine's rounds. Set by `bind`.
    eos_token_ids   the target's end tokens. Set by `bind`.
    parts           the drafters that it asks, through `budget`.
    budget          the round's `Allowance`. Set by `begin_round`.
    price_table     prices of rounds (`cost.Table`), from its options; None: they are learnt. Set by `bind`.
    notes           lines that a user should read. Set by `bind`.

    The engine calls `bind`, then `start(row)`; each round `begin_round`, `propose(asks)` and `observe(round)`; at
    the end `drop(row)`, for every row that was started, also if `start` or `propose` failed. It calls `restart(row)`
    when a row has lost its place in the cache and is run again. Row ids are unique in an engine.

    Whatever a drafter proposes, the text is the target's. At a temperature the target chooses by the row's noise, and a
    drafter with a distribution q may use the same noise: `row.noise.guess(q, position)` is the token that the target
    takes if its distribution is q. Positions count from the answer's first token; the first drafted token has position
    `row.num_new`."""

    name: str = ""
    lossless: str = "not stated"
    paper: str = "not stated"
    Config: ClassVar[type[Any] | None] = None
    needs: Needs = Needs()
    weight_bytes: int = 0
    wants: str = ""
    times_rounds: bool = False
    eos_token_ids: Sequence[int] = ()
    parts: Sequence[Drafter] = ()
    budget: Allowance = Allowance()
    price_table: Any = None
    notes: Sequence[str] = ()

    def bind(self, target: Facts) -> None:
        """Prepare for a target, before the first row. Overrides call this method, and raise MethodError for a target
        that they cannot use.

        When the target's weights change, between rows, drafters that read its states or run its layers (`needs`) are
        bound again. The target's fingerprint is then empty, and the drafter keeps what it has learnt."""
        self.eos_token_ids = target.eos_token_ids

    @property
    def drafts(self) -> bool:
        """Whether the drafter can propose anything: it overrides `draft` or `propose`."""
        return type(self).draft is not Drafter.draft or type(self).propose is not Drafter.propose

    @property
    def choices(self) -> Sequence[Drafter]:
        """The drafters that a request may choose."""
        return (self,)

    def of(self, row: Request) -> Drafter:
        """Return the drafter that `row` has chosen. Its `needs` hold for the row."""
        return self

    def start(self, row: Request) -> None:
        """Called when a row joins; `row.tokens` is its prompt."""

    def begin_round(self, budget: Allowance) -> None:
        """Called when a round begins. budget: the round's allowance."""
        self.budget = budget

    def draft(self, row: Request, most: int) -> DraftTree:
        """Draft a tree for one row. most: largest depth, 1 or more.

        Methods that draft for many rows at once override `propose` instead."""
        return DraftTree.root(row.last_token)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """Draft a tree for each of the rows, rooted at `row.last_token`. Nodes deeper than `most` are cut off.

        `DraftTree.root(row.last_token)` means that there is no draft; in `a+b` the next drafter is then asked."""
        return [self._draft_or_blame(ask) for ask in asks]

    def observe(self, round: Round) -> None:
        """Called after a round, when `row.tokens` ends with the new tokens. Rows that failed are not in the round."""

    def on_layer(self, layer: int, hidden: torch.Tensor, round: Plan) -> None:
        """Called during the forward after `layer` layers, if `needs.callback_layer` is set.

        hidden  states [N, H] of all nodes of the round; `hidden[round.spans()[i]]` are row i's."""

    def restart(self, row: Request) -> None:
        """Called when a preempted row joins again: its tokens so far are run again, like a prompt.

        A drafter that reads the target's states gets all of them again, so it starts anew. Others keep their data."""
        if self.needs.whole_prompt:
            self.drop(row)
            self.start(row)

    def drop(self, row: Request) -> None:
        """Forget a row that has ended, failed or was aborted. A drafter may learn from it if `row.is_complete`."""

    def chain_after(self, row: Request, tokens: IntArray) -> DraftTree:
        """Make a chain of `tokens` int64 [n]."""
        return DraftTree.chain(row.last_token, tokens, source=self.name if len(tokens) else "")

    def tree_after(self, row: Request, tokens: IntArray, parent: IntArray) -> DraftTree:
        """Make a tree of `tokens` int64 [n], without the nodes below a token that ends the row's answer.

        parent  number of each token's parent, int64 [n]: 0 is the row's last token, 1 the first drafted one."""
        tree = tree_below(row, tokens, parent)
        tree.source = self.name if tree.num_drafted else ""
        return tree

    def _draft_or_blame(self, ask: Ask) -> DraftTree:
        try:
            return self.draft(*ask) if ask.most > 0 else DraftTree.root(ask.row.last_token)
        except Exception as error:
            raise RowError(ask.row.id) from error


def tree_below(row: Request, tokens: IntArray, parent: IntArray) -> DraftTree:
    """A tree of `tokens` int64 [n] after the row's last token, without the nodes below a token that ends its answer.

    parent  number of each token's parent, int64 [n]: 0 is the row's last token, 1 the first drafted one."""
    tokens, parent = up_to_ends(tokens, parent, row.ends)
    nodes = np.empty((2, len(tokens) + 1), np.int64)
    nodes[:, 0] = row.last_token, -1
    nodes[0, 1:], nodes[1, 1:] = tokens, parent
    return DraftTree(nodes[0], nodes[1])


def up_to_ends(tokens: IntArray, parent: IntArray, ends: frozenset[int]) -> tuple[IntArray, IntArray]:
    """Drop the nodes below a token of `ends`. Returns the tokens and parents that stay.

    parent  number of each token's parent, int64 [n]: 0 is the root, 1 the first token."""
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
    for part in drafter.parts:
        rebind(part, target)
    needs = drafter.needs
    if not drafter.parts and (needs.whole_prompt or needs.new_layers or needs.resume_layer is not None):
        drafter.bind(target)


def stamp(trees: list[DraftTree], drafter: Drafter) -> list[DraftTree]:
    """Set `owner` and `source` of `trees`, where they are not set, to `drafter` and its name."""
    for tree in trees:
        if tree.owner is None:
            tree.owner = drafter
        tree.source = tree.source or drafter.name
    return trees


def unmet(drafter: Drafter) -> str:
    """Name the inputs that a drafter's parts need in a request, for a report that nothing was drafted; "" for none."""
    return "; ".join(f"{part.name} needs {part.wants}" for part in drafter.parts or (drafter,) if part.wants)


def rooted(tree: DraftTree, row: Request, drafter: Drafter) -> DraftTree:
    """Return `tree`, or raise RowError if its root is not the row's last token."""
    if tree.tokens[0] != row.last_token:
        raise RowError(row.id) from ValueError(f"{drafter.name} proposed a tree whose root is not the row's last token")
    return tree
