"""Endpoints: all that answer requests in OpenAI's form, behind a common interface.

    with Remote("http://127.0.0.1:8000/v1#Qwen/Qwen3-14B", key=None) as server:
        answers = server.ask([{"messages": messages, "max_tokens": 100}])

A request is the body that OpenAI's API takes, with "messages" or a "prompt" (a text, or token ids); an answer is a
`Completion`. `Remote` is a model behind one server or several, `Started` a server started for this run, and
`paceline.serve.local.Local` an engine of this process, which reads bodies as our own server does. `paceline.peers` has
other engines. A benchmark times `ask`."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, Self
from urllib.parse import urlsplit

from paceline.errors import PacelineError, printable
from paceline.net.client import Client, Retry, find_model, find_models, get, is_url, parse
from paceline.net.completion import Completion, CompletionError

Body = Mapping[str, Any]  # A request's body in OpenAI's form.
Answer = Completion | CompletionError | None
"""An answer; the error in place of one that failed; None where asking was stopped."""
LOOK_SECONDS = 0.2  # Pause between two checks whether time is up, or a server answers.
START_SECONDS = 900.0  # Time for a server to load its model.
END_SECONDS = 20.0  # Time for a server to end.


class OutOfTime(PacelineError):
    """Requests were broken off because time is up."""


class Endpoint(ABC):
    """Answers requests. The caller may `open` it first, and must close it.

    name   its name in results and certificates; model: the model to ask for; url: address in printed requests.
    slots  default number of requests under way.
    over   called now and then while requests are under way; once it returns True they are given up (OutOfTime).
    facts  versions, settings and all else that decides its speed, for results.
    takes  fields that bodies may have; None: each request is tried;
           mixes: whether greedy and sampled ones run together.
    has_our_noise  whether a seed's tokens follow from `paceline.core.noise`.
    lossless  False if it may change the target's output.
    in_process  whether it runs in this process, and so in its memory.
    draft_bytes, target_bytes  bytes that a forward of the draft model (0: there is none) and of the target reads."""

    name: str
    model: str = ""
    url: str = "http://127.0.0.1:8000/v1"
    takes: frozenset[str] | None = None
    mixes: bool = True
    has_our_noise: bool = False
    lossless: bool = True
    in_process: bool = False
    draft_bytes: int = 0
    target_bytes: int = 0

    def __init__(self, slots: int = 8):
        self.slots, self.facts = slots, dict[str, Any]()
        self.over: Callable[[], bool] = lambda: False
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:  # noqa: B027
        """Load or start the engine, unless that is done. Raises PacelineError."""

    def forget(self) -> None:  # noqa: B027
        """Forget earlier answers, because a drafter drafts known answers easily."""

    def wake(self, seconds: float) -> None:  # noqa: B027
        """Keep the processor busy for `seconds` or more, as under load, without teaching a drafter. Running servers
        need not do anything."""

    @abstractmethod
    async def complete(self, body: Body) -> Completion:
        """Complete a request. Raises CompletionError."""

    async def aclose(self) -> None:  # noqa: B027
        """Close connections; for a caller with an event loop of its own."""

    def close(self) -> None:
        """Close connections and free memory. May be called twice, and without `open`."""
        self._loop.run(self.aclose())
        self._loop.close()
        self._loop = asyncio.Runner()

    def can_take(self, fields: Body) -> bool:
        """Whether requests may have these fields."""
        return self.takes is None or fields.keys() <= self.takes

    def check_time(self) -> None:
        """Raise OutOfTime if time is up."""
        if self.over():
            raise OutOfTime("the budget was spent")

    def ask(self, bodies: Sequence[Body], slots: int | None = None) -> list[Completion]:
        """Complete all requests, at most `slots` at once. Their `seconds` is the time for all. Raises OutOfTime and,
        once no request is under way, CompletionError if any failed."""
        return self._loop.run(self._ask(bodies, slots or self.slots))

    async def _ask(self, bodies: Sequence[Body], slots: int) -> list[Completion]:
        began = perf_counter()
        answers = await answer_all(self.complete, bodies, slots, self.over)
        if error := next((answer for answer in answers if isinstance(answer, CompletionError)), None):
            raise error
        return completed(answers, perf_counter() - began)


def completed(answers: Sequence[Answer], seconds: float) -> list[Completion]:
    """Turn answers into completions, with the seconds that all took.
    A failed answer has no text and finish_reason "error".

    Raises OutOfTime if asking was stopped."""
    if None in answers:
        raise OutOfTime("the budget was spent")
    done = [one if isinstance(one, Completion) else Completion(finish_reason="error") for one in answers]
    for one in done:
        one.seconds = seconds
    return done


async def answer_all(
    complete: Callable[[dict[str, Any]], Awaitable[Completion]], bodies: Sequence[Body], concurrency: int,
    stopped: Callable[[], bool] = lambda: False, due: Sequence[float] | None = None, began: float | None = None,
) -> list[Answer]:  # fmt: skip
    """Answer each body: with a completion, an error if it failed, or None if asking was stopped before.

    concurrency  number of requests under way: the next is sent when another has its answer.
    due          seconds after `began` (perf_counter; None: now) at which to send each, ascending. concurrency is then
                 the largest number, and the times of an answer count from when its request was due, so they include the
                 wait for a free place.

    When stopped, connections are closed at once, so that servers stop working on the answers."""
    answers: list[Answer] = [None] * len(bodies)
    left, began = iter(range(len(bodies))), perf_counter() if began is None else began

    async def one_at_a_time() -> None:
        for i in left:
            at = perf_counter() if due is None else began + due[i]
            await asyncio.sleep(at - perf_counter())
            try:
                answers[i] = answer = await complete(dict(bodies[i]))
                answer.times = [seconds + max(answer.began - at, 0.0) for seconds in answer.times]
            except CompletionError as error:
                answers[i] = error

    tasks = [asyncio.create_task(one_at_a_time()) for _ in range(min(concurrency, len(bodies)))]
    while tasks and (await asyncio.wait(tasks, timeout=LOOK_SECONDS))[1] and not stopped():
        pass
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    return answers


class Remote(Endpoint):
    """A model behind one server or several, over HTTP.

    spec   URL[,URL...][#model]; without a model the server's only one is asked.
    key    the API key, which is written nowhere, see `client.api_key`; name: "" for a name made of all these.
    extra  fields added to every request; client: further arguments of `Client`, such as timeout and retry."""

    def __init__(
        self, spec: str, *, key: str | None = None, slots: int = 8, extra: Body | None = None,
        retry: Retry = Retry(), name: str = "", **client: Any,
    ):  # fmt: skip
        super().__init__(slots)
        self._name = name
        self.urls, self.model = parse(spec)
        if not self.urls:
            raise PacelineError(f"{spec!r} has no address, such as http://127.0.0.1:8000/v1#model")
        check_addresses(self.urls)
        self.url, self.key, self.extra = self.urls[0], key, dict(extra or {})
        self._client: Client | None = None
        self._options = {"key": key, "slots": slots, "retry": retry, **client}

    @property
    def name(self) -> str:
        """The given name, or one of its addresses, model and extra fields."""
        extra = (f"{key} = {value}" for key, value in self.extra.items())
        return self._name or ", ".join([*self.urls, self.model, *extra])

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    async def complete(self, body: Body) -> Completion:
        if not self.model:
            self.model = await find_model(self.url, self.key)
        if self._client is None:
            self._client = Client(self.urls, **self._options)
        return await self._client.complete({"model": self.model, **body, **self.extra})

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def pause(self, on: bool) -> None:
        """Stop its processes or let them go on, if they were begun for this run."""

    @cached_property
    def owner(self) -> str:
        """The model's owner, where servers put their own name ("vllm", "paceline"); "" if there is none."""
        return asyncio.run(find_models(self.url, self.key)).get(self.model, "")


def check_addresses(urls: Sequence[str]) -> None:
    """Raise PacelineError if a URL is no address, or has a name or a key in it."""
    if other := next((url for url in urls if not is_url(url)), ""):
        raise PacelineError(f"{other!r} is no address of a server: write http://HOST:PORT or https://HOST")
    if any("@" in urlsplit(url).netloc for url in urls):
        raise PacelineError("a name or a key in an address would be written into results; use --api-key-env NAME")


class Started(Remote):
    """A server started by a command, and ended with all its processes.

        with Started("python -m vllm.entrypoints.openai.api_server --model MODEL --port {port}") as server:
            server.ask([{"prompt": "Hello"}])

    command  words, or a text to split as a shell would. {port} becomes a free port; a command without it gets --port.
    env      environment variables; None: those of this process; wait: seconds until it must answer.
    key      its API key, if it needs one.
    log      file for its output; None: a temporary file. An error quotes its last lines if the server ends before it
             answers. remote: further arguments of `Remote`."""

    def __init__(
        self, command: str | Sequence[str], *, env: Mapping[str, str] | None = None, wait: float = START_SECONDS,
        log: Path | None = None, **remote: Any,
    ):  # fmt: skip
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = shlex.split(command) if isinstance(command, str) else list(command)
        if not words:
            raise PacelineError("there is no command to start a server with")
        self.command = [word.replace("{port}", str(port)) for word in words]
        if self.command == words and not any(word.split("=")[0] == "--port" for word in words):
            self.command += ["--port", str(port)]
        super().__init__(f"http://127.0.0.1:{_port(self.command, port)}/v1", **remote)
        self.wait, self._env, self._log = wait, None if env is None else dict(env), log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        self._printed = tempfile.TemporaryFile() if self._log is None else self._log.open("w+b")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=self._printed, stderr=subprocess.STDOUT, env=self._env,
                start_new_session=True, preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )  # fmt: skip
            self._answers()
        except OSError as error:
            self._printed.close()
            raise PacelineError(f"{self.command[0]} cannot be started: {error.strerror}") from None
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        super().close()
        self._end()

    def pause(self, on: bool) -> None:
        # Idle threads that wake up a thousand times a second would disturb timings.
        if sys.platform == "linux" and self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGSTOP if on else signal.SIGCONT)

    def _answers(self) -> None:
        """Wait until the server lists a model. Raises PacelineError if it ends before, or takes too long."""
        assert self._process is not None
        until = monotonic() + self.wait
        while monotonic() < until:
            if (status := self._process.poll()) is not None:
                raise PacelineError(f"{shlex.join(self.command)} ended with status {status}: {self._tail()}")
            with suppress(CompletionError):
                if get(self.url, "/v1/models", self.key):
                    return
            sleep(LOOK_SECONDS)
        raise PacelineError(f"{shlex.join(self.command)} did not answer within {self.wait:g} seconds: {self._tail()}")

    def _tail(self) -> str:
        """The last lines of its output."""
        self._printed.seek(max(self._printed.seek(0, os.SEEK_END) - 2000, 0))
        lines = self._printed.read().decode("utf-8", "replace").split("\n")
        return printable(" | ".join(line.strip() for line in lines if line.strip())[-600:]) or "it printed nothing"

    def _end(self) -> None:
        """End its processes, by force if they do not end in time."""
        if (process := self._process) is not None:
            self.pause(False)
            for sign in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
                    break
            with suppress(ProcessLookupError):  # A server may leave helpers behind.
                os.killpg(process.pid, signal.SIGKILL)
            self._process = None
            self._printed.close()


def _die_with_parent() -> None:
    """Let the kernel end this process with its parent: while stopped (`Started.pause`), it could not notice."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _port(command: Sequence[str], chosen: int) -> int:
    """The port that a command names, else `chosen`."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == "--port" and (value or following).isdigit():
            return int(value or following)
    return chosen
