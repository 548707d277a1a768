"""auto: for each row the drafter that pays in this batch, and the part of its draft that pays; none where none does.

In every round each row's drafters are asked as long as asking pays, those with a model last (`Candidate.plan`). Every
drafted node gets a probability of being accepted (`acceptance.py`), and the nodes that raise the expected tokens a
second of the whole batch, by the learned times of rounds (`cost.py`), are verified. A share of the time, `explore`,
tries what does not seem to pay. How it chooses, and what it is after: docs/methods/auto.md.

It is lossless. Nothing here sees the target's logits of the round. A draft that was drawn (`DraftTree.draft_probs`) is
verified whole: its depth limit is set before it is drawn, and it is never exchanged afterwards. Drafts that are point
masses may be cut anywhere. Drafts with probes or states of their own stay whole too, because their drafter needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from paceline.draft.acceptance import Acceptance, Lengths, Worth
from paceline.draft.base import Drafter, DraftTree, Facts, Request, Round, View, stamp
from paceline.draft.cost import DraftTimes, Floats, Rate, RoundTimes, choose, read_table
from paceline.draft.fallback import Fallback
from paceline.draft.registry import create
from paceline.draft.spec import Options, cut, exchanged, option
from paceline.errors import MethodError
from paceline.target.base import Target

ORDER_EVERY = 32  # rounds between two updates of the order in which drafters are asked
HEAD_START = 4  # exploring may use the time of this many rounds at the beginning
PROBE = 4  # in a trial: nodes verified beyond those that pay, or the depth of a model's drafts
TRIALS = 8  # drafts that a drafter with a model must have made before it is asked for whole batches
LONGEST = 16  # deepest draft that a drafter with a model is asked for
_TIMES: WeakKeyDictionary[Target, RoundTimes] = WeakKeyDictionary()
"""What rounds of a target take on this machine, learned by all engines of it in this process."""


@dataclass(frozen=True)
class AutoConfig(Options):
    checkpoint: str = option("sam|suffix", "drafters to choose from, joined by |; write ; for , in their options")
    table: str | None = option(None, "times from this file of `paceline tune`; none: measured as rounds run")
    explore: float = option(0.01, "share of the time for trying what does not seem to pay", least=0, most=0.5)
    seed: int = option(0, "of the trials; with drafters that draw, answers may still depend on the batch", least=0)


class Candidate:
    """One of the drafters that `auto` chooses from.

    spec     as the user named it.
    worth    tokens that asking it brings a row; more: in addition to another's draft. drafts: number of calls."""

    def __init__(self, spec: str, drafter: Drafter):
        self.spec, self.drafter = spec, drafter
        self.acceptance, self.lengths, self.times = Acceptance(), Lengths(), DraftTimes()
        self.worth, self.more = Worth(), Worth()
        self.drafts = 0
        self._call: tuple[int, int, float] | None = None

    @property
    def is_late(self) -> bool:
        """Whether it runs a model, and is asked after the others. Known after the drafter was bound."""
        return self.drafter.weight_bytes > 0 or self.drafter.needs.resume_layer is not None

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        """Ask the drafter and time it."""
        began = perf_counter()
        trees = stamp(self.drafter.propose(rows), self.drafter)
        steps = max(max(tree.calls for tree in trees), 1)
        self._call = len(rows), steps, perf_counter() - began
        self.drafts += 1
        return trees

    def observe(self, round: Round, learns: bool) -> None:
        """Show the drafter the round; the time of that is added to the call's."""
        began = perf_counter()
        self.drafter.observe(round)
        if self._call is not None:
            rows, steps, seconds = self._call
            if learns:
                self.times.note(rows, steps, seconds + perf_counter() - began)
            self._call = None

    def seconds(self, is_measured: bool = False) -> float:
        """Seconds of this round's call, measured or by the learned times; 0 without a call."""
        if self._call is None:
            return 0.0
        return self._call[2] if is_measured else self.times.seconds(*self._call[:2])

    def drop(self, row: int) -> None:
        """Forget a row."""
        for learned in (self.acceptance, self.worth, self.more):
            learned.drop(row)

    def plan(self, rows: Sequence[Request], gains: Sequence[float], rate: float, price: float) -> tuple[list[int], int]:
        """The rows (by index) to run its model for, and the depth. gains: tokens that others' drafts bring each row.

        Depends on nothing that is drawn in this round, so that drawn drafts stay unbiased."""
        most = [min(row.max_draft, LONGEST) for row in rows]
        depth = max(most)
        if depth < 1 or self.drafts < TRIALS:
            return [], 0
        net = np.zeros((len(rows), depth))
        for i, (row, deepest) in enumerate(zip(rows, most, strict=True)):
            survival = self.acceptance.by_depth(row.id, deepest)
            net[i, :deepest] = np.maximum(survival - price, 0).cumsum()
            net[i, deepest:] = net[i, deepest - 1] if deepest else 0.0
        better = np.maximum(net - np.array(gains)[:, None], 0)
        asked = np.maximum((better > 0).sum(0), 1)
        steps = self.lengths.steps(depth, int(asked.max()))
        total = better.sum(0) - rate * steps * (self.times.call + self.times.row * asked)
        best = int(total.argmax())
        if total[best] <= 0:
            return [], 0
        return [i for i in range(len(rows)) if better[i, best] > 0], best + 1


