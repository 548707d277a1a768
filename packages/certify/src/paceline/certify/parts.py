"""The parts of a certification, and what is learnt from each. An `Oracle` chooses the parts and judges the answers; the
parts that all oracles share are here."""

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

LEAST_SECONDS = 5.0  # Seconds for sampling, however small the budget.
Read = Callable[[str, Fields, Completion], None]
"""Counts the tokens of a long sampled answer: of how it was sampled, its request and the answer."""


class Unreadable(PacelineError):
    """Answers whose tokens cannot be judged, and why."""


@dataclass
class Run:
    """One certification: the endpoint, the scope, and when it began.

    broken  what the endpoint was asked for when it broke off, and how; "" if it did not."""

    endpoint: Endpoint
    scope: Scope = field(default_factory=Scope)
    watch: Progress = field(default_factory=Progress)
    began: float = field(default_factory=perf_counter)
    broken: str = ""

    def at_once(self, until: float) -> int:
        """How many requests are asked together: few if the time may end before their answers."""
        return AT_ONCE if until == inf else 2 * self.endpoint.slots


@dataclass(frozen=True)
class Learnt:
    """Results of the parts so far.

    replies     the greedy answers of the first pass that were read; left_out: passes that had no time, in words.
    ended       answers with stop strings.
    counts      counts of long sampled answers, or None; found: findings in them, against the endpoint.
    two_models  why endpoint and control cannot be the same model; "" if they can.
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
        """The scenarios, which must have been played."""
        assert self.play is not None
        return self.play


@dataclass(frozen=True)
class Part:
    """A part of a certification.

    share  share of the budget after which the part ends.
    ask    ask(run, learnt, until): asks until that time (perf_counter), and returns what is learnt by then.
    ends   whether the part ends at its share even if the budget does not bound sampling."""

    name: str
    share: float
    ask: Callable[[Run, Learnt, float], Learnt]
    ends: bool = False


class Oracle(ABC):
    """Judges the answers of an endpoint.

    plainly  the control for scenarios; None: no scenario is played. chats: prompts of scenarios.
    control  opens the endpoint without drafts. A finding in sampled answers must then differ from these, too.
    shift    the default of the smallest shift to find; None: as small as the budget allows.
    sampled  share of the budget after which no samples are asked for, not even the fewest that a test takes."""

    plainly: Control | None
    chats: Sequence[Messages]
    control: Callable[[], Endpoint] | None
    shift: ClassVar[float | None]
    sampled: ClassVar[float]

    @abstractmethod
    def parts(self) -> list[Part]:
        """The parts, in the order of asking."""

    @abstractmethod
    def cases(self, run: Run, learnt: Learnt, until: float) -> tuple[Sequence[Case], int]:
        """Returns the cases that test beginnings of sampled answers, and the number of requests."""

    @abstractmethod
    def requests(self, run: Run, learnt: Learnt) -> list[tuple[str, Fields]]:
        """Requests for long sampled answers: how each is sampled, and its body without a seed."""

    @abstractmethod
    def reader(self, learnt: Learnt, endpoint: Endpoint, counts: Conditional) -> Read:
        """Returns a function that counts the tokens of long answers. Raises Unreadable if they cannot be judged."""

    @abstractmethod
    def judged(self, run: Run, learnt: Learnt, sampled: dict[str, Any]) -> dict[str, Any]:
        """Facts for the certificate beside sampled answers: greedy answers, the engine, what was not tested."""

    def reports(self, run: Run, learnt: Learnt, sampled: dict[str, Any]) -> list[dict[str, Any]]:
        """Reports of findings in sampled answers, with the smallest requests that show them."""
        return []

    def broke(self, run: Run, what: str, error: CompletionError) -> None:
        """Note that the endpoint broke off while it was asked for `what`.
        Raises PacelineError if that ends everything."""
        run.broken = f"{what}: {error}"

    @contextmanager
    def asking(self, run: Run, what: str) -> Iterator[None]:
        """Context in which an endpoint is asked for `what`.
        It ends quietly when time is up or the endpoint breaks off."""
        try:
            with suppress(OutOfTime):
                yield
        except CompletionError as error:
            self.broke(run, what, error)

    def first(self, run: Run, learnt: Learnt, until: float) -> Learnt:
        """Test the beginnings of many short sampled answers."""
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
        """Test long sampled answers. If something is found, the control is asked for as many."""
        if _is_settled(run, learnt) or not (requests := self.requests(run, learnt)):
            return learnt
        counts = self._counted(run, learnt, run.endpoint, 0, requests, until)
        found = counts.findings(LEVEL * LONG)
        if found and self.control is not None:
            others = self._counted(run, learnt, self.control(), 1, requests[: counts.answers], inf)
            found = counts.findings(LEVEL * LONG, others)
        return replace(learnt, counts=counts, found=found)

    def _latest(self, run: Run, until: float) -> float:
        """When to give up even the fewest samples of a test: at `until` or later."""
        return max(until, run.began + max(LEAST_SECONDS, self.sampled * run.scope.seconds))

    def _counted(
        self, run: Run, learnt: Learnt, endpoint: Endpoint, side: int, requests: Sequence[tuple[str, Fields]],
        until: float,
    ) -> Conditional:  # fmt: skip
        """Ask an endpoint, several requests at once, until time is up. Returns the counts of its answers."""
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
        """Play situations in which engines with drafts have broken."""
        assert self.plainly is not None
        scope = run.scope
        play = Play(
            run.endpoint, self.plainly, self.chats, scope.max_tokens, until, run.watch, scope.left_out, scope.seconds
        )
        play.run()
        run.endpoint.over = self.plainly.source.over = run.watch.stopped
        return replace(learnt, play=play)


def _is_settled(run: Run, learnt: Learnt) -> bool:
    """Whether sampling is over: none is wanted, something was found, two models were compared, or the user stopped."""
    found = learnt.found or any(look.accuses for look in learnt.sampled.looks)
    return bool(run.scope.requests == 0 or found or learnt.two_models or run.watch.stopped())
