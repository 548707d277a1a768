"""What serving costs: the server beside the engine alone, over a long time, and with long prompts.

    python benchmarks/servers.py overhead models/demo --repeats 5
    python benchmarks/servers.py soak models/demo --seconds 600
    python benchmarks/servers.py long MODEL.gguf --dtype auto --lengths 2048 8192 16384

The server runs in a process of its own. It gets token ids as text completions and streams greedy answers of at most
`--max-tokens` tokens. `--clients` ask at once, each its next prompt when it has its answer.

overhead  tokens a second with the last of `--clients`, and time to the first token of one client, of the server and of
          the engine in this process, in turn; medians of `--repeats`, and the time to start.
soak      the server's memory over time, every seventh client leaving in the middle of its answer.
long      time to the first token of long prompts in this process, and memory; also while another row is decoding, whose
          longest pause is shown, in prompts' whole pieces and with the bound of `paceline serve --max-slowdown`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np

from paceline.bench.suites import read_suite
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.net.endpoint import Started
from paceline.target.load import load_tokenizer

ROOM = 2048
"""Tokens of a prompt and its answer at most."""
SLACK = 64
"""Tokens of that which are left for drafts."""
Prompts = Sequence[Sequence[int]]


@dataclass
class Answer:
    """tokens: new ones; seconds from the question to the first and to the last of them."""

    tokens: int = 0
    first: float = 0.0
    last: float = 0.0


@dataclass
class Pass:
    """All answers of one pass over some prompts, how long it took, and seconds of the processor."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    worked: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.answers)

    @property
    def speed(self) -> float:
        """Tokens a second, all clients together."""
        return self.tokens / self.seconds

    @property
    def first(self) -> float:
        """Milliseconds to the first token, the median."""
        return 1000 * median(one.first for one in self.answers)


# Over HTTP -----------------------------------------------------------------------------------------------------------


async def ask(port: int, prompt: Sequence[int], most: int, leave: bool = False) -> Answer:
    """One streamed answer over a connection of its own, by a client that costs the machine little."""
    body = {"prompt": list(prompt), "max_tokens": most, "temperature": 0, "stream": True}
    sent = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    began = perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
    answer, event = Answer(), b""
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = line
        if b'"choices":[{' in line.replace(b'": [', b'":['):
            answer.last = perf_counter() - began
            answer.first = answer.first or answer.last
            if leave:
                break
    writer.close()
    if not leave:
        answer.tokens = json.loads(event[6:])["usage"]["completion_tokens"]
    return answer


async def asked(port: int, prompts: Iterable[Sequence[int]], clients: int, most: int, until: float = 0) -> Pass:
    """One pass: `clients` at once. until: a time after which no more is asked; every seventh then leaves early."""
    left, done = enumerate(prompts), Pass()

    async def client() -> None:
        for i, prompt in left:
            if until and perf_counter() > until:
                return
            answer = await ask(port, prompt, most, leave=bool(until) and i % 7 == 6)
            done.answers.append(answer)

    began = perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    done.seconds = perf_counter() - began
    return done


