"""Whether one client can hold up the others: hostile requests to a server, and how long /health takes meanwhile.

    python benchmarks/attacks.py models/demo
    python benchmarks/attacks.py models/demo --clients 16 --seconds 20 --only stops --only schema

Each attack is sent by `--clients` at once, again and again for `--seconds`, to one server in a process of its own. A
process that does nothing else asks for /health every 10 ms, over a connection of its own each time, and one more client
asks for short answers. Without `--limit-ms 0` the command fails if /health took longer than that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Event, Process, Queue
from time import perf_counter, sleep
from typing import Any
from urllib.request import Request, urlopen

from serve import free_port, quantile, running

MB = 1 << 20
WORDS = "the cat and the dog, they said, sat on a mat; "


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16, **fields}).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"prompt": "Hi", "max_tokens": 16, **fields}).encode()


def filled(before: bytes, unit: bytes, after: bytes, size: int = 4 * MB) -> bytes:
    """A body of about `size` bytes that repeats one unit."""
    return before + (unit * ((size - len(before) - len(after)) // len(unit))).rstrip(b",") + after


def schema(properties: int) -> dict[str, Any]:
    """An object with many properties."""
    made = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(properties)}}
    return {"type": "json_schema", "json_schema": {"schema": made}}


BODIES: dict[str, tuple[str, bytes]] = {
    "prompts": ("/v1/completions", filled(b'{"prompt":[', b"{},", b"]}", 2_900_000)),
    "lists": ("/v1/completions", filled(b'{"prompt":[', b"[],", b"]}")),
    "numbers": ("/v1/completions", filled(b'{"prompt":[', b"1,", b"]}")),
    "numbers-allowed": ("/v1/completions", filled(b'{"prompt":[', b"1,", b"]}", 490_000)),
    "stops": ("/v1/completions", filled(b'{"prompt":"Hi","stop":[', b'"x",', b"]}")),
    "stops-allowed": ("/v1/completions", text(stop=["e" * 999 + str(i % 10) for i in range(16)], max_tokens=64)),
    "messages": ("/v1/chat/completions", filled(b'{"messages":[', b"{},", b"]}", 900_000)),
    "messages-allowed": ("/v1/chat/completions", chat(messages=[{"role": "user", "content": "Hi"}] * 2048)),
    "template": ("/v1/chat/completions", chat(chat_template_kwargs={"chat_template": "{{ 'a' * 50000000 }}"})),
    "long-text": ("/v1/completions", text(prompt=WORDS * (4_100_000 // len(WORDS)))),
    "escapes": ("/v1/completions", b'{"prompt":"' + b"\\u00e9" * 680_000 + b'"}'),
    "schema": ("/v1/chat/completions", chat(response_format=schema(4000))),
    "schema-allowed": ("/v1/chat/completions", chat(response_format=schema(2500), n=4)),
    "echo": ("/v1/completions", text(prompt=[7] * 1900, echo=True, logprobs=20, max_tokens=0)),
    "logprobs": ("/v1/chat/completions", chat(logprobs=True, top_logprobs=20, n=16, max_tokens=64)),
    "tokenize": ("/tokenize", json.dumps({"prompt": (WORDS * 30_000)[: MB // 4]}).encode()),
    "detokenize": ("/detokenize", json.dumps({"tokens": [7] * (1 << 15)}).encode()),
    "deep": ("/v1/completions", filled(b"", b"[", b"")),
}
HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n"


async def post(port: int, path: str, body: bytes, wait_s: float) -> str:
    """The status of one request; nothing if it does not come in time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(wait_s):
            writer.write(f"{HEAD.format(path, len(body))}Connection: close\r\n\r\n".encode() + body)
            status = (await reader.readline()).split()
            await reader.read()
            return status[1].decode() if status else "closed"
    except TimeoutError:
        return "given up"
    except OSError:
        return "closed"
    finally:
        writer.close()


async def half_open(port: int, sent: bytes, seconds: float, count: int = 480) -> Counter[str]:
    """Connections that send the beginning of a request and wait."""
    kept = []
    for _ in range(count):
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            kept.append(writer)
    await asyncio.sleep(seconds)
    for writer in kept:
        writer.close()
    return Counter({"opened": len(kept)})


