"""What goes back to a client: OpenAI's objects, whole or as a stream of server-sent events, with vLLM's statistics of
speculation. A stream is the role, pieces, how it ended, usage, [DONE]."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from time import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from paceline.engine.request import Completion, Delta, RowStats
from paceline.engine.sampling import TokenLogprob
from paceline.errors import PacelineError
from paceline.serve import reading
from paceline.serve.fields import Common
from paceline.serve.guard import problem
from paceline.serve.reading import Reader
from paceline.target.tokenizer import Tokenizer
from paceline.workbench.worker import EngineFailed, Job, Unavailable

if TYPE_CHECKING:
    from paceline.serve.app import Server

DONE = "data: [DONE]\n\n"
REASONS = {"stop": "stop", "length": "length", "context": "length", "abort": "abort", "error": "error"}


def reason_of(done: Completion, reader: Reader) -> str:
    """Why the answer to a chat ended, once `reader` has read it."""
    reason = REASONS[done.finish_reason]
    return "tool_calls" if reader.called and reason == "stop" else reason


@dataclass
class Echo:
    """A prompt that comes back. logprobs: of its tokens, None for the first, which nothing predicts."""

    text: str
    logprobs: list[TokenLogprob | None]


class TextOffsets:
    """Where each token of an answer begins in its text.

    prompt  token ids before the answer; empty where the answer echoes them."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._detokenizer = tokenizer.detokenizer(prompt)
        self._at = 0

    def next(self, token: int) -> int:
        """The place of the next token, in characters."""
        new, at = self._detokenizer.push(token), self._at
        self._at += len(new)
        broken = len(new) - len(new.lstrip("\ufffd"))  # bytes of earlier tokens that made no character
        return at + broken if broken < len(new) else at


@dataclass
class Frame:
    """What every object of one answer has."""

    kind: str  # chat.completion or text_completion
    model: str
    tokenizer: Tokenizer
    prefix: str = "chatcmpl"
    id: str = ""
    created: int = field(default_factory=lambda: int(time()))

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.prefix}-{uuid4().hex}"

    def whole(
        self, choices: list[dict[str, Any]], completions: Sequence[Completion], predicted: int = 0
    ) -> dict[str, Any]:
        """The whole answer. predicted: tokens of the request's prediction."""
        return {
            **self._head(self.kind),
            "choices": choices,
            "usage": usage(completions, predicted),
            "metrics": {"speculative_decoding": speculation(completions[0].stats) if len(completions) == 1 else None},
        }

    def chunk(self, choice: dict[str, Any] | None, **more: Any) -> str:
        """A piece of a stream, as server-sent events have it; None: no choice, as with usage."""
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        body = {**self._head(kind), "choices": [] if choice is None else [choice], **more}
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    # Choices --------------------------------------------------------------------------------------------------

    def message(self, index: int, done: Completion, reader: Reader, *, logprobs: bool, ids: bool) -> dict[str, Any]:
        """One choice of a chat. ids: with token ids."""
        message = reading.message(reader.push(done.text) + reader.end())
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": {"content": self.entries(done.logprobs), "refusal": None} if logprobs else None,
            "finish_reason": reason_of(done, reader),
        }
        return choice | ({"token_ids": done.tokens} if ids else {})

    def text(
        self, index: int, done: Completion, prompt: list[int], *, logprobs: bool, ids: bool, echo: Echo | None
    ) -> dict[str, Any]:
        """One choice of a text completion. echo: the prompt, where it is to come back."""
        places = TextOffsets(self.tokenizer, () if echo else prompt)
        scored = [*(echo.logprobs if echo else []), *done.logprobs]
        choice: dict[str, Any] = {
            "index": index,
            "text": (echo.text if echo else "") + done.text,
            "logprobs": self.columns(scored, places, prompt[0]) if logprobs else None,
            "finish_reason": REASONS[done.finish_reason],
        }
        return choice | ({"token_ids": done.tokens, "prompt_token_ids": prompt} if ids else {})

    def entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Log-probabilities as chats have them."""
        return [
            self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(*pair) for pair in one.top]}
            for one in logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.spelled(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

    def columns(self, logprobs: Sequence[TokenLogprob | None], places: TextOffsets, first: int) -> dict[str, Any]:
        """Log-probabilities as text completions have them; None: the prompt's first token, which nothing predicts."""
        texts = [self.tokenizer.decode([first]) if one is None else self.spelled(one.token) for one in logprobs]
        offsets = [places.next(first if one is None else one.token) for one in logprobs]
        values = [None if one is None else max(one.logprob, -9999.0) for one in logprobs]
        tops = [None if one is None else {self.spelled(token): p for token, p in one.top} for one in logprobs]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def spelled(self, token: int) -> str:
        """A token's text."""
        return str(self.tokenizer.inner.decode([token]))


