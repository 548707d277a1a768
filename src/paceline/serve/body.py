"""The body of a request: read within a time, parsed, counted and checked, off the event loop if that takes long.

@app.post("/tokenize")
async def tokenize(request: TokenizeRequest = Depends(body_of(TokenizeRequest, settings))): ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from paceline.jsonl import NotJSON, loads
from paceline.serve.guard import Gone, Settings
from paceline.serve.limits import Limits
from paceline.serve.refusal import Refused
from paceline.serve.worker import Busy

Fields = TypeVar("Fields", bound=BaseModel)
Result = TypeVar("Result")

MOST_HELD = 256 << 20
"""Bytes of all bodies that are being received or read."""
LIGHT = 16 << 10
"""Bytes of a body that is worked on at once: its parsing takes well below a millisecond."""
MOST_HEAVY = 64
"""Requests whose preparation may wait for a thread."""
_heavy = ThreadPoolExecutor(2, "requests")
_waiting = _held = 0


async def off_loop(work: Callable[[], Result]) -> Result:
    """Do something long in one of two threads, while others are answered. Busy if too many wait for that."""
    global _waiting
    if _waiting >= MOST_HEAVY:
        raise Busy(f"{_waiting} requests are being read, and no more may; try again later")
    _waiting += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_heavy, work)
    finally:
        _waiting -= 1


def body_of(kind: type[Fields], settings: Settings) -> Callable[[Request], Awaitable[Fields]]:
    """A dependency: the fields of a request's body."""

    async def read(http: Request) -> Fields:
        media = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
            raise Refused("the body must be JSON: send Content-Type: application/json", status=415)
        http.state.size = size = int(http.headers["content-length"])  # the guard has looked at it
        with _holding(size):
            raw = await _received(http, settings)
            if size <= LIGHT:
                return parsed(kind, raw, settings.limits)
            return await off_loop(lambda: parsed(kind, raw, settings.limits))

    return read


@contextmanager
def _holding(size: int) -> Iterator[None]:
    """Count a body; Busy if there is no room for it."""
    global _held
    if _held + size > MOST_HELD:
        raise Busy(f"requests of {_held} bytes are being read, and no more may; try again later")
    _held += size
    try:
        yield
    finally:
        _held -= size


async def _received(http: Request, settings: Settings) -> bytes:
    """All bytes of the body. Refused if it is too large or too slow, Gone if the client leaves."""
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(settings.body_s):
            async for part in http.stream():
                parts.append(part)
                size += len(part)
                if size > settings.body:
                    raise Refused(f"the body is larger than {settings.body} bytes", status=413)
    except TimeoutError:
        raise Refused(f"the body has not come within {settings.body_s:g} seconds", status=408) from None
    except ClientDisconnect:
        raise Gone from None
    return b"".join(parts)


def parsed(kind: type[Fields], raw: bytes, limits: Limits) -> Fields:
    """The fields of a body; Refused, with the first thing that is wrong."""
    limits.check_raw(raw)
    try:
        body = loads(raw, parse_constant=_constant)
    except NotJSON as error:
        raise Refused(f"the body cannot be read: {error}") from None
    if not isinstance(body, dict):
        raise Refused(f"the body must be a JSON object, not a {type(body).__name__}")
    limits.check(body)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or "the body"
    if first["type"] == "extra_forbidden":
        raise Refused(f"{where} is not a field that this server supports; leave it out", where)
    raise Refused(f"{where}: {first['msg'].removeprefix('Value error, ')}", where)


def _constant(name: str) -> NoReturn:
    raise Refused(f"the body is not JSON: {name} is no number in it")


def describe_bodies(app: FastAPI, bodies: dict[str, type[BaseModel]]) -> None:
    """Add the bodies of POST routes, by path, to the API's description."""
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
