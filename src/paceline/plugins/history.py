"""Run a drafter in a host that verifies chains and shows only tokens.

    history = History("sam", facts, most=16)
    row = history.start(prompt, max_tokens=500)
    [chain] = history.draft([row])                   # int64 [n], for the host to verify
    history.advance([row], [new_tokens])             # the accepted ones, then the host's own token
    history.drop(row)

A host draws from its model and accepts the draft while the two agree, or accepts a drafted token with the model's
probability. Both keep the model's distribution, whatever was drafted. So drafts may be cut to what pays, by earlier
drafts and the durations of the host's rounds (`engine/budget.py`)."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from time import perf_counter

import numpy as np

from paceline.core.accept import Accepted
from paceline.core.request import Row
from paceline.core.round import Round
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.core.tree import DraftTree, IntArray
from paceline.draft.base import UNLIMITED, Allowance, Ask, Drafter
from paceline.draft.recording import Chains
from paceline.draft.registry import create
from paceline.engine.budget import Budget
from paceline.errors import MethodError
from paceline.formats.facts import Facts
from paceline.net.completion import in_common

MAX_TOKENS = 2**31 - 1


class HostRow(Row):
    """A request of another engine, which holds its keys and values.

    max_tokens  most new tokens.
    most        most tokens of a draft.
    ends        tokens that end its answer there; here it goes on until the host drops it."""

    def __init__(
        self, id: int, prompt: Sequence[int] | IntArray, max_tokens: int, most: int = MAX_TOKENS,
        ends: Sequence[int] = (),
    ):  # fmt: skip
        # The seed must be the same in every process that drafts for the request.
        params = SamplingParams(max_tokens=max(1, min(max_tokens, MAX_TOKENS)), seed=id)
        super().__init__(id, prompt, params, max_context=len(prompt) + MAX_TOKENS)
        self.most, self._host_ends = most, frozenset(ends)
        self.draft: DraftTree | None = None

    @property
    def ends(self) -> frozenset[int]:
        return self._host_ends

    @property
    def max_draft(self) -> int:
        """Deepest useful draft: the host adds a token after it."""
        return max(min(super().max_draft, self.most), 0)


class History:
    """A drafter, bound to the facts of the host's model.

    drafter  its spec; or a Drafter that is bound already, whose needs are not checked.
    most     most tokens of a draft.
    paced    draft as much as pays; else drafts are as long as the drafter makes them.

    Raises MethodError, one line, for a spec that needs more than tokens: hidden states, logits, layers."""

    def __init__(self, drafter: str | Drafter, facts: Facts, most: int = MAX_TOKENS, paced: bool = True):
        if isinstance(drafter, str):
            _refuse(drafter, facts)
            drafter = create(drafter)
            drafter.bind(facts)
        self.drafter = Chains(drafter, facts.vocab_size)
        self.budget = Budget(drafter.price_table, perf_counter) if paced else UNLIMITED
        self.most, self._ends = most, tuple(facts.eos_token_ids)
        self._allowance = Allowance()
        self._began: float | None = None
        self._ids = count()

    def start(self, prompt: Sequence[int] | IntArray, max_tokens: int) -> HostRow:
        """A new request with at most `max_tokens` new tokens."""
        row = HostRow(next(self._ids), prompt, max_tokens, self.most, self._ends)
        try:
            self.drafter.start(row)
        except BaseException:
            self.drop(row, complete=False)
            raise
        return row

    def draft(self, rows: Sequence[HostRow]) -> list[IntArray]:
        """The chain to verify after each row; empty: decode plainly. Times the host's round until `advance`."""
        allowance = self._allowance = self.budget.open(rows)
        self.drafter.begin_round(allowance)
        trees = allowance.cut(allowance.ask(self.drafter, [Ask(row, row.max_draft) for row in rows]))
        self._began = perf_counter()
        for row, tree in zip(rows, trees, strict=True):
            row.draft = tree
        return [tree.tokens[1:] for tree in trees]

    def disturbed(self) -> None:
        """Do not count the time of the round since the last `draft`: it also ran prompts, or not all of its rows."""
        self._began = None

    def advance(self, rows: Sequence[HostRow], tokens: Sequence[Sequence[int] | IntArray]) -> None:
        """Add the `tokens` that each row gained in one round, at least one, and show the drafter what was accepted."""
        seconds = None if self._began is None else perf_counter() - self._began
        round = Round([], [], [])
        for row, gained in zip(rows, tokens, strict=True):
            tree = row.draft or DraftTree.root(row.last_token)
            row.draft = None
            row.extend(np.asarray(gained, np.int64).tolist())
            round.rows.append(row)
            round.trees.append(tree)
            round.segments.append(Segment.tree(0, tree))
            round.accepted.append(_accepted(tree, np.asarray(gained, np.int64)))
        if round.rows:
            self._allowance.close(round.rows, round.trees, round.accepted, seconds)
            self.drafter.observe(round)

    def drop(self, row: HostRow, complete: bool = True) -> None:
        """Forget `row`; drafters that learn from finished requests do so if it is `complete`."""
        row.end("stop" if complete else "abort")
        self.budget.drop(row)
        with suppress(KeyError):  # The row may have failed to start.
            self.drafter.drop(row)


class OneAtATime:
    """The request of a host that answers one at a time and tells nothing of it but its text.

    limit  most tokens of the text, prompt included."""

    def __init__(self, history: History, limit: int):
        self.history, self.limit = history, limit
        self._row: HostRow | None = None

    def draft(self, text: IntArray) -> IntArray:
        """The chain to verify after `text`, int64, which goes on from the text before or is another request's."""
        row = self._row
        if row is not None and len(row) < len(text) and np.array_equal(row.tokens, text[: len(row)]):
            self.history.advance([row], [text[len(row) :]])
        else:
            self.close()
            row = self._row = self.history.start(text, self.limit - len(text))
        return self.history.draft([row])[0]

    def close(self) -> None:
        """End the request."""
        row, self._row = self._row, None
        if row is not None:
            self.history.drop(row)


def _refuse(spec: str, facts: Facts) -> None:
    """Raise MethodError if the drafter needs more than tokens: by `needs`, or if it fails a short trial."""
    drafter = create(spec)
    drafter.bind(facts)
    wants = [name for name, value in vars(drafter.needs).items() if value not in ((), 0, None)]
    try:
        if not wants:
            trial = History(drafter, facts, paced=False)
            row = trial.start(np.zeros(4, np.int64), 8)
            for _ in range(2):
                trial.draft([row])
                trial.advance([row], [[0]])
            trial.drop(row)
            return
    except MethodError:
        wants = ["what the model predicts"]
    raise MethodError(
        f"{spec} asks the target for {', '.join(wants)}, and a host shows tokens alone; "
        "drafters that copy from text need no more"
    )


def _accepted(tree: DraftTree, tokens: IntArray) -> Accepted:
    """The part of a chain that `tokens` follow."""
    accepted = in_common(tree.tokens[1:].tolist(), tokens[:-1].tolist())
    return Accepted(list(range(accepted + 1)), tokens[: accepted + 1].tolist())
