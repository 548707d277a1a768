"""Options of a benchmark, as fields that become options of the command line. Imports no torch."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from paceline import peers
from paceline.core.rules import check_schedule, ruled
from paceline.draft import registry
from paceline.draft.spec import option
from paceline.engine.options import ModelOptions
from paceline.errors import PacelineError
from paceline.given import checked
from paceline.net.keys import Keys
from paceline.outputs import check_folder
from paceline.textfiles import readable_or_folders

MOST_AT_ONCE = 64  # Most requests under way if they are sent at their times.


@dataclass(frozen=True)
class Options:
    """How a run asks. batch: number of questions answered together."""

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


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """Goals that a request must meet to count for goodput."""

    GROUP: ClassVar = "Load"

    first_ms: float | None = option(
        None, "Goal of a request: at most this many milliseconds to its first token.", least=0
    )
    token_ms: float | None = option(
        None, "Goal of a request: at most this many milliseconds for each later token.", least=0
    )


@dataclass(frozen=True)
class Load(GoalOptions):
    """How running servers are asked, instead of engines. server: URL[#model], several joined by commas."""

    GROUP: ClassVar = "Load"

    server: str | None = None
    concurrency: int | None = option(
        None, "Number of requests under way at once; with --arrivals the largest number. [default: 1; 64]",
        least=1, names=("--batch", "-b"),
    )
    processes: int = option(1, "Number of processes that send the requests, each its share.", least=1)
    arrivals: float | None = option(
        None, "Send requests at the times in the log, this many times as fast.", least=1e-3
    )

    @property
    def most(self) -> int:
        """Most requests under way at once."""
        return self.concurrency or (MOST_AT_ONCE if self.arrivals else 1)

    @property
    def goals(self) -> dict[str, float]:
        """The goals of goodput that were stated."""
        stated = {"first_ms": self.first_ms, "token_ms": self.token_ms}
        return {name: goal for name, goal in stated.items() if goal is not None}


@dataclass(frozen=True)
class Benchmark(ModelOptions):
    """What to run. drafts, peers: specs; plain decoding is always added as the baseline.

    schedules  schedules to compare at every batch size of `batches`;
               then each first turn is a request, see `bench.ours`.
    template   chat template, as for replay; None: the tokenizer's own.
    budget     whether our drafters draft only as much as pays; False: as much as they like, as in their papers."""

    model: str = ""
    drafts: Sequence[str] = ()
    peers: Sequence[str] = ()
    suite: str = "demo"
    out: Path = Path("bench")
    limit: int | None = None
    ignore: Sequence[str] | None = None
    categories: Sequence[str] = ()
    options: Options = field(default_factory=Options)
    load: Load = field(default_factory=Load)
    keys: Keys = field(default_factory=Keys)
    template: str | None = None
    peer_python: str | None = None
    budget: bool = True
    schedules: Sequence[str] = ()
    batches: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        """Raises PacelineError if a drafter, peer or schedule does not exist, or a schedule does not fit a batch."""
        for spec in self.drafts:
            registry.named(spec)
        for spec in self.peers:
            peers.named(spec)
        for schedule in self.schedules:
            for batch in self.batches:
                check_schedule(schedule, batch)


OF_LOG = "log"


def check_pause(pause: str) -> None:
    """Raise PacelineError for a pause that is neither seconds nor the log's."""
    with suppress(ValueError):
        if pause == OF_LOG or 0 <= float(pause) < inf:
            return
    raise PacelineError(f"--pause is {pause!r}; give seconds, or {OF_LOG}")


@dataclass(frozen=True)
class Sessions:
    """Which servers are asked for whole sessions of a coding agent, and how.

    commands  commands that start servers for this run, by name; urls: running servers, by name; keys: their API keys.
    """

    log: Path = option(
        help="Sessions: recorded conversations in any form that `paceline replay` reads, or a folder of a coding "
        "agent's.",
        argument=True, metavar="LOG", callback=readable_or_folders,
    )
    commands: Mapping[str, Sequence[str] | str] = field(default_factory=dict)
    urls: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str | None] = field(default_factory=dict)
    max_tokens: int = option(
        96, "Largest number of new tokens of a turn.", names=("--max-tokens", "-n"), least=1
    )
    batch: int = option(1, "Number of sessions side by side.", least=1, names=("--batch", "-b"))
    pause: str = option(
        "0", "Seconds between the turns of a session, as tools take; log: as long as in the log, up to 60.",
        metavar="SECONDS|log", callback=checked(check_pause),
    )
    limit: int | None = option(None, "Largest number of sessions.", least=1)
    out: Path | None = option(
        None, "Folder of this run; the same command goes on with a run that was stopped. [default: a new folder]",
        callback=check_folder,
    )


@dataclass(frozen=True)
class Result:
    """A run: its folder, whether everything was asked, figures by method or server, and notes for readers.

    unavailable: why peers did not take part; disturbed: see `checks`."""

    out: Path
    complete: bool
    results: list[dict[str, Any]]
    notes: list[str]
    unavailable: dict[str, str] = field(default_factory=dict)
    disturbed: list[str] = field(default_factory=list)
