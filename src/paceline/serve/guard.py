"""Guard the routes: check keys, the size and time of bodies, and answer every error in one line.

bodies = Bodies(settings)

@app.post("/tokenize")
async def tokenize(request: TokenizeRequest = Depends(bodies.of(TokenizeRequest))): ..."""

import asyncio
import hmac
import re
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, NoReturn, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import PacelineError, kind_of, shortened
from paceline.jsonl import NotJSON, loads
from paceline.serve.fields import validated
from paceline.serve.said import problem, problem_of_messages, problem_of_ollama, readable
from paceline.serve.settings import Limits, Refused, Settings
from paceline.serve.worker import Busy, EngineFailed, Unavailable

Fields = TypeVar("Fields", bound=BaseModel)
Result = TypeVar("Result")

OPEN = frozenset({"/", "/health", "/version", "/metrics", "/stats", "/docs", "/openapi.json"})
"""Routes that need no key, unless all are protected."""
MESSAGES, OLLAMA = "/v1/messages", "/api/"
"""What is in the paths of Anthropic's API, and of Ollama's."""
ELSEWHERE = {
    "/v1/embeddings": "this server writes text and makes no embeddings; ask a server with a model for them",
}
"""What is said of routes that clients look for in vain."""
MOST_HELD = 256 << 20  # Bytes of all bodies being received or read. A client may hold a quarter of them.
HEAD = 64 << 10  # Most bytes of a request's first line and headers.
ONCE = (
    b"host", b"origin", b"authorization", b"x-api-key", b"content-length", b"content-type", b"content-encoding",
)  # fmt: skip
"""Headers that may come only once: a proxy in front may have read another copy than this server."""
LIGHT = 16 << 10  # Bodies up to this many bytes are parsed at once, which takes well below a millisecond.
MOST_HEAVY = 64  # Requests that may wait for a thread to prepare them.
EACH_HEAVY = 3 / 4  # Share of them that one client may have.


class Gone(Exception):
    """The client has left."""


