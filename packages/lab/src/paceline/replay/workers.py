"""Replay many conversations with many drafters: on all cores, or on the machines of a Ray cluster.

Conversations are replayed in small portions, each with every drafter before the next portion, so that all drafters of
a stopped replay have read nearly the same text. A drafter that remembers finished requests (`past`) replays all
conversations in order in one worker, so that its figures do not depend on the number of workers."""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.draft.base import Drafter
from paceline.draft.recording import Recording
from paceline.draft.registry import describe
from paceline.draft.spec import parse, split
from paceline.errors import PacelineError
from paceline.given import listed
from paceline.logs.bodies import ConversationError
from paceline.logs.conversations import Reading, read_pieces
from paceline.logs.sessions import agent_of, expanded
from paceline.logs.transcript import Transcriber, Transcript, open_tokenizer
from paceline.replay.report import Done, Report
from paceline.replay.walk import ReplayTally, replay, replayable, warm_up
from paceline.serve.reading import usual_marks
from paceline.textfiles import Piece, pieces_of

PORTION = 8  # Conversations in a portion.
LOOK_SECONDS = 0.2  # Pause between two checks whether a replay was stopped.


class Task(NamedTuple):
    """Conversations to replay with one drafter, by number."""

    spec: int
    conversations: range


@dataclass
class ReplayJob:
    """The work of all workers. Each worker makes a drafter once."""

    transcripts: Sequence[Transcript]
    specs: Sequence[str]
    recording: Recording
    drafters: dict[int, Drafter] = field(default_factory=dict)

    def run(self, task: Task) -> Iterator[Done]:
        """Replay a portion, conversation by conversation."""
        if task.spec not in self.drafters:
            self.drafters[task.spec] = replayable(self.specs[task.spec], self.recording)
        for i in task.conversations:
            tally = ReplayTally()
            for t, turn in enumerate(self.transcripts[i].turns):
                replay(self.drafters[task.spec], turn, i << 20 | t, tally)
            yield Done(task.spec, i, tally)


