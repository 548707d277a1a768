"""Run prompts through an engine for a terminal; Ctrl-C ends a run between two rounds.

Times are the engine's alone: printing to a terminal does not count."""

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.cli.prompts import Job, Messages
from paceline.core.request import Delta, Row
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import PacelineError, PromptError
from paceline.interrupt import Interrupt

Watch = Callable[[Engine, Job, Delta], None]  # Called with every delta, while the answers grow.
Refused = Callable[[Job, PacelineError], None]  # Called with a prompt that cannot be answered.


@dataclass
class Answer:
    """A job and its row. pieces: (source, text) as in Delta; seconds: the engine's time from the row's first round on;
    reading: its time until the first token."""

    job: Job
    row: Row
    pieces: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    reading: float = 0.0

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
        if self.job.key:
            record["key"] = self.job.key
        record["prompt" if isinstance(self.job.prompt, str) else "messages"] = self.job.prompt
        record |= {
            "text": row.text,
            "prompt_tokens": row.prompt_length,
            "reused_tokens": row.reused,
            "new_tokens": row.num_new,
            "rounds": row.stats.rounds,
            "mean_accepted_tokens": round(row.stats.mean_accepted_tokens, 4),
            "accepted_by_depth": [round(share, 4) for share in row.stats.acceptance_by_depth()],
            "tokens_per_second": round(self.tokens_per_second, 2),
            "seconds": round(self.seconds, 6),
            "prompt_seconds": round(self.reading, 6),
            "seconds_by_part": {part: round(seconds, 6) for part, seconds in row.stats.seconds.items()},
            "finish_reason": row.finish_reason,
        }
        if row.params.logprobs is not None:
            record["logprobs"] = [entry._asdict() for entry in row.logprobs]
        if row.error:
            record["error"] = row.error
        if not row.params.is_greedy:
            record["seed"] = row.noise.seed
        return record


def drive(
    engine: Engine, jobs: Sequence[Job], chat: bool | None, interrupt: Interrupt, refused: Refused, watch: Watch,
    reading: Callable[[Row], None] = lambda _: None,
) -> Iterator[Answer]:  # fmt: skip
    """Answer `jobs`, in the order they finish. reading: called between the rounds that read a prompt.

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

    def stops() -> bool:
        for row in engine.rows:
            if row.cached and not row.num_new:
                reading(row)
        return interrupt.pressed

    busy = engine.profile.seconds
    for delta in engine.follow([answer.row for answer in queued], until=stops):
        _start(queued, busy)  # Rows join after the last delta's round, since only an ended row makes room.
        busy = engine.profile.seconds
        answer = answers[delta.row.id]
        answer.pieces += delta.pieces
        if delta.tokens and not answer.reading:
            answer.reading = busy - answer.seconds
        watch(engine, answer.job, delta)
        if delta.finished:
            yield _ended(answers.pop(delta.row.id), busy)
    _start(queued, busy)
    for answer in answers.values():
        engine.abort(answer.row)
        if answer.row.joined:
            rest = Delta.end(answer.row)
            answer.pieces += rest.pieces
            watch(engine, answer.job, rest)
            yield _ended(answer, engine.profile.seconds)


def _start(queued: deque[Answer], busy: float) -> None:
    """Note the engine's seconds at the start of the answers that have left the queue."""
    while queued and (queued[0].row.joined or queued[0].row.finish_reason):
        queued.popleft().seconds = busy


def _ended(answer: Answer, busy: float) -> Answer:
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


def ignore(*_: object) -> None:
    """For deltas that are not shown."""


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
