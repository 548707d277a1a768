"""Queue requests, and wait for their answers. Knows no HTTP.

    prompted = chats.prompted(request)
    submitted = chats.submit(request, prompted)
    completions = await chats.finished(submitted[0])

The routes and `Local` ask so. A stream is one row of events, which each API writes in a form of its own (`Form`)."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

from paceline.core.request import Completion
from paceline.draft.text.folder import FolderCorpus
from paceline.draft.text.suffix_array import SuffixArray
from paceline.errors import PacelineError
from paceline.serve import reading
from paceline.serve.ahead import WAITING, same_beginning
from paceline.serve.fields import ChatRequest, Common
from paceline.serve.prepare import Preparer, Prompted
from paceline.serve.reading import Reader
from paceline.serve.said import serving
from paceline.serve.settings import Refused, Settings
from paceline.serve.streams import Form, Merged
from paceline.serve.worker import EngineFailed, Job, Unavailable, Worker

if TYPE_CHECKING:
    from paceline.serve.metrics import RequestLog

log = logging.getLogger("paceline.request_log")
MOST_CORPORA = 4
"""Largest number of folders inside the server's that are kept for a client; the one used longest ago is forgotten."""


class Chats(Preparer):
    """Has the worker answer requests. log: keeps answered requests, as token ids."""

    def __init__(self, worker: Worker, settings: Settings, log: "RequestLog | None" = None):
        super().__init__(worker, settings)
        self.log = log
        self._rendering, self._renders = ThreadPoolExecutor(1, "ahead"), BoundedSemaphore(WAITING)
        self.corpora = {(one := FolderCorpus(folder, self.tokenizer)).folder: one for folder in settings.corpora}
        self._chosen = defaultdict[str, dict[Path, FolderCorpus]](dict)
        for corpus in self.corpora.values():
            corpus.latest()

    def corpus(self, folder: str | None, client: str) -> SuffixArray | None:
        """The text that a request may copy from. Raises Refused for a folder outside the server's folders, and for a
        client without a key, because drafts tell what is in a text."""
        if folder is None:
            return next(iter(self.corpora.values())).latest() if self.corpora else None
        refused = Refused("x-paceline-corpus must name a folder of --corpus, or one in it, and needs an API key")
        try:
            path = Path(folder).resolve()
            root = next((root for root in self.corpora if path.is_relative_to(root)), None)
            if not client or root is None or not path.is_dir():
                raise refused
        except (OSError, ValueError, RuntimeError):
            raise refused from None
        if path == root:
            return self.corpora[root].latest()
        own = self._chosen[client]
        own[path] = corpus = own.pop(path, None) or FolderCorpus(path, self.tokenizer, root)
        if len(own) > MOST_CORPORA:
            del own[next(iter(own))]
        return corpus.latest()

    def submit(
        self, request: Common, prompted: Sequence[Prompted], client: str = "", corpus: str | None = None
    ) -> list[list[Job]]:
        """Queue one job per answer. If the queue is too full for all, queue none, raise Busy.

        client  as in `Row`; corpus: a folder to copy drafts from, instead of the server's first folder."""
        text = self.corpus(corpus, client)
        loop, jobs = asyncio.get_running_loop(), list[list[Job]]()
        whose = "" if self.settings.share_prefixes else client, request.cache_salt or ""
        salt = sha256("/".join(whose).encode("utf-8", "surrogatepass")).hexdigest() if any(whose) else ""
        try:
            for one in prompted:
                jobs.append([])
                for params in one.params:
                    params = replace(params, cache_salt=salt, branches=one.branches, corpus=text)
                    private = request.store is False
                    jobs[-1].append(self.worker.submit(one.prompt, params, loop, client, private))
            if isinstance(request, ChatRequest) and request.n == 1 and self.settings.read_ahead:
                jobs[0][0].on_answer = partial(self.read_ahead, request, prompted[0], jobs[0][0])
        except PacelineError:
            self.abort([job for some in jobs for job in some])
            raise
        return jobs

    def abort(self, jobs: Sequence[Job]) -> None:
        """End the jobs that are still running."""
        for job in jobs:
            self.worker.abort(job)

    async def finished(self, jobs: Sequence[Job]) -> list[Completion]:
        """Wait for the whole answers, or for their parts so far if the worker must end.
        Who cancels this aborts the jobs."""
        try:
            for job in jobs:
                try:
                    async for _ in job:
                        pass
                except Unavailable:
                    if self.worker.error is not None or not any(job.completion.tokens for job in jobs):
                        raise
                    self.abort(jobs)
        except BaseException as error:
            self.abort(jobs)
            if isinstance(error, Unavailable):
                self.note(jobs)
            raise
        completions = [job.completion for job in jobs]
        for done in completions:
            if done.finish_reason == "error":
                raise EngineFailed(done.error)
        self.note(jobs)
        return completions

    def next_prompt(self, request: ChatRequest, prompted: Prompted, done: Completion) -> list[int]:
        """The tokens with which the next request of a conversation will begin. Expects that the client sends the answer
        back unchanged, with its reasoning only if it sent reasoning of earlier answers."""
        assert prompted.reader is not None
        reader = prompted.reader()
        answer = reading.message(reader.push(done.text) + reader.end())
        own = [one for one in request.messages if one.get("role") == "assistant"]
        if not any(one.get("reasoning_content") or one.get("reasoning") for one in own):
            answer.pop("reasoning_content", None)
        calls, tools = answer.get("tool_calls") or [{}], self.tools_of(request)
        more = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls[0] else {"role": "user"}
        said = [[*request.messages, answer, {**more, "content": text}] for text in ("?", "!")]
        requests = (request.model_copy(update={"messages": messages}) for messages in said)
        return same_beginning(*(self.prompt_of(one, tools) for one in requests))

    def read_ahead(self, request: ChatRequest, prompted: Prompted, job: Job) -> None:
        """Let the worker compute the beginning of the next request. Does nothing if the template refuses it."""
        try:
            job.next = self.next_prompt(request, prompted, job.completion)
        except PacelineError:
            return
        self.worker.read_ahead(job)

    def _render(self, on_answer: Callable[[], None]) -> None:
        """Call `on_answer`. Rendering a conversation has one thread, and no more conversations wait for it than for
        reading ahead: it must not take the processor from requests."""
        try:
            on_answer()
        except Exception:
            log.exception("a conversation could not be rendered to be read ahead")
        finally:
            self._renders.release()

    def note(self, jobs: Sequence[Job]) -> None:
        """Finish whole answers: read ahead, in another thread, and write each job once to the log, if there is a log.
        If the disk is full, the line is lost, not the answer."""
        for job in jobs:
            on_answer, job.on_answer = job.on_answer, None
            if on_answer is None or job.completion.finish_reason != "stop":
                continue
            if self._renders.acquire(blocking=False):
                self._rendering.submit(self._render, on_answer)
        if self.log is None:
            return
        for job in jobs:
            if job.logged:
                continue
            job.logged = True
            try:
                self.log.write(job)
            except PacelineError as error:
                log.warning("a request is not in the log: %s", error)

    async def stream(
        self, jobs: Sequence[Job], readers: Sequence[Reader | None], form: "Form"
    ) -> AsyncIterator[str]:
        """Yield the events of the jobs' answers in the given form, and pings during silence.
        readers: a reader for each job."""
        left, merged = dict(enumerate(jobs)), Merged(jobs)
        try:
            yield form.begin()
            async for i, delta in merged:
                reader = readers[i]
                if delta is None:
                    text = form.ping()
                    _show_progress(jobs)
                else:
                    text = await form.more(i, delta, reader.push(delta.text) if reader else [])
                if text:
                    merged.silence.end()
                    yield text
            for i, (job, reader) in enumerate(zip(jobs, readers, strict=True)):
                done = job.completion
                if done.finish_reason == "error":
                    raise EngineFailed(done.error)
                pieces = reader.end() if reader else []
                yield form.end(i, done, pieces, bool(reader and reader.called))
                del left[i]
            self.note(jobs)
            yield form.over()
        except PacelineError as error:
            if isinstance(error, Unavailable):
                self.note(jobs)
            yield form.broken(error, left)
        finally:
            merged.silence.close()
            self.abort(jobs)


def _show_progress(jobs: Sequence[Job]) -> None:
    """Write a line to the server's log for each prompt that is not read yet."""
    for job in jobs:
        if job.row is None or job.row.slot < 0:
            serving.info("a prompt of %d tokens waits", len(job.prompt))
        elif not job.row.is_decoding:
            serving.info("%d of %d tokens of a prompt read", job.row.cached, job.row.prompt_length)
