"""Connections that are slow, half open or too many: they are closed in time, and nobody else notices."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.serve import listener
from tests.serve.live import engine, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"


@pytest.fixture(scope="module")
def made(folder: Path) -> Any:
    return engine(folder, max_batch=4)


@pytest.fixture(params=[HttpToolsProtocol, H11Protocol], ids=["httptools", "h11"])
def address(request: pytest.FixtureRequest, made: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(listener, "AutoHTTPProtocol", request.param)
    with serving(made, max_connections=12, head_seconds=1.0, body_seconds=1.0) as where:
        yield where


def opened(address: str, sent: bytes = b"") -> socket.socket:
    to = urlsplit(address)
    one = socket.create_connection((to.hostname, to.port), timeout=20)
    one.sendall(sent)
    return one


def rest(one: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    parts = []
    while part := one.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"G", HEAD, HEAD + b"\r\n" + b"{"])
def test_half_open_connections_stop_nobody(address: str, sent: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(opened(address, sent))
        began = perf_counter()
        assert httpx.get(f"{address}/health", timeout=20).status_code == 200
        assert perf_counter() - began < 1  # before any of them has timed out


@pytest.mark.parametrize(("sent", "status"), [(b"", b"408"), (b"GET /hea", b"408"), (HEAD + b"\r\n{", b"408")])
def test_a_request_must_come_in_time(address: str, sent: bytes, status: bytes) -> None:
    began = perf_counter()
    with opened(address, sent) as one:
        assert rest(one).startswith(b"HTTP/1.1 " + status)
    assert 0.5 < perf_counter() - began < 4  # the connection is not kept for another request


def test_a_head_that_trickles_is_cut_off(address: str) -> None:
    began = perf_counter()
    with opened(address, b"GET /health HTTP/1.1\r\n") as one, pytest.raises(OSError):  # noqa: PT012
        while perf_counter() - began < 10:
            one.sendall(b"X: y\r\n")
            sleep(0.05)
    assert perf_counter() - began < 8


def test_the_second_request_of_a_connection_is_held_to_the_same(address: str) -> None:
    with opened(address, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as one:
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")
        one.sendall(b"GET /hea")
        began = perf_counter()
        assert rest(one).startswith(b"HTTP/1.1 408")
        assert 0.5 < perf_counter() - began < 8


def test_a_head_has_a_size(address: str) -> None:
    with opened(address, b"GET /health HTTP/1.1\r\n" + b"X: yyyyyyyyyyyyyyyyyyyyyyy\r\n" * 2400) as one:
        assert rest(one)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400")  # h11 has a limit of its own


def test_a_long_answer_is_no_slow_request(address: str) -> None:
    body = {"prompt": "the cat", "max_tokens": 900, "ignore_eos": True, "min_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as reply:
        assert "[DONE]" in "".join(reply.iter_text())


def test_kept_connections_serve_again(address: str) -> None:
    with httpx.Client(base_url=address) as client:
        for _ in range(20):
            assert client.get("/health").status_code == 200
        assert client.post("/tokenize", json={"prompt": "the cat"}).status_code == 200


def test_uvicorn_has_what_is_extended() -> None:
    assert auto.AutoHTTPProtocol in (HttpToolsProtocol, H11Protocol)