class _Draft(NamedTuple):
    """A row's draft in this round.

    values    the probability of every drafted node. gain: expected tokens less the price of the nodes.
    is_fixed  it must be verified whole. limit: the largest depth it could have had."""

    by: Candidate
    tree: DraftTree
    values: Floats
    gain: float
    is_fixed: bool
    limit: int


class Auto(Fallback):
    """Chooses among drafters by row and round, and cuts drafts to what pays at this batch's size."""

    name = "auto"
    lossless = "yes"
    paper = "Liu et al. 2024, SmartSpec, arXiv 2406.14066"
    Config = AutoConfig

    def __init__(self, config: AutoConfig = AutoConfig(), candidates: Sequence[Candidate] = ()):
        self.config = config
        self.candidates = list(candidates) or [Candidate(spec, create(spec)) for spec in _specs(config.checkpoint)]
        super().__init__([candidate.drafter for candidate in self.candidates])
        self.name = "auto"
        self.times = RoundTimes()
        self._order = list(self.candidates)
        self._random = Random(self.config.seed)
        self._rates: dict[int, Rate] = {}
        self._drafts: dict[int, _Draft] = {}
        self._price = 0.0
        self._credit = 0.0
        self._credit_began = False
        self._rounds = 0
        self._shape: tuple[int, int, int, int] | None = None
        self._drafted_at = 0.0

    @classmethod
    def over(cls, drafter: Drafter) -> Auto:
        """`drafter` alone, with its drafts cut to what pays."""
        return cls(candidates=[Candidate(drafter.name, drafter)])

    def bind(self, target: Facts) -> None:
        """Bind every part and read the table; MethodError as theirs, and for a table that does not fit."""
        super().bind(target)
        self.times_rounds = self.config.table is None
        for candidate in self.candidates:
            if self.config.explore == 0:  # without trials the default probabilities must do
                candidate.drafts = TRIALS
        if self.config.table is None:
            share = getattr(target, "expert_share", 0.0)  # of a model in another engine it is not known
            if not self.times.known or share != self.times.expert_share:
                new = RoundTimes(expert_share=share)
                self.times = _TIMES.setdefault(target, new) if isinstance(target, Target) else new
            return
        self.times, table = read_table(self.config.table, target.weights_fingerprint)
        for candidate in self.candidates:
            known = self.times.drafting.get(candidate.spec)
            if known is None:
                lacks = f"has no times of {candidate.spec}; it has {', '.join(self.times.drafting)}"
                mend = f"Run `paceline tune` with --draft '{candidate.spec}'."
                raise MethodError(f"the table {self.config.table} {lacks}. {mend}")
            candidate.times = DraftTimes(known.call, known.row)
            candidate.acceptance.seed(table.get("acceptance", {}).get(candidate.spec, []))

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        rate = self._rate(len(rows))
        self._drafts = {}
        on_trial, row = self._trial(rows)
        for candidate in sorted(self._order, key=lambda candidate: candidate.is_late):
            ask = self._ask_late if candidate.is_late else self._ask
            ask(candidate, rows, rate, row if candidate is on_trial else None)
        trees = self._cut(rows, rate) if self._drafts else [DraftTree.root(row.last_token) for row in rows]
        nodes, widest = sum(map(len, trees)), max(map(len, trees))
        self._shape = len(rows), nodes, widest, self.prefill_tokens
        self._drafted_at = perf_counter()
        return trees

    def _free(self, rows: Sequence[Request]) -> list[Request]:
        """The rows without a draft that must be verified whole: nobody else is asked for the others in this round."""
        return [row for row in rows if row.id not in self._drafts or not self._drafts[row.id].is_fixed]

    def _ask(self, candidate: Candidate, rows: Sequence[Request], rate: float, tried: int | None) -> None:
        """Ask for the rows for which that pays, and for row `tried`; the better draft of each row stays."""
        price = rate * (candidate.times.call / len(rows) + candidate.times.row)
        worth, more, drafts = candidate.worth, candidate.more, self._drafts
        asked = []
        for row in self._free(rows):
            if (more.mean if row.id in drafts else worth.of(row.id)) >= price:
                asked.append(row)
            elif row.id == tried:
                asked.append(row)
                self._credit -= candidate.times.seconds(1)
        if not asked:
            return
        for row, tree in zip(asked, candidate.propose(asked), strict=True):
            other = drafts.get(row.id)
            draft = self._draft_of(candidate, tree, row, row.max_draft)
            gain = 0.0 if draft is None else draft.gain
            if other is None:
                worth.note(row.id, gain)
            else:
                more.note(row.id, max(gain - other.gain, 0.0))
            if draft is not None and (other is None or draft.is_fixed or gain > other.gain):
                drafts[row.id] = draft

    def _ask_late(self, candidate: Candidate, rows: Sequence[Request], rate: float, tried: int | None) -> None:
        """Run its model for the rows and to the depth that pay, else for row `tried`. Its draft replaces the row's."""
        drafts, free = self._drafts, self._free(rows)
        if not free:
            return
        gains = [drafts[row.id].gain if row.id in drafts else 0.0 for row in free]
        chosen, depth = candidate.plan(free, gains, rate, self._price)
        asked = [free[i] for i in chosen]
        is_trial = not asked
        if is_trial:
            asked, depth = [row for row in free if row.id == tried], PROBE
        if not asked:
            return
        limited = [View(row, max_draft=min(row.max_draft, depth)) for row in asked]
        for row, tree in zip(asked, candidate.propose(limited), strict=True):
            limit = min(depth, row.max_draft)
            candidate.lengths.note(tree.max_depth, limit)
            draft = self._draft_of(candidate, tree, row, limit)
            if draft is not None:
                drafts[row.id] = draft
        if is_trial:
            self._credit -= candidate.seconds(is_measured=not self.times.is_fixed)

    def _draft_of(self, by: Candidate, tree: DraftTree, row: Request, limit: int) -> _Draft | None:
        """A tree as a draft; None for one without drafted nodes."""
        if len(tree) < 2 or limit < 1:
            return None
        tree = tree.clipped(limit)
        is_fixed = tree.draft_probs is not None or tree.probe is not None or tree.hidden is not None
        values = by.acceptance.values(tree, row.id)
        gain = float(np.maximum(values - self._price, 0).sum())
        return _Draft(by, tree, values, gain, is_fixed, limit)

    def _cut(self, rows: Sequence[Request], rate: float) -> list[DraftTree]:
        """The trees to verify: the nodes of every draft that pay, and now and then a few more on trial."""
        drafts = self._drafts
        whole = [draft.tree for draft in drafts.values() if draft.is_fixed]
        free = [draft.values for draft in drafts.values() if not draft.is_fixed]
        others = sum(map(len, whole)) - len(whole) + self.prefill_tokens
        if free:
            widest = max(map(len, whole), default=1)
            threshold, self._price = choose(free, len(rows), self.times, rate, others, widest)
        else:
            threshold = 0.0
            self._price = rate * (self.times.slope(len(rows), len(rows) + others) + self.times.pad)
        trees: list[DraftTree] = []
        spare: list[int] = []
        for i, row in enumerate(rows):
            draft = drafts.get(row.id)
            if draft is None:
                trees.append(DraftTree.root(row.last_token))
            elif draft.is_fixed:
                trees.append(draft.tree)
            else:
                count = int((draft.values >= threshold).sum())
                trees.append(_first(draft, count))
                if count < len(draft.values):
                    spare.append(i)
        if spare and self._pays_for(len(rows), PROBE):
            i = spare[self._random.randrange(len(spare))]
            draft = drafts[rows[i].id]
            trees[i] = _first(draft, min(len(trees[i]) - 1 + PROBE, len(draft.values)))
        return trees

    def _trial(self, rows: Sequence[Request]) -> tuple[Candidate, int] | tuple[None, None]:
        """A drafter to ask on trial, even if that does not seem to pay, and for which row; None without time for it."""
        if self.config.explore == 0 or self._credit <= 0:
            return None, None
        candidate = self._order[self._random.randrange(len(self._order))]
        if self._credit <= candidate.times.seconds(1, PROBE if candidate.is_late else 1):
            return None, None
        # A drafter with a model reads a row's whole text first, so its trials stay with the first row.
        row = rows[0] if candidate.is_late else rows[self._random.randrange(len(rows))]
        return candidate, row.id

    def _pays_for(self, rows: int, nodes: int) -> bool:
        """Whether there is time left to verify `nodes` more on trial; takes it from the credit."""
        seconds = nodes * (self.times.slope(rows, rows) + self.times.pad * rows / 2) + self.times.uneven * rows
        if self.config.explore == 0 or self._credit <= seconds:
            return False
        self._credit -= seconds
        return True

    def observe(self, round: Round) -> None:
        seconds = perf_counter() - self._drafted_at
        learns = not self.times.is_fixed
        drafting = 0.0
        for candidate in self.candidates:
            drafting += candidate.seconds()
            candidate.observe(round, learns)
        tokens = decoding = 0
        for i, (row, accepted) in enumerate(zip(round.rows, round.accepted, strict=True)):
            if round.is_prompt(i):
                continue
            tokens, decoding = tokens + len(accepted.tokens), decoding + 1
            draft = self._drafts.pop(row.id, None)
            if draft is not None:
                limit = draft.limit if draft.by.is_late else 0
                draft.by.acceptance.note(row.id, round.trees[i], accepted.path, draft.tree.max_depth, limit)
        if self._shape is not None:
            if learns and round.is_whole and self._shape[0] == decoding:
                self.times.note(*self._shape, seconds)
            self._book(*self._shape[:3], tokens, drafting)
        self._shape = None

    def disturbed(self) -> None:
        """Do not learn from the time since the last `propose`: something else ran at the same time."""
        self._shape = None

    def _book(self, rows: int, nodes: int, widest: int, tokens: int, drafting: float) -> None:
        """Count an undisturbed round: tokens a second, the credit for trials, and the order of the drafters."""
        self._rounds += 1
        if not self.times.known:
            return
        # Without prompt tokens: they cost the same whatever is drafted.
        seconds = self.times.seconds(rows, nodes, widest) + drafting
        if rows not in self._rates:
            self._rates[rows] = Rate(8.0 * rows, 8 * self.times.seconds(rows, rows, 1))
        self._rates[rows].note(tokens, seconds)
        if not self._credit_began:
            self._credit, self._credit_began = HEAD_START * seconds, True
        self._credit = min(self._credit + self.config.explore * seconds, HEAD_START * seconds)
        if self._rounds % ORDER_EVERY == 0:
            self._order = sorted(self.candidates, key=lambda candidate: -candidate.worth.mean)

    def _rate(self, rows: int) -> float:
        """Tokens a second that a batch of this size makes; 0 while nothing is known."""
        if not self.times.known:
            return 0.0
        rate = self._rates.get(rows)
        return rate.value if rate is not None else rows / self.times.seconds(rows, rows, 1)

    def drop(self, row: Request) -> None:
        self._drafts.pop(row.id, None)
        for candidate in self.candidates:
            candidate.drop(row.id)
        super().drop(row)


def _specs(listed: str) -> list[str]:
    """The drafters that the checkpoint of `auto` lists."""
    specs = [exchanged(spec.strip(), ";", ",") for spec in cut(listed, r"\|")]
    if not all(specs):
        raise MethodError(f"auto:{listed} names nothing between two |; write auto:sam|suffix.")
    if len(set(specs)) < len(specs):
        raise MethodError(f"auto:{listed} names a drafter twice.")
    if any(spec.partition(":")[0].partition(",")[0] == "auto" for spec in specs):
        raise MethodError(f"auto:{listed} names auto itself; list the drafters it may choose from.")
    return specs


def _first(draft: _Draft, count: int) -> DraftTree:
    """The `count` likeliest nodes of a draft; they are a tree, because no node is likelier than its parent."""
    tree = draft.tree
    if count == len(draft.values):
        return tree
    likeliest = np.argsort(-draft.values, kind="stable")[:count]
    return tree.keeping(np.append(0, np.sort(likeliest) + 1))
