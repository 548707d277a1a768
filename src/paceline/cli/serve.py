"""`paceline serve`: an OpenAI-compatible server."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import interrupt
from paceline.cli import options
from paceline.errors import PacelineError
from paceline.jsonl import check_log
from paceline.serve.limits import Limits

DRAFTS = ("sam", "suffix", "prompt-lookup", "none")
"""What requests may choose beside the server's own: drafters that need no weights."""


def _limit(name: str) -> Any:
    return typer.Option(help=f"Most {Limits.described()[name]}.", min=1)


def serve(
    model: Annotated[str, typer.Argument(help="Folder or hub id of the model.")],
    draft: Annotated[str, typer.Option("--draft", "-d", help="Drafter of requests that name none.")] = "sam",
    allow_draft: Annotated[
        list[str] | None, typer.Option(help="Another drafter that requests may choose with their field draft.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; also PACELINE_API_KEY. None: anybody may.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name in answers; by default the folder's.")] = None,
    max_batch: Annotated[int, typer.Option(help="Requests answered at once.", min=1)] = 16,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more get 429.", min=1)] = 256,
    cache_memory: Annotated[str | None, typer.Option(help="Most memory for keys and values, such as 4GB.")] = None,
    tokenizer: options.TokenizerPath = None,
    dtype: options.Dtype = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    threads: options.Threads = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which an answer is ended where it is.", min=0.001)
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds that running answers get at shutdown.", min=0, max=1e6)] = 30.0,
    tool_parser: Annotated[
        str, typer.Option(help="How tool calls are read: auto (every format), hermes, json, llama3, mistral or none.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="Marks of reasoning: auto (by the chat template), think, mistral, seed or none.")
    ] = "auto",
    json_whitespace: Annotated[
        str,
        typer.Option(help="Between the parts of JSON: limited (a space, or a line break and indentation), any, none."),
    ] = "limited",
    protect_all: Annotated[
        bool, typer.Option("--protect-all", help="Ask for the key on every route but /health, the page among them.")
    ] = False,
    max_connections: Annotated[
        int, typer.Option(help="Open connections; one more closes the one that has waited longest to send.", min=2)
    ] = 1000,
    head_seconds: Annotated[float, typer.Option(help="Time for the headers of a request.", min=0.1)] = 10.0,
    body_seconds: Annotated[float, typer.Option(help="Time for the body of a request.", min=0.1)] = 60.0,
    max_body: Annotated[int, typer.Option(help="Most bytes of a request.", min=1)] = 4 << 20,
    max_messages: Annotated[int, _limit("messages")] = Limits.messages,
    max_parts: Annotated[int, _limit("parts")] = Limits.parts,
    max_prompts: Annotated[int, _limit("prompts")] = Limits.prompts,
    max_answers: Annotated[int, _limit("answers")] = Limits.answers,
    max_stops: Annotated[int, _limit("stops")] = Limits.stops,
    max_stop_length: Annotated[int, _limit("stop_length")] = Limits.stop_length,
    max_stop_ids: Annotated[int, _limit("stop_ids")] = Limits.stop_ids,
    max_logit_bias: Annotated[int, _limit("logit_bias")] = Limits.logit_bias,
    max_logprobs: Annotated[int, _limit("logprobs")] = Limits.logprobs,
    max_tools: Annotated[int, _limit("tools")] = Limits.tools,
    max_schema: Annotated[int, _limit("schema")] = Limits.schema,
    max_text: Annotated[int, _limit("text")] = Limits.text,
    max_ids: Annotated[int, _limit("ids")] = Limits.ids,
    max_values: Annotated[int, _limit("values")] = Limits.values,
    metrics_prefix: Annotated[
        str, typer.Option(help="Of the names in /metrics; vllm gives vLLM's names.")
    ] = "paceline",
    log: Annotated[
        Path | None,
        typer.Option(
            help="Append every prompt and answer to this JSON Lines file, as token ids; `paceline replay` reads it. "
            "It holds all that users said. Off by default.",
            callback=check_log,
        ),
    ] = None,
) -> int:
    """Serve a model with OpenAI's API: chat and text completions, streaming, tools, JSON schemas, Predicted Outputs.

    \b
    paceline serve models/demo --draft sam --port 8000
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello!"}]}' \\
         -H 'Content-Type: application/json'

    A page to watch it is at /, the API's description at /docs, counters at /metrics. Ctrl-C and SIGTERM let running
    answers end.
    """
    given = dict(locals())
    import uvicorn

    from paceline.draft.choice import Choice
    from paceline.draft.fallback import Fallback
    from paceline.draft.grammar import Forced
    from paceline.draft.prediction import Prediction
    from paceline.draft.registry import create
    from paceline.engine.engine import Engine
    from paceline.serve.app import Settings, create_app
    from paceline.serve.connections import limited, most_files
    from paceline.serve.ending import Ending
    from paceline.serve.log import RequestLog
    from paceline.serve.reading import described
    from paceline.serve.worker import Worker
    from paceline.target.load import tokenizer_for

    environment = os.environ.get("PACELINE_API_KEY")
    keys = tuple(api_key or ([] if environment is None else [environment]))
    names = tuple(dict.fromkeys([draft, *(allow_draft or ()), *DRAFTS]))
    settings = Settings(
        model=name or Path(model).expanduser().resolve().name,
        api_keys=keys,
        prefix=metrics_prefix,
        body=max_body,
        drafts=names,
        protect_all=protect_all,
        limits=Limits(**{one: given[f"max_{one}"] for one in Limits.described()}),
        head_s=head_seconds,
        body_s=body_seconds,
        connections=max_connections,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        json_whitespace=json_whitespace,
    )
    listening = _listen(host, port)  # before a model is loaded for nothing
    drafter = Fallback([Forced(), Prediction(), Choice({spec: create(spec) for spec in names})])
    named = None if tokenizer is None else tokenizer_for(model, tokenizer)
    engine = Engine(
        model,
        drafter,
        tokenizer=named,
        dtype=dtype,
        device=device,
        max_batch=max_batch,
        cache_memory=cache_memory,
        threads=threads,
    )
    if engine.tokenizer is None:
        raise PacelineError(f"{model} has no tokenizer, and a server needs one")
    parsers = described(tool_parser, reasoning_parser, engine.tokenizer.chat_template)
    requests = RequestLog(log) if log is not None else None
    worker = Worker(engine, max_waiting, deadline)
    app = create_app(worker, settings, requests)
    for line in engine.target.notes:
        print(line, flush=True)
    where = f"[{host}]" if ":" in host else host
    print(f"serving {settings.model} on http://{where}:{listening.getsockname()[1]} with {draft}", flush=True)
    print(parsers, flush=True)
    gc.freeze()  # what was loaded stays: looking through it would halt every answer for a moment
    http = limited(min(max_connections, most_files() // 2), head_seconds)
    server = Ending(uvicorn.Config(app, http=http, ws="none", log_level="warning"), worker, grace)
    server.run(sockets=[listening])
    if requests is not None:
        requests.close()
    status = interrupt.STATUS if signal.SIGINT in server.signals else 0
    if worker.error is not None:
        line = options.one_line(f"{type(worker.error).__name__}: {worker.error}")
        print(f"error: the engine failed: {line}", file=sys.stderr)
        status = 1
    if not worker.stop():  # a round that takes long: the interpreter must not end beside it
        sys.stdout.flush()
        os._exit(status)
    return status


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that a client that comes early waits; PacelineError if the port is taken."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(2048)
    except OSError as error:
        raise PacelineError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return listening
