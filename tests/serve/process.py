"""`paceline serve` in a process of its own, for tests that kill it or look at its memory."""

import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path


def start(model, *options, port=0, stderr=None):
    """The process and its address, once it listens."""
    command = [*(sys.executable, "-m", "paceline", "serve", str(model), "--port", str(port)), *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert server.stdout is not None
    lines = []
    for line in server.stdout:
        if where := re.search(r"http://\S+", line):
            return server, where[0]
        lines.append(line)
    raise AssertionError("".join(lines))


@contextmanager
def started(model, *options, port=0):
    """The process and its address; it is stopped afterwards."""
    server, address = start(model, *options, port=port)
    try:
        yield server, address
    finally:
        server.terminate()
        server.wait(60)


def memory_mb(pid):
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024