async def while_there(http: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. If the client leaves first, cancels it and raises Gone."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=0.5)
            if not task.done() and await http.is_disconnected():
                raise Gone
        return task.result()
    finally:
        task.cancel()


KINDS: dict[type[Exception], tuple[int, str]] = {
    Busy: (429, "rate_limit_error"),
    Unavailable: (503, "server_error"),
    EngineFailed: (500, "server_error"),
}
"""Status and type of refusals that are not the request's fault."""
_CLOSE = {"Connection": "close"}
HEADERS = {
    **dict.fromkeys((408, 411, 413, 431), _CLOSE),  # The rest of the body is not read.
    429: {"Retry-After": "1"},
    503: {"Retry-After": "5", **_CLOSE},
}
"""Headers of refusals, by status."""


def refused(error: Exception, path: str = "") -> JSONResponse:
    """The answer to a request that was refused, or that the server ended.
    path: its route, which decides the API's shape."""
    own = getattr(error, "status", 400), getattr(error, "kind", "invalid_request_error")
    status, kind = KINDS.get(type(error), own)
    if MESSAGES in path:
        body = problem_of_messages(str(error), status)
    else:
        body = problem_of_ollama(str(error)) if path.startswith(OLLAMA) else problem(error, kind)
    return JSONResponse(body, status, headers=HEADERS.get(status))


def add_errors(app: FastAPI) -> None:
    """Answer every refusal with an error object in the shape of the API that was asked."""

    @app.exception_handler(HTTPException)
    async def other(http: Request, error: HTTPException) -> JSONResponse:
        path = str(http.scope["path"])
        what = ELSEWHERE.get(path, error.detail)
        if error.status_code == 404 and f"/v1{path}" in {getattr(route, "path", "") for route in app.routes}:
            what = f"the route is /v1{path}; let the client's base URL end with /v1"
        made = refused(Refused(what, status=error.status_code), path)
        body = loads(bytes(made.body))
        line = readable(f"{http.method} {shortened(path)}: {what}")  # This is a route, not a path of the disk.
        body["error"] = line if path.startswith(OLLAMA) else {**body["error"], "message": line}
        return JSONResponse(body, made.status_code)

    @app.exception_handler(PacelineError)
    async def of_ours(http: Request, error: PacelineError) -> JSONResponse:
        return refused(error, str(http.scope["path"]))

    @app.exception_handler(Gone)
    async def gone(http: Request, error: Gone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def bug(http: Request, error: Exception) -> JSONResponse:
        """Answer a bug with one line; the log has the traceback."""
        why = "the server failed at this request; its log says why"
        return refused(EngineFailed(why), str(http.scope["path"]))


class Guard:
    """Checks keys and sizes of requests, and repeats a request's id in the answer. Plain ASGI, which hands no stream
    from task to task."""

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

        error = self.refusal(scope)
        await (self.app if error is None else refused(error, str(scope["path"])))(scope, receive, numbered)

    def refusal(self, scope: Scope) -> Refused | None:
        """The error for a request that must not reach a route; None if it may."""
        headers = {name: value.strip() for name, value in scope["headers"]}
        length, most = headers.get(b"content-length"), self.settings.max_body
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size + len(scope.get("raw_path", b"")) + len(scope["query_string"]) > HEAD:
            return Refused(f"the head of the request has more than {HEAD} bytes", status=431)
        names = [name for name, _ in scope["headers"]]
        if twice := next((name for name in ONCE if names.count(name) > 1), None):
            return Refused(f"the header {twice.decode()} is there twice; send it once")
        client = self._client(headers)
        scope.setdefault("state", {})["client"] = client
        if not self._is_open(scope) and not client:
            message = "the key is missing or wrong: send Authorization: Bearer KEY, or x-api-key: KEY"
            return Refused(message, status=401, code="invalid_api_key", kind="authentication_error")
        if not self.settings.api_keys and (foreign := self._foreign(headers)):
            return Refused(foreign, status=403)
        if length is not None and (not length.isdigit() or len(length) > 18 or int(length) > most):
            return Refused(f"the body is larger than {most} bytes", status=413)
        if length is None and scope["method"] == "POST" and b"transfer-encoding" not in headers:
            return Refused("the body's length is missing: send Content-Length", status=411)
        if (coding := headers.get(b"content-encoding", b"").lower()) not in (b"", b"identity", b"gzip"):
            what = f"the body is encoded as {shortened(coding.decode('latin-1'))}"
            return Refused(f"{what}; send it as it is, or as gzip", status=415)
        return None

    def _is_open(self, scope: Scope) -> bool:
        """Whether a request needs no key. Judges the path by which routes are found, not the client's URL."""
        if not self.settings.api_keys:
            return True
        path, root = str(scope["path"]), str(scope.get("root_path", ""))
        if root and path.startswith(f"{root}/"):
            path = path[len(root) :]
        return path == "/health" if self.settings.protect_all else path in OPEN

    def _foreign(self, headers: dict[bytes, bytes]) -> str:
        """Why a browser's request is refused: an unknown Host, or a foreign Origin; "" if it is not."""
        host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".")
        known = {one.lower() for one in self.settings.hosts}
        if not (not name or name == "localhost" or name.endswith(".localhost") or known & {name, "*"} or _is_ip(name)):
            what = f"this server is not known as {shortened(name)}"
            return f"{what}: start it with --allow-host {shortened(name)}, or with an --api-key"
        pages = {one.lower() for one in self.settings.origins}
        if origin and origin.partition("://")[2] != host and not pages & {origin, "*"}:
            what = f"pages of {shortened(origin)} may not ask this server"
            return f"{what}: start it with --cors {shortened(origin)}, or with an --api-key"
        return ""

    def _client(self, headers: dict[bytes, bytes]) -> str:
        """A name for the holder of the request's key, the same after a restart; "" without a valid key."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")]
        keys = [key.encode() for key in self.settings.api_keys]
        # All keys are compared, so that the time tells nothing.
        matches = [one for one in given for key in keys if hmac.compare_digest(one, key)]
        return sha256(matches[0]).hexdigest() if matches else ""


def _is_ip(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


# The body -------------------------------------------------------------------------------------------------------------

class Bodies:
    """Receives and reads the bodies of an app's requests, within limits of memory and threads."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._threads = ThreadPoolExecutor(2, "requests")
        self._waiting, self._held = Counter[str](), Counter[str]()

    def of(self, kind: type[Fields]) -> Callable[[Request], Awaitable[Fields]]:
        """A FastAPI dependency that returns the fields of a request's body."""

        async def read(http: Request) -> Fields:
            """Receive the body, unpack it, and check its fields. Raises Refused, Busy or Gone."""
            media = http.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
                raise Refused("the body must be JSON: send Content-Type: application/json", status=415)
            packed = http.headers.get("content-encoding", "").strip().lower() == "gzip"
            with self._holding(who(http)) as hold:
                raw = await _received(http, self.settings, hold)
                http.state.size = len(raw)
                if packed:
                    hold(self.settings.max_body)  # Packed, the body may have as many bytes as are allowed.
                    raw = await self.worked(http, lambda: unpacked(raw, self.settings.max_body))
                    http.state.size = len(raw)
                limits, lenient = self.settings.limits, self.settings.lenient
                return await self.worked(http, lambda: parsed(kind, raw, limits, lenient))

        return read

    async def off_loop(self, client: str, work: Callable[[], Result]) -> Result:
        """Do long work in one of two threads, while others are answered. Raises Busy if too many requests wait, of this
        client or of all."""
        most = max(1, int(EACH_HEAVY * MOST_HEAVY))
        for number, room, whose in ((self._waiting[client], most, "your "), (self._waiting.total(), MOST_HEAVY, "")):
            if number >= room:
                raise Busy(f"{number} of {whose or 'all '}requests are being read, and no more may; try again later")
        self._waiting[client] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting[client] -= 1
            self._waiting += Counter()  # This drops clients with no waiting request.

    async def worked(self, http: Request, work: Callable[[], Result]) -> Result:
        """The result of `work` on a request's body: at once if the body is small, else in a thread."""
        return work() if http.state.size <= LIGHT else await self.off_loop(who(http), work)

    @contextmanager
    def _holding(self, client: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts received bytes of a client's body, and raises Busy if there is no room for them.
        Announced bytes take no room."""
        own, most = 0, max(MOST_HELD // 4, 2 * self.settings.max_body)

        def hold(size: int) -> None:
            nonlocal own
            for held, room, whose in ((self._held[client], most, "your "), (self._held.total(), MOST_HELD, "")):
                if held + size > room:
                    raise Busy(f"{whose}requests of {held} bytes are being read, and no more may; try again later")
            own += size
            self._held[client] += size

        try:
            yield hold
        finally:
            self._held[client] -= own
            self._held += Counter()  # This drops clients that hold nothing.


def who(http: Request) -> str:
    """A name for the client, by its key, else by its address."""
    return http.state.client or (http.client.host if http.client else "")


async def _received(http: Request, settings: Settings, hold: Callable[[int], None]) -> bytes:
    """Receive the whole body; `hold` counts each part. Raises Refused if it is too large or too slow, and Gone if the
    client leaves."""
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in http.stream():
                hold(len(part))
                parts.append(part)
                size += len(part)
                if size > settings.max_body:
                    raise Refused(f"the body is larger than {settings.max_body} bytes", status=413)
    except TimeoutError:
        raise Refused(f"the body has not come within {settings.body_seconds:g} seconds", status=408) from None
    except ClientDisconnect:
        raise Gone from None
    return b"".join(parts)


def unpacked(raw: bytes, most: int) -> bytes:
    """Unpack a gzip body. Raises Refused if it is not gzip, or has more than `most` bytes unpacked."""
    gzip = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        body = gzip.decompress(raw, most + 1)
    except zlib.error:
        raise Refused("the body is not gzip, as its Content-Encoding says") from None
    if len(body) > most:
        raise Refused(f"the body is larger than {most} bytes", status=413)
    if not gzip.eof or gzip.unused_data:
        raise Refused("the body is not one whole gzip file")
    return body


def parsed(kind: type[Fields], raw: bytes, limits: Limits, lenient: bool = False) -> Fields:
    """Parse a body and check its fields. Raises Refused with the first error. lenient: as in `validated`."""
    limits.check_raw(raw)
    try:
        body = loads(raw, parse_constant=_constant, once=True)
    except NotJSON as error:
        raise Refused(f"the body cannot be read: {error}") from None
    if not isinstance(body, dict):
        raise Refused(f"the body must be a JSON object, not {kind_of(body)}")
    limits.check(body)
    fields = validated(kind, body, lenient)
    limits.check_numbers(fields)
    return fields


def _constant(name: str) -> NoReturn:
    raise Refused(f"the body is not JSON: {name} is no number in it")


def describe_bodies(app: FastAPI, bodies: dict[str, type[BaseModel]]) -> None:
    """Add the bodies of POST routes to the OpenAPI description. bodies: by path."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        made = plain()
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        for path, kind in bodies.items():
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
            reference = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
            made["paths"][path]["post"]["requestBody"] = {"content": {"application/json": reference}, "required": True}
        return made

    app.openapi = openapi  # type: ignore[method-assign]
