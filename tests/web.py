"""A web server of a handler's, in a thread of its own, for tests that talk to one."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, 1 << 16

    def log_message(self, *_): ...

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def begin(self, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def reply(self, status, content, kind="application/json", **headers):
        """content: bytes, or what JSON has."""
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.begin(status, Content_Type=kind, Content_Length=len(raw), **headers)
        self.wfile.write(raw)


class Server(ThreadingHTTPServer):
    request_queue_size, block_on_close, daemon_threads = 256, False, True

    def handle_error(self, *_): ...  # a client may have left


@contextmanager
def serving(handler):
    """The server's address, up to /v1."""
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