@contextmanager
def running(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Port and process id of a server of Paceline with room for as many requests as there are clients."""
    words = [sys.executable, "-m", "paceline", "serve", options.model, "--draft", options.draft]
    words += ["--batch", str(options.clients[-1]), "--dtype", options.dtype]
    words += ["--threads", str(options.threads)] if options.threads else []
    with Started(words) as server:
        assert server._process is not None
        yield int(server.url.split(":")[2].split("/")[0]), server._process.pid


# What is measured ----------------------------------------------------------------------------------------------------


def read_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of the suite's first turns, the tasks in turn; one too long for the context loses its middle."""
    tokenizer = load_tokenizer(options.model)
    questions = read_suite(options.suite, limit=options.limit).questions
    tasks = sorted({one.task for one in questions})
    by_task = {task: [one for one in questions if one.task == task] for task in tasks}
    in_turn = sorted(questions, key=lambda one: (by_task[one.task].index(one), one.task))
    made = [tokenizer.encode_chat([{"role": "user", "content": one.turns[0]}]) for one in in_turn]
    room = ROOM - options.max_tokens - SLACK
    return [ids if len(ids) <= room else [*ids[: room // 2], *ids[len(ids) - room // 2 :]] for ids in made]


def answered(engine: Engine, prompts: Prompts, clients: int, most: int) -> Pass:
    """One pass of the engine in this process: a request arrives when one before it has ended."""
    left, began = iter(prompts), perf_counter()
    answers: dict[int, Answer] = {}
    arrived: dict[int, float] = {}

    def arrive() -> None:
        if (prompt := next(left, None)) is not None:
            now = perf_counter()
            arrived[engine.add(list(prompt), SamplingParams(temperature=0.0, max_tokens=most)).id] = now

    before = process_time()
    for _ in range(clients):
        arrive()
    while engine.has_work:
        for delta in engine.step():
            now = perf_counter() - arrived[delta.row.id]
            one = answers.setdefault(delta.row.id, Answer(0, now))
            one.tokens, one.last = one.tokens + len(delta.tokens), now
            if delta.finished:
                arrive()
    return Pass(list(answers.values()), perf_counter() - began, process_time() - before)


def overhead(options: argparse.Namespace) -> None:
    """The server and the engine in turn."""
    prompts, most, many = read_prompts(options), options.max_tokens, options.clients[-1]
    engine = Engine(options.model, options.draft, dtype=options.dtype, max_batch=many, threads=options.threads)
    passes: dict[tuple[str, int], list[Pass]] = {}
    asking: dict[int, list[float]] = defaultdict(list)
    began = perf_counter()
    with running(options) as (port, server):
        startup = perf_counter() - began
        for repeat in range(-1, options.repeats):  # the first is for warming up
            for clients in (many, 1):
                some = prompts if clients > 1 else prompts[: len(prompts) // 3]
                both = {"engine": answered(engine, some, clients, most)}
                before, own = worked(server), process_time()
                both["server"] = asyncio.run(asked(port, some, clients, most))
                both["server"].worked = worked(server) - before
                asking[clients].append(1000 * (process_time() - own) / both["server"].tokens)
                counts = [one.tokens for one in both.values()]
                # In bfloat16 a batch of another width rounds differently, and an answer may end elsewhere.
                most_apart = 0 if options.dtype == "float32" else max(counts) // 50
                assert abs(counts[0] - counts[1]) <= most_apart, "the server's answers are not the engine's"
                told = ", ".join(f"{name} {one.speed:.0f} tokens/s" for name, one in both.items())
                print(f"repeat {repeat}, {clients} clients: {told}", file=sys.stderr, flush=True)
                for name, one in both.items() if repeat >= 0 else ():
                    passes.setdefault((name, clients), []).append(one)
    speeds = {name: [one.speed for one in passes[name, many]] for name in ("engine", "server")}
    firsts = {name: median(one.first for one in passes[name, 1]) for name in speeds}
    ratios = [s / e for s, e in zip(speeds["server"], speeds["engine"], strict=True)]
    e, s = (median(values) for values in speeds.values())
    print("| | engine | server | |\n|---|---:|---:|---|")
    spread = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    print(f"| tokens/s, {many} clients | {e:.0f} | {s:.0f} | {spread} |")
    costs = [median(1000 * one.worked / one.tokens for one in passes[name, many]) for name in speeds]
    print(f"| processor ms a token, {many} clients | {costs[0]:.2f} | {costs[1]:.2f} | {costs[0] / costs[1]:.3f} |")
    print(f"| the same of the asking process, {many} clients | | {median(asking[many]):.2f} | |")
    print(f"| ms to the first token, 1 client | {firsts['engine']:.1f} | {firsts['server']:.1f} | |")
    print(f"\nstartup {startup:.1f} s")


def soak(options: argparse.Namespace) -> None:
    """Memory over time."""
    prompts, many = read_prompts(options), options.clients[-1]
    with running(options) as (port, server):
        began, seen = perf_counter(), [(0.0, memory_mb(server))]
        requests = tokens = 0
        for part in range(10):
            until = began + (part + 1) * options.seconds / 10
            done = asyncio.run(asked(port, cycle(prompts), many, options.max_tokens, until))
            requests, tokens = requests + len(done.answers), tokens + done.tokens
            seen.append((perf_counter() - began, memory_mb(server)))
            print(f"{seen[-1][0]:.0f} s: {seen[-1][1]} MB, {requests} requests, {tokens} tokens", flush=True)
    print("MB: " + ", ".join(f"{size} ({at:.0f} s)" for at, size in seen))


def long(options: argparse.Namespace) -> None:
    """A table of prompts by length, multiples of 512: alone, and beside a row that is decoding."""
    engine = Engine(options.model, "none", dtype=options.dtype, threads=options.threads, reuse=False)
    target, bound = engine.target, options.max_slowdown
    engines = engine, Engine(target, "none", reuse=False, max_slowdown=bound)
    print("| prompt | first token, s | tokens/s | its last 512, tokens/s | keys and values, MB | process, MB |", end="")
    print(f" beside a row, s | its longest pause, s | with at most {bound:g} rounds, s | pause, s |", end="")
    print(f"\n|{'---:|' * 10}", flush=True)
    timed(engine, list(range(2, 600)), 2)  # kernels are compiled
    for length in options.lengths:
        prompt = np.random.default_rng(length).integers(0, target.vocab_size, length).tolist()
        ends, pauses = timed(engine, prompt, 0)
        kept, whole = target.cache.nbytes / 1e6, memory_mb(os.getpid())
        cells = [f"{ends[-1]:.2f}", f"{length / ends[-1]:.0f}", f"{512 / pauses[-1]:.0f}", f"{kept:.0f}", f"{whole}"]
        for one in engines:
            ends, pauses = timed(one, prompt, 32)
            cells += [f"{ends[-1]:.2f}", f"{max(pauses):.3f}"]
        print(f"| {length} | {' | '.join(cells)} |", flush=True)


def timed(engine: Engine, prompt: Sequence[int], beside: int) -> tuple[list[float], list[float]]:
    """Seconds after which each round ended until the prompt's first token, and the pauses of a row that has decoded
    `beside` tokens before; 0: there is no such row."""
    other = engine.add(list(prompt[:16]), SamplingParams(max_tokens=10_000, ignore_eos=True)) if beside else None
    while other is not None and other.num_new < beside:
        engine.step()
    row, began, ends = engine.add(list(prompt), SamplingParams(max_tokens=1)), perf_counter(), list[float]()
    while row.finish_reason is None:
        engine.step()
        ends.append(perf_counter() - began)
    if other is not None:
        engine.abort(other)
    return ends, [after - before for before, after in pairwise([0.0, *ends])]


def memory_mb(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) // 1024


def worked(pid: int) -> float:
    """Seconds that the processor has spent on a process."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "soak", "long"])
    parser.add_argument("model", help="a folder")
    parser.add_argument("--draft", "-d", default="sam")
    parser.add_argument("--suite", default="demo", help="demo, spec-bench, or a JSON Lines file")
    parser.add_argument("--limit", type=int, default=48, help="questions of it")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the engine, here and in the server")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384], help="of the prompts of `long`")
    parser.add_argument("--max-slowdown", type=float, default=4.0, help="as of `paceline serve`, in `long`")
    options = parser.parse_args()
    {"overhead": overhead, "soak": soak, "long": long}[options.what](options)


if __name__ == "__main__":
    main()
