"""Connections that are slow to send a request: each has a time limit, and too many make room for others.

uvicorn's own protocol waits for ever for the head of a request. Here a head must be whole within a time and a size.
Where more connections are open than may be, the one that has waited longest for a request, or for the rest of one, is
closed. So clients that send nothing cannot keep others out. The time limit for bodies is in `body.py`.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD = 64 << 10
"""Most bytes of a request's first line and headers."""


def _last(status: HTTPStatus, message: str) -> bytes:
    """An answer after which the connection is closed."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    body = json.dumps({"error": error})
    head = f"HTTP/1.1 {status} {status.phrase}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


BROKEN = _last(HTTPStatus.BAD_REQUEST, "this is no HTTP request")
LATE = _last(HTTPStatus.REQUEST_TIMEOUT, "the head of the request has not come in time")
LARGE = _last(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of the request has more than {HEAD} bytes")


def limited(most: int, head_s: float) -> type[asyncio.Protocol]:
    """A protocol for `uvicorn.Config(http=...)`. most: open connections; head_s: seconds for the head of a request."""
    unsent: dict[Any, None] = {}  # connections with no whole request, the one that has waited longest first

    class Limited(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None
        _size = 0

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
            before = self.cycle
            whole = before is None or not before.more_body
            super().data_received(data)
            if self.transport.is_closing():
                return
            if self.cycle is not before:  # a head is whole
                self._stop()
            elif whole:  # a part of the next head
                self._size += len(data)
                if self._size > HEAD:
                    return self._refuse(LARGE)
            if self.cycle is None or self.cycle.response_complete:
                self._wait()
            elif not self.cycle.more_body:
                unsent.pop(self, None)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.timeout_keep_alive_task is not None:  # no other request is in hand
                unsent.setdefault(self)

        def send_400_response(self, msg: str) -> None:
            self._refuse(BROKEN)

        def _wait(self) -> None:
            unsent.setdefault(self)
            if self._timer is None:
                self._timer = self.loop.call_later(head_s, self._refuse, LATE)

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
    """Files and connections that this process may have open."""
    try:
        import resource
    except ImportError:  # Windows
        return 2048
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
