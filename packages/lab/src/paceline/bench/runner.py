"""The runner: every endpoint answers every question, in turns, and every answer is recorded at once.

The endpoints answer a question one after another, in random order, so that a drifting machine is fair to all, and no
endpoint always finds the same one's full caches. Tasks take turns too, so that a stopped run has answers of every
task. The warm-up comes before and is not recorded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from random import Random
from typing import Any
from zlib import crc32

from paceline.bench.options import Options
from paceline.bench.record import ANSWERS, Answer, Done, answered, read_answers
from paceline.bench.suites import Question, tasks_in_turn
from paceline.errors import PacelineError
from paceline.net.endpoint import Body, Endpoint, OutOfTime
from paceline.runs.environment import Peak, load
from paceline.runs.progress import Progress
from paceline.runs.runs import Run

Prompt = Callable[[Question, Sequence[str]], list[int]]
"""Token ids of a question's next turn, after the answers to the turns before."""
Asked = Callable[[Question, Sequence[str]], Body]
"""The request for a question's next turn, without how it is sampled."""

WARM_UP_TOKENS = 32  # Most tokens of an answer in the warm-up.
WAKE = 0.2
"""Seconds that an endpoint works before an answer is timed. A processor whose cores slept, while another process
answered or a file was written, takes a tenth of a second until it is as fast as before (docs/log.md). Whoever
answers in fewer rounds, or in a process of its own, would pay most. The threads of the process before may still spin,
too."""


@dataclass(frozen=True)
class QuestionGroup:
    """Questions of a task to answer together. turns: how many turns of each question are asked."""

    number: int
    questions: tuple[Question, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True)
class LeftOut:
    """A question, or its second turn, that is not asked, and why."""

    question: str
    why: str


def fitting(
    questions: Sequence[Question], prompt: Prompt, *, max_context: int, max_tokens: int
) -> tuple[list[tuple[Question, int]], list[LeftOut]]:
    """Questions with the number of turns that fit into the context with the longest answers,
    and the questions left out."""
    fit, left_out = [], []
    for question in questions:
        asked = 0
        for n in range(1, len(question.turns) + 1):
            need = len(prompt(question, [""] * (n - 1))) + n * max_tokens
            if need > max_context:
                why = f"turn {n} and answers of {max_tokens} tokens need {need} of a context of {max_context}"
                left_out.append(LeftOut(question.id, why))
                break
            asked += 1
        if asked:
            fit.append((question, asked))
    return fit, left_out


def grouped(questions: Sequence[tuple[Question, int]], batch: int) -> list[QuestionGroup]:
    """Groups of at most `batch` successive questions of a task."""
    by_task = [list(same) for _, same in groupby(questions, key=lambda pair: pair[0].task)]
    together = [same[begin : begin + batch] for same in by_task for begin in range(0, len(same), batch)]
    return [
        QuestionGroup(number, tuple(question for question, _ in some), tuple(turns for _, turns in some))
        for number, some in enumerate(together)
    ]


def has_answered(method: str, groups: Sequence[QuestionGroup], repeats: int, done: Done) -> bool:
    """Whether a method has nothing left to answer."""
    return all((method, n, q.id) in done for n in range(repeats) for group in groups for q in group.questions)


