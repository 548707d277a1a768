"""What guards the routes: keys, the size of bodies, and one line for whatever is wrong with a request."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.serve.worker import Busy, EngineFailed, Unavailable


@dataclass(frozen=True)
class Settings:
    """model: its name in answers; api_keys: any of them opens the server, none leaves it open; body: most bytes of a
    request; drafts: names that requests may choose from, the first is the default. The last three: options of
    `paceline serve` with these names."""

    model: str
    api_keys: tuple[str, ...] = ()
    prefix: str = "paceline"
    body: int = 16 << 20
    grace_s: float = 30.0
    drafts: tuple[str, ...] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    json_whitespace: str = "limited"


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


def problem(error: Exception, kind: str = "invalid_request_error", param: str | None = None) -> dict[str, Any]:
    """An error object in OpenAI's shape."""
    about = {"message": str(error), "type": kind, "param": param, "code": getattr(error, "code", None)}
    return {"error": about}


def refused(error: Exception) -> JSONResponse:
    """The answer to a request that was refused, or ended by the server."""
    status, kind = KINDS.get(type(error), (400, "invalid_request_error"))
    headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5", "Connection": "close"}}
    return JSONResponse(problem(error, kind), status, headers=headers.get(status))


def _error(status: int, message: str, kind: str = "invalid_request_error", param: str | None = None) -> JSONResponse:
    return JSONResponse(problem(Exception(message), kind, param), status)


def add_errors(app: FastAPI) -> None:
    """Answer every refusal with an error object in OpenAI's shape."""
    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "extra_forbidden":
            return _error(400, f"{where} is not a field that this server supports; leave it out", param=where)
        if first["type"] == "json_invalid":
            return _error(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
        return _error(400, f"{where or 'the body'}: {first['msg']}", param=where or None)

    @app.exception_handler(HTTPException)
    async def other(http: Request, error: HTTPException) -> JSONResponse:
        """A path or method that is not there, or a body that is not even text."""
        return _error(error.status_code, f"{http.method} {http.url.path}: {error.detail}")

    @app.exception_handler(PacelineError)
    async def of_ours(http: Request, error: PacelineError) -> JSONResponse:
        return refused(error)

    @app.exception_handler(RequestFailed)
    async def failed(http: Request, error: RequestFailed) -> JSONResponse:
        return _error(500, str(error), "server_error")

    @app.exception_handler(Gone)
    async def gone(http: Request, error: Gone) -> Response:
        return Response(status_code=499)


class Guard:
    """Keys, size of bodies, and a request's number in the answer. Plain ASGI: FastAPI's own kind of middleware would
    hand every piece of a stream from task to task."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        http = Request(scope)
        number = http.headers.get("x-request-id", "")[:200]

        async def numbered(message: Message) -> None:
            if number and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = number
            await send(message)

        answer = self.refusal(http) or self.app
        await answer(scope, receive, numbered)

    def refusal(self, http: Request) -> Response | None:
        """The error for a request that no route is to see."""
        keys, most = self.settings.api_keys, self.settings.body
        if keys and http.url.path.startswith(("/v1", "/tokenize", "/detokenize")):
            given = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
            matches = [hmac.compare_digest(given, key.encode()) for key in keys]
            if not any(matches):  # all are compared, so that the time says nothing
                return _error(
                    401, "the key is missing or wrong: send Authorization: Bearer KEY", "authentication_error"
                )
        length = http.headers.get("content-length")
        if length is not None and (not length.isdecimal() or len(length) > 18 or int(length) > most):
            return _error(413, f"the body is larger than {most} bytes")
        if length is None and http.method == "POST":
            return _error(411, "the body's length is missing: send Content-Length")
        return None
