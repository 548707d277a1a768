"""The routes: OpenAI's chat and text completions, models, tokens, health, metrics, and a page to watch.

    app = create_app(worker, Settings(model="demo", prefix="paceline"))

Whatever is wrong with a request is an error object with one line; a request that fails fails alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.resources import files
from time import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from paceline import __version__
from paceline.completion import Completion
from paceline.errors import PacelineError
from paceline.sampling import SamplingParams
from paceline.serve import reading
from paceline.serve import tools as tool
from paceline.serve.answers import Echo, Frame
from paceline.serve.ending import CutOff
from paceline.serve.fields import ChatRequest, Common, DetokenizeRequest, TextRequest, TokenizeRequest, Tool
from paceline.serve.guard import Gone, Guard, RequestFailed, Settings, add_errors
from paceline.serve.log import RequestLog
from paceline.serve.metrics import Metrics
from paceline.serve.scoring import prompt_logprobs
from paceline.serve.streams import Style, stream
from paceline.serve.structure import Grammars
from paceline.serve.worker import Job, Unavailable, Worker

log = logging.getLogger("paceline")


class Server:
    """What the routes share."""

    def __init__(self, worker: Worker, settings: Settings, requests: RequestLog | None = None):
        self.worker, self.settings, self.log = worker, settings, requests
        self.engine = worker.engine
        assert self.engine.tokenizer is not None
        self.tokenizer = self.engine.tokenizer
        target = self.engine.target
        self.grammars = Grammars(
            self.tokenizer, target.vocab_size, target.eos_token_ids, white_space=settings.json_whitespace
        )
        self.formats = reading.tool_formats(settings.tool_parser)
        self.marks = reading.reasoning_marks(settings.reasoning_parser, self.tokenizer.chat_template)
        self.tokenizer.show(reading.all_marks(self.formats, self.marks))
        self.metrics = Metrics(worker, settings.prefix)

    def check_model(self, model: str | None) -> None:
        """PacelineError for a model that is not here."""
        if model not in (None, self.settings.model):
            raise PacelineError(f"model is {model!r}; this server has {self.settings.model!r}")

    def check(self, request: Common) -> None:
        """PacelineError for a model or drafter that is not here."""
        self.check_model(request.model)
        if request.draft is not None and request.draft not in self.settings.drafts:
            raise PacelineError(f"draft is {request.draft!r}; requests may choose {', '.join(self.settings.drafts)}")

    def prompt_of(self, request: ChatRequest) -> list[int]:
        """Token ids of a conversation and its tools."""
        tools = tool.chosen(request)
        options = {**(request.chat_template_kwargs or {}), **tool.thinking(request, self.tokenizer.chat_template)}
        reads_tools = "tools" in self.tokenizer.chat_template
        messages = tool.history([_plain(message) for message in request.messages], reads_tools)
        if tools and reads_tools:
            options["tools"] = [one.model_dump(exclude_none=True) for one in tools]
        elif tools:
            messages = [{"role": "system", "content": tool.described(tools)}, *messages]
        self.tokenizer.refuse_long(messages, self.engine.target.max_context)  # megabytes would hold up everybody
        return self.tokenizer.encode_chat(messages, **options)

    def reasoning_of(self, prompt: list[int]) -> tuple[tuple[str, str] | None, bool]:
        """What begins and ends the reasoning of an answer, None where there can be none, and whether the prompt has
        begun it."""
        if self.marks is None:
            return None, False
        end = str(self.tokenizer.inner.decode(prompt[-16:])).rstrip()
        return (None if end.endswith(self.marks[1]) else self.marks), end.endswith(self.marks[0])

    def reader(self, request: ChatRequest, prompt: list[int]) -> reading.Reader:
        """What reads one answer to a chat."""
        tools = tool.chosen(request)
        formats = self.formats if tools and not request.must_call else ()
        if tools and request.is_constrained:
            formats = (*formats, reading.BARE)
        names, most = [one.function.name for one in tools], 1 if request.parallel_tool_calls is False else None
        marks, inside = self.reasoning_of(prompt)
        return reading.Reader(formats, names, marks, inside=inside, most=most, strict=self.strict(tools))

    def params(self, request: Common, prompt: list[int], logprobs: int | None) -> SamplingParams:
        """The engine's parameters; every one that a grammar or a prediction changes among them."""
        room = max(self.engine.target.max_context - len(prompt), 1)
        more: dict[str, Any] = {"logprobs": logprobs, "grammar": self.grammar(request, prompt)}
        if request.prediction is not None:
            expected = request.prediction.text
            self.tokenizer.refuse_long(expected, self.engine.target.max_context)
            more["prediction"] = tuple(self.tokenizer.encode_text(expected))
        return request.sampling(room, **more)

    def grammar(self, request: Common, prompt: list[int]) -> Any:
        """A grammar of its own for each answer, or None. That of a chat begins after the reasoning."""
        grammar = self._grammar(request)
        marks, inside = self.reasoning_of(prompt) if isinstance(request, ChatRequest) else (None, False)
        return self.grammars.after_reasoning(grammar, marks, inside) if grammar and marks else grammar

    def _grammar(self, request: Common) -> Any:
        tools = tool.chosen(request) if isinstance(request, ChatRequest) else []
        if isinstance(request, ChatRequest) and request.must_call:
            return self.grammars.json_schema(tool.schema(tools))
        wanted = request.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return self.grammars.json_object()
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise PacelineError("response_format is json_schema, and json_schema.schema is missing")
        if tools:
            return self.grammars.either(tool.schema(tools), wanted.json_schema.schema_)
        return self.grammars.json_schema(wanted.json_schema.schema_)

    def strict(self, tools: list[Tool]) -> reading.Strict:
        """By function, whether a call's arguments fit: of those that are to be kept to strictly."""
        functions = [one.function for one in tools if one.function.strict]
        return {f.name: partial(self.grammars.fits, f.parameters or {"type": "object"}) for f in functions}

    def submit(self, request: Common, prompt: list[int], logprobs: int | None) -> list[Job]:
        """One job for each of the n answers."""
        loop, jobs = asyncio.get_running_loop(), []
        try:
            for i in range(request.n):
                params = self.params(request, prompt, logprobs)
                if params.seed is not None:
                    params = replace(params, seed=params.seed + i)
                jobs.append(self.worker.submit(prompt, params, loop))
        except PacelineError:
            self.abort(jobs)
            raise
        return jobs

    def abort(self, jobs: list[Job]) -> None:
        """Give up what has not ended."""
        for job in jobs:
            self.worker.abort(job)

    async def finished(self, http: Request, jobs: list[Job]) -> list[Completion]:
        """The whole answers; Gone, and they are given up, if the client leaves first."""

        async def collect() -> list[Completion]:
            for job in jobs:
                async for _ in job:
                    pass
            return [job.completion for job in jobs]

        work = asyncio.create_task(collect())
        try:
            while not work.done():
                await asyncio.wait([work], timeout=0.5)
                if not work.done() and await http.is_disconnected():
                    raise Gone
            completions = work.result()
        except BaseException as error:
            self.abort(jobs)
            work.cancel()
            if isinstance(error, Unavailable):
                self.note(jobs)
            raise
        for done in completions:
            if done.finish_reason == "error":
                raise RequestFailed(done.error)
        self.note(jobs)
        return completions

    def note(self, jobs: list[Job]) -> None:
        """Write down what was asked and answered, once, if there is a log. A full disk costs the line, not the
        answer."""
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


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one text; PacelineError for what is no text."""
    content = message.get("content")
    if isinstance(content, list):
        kinds = {part.get("type") for part in content if isinstance(part, dict)}
        if kinds - {"text"}:
            raise PacelineError(
                f"messages: content of type {', '.join(sorted(map(str, kinds - {'text'})))} is not supported; give text"
            )
        content = "".join(str(part.get("text", "")) for part in content)
    return {**message, "content": content or ""}


# Routes --------------------------------------------------------------------------------------------------------------


def create_app(worker: Worker, settings: Settings, log: RequestLog | None = None) -> FastAPI:
    """The application."""
    server = Server(worker, settings, log)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(title="Paceline", version=__version__, lifespan=lifespan)
    app.state.server = server
    add_errors(app)
    app.add_middleware(Guard, settings=settings)
    app.add_middleware(CutOff)
    _completions(app, server)
    _facts(app, server)
    return app


def _completions(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions")
    async def chat(http: Request, request: ChatRequest) -> Response:
        """OpenAI's chat completions."""
        server.check(request)
        prompt = server.prompt_of(request)
        jobs = server.submit(request, prompt, (request.top_logprobs or 0) if request.logprobs else None)
        frame = Frame("chat.completion", server.settings.model, server.tokenizer)
        reader = partial(server.reader, request, prompt)
        if request.stream:
            style = Style(frame, request, prompt, reader, logprobs=request.logprobs, pieces=_pieces(http))
            return _events(server, jobs, style)
        done = await server.finished(http, jobs)
        choices = [
            frame.message(i, one, reader(), logprobs=request.logprobs, ids=request.return_token_ids)
            for i, one in enumerate(done)
        ]
        return JSONResponse(_with_ids(frame.whole(choices, done, _predicted(jobs)), request, prompt))

    @app.post("/v1/completions")
    async def text(http: Request, request: TextRequest) -> Response:
        """OpenAI's text completions, with the prompt's own log-probabilities for echo."""
        server.check(request)
        prompts = _prompts(server, request)
        if request.stream and len(prompts) > 1:
            raise PacelineError("stream takes one prompt, and there are several; send them one by one")
        frame = Frame("text_completion", server.settings.model, server.tokenizer, "cmpl")
        logprobs = request.logprobs is not None
        if request.stream:
            echo = await _echo(server, request, prompts[0])
            jobs = server.submit(request, prompts[0], request.logprobs)
            style = Style(frame, request, prompts[0], logprobs=logprobs, echo=echo, pieces=_pieces(http))
            return _events(server, jobs, style)
        choices: list[dict[str, Any]] = []
        every: list[Completion] = []
        submitted = _submitted(server, request, prompts)
        try:
            for jobs, prompt in zip(submitted, prompts, strict=True):
                done = await server.finished(http, jobs) if jobs else [_nothing(prompt)]
                echo = await _echo(server, request, prompt)
                for one in done:
                    choices.append(
                        frame.text(
                            len(choices), one, prompt, logprobs=logprobs, ids=request.return_token_ids, echo=echo
                        )
                    )
                every += done
        except Unavailable:
            server.note([job for jobs in submitted for job in jobs])
            raise
        finally:  # where one fails or the client leaves, nobody waits for the others
            server.abort([job for jobs in submitted for job in jobs])
        body = frame.whole(choices, every)
        body["usage"]["prompt_tokens"] = sum(map(len, prompts))
        body["usage"]["total_tokens"] = body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
        return JSONResponse(_with_ids(body, request, prompts[0]))


