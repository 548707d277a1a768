"""`paceline serve`: a server of OpenAI's and Anthropic's APIs."""

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from time import strftime
from typing import TYPE_CHECKING, Any, TextIO

from paceline import interrupt
from paceline.cli import options
from paceline.cli.parameters import Grouped, with_options
from paceline.cli.warned import WARNED
from paceline.draft.registry import named
from paceline.draft.spec import option
from paceline.engine.options import EngineOptions
from paceline.errors import PacelineError, printable
from paceline.given import checked
from paceline.outputs import REQUESTS, appends
from paceline.serve.settings import ACCESS, LIMITS, LOAD, WATCHING, Limits, Settings, limit, most_of

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

DRAFTS = ("suffix", "sam", "prompt-lookup", "none")
"""Drafters that requests may choose beside the server's own: they need no weights."""
MOST_LINES = 10_000
"""Lines that wait for a terminal or a pipe; more are left out."""


class Serving(Grouped):
    """A command whose help lists the names of --limit."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Limits that --limit NAME=N sets"):
            shown = {name: "none" if default is None else f"{default:,}" for name, (default, *_) in LIMITS.items()}
            formatter.write_dl([(name, f"{shown[name]}: {what}") for name, (*_, what) in LIMITS.items()])
        super().format_epilog(ctx, formatter)


@with_options
def serve(
    model: options.Model = options.SMOLLM2,
    draft: str | None = option(
        None, "Drafter for requests that do not name one. [default: suffix; auto:mtp?|suffix for a model that brings a "
        "head]",
        names=("--draft", "-d"), callback=checked(named),
    ),
    allow_draft: list[str] | None = option(
        None, "Another drafter that a request may choose with its field `draft`.", callback=checked(named)
    ),
    name: list[str] | None = option(
        None, "The model's name in answers; by default the folder's. More names are taken too; * takes any."
    ),
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 listens on all.", group=ACCESS),
    port: int = option(8000, "Port to listen on; 0 takes a free one.", least=0, most=65535, group=ACCESS),
    api_key: list[str] | None = option(
        None, "Key that clients must send; PACELINE_API_KEY sets it too. Without a key anybody may ask.", group=ACCESS
    ),
    protect_all: bool = option(
        False, "Ask for the key on every route except /health, also for the page.", names=("--protect-all",),
        group=ACCESS,
    ),
    allow_host: list[str] | None = option(
        None, "Another host name that clients may use if the server asks for no key; * allows all.", group=ACCESS
    ),
    cors: list[str] | None = option(
        None, "Origin of web pages that may ask this server, such as https://chat.example; * allows all.", group=ACCESS
    ),
    batch: int = option(
        16, "Largest number of requests answered at once.", least=1, names=("--batch", "-b"), group=LOAD
    ),
    limits: list[str] | None = option(
        None, "Largest number of something, for all or for one request; may be repeated. The names are listed below.",
        names=("--limit",), metavar="NAME=N", callback=checked(limit), group=LOAD,
    ),
    max_slowdown: float = option(
        4.0,
        "While answers are written, a round that also reads prompts may take this many times as long as one that "
        "does not.",
        least=1, group=LOAD,
    ),
    deadline: float | None = option(
        None, "Seconds after which an unfinished answer is cut off.", least=0.001, group=LOAD
    ),
    grace: float = option(
        30.0, "Seconds that running answers may go on at shutdown.", least=0, most=1e6, group=LOAD
    ),
    running: EngineOptions = EngineOptions(),
    corpus: list[Path] | None = option(
        None,
        "Folder, such as a working tree, from whose files suffix and sam copy, too. Files that git would ignore are "
        "left out, and those that change are read again. May be repeated: a request with a key may choose one of them, "
        "or a folder in one, by its header X-Paceline-Corpus.",
    ),
    settings: Settings = Settings(),
    log: Path | None = option(
        None,
        "Append every prompt and answer to this JSON Lines file as token ids, for `paceline replay`. The file then "
        "has everything that users said. Off by default.",
        callback=appends(REQUESTS), group=WATCHING,
    ),
    quiet: bool = option(
        False, "Do not print a line for each finished request.", names=("--quiet", "-q"), group=WATCHING
    ),
) -> int:
    """Serve a model with OpenAI's and Anthropic's APIs: chats, texts, streams, tools, JSON schemas, Predicted Outputs.

    \b
    paceline serve
    paceline serve MODEL --draft sam --port 8000
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello!"}]}' \\
         -H 'Content-Type: application/json'

    A page to watch it is at /, the API's description at /docs, counters at /metrics. Ctrl-C and SIGTERM let running
    answers end."""
    import uvicorn

    from paceline.draft.registry import by_request
    from paceline.serve.listener import GracefulServer, limited, most_files
    from paceline.serve.metrics import RequestLog
    from paceline.serve.reading import described
    from paceline.serve.routes import create_app
    from paceline.serve.worker import Worker, in_passing

    environment = os.environ.get("PACELINE_API_KEY")
    if api_key:
        note = "--api-key can be read by all users of this machine (ps shows it): set PACELINE_API_KEY instead"
        print(f"warning: {note}", file=sys.stderr, flush=True)
    draft = options.drafter_for(model, draft)
    names = tuple(dict.fromkeys([draft, *(allow_draft or ()), *DRAFTS]))
    given = name or []
    shown = [one for one in given if one != "*"] or [Path(model).expanduser().resolve().name]
    most = most_of(limits or ())
    settings = replace(
        settings,
        limits=Limits(**{one.name: most[one.name.replace("_", "-")] for one in fields(Limits)}),
        max_body=most["body"],
        max_connections=most["connections"],
        model=shown[0],
        also=tuple(given),
        api_keys=tuple(api_key or ([] if environment is None else [environment])),
        drafts=names,
        corpora=tuple(map(str, corpus or ())),
        protect_all=protect_all,
        hosts=(host, socket.gethostname(), *(allow_host or ())),
        origins=tuple(cors or ()),
    )
    if most["rows-per-key"] is not None and not settings.api_keys:
        raise PacelineError("--limit rows-per-key=N needs an --api-key")
    listening = _listen(host, port)  # A taken port is found before a model is loaded.
    drafter = by_request(names)
    pace = {"max_slowdown": max_slowdown, "max_rows_per_client": most["rows-per-key"]}
    engine = in_passing(lambda: options.open_engine(model, drafter, running, max_batch=batch, **pace))
    if engine.tokenizer is None:
        raise PacelineError(f"{model} has no tokenizer, and a server needs one")
    parsers = described(settings.tool_parser, settings.reasoning_parser, engine.tokenizer.chat_template)
    requests = RequestLog(log) if log is not None else None
    worker = Worker(engine, most["waiting"], deadline)
    app = create_app(worker, settings, requests)
    for line in (*engine.target.notes, *engine.drafter.notes):
        print(line, flush=True)
    where = f"[{host}]" if ":" in host else host
    on = f"http://{where}:{listening.getsockname()[1]}"
    said = f"serving {settings.model} on {on} with {draft}\n{parsers}\n{_room(engine)}\n{_sampling(settings, engine)}\n"
    print(said, end="", flush=True)  # In one piece, because the reader may leave after the address.
    gc.freeze()  # Loaded objects stay; collecting them would halt every answer for a moment.
    http = limited(min(settings.max_connections, most_files() // 2), settings.head_seconds)
    served = uvicorn.Config(app, http=http, ws="none", log_level="warning", log_config=None)  # WARNED shows its log
    server = GracefulServer(served, worker, grace)
    with _shown(requests=not quiet) as writer:
        server.run(sockets=[listening])
    if requests is not None:
        requests.close()
    status = interrupt.STATUS if signal.SIGINT in server.signals else 0
    if worker.error is not None:
        line = printable(f"{type(worker.error).__name__}: {worker.error}")
        print(f"error: the engine failed: {line}", file=sys.stderr)
        status = 1
    if not worker.stop() or writer.is_alive():  # The interpreter must neither end beside them nor wait for them.
        os._exit(status)
    return status


serve.command_class = Serving  # type: ignore[attr-defined]


def _room(engine: "Engine") -> str:
    """Words on how many tokens a request may have, and why."""
    most = engine.longest
    why = "the context" if most == engine.target.max_context else "--cache-memory"
    return f"a request may have {most:,} tokens with its answer ({why}); coding agents need 8,000 to 18,000"


def _sampling(settings: Settings, engine: "Engine") -> str:
    """Words on the default sampling."""
    values = {"temperature": 1.0} | settings.defaults(engine.target.sampling)
    said = ", ".join(f"{name} {value:g}" for name, value in values.items())
    whose = "the checkpoint's, " if engine.target.sampling and not settings.sampling.startswith("none") else ""
    return f"sampling, where a request does not say ({whose}--sampling): {said}"


@contextmanager
def _shown(*, requests: bool) -> Iterator[Thread]:
    """Print notices, warnings and, if wanted, a line for each request that ends, on standard error, from the yielded
    thread. A stuck terminal or pipe then delays nobody; it costs lines, and the thread outlives the end."""
    waiting: Queue[tuple[TextIO, str] | None] = Queue(MOST_LINES)

    def show(where: TextIO, line: str) -> None:
        with suppress(Full):
            waiting.put_nowait((where, f"{strftime('%H:%M:%S')} {line}"))

    def write() -> None:
        while (one := waiting.get()) is not None:
            with suppress(OSError):  # The reader of a pipe may have left.
                print(one[1], file=one[0], flush=True)

    shown = logging.getLogger("paceline.serving" if requests else "paceline.serving.notices")
    web = logging.getLogger("uvicorn")
    handler, screen = logging.Handler(), sys.stdout
    handler.emit = lambda record: show(screen, record.getMessage())  # type: ignore[method-assign]
    shown.addHandler(handler)
    shown.setLevel(logging.INFO)
    web.addHandler(WARNED)
    writer = Thread(target=write, daemon=True)
    writer.start()
    try:
        with WARNED.serving(partial(show, sys.stderr)):
            yield writer
    finally:
        web.removeHandler(WARNED)
        shown.removeHandler(handler)
        shown.setLevel(logging.NOTSET)
        with suppress(Full):
            waiting.put(None, timeout=1)
        writer.join(1)


def _listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens at once, so that early clients wait. Raises PacelineError if the port is taken."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(2048)
    except OSError as error:
        raise PacelineError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return listening
