"""The engine's thread: requests come in, each round's tokens go out, and nobody waits for a client.

Commands reach the engine between two rounds. Deltas are kept for a slow client; the caller aborts the jobs of a client
that is gone. When the worker ends, every open job ends with an error. Knows no HTTP."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import TypeVar

from paceline.core.request import Completion, Delta, Row, RowStats
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.prompt import Prompt
from paceline.errors import PacelineError
from paceline.serve.ahead import ReadAhead

log = logging.getLogger("paceline.engine")

FAILED_ROUNDS = 3  # The worker gives up after so many failed rounds in a row.

T = TypeVar("T")
Item = Delta | Exception | None  # A round's tokens, the error of a job, or None at its end.


class Busy(PacelineError):
    """No more requests may wait."""


class EngineFailed(PacelineError):
    """A bug in the engine ended this request."""


class Unavailable(PacelineError):
    """The worker takes no more requests. code: why, for programs."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class Job:
    """One request in the worker. Iterating gives its deltas; `completion` is there after the last.

    private  whether nothing of it may be kept after its end.
    next     first tokens of the conversation's next request, for `read_ahead`.
    on_answer  called once the answer is whole."""

    prompt: Prompt
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    client: str = ""
    private: bool = False
    arrived: float = field(default_factory=perf_counter)
    row: Row | None = None
    next: Sequence[int] = ()
    on_answer: Callable[[], None] | None = None
    logged: bool = False
    _deltas: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)

    def put(self, item: Item) -> None:
        """Hand the job its next item. Runs in the loop's thread."""
        self._deltas.put_nowait(item)

    async def get(self) -> Delta | None:
        """The next delta; None after the last. Raises the error of a failed job."""
        if isinstance(item := await self._deltas.get(), Exception):
            raise item
        return item

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while (delta := await self.get()) is not None:
            yield delta

    @property
    def completion(self) -> Completion:
        """The answer so far; its finish_reason is "abort" until it has ended."""
        if self.row is None:
            return Completion(0, "", [], len(self.prompt), "abort", 0.0, RowStats(), [])
        return Completion.of(0, self.row)


