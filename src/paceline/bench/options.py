"""What a benchmark is asked to do. Imports no torch: the command line makes its options of these fields."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from paceline import peers
from paceline.core.rules import check_schedule, ruled
from paceline.draft import registry
from paceline.draft.spec import option
from paceline.engine.options import Budget, ModelOptions
from paceline.errors import PacelineError
from paceline.given import checked
from paceline.logs.chat_templates import source_of
from paceline.net.keys import Keys

MOST_AT_ONCE = 64  # requests under way at once at most, where they are sent by their times


@dataclass(frozen=True)
class Options:
    """How a run asks. batch: questions answered together."""

    GROUP: ClassVar = "Measurement"

    max_tokens: int = option(
        128, "Largest number of new tokens.", names=("--max-tokens", "-n"), callback=ruled("max_tokens")
    )
    temperature: float = option(
        0.0, "Sampling temperature; 0 is greedy.", names=("--temperature", "-t"), callback=ruled("temperature")
    )
    batch: int = 1
    repeats: int = option(1, "How often every question is asked; figures are medians.", least=1)
    warm_up: int = option(3, "Number of answers that every method gives before anything is timed.", least=0)
    seed: int = option(0, "Seed for sampling at a temperature above 0.", callback=ruled("seed"))


@dataclass(frozen=True)
class Load:
    """How running servers are asked, instead of engines."""

    GROUP: ClassVar = "Running servers"

    server: str | None = option(
        None,
        "Measure a running server, URL[#model], or two in turn, joined by a comma; the second is compared with the "
        "first. --suite may be a log.",
    )
    concurrency: int | None = option(
        None,
        "With --server: number of requests under way at once; with --arrivals the largest number. [default: 1; 64]",
        least=1,
    )
    processes: int = option(1, "With --server: processes that send the requests, each its share.", least=1)
    arrivals: float | None = option(
        None, "With --server: send requests at the times in the log, this many times as fast.", least=1e-3
    )
    first_ms: float | None = option(
        None, "Goal of a request, for goodput: at most this many milliseconds to the first token.", least=0
    )
    token_ms: float | None = option(
        None, "Goal of a request, for goodput: at most this many milliseconds for each later token.", least=0
    )

    @property
    def most(self) -> int:
        """Requests under way at once, at most."""
        return self.concurrency or (MOST_AT_ONCE if self.arrivals else 1)

    @property
    def goals(self) -> dict[str, float]:
        """The goals of goodput that were stated."""
        stated = {"first_ms": self.first_ms, "token_ms": self.token_ms}
        return {name: goal for name, goal in stated.items() if goal is not None}


@dataclass(frozen=True)
class Benchmark(ModelOptions):
    """What to run. drafts and peers: specs; plain decoding is always added, since all others are compared with it.

    schedules  to compare, at every batch size of `batches`; every first turn is then a request, see `bench.ours`.
    template   the chat template, as for replay; None: the tokenizer's own.
    budget     our drafters draft as much as pays; False: as much as they like, as in their papers."""

    model: str = ""
    drafts: Sequence[str] = ()
    peers: Sequence[str] = ()
    suite: str = option(
        "demo",
        "Questions to ask: demo, code-edits, spec-bench, humaneval, speed-bench, or a JSON Lines file.",
        names=("--suite", "-s"),
    )
    out: Path = Path("bench")
    limit: int | None = option(None, "Largest number of questions, spread evenly over the tasks.", least=1)
    ignore: list[str] | None = option(
        None, "With --server: a key of the log to ignore; may be repeated.", metavar="KEY"
    )
    categories: Sequence[str] = ()
    options: Options = field(default_factory=Options)
    load: Load = field(default_factory=Load)
    keys: Keys = field(default_factory=Keys)
    template: str | None = option(
        None, "Chat template: vicuna, chatml, ..., or a Jinja file. [default: the tokenizer's own]",
        callback=checked(source_of),
    )
    peer_python: str | None = option(
        None, "Python interpreter that has vLLM or xllamacpp; for both, vllm=PATH,xllamacpp=PATH."
    )
    budget: Budget = True
    schedules: Sequence[str] = ()
    batches: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        """PacelineError for a drafter, a peer or a schedule that does not exist, or that does not fit the others."""
        for spec in self.drafts:
            registry.named(spec)
        for spec in self.peers:
            peers.named(spec)
        for schedule in self.schedules:
            for batch in self.batches:
                check_schedule(schedule, batch)
        if len(self.batches) > 1 and not self.schedules:
            raise PacelineError("several batch sizes are compared with --schedule: add --schedule ragged, for example")
        if self.peers and self.schedules:
            raise PacelineError("--schedule compares schedules of our engine: leave out --peer, or --schedule")
