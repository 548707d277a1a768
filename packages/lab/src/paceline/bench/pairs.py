"""Answers as arrays of tokens and seconds, for a method alone, and beside plain decoding.

A group's questions are answered together, so its seconds count once. The medians over its repeats count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from paceline.bench.record import Answer, good
from paceline.net.completion import Completion

Floats = NDArray[np.float64]
Answers = Sequence[Answer]


@dataclass(frozen=True)
class Cell:
    """A group in a repeat. turns: new tokens and seconds, float64 [turns, 2]."""

    task: str
    questions: frozenset[str]
    turns: Floats


def cells(answers: Answers, *, decode: bool = False) -> dict[tuple[int, int], Cell]:
    """The cells by (group, repeat).

    decode  whether to leave out the prompt: the time until every row of a group has a token, and the tokens until
            then. Groups with unknown times are then left out too."""
    together: dict[tuple[int, int], list[Answer]] = {}
    for answer in good(answers):
        together.setdefault((answer.group, answer.repeat), []).append(answer)
    cells_by_key = {}
    for (group, repeat), members in together.items():
        if decode and not all(t.times and len(t.times) == len(t.lengths or ()) for a in members for t in a.turns):
            continue
        turns = [[*filter(None, some)] for some in zip_longest(*(answer.turns for answer in members))]
        measured = np.array([_measure(of_turn, decode) for of_turn in turns]).reshape(-1, 2)
        questions = frozenset(answer.question for answer in members)
        cells_by_key[group, repeat] = Cell(members[0].task, questions, measured)
    return cells_by_key


def totals(answers: Answers, *, decode: bool = False) -> tuple[float, float] | None:
    """New tokens and seconds of all groups, by medians over repeats; None without groups. decode: see `cells`."""
    by_group: dict[int, list[Floats]] = {}
    for (group, _), cell in cells(answers, decode=decode).items():
        by_group.setdefault(group, []).append(cell.turns)
    if not by_group:
        return None
    tokens, seconds = _totals(*_stack(list(by_group.values()))).tolist()
    return tokens, seconds


@dataclass(frozen=True)
class Pairs:
    """Groups that a method and plain decoding both answered. mine, plain: float64 [groups, repeats, turns, 2]; a group
    has its first `counts` repeats. members: groups of each task; answers: number of answers."""

    mine: Floats
    plain: Floats
    counts: NDArray[np.int64]
    members: list[NDArray[np.int64]]
    answers: int

    @classmethod
    def of(cls, answers: Answers, plain: Answers, *, decode: bool = False) -> Pairs | None:
        """Pair each (group, repeat) that both answered in full; None if there is none. decode: see `cells`."""
        mine, others = cells(answers, decode=decode), cells(plain, decode=decode)
        by_group: dict[int, list[tuple[Cell, Cell]]] = {}
        for (group, repeat), cell in mine.items():
            other = others.get((group, repeat))
            if other is not None and other.questions == cell.questions:
                by_group.setdefault(group, []).append((cell, other))
        if not by_group:
            return None
        groups = list(by_group.values())
        stack, counts = _stack([[cell.turns for cell, _ in pairs] for pairs in groups])
        plain_stack, _ = _stack([[other.turns for _, other in pairs] for pairs in groups])
        tasks: dict[str, list[int]] = {}
        for i, pairs in enumerate(groups):
            tasks.setdefault(pairs[0][0].task, []).append(i)
        num_answers = sum(len(cell.questions) for pairs in groups for cell, _ in pairs)
        return cls(stack, plain_stack, counts, [np.array(at) for at in tasks.values()], num_answers)

    def ratio(self) -> float | None:
        """Tokens per second over plain decoding's; None if nothing was measured."""
        mine, plain = _totals(self.mine, self.counts), _totals(self.plain, self.counts)
        if not (mine[0] > 0 < mine[1] and plain[0] > 0 < plain[1]):
            return None
        return float(mine[0] * plain[1] / (mine[1] * plain[0]))  # The same answers give exactly 1.

    def resampled(self, size: int, random: np.random.Generator) -> Floats:
        """Bootstrap ratios, [size]: each draws groups within their task, and repeats within a group."""
        drawn = np.hstack([some[random.integers(len(some), size=(size, len(some)))] for some in self.members])
        counts = self.counts[drawn]
        repeats = random.random((*drawn.shape, self.mine.shape[1])) * counts[..., None]
        which = repeats.astype(np.int64)
        mine, plain = (_totals(stack[drawn[..., None], which], counts) for stack in (self.mine, self.plain))
        return np.asarray(mine[:, 0] * plain[:, 1] / (mine[:, 1] * plain[:, 0]))


def _measure(turns: Sequence[Completion], decode: bool) -> tuple[float, float]:
    """New tokens and seconds of a turn of a group. All its answers have the same seconds."""
    seconds = max(turn.seconds for turn in turns)
    if not decode:
        return sum(turn.num_new for turn in turns), seconds
    start = max(turn.times[0] for turn in turns if turn.times)
    rounds = [pair for turn in turns for pair in zip(turn.lengths or (), turn.times or (), strict=True)]
    return sum(n for n, when in rounds if when > start), seconds - start


def _stack(groups: Sequence[Sequence[Floats]]) -> tuple[Floats, NDArray[np.int64]]:
    """Stack groups of repeats of [turns, 2] as [groups, repeats, turns, 2]. Returns it and each group's repeats.

    Missing turns have no tokens and no seconds."""
    counts = np.array([len(repeats) for repeats in groups])
    depth = max(len(turns) for repeats in groups for turns in repeats)
    stack = np.zeros((len(groups), counts.max(), depth, 2))
    for g, repeats in enumerate(groups):
        for r, turns in enumerate(repeats):
            stack[g, r, : len(turns)] = turns
    return stack, counts


def _totals(stack: Floats, counts: NDArray[np.int64]) -> Floats:
    """Tokens and seconds, [..., 2], of [..., groups, repeats, turns, 2]: sums of medians over repeats."""
    return _medians(stack, counts).sum(axis=(-3, -2))


def _medians(stack: Floats, counts: NDArray[np.int64]) -> Floats:
    """Medians over the first `counts` [..., groups] of the repeats: [..., groups, turns, 2]."""
    absent = np.arange(stack.shape[-3]) >= counts[..., None]
    ordered = np.sort(np.where(absent[..., None, None], np.inf, stack), axis=-3)
    below, above = (counts - 1) // 2, counts // 2
    middle = [np.take_along_axis(ordered, at[..., None, None, None], axis=-3) for at in (below, above)]
    return np.mean(middle, axis=0).squeeze(-3)
