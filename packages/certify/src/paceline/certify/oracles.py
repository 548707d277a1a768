"""An oracle that knows no model: it judges a server by reported log-probabilities and a control's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, ClassVar

from paceline.certify import stats
from paceline.certify.acceptance import acceptance
from paceline.certify.asking import Control, Fields, Messages, places
from paceline.certify.conditional import Conditional, Words, is_raw, read_places
from paceline.certify.options import REQUESTS
from paceline.certify.parts import Learnt, Oracle, Part, Read, Run, Unreadable
from paceline.certify.sampled import Sampled, TextCase, best_view, level_of
from paceline.certify.scenarios import MIXED
from paceline.certify.shrink import sampled_report
from paceline.certify.verdict import Finding, Greedy
from paceline.moved import aliases
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Endpoint

# Long sampled answers are judged token by token, by the log-probabilities that the server reports. If there is a
# control, beginnings of many short answers are compared with the control's.

MOST = 40_000  # Most sampled requests, if no number is given. The budget may allow fewer.
SAMPLED_TOKENS = 12  # Enough tokens of an answer for drafts to be accepted, cut and followed by others.
SERVER_WAYS: dict[str, Fields] = REQUESTS["server_sampling"]
"""How a server samples, in turn."""
NO_FILTERS: Fields = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # llama.cpp's own defaults differ.
SERVER_TOKENS = 20_000  # Tokens of all long sampled answers. The budget may allow fewer.
SHORT_EACH = 4  # Short sampled answers for each long one, if their number is given.


@dataclass
class Reported(Oracle):
    """Judges a server by the log-probabilities that it reports, and by a control. Scenarios give the greedy answers."""

    plainly: Control
    chats: Sequence[Messages]

    shift: ClassVar = None
    sampled: ClassVar = 0.85

    def __post_init__(self) -> None:
        self.control = None if self.plainly.is_self else lambda: self.plainly.source

    def parts(self) -> list[Part]:
        return [
            Part("scenarios", 0.35, self.scenarios, ends=True), Part("long", 0.6, self.long),
            Part("first", self.sampled, self.first),
        ]  # fmt: skip

    def scenarios(self, run: Run, learnt: Learnt, until: float) -> Learnt:
        """Play the scenarios. They also show whether two models are compared, and how far rounding moves."""
        learnt = super().scenarios(run, learnt, until)
        sampled = Sampled(slack=learnt.played.noise)
        return replace(learnt, two_models=learnt.played.two_models(), sampled=sampled, counts=Conditional())

    def _ways(self, run: Run, learnt: Learnt) -> dict[str, Fields]:
        """Ways to sample that the server takes, by name."""
        features = learnt.played.features
        # By its own log-probabilities a server that ignores a field would look wrong; a control ignores it too.
        ignored = {"min_p", "top_k", "frequency_penalty"} if self.control is None else set()
        known = {"temperature", "top_p", *features} - ignored
        neutral = {name: value for name, value in NO_FILTERS.items() if name in {"top_p", *features}}
        alike = self.control is not None and _alike(run.endpoint, self.control())
        ways = {n: way for n, way in SERVER_WAYS.items() if alike or len(way) == 1 or way["temperature"] == 1}
        return {name: neutral | way for name, way in ways.items() if way.keys() <= known}

    def cases(self, run: Run, learnt: Learnt, until: float) -> tuple[list[TextCase], int]:
        """Returns cases in every way to sample, for a prompt with a free answer and one with a copied answer, and the
        number of requests."""
        scope, noise, ways = run.scope, learnt.played.noise, {} if self.control is None else self._ways(run, learnt)
        cases = [
            TextCase(name, {"messages": list(text), "max_tokens": SAMPLED_TOKENS, **way}, noise)
            for name, way in ways.items() for text in (self.chats[0], MIXED[0])
        ]  # fmt: skip
        number = MOST if scope.requests is None else scope.requests
        if cases and scope.requests is None and scope.shift is not None:
            of: Fields = {"df": 10 * len(cases), "level": level_of(-1), "samples": 2}
            number = stats.samples_for(shift=scope.shift, **of)
            while number < MOST and stats.detectable(number, rounding=float(noise), **of) > scope.shift:
                number = number * 9 // 8  # Rounding hides a part of the shift.
        return cases, max(number, TextCase.least * len(cases))

    def requests(self, run: Run, learnt: Learnt) -> list[tuple[str, Fields]]:
        scope, ways = run.scope, self._ways(run, learnt)
        if "log-probabilities" not in learnt.played.features:
            return []
        number = SERVER_TOKENS // scope.max_tokens
        if scope.requests is not None:
            number = min(number, -(-scope.requests // SHORT_EACH))
        pairs = ((name, prompt) for prompt in cycle([*self.chats, *MIXED]) for name in ways)
        return [
            (name, learnt.played.asked({"messages": list(prompt), "max_tokens": scope.max_tokens, **ways[name]}))
            for name, prompt in islice(pairs, number)
        ]

    def reader(self, learnt: Learnt, endpoint: Endpoint, counts: Conditional) -> Read:
        """Returns a function that counts tokens by their log-probabilities.
        Raises Unreadable if some tokens have none."""
        most = learnt.played.features["log-probabilities"].get("top_logprobs")
        first = {"messages": list(self.chats[0]), "max_tokens": 1}
        bodies = [learnt.played.asked(first | {"temperature": temperature}) for temperature in (1.0, 0.5)]
        hot, cold = map(places, endpoint.ask(bodies))
        # Counting only the tokens that have them would be no fair sample: drafts decide which tokens have them.
        some = Unreadable("some tokens come without the best ones at their places (top_logprobs)")
        if not all(answer and answer[0].top for answer in (hot, cold)):
            raise some
        raw, words = is_raw(hot, cold), Words()

        def counted(name: str, body: Fields, reply: Completion) -> None:
            answer = places(reply, most)
            if not all(place.top for place in answer):
                raise some
            read_places(answer, body, counts, words, name, raw=raw)

        return counted

    def reports(self, run: Run, learnt: Learnt, sampled: dict[str, Any]) -> list[dict[str, Any]]:
        if learnt.found and learnt.counts is not None:
            requests, most = self.requests(run, learnt), run.scope.max_tokens
            bodies = (body for one in learnt.found for name, body in requests if f"({name})" in one.what)
            body, number = next(bodies, requests[0][1]), learnt.counts.tokens // most
            return [sampled_report(run.endpoint, body, number, learnt.found[0])]
        if sampled["lossless"]:
            return []
        worst = min(learnt.sampled.cases, key=lambda case: best_view(case).p)
        found, seen = Finding(**sampled["findings"][0]), best_view(worst).facts["seen"]
        return [sampled_report(run.endpoint, worst.body, worst.requests, found, seen)]

    def judged(self, run: Run, learnt: Learnt, sampled: dict[str, Any]) -> dict[str, Any]:
        """Facts on greedy answers by the scenarios, and on what a server without a control leaves open."""
        play, is_self = learnt.played, self.control is None
        greedy = Greedy(play.answers, play.tokens, play.divergences)
        if not play.answers:
            greedy.why = play.rows[0]["why"]
        elif "log-probabilities" not in play.features and (is_self or play.divergences):
            greedy.why = "the server reports no log-probabilities (logprobs, top_logprobs), which tell ties from bugs"
        return {
            "greedy": greedy,
            "engine": f"{run.endpoint.name}, against {self.plainly.name}",
            "draft": None,
            "ran_on": {"endpoint": run.endpoint.url},
            "not_tested": ["what the log-probabilities share with the answers: give a control"] * is_self,
            "acceptance": acceptance((), ()),
        }


def _alike(server: Endpoint, control: Endpoint) -> bool:
    """Whether both servers are of the same kind and filter after the temperature. llama.cpp filters before it."""
    try:
        kinds = {getattr(one, "owner", "") for one in (server, control)}
    except CompletionError:  # The server has no list of models, which names its kind.
        return False
    return len(kinds) == 1 and kinds.isdisjoint({"", "llamacpp"})


aliases(__name__)
