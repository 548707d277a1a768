"""Run prompts through an engine for a terminal; Ctrl-C ends a run between two rounds.

Times are the engine's alone: printing to a terminal does not count. Knows nothing of how answers are shown.
"""

from __future__ import annotations

import secrets
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from paceline.cli.prompts import Job, Messages
from paceline.engine.engine import Engine
from paceline.engine.request import Delta, Row
from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError, PromptError

Watch = Callable[[Engine, Job, Delta], None]
"""Called with every delta, while the answers grow."""
Refused = Callable[[Job, PacelineError], None]
"""Called with a prompt that cannot be answered; the others are."""


class Interrupt:
    """Within it Ctrl-C sets `pressed`, for a loop to see between rounds; a second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> Interrupt:
        self.pressed = False
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


@dataclass
class Answer:
    """A job and its row. pieces: (source, text) as in Delta; seconds: the engine's, from the row's first round on."""

    job: Job
    row: Row
    pieces: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the engine's seconds, the prompt's included."""
        return self.row.num_new / self.seconds if self.seconds else 0.0

    def record(self) -> dict[str, Any]:
        """The answer as one JSON object."""
        row = self.row
        record: dict[str, Any] = {"index": self.job.index}
        if self.job.id is not None:
            record["id"] = self.job.id
        record["prompt" if isinstance(self.job.prompt, str) else "messages"] = self.job.prompt
        record |= {
            "text": row.text,
            "prompt_tokens": row.prompt_length,
            "reused_tokens": row.reused,
            "new_tokens": row.num_new,
            "rounds": row.stats.rounds,
            "mean_accepted_tokens": round(row.mean_accepted_tokens, 4),
            "accepted_by_depth": [round(share, 4) for share in row.stats.acceptance_by_depth()],
            "tokens_per_second": round(self.tokens_per_second, 2),
            "seconds": round(self.seconds, 6),
            "seconds_by_part": {part: round(seconds, 6) for part, seconds in row.stats.seconds.items()},
            "finish_reason": row.finish_reason,
        }
        if row.params.logprobs is not None:
            record["logprobs"] = [entry._asdict() for entry in row.logprobs]
        if row.error:
            record["error"] = row.error
        if not row.params.is_greedy:
            record["seed"] = row.random.seed
        return record


def drive(
    engine: Engine, jobs: Sequence[Job], chat: bool | None, interrupt: Interrupt, refused: Refused, watch: Watch
) -> Iterator[Answer]:
    """Answer `jobs`, in the order they finish.

    After Ctrl-C the answers under way come as they stand (finish reason "abort"); those not begun do not come."""
    queued: deque[Answer] = deque()
    for job in jobs:
        if interrupt.pressed:
            break
        try:
            queued.append(Answer(job, engine.add(as_prompt(engine, job, chat), _params(engine, job))))
        except PacelineError as error:
            refused(job, error)
    answers = {answer.row.id: answer for answer in queued}
    busy = engine.profile.seconds
    for delta in engine.follow([answer.row for answer in queued], until=lambda: interrupt.pressed):
        _start(queued, busy)  # rows join after the round of the last delta, for only a row that ends makes room
        busy = engine.profile.seconds
        answer = answers[delta.row.id]
        answer.pieces += delta.pieces
        watch(engine, answer.job, delta)
        if delta.finished:
            yield _closed(answers.pop(delta.row.id), busy)
    _start(queued, busy)
    for answer in answers.values():
        engine.abort(answer.row)
        if answer.row.joined:
            rest = Delta.end(answer.row)
            answer.pieces += rest.pieces
            watch(engine, answer.job, rest)
            yield _closed(answer, engine.profile.seconds)


def _start(queued: deque[Answer], busy: float) -> None:
    """Note the engine's seconds at the start of the answers that have left the queue."""
    while queued and (queued[0].row.joined or queued[0].row.finish_reason):
        queued.popleft().seconds = busy


def _closed(answer: Answer, busy: float) -> Answer:
    return replace(answer, seconds=busy - answer.seconds)


