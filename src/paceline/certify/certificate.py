"""The certificate of an endpoint: what it is asked, part by part, and what its oracle says of the answers.

    certify(engine, Exact(model, None, recording, prompts, starts))    # judged by the exact logits of its model
    certify(server, Reported(control, prompts))                        # by log-probabilities and a control's answers"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from paceline.certify import verdict
from paceline.certify.asking import Fields
from paceline.certify.conditional import Conditional
from paceline.certify.engines import request, takes
from paceline.certify.greedy import PASSES, stop_strings
from paceline.certify.options import Scope, Watch
from paceline.certify.oracles import Exact, Reported, Unreadable
from paceline.certify.sampled import AT_ONCE, Sampled
from paceline.certify.scenarios import SPENT, Play
from paceline.certify.shrink import greedy_reports
from paceline.certify.verdict import LEVEL, LONG, Finding, Stops
from paceline.errors import PacelineError
from paceline.net.client import Completion, CompletionError
from paceline.net.endpoint import Endpoint, OutOfTime

INTERRUPTED = "it was interrupted"
LEAST_SECONDS = 5.0  # for sampling, however small the budget
FOR_REPORTS = 0.15  # share of the budget for making findings small, at least


def certify(
    endpoint: Endpoint, oracle: Exact | Reported, scope: Scope = Scope(), watch: Watch = Watch()
) -> dict[str, Any]:
    """Test `endpoint` and say what was found."""
    return Asked(endpoint, oracle, scope, watch).run()


@dataclass
class Asked:
    """One certification: what was asked so far, and what was found.

    replies     greedy answers of the first pass, as many as were read; left_out: passes that had no time, in words.
    ended       answers with stop strings.
    counts      of long sampled answers, None where there are none; found: what speaks against the endpoint in them.
    two_models  why endpoint and control are not one model with and without drafts; "" if they may be.
    broken      what was asked when the endpoint broke off, and how; "" if it did not."""

    endpoint: Endpoint
    oracle: Exact | Reported
    scope: Scope
    watch: Watch
    replies: list[Completion] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    ended: Stops = field(default_factory=Stops)
    sampled: Sampled = field(default_factory=Sampled)
    counts: Conditional | None = None
    found: list[Finding] = field(default_factory=list)
    two_models: str = ""
    broken: str = ""
    _play: Play | None = None

    @property
    def play(self) -> Play:
        """The scenarios, once they were played."""
        assert self._play is not None
        return self._play

    def __post_init__(self) -> None:
        self.began = perf_counter()
        # As few samples as a test takes may have the time of all samples.
        share = max(self.oracle.parts["first"], self.oracle.parts["long"])
        self.latest = self.began + max(LEAST_SECONDS, share * self.scope.seconds)

    def run(self) -> dict[str, Any]:
        """Ask for all parts, each until its share of the budget is spent."""
        began, seconds, bounded = self.began, self.scope.seconds, self.scope.is_bounded
        if bounded:
            self.watch.limit(seconds)
        self.endpoint.over = self.watch.stopped
        for part, share in self.oracle.parts.items():
            if part == "scenarios":  # they always end; where nothing is sampled they have that time too
                share = share if self.scope.requests != 0 else max(self.oracle.parts.values())
                self.scenarios((began if bounded else perf_counter()) + share * seconds)
            else:
                getattr(self, part)(began + share * seconds if bounded else inf)
        return self._certificate()

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Within it an endpoint is asked for `what`, until it breaks off or no more is wanted."""
        try:
            with suppress(OutOfTime):
                yield
        except CompletionError as error:
            if isinstance(self.oracle, Exact):
                raise PacelineError(f"{self.endpoint.name} failed: {error}") from None
            self.broken = f"{what}: {error}"

    def _at_once(self, until: float) -> int:
        """How many requests are asked together; few where time may be up before they are answered."""
        return AT_ONCE if until == inf else 2 * self.endpoint.slots

    # Parts --------------------------------------------------------------------------------------------------------

    def greedy(self, until: float) -> None:
        """The passes that fit the engine, and one answer always."""
        oracle, most = self.oracle, self.scope.max_tokens
        assert isinstance(oracle, Exact)
        self.watch.say("greedy answers")
        for each in PASSES:
            if not each.fits(self.endpoint):
                continue
            company = each.company.format(batch=self.endpoint.slots)
            size = 1 if each.alone else self._at_once(until)
            replies, read, prompts = list[Completion](), 0, oracle.prompts
            with self._asking("greedy answers"):
                while read < len(prompts) and not self.watch.over(until if self.replies or read else inf):
                    if read == len(replies):
                        replies += each.ask(self.endpoint, prompts[read : read + size], most, read)
                    params = each.params(read, most)
                    oracle.greedy.read(read, prompts[read], replies[read].tokens, params, company)
                    read += 1
                    self.watch.step(read, len(prompts))
            self.replies = self.replies or replies[:read]
            if read < len(prompts):
                rest = f" to {len(prompts) - read} of {len(prompts)} prompts" if read else ""
                self.left_out.append(f"{'' if each.seeded else 'greedy '}answers {company}{rest}: {SPENT}")

    def stops(self, until: float) -> None:
        """Stop strings that are cut out of the replies of the first pass."""
        oracle, done = self.oracle, 0
        assert isinstance(oracle, Exact)
        if oracle.recording.tokenizer is None or not takes(self.endpoint, {"stop": ()}):
            return
        pairs = zip(oracle.prompts, self.replies, strict=False)
        asked = [(prompt, stop) for prompt, one in pairs for stop in stop_strings(one.text)]
        self.watch.say("stop strings")
        with self._asking("stop strings"):
            while done < len(asked) and not self.watch.over(until):
                some = asked[done : done + self._at_once(until)]
                most = self.scope.max_tokens
                replies = self.endpoint.ask([request(prompt, max_tokens=most, stop=[stop]) for prompt, stop in some])
                for (prompt, stop), one in zip(some, replies, strict=True):
                    self.ended.answers += 1
                    whole, before = oracle.decode(prompt, one.tokens), oracle.decode(prompt, one.tokens[:-1])
                    right = whole[: whole.index(stop)] if stop in whole else whole
                    if one.text != right or stop in before:
                        self.ended.wrong.append({"stop": stop, "text": one.text, "right": right})
                done += len(some)

    def first(self, until: float) -> None:
        """Beginnings of many short sampled answers."""
        if self._no_samples():
            return
        self.sampled.cases, number = self.oracle.cases(self, until)
        if not self.sampled.cases:
            return
        self.watch.say(f"{number:,} sampled requests" + " at most" * (until < inf))
        with self._asking("sampled requests"):
            self.sampled.run(
                self.endpoint, number, np.random.default_rng(self.scope.seed), self.watch,
                control=self.oracle.control, until=until, latest=max(until, self.latest),
            )  # fmt: skip

    def long(self, until: float) -> None:
        """Long sampled answers; where something is found in them, the control is asked for as many."""
        if self._no_samples() or not (requests := self.oracle.long(self)):
            return
        self.counts, control = self._counted(self.endpoint, 0, requests, until), self.oracle.control
        self.found = self.counts.findings(LEVEL * LONG)
        if self.found and control is not None:
            others = self._counted(control(), 1, requests[: self.counts.answers], inf)
            self.found = self.counts.findings(LEVEL * LONG, others)

    def _no_samples(self) -> bool:
        """Whether no more is sampled: none was asked for, something was found, or two models were compared."""
        found = self.found or any(look.accuses for look in self.sampled.looks)
        return bool(self.scope.requests == 0 or found or self.two_models or self.watch.stopped())

    def _counted(
        self, endpoint: Endpoint, side: int, requests: Sequence[tuple[str, Fields]], until: float
    ) -> Conditional:
        """What comes in the answers of an endpoint, some of them at once, until time is up."""
        rng, counts = np.random.default_rng([self.scope.seed, side + 1]), Conditional()
        size, latest = 4 * endpoint.slots if until == inf else endpoint.slots, max(until, self.latest)
        self.watch.say(f"{len(requests):,} long sampled answers" + " at most" * (until < inf))
        try:
            with self._asking("long sampled answers"):
                read = self.oracle.reader(self, endpoint, counts)
                while counts.answers < len(requests) and not self.watch.over(until if counts.answers else latest):
                    some = requests[counts.answers :][:size]
                    seeds = rng.integers(1 << 31, size=len(some)).tolist()
                    bodies = [{**body, "seed": seed} for (_, body), seed in zip(some, seeds, strict=True)]
                    replies = endpoint.ask(bodies)
                    if side == 0:
                        self.sampled.count_drafts(replies)
                    for (name, body), one in zip(some, replies, strict=True):
                        if counts.answers and self.watch.over(until):
                            return counts
                        read(name, body, one)
                        counts.answers += 1
                        self.watch.step(counts.answers, len(requests))
        except Unreadable as error:
            self.play.skip("long sampled answers", str(error))
            return Conditional()
        return counts

    def scenarios(self, until: float) -> None:
        """Situations in which engines with drafts have broken."""
        oracle, scope = self.oracle, self.scope
        if oracle.plainly is None:
            return
        self._play = Play(
            self.endpoint, oracle.plainly, oracle.chats, scope.max_tokens, until, self.watch, scope.left_out,
            scope.seconds,
        )  # fmt: skip
        self.play.run()
        self.endpoint.over = oracle.plainly.source.over = self.watch.stopped
        if isinstance(oracle, Reported):
            oracle.heard(self)

    # What is said of them -----------------------------------------------------------------------------------------

    def _certificate(self) -> dict[str, Any]:
        scope, play, stopped = self.scope, self._play, self.watch.stopped()
        sampled, power = self.sampled.facts(), self.sampled.power(scope)
        if self.counts is not None:
            sampled = verdict.with_long(sampled, self.counts.facts(LEVEL * LONG), self.found)
        about = self.oracle.judged(self, sampled)
        not_tested = [*self.left_out, *about.pop("not_tested")]
        played: dict[str, Any] = {}
        if play is not None:
            # What was found is made small, also after Ctrl-C.
            self.endpoint.over = play.control.source.over = lambda: False
            play.until = max(self.began + scope.seconds, perf_counter() + FOR_REPORTS * scope.seconds)
            not_tested += play.not_tested()
            reports = [] if self.two_models else greedy_reports(play)
            if isinstance(self.oracle, Reported) and not self.two_models:
                reports += self.oracle.reports(self, sampled)
            played = {"scenarios": play.rows, "features": sorted(play.features), "reports": reports}
        return verdict.certificate(
            about.pop("greedy"), self.ended, sampled, power, replace(scope, shift=scope.shift or self.oracle.shift),
            **about, **played, not_tested=not_tested, two_models=self.two_models,
            also=["scenarios"] if isinstance(self.oracle, Exact) and play is not None and play.bugs else [],
            broken=INTERRUPTED if stopped else self.broken,
            seconds=round(perf_counter() - self.began, 1),
        )  # fmt: skip
