"""The budget decides how many tokens each drafter may draft for each row, so that drafting never costs time.

A drafted token is worth the probability that it is accepted. Its price is the number of tokens that decoding, at its
present rate, makes in the time that the drafted token takes. Decoding is fastest if exactly the tokens that are worth
their price are drafted (Dinkelbach 1967). The times of rounds (`Prices`) and the acceptance of each drafter
(`Survival`) are learnt as rounds run.

    before drafting  a drafter is asked for the rows for which that pays. If it runs a model step by step, or its drafts
                     must stay whole, it is also told how deep a draft pays (`Ask.most`).
    after drafting   the drafts of all rows are cut together to the tokens that pay.

What does not pay is tried again, at growing intervals that bound the cost: a drafter is asked, a few tokens are
verified, or a round without drafts is timed. With `budget=False`, drafts are as long as their methods make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from paceline.core.request import Request
from paceline.core.round import Accepted
from paceline.core.tree import DraftTree, Floats
from paceline.draft.base import Allowance, Ask, Drafter, Unlimited, stamp
from paceline.draft.cost import INSTANT, DraftTimes, Prices, Table
from paceline.draft.survival import Survival

PROBE = 4
"""Largest number of tokens that a trial drafts or verifies."""
UNKNOWN, MOST = 4, 4096
"""Largest number of tokens drafted for all rows together: while no price is known, and ever."""
SHARE = 0.005
"""Share of the time that each kind of trial may take."""
WAIT, LONGEST_WAIT = 4, 4096
"""Rounds before the first trial, and the largest number of rounds between two trials."""


class Trials:
    """Decides when something that does not pay is tried again. Intervals grow until trials take SHARE of the time.

    first  rounds before the first trial."""

    def __init__(self, first: int = WAIT) -> None:
        self._wait = self._next = first

    def reset(self) -> None:
        """Begin with short intervals again, because it pays now."""
        self._wait = WAIT

    def put_off(self, round: int) -> None:
        """Begin the interval anew, because it happened without a trial."""
        self._next = round + self._wait

    def due(self, round: int, share: float) -> bool:
        """Whether a trial, which takes `share` of a round, is due. If so, the next interval is longer."""
        if round < self._next:
            return False
        self._wait = int(min(4 * self._wait, max(share / SHARE, WAIT), LONGEST_WAIT))
        self._next = round + self._wait
        return True


class Drafts:
    """The measurements of a drafter.

    asks   decides when it is asked although that does not pay. reads: the same in a row that it has not read yet.
    checks  decides when a few of its tokens are verified although that does not pay.
    worth  fading mean, over all rows, of the tokens that asking the drafter gained, less the price of verifying them.
    steps  whether the drafter is told a depth, because it runs a model step by step or its drafts must stay whole.
    width  mean number of nodes at each depth of its drafts.
    begun  ids of the rows for which it was asked. The first call for a row may read its prompt.
    read   seconds a token of the first call for a row."""

    PACE, STRENGTH = 0.03, 3.0
    """How fast the mean over all rows moves, and its weight in a row's own mean."""

    def __init__(self, times: DraftTimes | None, shares: Sequence[float]) -> None:
        self.is_fixed = times is not None
        self.times, self.survival = times or DraftTimes(), Survival(shares)
        self.asks, self.reads, self.checks = Trials(), Trials(), Trials()
        self.worth, self.steps, self.width = 1.0, False, 1.0
        self.begun: set[int] = set()
        self.read = 0.0
        self._count = 2
        self._rows: dict[int, tuple[float, float]] = {}

    def worth_of(self, row: int) -> float:
        """Expected worth of asking the drafter for this row: the row's own mean, shrunk towards the mean of all
        rows."""
        total, count = self._rows.get(row, (0.0, 0.0))
        return (total + self.STRENGTH * self.worth) / (count + self.STRENGTH)

    def note_worth(self, row: int, value: float) -> None:
        """Record the worth of having asked the drafter for this row."""
        self._count += 1
        self.worth += max(1 / self._count, self.PACE) * (value - self.worth)
        total, count = self._rows.get(row, (0.0, 0.0))
        self._rows[row] = 0.8 * total + value, 0.8 * count + 1

    def reading(self, asks: Sequence[Ask]) -> float:
        """Expected seconds to read the rows for which it was not asked before."""
        return self.read * sum(len(row) for row, _ in asks if row.id not in self.begun)

    def note_read(self, tokens: int, seconds: float) -> None:
        """Record the first call for rows of so many tokens."""
        self.read += (seconds / tokens - self.read) / (2 if self.read else 1)

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)
        self.begun.discard(row)
        self.survival.drop(row)


