"""Keys: which routes are open, by the path that routes are found by and nothing else a client says."""

import asyncio
import gzip
from threading import Event

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from typer.testing import CliRunner

from paceline.cli import app as command
from paceline.errors import PacelineError
from paceline.serve import guard
from paceline.serve.guard import Bodies, Guard
from paceline.serve.ollama import ShowRequest
from paceline.serve.settings import Settings
from paceline.serve.worker import Busy

ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize",
    "/metrics", "/stats",
    "/version", "/health", "/docs", "/openapi.json", "/",
)  # fmt: skip
OPEN = ROUTES[6:]
KEYS = {"api_keys": ("right",)}


def ask(path, *headers, kind="http", root="", **settings):
    """What a guard sends for a raw request."""
    routes = [Route(one, lambda request: PlainTextResponse("here")) for one in ROUTES]
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": kind, "method": "GET", "path": root + path, "raw_path": path.encode(), "query_string": b"",
        "root_path": root, "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
        "http_version": "1.1",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }  # fmt: skip
    inner = Starlette(routes=routes)
    inner.router.redirect_slashes = False
    asyncio.run(Guard(inner, Settings("m", **settings))(scope, receive, send))
    return sent


def status(*args, **settings):
    return int(ask(*args, **settings)[0]["status"])


@pytest.mark.parametrize("host", ["localhost", "x/", "/", "", "x/health?", "a@b/health#", "x\\", "[::1", "x:99999/"])
@pytest.mark.parametrize("root", ["", "/health", "/v1"])
def test_no_host_opens_a_route(host, root):
    for path in ROUTES:
        assert status(path, ("host", host), root=root, **KEYS) == (200 if path in OPEN else 401), path


@pytest.mark.parametrize("path", ["/nothing", "/health/", "/healthy", "//health", "/health/../v1", "/v1/models/"])
def test_what_is_not_listed_is_closed(path):
    for protect_all in (False, True):
        assert status(path, **KEYS, protect_all=protect_all) == 401
    assert status(path, ("authorization", "Bearer right"), **KEYS) == 404


def test_all_routes_but_health_can_be_protected():
    codes = {path: status(path, **KEYS, protect_all=True) for path in ROUTES}
    assert codes == {path: 200 if path == "/health" else 401 for path in ROUTES}
    assert all(status(path, ("authorization", "Bearer right"), **KEYS, protect_all=True) == 200 for path in ROUTES)


@pytest.mark.parametrize(("header", "wanted"), [
    ("Bearer right", 200), ("bearer right", 200), ("BEARER  right ", 200), ("right", 401), ("Basic right", 401),
    ("Bearer", 401), ("Bearer ", 401), ("Bearer right wrong", 401), ("Bearer rightt", 401), ("Bearer \xff", 401),
])
def test_the_key_is_read_as_http_has_it(header, wanted):
    assert status("/v1/models", ("authorization", header), **KEYS) == wanted


@pytest.mark.parametrize("name", guard.ONCE)
def test_a_header_that_means_one_thing_comes_once(name):
    assert status("/version", *[(name.decode(), "5")] * 2) == 400


@pytest.mark.parametrize(("host", "origin", "wanted"), [
    ("localhost:8000", "", 200), ("127.0.0.1", "", 200), ("[::1]:8000", "", 200), ("192.168.0.3:8000", "", 200),
    ("", "", 200), ("chat.localhost", "", 200), ("LOCALHOST.", "", 200), ("gpu7:8000", "", 200),
    ("evil.example", "", 403), ("evil.example:8000", "http://evil.example:8000", 403),
    ("127.0.0.1.evil.example", "", 403),
    ("localhost.evil.example", "", 403), ("evil.example:localhost", "", 403), ("localhost@evil.example", "", 403),
    ("localhost:8000", "http://localhost:8000", 200), ("localhost:8000", "https://localhost:8000", 200),
    ("localhost:8000", "http://localhost:3000", 403), ("localhost:8000", "http://evil.example", 403),
    ("localhost:8000", "null", 403), ("localhost:8000", "https://chat.example", 200),
])
def test_without_a_key_only_own_pages_may_ask(host, origin, wanted):
    """A page of somebody else's, whose name leads here by its own DNS, is none of ours."""
    more = {"hosts": ("GPU7",), "origins": ("https://chat.example",)}
    headers = [("host", host), *([("origin", origin)] if origin else [])]
    assert status("/v1/models", *headers, **more) == wanted
    assert status("/v1/models", *headers, ("authorization", "Bearer right"), **more, **KEYS) == 200
    assert status("/v1/models", *headers, hosts=("*",), origins=("*",)) == 200


