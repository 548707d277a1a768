"""What guards the routes: keys, the size of bodies, and one line for whatever is wrong with a request."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.serve.limits import Limits
from paceline.serve.refusal import public, readable
from paceline.serve.worker import Busy, EngineFailed, Unavailable

OPEN = frozenset({"/", "/health", "/version", "/metrics", "/stats", "/docs", "/openapi.json"})
"""Routes that need no key; with `protect_all`, only /health does not: whoever shares out load has to ask it."""


@dataclass(frozen=True)
class Settings:
    """model: its name in answers; api_keys: any of them opens the server, none leaves it open; body: most bytes of a
    request; drafts: names that requests may choose from, the first is the default; protect_all: see `OPEN`; head_s and
    body_s: seconds for the head and the body of a request; connections: most that are open; tool_parser,
    reasoning_parser, json_whitespace: options of `paceline serve` with these names."""

    model: str
    api_keys: tuple[str, ...] = ()
    prefix: str = "paceline"
    body: int = 4 << 20
    drafts: tuple[str, ...] = ()
    protect_all: bool = False
    limits: Limits = field(default_factory=Limits)
    head_s: float = 10.0
    body_s: float = 60.0
    connections: int = 1000
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    json_whitespace: str = "limited"

    def __post_init__(self) -> None:
        if any(not key.isascii() or not key.isprintable() or not key or " " in key for key in self.api_keys):
            raise PacelineError("an API key is empty, or has spaces or characters that are not ASCII; give another one")
        if self.protect_all and not self.api_keys:
            raise PacelineError("--protect-all needs an --api-key")


class Gone(Exception):
    """The client has left."""


class RequestFailed(Exception):
    """The engine ended this request with an error of its own."""


KINDS: dict[type[Exception], tuple[int, str]] = {
    Busy: (429, "rate_limit_error"),
    Unavailable: (503, "server_error"),
    EngineFailed: (500, "server_error"),
}
"""Status and type of refusals that are not the request's fault."""


_CLOSE = {"Connection": "close"}
HEADERS = {
    **dict.fromkeys((408, 411, 413), _CLOSE),  # the rest of a body that nobody reads must not be waited for
    429: {"Retry-After": "1"},
    503: {"Retry-After": "5", **_CLOSE},
}
"""Headers of refusals, by status."""


def problem(error: Exception, kind: str = "invalid_request_error") -> dict[str, Any]:
    """An error object in OpenAI's shape."""
    param = getattr(error, "param", None)
    about = {"message": public(str(error)), "type": kind, "param": param and readable(param)}
    return {"error": about | {"code": getattr(error, "code", None)}}


def refused(error: Exception) -> JSONResponse:
    """The answer to a request that was refused, or ended by the server."""
    status, kind = KINDS.get(type(error), (getattr(error, "status", 400), "invalid_request_error"))
    return JSONResponse(problem(error, kind), status, headers=HEADERS.get(status))


def _error(status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> JSONResponse:
    body = problem(Exception(message), kind)
    body["error"]["code"] = code
    return JSONResponse(body, status, headers=HEADERS.get(status))


def add_errors(app: FastAPI) -> None:
    """Answer every refusal with an error object in OpenAI's shape."""

    @app.exception_handler(HTTPException)
    async def other(http: Request, error: HTTPException) -> JSONResponse:
        """A path or method that is not there."""
        return _error(error.status_code, f"{http.method} {http.scope['path']}: {error.detail}")

    @app.exception_handler(PacelineError)
    async def of_ours(http: Request, error: PacelineError) -> JSONResponse:
        return refused(error)

    @app.exception_handler(RequestFailed)
    async def failed(http: Request, error: RequestFailed) -> JSONResponse:
        return _error(500, public(str(error)), "server_error")

    @app.exception_handler(Gone)
    async def gone(http: Request, error: Gone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def bug(http: Request, error: Exception) -> JSONResponse:
        """The log has the traceback."""
        return _error(500, "the server failed at this request; its log says why", "server_error")


class Guard:
    """Keys, size of bodies, and a request's number in the answer. Plain ASGI: FastAPI's own kind of middleware would
    hand every piece of a stream from task to task."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        number = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")[:200]

        async def numbered(message: Message) -> None:
            if number and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", number)]
            await send(message)

        answer = self.refusal(scope) or self.app
        await answer(scope, receive, numbered)

    def refusal(self, scope: Scope) -> Response | None:
        """The error for a request that no route is to see."""
        headers = {name: value.strip() for name, value in scope["headers"]}
        if (
            self.settings.api_keys
            and not self._is_open(scope)
            and not self._has_key(headers.get(b"authorization", b""))
        ):
            message = "the key is missing or wrong: send Authorization: Bearer KEY"
            return _error(401, message, "authentication_error", code="invalid_api_key")
        length, most = headers.get(b"content-length"), self.settings.body
        if length is not None and (not length.isdigit() or len(length) > 18 or int(length) > most):
            return _error(413, f"the body is larger than {most} bytes")
        if length is None and scope["method"] == "POST":
            return _error(411, "the body's length is missing: send Content-Length")
        return None

    def _is_open(self, scope: Scope) -> bool:
        """Whether a path needs no key. The path is the one that routes are found by, not the URL, which holds what the
        client says of the host."""
        path, root = str(scope["path"]), str(scope.get("root_path", ""))
        if root and path.startswith(f"{root}/"):
            path = path[len(root) :]
        return path == "/health" if self.settings.protect_all else path in OPEN

    def _has_key(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        # All are compared, so that the time says nothing.
        matches = [hmac.compare_digest(given.strip(), key.encode()) for key in self.settings.api_keys]
        return scheme.lower() == b"bearer" and any(matches)
