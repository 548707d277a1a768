"""The routes: OpenAI's chats, texts and responses, Anthropic's messages, Ollama's chats, tokens, health,
and a web page.

Every error is an object with one line, and a failed request harms no other."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from paceline import __version__
from paceline.errors import PacelineError
from paceline.serve import fields
from paceline.serve.chats import Chats
from paceline.serve.fields import ChatRequest, Common, TextRequest
from paceline.serve.guard import Bodies, Guard, add_errors, describe_bodies, while_there, who
from paceline.serve.infill import InfillRequest
from paceline.serve.items import Answer, ItemsRequest
from paceline.serve.listener import CutOff
from paceline.serve.messages import Message, MessagesRequest
from paceline.serve.metrics import Metrics, RequestLog
from paceline.serve.ollama import VERSION, Lines, OllamaRequest, ShowRequest, listed, shown
from paceline.serve.prepare import Prompted
from paceline.serve.responses import Chunks, styles_of, whole
from paceline.serve.settings import Settings
from paceline.serve.worker import Job, Worker

if TYPE_CHECKING:
    from paceline.serve.audit import Audit


EVENTS = "text/event-stream"


def create_app(worker: Worker, settings: Settings, log: RequestLog | None = None) -> FastAPI:
    """Make the server's app, over a worker that runs the engine. log: keeps answered requests, as token ids."""
    chats, metrics, bodies = Chats(worker, settings, log), Metrics(worker, settings.metrics_prefix), Bodies(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with metrics.counting():
            await asyncio.to_thread(chats.tokenizer.get_ready)
            yield
            await asyncio.to_thread(worker.stop)

    app = FastAPI(
        title="Paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    add_errors(app)
    app.add_middleware(Guard, settings=settings)
    if origins := settings.origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(CutOff)
    _answers(app, chats, bodies)
    _tokens(app, chats, bodies)
    _models(app, chats, bodies)
    _watching(app, chats, metrics, audited(worker, settings, metrics) if settings.audit else None)
    texts: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": TextRequest}
    texts |= {"/v1/responses": ItemsRequest, "/v1/messages": MessagesRequest}
    texts |= {"/v1/messages/count_tokens": MessagesRequest, "/infill": InfillRequest}
    texts |= {"/api/chat": OllamaRequest, "/api/show": ShowRequest}
    describe_bodies(app, {**texts, "/tokenize": fields.TokenizeRequest, "/detokenize": fields.DetokenizeRequest})
    return app


def _answers(app: FastAPI, chats: Chats, bodies: Bodies) -> None:
    @app.post("/v1/chat/completions")
    async def chat(http: Request, request: ChatRequest = Depends(bodies.of(ChatRequest))) -> Response:
        """OpenAI's chat completions."""
        return await answer(http, request)

    @app.post("/v1/completions")
    async def text(http: Request, request: TextRequest = Depends(bodies.of(TextRequest))) -> Response:
        """OpenAI's text completions, with the prompt's own log-probabilities for echo."""
        return await answer(http, request)

    @app.post("/infill")
    async def infill(http: Request, wanted: InfillRequest = Depends(bodies.of(InfillRequest))) -> Response:
        """llama.cpp's fill in the middle, without streams."""
        began, most = perf_counter(), chats.engine.longest
        request = await bodies.worked(http, lambda: wanted.text(chats.tokenizer, most))
        done = await answer(http, request)
        return JSONResponse(wanted.answer(json.loads(bytes(done.body)), perf_counter() - began))

    async def answer(http: Request, request: Common) -> Response:
        prompted, submitted = await asked(http, request)
        styles = styles_of(chats, request, prompted, http.headers.get("x-paceline-pieces") == "1")
        if not request.stream:
            return await while_there(http, whole(chats, styles, submitted, JSONResponse))
        each = [style for style, some in zip(styles, submitted, strict=True) for _ in some]
        jobs = [job for some in submitted for job in some]
        readers = [style.reader() if style.reader else None for style in each]
        return StreamingResponse(chats.stream(jobs, readers, Chunks(each, jobs)), media_type=EVENTS)

    @app.post("/v1/responses")
    async def responses(http: Request, request: ItemsRequest = Depends(bodies.of(ItemsRequest))) -> Response:
        """OpenAI's responses: text, streams, functions and structured output. Nothing is kept."""
        chat = await bodies.worked(http, request.chat)
        (one,), (jobs,) = await asked(http, chat)
        return await formed(http, chat, one, jobs, Answer(chats, request))

    @app.post("/v1/messages")
    async def messages(http: Request, request: MessagesRequest = Depends(bodies.of(MessagesRequest))) -> Response:
        """Anthropic's messages: text, streams, thinking, tools and structured output."""
        chat = await bodies.worked(http, request.chat)
        (one,), (jobs,) = await asked(http, chat)
        return await formed(http, chat, one, jobs, Message(chats, chat, one.prompt))

    @app.post("/api/chat")
    async def lines(http: Request, request: OllamaRequest = Depends(bodies.of(OllamaRequest))) -> Response:
        """Ollama's chats: text, lines of JSON, thinking, tools and structured output."""
        chat = await bodies.worked(http, request.chat)
        (one,), (jobs,) = await asked(http, chat)
        return await formed(http, chat, one, jobs, Lines(chats), "application/x-ndjson")

    async def formed(
        http: Request, chat: ChatRequest, one: Prompted, jobs: list[Job], form: Answer | Message | Lines,
        media: str = EVENTS,
    ) -> Response:  # fmt: skip
        """The answer to a chat in another API's form."""
        assert one.reader is not None
        reader = one.reader()
        if chat.stream:
            return StreamingResponse(chats.stream(jobs, [reader], form), media_type=media)
        (done,) = await while_there(http, chats.finished(jobs))
        return JSONResponse(form.whole(done, reader))

    async def asked(http: Request, request: Common) -> tuple[list[Prompted], list[list[Job]]]:
        """The prompts of a request, and a job for each of their answers."""
        shaped = any(getattr(request, name, None) for name in ("response_format", "tools", "chat_template_kwargs"))
        work = partial(chats.prompted, request)
        prompted = await (bodies.off_loop(who(http), work) if shaped else bodies.worked(http, work))
        return prompted, chats.submit(request, prompted, http.state.client, http.headers.get("x-paceline-corpus"))


def _models(app: FastAPI, chats: Chats, bodies: Bodies) -> None:
    names = [name for name in (chats.settings.model, *chats.settings.also) if name != "*"]
    fixed = {"object": "model", "created": int(time()), "owned_by": "paceline"}
    facts = [{"id": name, **fixed, "max_model_len": chats.engine.longest} for name in names]

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": facts}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        chats.check_model(name)
        return next((one for one in facts if one["id"] == name), facts[0])

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """The models as Ollama lists them."""
        return {"models": [listed(name) for name in names]}

    @app.post("/api/show")
    async def show(request: ShowRequest = Depends(bodies.of(ShowRequest))) -> dict[str, Any]:
        """The model's abilities, for clients of Ollama."""
        chats.check_model(request.model)
        return shown(chats)

    @app.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}


def _tokens(app: FastAPI, chats: Chats, bodies: Bodies) -> None:
    limits = chats.settings.limits

    @app.post("/tokenize")
    async def tokenize(
        http: Request, request: fields.TokenizeRequest = Depends(bodies.of(fields.TokenizeRequest))
    ) -> Response:
        """The tokens of a text, or of messages through the chat template, as vLLM's route of this name."""
        chats.check_model(request.model)

        def body() -> Response:
            if request.prompt is None:
                size = sum(len(str(message)) for message in request.messages)
                limits.check_size("text", "messages", size)
                tokens = chats.prompt_of(request, chats.tools_of(request), whole=False)
            else:
                limits.check_size("text", "prompt", len(request.prompt))
                plain = request.add_special_tokens is False
                tokens = (chats.tokenizer.encode_text if plain else chats.tokenizer.encode)(request.prompt)
            facts = {"tokens": tokens, "count": len(tokens), "max_model_len": chats.engine.longest}
            return JSONResponse(facts)

        return await bodies.worked(http, body)

    @app.post("/v1/messages/count_tokens")
    async def count(http: Request, request: MessagesRequest = Depends(bodies.of(MessagesRequest))) -> dict[str, int]:
        """The number of tokens of Anthropic's messages as a prompt of this model."""

        def counted() -> int:
            chat = request.chat()
            chats.check_model(chat.model)
            return len(chats.prompt_of(chat, chats.tools_of(chat)))

        return {"input_tokens": await bodies.worked(http, counted)}

    @app.post("/detokenize")
    async def detokenize(
        http: Request, request: fields.DetokenizeRequest = Depends(bodies.of(fields.DetokenizeRequest))
    ) -> Response:
        """The text of tokens."""
        chats.check_model(request.model)

        def body() -> Response:
            limits.check_size("ids", "tokens", len(request.tokens))
            if any(not 0 <= token < chats.engine.target.vocab_size for token in request.tokens):
                raise PacelineError(f"tokens has an id outside the model's 0 to {chats.engine.target.vocab_size - 1}")
            return JSONResponse({"prompt": str(chats.tokenizer.inner.decode(request.tokens))})

        return await bodies.worked(http, body)


def _watching(app: FastAPI, chats: Chats, metrics: Metrics, audit: "Audit | None") -> None:
    @app.get("/health")
    async def health() -> Response:
        """Answer 200 while the server takes requests."""
        chats.worker.check()
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def counters() -> PlainTextResponse:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """Figures for the page."""
        return {"model": chats.settings.model, "drafts": list(chats.drafts), **metrics.now()}

    if audit is not None:

        @app.get("/audit")
        async def found() -> dict[str, Any]:
            """Findings of the audit."""
            return audit.now()

    @app.head("/", include_in_schema=False)
    async def here() -> Response:
        """Claude Code asks whether anybody is there."""
        return Response()

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return (files("paceline.serve") / "page.html").read_text("utf-8")

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> str:
        return (files("paceline.serve") / "docs.html").read_text("utf-8")


def audited(worker: Worker, settings: Settings, metrics: Metrics) -> "Audit":
    """Make an audit of the worker's answers, which runs while the worker is idle."""
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
