"""Endpoints: whatever answers requests in OpenAI's form, asked in one way.

    with Remote("http://127.0.0.1:8000/v1#Qwen/Qwen3-14B", key=None) as server:
        answers = server.ask([{"messages": messages, "max_tokens": 100}])

A request is the body that OpenAI's API takes, with "messages" or a "prompt" (a text, or token ids); an answer is a
`Completion`. `Remote` is a model behind one server or several, `Started` a server that is begun for this run, and
`paceline.serve.local.Local` an engine of this process, which reads bodies as our own server does. `paceline.peers` has
other engines; a benchmark times `ask`."""

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

Body = Mapping[str, Any]  # of a request, as OpenAI's API has it
Answer = Completion | CompletionError | None
"""An answer; the error in place of one that failed; None where asking was stopped."""
LOOK_SECONDS = 0.2  # between two looks whether time is up, or a server is there
START_SECONDS = 900.0  # that a server may take to load its model
END_SECONDS = 20.0  # that it may take to end


class OutOfTime(PacelineError):
    """Requests were broken off because time is up."""


class Endpoint(ABC):
    """Something that answers requests. Who asks may `open` it first, and closes it.

    name   what it is, for results and certificates; model: the name to ask for; url: for requests that are shown.
    slots  requests under way at once where the caller does not say.
    over   asked now and then while requests are under way; once it is true they are given up (OutOfTime).
    facts  versions, settings and all else that decides its speed, for results.
    takes  fields of bodies that it takes; None: it says so of each request. mixes: greedy and sampled ones together.
    has_our_noise  a seed's tokens are those of `paceline.core.noise`.
    lossless  False for one that may change the target's output.
    in_process  it runs in this process, so that this process's memory is its memory.
    draft_bytes, target_bytes  weights that a forward of the draft model (0: there is none) and of the target reads."""

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
        """Load or start what answers, where that is not done yet. Raises PacelineError."""

    def forget(self) -> None:  # noqa: B027
        """Forget earlier answers, which a drafter drafts easily."""

    def wake(self, seconds: float) -> None:  # noqa: B027
        """Keep the processor busy for at least `seconds`, as it is under load, without teaching a drafter anything. A
        server that runs anyway has nothing to do."""

    @abstractmethod
    async def complete(self, body: Body) -> Completion:
        """The completion of one request, greedy or sampled as the body says. Raises CompletionError."""

    async def aclose(self) -> None:  # noqa: B027
        """Close connections; for a caller with an event loop of its own."""

    def close(self) -> None:
        """Close connections and give memory back. It may be called twice, and without `open`."""
        self._loop.run(self.aclose())
        self._loop.close()
        self._loop = asyncio.Runner()

    def can_take(self, fields: Body) -> bool:
        """Whether requests may have these fields."""
        return self.takes is None or fields.keys() <= self.takes

    def check_time(self) -> None:
        """Raises OutOfTime if time is up."""
        if self.over():
            raise OutOfTime("the budget was spent")

    def ask(self, bodies: Sequence[Body], slots: int | None = None) -> list[Completion]:
        """The completions of all requests, with at most `slots` of them under way; `seconds` is the time of them all.

        Raises CompletionError if one cannot be had, when no other is under way any more, and OutOfTime."""
        return self._loop.run(self._ask(bodies, slots or self.slots))

    async def _ask(self, bodies: Sequence[Body], slots: int) -> list[Completion]:
        began = perf_counter()
        answers = await answer_all(self.complete, bodies, slots, self.over)
        if error := next((answer for answer in answers if isinstance(answer, CompletionError)), None):
            raise error
        return completed(answers, perf_counter() - began)


def completed(answers: Sequence[Answer], seconds: float) -> list[Completion]:
    """The answers, which took so many seconds together; one that failed has no text, and "error" for its end.

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
    """The answer to each body; an error in place of one that failed, None where asking was stopped.

    concurrency  requests under way at once: the next one is sent when another has its answer.
    due          seconds after `began` (perf_counter; None: now) at which each is sent, ascending; concurrency is then
                 the most at once, and the times of an answer count from when its request was due, so that waiting for a
                 free place shows in them.

    When it is stopped, connections are closed at once, at which a server stops working on the answers."""
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
    key    the API key, which is written nowhere; see `client.api_key`. name: "" for one made of all these.
    extra  fields of every request. client: further arguments of `Client`, such as timeout and retry."""

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
        """What it was called, or its addresses, its model and what every request has."""
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

    @cached_property
    def owner(self) -> str:
        """Who owns the model, which is how servers name themselves ("vllm", "paceline"); "" if it is not said."""
        return asyncio.run(find_models(self.url, self.key)).get(self.model, "")


def check_addresses(urls: Sequence[str]) -> None:
    """PacelineError for what is no address, and for one with a name or a key in it."""
    if other := next((url for url in urls if not is_url(url)), ""):
        raise PacelineError(f"{other!r} is no address of a server: write http://HOST:PORT or https://HOST")
    if any("@" in urlsplit(url).netloc for url in urls):
        raise PacelineError("a name or a key in an address would be written into results; use --api-key-env NAME")


class Started(Remote):
    """A server that is begun by a command, and ended with all its processes.

        with Started("python -m vllm.entrypoints.openai.api_server --model MODEL --port {port}") as server:
            server.ask([{"prompt": "Hello"}])

    command  words, or a text that is split as a shell would; {port} in it becomes a free port, and a command without
             one gets --port.
    env      its variables; None: those of this process. wait: seconds that it may take until it answers.
    key      its API key, if it asks for one.
    log      the file that what it prints goes to; None: one without a name. Its last lines are in the error if it ends
             before it answers. remote: further arguments of `Remote`."""

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
        """Stop its processes, or let them go on, on Linux: idle threads that wake up a thousand times a second make
        slower whatever is timed meanwhile."""
        if sys.platform == "linux" and self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGSTOP if on else signal.SIGCONT)

    def _answers(self) -> None:
        """Return once the server lists a model. Raises PacelineError if it ends before, or takes too long."""
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
        """The last lines that it printed."""
        self._printed.seek(max(self._printed.seek(0, os.SEEK_END) - 2000, 0))
        lines = self._printed.read().decode("utf-8", "replace").split("\n")
        return printable(" | ".join(line.strip() for line in lines if line.strip())[-600:]) or "it printed nothing"

    def _end(self) -> None:
        """Ask its processes to end, and make them if they do not."""
        if (process := self._process) is not None:
            self.pause(False)
            for sign in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
                    break
            with suppress(ProcessLookupError):  # helpers of a server that has gone
                os.killpg(process.pid, signal.SIGKILL)
            self._process = None
            self._printed.close()


def _die_with_parent() -> None:
    """End this process when the one that began it ends: stopped (`Started.pause`), it could not see that itself."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _port(command: Sequence[str], chosen: int) -> int:
    """The port that a command names, else the one that was chosen."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == "--port" and (value or following).isdigit():
            return int(value or following)
    return chosen
