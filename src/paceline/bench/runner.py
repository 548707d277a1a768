"""The runner: every contestant answers every question, in turns, and every answer is written down at once.

Within a question the contestants answer one after another, in an order that is drawn anew for every question: a machine
that drifts is then fair to all, and nobody always comes after the same one, which leaves the caches full. Tasks take
turns, too: it is fair to them, and what a stopped run has answered is of every task alike. The warm-up comes before and
is not recorded. Knows contestants by their interface alone.

    Runner(folder, contestants, groups, options, prompt=..., recount=...).run()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from random import Random
from zlib import crc32

import torch

from paceline.bench.contestant import Ask, Contestant
from paceline.bench.environment import load, peak_memory
from paceline.bench.folder import RunFolder
from paceline.bench.record import Answer, Reply, good
from paceline.bench.suites import Question, tasks_in_turn
from paceline.errors import PacelineError

Messages = list[dict[str, str]]

CPU = torch.device("cpu")
WARM_UP_TOKENS, WARM_UP_QUESTIONS = 32, 8
"""Most of each in a warm-up."""
WAKE = 0.2
"""Seconds that a contestant works before an answer is timed. A processor whose cores slept, while another process
answered or a file was written, takes a tenth of a second until it is as fast as before (benchmarks/awake.py). Whoever
answers in fewer rounds, or in a process of its own, would pay most. The threads of the process before may still spin,
too."""


@dataclass(frozen=True)
class Options:
    """How a run asks. warm_up: answers of every contestant to the first questions before anything is timed."""

    max_tokens: int = 128
    temperature: float = 0.0
    batch: int = 1
    repeats: int = 1
    warm_up: int = 3
    seed: int = 0


@dataclass(frozen=True)
class QuestionGroup:
    """Questions of one task that are answered together; turns[i] of question i are asked."""

    number: int
    questions: tuple[Question, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True)
class LeftOut:
    """A question, or its second turn, that is not asked, and why."""

    question: str
    why: str


def fitting(
    questions: Sequence[Question],
    prompt: Callable[[Messages], Sequence[int]],
    *,
    max_context: int,
    max_tokens: int,
) -> tuple[list[tuple[Question, int]], list[LeftOut]]:
    """Questions with the number of their turns that fit into the context whatever the answers are, and the rest."""
    fit, left_out = [], []
    for question in questions:
        messages: Messages = []
        asked = 0
        for n, turn in enumerate(question.turns):
            messages.append({"role": "user", "content": turn})
            need = len(prompt(messages)) + (n + 1) * max_tokens
            if need > max_context:
                why = f"turn {n + 1} and answers of {max_tokens} tokens need {need} of a context of {max_context}"
                left_out.append(LeftOut(question.id, why))
                break
            messages.append({"role": "assistant", "content": ""})
            asked += 1
        if asked:
            fit.append((question, asked))
    return fit, left_out


def grouped(questions: Sequence[tuple[Question, int]], batch: int) -> list[QuestionGroup]:
    """Groups of at most `batch` questions that follow each other in one task."""
    by_task = [list(same) for _, same in groupby(questions, key=lambda pair: pair[0].task)]
    together = [same[begin : begin + batch] for same in by_task for begin in range(0, len(same), batch)]
    return [
        QuestionGroup(number, tuple(question for question, _ in some), tuple(turns for _, turns in some))
        for number, some in enumerate(together)
    ]


Done = set[tuple[str, int, str]]
"""Method, repeat and question of answers that are there."""


def answered(answers: Iterable[Answer]) -> Done:
    """Those that are there; an answer that failed is not one."""
    return {(answer.method, answer.repeat, answer.question) for answer in good(answers)}


def has_answered(method: str, groups: Sequence[QuestionGroup], repeats: int, done: Done) -> bool:
    """Whether a method has nothing left to answer."""
    return all((method, n, q.id) in done for n in range(repeats) for group in groups for q in group.questions)


@dataclass
class Runner:
    """One run. prompt: messages to tokens; recount: what Spec-Bench counts for a text; ends: tokens that end one.

    contestants  those that have answered everything need not be open.
    stopped      asked between two answers; True ends the run there.
    progress     called with every answer, new or found in the folder."""

    folder: RunFolder
    contestants: Sequence[Contestant]
    groups: Sequence[QuestionGroup]
    options: Options
    prompt: Callable[[Messages], Sequence[int]]
    recount: Callable[[str], int]
    ends: tuple[int, ...] = ()
    device: torch.device = CPU
    stopped: Callable[[], bool] = lambda: False
    progress: Callable[[Answer], None] = lambda answer: None

    def run(self) -> bool:
        """Answer what is not answered yet; whether everything is now. A contestant that fails is asked no more."""
        done = answered(self.folder.answers)
        for answer in self.folder.answers:
            self.progress(answer)
        busy = [c for c in self.contestants if not has_answered(c.name, self.groups, self.options.repeats, done)]
        failed = self._warm_up(busy)
        for repeat in range(self.options.repeats):
            for contestant in busy:
                if contestant.name not in failed:
                    contestant.forget()
            for group, contestant in self._turns(repeat):
                missing = [q for q in group.questions if (contestant.name, repeat, q.id) not in done]
                if not missing or contestant.name in failed:
                    continue
                if self.stopped():
                    return False
                asked = {question.id for question in missing}
                answers = [a for a in self._answers(contestant, group, repeat) if a.question in asked]
                self.folder.append(answers)
                if any(answer.failed for answer in answers):
                    failed.add(contestant.name)
                for answer in answers:
                    self.progress(answer)
        return not failed

    def _turns(self, repeat: int) -> Iterator[tuple[QuestionGroup, Contestant]]:
        """Each group and each contestant; a run that continues has the same order."""
        for group in tasks_in_turn(self.groups, lambda group: group.questions[0].task):
            dice = Random(crc32(repr((self.options.seed, group.number, repeat)).encode()))
            for contestant in dice.sample(self.contestants, len(self.contestants)):
                yield group, contestant

    def _warm_up(self, busy: Sequence[Contestant]) -> set[str]:
        """Let everyone who has work left answer the first questions, unrecorded; names of those that failed at it."""
        failed: set[str] = set()
        whole = self.groups[0]
        first = replace(whole, questions=whole.questions[:WARM_UP_QUESTIONS], turns=whole.turns[:WARM_UP_QUESTIONS])
        tokens = min(self.options.max_tokens, WARM_UP_TOKENS)
        for contestant in busy:
            for _ in range(0 if self.stopped() else self.options.warm_up):
                answers = self._answers(contestant, first, 0, max_tokens=tokens)
                if any(answer.failed for answer in answers):
                    self.folder.append(answers[:1])
                    self.progress(answers[0])
                    failed.add(contestant.name)
                    break
        return failed

    def _answers(
        self, contestant: Contestant, group: QuestionGroup, repeat: int, max_tokens: int | None = None
    ) -> list[Answer]:
        """What a contestant says to a group of questions; where it fails, as far as it came."""
        answers = [Answer(contestant.name, repeat, q.id, q.category, q.task, group.number) for q in group.questions]
        try:
            if len(group.questions) > contestant.max_batch:
                raise PacelineError(f"answers {contestant.max_batch} at a time, and --batch is {self.options.batch}")
            self._converse(contestant, group, answers, repeat, max_tokens or self.options.max_tokens)
        except Exception as error:  # whatever a method does wrong, the others are not to suffer from it
            why = " ".join(f"{error if isinstance(error, PacelineError) else repr(error)}".split())
            for answer in answers:
                answer.failed = why
        return answers

    def _converse(
        self, contestant: Contestant, group: QuestionGroup, answers: Sequence[Answer], repeat: int, max_tokens: int
    ) -> None:
        """Ask turn by turn; each contestant reads its own earlier answers, as in Spec-Bench."""
        messages: list[Messages] = [[] for _ in answers]
        for n in range(max(group.turns)):
            asked = [i for i in range(len(answers)) if n < group.turns[i]]
            for i in asked:
                messages[i].append({"role": "user", "content": group.questions[i].turns[n]})
            prompts = [list(self.prompt(messages[i])) for i in asked]
            seeds = tuple(self._seed(group, i, repeat, n) for i in asked)
            ask = Ask(max_tokens, self.options.temperature, seeds, self.ends)
            contestant.wake(WAKE)
            with peak_memory(self.device) as peak:
                turns = contestant.answer(prompts, ask)
            for i, turn in zip(asked, turns, strict=True):
                self._finish(turn, peak.bytes if contestant.in_process else None)
                answers[i].turns.append(turn)
                answers[i].load = load()
                messages[i].append({"role": "assistant", "content": turn.text})

    def _finish(self, turn: Reply, peak: int | None) -> None:
        turn.text = turn.text.strip()
        turn.plain_tokens = self.recount(turn.text)
        turn.peak_bytes = turn.peak_bytes if turn.peak_bytes is not None else peak

    def _seed(self, group: QuestionGroup, i: int, repeat: int, turn: int) -> int:
        """The same for every contestant, another one for every answer."""
        return crc32(repr((self.options.seed, group.number, i, repeat, turn)).encode()) >> 1
