"""The routes: OpenAI's chat and text completions, models, tokens, health, metrics, and a page to watch.

Whatever is wrong with a request is an error object with one line; a request that fails fails alone."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.resources import files
from itertools import zip_longest
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from paceline import __version__
from paceline.core.request import Completion, RowStats
from paceline.core.sampling import SamplingParams, TokenLogprob
from paceline.errors import PacelineError, shortened
from paceline.serve import fields, reading
from paceline.serve import tools as tool
from paceline.serve.fields import ChatRequest, Common, Conversation, TextRequest, Tool, text_of
from paceline.serve.guard import Bodies, Gone, Guard, add_errors, describe_bodies, shown_drafts
from paceline.serve.infill import InfillRequest, add_infill, filling
from paceline.serve.items import ItemsRequest, add_responses
from paceline.serve.listener import CutOff
from paceline.serve.metrics import Metrics, RequestLog
from paceline.serve.responses import Frame, Style, closed, stream
from paceline.serve.settings import Refused, Settings
from paceline.serve.structure import Grammars
from paceline.workbench.tool_calls import prepared
from paceline.workbench.worker import EngineFailed, Job, Unavailable, Worker

if TYPE_CHECKING:
    from paceline.serve.audit import Audit

log = logging.getLogger("paceline.request_log")

MANY = 200  # log-probabilities that are written down in a thread


class Prompted(NamedTuple):
    """A prompt, the parameters of each of its answers, and its text where that is to come back."""

    prompt: list[int]
    params: list[SamplingParams]
    text: str | None = None


class Server:
    """What the routes share."""

    def __init__(self, worker: Worker, settings: Settings, requests: RequestLog | None = None):
        self.worker, self.settings, self.log = worker, settings, requests
        self.engine = worker.engine
        assert self.engine.tokenizer is not None
        self.tokenizer = self.engine.tokenizer
        self.tokenizer.name = settings.model  # its errors go to strangers, who are not to read a path
        self.tokenizer.reads_marks = settings.parse_marks
        self.defaults = settings.defaults(self.engine.target.sampling)
        target = self.engine.target
        self.grammars = Grammars(
            self.tokenizer, target.vocab_size, target.eos_token_ids, white_space=settings.json_whitespace
        )
        self.formats = reading.tool_formats(settings.tool_parser)
        self.marks = reading.reasoning_marks(settings.reasoning_parser, self.tokenizer.chat_template)
        self.tokenizer.show(reading.all_marks(self.formats, self.marks))
        self.metrics = Metrics(worker, settings.metrics_prefix)
        self.audit = audited(worker, settings, self.metrics) if settings.audit else None
        self.bodies = Bodies(settings)
        self.drafts = shown_drafts(settings.drafts)

    def check_model(self, model: str | None) -> None:
        """Refused for a model that is not here."""
        if model not in (None, self.settings.model):
            what = f"model is {shortened(repr(model))}; this server has {self.settings.model!r}"
            raise Refused(what, "model", 404, "model_not_found")

    def check(self, request: Common) -> None:
        """Refused for a model or drafter that is not here. The drafter becomes its whole spec."""
        self.check_model(request.model)
        if request.draft is None:
            return
        request.draft = self.drafts.get(request.draft, request.draft)
        if request.draft not in self.settings.drafts:
            choice = ", ".join(self.drafts)
            raise Refused(f"draft is {shortened(repr(request.draft))}; requests may choose {choice}", "draft")

    def prompt_of(self, request: Conversation, whole: bool = True) -> list[int]:
        """Token ids of a conversation and its tools. whole: it has to fit the context."""
        tools = tool.chosen(request)
        for one in tools:  # a schema that cannot be kept to is refused before there is an answer
            schema = tool.parameters(one)
            if one.function.strict:
                self.grammars.check(schema)
        options = dict(request.chat_template_kwargs or {})
        tool.check_variables(self.tokenizer, options, tools=bool(tools))
        options |= tool.thinking(request, self.tokenizer.chat_template)
        given = [one.model_dump(exclude_none=True) for one in tools]
        messages, inputs = prepared(_plain(request.messages), given, "tools" in self.tokenizer.chat_template)
        if whole:
            self.tokenizer.refuse_long(messages, self.engine.target.max_context)  # megabytes would hold up everybody
        return self.tokenizer.encode_chat(messages, **options, **inputs, **request.turns)

    def reasoning_of(self, request: ChatRequest, prompt: list[int]) -> tuple[tuple[str, str] | None, bool]:
        """(marks of an answer's reasoning, None where there can be none; whether the prompt has begun it)."""
        if self.marks is None:
            return None, False
        if request.continue_final_message and (said := text_of(request.messages[-1].get("content"))):
            inside = self.marks[1] not in said and said.lstrip().startswith(self.marks[0])
            return (self.marks if inside else None), inside
        end = str(self.tokenizer.inner.decode(prompt[-16:])).rstrip()
        return (None if end.endswith(self.marks[1]) else self.marks), end.endswith(self.marks[0])

    def reader(self, request: ChatRequest, prompt: list[int]) -> reading.Reader:
        """A reader of one answer to a chat."""
        tools = tool.chosen(request)
        formats = self.formats if tools and not request.must_call else ()
        if tools and request.is_constrained:
            formats = (*formats, reading.BARE)
        names = {one.function.name: one.function.parameters for one in tools}
        most = 1 if request.parallel_tool_calls is False else None
        marks, inside = self.reasoning_of(request, prompt)
        return reading.Reader(formats, names, marks, inside=inside, most=most, strict=self.strict(tools))

    def strict(self, tools: list[Tool]) -> reading.ArgumentChecks:
        """By name of the functions that are strict: whether arguments fit the function's schema."""
        strict = [(one.function.name, tool.parameters(one)) for one in tools if one.function.strict]
        return {name: partial(self.grammars.fits, schema) for name, schema in strict}

    def params(self, request: Common, prompt: list[int], logprobs: int | None) -> SamplingParams:
        """The engine's parameters, with the request's grammar and prediction."""
        most = max(self.engine.longest - len(prompt), 1)
        more: dict[str, Any] = {"logprobs": logprobs, "grammar": self.grammar(request, prompt)}
        if request.prediction is not None:
            expected = str(request.prediction.content)
            self.tokenizer.refuse_long(expected, self.engine.target.max_context)
            more["prediction"] = tuple(self.tokenizer.encode_text(expected))
            if (size := len(more["prediction"])) >= self.engine.target.max_context:
                what = f"prediction has {size} tokens, and this model's context holds {self.engine.target.max_context}"
                raise Refused(f"{what}; shorten it", "prediction", code="context_length_exceeded")
        return request.sampling(most, self.defaults, **more)

    def grammar(self, request: Common, prompt: list[int]) -> Any:
        """A new grammar for an answer, or None. A chat's grammar begins after the reasoning."""
        grammar, schema = self._grammar(request)
        if request.on_length == "close":
            most = max(self.engine.longest - len(prompt), 1)
            grammar = self.grammars.closing(grammar, schema, min(request.most_tokens or most, most))
        marks, inside = self.reasoning_of(request, prompt) if isinstance(request, ChatRequest) else (None, False)
        return self.grammars.after_reasoning(grammar, marks, inside) if grammar and marks else grammar

    def _grammar(self, request: Common) -> tuple[Any, Any]:
        """A grammar and its schema, or schemas; None for any text."""
        tools = tool.chosen(request) if isinstance(request, ChatRequest) else []
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

    def answers_of(self, request: Common, prompt: list[int], logprobs: int | None) -> list[SamplingParams]:
        """Parameters of each of the n answers. A prompt that is only scored needs one; one that comes back, none."""
        if _only_echo(request):
            if logprobs is None:
                return []
            request = request.model_copy(update={"max_tokens": 1, "n": 1})
        first = self.params(request, prompt, logprobs)
        if isinstance(request, TextRequest) and request.echo:
            first = replace(first, prompt_logprobs=logprobs)
        self.engine.check(prompt, first)
        seeds = [None if first.seed is None else first.seed + i for i in range(1, request.n)]
        return [first, *(replace(first, grammar=self.grammar(request, prompt), seed=seed) for seed in seeds)]

    def check_count(self, answers: int) -> None:
        """Refused for more answers than can ever wait."""
        if answers > (most := self.worker.most_waiting + self.engine.max_batch):
            raise Refused(f"{answers:,} answers at once are asked for, and this server takes at most {most:,}")

    def submit(self, http: Request, request: Common, prompted: Sequence[Prompted]) -> list[list[Job]]:
        """A job for every answer to every prompt; none if not all of them may wait."""
        loop, jobs, client = asyncio.get_running_loop(), list[list[Job]](), http.state.client
        whose = "" if self.settings.share_prefixes else client, request.cache_salt or ""
        salt = sha256("/".join(whose).encode("utf-8", "surrogatepass")).hexdigest() if any(whose) else ""
        try:
            for one in prompted:
                jobs.append([])
                for params in one.params:
                    params, private = replace(params, cache_salt=salt), request.store is False
                    jobs[-1].append(self.worker.submit(one.prompt, params, loop, client, private))
        except PacelineError:
            self.abort([job for some in jobs for job in some])
            raise
        return jobs

    def abort(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.worker.abort(job)

    async def ask(self, http: Request, request: ChatRequest, logprobs: int | None) -> tuple[list[int], list[Job]]:
        """The prompt of a chat, and a job for each of its answers."""
        self.check(request)

        def prepare() -> list[Prompted]:
            self.check_count(request.n)
            prompt = self.prompt_of(request)
            return [Prompted(prompt, self.answers_of(request, prompt, logprobs))]

        (prompted,) = await _prepared(self.bodies, http, request, prepare)
        (jobs,) = self.submit(http, request, [prompted])
        return prompted.prompt, jobs

    async def finished(self, http: Request, jobs: list[Job]) -> list[Completion]:
        """The whole answers, or what there is of them when the server must leave. If the client leaves first they are
        aborted, and Gone is raised."""

        async def collect() -> list[Completion]:
            for job in jobs:
                try:
                    async for _ in job:
                        pass
                except Unavailable:
                    if self.worker.error is not None or not any(job.completion.tokens for job in jobs):
                        raise
                    self.abort(jobs)
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
                raise EngineFailed(done.error)
        self.note(jobs)
        return completions

    async def chat(self, http: Request, request: ChatRequest) -> Response:
        """The response to a chat, whole or as a stream."""
        prompt, jobs = await self.ask(http, request, (request.top_logprobs or 0) if request.logprobs else None)
        frame = Frame("chat.completion", self.settings.model, self.tokenizer)
        reader = partial(self.reader, request, prompt)
        style = Style(frame, request, prompt, reader, logprobs=request.logprobs, pieces=_pieces(http))
        return await self.reply(http, [style], [jobs])

    async def text(self, http: Request, request: TextRequest) -> Response:
        """The response to a text completion, whole or as a stream."""
        self.check(request)
        prompted = await _prepared(self.bodies, http, request, lambda: _of_text(self, request))
        frame = Frame("text_completion", self.settings.model, self.tokenizer)
        logprobs, pieces = request.logprobs is not None, _pieces(http)
        styles = [
            Style(frame, request, one.prompt, logprobs=logprobs, pieces=pieces, echo=one.text) for one in prompted
        ]
        return await self.reply(http, styles, self.submit(http, request, prompted))

    async def reply(self, http: Request, styles: Sequence[Style], submitted: Sequence[list[Job]]) -> Response:
        """The response of the jobs of every prompt, each in its style, whole or as a stream."""
        frame, request = styles[0].frame, styles[0].request
        jobs = [job for some in submitted for job in some]
        if request.stream:
            each = [style for style, some in zip(styles, submitted, strict=True) for _ in some]
            return StreamingResponse(stream(jobs, each, self.note, self.abort), media_type="text/event-stream")
        every: list[tuple[Style, Completion, list[TokenLogprob | None], dict[str, Any]]] = []
        try:
            for style, some in zip(styles, submitted, strict=True):
                completions = await self.finished(http, some)
                if _only_echo(request):  # of which there may be no job
                    completions = [Completion(0, "", [], len(style.prompt), "length", 0.0, RowStats(), [])]
                for done, job in zip_longest(completions, some):
                    scored = job.row.prompt_logprobs if job and job.row else []
                    every.append((style, done, scored, closed(job) if job else {}))
        except Unavailable:
            self.note(jobs)
            raise
        finally:  # where one fails or the client leaves, nobody waits for the others
            self.abort(jobs)

        def body() -> Response:
            choices = [style.whole(i, done, scored) | end for i, (style, done, scored, end) in enumerate(every)]
            prompts = sum(len(style.prompt) for style in styles)
            predicted = sum(len(job.params.prediction) for job in jobs[:1])
            whole = frame.whole(choices, [done for _, done, *_ in every], prompt=prompts, predicted=predicted)
            ids = {"prompt_token_ids": styles[0].prompt} if request.return_token_ids else {}
            return JSONResponse(whole | ids)

        top = max((job.params.logprobs or 0 for job in jobs[:1]), default=0)
        entries = sum(len(done.logprobs) + len(scored) for _, done, scored, _ in every) * (1 + top)
        return body() if entries < MANY else await asyncio.to_thread(body)

    def note(self, jobs: list[Job]) -> None:
        """Write each job to the log, once, if there is a log. A full disk costs the line, not the answer."""
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


def _plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is one text; Refused for what is no text."""
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise Refused(f"messages.{i}: role is missing or no text", "messages")
        try:
            given = {name: value for name, value in message.items() if value is not None}
            if "reasoning" in given:  # as newer clients have it
                given.setdefault("reasoning_content", given.pop("reasoning"))
            plain.append({**given, "content": text_of(message.get("content"))})
        except ValueError as error:
            raise Refused(f"messages.{i}: {error}", "messages") from None
    return plain


def audited(worker: Worker, settings: Settings, metrics: Metrics) -> "Audit":
    """An audit of what the worker answers, while it has nothing to do."""
    from paceline.serve.audit import Audit

    audit = Audit(
        worker.engine, settings.audit, settings.audit_tokens, texts=settings.audit_texts,
        prefix=settings.metrics_prefix,
    )  # fmt: skip

    def ended(job: Job) -> None:
        metrics.end(job)
        if job.row is not None and not job.private:
            audit.keep(job.row)

    metrics.registry.register(audit)
    worker.on_end, worker.on_idle = ended, audit.step
    return audit


def create_app(worker: Worker, settings: Settings, log: RequestLog | None = None) -> FastAPI:
    """The routes of a server, over a worker that runs the engine. log: keeps answered requests, as token ids."""
    server = Server(worker, settings, log)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with server.metrics.counting():
            yield
            await asyncio.to_thread(worker.stop)

    app = FastAPI(
        title="Paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.server = server
    add_errors(app)
    app.add_middleware(Guard, settings=settings)
    if origins := settings.origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(CutOff)
    _completions(app, server)
    add_responses(app, server)
    add_infill(app, server)
    _facts(app, server)
    texts: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": TextRequest}
    texts |= {"/v1/responses": ItemsRequest, "/infill": InfillRequest}
    describe_bodies(app, {**texts, "/tokenize": fields.TokenizeRequest, "/detokenize": fields.DetokenizeRequest})
    return app


def _completions(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions")
    async def chat(http: Request, request: ChatRequest = Depends(server.bodies.of(ChatRequest))) -> Response:
        """OpenAI's chat completions."""
        return await server.chat(http, request)

    @app.post("/v1/completions")
    async def text(http: Request, request: TextRequest = Depends(server.bodies.of(TextRequest))) -> Response:
        """OpenAI's text completions, with the prompt's own log-probabilities for echo."""
        return await server.text(http, request)


async def _prepared(
    bodies: Bodies, http: Request, request: Common, work: Callable[[], list[Prompted]]
) -> list[Prompted]:
    """What a request asks the engine for, made in a thread where that may take long."""
    shaped = any(getattr(request, name, None) for name in ("response_format", "tools", "chat_template_kwargs"))
    return await bodies.off_loop(work) if shaped else await bodies.worked(http.state.size, work)


def _of_text(server: Server, request: TextRequest) -> list[Prompted]:
    """Every prompt of a text completion, and how it is answered."""
    request = filling(server.tokenizer, request, server.engine.longest)
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise PacelineError("prompt is empty; give a text, token ids, or a list of them")
    server.check_count(len(given) * request.n)
    prompted = []
    for prompt in given:
        if isinstance(prompt, str) and not request.add_special_tokens:
            server.tokenizer.refuse_long(prompt, server.engine.target.max_context)
            prompt = server.tokenizer.encode_text(prompt)
        ids = server.engine.encode(prompt).tolist()
        text = server.tokenizer.decode(ids) if request.echo else None
        prompted.append(Prompted(ids, server.answers_of(request, ids, request.logprobs), text))
    return prompted


def _only_echo(request: Common) -> bool:
    """Whether a request wants its prompt back and no answer."""
    return isinstance(request, TextRequest) and request.echo and request.max_tokens == 0 and not request.stream


def _pieces(http: Request) -> bool:
    return http.headers.get("x-paceline-pieces") == "1"


def _facts(app: FastAPI, server: Server) -> None:
    settings, engine = server.settings, server.engine

    facts = {"id": settings.model, "object": "model", "created": int(time()), "owned_by": "paceline"}
    facts["max_model_len"] = engine.target.max_context

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [facts]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return facts

    @app.post("/tokenize")
    async def tokenize(
        http: Request, request: fields.TokenizeRequest = Depends(server.bodies.of(fields.TokenizeRequest))
    ) -> Response:
        server.check_model(request.model)

        def body() -> Response:
            if request.prompt is None:
                size = sum(len(str(message)) for message in request.messages)
                settings.limits.check_size("text", "messages", size)
                tokens = server.prompt_of(request, whole=False)
            else:
                settings.limits.check_size("text", "prompt", len(request.prompt))
                plain = request.add_special_tokens is False
                tokens = (server.tokenizer.encode_text if plain else server.tokenizer.encode)(request.prompt)
            facts = {"tokens": tokens, "count": len(tokens), "max_model_len": engine.target.max_context}
            return JSONResponse(facts)

        return await server.bodies.worked(http.state.size, body)

    @app.post("/detokenize")
    async def detokenize(
        http: Request, request: fields.DetokenizeRequest = Depends(server.bodies.of(fields.DetokenizeRequest))
    ) -> Response:
        server.check_model(request.model)

        def body() -> Response:
            settings.limits.check_size("ids", "tokens", len(request.tokens))
            if any(not 0 <= token < engine.target.vocab_size for token in request.tokens):
                raise PacelineError(f"tokens has an id outside the model's 0 to {engine.target.vocab_size - 1}")
            return JSONResponse({"prompt": str(server.tokenizer.inner.decode(request.tokens))})

        return await server.bodies.worked(http.state.size, body)

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
        return {"model": settings.model, "drafts": list(server.drafts), **server.metrics.now()}

    if (audit := server.audit) is not None:

        @app.get("/audit")
        async def found() -> dict[str, Any]:
            """What was found in the answers that were scored again."""
            return audit.now()

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return (files("paceline.serve") / "page.html").read_text("utf-8")

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> str:
        return (files("paceline.serve") / "docs.html").read_text("utf-8")
