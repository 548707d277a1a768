"""Replay many conversations with many drafters, on all cores. Knows no files and no tokenizer's text.

    for done in start(conversations, ["sam", "prompt-lookup"], recording, workers=2):
        report.add(done)

Conversations are shared out in small portions, every drafter on a portion before the next portion, so that a replay
that is stopped has replayed nearly the same text with all. A drafter that remembers finished requests (`past`) gets all
conversations in their order from one worker: its figures do not depend on the number of workers.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, cast

from paceline.draft.base import Drafter
from paceline.draft.recording import Recording
from paceline.errors import PacelineError
from paceline.replay.tokens import Conversation
from paceline.replay.walk import Tally, replay, replayable, warm_up

PORTION = 8
"""Conversations in a portion."""


class Done(NamedTuple):
    """A conversation replayed: numbers of the drafter and of the conversation, and what came of it."""

    spec: int
    conversation: int
    tally: Tally


Task = tuple[int, range]
"""A drafter's number and the conversations it is to replay."""


@dataclass
class ReplayJob:
    """What every worker knows. Drafters are made where they are used, once."""

    conversations: Sequence[Conversation]
    specs: Sequence[str]
    recording: Recording
    drafters: dict[int, Drafter] = field(default_factory=dict)

    def run(self, task: Task) -> Iterator[Done]:
        """One portion, conversation by conversation."""
        spec, portion = task
        if spec not in self.drafters:
            self.drafters[spec] = replayable(self.specs[spec], self.recording)
        for i in portion:
            tally = Tally()
            for t, turn in enumerate(self.conversations[i].turns):
                replay(self.drafters[spec], turn, i << 20 | t, tally)
            yield Done(spec, i, tally)


def start(
    conversations: Sequence[Conversation], specs: Sequence[str], recording: Recording, workers: int = 1
) -> Generator[Done]:
    """Replay every conversation with every drafter; closing the iterator stops the workers.

    Raises MethodError, before anything is replayed, for a drafter that does not exist or needs more than tokens."""
    job = ReplayJob(conversations, specs, recording)
    job.drafters = {i: replayable(spec, recording) for i, spec in enumerate(specs)}
    warm_up()
    tasks = _tasks(len(conversations), [remembers(drafter) for drafter in job.drafters.values()])
    if workers == 1 or len(tasks) == 1:
        return (done for task in tasks for done in job.run(task))
    return _share_out(tasks, [_hire(job) for _ in range(min(workers, len(tasks)))])


def _tasks(conversations: int, remembers: Sequence[bool]) -> list[Task]:
    """Portions in the order of their work: whole recordings first, for they take longest."""
    tasks: list[Task] = [(spec, range(conversations)) for spec, whole in enumerate(remembers) if whole]
    for first in range(0, conversations, PORTION):
        portion = range(first, min(first + PORTION, conversations))
        tasks += [(spec, portion) for spec, whole in enumerate(remembers) if not whole]
    return tasks


def remembers(drafter: Drafter) -> bool:
    """Whether a drafter, or a part of it, has the option `past` switched on."""
    parts: Sequence[Drafter] = getattr(drafter, "parts", ())
    return bool(getattr(getattr(drafter, "config", None), "past", 0)) or any(map(remembers, parts))


def _hire(job: ReplayJob) -> tuple[BaseProcess, Connection]:
    forks = sys.platform == "linux"
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    here, there = context.Pipe()
    # A fork has everything already: conversations, bound drafters, compiled code. Elsewhere drafters are made anew.
    carried = job if forks else ReplayJob(job.conversations, job.specs, job.recording)
    process = context.Process(target=_work, args=(there, carried), daemon=True)
    process.start()
    there.close()
    return process, here


def _work(pipe: Connection, job: ReplayJob) -> None:
    """A worker's life: a task in, conversations out, None after the last of a task; a user's error ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who shares out
    while True:
        try:
            for done in job.run(pipe.recv()):
                pipe.send(done)
            pipe.send(None)
        except PacelineError as error:
            pipe.send(error)


def _share_out(tasks: Sequence[Task], hired: Sequence[tuple[BaseProcess, Connection]]) -> Generator[Done]:
    """A task for every worker, and the next when one is done."""
    waiting = deque(tasks)
    busy: dict[Connection, BaseProcess] = {}
    try:
        for process, pipe in hired:
            pipe.send(waiting.popleft())
            busy[pipe] = process
        while busy:
            for pipe in cast(list[Connection], wait(list(busy))):
                message = _hear(pipe, busy[pipe])
                if isinstance(message, PacelineError):
                    raise message
                if message is not None:
                    yield message
                elif waiting:
                    pipe.send(waiting.popleft())
                else:
                    del busy[pipe]
    finally:
        for process, _ in hired:
            process.terminate()
            process.join()


def _hear(pipe: Connection, worker: BaseProcess) -> Any:
    """What a worker says next; RuntimeError if it has died, of a bug (its traceback is on standard error) or killed."""
    try:
        return pipe.recv()
    except EOFError:
        worker.join()
        raise RuntimeError(f"a worker died with exit code {worker.exitcode}") from None
