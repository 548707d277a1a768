"""Connections that are slow, half open or too many: they are closed in time, and nobody else notices."""

import socket
from contextlib import ExitStack
from shutil import which
from subprocess import run
from time import perf_counter, sleep
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.serve import guard, listener
from tests.serve.live import engine, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"


IN_TIME = 0.3
"""Seconds that the strict server gives to a head, and to a body."""


@pytest.fixture(scope="module", params=[HttpToolsProtocol, H11Protocol], ids=["httptools", "h11"])
def servers(request, folder):
    """Addresses of two servers: a strict one, and one that waits for slow clients longer than any test."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(listener, "AutoHTTPProtocol", request.param)
        yield {
            name: stack.enter_context(
                serving(engine(folder, max_batch=4), max_connections=12, head_seconds=seconds, body_seconds=seconds)
            )
            for name, seconds in (("strict", IN_TIME), ("patient", 60.0))
        }


@pytest.fixture
def address(servers):
    return servers["strict"]


def opened(address, sent=b""):
    to = urlsplit(address)
    one = socket.create_connection((to.hostname, to.port), timeout=20)
    one.sendall(sent)
    return one


def rest(one):
    """All that comes until the other side closes."""
    parts = []
    while part := one.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", HEAD + b"\r\n" + b"{"], ids=["nothing", "half a body"])
def test_half_open_connections_stop_nobody(servers, sent):
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(opened(servers["patient"], sent))
        assert httpx.get(f"{servers['patient']}/health", timeout=20).status_code == 200


@pytest.mark.parametrize("length", [b"Content-Length: 4194304", b"Content-Length: 4194304\r\nContent-Encoding: gzip",
                                    b"Transfer-Encoding: chunked"], ids=["announced", "gzip", "chunks"])  # fmt: skip
@pytest.mark.parametrize("keys", [("one", "two"), ()], ids=["keys", "no keys"])
def test_bodies_that_are_only_announced_take_room_from_nobody(folder, length, keys):
    """64 sockets of a client, which send nothing, and others that are answered at once: also the same client."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%s\r\n"
    head += b"Authorization: Bearer one\r\n\r\n"
    with serving(engine(folder, max_batch=4), api_keys=keys) as address, ExitStack() as stack:
        idle = [stack.enter_context(opened(address, head % length)) for _ in range(64)]
        sleep(0.2)  # All heads are read.
        for key in ("two", "one"):
            asks = {"headers": {"Authorization": f"Bearer {key}"}, "json": {"prompt": "the cat", "max_tokens": 2}}
            for _ in range(3):
                assert httpx.post(f"{address}/v1/completions", timeout=20, **asks).status_code == 200
        for one in idle:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):  # None was answered: they wait for their bodies.
                one.recv(1)


@pytest.mark.parametrize("keys", [("one", "two"), ()], ids=["keys", "addresses"])
def test_what_one_client_has_sent_takes_a_part_of_the_room(folder, monkeypatch, keys):
    """Nearly whole bodies of one key or address, until it gets 429; another one is answered."""
    monkeypatch.setattr(guard, "MOST_HELD", 1 << 16)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Authorization: Bearer one\r\nContent-Length: 8192\r\n\r\n" + b" " * 8000

    def status(key, own_address):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        body = b'{"prompt": "the cat", "max_tokens": 2}' + b" " * 7000
        with httpx.Client(transport=httpx.HTTPTransport(local_address=own_address), timeout=20) as client:
            return client.post(f"{address}/v1/completions", headers=headers, content=body).status_code

    with serving(engine(folder, max_batch=4), api_keys=keys, max_body=8192) as address, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(opened(address, head))
        sleep(0.2)
        with opened(address, head) as third:
            assert third.recv(1 << 16).startswith(b"HTTP/1.1 429")
        assert status("one", "127.0.0.1") == 429
        assert status("two", "127.0.0.1" if keys else "127.0.0.2") == 200


