"""What serving costs: the server beside the engine alone, and beside vLLM's server, on the same requests.

    python benchmarks/serve.py overhead models/demo                  # tokens a second, time to the first token
    python benchmarks/serve.py clients models/demo --suite question.jsonl --limit 24 --vllm ENV/bin/vllm

Every server runs alone in a process of its own, and all get the same token ids over HTTP as streams, greedy, of at most
`--max-tokens` tokens. `--clients` of them ask at once, each the next prompt as soon as it has its answer. `overhead`
lets the engine answer them in this process too, in turn with the server, and prints medians of `--repeats`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from urllib.request import urlopen

from paceline import Engine, SamplingParams
from paceline.bench.suites import read_suite
from paceline.target.load import load_tokenizer

ROOM = 2048
"""Tokens of a prompt and its answer at most."""


@dataclass
class Answer:
    """tokens: new ones; seconds from the question to the first and to the last of them."""

    tokens: int
    first: float
    last: float


@dataclass
class Pass:
    """All answers of one pass over the prompts, and how long it took."""

    answers: list[Answer]
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second, all clients together."""
        return sum(one.tokens for one in self.answers) / self.seconds

    def first(self, share: float) -> float:
        """Milliseconds to the first token; share: 0.5 for the median."""
        return 1000 * quantile([one.first for one in self.answers], share)

    def between(self, share: float) -> float:
        """Milliseconds between tokens, the mean of an answer."""
        return 1000 * quantile(
            [(one.last - one.first) / (one.tokens - 1) for one in self.answers if one.tokens > 1], share
        )


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, no interpolation."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


# Over HTTP -----------------------------------------------------------------------------------------------------------


async def ask(port: int, prompt: Sequence[int], most: int, draft: str | None) -> Answer:
    """One streamed answer over a connection of its own; a client that costs the machine little."""
    body = {"prompt": list(prompt), "max_tokens": most, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **({"draft": draft} if draft else {})}
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    began = perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(sent)}\r\nConnection: close\r\n\r\n".encode() + sent)
    first = last = 0.0
    lines: list[bytes] = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            lines.append(line)
            if b'"choices":[{' in line.replace(b": ", b":"):
                last = perf_counter() - began
                first = first or last
    writer.close()
    usage = json.loads(lines[-1][6:])["usage"]
    return Answer(usage["completion_tokens"], first, last)


async def asked(port: int, prompts: Sequence[Sequence[int]], clients: int, most: int, draft: str | None = None) -> Pass:
    """One pass: `clients` at once."""
    left, answers = iter(prompts), []

    async def client() -> None:
        for prompt in left:
            answers.append(await ask(port, prompt, most, draft))

    began = perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Pass(answers, perf_counter() - began)


@contextmanager
def running(command: Sequence[str], port: int, seconds: float = 300, **environment: str) -> Iterator[float]:
    """A server; yields the seconds it took to answer for the first time."""
    began = perf_counter()
    with open(os.devnull if "-v" not in sys.argv else "/dev/stderr", "w") as told:
        server = subprocess.Popen(command, stdout=told, stderr=told, env=os.environ | environment)
    try:
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                if server.poll() is not None or perf_counter() - began > seconds:
                    sys.exit(f"{' '.join(command)} does not answer; run it by hand to see why")
                sleep(0.02)
        yield perf_counter() - began
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def ours(options: argparse.Namespace, port: int, draft: str, batch: int) -> list[str]:
    """The command that serves with Paceline."""
    return [
        *(sys.executable, "-m", "paceline", "serve", options.model, "--port", str(port), "--draft", draft),
        *("--max-batch", str(batch), "--dtype", options.dtype),
    ]


# The engine alone ----------------------------------------------------------------------------------------------------


def answered(engine: Engine, prompts: Sequence[Sequence[int]], clients: int, most: int) -> Pass:
    """One pass of the engine in this process; a request arrives when one before it has ended."""
    left, began = iter(prompts), perf_counter()
    answers: dict[int, Answer] = {}
    arrived: dict[int, float] = {}

    def arrive() -> None:
        for prompt in left:
            row = engine.add(list(prompt), SamplingParams(temperature=0.0, max_tokens=most))
            arrived[row.id] = perf_counter()
            return

    for _ in range(clients):
        arrive()
    while engine.has_work:
        for delta in engine.step():
            now = perf_counter() - arrived[delta.row.id]
            one = answers.setdefault(delta.row.id, Answer(0, now, now))
            one.tokens, one.last = one.tokens + len(delta.tokens), now
            if delta.finished:
                arrive()
    return Pass(list(answers.values()), perf_counter() - began)


# What is measured ----------------------------------------------------------------------------------------------------


def read_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of the suite's first turns; one too long for the context loses its middle."""
    tokenizer = load_tokenizer(options.model)
    questions = read_suite(options.suite, limit=options.limit).questions
    made = [tokenizer.encode_chat([{"role": "user", "content": one.turns[0]}]) for one in questions]
    room = ROOM - options.max_tokens - 64
    return [ids if len(ids) <= room else [*ids[: room // 2], *ids[len(ids) - room // 2 :]] for ids in made]


def overhead(options: argparse.Namespace) -> None:
    """Print tokens a second at --clients, and the time to the first token at one, of the server and of the engine."""
    prompts, most = read_prompts(options), options.max_tokens
    clients = options.clients[-1]
    engine = Engine(options.model, options.draft[0], dtype=options.dtype, max_batch=clients, reuse=True)
    port = free_port()
    speeds: dict[str, list[float]] = {"engine": [], "server": []}
    firsts: dict[str, list[float]] = {"engine": [], "server": []}
    with running(ours(options, port, options.draft[0], clients), port) as seconds:
        print(f"startup {seconds:.2f} s")
        for repeat in range(-1, options.repeats):
            passes = {
                "engine": [answered(engine, prompts, n, most) for n in (clients, 1)],
                "server": [asyncio.run(asked(port, prompts, n, most)) for n in (clients, 1)],
            }
            if repeat < 0:
                continue  # the first is for warming up
            for name, (many, one) in passes.items():
                speeds[name].append(many.speed)
                firsts[name].append(one.first(0.5))
            assert sum(a.tokens for a in passes["engine"][0].answers) == sum(
                a.tokens for a in passes["server"][0].answers
            ), "the server's answers are not the engine's"
    ratios = [s / e for s, e in zip(speeds["server"], speeds["engine"], strict=True)]
    print(f"| | engine | server | |\n|---|---:|---:|---|")
    e, s = (median(speeds[name]) for name in ("engine", "server"))
    print(f"| tokens/s at {clients} clients | {e:.0f} | {s:.0f} | {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |")
    e, s = (median(firsts[name]) for name in ("engine", "server"))
    print(f"| ms to the first token at 1 client | {e:.1f} | {s:.1f} | {s - e:+.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead"])
    parser.add_argument("model")
    parser.add_argument("--draft", "-d", action="append")
    parser.add_argument("--suite", default="demo")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--clients", type=int, nargs="+", default=[16])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    options.draft = options.draft or ["sam"]
    overhead(options)
