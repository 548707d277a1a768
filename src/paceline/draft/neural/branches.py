"""Drafting ahead: the next window of every likely outcome of a verification, before the outcome is known.

A drafted window y_1..y_g is out for verification. Its outcome is a key (a, v): the target accepts a drafted tokens and
then says v. For the likeliest keys the next window is drafted now, all of them in one batched forward a step: they are
branches of one tree over the draft model's cache,

    prefix | root  y_1 ... y_g | v of each key | next token of each branch | ...

    ahead.windows(asks)        what has happened since: the branch of that key, or a window drafted afresh
    ahead.look_ahead()         branches for the windows that were just handed over

Bhendawade et al. 2025, Mirror Speculative Decoding (arXiv 2510.13161), sections 3.2 and 3.3; candidates from the draft
itself, and more of them where verification is likelier to end: Kumar et al. 2026, SSD (arXiv 2603.03251).

A branch is chosen by its key, which is committed text, and drawn given prefix and key, so the window that is verified
has the distribution of a fresh one and acceptance stays exact. Knows no process and no target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile, zip_longest
from typing import Any, Literal, NamedTuple

import torch

from paceline.draft.neural.drafts import Draft, best_tokens
from paceline.draft.neural.stepping import Stepping
from paceline.engine.request import Row
from paceline.engine.sampling import RowRandom, SamplingParams
from paceline.engine.tree import IntArray

Top = Sequence[tuple[int, float]]
"""(token, probability) of what may come next, best first."""
Candidates = Sequence[Top]
"""What the target may say after the root and after each token of a window."""
Layout = Literal["measured", "uniform"]
"""measured: branches go where they are likeliest to be needed; uniform: every position gets as many (the paper's)."""
SPREAD = 4
"""With the measured layout one position gets at most SPREAD times as many branches as the mean."""


def most_candidates(average: int, layout: Layout) -> int:
    """Most branches of one position, where there are `average` of them in the mean."""
    return average * SPREAD if layout == "measured" else average


def top_of(logits: torch.Tensor, count: int, columns: torch.Tensor | None) -> list[Top]:
    """The best `count` tokens of each row of logits [R, K]. columns: as of `best_tokens`."""
    tokens, logs = best_tokens(logits, count, columns)
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), logs.exp().tolist(), strict=True)]


class Ask(NamedTuple):
    """A row that wants a window. new: its tokens since it last asked."""

    id: int
    new: Sequence[int]


@dataclass
class Window:
    """What is drafted for a row. tokens [n]; probs: the distributions they were drawn from, [V] each, if they were
    drawn; hit: whether it was drafted ahead, None where nothing could be (the first window of a row)."""

    id: int
    tokens: list[int]
    probs: list[torch.Tensor] = field(default_factory=list)
    hit: bool | None = None
    calls: int = 0


@dataclass
class Branch:
    """The next window under one key.

    draft  the path to it, and after `draft.ahead` tokens the window.
    nodes  numbers of v and of each token of the window that was run, in the tree of all branches.
    tops   candidates after each of these nodes."""

    draft: Draft
    nodes: list[int]
    tops: list[Top] = field(default_factory=list)


@dataclass
class _State:
    """A row on the draft's side.

    main    the tree that the model runs after the row: tokens it had not read, the window, branches; None before the
            first window.
    window  what was handed over. tops: candidates after the root and each token of the window that was run.
    table   branches by key."""

    row: Row
    main: Draft | None = None
    window: list[int] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    table: dict[tuple[int, int], Branch] = field(default_factory=dict)


class _Later:
    """A row as it will be under a key: what it is now, with the draws of the round that begins there."""

    def __init__(self, row: Row, ahead: int):
        self._row = row
        self.random = row.random if row.params.is_greedy else RowRandom(row.random.seed)
        self.random.free.begin(row.num_new + ahead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)

    def __len__(self) -> int:
        return len(self._row)


class Hazard:
    """How often verification ends at each position, as far as it got there; older windows count less."""

    KEPT, PRIOR = 0.98, 0.4

    def __init__(self) -> None:
        self._ended: list[float] = []
        self._seen: list[float] = []

    def note(self, window: int, accepted: int) -> None:
        """A window of `window` tokens, of which `accepted` stood."""
        for position in range(min(window, accepted + 1)):
            if position == len(self._seen):
                self._ended.append(2 * self.PRIOR)
                self._seen.append(2.0)
            self._ended[position] = self._ended[position] * self.KEPT + (position == accepted)
            self._seen[position] = self._seen[position] * self.KEPT + 1

    def stops(self, window: int) -> list[float]:
        """P(exactly a tokens accepted) for a = 0..window."""
        left, shares = 1.0, []
        for position in range(window):
            known = position < len(self._seen)
            ends = self._ended[position] / self._seen[position] if known else self.PRIOR
            shares.append(left * ends)
            left -= shares[-1]
        return [*shares, left]