def test_a_request_must_come_in_time(address):
    """A first request, its body, and the second request of a connection."""
    began = perf_counter()
    with ExitStack() as stack:
        late = [stack.enter_context(opened(address, sent)) for sent in (b"", b"GET /hea", HEAD + b"\r\n{")]
        kept = stack.enter_context(opened(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert kept.recv(1 << 16).startswith(b"HTTP/1.1 200")
        kept.sendall(b"GET /hea")
        assert all(rest(one).startswith(b"HTTP/1.1 408") for one in (*late, kept))
    assert perf_counter() - began > IN_TIME / 2


def test_a_head_that_trickles_is_cut_off(address):
    with opened(address, b"GET /health HTTP/1.1\r\n") as one, pytest.raises(OSError):  # noqa: PT012
        for _ in range(500):
            one.sendall(b"X: y\r\n")
            sleep(0.02)


def test_a_head_has_a_size(address):
    with opened(address, b"GET /health HTTP/1.1\r\n" + b"X: yyyyyyyyyyyyyyyyyyyyyyy\r\n" * 2400) as one:
        assert rest(one)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400")  # h11 has a limit of its own


def test_a_long_answer_is_no_slow_request(address):
    body = {"prompt": "the cat", "max_tokens": 600, "min_tokens": 600, "stream": True, "draft": "none"}
    began = perf_counter()
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as reply:
        assert "[DONE]" in "".join(reply.iter_text())
    assert perf_counter() - began > IN_TIME, "the answer was not long"


def test_kept_connections_serve_again(address):
    with httpx.Client(base_url=address) as client:
        for _ in range(20):
            assert client.get("/health").status_code == 200
        assert client.post("/tokenize", json={"prompt": "the cat"}).status_code == 200


GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
ASK = b'{"prompt": "the cat", "max_tokens": 2}'
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(ASK)


@pytest.mark.parametrize("size", [1 << 16, 7, 1])
def test_a_client_that_offers_http2_is_answered_in_http1(address, size):
    """As Java's HttpClient and `curl --http2` do; their bodies come after the offer."""
    sent = POST + OFFER + LENGTH + b"\r\n" + ASK + GET + OFFER + b"\r\n" + GET + b"Connection: close\r\n\r\n"
    with opened(address) as one:
        for at in range(0, len(sent), size):
            one.sendall(sent[at : at + size])
        replies = rest(one).split(b"HTTP/1.1 ")[1:]
    assert [reply[:3] for reply in replies] == [b"200"] * 3
    assert b'"text_completion"' in replies[0]


@pytest.mark.skipif(which("curl") is None, reason="needs curl")
def test_curl_that_offers_http2(address):
    kind = ["-H", "Content-Type: application/json"]
    command = ["curl", "-s", "--http2", *kind, "-d", ASK, f"{address}/v1/completions"]
    made = run(command, capture_output=True, timeout=20)
    assert b'"text_completion"' in made.stdout


@pytest.mark.parametrize("body", [b"garbage\r\n\r\n", POST + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n"])
def test_requests_before_garbage_are_answered(address, body, caplog):
    with opened(address, POST + LENGTH + b"\r\n" + ASK + (GET + b"\r\n") * 3 + body) as one:
        replies = rest(one).split(b"HTTP/1.1 ")[1:]
    assert [reply[:3] for reply in replies] == [b"200"] * 4 + [b"400"]
    assert "Traceback" not in caplog.text


def test_a_head_in_one_piece_has_a_size(address):
    with opened(address, GET + b"X: " + b"y" * 100_000 + b"\r\n\r\n") as one:
        assert rest(one)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400")
    with opened(address, GET.replace(b"version", b"v" * 60_000) + b"X: " + b"y" * 9000 + b"\r\n\r\n") as one:
        assert rest(one)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400")


def test_uvicorn_has_what_is_extended():
    assert auto.AutoHTTPProtocol in (HttpToolsProtocol, H11Protocol)
