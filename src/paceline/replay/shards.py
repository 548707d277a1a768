"""A recording replayed on several machines: every worker reads, tokenises and replays pieces of its files.

    replay = ShardedReplay(["a.jsonl", "b.jsonl.gz"], ["sam", "suffix,past=1000"], "models/demo")
    report, shards = Report(replay.specs), replay.shards()
    for shard, part in zip(shards, spread(Replayer, (replay,), shards)):
        report.merge(part, shard.numbers)

Figures are those of one process: conversations do not depend on each other, but for drafters that remember finished
requests (`past`). Those get the whole recording, in its order, from one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.jsonl import Piece, pieces_of
from paceline.replay.report import Report
from paceline.replay.tokens import Transcriber, open_tokenizer
from paceline.replay.walk import Recording, replayable
from paceline.replay.workers import remembers, start
from paceline.workbench.conversations import ConversationError, read_piece


@dataclass(frozen=True)
class Shard:
    """Pieces of the recording, and the numbers of the drafters that are to replay them."""

    pieces: Sequence[Piece]
    numbers: Sequence[int]


@dataclass(frozen=True)
class ShardedReplay:
    """What is replayed. The fields are options of `paceline replay`; paths are those of every machine."""

    traces: Sequence[Path]
    specs: Sequence[str]
    tokenizer: str
    template: str | None = None
    questions: Path | None = None
    categories: Sequence[str] | None = None
    ignore: Sequence[str] = ()

    def shards(self) -> list[Shard]:
        """Whole recordings first, for they take longest.

        Raises ConversationError if a file cannot be read, MethodError for a drafter that cannot be replayed."""
        recording = Recording.of(open_tokenizer(self.tokenizer))
        whole = [remembers(replayable(spec, recording)) for spec in self.specs]
        every = [piece for trace in self.traces for piece in pieces_of(trace, ConversationError)]
        shards = [Shard(every, [n]) for n, of_it in enumerate(whole) if of_it]
        others = [n for n, of_it in enumerate(whole) if not of_it]
        return shards + [Shard([piece], others) for piece in every if others]


class Replayer:
    """A worker."""

    def __init__(self, job: ShardedReplay):
        self.job = job
        tokenizer = open_tokenizer(job.tokenizer)
        self.transcriber, self.recording = Transcriber(tokenizer, job.template), Recording.of(tokenizer)

    def __call__(self, shard: Shard) -> Report:
        """The report of one shard, with its drafters alone. Raises ConversationError."""
        job = self.job
        exchanges = (exchange for piece in shard.pieces for exchange in read_piece(piece, job.questions, job.ignore))
        wanted = job.categories
        conversations = [self.transcriber.conversation(e) for e in exchanges if wanted is None or e.category in wanted]
        # Drafters are made anew: one that replays a shard again must not remember the first time.
        report = Report([job.specs[n] for n in shard.numbers], conversations)
        for done in start(conversations, report.specs, self.recording):
            report.add(done)
        return report