class Ahead:
    """The draft's side of every row: a drafter with a model, shadows of the rows, and their branches.

    num_candidates  branches for a position, in the mean; 0: nothing is drafted ahead.
    branches        most for a row; None: num_candidates for every position.
    fresh           whether to draft a window where none was drafted ahead."""

    def __init__(
        self,
        drafter: Stepping,
        num_candidates: int,
        branches: int | None = None,
        layout: Layout = "measured",
        fresh: bool = True,
    ):
        self.drafter, self.num_candidates, self.branches = drafter, num_candidates, branches
        self.layout, self.fresh = layout, fresh
        self.hazard = Hazard()
        self._most = most_candidates(num_candidates, layout)
        self._states: dict[int, _State] = {}
        self._out: list[_State] = []

    # Rows -----------------------------------------------------------------------------------------------------

    def open(self, id: int, prompt: Sequence[int] | IntArray, params: SamplingParams, max_context: int) -> None:
        """A row joins; its parameters have the seed of the draft's own draws."""
        row = Row(id, prompt, params, max_context=max_context, eos_token_ids=self.drafter.eos_token_ids)
        self._states[id] = _State(row)
        self.drafter.start(row)

    def drop(self, id: int) -> None:
        """A row has left."""
        state = self._states.pop(id)
        self._out = [other for other in self._out if other is not state]
        self.drafter.drop(state.row)

    # What has happened -------------------------------------------------------------------------------------------

    def windows(self, asks: Sequence[Ask]) -> list[Window]:
        """The next window of every row that asks."""
        self._out = [self._states[ask.id] for ask in asks]
        hits = [self._settle(state, ask.new) for state, ask in zip(self._out, asks, strict=True)]
        missed = [state for state, hit in zip(self._out, hits, strict=True) if not hit]
        drafts = self._fresh([state for state in missed if self.fresh or state.main is None])
        for state in missed:
            state.main = drafts.get(state.row.id) or self._empty(state)
        windows = []
        for state, hit in zip(self._out, hits, strict=True):
            main = _main(state)
            state.window = main.drafted
            windows.append(Window(state.row.id, state.window, list(main.probs), hit, main.calls))
        return windows

    def _settle(self, state: _State, new: Sequence[int]) -> bool | None:
        """Commit what was accepted, and make the branch of the outcome the row's window. Whether there was one; None
        where there could be none, at the beginning of a row or after another drafter's draft."""
        main, window, table = state.main, state.window, state.table
        state.row.extend(new)
        state.table = {}
        if main is None:
            return None
        same = takewhile(lambda pair: pair[0] == pair[1], zip(window, new[:-1], strict=False))
        accepted = sum(1 for _ in same)
        nodes = [node for node in range(main.known + accepted) if node < main.done]
        self.drafter.keep(main, nodes)
        if accepted < len(new) - 1:
            return None
        self.hazard.note(len(window), accepted)
        branch = table.get((accepted, new[-1]))
        if branch is not None:
            self._move_in(state, branch, len(nodes))
        return branch is not None if self.num_candidates else None

    def _move_in(self, state: _State, branch: Branch, committed: int) -> None:
        """Make a branch the row's window. Its keys and values are moved after the row, and not computed again."""
        self.drafter.arrange(state.row, [node - committed for node in branch.nodes])
        tokens = branch.draft.tokens[branch.draft.ahead :]  # v, which is the row's last token now, and the window
        main = Draft.chain(state.row, tokens, branch.draft.ends)
        main.known, main.done, main.probs = 1, len(branch.nodes), branch.draft.probs
        state.main, state.tops = main, branch.tops

    def _fresh(self, states: Sequence[_State]) -> dict[int, Draft]:
        """Windows drafted as plain speculation does it, by row id."""
        for state in states:
            state.tops = []
            state.row.random.free.begin(state.row.num_new)
        if not states:
            return {}
        with self.drafter.watched(self._note_tops):
            self.drafter.propose([state.row for state in states])
        return self.drafter.hand_over()

    def _empty(self, state: _State) -> Draft:
        """A window of no token."""
        state.tops, row = [], state.row
        self.drafter.catch_up(row)
        return Draft.of(row, self.drafter.cached(row), self.drafter.end_tokens(row))

    def _note_tops(self, drafts: Sequence[Draft], logits: torch.Tensor) -> None:
        """Keep the candidates before every token of a window that is drafted afresh."""
        if self.num_candidates:
            for draft, top in zip(drafts, self._tops(logits), strict=True):
                self._states[draft.row.id].tops.append(top)

    def _tops(self, logits: torch.Tensor) -> list[Top]:
        """The best tokens of each row of logits [R, K], or of a run's with streams [R, 1 + count, K], with
        their probabilities: one more than may get a branch, for the drafted one cannot be the target's correction."""
        logits = logits[:, 0] if logits.dim() == 3 else logits
        return top_of(logits, self._most + 1, self.drafter.columns)

    # Ahead ----------------------------------------------------------------------------------------------------

    def look_ahead(self, given: Mapping[int, Candidates] | None = None, joined: bool = False) -> None:
        """Draft the next window for the likeliest outcomes of the windows just handed over.

        given   candidates by row from elsewhere than the draft; a row without any gets no branch, unless
        joined  the draft's own are taken too."""
        if not self.num_candidates:
            return
        states = [state for state in self._out if state.row.finish_reason is None]
        self._finish(states)
        grown = []
        for state in states:
            others = None if given is None else given.get(state.row.id, ())
            tops = state.tops if others is None else _merged(state.tops, others) if joined else others
            grown += [(state, branch) for branch in self._roots(state, self._keys(state.window, tops))]
        self._grow(grown)

    def _finish(self, states: Sequence[_State]) -> None:
        """Run the last tokens of every window, which drafting it did not: they may stand, and something follows."""
        unrun = [_main(state) for state in states if _main(state).done < len(_main(state).tokens)]
        if unrun:
            counts = [len(main.tokens) - max(main.done, main.known - 1) for main in unrun]
            tops = iter(self._tops(self.drafter.run_nodes(unrun, counts)))
            for main, count in zip(unrun, counts, strict=True):
                state = self._states[main.row.id]
                state.tops = [*state.tops, *islice(tops, count)]

    def _keys(self, window: Sequence[int], tops: Candidates) -> list[tuple[int, int]]:
        """(a, v) of the outcomes that get a branch, the likeliest first. Token y_{a+1} is not one of its position: a
        correction differs from what it corrects."""
        stops = self.hazard.stops(len(window))
        worth: list[tuple[float, tuple[int, int]]] = []
        for a, top in enumerate(tops[: len(window) + 1]):
            others = [(v, p) for v, p in top if a == len(window) or v != window[a]][: self._most]
            mass = sum(p for _, p in others) or 1.0
            for place, (v, p) in enumerate(others):
                worth.append((stops[a] * p / mass if self.layout == "measured" else -place, (a, v)))
        worth.sort(key=lambda entry: -entry[0])
        return [key for _, key in worth[: self.branches or self.num_candidates * (len(window) + 1)]]

    def _roots(self, state: _State, keys: Sequence[tuple[int, int]]) -> list[Branch]:
        """A branch for each key, its v a node of the row's tree. None where nothing can come after v."""
        main, window = _main(state), state.window
        root = main.known - 1
        for a, v in keys:
            path = [main.tokens[root], *window[:a], v]
            draft = replace(Draft.chain(_Later(state.row, a + 1), path, main.ends), known=1, ahead=a + 1)
            if self.drafter.most(draft) > 0 and not main.ends.intersection(path[1:]):
                main.add(v, root + a)
                state.table[a, v] = Branch(draft, [len(main.tokens) - 1])
        return list(state.table.values())

    def _grow(self, grown: Sequence[tuple[_State, Branch]]) -> None:
        """Draft all branches by the drafter's own draws and stop rule, a token a step, or what its streams say."""
        branches, active = {id(branch.draft): branch for _, branch in grown}, list(grown)

        def note(drafts: Sequence[Draft], logits: torch.Tensor) -> None:
            for draft, top in zip(drafts, self._tops(logits), strict=True):
                branches[id(draft)].tops.append(top)

        while active:
            counts: Counter[int] = Counter()  # in the order in which their nodes were added
            for state, branch in active:
                counts[state.row.id] += 1 + branch.draft.guessed
            logits = self.drafter.run_nodes([_main(self._states[id]) for id in counts], list(counts.values()))
            with self.drafter.watched(note):
                going = {id(draft) for draft in self.drafter.grow([branch.draft for _, branch in active], logits)}
            for state, branch in active:
                del branch.nodes[len(branch.tops) :]  # guesses that do not stand
                if id(branch.draft) in going:
                    for token in branch.draft.tokens[branch.draft.ahead + len(branch.nodes) :]:
                        _main(state).add(token, branch.nodes[-1])
                        branch.nodes.append(len(_main(state).tokens) - 1)
            active = [(state, branch) for state, branch in active if id(branch.draft) in going]


def _main(state: _State) -> Draft:
    assert state.main is not None
    return state.main


def _merged(own: Candidates, given: Candidates) -> list[Top]:
    """Both candidates of every position, each token once with the higher probability."""
    merged: list[Top] = []
    for mine, theirs in zip_longest(own, given, fillvalue=()):
        best: dict[int, float] = {}
        for token, p in (*mine, *theirs):
            best[token] = max(p, best.get(token, 0.0))
        merged.append(sorted(best.items(), key=lambda entry: -entry[1]))
    return merged
