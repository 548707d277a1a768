"""Work a request out once, queue it, and wait for its answers. Knows no HTTP.

    prompted = chats.prompted(request)
    submitted = chats.submit(request, prompted)
    completions = await chats.finished(submitted[0])

The routes and `Local` ask so. A stream is one row of events, which each API writes in a form of its own (`Form`)."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

from paceline.core.request import Completion, Delta
from paceline.core.rules import SEEDS
from paceline.core.sampling import SamplingParams
from paceline.draft.text.folder import FolderCorpus
from paceline.draft.text.suffix_array import SuffixArray
from paceline.errors import PacelineError, shortened
from paceline.logs.tool_calls import prepared
from paceline.serve import reading
from paceline.serve import tools as tool
from paceline.serve.ahead import WAITING, same_beginning
from paceline.serve.fields import ChatRequest, Common, Conversation, TextRequest, Tool, text_of
from paceline.serve.infill import filling
from paceline.serve.reading import Piece, Reader
from paceline.serve.said import serving, shown_drafts
from paceline.serve.settings import Refused, Settings
from paceline.serve.structure import Grammars
from paceline.serve.worker import EngineFailed, Job, Unavailable, Worker

if TYPE_CHECKING:
    from paceline.serve.metrics import RequestLog

log = logging.getLogger("paceline.request_log")
MOST_CORPORA = 4
"""Largest number of folders inside the server's that are kept for a client; the one used longest ago is forgotten."""
PING_SECONDS = 10.0
"""The longest silence of a stream: clients and proxies give up at some, of 30 seconds or of 300."""


@dataclass(frozen=True)
class PreparedChat:
    """A chat worked out: prompt, tools, grammar and reader.

    prompt    token ids.
    branches  lengths of the prompt, as in SamplingParams.
    tools     functions that an answer may call.
    marks     marks that begin and end an answer's reasoning; None if there can be no reasoning.
    grammar   makes a grammar for each answer, or None if any text is right.
    reader    makes a reader for each answer."""

    prompt: list[int]
    branches: list[int]
    tools: list[Tool]
    marks: tuple[str, str] | None
    grammar: Callable[[], Any]
    reader: Callable[[], Reader]


@dataclass(frozen=True)
class Prompted:
    """A prompt and the parameters of each of its answers.

    reader    makes a reader for each answer; None: an answer is plain text.
    text      the prompt's text, if the request wants it back.
    branches  lengths of the prompt, as in SamplingParams."""

    prompt: list[int]
    params: list[SamplingParams]
    reader: Callable[[], Reader] | None = None
    text: str | None = None
    branches: Sequence[int] = ()


