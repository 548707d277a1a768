"""Drafter: the interface of every method, and the nouns that it speaks of. Knows rows and rounds, never the engine.

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

from paceline.core.accept import Accepted, Rule
from paceline.core.request import Request
from paceline.core.round import Plan, Round
from paceline.core.tree import DraftTree, IntArray
from paceline.errors import RowError
from paceline.target.base import Facts, Needs

if TYPE_CHECKING:
    from paceline.draft.cost import Table


class Drafter:
    """Proposes tokens for rows and observes what was accepted.

    name            as in the registry; reports show it.
    lossless        "yes", or what it keeps instead of the target's distribution.
    paper           where it comes from.
    Config          a frozen dataclass of its options (`paceline.draft.options.Options`), its only argument; or None.
    needs           what it needs from the target's forward.
    weight_bytes    bytes of weights that one forward of its model reads; 0: it has no model.
    wants           what a request must have for a draft, other than its tokens; "": nothing.
    times_rounds    after `bind`: whether its drafts depend on the duration of the engine's rounds.
    acceptance      the acceptance rule of its options, used if the engine is given none; None: the lossless one.
    eos_token_ids   the target's end tokens, from `bind`.
    prefill_tokens  prompt tokens that this round's forward runs with the drafts, from `begin_round`.
    budget          whom a drafter that asks others asks them through, from `begin_round`.
    price_table     after `bind`: prices of rounds that its options give; None: they are learnt.
    notes           after `bind`: lines that a user should read.

    The engine calls `bind`, then `start(row)`; each round `begin_round`, `propose(rows)` and `observe(round)`; at
    the end `drop(row)`, for every row that was started, also if `start` or `propose` failed. It calls `restart(row)`
    when a row has lost its place in the cache and is run again. Row ids are unique in an engine.

    A drafter that draws tokens draws them with `row.random.draft(q)` and hands q over in `DraftTree.draft_probs`, with
    every token drawn; then acceptance takes the next numbers of the same stream. One that draws elsewhere derives a
    seed of its own from the row's."""

    name: str = ""
    lossless: str = "not stated"
    paper: str = "not stated"
    Config: ClassVar[type[Any] | None] = None
    needs: Needs = Needs()
    weight_bytes: int = 0
    wants: str = ""
    times_rounds: bool = False
    acceptance: Rule | None = None
    eos_token_ids: Sequence[int] = ()
    prefill_tokens: int = 0
    budget: Unlimited
    price_table: Table | None = None
    notes: Sequence[str] = ()

    def bind(self, target: Facts) -> None:
        """Called before the first row. Overrides call it, and raise MethodError for a target they cannot use.

        A drafter that reads the target's states or runs its layers (`needs`) is bound again, between rows, to a target
        with other weights, whose fingerprint is empty then; it keeps what it has learnt."""
        self.eos_token_ids = target.eos_token_ids

    @property
    def drafts(self) -> bool:
        """Whether it can propose anything: it has a `draft` or a `propose` of its own."""
        return type(self).draft is not Drafter.draft or type(self).propose is not Drafter.propose

    @property
    def choices(self) -> Sequence[Drafter]:
        """What rows may have as their drafter."""
        return (self,)

    def of(self, row: Request) -> Drafter:
        """The drafter of a row. Its `needs` and `acceptance` are the row's."""
        return self

    def start(self, row: Request) -> None:
        """A row joins; `row.tokens` is its prompt."""

    def begin_round(self, prefill_tokens: int, budget: Unlimited | None = None) -> None:
        """A round begins. Its forward will also run `prefill_tokens` prompt tokens; `budget` has its prices."""
        self.prefill_tokens, self.budget = prefill_tokens, budget or UNLIMITED

    def draft(self, row: Request) -> DraftTree:
        """A tree for one row that may have a draft, for methods that draft row by row. Others override `propose`."""
        return DraftTree.root(row.last_token)

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        """One tree for each row, rooted at `row.last_token`; nodes deeper than `row.max_draft` are cut off.

        `DraftTree.root(row.last_token)` proposes nothing: in `a+b` the next drafter is asked."""
        return [self._draft_or_blame(row) for row in rows]

    def observe(self, round: Round) -> None:
        """Called after a round: `row.tokens` ends with its new tokens. Rows that failed in the round are not in it."""

    def on_layer(self, layer: int, hidden: torch.Tensor, round: Plan) -> None:
        """Called during the forward, if `needs.callback_layer` is set, when `layer` layers are done.

        hidden  [N, H], the states of all nodes of the round; those of row i are `hidden[round.spans()[i]]`."""

    def restart(self, row: Request) -> None:
        """A row was preempted: its tokens so far will be run again, as if they were a prompt.

        A drafter that reads the forward's states gets all of them again, so it starts anew; others keep what they have.
        """
        if self.needs.whole_prompt:
            self.drop(row)
            self.start(row)

    def drop(self, row: Request) -> None:
        """A row has ended, failed or was aborted; forget it. A drafter may learn from it if `row.is_complete`."""

    def end_tokens(self, row: Request) -> frozenset[int]:
        """Tokens that end this row's answer: nothing after one can be accepted."""
        return frozenset(row.params.stop_token_ids).union(() if row.params.ignore_eos else self.eos_token_ids)

    def chain_after(self, row: Request, tokens: IntArray) -> DraftTree:
        """A chain of `tokens` int64 [n]."""
        return DraftTree.chain(row.last_token, tokens, source=self.name if len(tokens) else "")

    def tree_after(self, row: Request, tokens: IntArray, parent: IntArray) -> DraftTree:
        """A tree of `tokens` int64 [n], without what is below a token that ends the row's answer.

        parent  int64 [n]: 0 is the row's last token, 1 the first drafted one."""
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
    """Asks drafters for drafts, where nothing is known of prices: all of them for every row, and as much as they like.

    `paceline.engine.budget.Budget` knows what rounds cost and how far drafts stand, and asks for what pays. Drafters
    that ask others (`parts`) do so through `Drafter.budget`, so that each part has a price of its own. Whoever runs the
    loop calls `begin`, `ask`, `cut` and `observe` in a round, and `drop` when a row leaves."""

    now: Callable[[], float] = staticmethod(perf_counter)

    def begin(self, rows: Sequence[Request]) -> None:
        """A round of `rows` begins, which are decoding."""

    def ask(self, drafter: Drafter, rows: Sequence[Request]) -> list[DraftTree]:
        """What `drafter` proposes for each of `rows`; the root alone for rows for which it is not asked."""
        return stamp(drafter.propose(rows), drafter)

    def gain(self, drafter: Drafter, row: Request) -> float:
        """Tokens, beyond their price, that a draft of `drafter` is expected to bring; decided by earlier rounds."""
        return inf

    def value(self, tree: DraftTree, row: Request) -> float:
        """The same of a draft that is there."""
        return inf

    def cut(self, rows: Sequence[Request], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The trees to verify: `trees`, or less of those that are point masses."""
        return list(trees)

    def observe(
        self, rows: Sequence[Request], trees: Sequence[DraftTree], accepted: Sequence[Accepted], seconds: float | None
    ) -> None:
        """What was accepted of the trees of the rows that did not fail.

        seconds  of the forward and of acceptance; None: something else ran at the same time."""

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
    """Bind to a target with new weights what reads its states or runs its layers, of a drafter and its parts."""
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
    """What a drafter's parts need of a request, for a message when nothing was drafted; "": nothing."""
    parts: Sequence[Drafter] = getattr(drafter, "parts", (drafter,))
    return "; ".join(f"{part.name} needs {part.wants}" for part in parts if part.wants)


def rooted(tree: DraftTree, row: Request, drafter: Drafter) -> DraftTree:
    """`tree`; RowError unless its root is the row's last token."""
    if tree.tokens[0] != row.last_token:
        raise RowError(row.id) from ValueError(f"{drafter.name} proposed a tree whose root is not the row's last token")
    return tree