def test_websockets_are_refused():
    for settings in ({}, KEYS):
        assert ask("/v1/models", kind="websocket", **settings) == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("keys", [("",), ("right", ""), (" ",), ("a b",), ("right\n",), ("ü",)])
def test_a_key_that_no_client_can_send_is_refused_at_the_start(keys):
    with pytest.raises(PacelineError, match="API key"):
        Settings("m", api_keys=keys)


def test_an_empty_key_ends_the_command(monkeypatch):
    for arguments, environment in ((["--api-key", ""], None), ([], ""), (["--protect-all"], None)):
        with monkeypatch.context() as patch:
            patch.delenv("PACELINE_API_KEY", raising=False)
            if environment is not None:
                patch.setenv("PACELINE_API_KEY", environment)
            done = CliRunner().invoke(command, ["serve", "nowhere", "--port", "0", *arguments])
        assert isinstance(done.exception, PacelineError), done.output
        assert "key" in str(done.exception)


def test_two_apps_do_not_share_their_room(monkeypatch):
    monkeypatch.setattr(guard, "MOST_HELD", 10)
    monkeypatch.setattr(guard, "MOST_HEAVY", 1)
    full, free = (Bodies(Settings("m", max_body=5)) for _ in range(2))

    async def both():
        release = Event()
        under_way = asyncio.create_task(full.off_loop("a", release.wait))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match=r"^1 of all requests are being read"):
            await full.off_loop("b", lambda: 1)
        assert await free.off_loop("a", lambda: 2) == 2
        release.set()
        assert await under_way

    asyncio.run(both())
    with full._holding("a") as hold, free._holding("a") as other:
        hold(10)
        other(10)
        with full._holding("b") as more, pytest.raises(Busy, match=r"^requests of 10 bytes"):
            more(1)
    with full._holding("b") as hold:
        hold(10)


@pytest.mark.parametrize("short", [0, 1])
def test_packed_bodies_take_the_room_of_what_they_may_become(short, monkeypatch):
    packed, most = gzip.compress(b"{}"), 60
    monkeypatch.setattr(guard, "MOST_HELD", len(packed) + most - short)
    headers = {"content-type": "application/json", "content-encoding": "gzip", "content-length": str(len(packed))}
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "state": {"client": "a"},
             "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}  # fmt: skip

    async def receive():
        return {"type": "http.request", "body": packed, "more_body": False}

    asked = Bodies(Settings("m", max_body=most)).of(ShowRequest)(Request(scope, receive))
    if short:
        with pytest.raises(Busy, match="bytes are being read"):
            asyncio.run(asked)
    else:
        assert asyncio.run(asked) == ShowRequest()


def test_a_client_leaves_threads_to_others(monkeypatch):
    """What one client has read for it may not keep out all others; and who waits for nothing is forgotten."""
    monkeypatch.setattr(guard, "MOST_HEAVY", 4)
    bodies = Bodies(Settings("m"))

    async def full():
        release = Event()
        waiting = [asyncio.create_task(bodies.off_loop("a", release.wait)) for _ in range(3)]
        waiting.append(asyncio.create_task(bodies.off_loop("b", lambda: 2)))
        await asyncio.sleep(0)
        one_more = asyncio.create_task(bodies.off_loop("a", lambda: 1))
        await asyncio.sleep(0)
        release.set()
        with pytest.raises(Busy, match=r"^3 of your requests are being read"):
            await one_more
        assert await asyncio.gather(*waiting) == [True, True, True, 2]
        assert not bodies._waiting

    asyncio.run(full())


def test_a_client_holds_a_quarter_of_the_room(monkeypatch):
    """Or two bodies, if they are larger; and what it no longer holds is forgotten."""
    monkeypatch.setattr(guard, "MOST_HELD", 100)
    for size, most in ((1, 25), (20, 40)):
        bodies = Bodies(Settings("m", max_body=size))
        for _ in range(2):
            with bodies._holding("a") as one, bodies._holding("a") as two, bodies._holding("b") as other:
                one(most - 1)
                two(1)
                for hold in (one, two):
                    with pytest.raises(Busy, match=f"^your requests of {most} bytes are being read"):
                        hold(1)
                other(most)
            assert not bodies._held
