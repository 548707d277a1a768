"""`paceline serve` in a process of its own, for tests that kill it or look at its memory."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def start(model: Path, *options: str, port: int = 0, stderr: int | None = None) -> tuple[subprocess.Popen[str], str]:
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
def started(model: Path, *options: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address; it is stopped afterwards."""
    server, address = start(model, *options, port=port)
    try:
        yield server, address
    finally:
        server.terminate()
        server.wait(60)


def memory_mb(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024