def in_passing(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own and return its result, for example to open the engine of a Worker.

    Torch's OpenMP gives helpers to every living thread that ran a product. With more helpers than cores, waiting ones
    sleep sooner, and a round in the Worker's thread takes a fifth longer."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    result = done.result()  # Unlike `join`, this raises the error.
    thread.join()
    return result


class Worker:
    """Owns the engine.

    most_waiting  most jobs that may wait.
    deadline_s    seconds from a request's arrival after which its answer is cut off.
    on_round      called with the deltas of every round; on_end: called with every job that has ended.
    on_idle       called while idle, to do a short piece of other work; returns whether there was any.
    ahead         reads ahead for `read_ahead`.
    jobs          jobs in the engine, by row id; open: jobs whose end is not delivered yet.
    closed        why no more requests are taken, and a code for it; None while they are taken.
    error         the bug that ended the thread."""

    def __init__(self, engine: Engine, most_waiting: int = 256, deadline_s: float | None = None):
        self.engine, self.most_waiting, self.deadline_s = engine, most_waiting, deadline_s
        self.on_round: Callable[[list[Delta]], None] = lambda deltas: None
        self.on_end: Callable[[Job], None] = lambda job: None
        self.on_idle: Callable[[], bool] = lambda: False
        self.jobs: dict[int, Job] = {}
        self.open: set[Job] = set()
        self.closed: tuple[str, str] | None = None
        self.error: Exception | None = None
        self._failed_rounds = 0
        self._submitted = self._added = 0  # Only one thread writes each of them.
        self._undelivered: list[tuple[Job, Item]] = []
        self._inbox: SimpleQueue[tuple[Callable[[Job], None], Job] | None] = SimpleQueue()
        self.ahead = ReadAhead(engine, self._inbox.empty)
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self.engine.rows)

    @property
    def waiting(self) -> int:
        """Requests not in the batch yet."""
        return self._submitted - self._added + len(self.engine.waiting)

    def submit(
        self, prompt: Prompt, params: SamplingParams, loop: asyncio.AbstractEventLoop, client: str = "",
        private: bool = False,
    ) -> Job:  # fmt: skip
        """Queue a request. client: as in `Row`.
        Raises Busy if too many wait, and Unavailable once the worker is closed."""
        if self.waiting >= self.most_waiting:
            raise Busy(f"{self.waiting} requests are waiting, and no more may; try again later")
        job = Job(prompt, params, loop, client, private)
        self.open.add(job)  # Added before the check, because a closing worker looks at `open` last.
        try:
            self.check()
        except Unavailable:
            self.open.discard(job)
            raise
        self._submitted += 1
        self._inbox.put((self._add, job))
        return job

    def abort(self, job: Job) -> None:
        """End a request now, unless it has ended."""
        self._inbox.put((self._abort, job))

    def read_ahead(self, job: Job) -> None:
        """Compute `job.next` while the worker is idle."""
        self._inbox.put((self._read_ahead, job))

    def close(self, message: str, code: str) -> None:
        """Take no more requests. Open requests go on."""
        self.closed = message, code

    def check(self) -> None:
        """Raise Unavailable if the worker is closed."""
        if self.closed is not None:
            raise Unavailable(*self.closed)

    def end_all(self) -> None:
        """End every open job now, even in the middle of a round. Runs in the loop's thread, after `close`."""
        assert self.closed is not None
        for job in self.open:
            job.put(Unavailable(*self.closed))
        self.open.clear()

    def stop(self, seconds: float = 1.0) -> bool:
        """End the thread after the current round, and all open jobs. Returns whether it ended within `seconds`."""
        if self.closed is None:
            self.close("the server is shutting down", "shutting_down")
        self._inbox.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # From here on all runs in the worker's thread, except where noted.

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.exception("the engine failed")
            self.error = error
            self.close("the engine failed", "engine_failed")
        for loop in {job.loop for job in list(self.open)}:
            with suppress(RuntimeError):  # the loop has gone, and its clients with it
                loop.call_soon_threadsafe(self.end_all)

    def _work(self) -> None:
        while True:
            while not self._inbox.empty() or not self.engine.has_work:
                self._deliver()  # Deliver before a long pause.
                if self._inbox.empty() and (self.ahead.work() or self.on_idle()):
                    continue
                if (command := self._inbox.get()) is None:
                    for job in list(self.jobs.values()):
                        self._abort(job)
                    return
                act, job = command
                act(job)
            self._end_late()
            if self.engine.has_work:
                self._step()
            self._deliver()

    def _deliver(self) -> None:
        """Hand the jobs their items all at once, because waking the loop costs more than the items."""
        items, self._undelivered = self._undelivered, []
        for loop in {job.loop for job, _ in items}:
            with suppress(RuntimeError):  # the loop has gone, and its clients with it
                loop.call_soon_threadsafe(self._receive, [(job, item) for job, item in items if job.loop is loop])

    def _receive(self, items: list[tuple[Job, Item]]) -> None:
        """Hand jobs their items. Runs in the loop's thread."""
        for job, item in items:
            job.put(item)
            if not isinstance(item, Delta):
                self.open.discard(job)

    def _end_late(self) -> None:
        """End the answers whose time is up."""
        if self.deadline_s is not None:
            latest = perf_counter() - self.deadline_s
            for job in [job for job in self.jobs.values() if job.arrived < latest]:
                self._abort(job)

    def _step(self) -> None:
        try:
            deltas = self.engine.step()
        except Exception:  # An error outside any request is a bug, and waiting clients must hear of it.
            self._failed_rounds += 1
            if self._failed_rounds == FAILED_ROUNDS:
                raise
            log.exception("a round failed")
            for job in list(self.jobs.values()):
                self._abort(job, EngineFailed("the engine failed at this request"))
            return
        self._failed_rounds = 0
        served = [(self.jobs[delta.row.id], delta) for delta in deltas if delta.row.id in self.jobs]
        self._undelivered += served
        self._deliver()  # Tokens do not wait for the counters.
        self.on_round(deltas)
        for job, delta in served:
            if delta.finished:
                self._end(job, None)

    def _add(self, job: Job) -> None:
        self._added += 1
        try:
            job.row = self.engine.add(job.prompt, job.params)
            job.row.client = job.client
        except PacelineError as error:
            self._undelivered.append((job, error))
            return
        except Exception as error:
            log.exception("a request could not be added")
            self._undelivered.append((job, EngineFailed(f"{type(error).__name__}: {error}")))
            return
        self.jobs[job.row.id] = job

    def _read_ahead(self, job: Job) -> None:
        self.ahead.put(job.next, job.params)

    def _abort(self, job: Job, item: Exception | None = None) -> None:
        if job.row is not None and job.row.id in self.jobs:
            self.engine.abort(job.row)
            self._end(job, item)

    def _end(self, job: Job, item: Exception | None) -> None:
        assert job.row is not None
        del self.jobs[job.row.id]
        self.ahead.ended(job.row)
        self.on_end(job)
        self._undelivered.append((job, item))