async def repeated(port: int, path: str, body: bytes, clients: int, seconds: float) -> Counter[str]:
    """One body from `clients` at once, again and again."""
    end, statuses = perf_counter() + seconds, Counter[str]()

    async def client() -> None:
        while (left := end - perf_counter()) > 0:
            statuses[await post(port, path, body, left + 1)] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return statuses


# Bystanders ----------------------------------------------------------------------------------------------------------


def probe(port: int, stop: Any, results: Any) -> None:
    """Milliseconds of /health, one after the other."""
    taken = []
    while not stop.is_set():
        began = perf_counter()
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=60):
            pass
        taken.append(1000 * (perf_counter() - began))
        sleep(0.01)
    results.put(taken)


def neighbour(port: int, stop: Any, results: Any) -> None:
    """Milliseconds of a short answer, one after the other."""
    taken, body = [], text(prompt="Once upon a time", max_tokens=8)
    request = Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
    while not stop.is_set():
        began = perf_counter()
        with suppress(OSError), urlopen(request, timeout=60) as reply:
            reply.read()
        taken.append(1000 * (perf_counter() - began))
        sleep(0.05)
    results.put(taken)


@contextmanager
def watched(port: int) -> Iterator[list[list[float]]]:
    """Times of /health and of short answers while the context lasts; they are there when it has ended."""
    stop, queues, found = Event(), [Queue(), Queue()], list[list[float]]()
    watchers = [
        Process(target=what, args=(port, stop, queue)) for what, queue in zip((probe, neighbour), queues, strict=True)
    ]
    for watcher in watchers:
        watcher.start()
    sleep(0.5)
    try:
        yield found
    finally:
        stop.set()
        found += [queue.get(timeout=90) for queue in queues]
        for watcher in watchers:
            watcher.join()


def attacks(port: int, clients: int, seconds: float) -> dict[str, Callable[[], Awaitable[Counter[str]]]]:
    """What is sent, by name."""
    made: dict[str, Callable[[], Awaitable[Counter[str]]]] = {}
    made["nobody"] = lambda: half_open(port, b"", seconds, 0)
    head = HEAD.format("/v1/completions", 1000).encode()
    for name, sent in {"silent": b"", "half-head": head, "half-body": head + b'\r\n{"prompt'}.items():
        made[name] = lambda sent=sent: half_open(port, sent, seconds)
    for name, (path, body) in BODIES.items():
        made[name] = lambda path=path, body=body: repeated(port, path, body, clients, seconds)
    return made


def main() -> None:
    """Attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--only", action="append", help="the attacks of these names")
    parser.add_argument("--port", type=int, help="a server that runs already")
    parser.add_argument("--limit-ms", type=float, default=100.0, help="0: none")
    options = parser.parse_args()
    port = options.port or free_port()
    command = [sys.executable, "-m", "paceline", "serve", options.model, "--port", str(port), "--threads", "1"]
    slowest = 0.0
    with suppress(KeyboardInterrupt), nothing() if options.port else running(command, port):
        print("| attack | answers | /health P50 ms | P99 | longest | short answer P50 ms | longest |")
        print("|---|---|---:|---:|---:|---:|---:|", flush=True)
        for name, send in attacks(port, options.clients, options.seconds).items():
            if options.only and name not in options.only:
                continue
            with watched(port) as found:
                statuses = asyncio.run(send())  # type: ignore[arg-type]
            health, short = found
            slowest = max(slowest, *health)
            told = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
            times = [quantile(health, 0.5), quantile(health, 0.99), max(health), quantile(short, 0.5), max(short)]
            print(f"| {name} | {told} | {' | '.join(f'{one:.1f}' for one in times)} |", flush=True)
    if options.limit_ms and slowest > options.limit_ms:
        sys.exit(f"/health took {slowest:.0f} ms, and {options.limit_ms:.0f} are allowed")


@contextmanager
def nothing() -> Iterator[None]:
    """A server that somebody else runs."""
    yield


if __name__ == "__main__":
    main()
