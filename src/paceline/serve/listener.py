"""The HTTP server round the application: uvicorn, with time limits for slow connections and an end of its own.

uvicorn's own protocol waits for ever for the head of a request. Here a head must be complete within a time and a size.
If too many connections are open, the connection is closed that has waited longest for a request, or for the rest of
it. So clients that send nothing cannot keep others out. The time limit for bodies is in `guard.py`.

    server = GracefulServer(uvicorn.Config(app, http=limited(1000, head_seconds=10)), worker, grace=30)
    server.run()

The first Ctrl-C or SIGTERM begins the grace: the server still listens, refuses new requests with status 503, and lets
open ones end. When the grace is over, at a second signal or after a failure of the engine, open requests end with an
error, and the server exits."""

import asyncio
import json
import math
import sys
from http import HTTPStatus
from time import perf_counter
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from paceline.serve.guard import HEAD, refused
from paceline.serve.metrics import serving
from paceline.serve.worker import Unavailable, Worker

REST = 2  # Seconds for clients to read the rest of their answers, after every request has ended.


def _last(status: HTTPStatus, message: str) -> bytes:
    """An answer after which the connection is closed."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    body = json.dumps({"error": error})
    head = f"HTTP/1.1 {status} {status.phrase}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


BROKEN = _last(HTTPStatus.BAD_REQUEST, "this is no HTTP request")
LATE = _last(HTTPStatus.REQUEST_TIMEOUT, "the head of the request has not come in time")
LARGE = _last(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of the request has more than {HEAD} bytes")


def limited(most: int, head_seconds: float) -> type[asyncio.Protocol]:
    """A protocol for `uvicorn.Config(http=...)`. most: open connections. head_seconds: time for a request's head."""
    unsent: dict[Any, None] = {}  # Connections without a complete request, longest waiting first.

    class Limited(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None
        parser: Any  # Only httptools' protocol has a parser.
        _size = 0
        _read = _again = b""  # Data being read, and data to read in its place.
        _last = b""  # This answer waits for those to earlier requests of the connection.

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._wait()
            if len(self.connections) > most:
                oldest = next(iter(unsent))
                unsent.pop(oldest)
                oldest.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            unsent.pop(self, None)
            self._stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._last:
                return
            before = self.cycle
            whole = before is None or not before.more_body
            self._again = data
            while self._again:
                self._read, self._again = self._again, b""
                super().data_received(self._read)
            if self.transport.is_closing():
                return
            if self.cycle is not before:  # The head is complete.
                self._stop()
            elif whole:  # The data are part of the next head.
                self._size += len(data)
                if self._size > HEAD:
                    return self._refuse(LARGE)
            if self.cycle is None or self.cycle.response_complete:
                self._wait()
            elif not self.cycle.more_body:
                unsent.pop(self, None)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.timeout_keep_alive_task is not None:  # No other request is being answered.
                unsent.setdefault(self)
                if self._last:
                    self._refuse(self._last)

        def send_400_response(self, msg: str) -> None:
            """Answer an unreadable request, after all requests before it."""
            waiting = getattr(self, "pipeline", ())  # h11 reads one request at a time, and has no pipeline.
            if self.cycle is not None and self.cycle.more_body and waiting and waiting[0][0] is self.cycle:
                waiting.popleft()  # This request is the unreadable one.
                self._last = BROKEN
            elif self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
                self._refuse(BROKEN)
            else:
                self._last = BROKEN

        # A client that offers another protocol is answered in HTTP/1.1. httptools reads nothing after such an offer, so
        # it reads the request once more without it.

        def on_headers_complete(self) -> None:
            if not self._is_offer():
                super().on_headers_complete()

        def on_message_complete(self) -> None:
            if not self._is_offer():
                super().on_message_complete()

        def _is_offer(self) -> bool:
            return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

        def _unsupported_upgrade_warning(self) -> None:
            pause = sys.exc_info()[1]
            if pause is None or not self._is_offer():  # h11 reads on by itself.
                return
            lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
            lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self._again = b"\r\n".join(lines) + b"\r\n\r\n" + self._read[pause.args[0] :]
            self.parser = type(self.parser)(self)

        def _wait(self) -> None:
            unsent.setdefault(self)
            if self._timer is None:
                self._timer = self.loop.call_later(head_seconds, self._refuse, LATE)

        def _stop(self) -> None:
            self._size = 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse(self, answer: bytes) -> None:
            self._stop()
            if not self.transport.is_closing():
                self.transport.write(answer)
                self.transport.close()

    return Limited


def most_files() -> int:
    """The number of files and connections that this process may have open."""
    try:
        import resource
    except ImportError:  # Windows
        return 2048
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class GracefulServer(uvicorn.Server):
    """A server that ends as the module says. signals: signals received so far."""

    def __init__(self, config: uvicorn.Config, worker: Worker, grace: float):
        config.timeout_graceful_shutdown = REST
        super().__init__(config)
        self.worker, self.grace = worker, grace
        self.signals: list[int] = []
        self._until = math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals.append(sig)
        self.force_exit = len(self.signals) > 2

    async def on_tick(self, counter: int) -> bool:
        """Return whether it is time to exit; called ten times a second."""
        worker = self.worker
        if self.signals and worker.closed is None:
            worker.close("the server is shutting down", "shutting_down")
            self._until = perf_counter() + self.grace
            if worker.open:
                what = "%d answers have %g s to end; Ctrl-C again ends them now"
                serving.info(f"stopping: {what}", len(worker.open), self.grace)
            else:
                serving.info("stopping")
        over = len(self.signals) > 1 or perf_counter() >= self._until or worker.error is not None
        if over:
            worker.end_all()
        if over or (self.signals and not worker.open):
            self.should_exit = True
        return await super().on_tick(counter)


class CutOff:
    """Answers requests that are still open when the server exits, such as requests with half a body. Plain ASGI."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not begun:
                gone = Unavailable("the server is shutting down", "shutting_down")
                await refused(gone)(scope, receive, send)