def as_prompt(engine: Engine, job: Job, chat: bool | None) -> str | Messages:
    """The job's prompt for the engine. chat: whether to use the chat template; None: if there is one."""
    if not isinstance(job.prompt, str):
        if chat is False:
            raise PromptError('"messages" need the chat template; leave out --raw, or write "prompt" instead')
        return job.prompt
    if chat is None:
        chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template
    if not chat:
        return job.prompt
    if not job.prompt.strip():
        # Through the template even an empty text would become tokens.
        raise PromptError("The prompt is blank; write something, or use --raw.")
    return [{"role": "user", "content": job.prompt}]


def _params(engine: Engine, job: Job) -> SamplingParams:
    """The job's parameters, its prediction in tokens among them."""
    if not job.expected:
        return job.params
    if engine.tokenizer is None:
        raise PromptError("a prediction is text, and the model has no tokenizer to read it with")
    return replace(job.params, prediction=tuple(engine.tokenizer.encode_text(job.expected)))


@dataclass
class Comparison:
    """One job answered twice with the same target: with drafts, and plainly. Either is None if Ctrl-C came first."""

    job: Job
    drafted: Answer | None
    plain: Answer | None

    @property
    def is_complete(self) -> bool:
        """Whether there is anything to compare."""
        done = [a for a in (self.drafted, self.plain) if a is not None and a.row.is_complete]
        return len(done) == 2

    @property
    def pair(self) -> tuple[Answer, Answer]:
        """(drafted, plain) of a complete comparison."""
        assert self.drafted is not None
        assert self.plain is not None
        return self.drafted, self.plain

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token in which the two differ; None: they are identical, token for token."""
        ours, theirs = (answer.row.new_tokens.tolist() for answer in self.pair)
        if ours == theirs:
            return None
        shorter = min(len(ours), len(theirs))
        return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)

    @property
    def speedup(self) -> float:
        """Tokens per second with drafts over those without."""
        drafted, plain = (answer.tokens_per_second for answer in self.pair)
        return drafted / plain if plain else 0.0

    def record(self) -> dict[str, Any]:
        """The drafted answer as one JSON object, with what the plain one adds to it."""
        answer = self.drafted or self.plain
        assert answer is not None
        record = answer.record()
        if self.is_complete:
            record |= {
                "baseline_tokens_per_second": round(self.pair[1].tokens_per_second, 2),
                "speedup": round(self.speedup, 4),
                "identical": self.first_difference is None,
                "first_difference": self.first_difference,
            }
        return record


def compare(
    engine: Engine,
    plain: Engine,
    jobs: Sequence[Job],
    chat: bool | None,
    interrupt: Interrupt,
    refused: Refused,
    watch: Watch,
    turn: int = 0,
) -> Iterator[Comparison]:
    """Answer every job with both engines, which share a target. In odd turns the drafts go first.

    Both are warmed up before, and they take turns at going first, batch by batch, so that a machine that slows down or
    speeds up favours neither. Rows that sample get one seed for both."""
    for runner in (plain, engine):
        warm_up(runner)
    jobs = [with_seed(job) for job in jobs]
    for n, start in enumerate(range(0, len(jobs), engine.max_batch), turn):
        batch: Sequence[Job] = jobs[start : start + engine.max_batch]
        answers: dict[Engine, dict[int, Answer]] = {engine: {}, plain: {}}
        for runner in (plain, engine) if n % 2 == 0 else (engine, plain):
            done = list(drive(runner, batch, chat, interrupt, refused, watch))
            answers[runner] = {answer.job.index: answer for answer in done}
            # A prompt that one engine refuses the other would refuse as well.
            batch = [job for job in batch if job.index in answers[runner]]
        for job in jobs[start : start + engine.max_batch]:
            drafted, baseline = answers[engine].get(job.index), answers[plain].get(job.index)
            if drafted is not None or baseline is not None:
                yield Comparison(job, drafted, baseline)


def with_seed(job: Job) -> Job:
    """The job with a seed if it samples, so that repeating it gives the same answer."""
    if job.params.is_greedy or job.params.seed is not None:
        return job
    return replace(job, params=replace(job.params, seed=secrets.randbelow(2**31)))


def warm_up(engine: Engine) -> None:
    """A few rounds that are not counted, on a prompt that repeats itself so that most drafters draft."""
    few = min(engine.target.max_context // 4, 16)
    prompt = [i % min(4, engine.target.vocab_size) for i in range(few)]
    engine.generate([prompt], SamplingParams(max_tokens=few, ignore_eos=True))
    engine.reset_profile()