class Asked(NamedTuple):
    """A call of a drafter for a row.

    limit  largest depth that was allowed. length: depth of the draft."""

    by: Drafts
    limit: int
    length: int


class Budget(Unlimited):
    """The budget of an engine: its prices, and what is known of each drafter.

    table         measured prices; None: they are learnt. now: a clock, in seconds.
    plain         decides when a round without drafts is timed.
    rounds        number of rounds so far.
    lead          how many more rounds had drafts than had none. Before prices are known, plain rounds catch up.
    tokens, time  tokens a row gained in the last rounds, and their time, in rounds of plain decoding; both fade."""

    def __init__(self, table: Table | None = None, now: Callable[[], float] = perf_counter) -> None:
        self.prices = table.prices if table is not None else Prices()
        self.table, self.now = table, now
        # Weak references, because combinators may drop drafters, which may hold much text.
        self.drafts: WeakKeyDictionary[Drafter, Drafts] = WeakKeyDictionary()
        self.plain, self.rounds, self.lead = Trials(), 0, 0
        self.tokens = self.time = 8.0

    def open(self, rows: Sequence[Request]) -> PricedRound:
        self.rounds += 1
        return PricedRound(self, rows)

    def drop(self, row: Request) -> None:
        for known in self.drafts.values():
            known.drop(row.id)

    def known(self, drafter: Drafter) -> Drafts:
        """Return the measurements of a drafter."""
        if drafter not in self.drafts:
            self.drafts[drafter] = Drafts(*(self.table.of(drafter) if self.table is not None else (None, ())))
        return self.drafts[drafter]


