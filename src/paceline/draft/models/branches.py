"""Drafting ahead: while a window is verified, the next window is drafted for each likely outcome.

The window y_1..y_g has the outcome (a, v) if the target accepts a of its tokens and then adds v. Each of the likeliest
outcomes gets a branch: the next window in that case. In each step a single forward extends all branches, which form a
tree over the draft model's cache:

    prefix | root  y_1 ... y_g | v of each branch | next token of each branch | ...

    ahead.windows(asks)        the branch of each row's outcome, or a window drafted afresh
    ahead.look_ahead()         branches for the windows just returned

A branch has the same tokens as a window drafted after the outcome: at a temperature the noise belongs to the place in
the text, whenever the window was drafted.

Bhendawade et al. 2025, Mirror Speculative Decoding (arXiv 2510.13161), sections 3.2 and 3.3. From Kumar et al. 2026,
SSD (arXiv 2603.03251): candidates of the draft itself, and more of them where verification is likelier to end."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile, zip_longest
from typing import NamedTuple

import numpy as np
import torch

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.tree import IntArray
from paceline.draft.base import Ask
from paceline.draft.likeliest import top_with_logprobs
from paceline.draft.models.draft_model import Draft, TextModel
from paceline.draft.models.model_drafter import ModelDrafter
from paceline.draft.models.proposers import Chain
from paceline.draft.survival import Survival

Top = Sequence[tuple[int, float]]
"""Candidates for the next token, best first: (token, probability)."""
Candidates = Sequence[Top]
"""Candidates after the root and after each token of a window."""
SPREAD = 4
"""A position gets at most this many times the mean number of branches."""


def top_of(logits: torch.Tensor, count: int, columns: torch.Tensor | None) -> list[Top]:
    """The best `count` tokens of each row of logits [R, K]. columns: as of `top_with_logprobs`."""
    tokens, logs = top_with_logprobs(logits, count, columns)
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), logs.exp().tolist(), strict=True)]


class Next(NamedTuple):
    """A request for a row's next window.

    new  the row's tokens since the last request."""

    id: int
    new: Sequence[int]


@dataclass
class Window:
    """A row's draft.

    hit    whether it was drafted ahead; None if it could not be, like a row's first window.
    calls  number of forwards that drafted it after it was asked for."""

    id: int
    tokens: list[int]
    hit: bool | None = None
    calls: int = 0


@dataclass
class Branch:
    """The next window for one outcome (a, v).

    draft  the root, y_1..y_a, v, and then the window. before: number of tokens before the window.
    nodes  numbers in the row's tree of v and of the window's tokens that were run.
    tops   candidates after each of these nodes."""

    draft: Draft
    before: int
    nodes: list[int]
    tops: list[Top] = field(default_factory=list)


@dataclass
class _State:
    """A row on the draft's side.

    main    the tree that the model runs: unread committed tokens, the window, branches. None before the first window.
    window  the tokens that are being verified.
    tops    candidates after the root and after each token of the window that was run.
    table   branches by outcome (a, v)."""

    row: Row
    main: Draft | None = None
    window: list[int] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    table: dict[tuple[int, int], Branch] = field(default_factory=dict)