@dataclass
class Runner:
    """Asks the endpoints of a run.

    endpoints    need not be open if they have answered everything.
    request      makes the body for a question's next turn from the endpoint's answers to earlier turns. Its max_tokens,
                 if any, may be less than the options'.
    recount      counts a text's tokens as Spec-Bench does.
    gpu          torch's device whose memory counts; None: the process's counts.
    known        answers from before; record: called with each group's new answers.
    stopped      called between answers; True ends the run.
    progress     called with every answer, new or known.
    catch        errors that count as an endpoint's failure."""

    endpoints: Sequence[Endpoint]
    groups: Sequence[QuestionGroup]
    options: Options
    request: Asked
    recount: Callable[[str], int] = len
    gpu: Any = None
    known: Sequence[Answer] = ()
    record: Callable[[list[Answer]], None] = lambda answers: None
    stopped: Callable[[], bool] = lambda: False
    progress: Callable[[Answer], None] = lambda answer: None
    catch: type[Exception] | tuple[()] = Exception

    def __post_init__(self) -> None:
        self.failed: set[str] = set()
        self._done = answered(self.known)

    def run(self) -> bool:
        """Answer every open question. Returns whether all are answered. A failed endpoint is asked no more. A group
        that is stopped in the middle (OutOfTime) leaves no answers."""
        for answer in self.known:
            self.progress(answer)
        asked = self.groups, self.options.repeats, self._done
        busy = [one for one in self.endpoints if not has_answered(one.name, *asked)]
        try:
            self._warm_up(busy)
            whole = all(self.repeat(number, busy) for number in range(self.options.repeats))
        except OutOfTime:
            return False
        return whole and not self.failed

    def repeat(self, number: int, busy: Sequence[Endpoint] | None = None) -> bool:
        """Let the endpoints in `busy` (None: all) forget, and answer every question once.
        Returns False if it was stopped."""
        for endpoint in self.endpoints if busy is None else busy:
            if endpoint.name not in self.failed:
                endpoint.forget()
        for group, endpoint in self._turns(number):
            missing = {q.id for q in group.questions if (endpoint.name, number, q.id) not in self._done}
            if not missing or endpoint.name in self.failed:
                continue
            if self.stopped():
                return False
            answers = [a for a in self._answers(endpoint, group, number) if a.question in missing]
            self.record(answers)
            if any(answer.failed for answer in answers):
                self.failed.add(endpoint.name)
            for answer in answers:
                self.progress(answer)
        return True

    def _turns(self, repeat: int) -> Iterator[tuple[QuestionGroup, Endpoint]]:
        """Yield pairs of a group and an endpoint, in the same random order when a run is continued."""
        for group in tasks_in_turn(self.groups, lambda group: group.questions[0].task):
            dice = Random(crc32(repr((self.options.seed, group.number, repeat)).encode()))
            for endpoint in dice.sample(self.endpoints, len(self.endpoints)):
                yield group, endpoint

    def _warm_up(self, busy: Sequence[Endpoint]) -> None:
        """Let each busy endpoint answer the largest group untimed, so that the caches are allocated.
        Only failures are recorded."""
        largest = max(self.groups, key=lambda group: len(group.questions))
        tokens = min(self.options.max_tokens, WARM_UP_TOKENS)
        for endpoint in busy:
            for _ in range(0 if self.stopped() else self.options.warm_up):
                answers = self._answers(endpoint, largest, 0, max_tokens=tokens)
                if any(answer.failed for answer in answers):
                    self.record(answers[:1])
                    self.progress(answers[0])
                    self.failed.add(endpoint.name)
                    break

    def _answers(
        self, endpoint: Endpoint, group: QuestionGroup, repeat: int, max_tokens: int | None = None
    ) -> list[Answer]:
        """Ask an endpoint a group of questions. Returns the answers, with the turns so far if it fails."""
        answers = [Answer(endpoint.name, repeat, q.id, q.category, q.task, group.number) for q in group.questions]
        try:
            if len(group.questions) > endpoint.slots:
                most, asked = endpoint.slots, self.options.batch
                raise PacelineError(f"answers {most} at a time, and --batch is {asked}")
            self._converse(endpoint, group, answers, repeat, max_tokens or self.options.max_tokens)
        except OutOfTime:
            raise
        except self.catch as error:  # A method's failure must not harm the others.
            why = " ".join(f"{error if isinstance(error, PacelineError) else repr(error)}".split())
            for answer in answers:
                answer.failed = why
        return answers

    def _converse(
        self, endpoint: Endpoint, group: QuestionGroup, answers: Sequence[Answer], repeat: int, max_tokens: int
    ) -> None:
        """Ask turn by turn. Each endpoint reads its own earlier answers, as in Spec-Bench."""
        for n in range(max(group.turns)):
            asked = [i for i in range(len(answers)) if n < group.turns[i]]
            bodies = [self.request(group.questions[i], [turn.text for turn in answers[i].turns]) for i in asked]
            # Endpoints share the seed of an answer; answers differ in theirs.
            seeds = [crc32(repr((self.options.seed, group.number, i, repeat, n)).encode()) >> 1 for i in asked]
            bodies = [self._sampled(body, seed, max_tokens) for body, seed in zip(bodies, seeds, strict=True)]
            endpoint.wake(WAKE)
            peak = Peak(self.gpu)
            replies, most = endpoint.ask(bodies, len(bodies)), peak.read()
            for i, reply, seed in zip(asked, replies, seeds, strict=True):
                reply.text, reply.seed = reply.text.strip(), seed if self.options.temperature else None
                reply.plain_tokens = self.recount(reply.text)
                if endpoint.in_process:
                    reply.peak_bytes = most
                answers[i].turns.append(reply)
                answers[i].load = load()

    def _sampled(self, body: Body, seed: int, max_tokens: int) -> Body:
        """The body with its sampling parameters."""
        most = min(max_tokens, body.get("max_tokens", max_tokens))
        drawn = {"seed": seed} if self.options.temperature else {}
        return {**body, "max_tokens": most, "temperature": self.options.temperature, **drawn}


def answer_all(run: Run, progress: Progress, **asked: Any) -> tuple[bool, list[Answer]]:
    """Answer every question without an answer in the run's folder. Returns whether all have one now, and all answers.
    asked: fields of `Runner`: endpoints, groups, options and the like."""
    lines, answers = run.lines(ANSWERS), list(read_answers(run.path / ANSWERS))
    questions = sum(len(group.questions) for group in asked["groups"])
    total, done = len(asked["endpoints"]) * questions * asked["options"].repeats, count(1)
    progress.say("answering")

    def record(new: Sequence[Answer]) -> None:
        lines.append(*(answer.row() for answer in new))
        answers.extend(new)

    def said(answer: Answer) -> None:
        if answer.failed:
            progress.note(f"{answer.method} failed: {answer.failed}")
        progress.step(next(done), total)

    runner = Runner(known=list(answers), record=record, stopped=progress.stopped, progress=said, **asked)
    return runner.run(), answers
