"""A live server round a tiny model, in this process, for tests that talk to it as clients do."""

import re
import socket
from contextlib import contextmanager
from signal import SIGTERM
from threading import Thread
from time import sleep

import uvicorn
from llguidance import LLMatcher

from paceline.draft.registry import by_request
from paceline.engine.engine import Engine
from paceline.serve.listener import GracefulServer, limited
from paceline.serve.metrics import RequestLog
from paceline.serve.routes import create_app
from paceline.serve.settings import Settings
from paceline.serve.worker import Worker


def engine(model, drafts=("sam", "suffix", "none"), **options):
    """As `paceline serve` makes it."""
    return Engine(str(model), by_request(drafts), dtype="float32", device="cpu", threads=1, **options)


@contextmanager
def serving(made, *options, **more):
    """The address of a running server; options as `ending` takes them."""
    with ending(made, *options, **more) as (address, _, _):
        yield address


@contextmanager
def ending(made, log=None, most_waiting=64, deadline_s=None, grace=0.0, **settings):
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


def spelled(grammars, text):
    """A grammar of this text alone."""
    return grammars._matched(LLMatcher.grammar_from_regex(re.escape(text)))