def start(
    transcripts: Sequence[Transcript],
    specs: Sequence[str],
    recording: Recording,
    workers: int = 1,
    stopped: Callable[[], bool] = lambda: False,
) -> Generator[Done]:
    """Replay every conversation with every drafter, until `stopped` returns True or the iterator is closed.

    Raises MethodError before the replay if a drafter does not exist or needs more than tokens."""
    job = ReplayJob(transcripts, specs, recording)
    job.drafters = {i: replayable(spec, recording) for i, spec in enumerate(specs)}
    warm_up()
    tasks = _tasks(len(transcripts), [remembers(drafter) for drafter in job.drafters.values()])
    if workers == 1 or len(tasks) == 1:
        return (done for task in tasks for done in job.run(task) if not stopped())
    forks = sys.platform == "linux"
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    event = context.Event()
    # A forked worker inherits conversations, bound drafters and compiled code. Other workers make drafters anew.
    carried = job if forks else ReplayJob(transcripts, specs, recording)
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _begin, (carried, event))
    # Workers start with the first task, before a progress bar starts its thread: a fork must not copy threads.
    pending = {pool.submit(_work, task) for task in tasks}

    def results() -> Generator[Done]:
        nonlocal pending
        try:
            while pending:
                if stopped():
                    event.set()
                done, pending = wait(pending, LOOK_SECONDS, FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        finally:
            event.set()
            pool.shutdown(cancel_futures=True)

    return results()


def _tasks(conversations: int, remembers: Sequence[bool]) -> list[Task]:
    """All portions of work. Whole recordings come first, because they take longest."""
    tasks = [Task(spec, range(conversations)) for spec, whole in enumerate(remembers) if whole]
    for first in range(0, conversations, PORTION):
        portion = range(first, min(first + PORTION, conversations))
        tasks += [Task(spec, portion) for spec, whole in enumerate(remembers) if not whole]
    return tasks


def remembers(drafter: Drafter) -> bool:
    """Whether a drafter, or a part of it, has the option `past` above 0."""
    parts: Sequence[Drafter] = getattr(drafter, "parts", ())
    return bool(getattr(getattr(drafter, "config", None), "past", 0)) or any(map(remembers, parts))


_job: ReplayJob
_stopped: Any
"""In a worker process: its job, and an event that stops it."""


def _begin(job: ReplayJob, stopped: Any) -> None:
    global _job, _stopped
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the parent reacts to Ctrl-C.
    _job, _stopped = job, stopped


def _work(task: Task) -> list[Done]:
    """Replay a portion in a worker. Returns the conversations done when the replay was stopped."""
    done: list[Done] = []
    runs = _job.run(task)
    while not _stopped.is_set() and (one := next(runs, None)) is not None:
        done.append(one)
    return done


@dataclass(frozen=True)
class Shard:
    """Pieces of the recording, and the numbers of the drafters to replay them with."""

    pieces: Sequence[Piece]
    numbers: Sequence[int]


@dataclass(frozen=True)
class ShardedReplay:
    """Options of `paceline replay` for a cluster. Every machine must have the paths."""

    traces: Sequence[Path]
    specs: Sequence[str]
    tokenizer: str
    template: str | None = None
    questions: Path | None = None
    categories: Sequence[str] | None = None
    ignore: Sequence[str] = ()

    def shards(self) -> list[Shard]:
        """All shards. Whole recordings come first, because they take longest.

        Raises ConversationError if a file cannot be read, MethodError if a drafter cannot be replayed."""
        recording = Recording.of(open_tokenizer(self.tokenizer))
        whole = [remembers(replayable(spec, recording)) for spec in self.specs]
        paths = [path for trace in self.traces for path in expanded(Path(trace))]
        # A session takes many lines of its file, which is not cut.
        parts = ([Piece(path)] if agent_of(path) else pieces_of(path, ConversationError) for path in paths)
        every = [piece for pieces in parts for piece in pieces]
        shards = [Shard(every, [n]) for n, of_it in enumerate(whole) if of_it]
        others = [n for n, of_it in enumerate(whole) if not of_it]
        return shards + [Shard([piece], others) for piece in every if others]


class Replayer:
    """Reads, tokenises and replays pieces of the files in a cluster's worker."""

    def __init__(self, job: ShardedReplay):
        self.job = job
        tokenizer = open_tokenizer(job.tokenizer)
        self.transcriber = Transcriber(tokenizer, job.template, usual_marks(tokenizer.chat_template))
        self.recording = Recording.of(tokenizer)

    def __call__(self, shard: Shard) -> Report:
        """Replay a shard. Returns a report with its drafters only. Raises ConversationError."""
        job = self.job
        reading, wanted = Reading(), job.categories
        exchanges = read_pieces(shard.pieces, job.questions, job.ignore, reading)
        chosen = (exchange for exchange in exchanges if wanted is None or exchange.category in wanted)
        transcripts = [*self.transcriber.conversations(chosen, reading)]
        # Every shard gets new drafters, because a shard replayed again must not be remembered.
        report = Report([job.specs[n] for n in shard.numbers], transcripts, reading)
        for done in start(transcripts, report.specs, self.recording):
            report.add(done)
        return report


def sweep(specs: Sequence[str], what: str | None) -> dict[str, str]:
    """Replace each drafter that has an option by a variant for each value. Returns the drafters to replay, each with
    its original in `specs`, which is itself if it has no variants.

    what  "option=value,value,..."; None: no sweep.

    Raises PacelineError if no drafter has the option, MethodError if a drafter does not exist."""
    if what is None:
        return {spec: spec for spec in specs}
    option, _, text = what.partition("=")
    values = listed(text)
    if not option or not values:
        raise PacelineError(f"--sweep is {what!r}; write option=value,value,... such as draft=5,10,20")
    variants = {variant: spec for spec in specs for variant in _variants(spec, option.strip(), values)}
    if list(variants) == list(variants.values()):
        raise PacelineError(f"none of {', '.join(specs)} has an option {option!r} to sweep")
    return variants


def _variants(spec: str, option: str, values: Sequence[str]) -> list[str]:
    def has(part: str) -> bool:
        return any(known.name == option for known in describe(parse(part).name).options)

    def given(value: str) -> str:
        return "+".join(f"{part},{option}={value}" if has(part) else part for part in split(spec))

    return [given(value) for value in values] if any(map(has, split(spec))) else [spec]
