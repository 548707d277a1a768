"""Two judges of an endpoint's answers: its model's logits, or reported log-probabilities and a control's answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import ceil, inf
from typing import Any, ClassVar

from paceline.certify import stats
from paceline.certify.asking import Control, Fields, Messages, places, request
from paceline.certify.conditional import Conditional, Words, is_raw, read, read_places
from paceline.certify.greedy import PASSES, Reader, Rounds, acceptance, measured, replayed, stop_strings
from paceline.certify.options import REQUESTS, SHIFT
from paceline.certify.parts import Learnt, Oracle, Part, Read, Run, Unreadable
from paceline.certify.sampled import KnownCase, Sampled, TextCase, best_view, distribution_of, level_of, needed
from paceline.certify.scenarios import MIXED, SPENT
from paceline.certify.shrink import sampled_report
from paceline.certify.verdict import Finding, Greedy, Stops
from paceline.core.sampling import SamplingParams
from paceline.draft.recording import Recording
from paceline.errors import PacelineError
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Endpoint
from paceline.peers.reference import Model, Rounding

Prompts = Sequence[Sequence[int]]


# By the model ---------------------------------------------------------------------------------------------------------

WAYS = REQUESTS["sampling"]
"""How sampled answers are sampled, in turn."""
AHEAD = 2  # A request asks for so many tokens more than are tested, so that drafts may reach beyond those.
REPEATED = 6  # The prompt of a long sampled answer repeats its beginning so often, so that there is much to copy.
LONG_TOKENS = 6.0
"""Tokens of long sampled answers that a shift of 1 would take; one of a tenth takes a hundred times as many."""
REQUESTS_EACH = 16  # Sampled requests for each long answer, if their number is given.


@dataclass
class Exact(Oracle):
    """Judges an engine that takes token ids by its model, which reads every answer.

    exact, own  the model in float32, and in the engine's dtype (None if that is float32).
    recording   what is known of the model; max_context: the engine's.
    prompts     for greedy answers; starts: short prompts, for the distribution of the next tokens.
    draft       the drafter's spec, if its replay can be the reference acceptance;
                chains: whether to cut it to chains."""

    exact: Model
    own: Model | None
    recording: Recording
    prompts: Prompts
    starts: Prompts
    max_context: int = 1024
    draft: str | None = None
    chains: bool = False
    control: Callable[[], Endpoint] | None = None
    plainly: Control | None = None
    chats: Sequence[Messages] = ()

    shift: ClassVar = SHIFT
    sampled: ClassVar = 0.6

    def __post_init__(self) -> None:
        self.rounding = Rounding(self.exact, self.own)
        self.answers = Reader(self.rounding, self.recording.eos_token_ids)

    def parts(self) -> list[Part]:
        played = [] if self.plainly is None else [Part("scenarios", 1.0, self.scenarios, ends=True)]
        return [
            Part("greedy", 0.2, self.greedy), Part("stops", 0.25, self.stops), Part("first", 0.4, self.first),
            Part("long", self.sampled, self.long), *played,
        ]  # fmt: skip

    def broke(self, run: Run, what: str, error: CompletionError) -> None:
        raise PacelineError(f"{run.endpoint.name} failed: {error}") from None

    def greedy(self, run: Run, learnt: Learnt, until: float) -> Learnt:
        """Ask for the passes that fit the engine. At least one answer is read, whatever the time."""
        first, left_out, prompts = list[Completion](), list[str](), self.prompts
        run.watch.say("greedy answers")
        for each in PASSES:
            if not each.fits(run.endpoint):
                continue
            company = each.company.format(batch=run.endpoint.slots)
            size = 1 if each.alone else run.at_once(until)
            replies, read = list[Completion](), 0
            with self.asking(run, "greedy answers"):
                while read < len(prompts) and not run.watch.over(until if first or read else inf):
                    if read == len(replies):
                        replies += each.ask(run.endpoint, prompts[read : read + size], run.scope.max_tokens, read)
                    params = each.params(read, run.scope.max_tokens)
                    self.answers.read(read, prompts[read], replies[read].tokens, params, company)
                    read += 1
                    run.watch.step(read, len(prompts))
            first = first or replies[:read]
            if read < len(prompts):
                rest = f" to {len(prompts) - read} of {len(prompts)} prompts" if read else ""
                left_out.append(f"{'' if each.seeded else 'greedy '}answers {company}{rest}: {SPENT}")
        return replace(learnt, replies=first, left_out=left_out)

    def stops(self, run: Run, learnt: Learnt, until: float) -> Learnt:
        """Ask again with stop strings that are cut out of the replies of the first pass."""
        if self.recording.tokenizer is None or not run.endpoint.can_take({"stop": ()}):
            return learnt
        pairs, done, ended = zip(self.prompts, learnt.replies, strict=False), 0, Stops()
        asked = [(prompt, stop) for prompt, one in pairs for stop in stop_strings(one.text)]
        run.watch.say("stop strings")
        with self.asking(run, "stop strings"):
            while done < len(asked) and not run.watch.over(until):
                some, most = asked[done : done + run.at_once(until)], run.scope.max_tokens
                replies = run.endpoint.ask([request(prompt, max_tokens=most, stop=[stop]) for prompt, stop in some])
                for (prompt, stop), one in zip(some, replies, strict=True):
                    ended.answers += 1
                    whole, before = self.decode(prompt, one.tokens), self.decode(prompt, one.tokens[:-1])
                    right = whole[: whole.index(stop)] if stop in whole else whole
                    if one.text != right or stop in before:
                        ended.wrong.append({"stop": stop, "text": one.text, "right": right})
                done += len(some)
        return replace(learnt, ended=ended)

    def decode(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        """The text of an answer, without its end tokens."""
        tokenizer, ends = self.recording.tokenizer, self.recording.eos_token_ids
        assert tokenizer is not None
        detokenizer = tokenizer.detokenizer(list(prompt))
        return "".join(detokenizer.push(t) for t in answer if t not in ends) + detokenizer.flush()

    def cases(self, run: Run, learnt: Learnt, until: float) -> tuple[list[KnownCase], int]:
        """Returns a case for each way to sample, with the exact distribution of first tokens,
        and the number of requests."""
        cases = list[KnownCase]()
        run.watch.say("the exact distribution of first tokens")
        for i, (name, way) in enumerate(WAYS.items()):
            if run.watch.stopped() or (cases and run.watch.over(until)):
                break
            start = self.starts[(i + 2) % len(self.starts)]  # Penalties then meet a text of few different tokens.
            length = run.scope.length
            fields = {**way, "max_tokens": length + AHEAD, "ignore_eos": True}
            if run.endpoint.can_take(fields):
                distribution = distribution_of(self.rounding, start, SamplingParams(**fields), length)
                if distribution.df:
                    cases.append(KnownCase(name, request(start, **fields), distribution))
            run.watch.step(i + 1, len(WAYS))
        number = run.scope.requests
        return cases, needed(cases, run.scope.shift or SHIFT) if cases and number is None else number or 0

    def requests(self, run: Run, learnt: Learnt) -> list[tuple[str, Fields]]:
        """Requests in every way to sample, after repeated beginnings and after the prompts of greedy answers."""
        scope = run.scope
        if not learnt.sampled.cases:
            return []
        space = self.max_context - scope.max_tokens
        prompts = [list(one) * max(1, min(REPEATED, space // len(one))) for one in self.starts]
        prompts += map(list, self.prompts)
        ways = [(name, way) for name, way in WAYS.items() if run.endpoint.can_take(way)]
        number = ceil(LONG_TOKENS / (scope.shift or SHIFT) ** 2 / scope.max_tokens)
        if scope.requests is not None:
            number = min(number, -(-scope.requests // REQUESTS_EACH))
        every = []
        for i in range(number):
            name, way = ways[(i + i // len(prompts)) % len(ways)]
            fields = {**way, "max_tokens": scope.max_tokens, "ignore_eos": True}
            every.append((name, request(prompts[i % len(prompts)], **fields)))
        return every

    def reader(self, learnt: Learnt, endpoint: Endpoint, counts: Conditional) -> Read:
        def counted(name: str, body: Fields, reply: Completion) -> None:
            read(self.rounding, body["prompt"], reply.tokens, SamplingParams(**WAYS[name]), name, counts)

        return counted

    def judged(self, run: Run, learnt: Learnt, sampled: dict[str, Any]) -> dict[str, Any]:
        """Facts on greedy answers, on what was not tested, and on how often drafts were accepted."""
        engine, replies, reference = run.endpoint, learnt.replies, list[Rounds]()
        run.watch.say("how often drafts are accepted")
        if self.draft is not None and replies:
            texts = [one.tokens for one in replies]
            reference = replayed(self.draft, self.recording, self.prompts[: len(texts)], texts, chains=self.chains)
        names = [name for name, way in WAYS.items() if not engine.can_take(way)]
        missing = [f"sampling by {name}: this engine is not asked for it" for name in names]
        if not sampled["cases"]:
            missing.append("sampling")
        elif sampled["draft_tokens"] == 0:
            missing.append("drafts in sampled answers: none was made")
        elif sampled["draft_tokens"] is None:
            missing.append("drafts in sampled answers: the engine does not say how many it made")
        if not learnt.ended.answers:
            missing.append("stop strings")
        if engine.slots == 1:
            missing.append("batches")
        elif not engine.mixes:
            missing.append("greedy and sampled requests in one batch")
        return {
            "greedy": self.answers.found,
            "engine": engine.name,
            "draft": self.draft,
            "ran_on": engine.facts,
            "not_tested": missing,
            "acceptance": acceptance(measured(replies), reference),
            "also": ["scenarios"] if learnt.play is not None and learnt.play.bugs else [],
        }


# By what servers say --------------------------------------------------------------------------------------------------
#
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
