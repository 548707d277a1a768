"""An answer as a stream of server-sent events: role, pieces, how it ended, usage, [DONE]."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.completion import Delta
from paceline.errors import PacelineError
from paceline.serve.answers import REASONS, Echo, Frame, speculation, usage
from paceline.serve.fields import Common
from paceline.serve.refusal import public
from paceline.serve.tools import split_calls
from paceline.serve.worker import Job

if TYPE_CHECKING:
    from paceline.serve.app import Server

DONE = "data: [DONE]\n\n"


@dataclass
class Style:
    """How an answer is to be streamed. calls: it may be tool calls; pieces: say which drafter wrote what."""

    frame: Frame
    request: Common
    chat: bool
    logprobs: bool = False
    calls: bool = False
    pieces: bool = False
    echo: Echo | None = None

    def piece(self, index: int, delta: Delta, offset: int) -> dict[str, Any]:
        """What one round adds to choice `index`, whose text has `offset` characters so far."""
        choice: dict[str, Any] = {"index": index, "finish_reason": None}
        if self.chat:
            choice |= {"delta": {"content": delta.text}, "logprobs": None}
            if self.logprobs:
                choice["logprobs"] = {"content": self.frame.entries(delta.logprobs), "refusal": None}
        else:
            choice |= {"text": delta.text, "logprobs": None}
            if self.logprobs:
                choice["logprobs"] = self.frame.columns(delta.logprobs, offset)
        if self.request.return_token_ids:
            choice["token_ids"] = delta.tokens
        return choice | ({"pieces": delta.pieces} if self.pieces else {})

    def prompt(self, index: int, job: Job) -> dict[str, Any]:
        """The prompt that comes back before the answer of choice `index`."""
        assert self.echo is not None
        logs = self.frame.columns(job.row.prompt_logprobs) if self.logprobs and job.row is not None else None
        return {"index": index, "text": self.echo.text, "logprobs": logs, "finish_reason": None}

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """The choice that says how answer `index` ended."""
        empty: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return {"index": index, **empty, "logprobs": None, "finish_reason": reason}


async def stream(server: Server, jobs: list[Job], style: Style) -> AsyncIterator[str]:
    """The events of one request; what is unfinished is given up if the client leaves."""
    frame, options = style.frame, style.request.stream_options
    counted = options is not None and options.include_usage
    none: dict[str, Any] = {"usage": None} if counted else {}
    try:
        for i in range(len(jobs)):
            if style.chat:
                yield frame.chunk(_added(i, {"role": "assistant", "content": ""}), **none)
            elif style.echo is not None and not style.logprobs:
                yield frame.chunk(style.prompt(i, jobs[i]), **none)
        unscored = set(range(len(jobs))) if style.echo is not None and style.logprobs else set()
        offsets = [len(style.echo.text) if style.echo else 0] * len(jobs)
        async for i, delta in _merged(jobs):
            if style.calls:
                continue
            if i in unscored:  # the first tokens come when the prompt has been run
                unscored.remove(i)
                yield frame.chunk(await asyncio.to_thread(style.prompt, i, jobs[i]), **none)
            if delta.text or delta.tokens:
                so_far = usage([job.completion for job in jobs]) if options and options.continuous_usage_stats else None
                more = {"usage": so_far} if so_far else none
                yield frame.chunk(style.piece(i, delta, offsets[i]), **more)
                offsets[i] += len(delta.text)
        for i, job in enumerate(jobs):
            done = job.completion
            if done.finish_reason == "error":
                raise PacelineError(done.error)
            reason = REASONS[done.finish_reason]
            if style.calls:
                text, made = split_calls(done.text)
                if text:
                    yield frame.chunk(_added(i, {"content": text}), **none)
                for n, call in enumerate(made):
                    yield frame.chunk(_added(i, {"tool_calls": [{"index": n, **call}]}), **none)
                reason = "tool_calls" if made and reason == "stop" else reason
            yield frame.chunk(style.end(i, reason), **none)
        if counted:
            completions = [job.completion for job in jobs]
            statistics = speculation(completions[0].stats) if len(jobs) == 1 else None
            totals = usage(completions, len(jobs[0].params.prediction))
            yield frame.chunk(None, usage=totals, metrics={"speculative_decoding": statistics})
        server.note(jobs)
        yield DONE
    except PacelineError as error:
        problem = {"message": public(str(error)), "type": "server_error", "param": None, "code": None}
        yield f"data: {json.dumps({'error': problem}, ensure_ascii=False)}\n\n"
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