class Chats:
    """Works requests out and has the worker answer them. log: keeps answered requests, as token ids."""

    def __init__(self, worker: Worker, settings: Settings, log: "RequestLog | None" = None):
        self.worker, self.settings, self.log = worker, settings, log
        self.engine = worker.engine
        assert self.engine.tokenizer is not None
        self.tokenizer = self.engine.tokenizer
        self.tokenizer.name = settings.model  # Errors name the tokenizer to strangers, who must not read a path.
        self.tokenizer.reads_marks = settings.parse_marks
        self.defaults = settings.defaults(self.engine.target.sampling)
        target = self.engine.target
        self.grammars = Grammars(
            self.tokenizer, target.vocab_size, target.eos_token_ids, white_space=settings.json_whitespace
        )
        self.formats = reading.tool_formats(settings.tool_parser)
        self.marks = reading.reasoning_marks(settings.reasoning_parser, self.tokenizer.chat_template)
        self.tokenizer.show(reading.all_marks(self.formats, self.marks))
        self.drafts = shown_drafts(settings.drafts)
        self._rendering, self._renders = ThreadPoolExecutor(1, "ahead"), BoundedSemaphore(WAITING)
        self.corpora = {(one := FolderCorpus(folder, self.tokenizer)).folder: one for folder in settings.corpora}
        self._chosen = defaultdict[str, dict[Path, FolderCorpus]](dict)
        for corpus in self.corpora.values():
            corpus.latest()

    def check_model(self, model: str | None) -> None:
        """Raise Refused if the server has no such model."""
        names = (self.settings.model, *self.settings.also)
        if model is not None and model not in names and "*" not in names:
            what = f"model is {shortened(repr(model))}; this server has {', '.join(map(repr, names))}"
            raise Refused(what, "model", 404, "model_not_found")

    def check(self, request: Common) -> None:
        """Raise Refused if the server has no such model or drafter. Replaces the drafter's name by its whole spec."""
        self.check_model(request.model)
        if request.draft is None:
            return
        request.draft = self.drafts.get(request.draft, request.draft)
        if request.draft not in self.settings.drafts:
            choice = ", ".join(self.drafts)
            raise Refused(f"draft is {shortened(repr(request.draft))}; requests may choose {choice}", "draft")

    def prepare(self, request: ChatRequest) -> PreparedChat:
        """Work a chat out. Raises Refused if it cannot be answered."""
        tools = self.tools_of(request)
        prompt = self.prompt_of(request, tools)
        marks, inside = self.reasoning_of(request, prompt)
        grammar = partial(self.grammar, request, self.most_tokens(prompt), tools, marks, inside)
        reader = partial(self.reader, request, tools, marks, inside)
        return PreparedChat(prompt, self.branches(request, tools, prompt), tools, marks, grammar, reader)

    def tools_of(self, request: Conversation) -> list[Tool]:
        """The functions that an answer may call. Raises PacelineError if a strict schema cannot be enforced."""
        tools = tool.chosen(request)
        for one in tools:
            schema = tool.parameters(one)
            if one.function.strict:
                self.grammars.check(schema)
        return tools

    def prompt_of(
        self, request: Conversation, tools: Sequence[Tool], whole: bool = True, **more: Any
    ) -> list[int]:  # fmt: skip
        """Token ids of a conversation and its tools.
        whole: whether it must fit the context; more: variables for the template."""
        options = dict(request.chat_template_kwargs or {})
        for name in tool.unread_variables(self.tokenizer, options, tools=bool(tools), refuse=not self.settings.lenient):
            del options[name]
        options |= tool.thinking(
            request, self.tokenizer.chat_template, self.marks is not None, refuse=not self.settings.lenient
        )
        given = [one.model_dump(exclude_none=True, exclude={"cache_control"}) for one in tools]
        messages, inputs = prepared(_plain(request.messages), given, "tools" in self.tokenizer.chat_template)
        if whole:
            self.tokenizer.refuse_long(messages, self.engine.target.max_context)  # Megabytes would block everybody.
        return self.tokenizer.encode_chat(messages, **(options | inputs | request.turns | more))

    def branches(self, request: Conversation, tools: Sequence[Tool], prompt: list[int]) -> list[int]:
        """Lengths of a prompt at which later prompts may differ: before the user's first words, and before the words
        that invite an answer. Only recurrent models need them."""
        if not self.engine.target.recurrent or not request.turns.get("add_generation_prompt", True):
            return []
        count = next((i for i, one in enumerate(request.messages) if one.get("role") == "user"), 0)
        other = {"role": "user", "content": "?"}
        begins = request.model_copy(update={"messages": [*request.messages[:count], other]})
        try:
            others = self.prompt_of(begins, tools), self.prompt_of(request, tools, add_generation_prompt=False)
        except PacelineError:  # Some templates refuse to end there.
            return []
        return [len(same_beginning(prompt, one)) for one in others]

    def reasoning_of(self, request: ChatRequest, prompt: list[int]) -> tuple[tuple[str, str] | None, bool]:
        """Returns (marks of an answer's reasoning, or None if there can be none; whether the prompt has begun it)."""
        if self.marks is None:
            return None, False
        if request.continue_final_message and (said := text_of(request.messages[-1].get("content"))):
            inside = self.marks[1] not in said and said.lstrip().startswith(self.marks[0])
            return (self.marks if inside else None), inside
        end = str(self.tokenizer.inner.decode(prompt[-16:])).rstrip()
        return (None if end.endswith(self.marks[1]) else self.marks), end.endswith(self.marks[0])

    def reader(
        self, request: ChatRequest, tools: Sequence[Tool], marks: tuple[str, str] | None, inside: bool
    ) -> Reader:
        """A reader of one answer to a chat."""
        formats = self.formats if tools and not request.must_call else ()
        if tools and request.is_constrained:
            formats = (*formats, reading.BARE)
        names = {one.function.name: one.function.parameters for one in tools}
        most = 1 if request.parallel_tool_calls is False else None
        return Reader(formats, names, marks, inside=inside, most=most, strict=self.strict(tools))

    def strict(self, tools: Sequence[Tool]) -> reading.ArgumentChecks:
        """For each strict function, by name, a check whether arguments fit its schema."""
        strict = [(one.function.name, tool.parameters(one)) for one in tools if one.function.strict]
        return {name: partial(self.grammars.fits, schema) for name, schema in strict}

    def most_tokens(self, prompt: Sequence[int]) -> int:
        """The number of tokens that fit into the context after a prompt."""
        return max(self.engine.longest - len(prompt), 1)

    def params(self, request: Common, prompt: list[int], logprobs: int | None, grammar: Any) -> SamplingParams:
        """The engine's parameters, with the request's prediction."""
        more: dict[str, Any] = {"logprobs": logprobs, "grammar": grammar}
        if request.prediction is not None:
            expected = str(request.prediction.content)
            self.tokenizer.refuse_long(expected, self.engine.target.max_context)
            more["prediction"] = tuple(self.tokenizer.encode_text(expected))
            if (size := len(more["prediction"])) >= self.engine.target.max_context:
                what = f"prediction has {size} tokens, and this model's context holds {self.engine.target.max_context}"
                raise Refused(f"{what}; shorten it", "prediction", code="context_length_exceeded")
        return request.sampling(self.most_tokens(prompt), self.defaults, **more)

    def grammar(
        self, request: Common, most: int, tools: Sequence[Tool] = (), marks: tuple[str, str] | None = None,
        inside: bool = False,
    ) -> Any:  # fmt: skip
        """A new grammar for an answer of at most `most` tokens, or None for any text. A chat's grammar begins after its
        reasoning."""
        grammar, schema = self._grammar(request, tools)
        if request.on_length == "close":
            grammar = self.grammars.closing(grammar, schema, min(request.most_tokens or most, most))
        return self.grammars.after_reasoning(grammar, marks, inside) if grammar and marks else grammar

    def _grammar(self, request: Common, tools: Sequence[Tool]) -> tuple[Any, Any]:
        """A grammar and its schema, or schemas; None for any text."""
        if isinstance(request, ChatRequest) and request.must_call:
            return self.grammars.json_schema(schema := tool.schema(tools)), schema
        wanted = request.response_format
        if wanted is None or wanted.type == "text":
            return None, None
        if wanted.type == "json_object":
            return self.grammars.json_object(), {}
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise PacelineError("response_format is json_schema, and json_schema.schema is missing")
        if tools:
            each = tool.schema(tools), wanted.json_schema.schema_
            return self.grammars.either(*each), each
        return self.grammars.json_schema(wanted.json_schema.schema_), wanted.json_schema.schema_

    # A prompt, and a job for each of its answers ------------------------------------------------------------------

    def prompted(self, request: Common) -> list[Prompted]:
        """Work out every prompt of a request. Takes long for large prompts, schemas and templates."""
        self.check(request)
        if isinstance(request, ChatRequest):
            self.check_count(request.n)
            chat = self.prepare(request)
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
            answers = self._answers(request, chat.prompt, logprobs, chat.grammar)
            return [Prompted(chat.prompt, answers, chat.reader, branches=chat.branches)]
        assert isinstance(request, TextRequest)
        request = filling(self.tokenizer, request, self.engine.longest)
        given: Any = request.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise PacelineError("prompt is empty; give a text, token ids, or a list of them")
        self.check_count(len(given) * request.n)
        return [self._text(request, prompt) for prompt in given]

    def _text(self, request: TextRequest, prompt: str | list[int]) -> Prompted:
        if isinstance(prompt, str) and not request.add_special_tokens:
            self.tokenizer.refuse_long(prompt, self.engine.target.max_context)
            prompt = self.tokenizer.encode_text(prompt)
        ids = self.engine.encode(prompt).tolist()
        text = self.tokenizer.decode(ids) if request.echo else None
        grammar = partial(self.grammar, request, self.most_tokens(ids))
        return Prompted(ids, self._answers(request, ids, request.logprobs, grammar), text=text)

    def _answers(
        self, request: Common, prompt: list[int], logprobs: int | None, grammar: Callable[[], Any]
    ) -> list[SamplingParams]:
        """Parameters of each of the n answers.
        A prompt to be scored alone needs one answer, a prompt only echoed none."""
        if only_echo(request):
            if logprobs is None:
                return []
            request = request.model_copy(update={"max_tokens": 1, "n": 1})
        first = self.params(request, prompt, logprobs, grammar())
        if isinstance(request, TextRequest) and request.echo:
            first = replace(first, prompt_logprobs=logprobs)
        self.engine.check(prompt, first)
        seeds = [None if first.seed is None else (first.seed + i) % SEEDS for i in range(1, request.n)]
        return [first, *(replace(first, grammar=grammar(), seed=seed) for seed in seeds)]

    def check_count(self, answers: int) -> None:
        """Raise Refused if there are more answers than can ever wait."""
        if answers > (most := self.worker.most_waiting + self.engine.max_batch):
            raise Refused(f"{answers:,} answers at once are asked for, and this server takes at most {most:,}")

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


