"""A live server round a tiny model, in this process, for tests that talk to it as clients do."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM
from threading import Thread
from time import sleep
from typing import Any

import uvicorn
from llguidance import LLMatcher

from paceline.draft.registry import by_request
from paceline.engine.engine import Engine
from paceline.serve.app import create_app
from paceline.serve.listener import GracefulServer, limited
from paceline.serve.metrics import RequestLog
from paceline.serve.settings import Settings
from paceline.serve.structure import Grammars, Matched
from paceline.workbench.worker import Worker


def engine(model: Path | str, drafts: Sequence[str] = ("sam", "suffix", "none"), **options: Any) -> Engine:
    """As `paceline serve` makes it."""
    return Engine(str(model), by_request(drafts), dtype="float32", device="cpu", threads=1, **options)


@contextmanager
def serving(made: Engine, *options: Any, **more: Any) -> Iterator[str]:
    """The address of a running server; options as `ending` takes them."""
    with ending(made, *options, **more) as (address, _, _):
        yield address


@contextmanager
def ending(
    made: Engine,
    log: Path | None = None,
    most_waiting: int = 64,
    deadline_s: float | None = None,
    grace: float = 0.0,
    **settings: Any,
) -> Iterator[tuple[str, GracefulServer, Thread]]:
    """The address of a running server, the server, and its thread."""
    worker = Worker(made, most_waiting, deadline_s)
    requests = RequestLog(log) if log else None
    made_of = Settings("tiny", drafts=tuple(getattr(made.drafter, "by_name", ("sam",))), **settings)
    app, http = create_app(worker, made_of, requests), limited(made_of.max_connections, made_of.head_seconds)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = GracefulServer(uvicorn.Config(app, port=port, http=http, ws="none", log_level="error"), worker, grace)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}", server, thread
    finally:
        server.handle_exit(SIGTERM, None)
        thread.join(20)
        worker.stop()


def spelled(grammars: Grammars, text: str) -> Matched:
    """A grammar of this text alone."""
    return grammars._matched(LLMatcher.grammar_from_regex(re.escape(text)))