def _submitted(server: Server, request: TextRequest, prompts: list[list[int]]) -> list[list[Job]]:
    """The jobs of all prompts at once, so that they share the batch; none where only the prompt is wanted back."""
    made: list[list[Job]] = []
    try:
        for prompt in prompts:
            only_echo = request.max_tokens == 0 and request.echo
            made.append([] if only_echo else server.submit(request, prompt, request.logprobs))
    except PacelineError:
        server.abort([job for jobs in made for job in jobs])
        raise
    return made


def _prompts(server: Server, request: TextRequest) -> list[list[int]]:
    """Token ids of every prompt of a text completion."""
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise PacelineError("prompt is empty; give a text, token ids, or a list of them")
    return [server.engine.encode(prompt).tolist() for prompt in given]


async def _echo(server: Server, request: TextRequest, prompt: list[int]) -> Echo | None:
    if not request.echo:
        return None
    text = server.tokenizer.decode(prompt)
    if request.logprobs is None:
        return Echo(text, [])
    top = request.logprobs
    return Echo(
        text, await server.worker.call(lambda engine: prompt_logprobs(engine.target, engine.encode(prompt), top))
    )


def _nothing(prompt: list[int]) -> Completion:
    from paceline.row import RowStats

    return Completion(0, "", [], len(prompt), "length", 0.0, RowStats(), [])


