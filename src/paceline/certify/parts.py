"""What an endpoint is asked, part by part, and what is learnt by it. An `Oracle` says which parts there are, and judges
the answers; here are the parts that all oracles have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from paceline.certify.asking import Control, Fields, Messages
from paceline.certify.conditional import Conditional
from paceline.certify.options import Scope
from paceline.certify.sampled import AT_ONCE, Case, Sampled
from paceline.certify.scenarios import Play
from paceline.certify.verdict import LEVEL, LONG, Finding, Stops
from paceline.errors import PacelineError
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Endpoint, OutOfTime
from paceline.runs.progress import Progress

LEAST_SECONDS = 5.0  # for sampling, however small the budget
Read = Callable[[str, Fields, Completion], None]
"""Counts the tokens of a long sampled answer: of how it was sampled, its request and the answer."""


class Unreadable(PacelineError):
    """Answers whose tokens cannot be judged, and why."""


@dataclass
class Run:
    """One certification: who is asked, how much, and since when.

    broken  what was asked when the endpoint broke off, and how; "" if it did not."""

    endpoint: Endpoint
    scope: Scope = field(default_factory=Scope)
    watch: Progress = field(default_factory=Progress)
    began: float = field(default_factory=perf_counter)
    broken: str = ""

    def at_once(self, until: float) -> int:
        """How many requests are asked together; few where time may be up before they are answered."""
        return AT_ONCE if until == inf else 2 * self.endpoint.slots


@dataclass(frozen=True)
class Learnt:
    """What the parts so far have shown of an endpoint.

    replies     greedy answers of the first pass, as many as were read; left_out: passes that had no time, in words.
    ended       answers with stop strings.
    counts      of long sampled answers, None where there are none; found: what speaks against the endpoint in them.
    two_models  why endpoint and control are not one model with and without drafts; "" if they may be.
    play        the scenarios, None before they are played."""

    replies: Sequence[Completion] = ()
    left_out: Sequence[str] = ()
    ended: Stops = field(default_factory=Stops)
    sampled: Sampled = field(default_factory=Sampled)
    counts: Conditional | None = None
    found: Sequence[Finding] = ()
    two_models: str = ""
    play: Play | None = None

    @property
    def played(self) -> Play:
        """The scenarios, once they were played."""
        assert self.play is not None
        return self.play


@dataclass(frozen=True)
class Part:
    """What an endpoint is asked together.

    share  of the budget after which it ends.
    ask    asks until a time (perf_counter), and returns what is known then: ask(run, learnt, until).
    ends   whether it ends then also where the budget has no limit."""

    name: str
    share: float
    ask: Callable[[Run, Learnt, float], Learnt]
    ends: bool = False


class Oracle(ABC):
    """Judges what an endpoint says.

    plainly  whose answers those of scenarios are compared with; None: no scenario is played. chats: their prompts.
    control  opens the endpoint without drafts: where what is sampled differs, only what differs from it, too, counts.
    shift    the smallest shift to find where none is asked for; None: as small as the budget allows.
    sampled  the share of the budget after which not even the fewest samples of a test are asked for."""

    plainly: Control | None
    chats: Sequence[Messages]
    control: Callable[[], Endpoint] | None
    shift: ClassVar[float | None]
    sampled: ClassVar[float]

    @abstractmethod
    def parts(self) -> list[Part]:
        """What the endpoint is asked, in this order."""

    @abstractmethod
    def cases(self, run: Run, learnt: Learnt, until: float) -> tuple[Sequence[Case], int]:
        """What beginnings of sampled answers are tested by, and how many requests they take."""

    @abstractmethod
    def requests(self, run: Run, learnt: Learnt) -> list[tuple[str, Fields]]:
        """Requests for long sampled answers: how each is sampled, and its body without a seed."""

    @abstractmethod
    def reader(self, learnt: Learnt, endpoint: Endpoint, counts: Conditional) -> Read:
        """What counts the tokens of long answers of an endpoint. It raises Unreadable."""

    @abstractmethod
    def judged(self, run: Run, learnt: Learnt, sampled: dict[str, Any]) -> dict[str, Any]:
        """What a certificate says beside sampled answers: greedy ones, the engine, what was not tested."""

    def reports(self, run: Run, learnt: Learnt, sampled: dict[str, Any]) -> list[dict[str, Any]]:
        """What was found in sampled answers, by the smallest requests that show it."""
        return []

    def broke(self, run: Run, what: str, error: CompletionError) -> None:
        """Note that the endpoint broke off while it was asked for `what`; PacelineError if nothing can be said then."""
        run.broken = f"{what}: {error}"

    @contextmanager
    def asking(self, run: Run, what: str) -> Iterator[None]:
        """Within it an endpoint is asked for `what`, until it breaks off or no more is wanted."""
        try:
            with suppress(OutOfTime):
                yield
        except CompletionError as error:
            self.broke(run, what, error)

    def first(self, run: Run, learnt: Learnt, until: float) -> Learnt:
        """Beginnings of many short sampled answers."""
        if _is_settled(run, learnt):
            return learnt
        cases, number = self.cases(run, learnt, until)
        sampled = replace(learnt.sampled, cases=cases)
        if cases:
            run.watch.say(f"{number:,} sampled requests" + " at most" * (until < inf))
            with self.asking(run, "sampled requests"):
                sampled.run(
                    run.endpoint, number, np.random.default_rng(run.scope.seed), run.watch,
                    control=self.control, until=until, latest=self._latest(run, until),
                )  # fmt: skip
        return replace(learnt, sampled=sampled)

    def long(self, run: Run, learnt: Learnt, until: float) -> Learnt:
        """Long sampled answers; where something is found in them, the control is asked for as many."""
        if _is_settled(run, learnt) or not (requests := self.requests(run, learnt)):
            return learnt
        counts = self._counted(run, learnt, run.endpoint, 0, requests, until)
        found = counts.findings(LEVEL * LONG)
        if found and self.control is not None:
            others = self._counted(run, learnt, self.control(), 1, requests[: counts.answers], inf)
            found = counts.findings(LEVEL * LONG, others)
        return replace(learnt, counts=counts, found=found)

    def _latest(self, run: Run, until: float) -> float:
        """As few samples as a test takes may have the time of all samples."""
        return max(until, run.began + max(LEAST_SECONDS, self.sampled * run.scope.seconds))

    def _counted(
        self, run: Run, learnt: Learnt, endpoint: Endpoint, side: int, requests: Sequence[tuple[str, Fields]],
        until: float,
    ) -> Conditional:  # fmt: skip
        """What comes in the answers of an endpoint, some of them at once, until time is up."""
        rng, counts, watch = np.random.default_rng([run.scope.seed, side + 1]), Conditional(), run.watch
        size, latest = 4 * endpoint.slots if until == inf else endpoint.slots, self._latest(run, until)
        watch.say(f"{len(requests):,} long sampled answers" + " at most" * (until < inf))
        try:
            with self.asking(run, "long sampled answers"):
                read = self.reader(learnt, endpoint, counts)
                while counts.answers < len(requests) and not watch.over(until if counts.answers else latest):
                    some = requests[counts.answers :][:size]
                    seeds = rng.integers(1 << 31, size=len(some)).tolist()
                    bodies = [{**body, "seed": seed} for (_, body), seed in zip(some, seeds, strict=True)]
                    replies = endpoint.ask(bodies)
                    if side == 0:
                        learnt.sampled.count_drafts(replies)
                    for (name, body), one in zip(some, replies, strict=True):
                        if counts.answers and watch.over(until):
                            return counts
                        read(name, body, one)
                        counts.answers += 1
                        watch.step(counts.answers, len(requests))
        except Unreadable as error:
            learnt.played.skip("long sampled answers", str(error))
            return Conditional()
        return counts

    def scenarios(self, run: Run, learnt: Learnt, until: float) -> Learnt:
        """Situations in which engines with drafts have broken."""
        assert self.plainly is not None
        scope = run.scope
        play = Play(
            run.endpoint, self.plainly, self.chats, scope.max_tokens, until, run.watch, scope.left_out, scope.seconds
        )
        play.run()
        run.endpoint.over = self.plainly.source.over = run.watch.stopped
        return replace(learnt, play=play)


def _is_settled(run: Run, learnt: Learnt) -> bool:
    """Whether no more is sampled: none was asked for, something was found, or two models were compared."""
    found = learnt.found or any(look.accuses for look in learnt.sampled.looks)
    return bool(run.scope.requests == 0 or found or learnt.two_models or run.watch.stopped())