class Form(ABC):
    """Writes answers as an API's server-sent events. Each method returns the events of a moment, or ""."""

    def ping(self) -> str:
        """A sign of life that clients ignore."""
        return ": ping\n\n"

    @abstractmethod
    def begin(self) -> str:
        """Events before anything is computed; never "", because a client may wait for the first byte."""

    @abstractmethod
    async def more(self, i: int, delta: Delta, pieces: list[Piece]) -> str:
        """Events for a round's addition to answer `i`. pieces: the addition as its reader read it."""

    @abstractmethod
    def end(self, i: int, done: Completion, pieces: list[Piece], called: bool) -> str:
        """Events for the end of answer `i`: its last pieces, and why it ended. called: whether it has a whole call."""

    @abstractmethod
    def over(self) -> str:
        """Events after the last answer."""

    @abstractmethod
    def broken(self, error: PacelineError, left: dict[int, Job]) -> str:
        """Events for an error that ended the answers in `left`."""


Event = dict[str, Any]


class Parts(ABC):
    """Joins the pieces of an answer to a sequence of parts: "content", "reasoning" and "call".

    kind  kind of the open part, "" for none; said: its text so far."""

    def __init__(self) -> None:
        self.kind = self.said = ""

    def push(self, pieces: Iterable[Piece]) -> list[Event]:
        """The events of more pieces."""
        events = []
        for kind, text, _ in pieces:
            if kind == "call" or (kind in ("content", "reasoning") and kind != self.kind):
                events += [*self.close(), *self.opened(kind, text if kind == "call" else "")]
                self.kind = kind
            if kind != "call":
                self.said += text
                events += self.added(text)
            if kind == "arguments":
                events += self.close()
        return events

    def close(self) -> list[Event]:
        """The events that end the open part, if there is one."""
        kind, text, self.kind, self.said = self.kind, self.said, "", ""
        return self.closed(kind, text) if kind else []

    def take(self, done: Completion, reader: Reader) -> None:
        """Read a whole answer."""
        self.push([*reader.push(done.text), *reader.end()])
        self.close()

    @abstractmethod
    def opened(self, kind: str, name: str) -> list[Event]:
        """The events that begin a part. name: the function's, if it is a call."""

    @abstractmethod
    def added(self, text: str) -> list[Event]:
        """The events of more text of the open part."""

    @abstractmethod
    def closed(self, kind: str, text: str) -> list[Event]:
        """The events that end a part with all its text."""