def usage(completions: Sequence[Completion], predicted: int = 0) -> dict[str, Any]:
    """Tokens of the prompt, which is one for all choices, and of the answers."""
    prompt, new = completions[0].prompt_tokens, sum(done.new_tokens for done in completions)
    facts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    facts["prompt_tokens_details"] = {"cached_tokens": completions[0].reused}
    if predicted:
        accepted = sum(n for done in completions for source, n in done.runs if source == "prediction")
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": max(predicted - accepted, 0)}
        facts["completion_tokens_details"] = details
    return facts


def speculation(stats: RowStats) -> dict[str, Any]:
    """A request's speculation in vLLM's shape."""
    depth = max(len(stats.accepted), len(stats.drafted)) - 1
    histogram = [*stats.accepted, *[0] * (depth + 1 - len(stats.accepted))]
    accepted = sum(d * count for d, count in enumerate(histogram))
    return {
        "mean_acceptance_length": (accepted + stats.rounds) / stats.rounds if stats.rounds else 0.0,
        "draft_acceptance_rate": accepted / stats.draft_tokens if stats.draft_tokens else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": stats.draft_tokens,
        "num_spec_tokens": max(depth, 0),
    }


# Streams --------------------------------------------------------------------------------------------------------------


@dataclass
class Style:
    """How a request is streamed.

    reader  makes the reader of an answer; None for text completions.
    pieces  whether chunks say which drafter wrote what.
    echo    the prompt, where it comes back.
    offsets  by choice, once they are needed."""

    frame: Frame
    request: Common
    prompt: list[int]
    reader: Callable[[], Reader] | None = None
    logprobs: bool = False
    pieces: bool = False
    echo: Echo | None = None
    offsets: dict[int, TextOffsets] = field(default_factory=dict)

    def echoed(self, index: int, echo: Echo) -> dict[str, Any]:
        """The choice with the prompt."""
        logs = self._columns(index, echo.logprobs) if self.logprobs else None
        return {"index": index, "text": echo.text, "logprobs": logs, "finish_reason": None}

    def scored(self, index: int, job: Job) -> dict[str, Any]:
        """As `echoed`, with the log-probabilities of the prompt's tokens."""
        assert self.echo is not None
        return self.echoed(index, replace(self.echo, logprobs=job.row.prompt_logprobs if job.row else []))

    def _columns(self, index: int, logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        if index not in self.offsets:
            self.offsets[index] = TextOffsets(self.frame.tokenizer, () if self.echo else self.prompt)
        return self.frame.columns(logprobs, self.offsets[index], self.prompt[0])

    def piece(self, index: int, delta: Delta, reader: Reader | None) -> dict[str, Any]:
        """The choice with what one round adds to answer `index`."""
        choice: dict[str, Any] = {"index": index, "finish_reason": None}
        if reader is not None:
            choice |= {"delta": reading.delta(reader.push(delta.text)) or {"content": ""}, "logprobs": None}
            if self.logprobs:
                choice["logprobs"] = {"content": self.frame.entries(delta.logprobs), "refusal": None}
        else:
            choice |= {"text": delta.text, "logprobs": None}
            if self.logprobs:
                choice["logprobs"] = self._columns(index, delta.logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = delta.tokens
        return choice | ({"pieces": delta.pieces} if self.pieces else {})

    def end(self, index: int, reason: str | None) -> dict[str, Any]:
        """The choice with the reason why answer `index` ended; None: it has not."""
        empty: dict[str, Any] = {"delta": {}} if self.reader else {"text": ""}
        return {"index": index, **empty, "logprobs": None, "finish_reason": reason}


async def stream(server: Server, jobs: list[Job], style: Style) -> AsyncIterator[str]:
    """The events of one request. If the client leaves, what is unfinished is aborted."""
    frame, options = style.frame, style.request.stream_options
    counted = options is not None and options.include_usage
    none: dict[str, Any] = {"usage": None} if counted else {}
    ids = {"prompt_token_ids": style.prompt} if style.request.return_token_ids else {}
    unfinished = dict(enumerate(jobs))
    try:
        for i in range(len(jobs)):
            if style.reader:
                yield frame.chunk(_added(i, {"role": "assistant", "content": ""}), **none, **ids)
            elif style.echo is not None and not style.logprobs:
                yield frame.chunk(style.echoed(i, style.echo), **none, **ids)
            elif ids:
                yield frame.chunk(style.end(i, None), **none, **ids)
        readers = [style.reader() if style.reader else None for _ in jobs]
        unscored = set(range(len(jobs))) if style.echo is not None and style.logprobs else set()
        async for i, delta in _merged(jobs):
            if i in unscored:  # the first tokens come when the prompt has been run
                unscored.remove(i)
                yield frame.chunk(await asyncio.to_thread(style.scored, i, jobs[i]), **none)
            if delta.text or delta.tokens:
                so_far = usage([job.completion for job in jobs]) if options and options.continuous_usage_stats else None
                more = {"usage": so_far} if so_far else none
                yield frame.chunk(style.piece(i, delta, readers[i]), **more)
        for i, job in enumerate(jobs):
            done = job.completion
            if done.finish_reason == "error":
                raise EngineFailed(done.error)
            reason = REASONS[done.finish_reason]
            if (reader := readers[i]) is not None:
                if last := reading.delta(reader.end()):
                    yield frame.chunk(_added(i, last), **none)
                reason = reason_of(done, reader)
            yield frame.chunk(style.end(i, reason), **none)
            del unfinished[i]
        if counted:
            completions = [job.completion for job in jobs]
            statistics = speculation(completions[0].stats) if len(jobs) == 1 else None
            totals = usage(completions, len(jobs[0].params.prediction))
            yield frame.chunk(None, usage=totals, metrics={"speculative_decoding": statistics})
        server.note(jobs)
        yield DONE
    except PacelineError as error:
        yield f"data: {json.dumps(problem(error, 'server_error'), ensure_ascii=False)}\n\n"
        for i, job in unfinished.items():  # for clients that look for nothing else
            yield frame.chunk(style.end(i, REASONS[job.completion.finish_reason]), **none)
        if isinstance(error, Unavailable):
            server.note(jobs)
        yield DONE
    finally:
        server.abort(jobs)


def _added(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


async def _merged(jobs: list[Job]) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of all jobs as they come."""
    if len(jobs) == 1:
        async for delta in jobs[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def forward(i: int, job: Job) -> None:
        try:
            async for delta in job:
                queue.put_nowait((i, delta))
            queue.put_nowait((i, None))
        except Exception as error:
            queue.put_nowait((i, error))

    tasks = [asyncio.create_task(forward(i, job)) for i, job in enumerate(jobs)]
    try:
        left = len(jobs)
        while left:
            i, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