class Lookahead:
    """The draft's side: a drafter with a model, copies of the rows, and their branches.

    num_candidates  mean number of branches for a position; 0: nothing is drafted ahead.
    branches        largest number of branches for a row; None: num_candidates for each position.
    fresh           draft a window if none was drafted ahead; False: the window is then empty.
    joined          add given candidates to the draft's own; False: given candidates replace its own."""

    def __init__(
        self, drafter: ModelDrafter, num_candidates: int, branches: int | None = None, fresh: bool = True,
        joined: bool = False,
    ):  # fmt: skip
        assert isinstance(drafter.model, TextModel)
        assert isinstance(drafter.proposer, Chain)
        self.drafter, self.model, self.chain = drafter, drafter.model, drafter.proposer
        self.num_candidates, self.branches = num_candidates, branches
        self.fresh, self.joined = fresh, joined
        self.survival = Survival()  # the windows' acceptance
        self._most = SPREAD * num_candidates
        self._states: dict[int, _State] = {}
        self._out: list[_State] = []

    def open(self, id: int, prompt: Sequence[int] | IntArray, params: SamplingParams, max_context: int) -> None:
        """Add a row. params: the request's, with the seed of its noise."""
        row = Row(id, prompt, params, max_context=max_context, eos_token_ids=self.drafter.eos_token_ids)
        self._states[id] = _State(row)
        self.model.start(row)

    def drop(self, id: int) -> None:
        state = self._states.pop(id)
        self._out = [other for other in self._out if other is not state]
        self.drafter.drop(state.row)

    def windows(self, asked: Sequence[Next]) -> list[Window]:
        """Return the next window of each row in `asked`."""
        self._out = [self._states[one.id] for one in asked]
        hits = [self._settle(state, one.new) for state, one in zip(self._out, asked, strict=True)]
        missed = [state for state, hit in zip(self._out, hits, strict=True) if not hit]
        drafts = self._fresh([state for state in missed if self.fresh or state.main is None])
        for state in missed:
            state.main = drafts.get(state.row.id) or self._empty(state)
        windows = []
        for state, hit in zip(self._out, hits, strict=True):
            main = _tree(state)
            state.window = main.drafted
            ran = 0 if hit else self.model.ran[state.row.id]
            windows.append(Window(state.row.id, state.window, hit, max(ran - main.num_committed + 1, 0)))
        return windows

    def _settle(self, state: _State, new: Sequence[int]) -> bool | None:
        """Commit the accepted tokens, and make the outcome's branch the row's window.

        Returns whether the outcome had a branch; None if it could have none, because the row is new or another drafter
        drafted."""
        main, window, table = state.main, state.window, state.table
        state.row.extend(new)
        state.table = {}
        if main is None:
            return None
        same = takewhile(lambda pair: pair[0] == pair[1], zip(window, new[:-1], strict=False))
        accepted = sum(1 for _ in same)
        nodes = range(min(main.num_committed + accepted, self.model.ran[state.row.id]))
        self.model.commit(main, nodes)
        if accepted < len(new) - 1:
            return None
        self.survival.note_asked(len(window), len(window), accepted, len(window))
        branch = table.get((accepted, new[-1]))
        if branch is not None:
            self._move_in(state, branch, len(nodes))
        return branch is not None if self.num_candidates else None

    def _move_in(self, state: _State, branch: Branch, committed: int) -> None:
        """Make a branch the row's window. Keys and values are moved, not computed again."""
        self.model.arrange(state.row, [node - committed for node in branch.nodes])
        state.main, state.tops = Draft.chain(state.row, branch.draft.tokens[branch.before - 1 :]), branch.tops
        state.main.num_committed = 1  # This is v, now the row's last token.

    def _fresh(self, states: Sequence[_State]) -> dict[int, Draft]:
        """Draft windows now, as plain speculation does. Returns drafts by row id."""
        for state in states:
            state.tops = []
        drafts = active = self.drafter.begin([Ask(state.row, state.row.max_draft) for state in states])
        while active:
            logits = self.chain.run(active, [1] * len(active))
            going, tops = self._step(active, logits)
            for draft, of_draft in zip(active, tops, strict=False):
                self._states[draft.row.id].tops.append(of_draft)
            active = going
        return {draft.row.id: draft for draft in drafts}

    def _empty(self, state: _State) -> Draft:
        """A window without tokens."""
        state.tops, row = [], state.row
        if self._room(row) > 0:
            self.model.catch_up(row)
        return self.model.begin(row)

    def _room(self, row: Row) -> int:
        """The largest number of tokens that can be drafted after a row."""
        return min(row.max_draft, self.model.room(row))

    def _step(self, drafts: Sequence[Draft], logits: torch.Tensor) -> tuple[list[Draft], list[Top]]:
        """Let each draft grow by a token. Returns the drafts that go on, and each draft's candidates for the position
        of that token; no candidates if `num_candidates` is 0."""
        going = self.chain.grow(drafts, logits)
        return going, self._tops(logits) if self.num_candidates else []

    def _tops(self, logits: torch.Tensor) -> list[Top]:
        """The candidates by logits [R, K]: one more than branches, because the drafted token gets no branch."""
        return top_of(logits, self._most + 1, self.model.columns)

    def look_ahead(self, given: Mapping[int, Candidates] | None = None) -> None:
        """Draft the next window for the likeliest outcomes of the windows just returned.

        given  candidates by row id; a row without candidates gets no branch. None: the draft's own are used."""
        if not self.num_candidates:
            return
        states = [state for state in self._out if state.row.finish_reason is None and self._has_room(state)]
        self._finish(states)
        grown = []
        for state in states:
            others = None if given is None else given.get(state.row.id, ())
            tops = state.tops if others is None else _merged(state.tops, others) if self.joined else others
            grown += [(state, branch) for branch in self._roots(state, self._outcomes(state.window, tops))]
        self._grow(grown)

    def _has_room(self, state: _State) -> bool:
        """Whether the draft model's context has room for the window's last token, which was drafted but not run."""
        return self.model.room(state.row) > len(state.window)

    def _finish(self, states: Sequence[_State]) -> None:
        """Run the tokens of every window that were drafted but not run, because branches may follow them."""
        ran = self.model.ran
        unrun = [_tree(state) for state in states if ran[state.row.id] < len(_tree(state).tokens)]
        if unrun:
            counts = [len(main.tokens) - max(ran[main.row.id], main.num_committed - 1) for main in unrun]
            tops = iter(self._tops(self.chain.run(unrun, counts)))
            for main, count in zip(unrun, counts, strict=True):
                state = self._states[main.row.id]
                state.tops = [*state.tops, *islice(tops, count)]

    def _outcomes(self, window: Sequence[int], tops: Candidates) -> list[tuple[int, int]]:
        """The outcomes (a, v) that get a branch, likeliest first. v is never y_{a+1}, which the target has rejected."""
        reach, stands = np.eye(1, len(window) + 2)[0], self.survival.asked(0, len(window))[0]
        reach[1 : len(stands) + 1] = stands
        stops = -np.diff(reach)  # P(exactly a tokens are accepted)
        worth: list[tuple[float, tuple[int, int]]] = []
        for a, top in enumerate(tops[: len(window) + 1]):
            others = [(v, p) for v, p in top if a == len(window) or v != window[a]][: self._most]
            mass = sum(p for _, p in others) or 1.0
            worth += [(stops[a] * p / mass, (a, v)) for v, p in others]
        worth.sort(key=lambda entry: -entry[0])
        return [key for _, key in worth[: self.branches or self.num_candidates * (len(window) + 1)]]

    def _roots(self, state: _State, keys: Sequence[tuple[int, int]]) -> list[Branch]:
        """Begin a branch for each outcome in `keys` after which a window can follow, and add v to the row's tree."""
        main, window = _tree(state), state.window
        root = main.num_committed - 1
        for a, v in keys:
            path = [main.tokens[root], *window[:a], v]
            row, before = state.row, len(path)
            most = min(self.drafter.rule.most(row.id), self._room(row) - (a + 1))
            draft = Draft.chain(row, path, most + a + 1)
            draft.num_committed = 1  # The noise's positions count from the row's last token.
            if most > 0 and not row.ends.intersection(path[1:]):
                main.add(v, root + a)
                state.table[a, v] = Branch(draft, before, [len(main.tokens) - 1])
        return list(state.table.values())

    def _grow(self, grown: Sequence[tuple[_State, Branch]]) -> None:
        """Draft all branches, a token a step, until the drafter's stop rule ends them."""
        active = list(grown)
        while active:
            counts: Counter[int] = Counter()  # by row id, in the order of `active`
            for state, _ in active:
                counts[state.row.id] += 1
            logits = self.chain.run([_tree(self._states[id]) for id in counts], list(counts.values()))
            grew, tops = self._step([branch.draft for _, branch in active], logits)
            going = {id(draft) for draft in grew}
            for (state, branch), of_branch in zip(active, tops, strict=True):
                branch.tops.append(of_branch)
                if id(branch.draft) in going:
                    _tree(state).add(branch.draft.tokens[-1], branch.nodes[-1])
                    branch.nodes.append(len(_tree(state).tokens) - 1)
            active = [(state, branch) for state, branch in active if id(branch.draft) in going]


def _tree(state: _State) -> Draft:
    assert state.main is not None
    return state.main


def _merged(own: Candidates, given: Candidates) -> list[Top]:
    """Join the candidates of both for each position. A token that both name gets the higher probability."""
    merged: list[Top] = []
    for mine, theirs in zip_longest(own, given, fillvalue=()):
        best: dict[int, float] = {}
        for token, p in (*mine, *theirs):
            best[token] = max(p, best.get(token, 0.0))
        merged.append(sorted(best.items(), key=lambda entry: -entry[1]))
    return merged
