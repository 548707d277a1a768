"""An answer as a stream of server-sent events: role, pieces, how it ended, usage, [DONE]."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.engine.request import Delta
from paceline.engine.sampling import TokenLogprob
from paceline.errors import PacelineError
from paceline.serve import reading
from paceline.serve.answers import REASONS, Echo, Frame, Places, reason_of, speculation, usage
from paceline.serve.fields import Common
from paceline.serve.guard import problem
from paceline.serve.reading import Reader
from paceline.serve.worker import EngineFailed, Job, Unavailable

if TYPE_CHECKING:
    from paceline.serve.app import Server

DONE = "data: [DONE]\n\n"


@dataclass
class Style:
    """How an answer is to be streamed. reader: makes what reads one answer to a chat; pieces: say which drafter wrote
    what."""

    frame: Frame
    request: Common
    prompt: list[int]
    reader: Callable[[], Reader] | None = None
    logprobs: bool = False
    pieces: bool = False
    echo: Echo | None = None
    places: dict[int, Places] = field(default_factory=dict)

    def echoed(self, index: int, echo: Echo) -> dict[str, Any]:
        """The choice that brings the prompt back."""
        logs = self._columns(index, echo.logprobs) if self.logprobs else None
        return {"index": index, "text": echo.text, "logprobs": logs, "finish_reason": None}

    def scored(self, index: int, job: Job) -> dict[str, Any]:
        """As `echoed`, with the log-probabilities of the prompt's tokens."""
        assert self.echo is not None
        return self.echoed(index, replace(self.echo, logprobs=job.row.prompt_logprobs if job.row else []))

    def _columns(self, index: int, logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        if index not in self.places:
            self.places[index] = Places(self.frame.tokenizer, () if self.echo else self.prompt)
        return self.frame.columns(logprobs, self.places[index], self.prompt[0])

    def piece(self, index: int, delta: Delta, reader: Reader | None) -> dict[str, Any]:
        """What one round adds to choice `index`."""
        choice: dict[str, Any] = {"index": index, "finish_reason": None}
        if reader is not None:
            said = reading.delta(reader.push(delta.text))
            choice |= {"delta": said or {"content": ""}, "logprobs": None}
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
        """The choice that says how answer `index` ended; None: that it has not."""
        empty: dict[str, Any] = {"delta": {}} if self.reader else {"text": ""}
        return {"index": index, **empty, "logprobs": None, "finish_reason": reason}


async def stream(server: Server, jobs: list[Job], style: Style) -> AsyncIterator[str]:
    """The events of one request; what is unfinished is given up if the client leaves."""
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