class PricedRound(Allowance):
    """Decides what pays in a round of `rows`, which are decoding. Prices are in tokens.

    rate  tokens a second. node: price of a drafted node. any: price of having any drafted node.
    room  largest number of drafted nodes of all rows; prices beyond it are not known."""

    def __init__(self, budget: Budget, rows: Sequence[Request]) -> None:
        self.budget, self.prices, self.rows = budget, budget.prices, rows
        self._count, self._context = max(len(rows), 1), sum(map(len, rows))
        self._asked: dict[int, list[Asked]] = {}
        self._drafting = 0.0
        self.rate = self.node = self.any = 0.0
        self.room = UNKNOWN
        gain = budget.tokens / budget.time
        # If drafts seem to gain nothing, timing a plain round seems free, but the estimate may be wrong: hence 0.2.
        self._is_plain = not self.prices.is_fixed and budget.plain.due(budget.rounds, max(gain - 1, 0.2))
        if not self.prices.known:
            self._is_plain = budget.lead > 0
        if self.prices.known:
            terms = self.prices.terms
            self.rate = self._count * max(gain, 1.0) / self._seconds(0)
            self.node, self.any = self.rate * terms["node"], self.rate * terms["draft"]
            self.room = MOST if self.prices.is_fixed else max(2 * self.prices.largest, UNKNOWN)

    # Before drafting ------------------------------------------------------------------------------------------

    def ask(self, drafter: Drafter, asks: Sequence[Ask]) -> list[DraftTree]:
        if drafter.parts:
            return super().ask(drafter, asks)  # The drafter asks its parts.
        known, budget = self.budget.known(drafter), self.budget
        asked = [Ask(row, n) for (row, _), n in zip(asks, self._limits(known, asks), strict=True) if n > 0]
        if not asked:
            return [DraftTree.root(row.last_token) for row, _ in asks]
        began = budget.now()
        trees = stamp(drafter.propose(asked), drafter)
        seconds, calls = budget.now() - began, max(tree.calls for tree in trees)
        if known.is_fixed:
            seconds = known.times.seconds(len(asked), max(calls, 1))
        elif known.begun.issuperset(row.id for row, _ in asked):
            known.times.note(len(asked), max(calls, 1), seconds)
        elif known.begun.isdisjoint(row.id for row, _ in asked):
            known.note_read(sum(len(row) for row, _ in asked), seconds)
        self._drafting += seconds
        for (row, most), tree in zip(asked, trees, strict=True):
            known.begun.add(row.id)
            known.steps |= calls > 0 or not tree.may_be_cut
            budget.drafts.setdefault(tree.owner, known)  # The owner may be a part.
            self._asked.setdefault(row.id, []).append(Asked(known, most, tree.max_depth))
            if tree.num_drafted:
                known.width += 0.1 * (tree.num_drafted / tree.max_depth - known.width)
        made = dict(zip((row.id for row, _ in asked), trees, strict=True))
        return [made.get(row.id) or DraftTree.root(row.last_token) for row, _ in asks]

    def gain(self, drafter: Drafter, ask: Ask) -> float:
        known = self.budget.known(drafter)
        if not self.prices.known:
            return 0.0
        return self._depth(known, ask, self._count)[1] if known.steps else known.worth_of(ask.row.id)

    def _limits(self, known: Drafts, asks: Sequence[Ask]) -> list[int]:
        """The largest depth of a draft for each row; 0: the drafter is not asked."""
        most = [max(ask.most, 0) for ask in asks]
        if self._is_plain:
            return [0] * len(asks)
        if not self.prices.known:
            return [min(limit, max(UNKNOWN // self._count, 1)) for limit in most]
        price, call = self._seconds(0), known.times.seconds(len(asks))
        if known.steps:
            chosen = [self._depth(known, ask, len(asks)) for ask in asks]
            limits = [depth for depth, _ in chosen]
            pays = sum(gain for _, gain in chosen) > self.any and any(limits)
            trial = [min(most[0], PROBE)] + [0] * (len(asks) - 1)
            share, unread = PROBE * call / price, known.reading(asks[:1]) / price
        else:
            cost = self.rate * call / len(asks)
            worth = [known.worth_of(row.id) for row, _ in asks]
            limits = [limit if brings >= cost else 0 for brings, limit in zip(worth, most, strict=True)]
            pays, trial, share, unread = any(limits), most, call / price, known.reading(asks) / price
        if pays:
            known.asks.reset()
            known.reads.reset()
            return limits
        trials, share = (known.reads, share + unread) if unread else (known.asks, share)
        return trial if trials.due(self.budget.rounds, share) else [0] * len(asks)

    def _depth(self, known: Drafts, ask: Ask, rows: int) -> tuple[int, float]:
        """The depth that pays most for a row, and the tokens that it is expected to gain, less their price. rows: how
        many rows draft together."""
        if ask.most < 1:
            return 0, 0.0
        stands, drafted = known.survival.asked(ask.row.id, min(ask.most, max(self.room // rows, 1)))
        step = self.node * known.width + self.rate * known.times.seconds(rows) / rows
        gains = (stands - step * drafted).cumsum()
        best = int(gains.argmax())
        return (best + 1, float(gains[best])) if gains[best] > 0 else (0, 0.0)

    # After drafting -------------------------------------------------------------------------------------------

    def value(self, tree: DraftTree, row: Request) -> float:
        return float(np.maximum(self._stands(tree, row) - self.node, 0.0).sum())

    def _paid(self, known: Drafts, stands: Floats, price: float, pays: bool = True) -> int:
        """How many of a draft's nodes to verify: those that pay, and in trials a few more.

        stands  acceptance of each node. pays: whether drafting pays in this round at all."""
        count = int((stands > price).sum()) if pays else 0
        if count == len(stands):
            known.checks.reset()
            return count
        share = (PROBE * self.prices.terms["node"] + self.prices.terms["draft"] * (not pays)) / self._seconds(0)
        return count + (1 + self.budget.rounds % PROBE if known.checks.due(self.budget.rounds, share) else 0)

    def _stands(self, tree: DraftTree, row: Request) -> Floats:
        """P(node is accepted) for each drafted node, float64 [len(tree) - 1]."""
        return self.budget.known(tree.owner).survival.of(tree, row.id)

    def cut(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Cut trees to the nodes that pay, and in trials a few more. Trees that must stay whole are not cut."""
        made, known = list(trees), self.budget.known
        open_ = [i for i, tree in enumerate(trees) if tree.num_drafted and tree.may_be_cut]
        stands, price = {i: self._stands(trees[i], self.rows[i]) for i in open_}, self.node
        if not self.prices.known:
            for i, of in stands.items():
                made[i] = _first(trees[i], of, max(UNKNOWN // self._count, 1))
            return made
        if sum(len(stands[i]) for i in open_) > self.room:  # Prices beyond `room` are not known.
            every = np.concatenate([stands[i] for i in open_])
            price = max(price, float(np.partition(every, -self.room)[-self.room]))
        paid = {i: np.maximum(of - price, 0.0) for i, of in stands.items()}
        gain, is_whole = float(sum(paid[i].sum() for i in open_)), any(not tree.may_be_cut for tree in trees)
        pays = is_whole or gain > self.any
        left = 1.0 if is_whole else max(1 - self.any / gain, 0.0) if gain > 0 else 0.0
        for i in open_:
            made[i] = _first(trees[i], stands[i], self._paid(known(trees[i].owner), stands[i], price, pays))
        for i, (row, tree) in enumerate(zip(self.rows, trees, strict=True)):
            for by, *_ in self._asked.get(row.id, ()):
                worth = paid[i] if i in open_ and by is known(tree.owner) else ()
                by.note_worth(row.id, left * float(sum(worth)))
        return made

    # After the round ------------------------------------------------------------------------------------------

    def close(
        self, rows: Sequence[Request], trees: Sequence[DraftTree], accepted: Sequence[Accepted], seconds: float | None
    ) -> None:
        budget = self.budget
        for row, tree, done in zip(rows, trees, accepted, strict=True):
            for by, limit, length in self._asked.get(row.id, ()):
                is_own = tree.num_drafted > 0 and by is budget.drafts.get(tree.owner)
                if is_own:
                    by.survival.note(row.id, tree, done.path, length)
                verified = (limit if length <= tree.max_depth else tree.max_depth) if is_own else limit * (length == 0)
                if by.steps:
                    by.survival.note_asked(length, limit, (len(done.path) - 1) * is_own, verified)
        nodes = sum(tree.num_drafted for tree in trees)
        budget.lead += 1 if nodes else -1
        if not nodes:
            budget.plain.put_off(budget.rounds)
        if seconds is None or len(rows) != self._count:
            return
        if self.prices.is_fixed:
            seconds = self._seconds(nodes)
        self.prices.note(self._count, nodes, self._context, seconds)
        if self.prices.known:
            seconds = min(seconds, Prices.SPIKE * self._seconds(nodes))
            budget.tokens += fmean(len(done.tokens) for done in accepted) - budget.tokens / 64
            budget.time += (seconds + self._drafting) / self._seconds(0) - budget.time / 64

    def _seconds(self, nodes: int) -> float:
        return max(self.prices.seconds(self._count, nodes, self._context), INSTANT)


def _first(tree: DraftTree, stands: Floats, count: int) -> DraftTree:
    """Cut a tree to its `count` likeliest drafted nodes. No node is likelier than its parent."""
    if count >= len(stands):
        return tree
    return tree.keeping(np.append(0, np.sort(np.argsort(-stands, kind="stable")[:count]) + 1))
