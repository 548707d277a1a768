"""Streams: the deltas of several answers as they come, signs of life during silence, and what an API writes of them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from paceline.core.request import Completion, Delta
from paceline.errors import PacelineError
from paceline.serve.reading import Piece, Reader
from paceline.serve.worker import Job

PING_SECONDS = 10.0
"""The longest silence of a stream: clients and proxies give up at some, of 30 seconds or of 300."""


class Form(ABC):
    """Writes answers as an API's server-sent events. Each method returns the events of a moment, or ""."""

    def ping(self) -> str:
        """A sign of life that clients ignore."""
        return ": ping\n\n"

    @abstractmethod
    def begin(self) -> str:
        """Events before anything is computed; never "", because a client may wait for the first byte."""

    @abstractmethod
    async def more(self, i: int, delta: Delta, pieces: list[Piece]) -> str:
        """Events for a round's addition to answer `i`. pieces: the addition as its reader read it."""

    @abstractmethod
    def end(self, i: int, done: Completion, pieces: list[Piece], called: bool) -> str:
        """Events for the end of answer `i`: its last pieces, and why it ended. called: whether it has a whole call."""

    @abstractmethod
    def over(self) -> str:
        """Events after the last answer."""

    @abstractmethod
    def broken(self, error: PacelineError, left: dict[int, Job]) -> str:
        """Events for an error that ended the answers in `left`."""


Event = dict[str, Any]


class Parts(ABC):
    """Joins the pieces of an answer to a sequence of parts: "content", "reasoning" and "call".

    kind  kind of the open part, "" for none; said: its text so far."""

    def __init__(self) -> None:
        self.kind = self.said = ""

    def push(self, pieces: Iterable[Piece]) -> list[Event]:
        """The events of more pieces."""
        events = []
        for kind, text, _ in pieces:
            if kind == "call" or (kind in ("content", "reasoning") and kind != self.kind):
                events += [*self.close(), *self.opened(kind, text if kind == "call" else "")]
                self.kind = kind
            if kind != "call":
                self.said += text
                events += self.added(text)
            if kind == "arguments":
                events += self.close()
        return events

    def close(self) -> list[Event]:
        """The events that end the open part, if there is one."""
        kind, text, self.kind, self.said = self.kind, self.said, "", ""
        return self.closed(kind, text) if kind else []

    def take(self, done: Completion, reader: Reader) -> None:
        """Read a whole answer."""
        self.push([*reader.push(done.text), *reader.end()])
        self.close()

    @abstractmethod
    def opened(self, kind: str, name: str) -> list[Event]:
        """The events that begin a part. name: the function's, if it is a call."""

    @abstractmethod
    def added(self, text: str) -> list[Event]:
        """The events of more text of the open part."""

    @abstractmethod
    def closed(self, kind: str, text: str) -> list[Event]:
        """The events that end a part with all its text."""


class Quiet(Exception):
    """A stream has been silent for so long that it must send a sign of life."""


class Silence:
    """Tells when a stream has sent nothing for `PING_SECONDS`. Has one timer a stream, which tokens do not restart.

    tell  called after each such silence."""

    def __init__(self, tell: Callable[[], None]):
        self._loop, self._tell = asyncio.get_running_loop(), tell
        self.end()
        self._look()

    def end(self) -> None:
        """Note that something is sent now."""
        self._since = self._loop.time()

    def _look(self) -> None:
        if self._loop.time() >= self._since + PING_SECONDS:
            self._tell()
            self.end()
        self._timer = self._loop.call_at(self._since + PING_SECONDS, self._look)

    def close(self) -> None:
        """Tell no more."""
        self._timer.cancel()


class Merged:
    """Deltas of several jobs as they come.
    Iterating gives (number of the job, delta), and (0, None) after a long `silence`."""

    def __init__(self, jobs: Sequence[Job]):
        self._jobs, self._queue = jobs, asyncio.Queue[tuple[int, Delta | Exception | None]]()
        self.silence = Silence(self._quiet)

    def _quiet(self) -> None:
        if len(self._jobs) == 1:
            self._jobs[0].put(Quiet())
        else:
            self._queue.put_nowait((0, Quiet()))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta | None]]:
        tasks = [asyncio.create_task(self._forward(i, job)) for i, job in enumerate(self._jobs) if len(self._jobs) > 1]
        left = len(self._jobs)
        try:
            while left:
                i, item = await self._queue.get() if tasks else (0, await self._only())
                if isinstance(item, Quiet):
                    yield 0, None
                elif isinstance(item, Exception):
                    raise item
                elif item is None:
                    left -= 1
                else:
                    yield i, item
        finally:
            for task in tasks:
                task.cancel()

    async def _only(self) -> Delta | Exception | None:
        try:
            return await self._jobs[0].get()
        except Quiet as quiet:
            return quiet

    async def _forward(self, i: int, job: Job) -> None:
        try:
            async for delta in job:
                self._queue.put_nowait((i, delta))
            self._queue.put_nowait((i, None))
        except Exception as error:
            self._queue.put_nowait((i, error))