class Quiet(Exception):
    """A stream has been silent for so long that it must send a sign of life."""


class Silence:
    """Tells when a stream has sent nothing for `PING_SECONDS`. Has one timer a stream, which tokens do not restart.

    tell  called after each such silence."""

    def __init__(self, tell: Callable[[], None]):
        self._loop, self._tell = asyncio.get_running_loop(), tell
        self.end()
        self._look()

    def end(self) -> None:
        """Note that something is sent now."""
        self._since = self._loop.time()

    def _look(self) -> None:
        if self._loop.time() >= self._since + PING_SECONDS:
            self._tell()
            self.end()
        self._timer = self._loop.call_at(self._since + PING_SECONDS, self._look)

    def close(self) -> None:
        """Tell no more."""
        self._timer.cancel()


class Merged:
    """Deltas of several jobs as they come.
    Iterating gives (number of the job, delta), and (0, None) after a long `silence`."""

    def __init__(self, jobs: Sequence[Job]):
        self._jobs, self._queue = jobs, asyncio.Queue[tuple[int, Delta | Exception | None]]()
        self.silence = Silence(self._quiet)

    def _quiet(self) -> None:
        if len(self._jobs) == 1:
            self._jobs[0].put(Quiet())
        else:
            self._queue.put_nowait((0, Quiet()))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta | None]]:
        tasks = [asyncio.create_task(self._forward(i, job)) for i, job in enumerate(self._jobs) if len(self._jobs) > 1]
        left = len(self._jobs)
        try:
            while left:
                i, item = await self._queue.get() if tasks else (0, await self._only())
                if isinstance(item, Quiet):
                    yield 0, None
                elif isinstance(item, Exception):
                    raise item
                elif item is None:
                    left -= 1
                else:
                    yield i, item
        finally:
            for task in tasks:
                task.cancel()

    async def _only(self) -> Delta | Exception | None:
        try:
            return await self._jobs[0].get()
        except Quiet as quiet:
            return quiet

    async def _forward(self, i: int, job: Job) -> None:
        try:
            async for delta in job:
                self._queue.put_nowait((i, delta))
            self._queue.put_nowait((i, None))
        except Exception as error:
            self._queue.put_nowait((i, error))


def _show_progress(jobs: Sequence[Job]) -> None:
    """Write a line to the server's log for each prompt that is not read yet."""
    for job in jobs:
        if job.row is None or job.row.slot < 0:
            serving.info("a prompt of %d tokens waits", len(job.prompt))
        elif not job.row.is_decoding:
            serving.info("%d of %d tokens of a prompt read", job.row.cached, job.row.prompt_length)


def _plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the content of each as one text. Raises Refused for other content."""
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise Refused(f"messages.{i}: role is missing or no text", "messages")
        try:
            given = {name: value for name, value in message.items() if value is not None}
            if "reasoning" in given:  # Newer clients use this name.
                given.setdefault("reasoning_content", given.pop("reasoning"))
            plain.append({**given, "content": text_of(message.get("content"))})
        except ValueError as error:
            raise Refused(f"messages.{i}: {error}", "messages") from None
    return plain


def only_echo(request: Common) -> bool:
    """Whether a request wants its prompt back and no answer."""
    return isinstance(request, TextRequest) and request.echo and request.max_tokens == 0 and not request.stream