def _predicted(jobs: list[Job]) -> int:
    return len(jobs[0].params.prediction)


def _pieces(http: Request) -> bool:
    return http.headers.get("x-paceline-pieces") == "1"


def _with_ids(body: dict[str, Any], request: Common, prompt: list[int]) -> dict[str, Any]:
    return body | ({"prompt_token_ids": prompt} if request.return_token_ids else {})


def _events(server: Server, jobs: list[Job], style: Style) -> StreamingResponse:
    return StreamingResponse(stream(server, jobs, style), media_type="text/event-stream")


def _facts(app: FastAPI, server: Server) -> None:
    settings, engine = server.settings, server.engine

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        facts = {"id": settings.model, "object": "model", "created": int(time()), "owned_by": "paceline"}
        return {"object": "list", "data": [facts | {"max_model_len": engine.target.max_context}]}

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        server.check_model(request.model)
        if request.messages is not None:
            tokens = await asyncio.to_thread(server.tokenizer.encode_chat, request.messages)
        else:
            plain = request.add_special_tokens is False
            encode = server.tokenizer.encode_text if plain else server.tokenizer.encode
            tokens = await asyncio.to_thread(encode, request.prompt or "")
        return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.target.max_context}

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, Any]:
        server.check_model(request.model)
        if any(not 0 <= token < engine.target.vocab_size for token in request.tokens):
            raise PacelineError(f"tokens has an id outside the model's 0 to {engine.target.vocab_size - 1}")
        return {"prompt": str(server.tokenizer.inner.decode(request.tokens))}

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken."""
        server.worker.check()
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """What the page shows."""
        return {"model": settings.model, "drafts": list(settings.drafts), **server.metrics.now()}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return (files("paceline.serve") / "page.html").read_text("utf-8")
