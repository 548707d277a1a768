"""A drafter in a host that verifies chains and shows tokens: rows, drafts, and what became of them.

    history = History("sam", facts, most=16)
    row = history.start(prompt, room=500)
    [chain] = history.draft([row])                   # int64 [n]: what the host may verify
    history.advance([row], [accepted_tokens])        # what it kept, its own last token included
    history.drop(row)

The host accepts a drafted token as it would any guess: it draws from the model and keeps the draft while the two agree,
or keeps it with the model's probability. Both leave the model's distribution as it is, whatever was drafted. So drafts
may be cut to what pays: to the tokens that raise the expected tokens a second of the host's batch, by how drafts have
fared and what the host's rounds have taken (`draft/auto.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count

import numpy as np

from paceline.draft.auto import Auto
from paceline.draft.base import Drafter, stamp
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.engine.accept import Accepted
from paceline.engine.request import Request
from paceline.engine.round import Round, Segment
from paceline.engine.sampling import RowRandom, SamplingParams
from paceline.engine.tree import DraftTree, IntArray
from paceline.errors import MethodError, PacelineError
from paceline.target.base import Facts

MAX_TOKENS = 2**31 - 1


class HostRow:
    """A request of another engine, as drafters see rows (`paceline.engine.request.Request`).

    room  most new tokens it may have; most: tokens of a draft that the host takes."""

    slot = -1  # the host's own model holds its keys and values

    def __init__(self, id: int, prompt: Sequence[int] | IntArray, room: int, most: int = MAX_TOKENS):
        self.id, self.prompt_length, self.room, self.most = id, len(prompt), room, most
        self.params = SamplingParams(max_tokens=max(1, min(room, MAX_TOKENS)))
        self.is_complete = False
        self.draft: DraftTree | None = None
        self._tokens = np.empty(len(prompt) + 256, np.int64)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)
        self._random: RowRandom | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> IntArray:
        """Prompt and answer so far; a view that must not be written to."""
        return self._tokens[: self._length]

    @property
    def random(self) -> RowRandom:
        """Its randomness, made when a drafter asks for it; the same in every process that drafts for the row."""
        if self._random is None:
            self._random = RowRandom(self.id)
        return self._random

    @property
    def last_token(self) -> int:
        """The newest token."""
        return int(self._tokens[self._length - 1])

    @property
    def num_new(self) -> int:
        """Tokens of the answer so far."""
        return self._length - self.prompt_length

    @property
    def max_draft(self) -> int:
        """Deepest useful draft: the host adds a token after it."""
        return max(min(self.room - self.num_new - 1, self.most), 0)

    @property
    def expected_length(self) -> int:
        """Tokens to make room for at once."""
        return self._length + 256

    def extend(self, tokens: Sequence[int] | IntArray) -> None:
        """Take what the host has accepted."""
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self.tokens, np.empty(max(end, len(self._tokens)), np.int64)])
        self._tokens[self._length : end] = tokens
        self._length = end


class Chains(Drafter):
    """Drafts what `inner` does, and of a tree the chain that it trusts most. `inner` is bound already, or by this.

    vocab_size  a chain ends before a token that the model does not have; None: it has all."""

    def __init__(self, inner: Drafter, vocab_size: int | None = None):
        self.inner, self.name, self.vocab_size = inner, inner.name, vocab_size
        self.needs = inner.needs

    def bind(self, target: Facts) -> None:
        self.inner.bind(target)
        self.needs = self.inner.needs

    def start(self, row: Request) -> None:
        self.inner.start(row)

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        trees = stamp(self.inner.propose(rows), self.inner)
        return [self._chain(tree, row) for tree, row in zip(trees, rows, strict=True)]

    def observe(self, round: Round) -> None:
        self.inner.observe(round)

    def drop(self, row: Request) -> None:
        self.inner.drop(row)

    def _chain(self, tree: DraftTree, row: Request) -> DraftTree:
        chain = tree.trunk()[: row.max_draft]
        if self.vocab_size is not None:
            unknown = np.flatnonzero((chain < 0) | (chain >= self.vocab_size))
            chain = chain[: unknown[0]] if len(unknown) else chain
        if tree.is_chain and len(chain) == tree.num_drafted and tree.probe is None and tree.draft_probs is None:
            return tree
        return DraftTree.chain(int(tree.tokens[0]), chain, source=tree.source, owner=tree.owner, calls=tree.calls)


class History:
    """The drafter that `spec` names, bound to what the host tells of its model.

    most   tokens of a draft that the host takes.
    paced  cut drafts to what pays; else they are as long as the drafter makes them.
    Raises MethodError, one line, for a drafter that needs more than tokens: hidden states, logits, layers."""

    def __init__(self, spec: str, facts: Facts, most: int = MAX_TOKENS, paced: bool = True):
        _refuse(spec, facts)
        drafter = create(spec)
        drafter.bind(facts)
        self._begin(drafter, facts, most, paced)

    @classmethod
    def of(cls, drafter: Drafter, facts: Facts, most: int = MAX_TOKENS, paced: bool = False) -> History:
        """With a drafter that is bound already."""
        made = cls.__new__(cls)
        made._begin(drafter, facts, most, paced)
        return made

    def _begin(self, drafter: Drafter, facts: Facts, most: int, paced: bool) -> None:
        chains = Chains(drafter, facts.vocab_size)
        chooses = isinstance(drafter, Auto)
        self.drafter: Drafter = Auto.over(chains) if paced and not chooses else chains
        self.auto = drafter if chooses else self.drafter if paced else None
        self.most = most
        self._watches = self.auto is not None or type(drafter).observe is not Drafter.observe
        self._ids = count()

    def start(self, prompt: Sequence[int] | IntArray, room: int) -> HostRow:
        """A new request with at most `room` new tokens."""
        row = HostRow(next(self._ids), prompt, room, self.most)
        try:
            self.drafter.start(row)
        except BaseException:
            self.drop(row, complete=False)
            raise
        return row

    def draft(self, rows: Sequence[HostRow]) -> list[IntArray]:
        """What to verify after each row, best guess first and a chain; empty: decode plainly.

        They are the rows of one round, whose time counts until the next `advance`."""
        trees = self.drafter.propose(rows)
        for row, tree in zip(rows, trees, strict=True):
            row.draft = tree
        return [tree.tokens[1:] for tree in trees]

    def disturbed(self) -> None:
        """The round since the last `draft` ran prompts as well, or not all of its rows: its time says nothing."""
        if isinstance(self.auto, Auto):
            self.auto.disturbed()

    def advance(self, rows: Sequence[HostRow], tokens: Sequence[Sequence[int] | IntArray]) -> None:
        """Each row has gained its `tokens`, at least one, in one round, after its last draft or without one; tells the
        drafter what became of the drafts."""
        round = Round([], [], [])
        for row, gained in zip(rows, tokens, strict=True):
            tree = row.draft or DraftTree.root(row.last_token)
            row.draft = None
            row.extend(gained)
            if self._watches:
                round.rows.append(row)  # type: ignore[arg-type]
                round.trees.append(tree)
                round.segments.append(Segment.tree(0, tree))
                round.accepted.append(_accepted(tree, np.asarray(gained, np.int64)))
        if round.rows:
            self.drafter.observe(round)

    def drop(self, row: HostRow, complete: bool = True) -> None:
        """Forget `row`; drafters that learn from finished requests do so if it is `complete`."""
        row.is_complete = complete
        with suppress(KeyError):  # one that failed to start
            self.drafter.drop(row)


def create_paced(spec: str, vocab_size: int) -> Drafter:
    """The drafter that `spec` names; if it reads tokens alone, its drafts are cut to what pays. Not bound yet."""
    drafter = create(spec)
    if isinstance(drafter, Auto):
        return drafter
    try:
        _refuse(spec, Recording(None, (), vocab_size))
    except PacelineError:  # it needs more: a tokenizer, or the model
        return drafter
    return Auto.over(drafter)


def _refuse(spec: str, facts: Facts) -> None:
    """MethodError for a drafter that cannot do with tokens alone: it says so, or a short trial shows it."""
    drafter = create(spec)
    drafter.bind(facts)
    wants = [name for name, value in vars(drafter.needs).items() if value not in ((), 0, None)]
    try:
        if not wants:
            trial = History.of(drafter, facts)
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
    """How far `tokens` went along a chain."""
    drafted = tree.tokens[1:]
    most = min(len(drafted), len(tokens) - 1)
    unlike = np.flatnonzero(drafted[:most] != tokens[:most])
    kept = int(unlike[0]) if len(unlike) else most
    return Accepted(list(range(kept + 1)), tokens[: kept + 1].tolist())
