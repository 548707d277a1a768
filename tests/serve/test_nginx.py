"""The configuration for nginx in docs/deploy.md: streams pass, and clients that send nothing stop nobody."""

import os
import re
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from tests.serve.live import engine, serving

NGINX = os.environ.get("PACELINE_NGINX") or shutil.which("nginx")
PAGE = Path(__file__).parents[2] / "docs/deploy.md"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="there is no nginx here")]
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@pytest.fixture
def address(folder, tmp_path):
    """Of an nginx before a server, set as the page says; with 2 seconds for headers instead of 10."""
    found = re.search(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    with serving(engine(folder, max_batch=4)) as behind, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        http = found[1].replace("listen 80;", f"listen {here};").replace("http://127.0.0.1:8000", behind)
        http = http.replace("client_header_timeout 10s", "client_header_timeout 2s")
        paths = "\n".join(f"{name}_temp_path {tmp_path}/{name};" for name in TEMPORARY)
        main = f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log;\nevents {{}}\n"
        (tmp_path / "nginx.conf").write_text(f"{main}http {{\naccess_log off;\n{paths}\n{http}}}\n")
        nginx = subprocess.Popen([str(NGINX), "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")])
        try:
            for _ in range(100):
                if nginx.poll() is None and (tmp_path / "pid").exists():
                    break
                sleep(0.05)
            yield f"http://{here}"
        finally:
            nginx.terminate()
            nginx.wait()


def test_streams_pass_and_half_open_connections_stop_nobody(address):
    to = urlsplit(address)
    with ExitStack() as stack:
        for i in range(480):
            one = stack.enter_context(socket.create_connection((to.hostname, to.port)))
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" if i % 2 else b"")
        for _ in range(5):
            assert httpx.get(f"{address}/health", timeout=20).status_code == 200
        body = {"prompt": "the cat", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as reply:
            assert reply.status_code == 200
            pieces = list(reply.iter_text())
    assert "[DONE]" in "".join(pieces)
    assert len(pieces) > 5, "the stream was held back"


def test_one_address_has_so_many_connections(address):
    to = urlsplit(address)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 40\r\n\r\n"
    with ExitStack() as stack:
        kept = [stack.enter_context(socket.create_connection((to.hostname, to.port), timeout=20)) for _ in range(60)]
        for one in kept:
            one.sendall(head)
        sleep(0.5)
        assert httpx.get(f"{address}/health", timeout=20).status_code == 200
        assert {one.recv(12) for one in kept[50:]} == {b"HTTP/1.1 429"}
