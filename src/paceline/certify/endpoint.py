"""An endpoint against its control: greedily in the scenarios, and sampled.

Long sampled answers are read token by token, by the log-probabilities that the server reports. Where there is a
control, beginnings of many short ones are compared with its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import numpy as np

from paceline.certify import stats, verdict
from paceline.certify.asking import Control, Fields, Messages, places
from paceline.certify.certificate import INTERRUPTED, acceptance
from paceline.certify.conditional import Conditional, Words, is_raw, read_places
from paceline.certify.options import REQUESTS, Scope, Watch
from paceline.certify.sampled import LOOKS, level_of
from paceline.certify.scenarios import MIXED, Play
from paceline.certify.shrink import greedy_reports, sampled_report
from paceline.certify.verdict import LEVEL, LONG, Finding, Greedy, Look, Stops
from paceline.workbench.client import Completion, CompletionError
from paceline.workbench.endpoint import Endpoint, OutOfTime

MOST = 40_000  # most sampled requests of a certificate where none are asked for; the budget may allow fewer
SAMPLED_TOKENS = 12  # of a sampled answer: enough for drafts to be accepted, cut and followed by others
WAYS: dict[str, Fields] = REQUESTS["server_sampling"]
"""How sampled answers are sampled, in turn."""
NO_FILTERS: Fields = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # llama.cpp's server has others where none are asked for
LONG_TOKENS = 20_000  # tokens of long sampled answers; the budget may allow fewer
SHORT_EACH = 4  # short sampled answers for each long one, where their number was asked for
FOR_SAMPLES, FOR_REPORTS = 0.5, 0.15
"""Shares of the budget that scenarios leave for the sampling test, and both for making findings small."""


def certify_endpoint(
    server: Endpoint, control: Control, prompts: Sequence[Messages], scope: Scope, watch: Watch = Watch()
) -> dict[str, Any]:
    """The certificate of an endpoint; its parts are named as those of `certificate.certify`."""
    began = perf_counter()
    if scope.is_bounded:
        watch.limit(scope.seconds)
    for_samples = 0.0 if scope.requests == 0 else FOR_SAMPLES
    until = began + scope.seconds * (1 - FOR_REPORTS - for_samples)
    play = Play(server, control, prompts, scope.max_tokens, until, watch, scope.left_out, scope.seconds)
    play.run()
    server.over = control.source.over = watch.stopped
    greedy = Greedy(play.answers, play.tokens, play.divergences)
    if "log-probabilities" not in play.features and (control.is_self or play.divergences):
        greedy.why = "the server reports no log-probabilities (logprobs, top_logprobs), which tell ties from bugs"
    apart = play.two_models()
    # What a server takes and ignores would be found by its own log-probabilities; a control ignores it too.
    ignored = {"min_p", "top_k", "frequency_penalty"} if control.is_self else set()
    known = {"temperature", "top_p", *play.features} - ignored
    neutral = {name: value for name, value in NO_FILTERS.items() if name in {"top_p", *play.features}}
    samples = scope.requests != 0 and not apart
    alike = samples and not control.is_self and _alike(server, control.source)
    asked = {name: way for name, way in WAYS.items() if alike or len(way) == 1 or way["temperature"] == 1}
    ways = {name: neutral | way for name, way in asked.items() if way.keys() <= known} if samples else {}
    until = began + scope.seconds * (1 - FOR_REPORTS)
    counts, found = _long(play, ways, scope, until)
    if not play.answers:
        greedy.why = play.rows[0]["why"]
    cases = [] if control.is_self or found or apart or watch.stopped() else _cases(play, ways)
    looks = sample(play, cases, scope, until) if cases else []
    facts = [case.facts(float(play.noise)) for case in cases if case.mine]
    server.over = control.source.over = lambda: False  # what was found is made small, also after Ctrl-C
    play.until = max(began + scope.seconds, perf_counter() + FOR_REPORTS * scope.seconds)
    reports = [] if apart else greedy_reports(play)
    sampled = verdict.sampled_facts(looks, facts)
    if found:
        named = (way for one in found for name, way in ways.items() if f"({name})" in one.what)
        way = next(named, WAYS["temperature 1"])
        body = play.asked({"messages": list(play.prompts[0]), "max_tokens": scope.max_tokens, **way})
        reports.append(sampled_report(server, body, counts.tokens // scope.max_tokens, found[0]))
    elif not sampled["lossless"]:
        body, worst = min(zip((case.body for case in cases), facts, strict=True), key=lambda pair: pair[1]["p"])
        first = Finding(**sampled["findings"][0])
        reports.append(sampled_report(server, body, worst["requests"], first, worst["seen"]))
    count, df = looks[-1].requests if looks else 0, sum(one["df"] for one in facts)
    power = verdict.power(scope, count, df, level_of(-1), samples=2, rounding=float(play.noise))
    sampled = verdict.with_long(sampled, counts.facts(LEVEL * LONG), found)
    missing = ["what the log-probabilities share with the answers: give a control"] if control.is_self else []
    made = verdict.certificate(
        greedy, Stops(), sampled, power, scope,
        engine=f"{server.name}, against {control.name}", draft=None, not_tested=[*missing, *play.not_tested()],
        ran_on={"endpoint": server.url}, acceptance=acceptance(None, None),
        scenarios=play.rows, features=sorted(play.features), reports=reports,
        broken=INTERRUPTED if watch.stopped() else play.broken,
        seconds=round(perf_counter() - began, 1),
    )  # fmt: skip
    return made | ({"verdict": verdict.TWO_MODELS, "why": apart} if apart else {})


def _alike(server: Endpoint, control: Endpoint) -> bool:
    """Whether both are servers of one kind, which has filters after the temperature: llama.cpp's has them before it."""
    try:
        kinds = {getattr(one, "owner", "") for one in (server, control)}
    except CompletionError:  # no list of models
        return False
    return len(kinds) == 1 and kinds.isdisjoint({"", "llamacpp"})


def _long(play: Play, ways: Mapping[str, Fields], scope: Scope, until: float) -> tuple[Conditional, list[Finding]]:
    """Long sampled answers, and what comes in them too often or too rarely, also by the control's own.

    They take half of the time until `until`; where something is found the control has the other half."""
    if not ways or "log-probabilities" not in play.features or play.watch.stopped():
        return Conditional(), []
    play.watch.say("long sampled answers")
    rng, words = np.random.default_rng([scope.seed, 1]), Words()
    most = play.features["log-probabilities"].get("top_logprobs")
    number = LONG_TOKENS // scope.max_tokens
    if scope.requests is not None:
        number = min(number, -(-scope.requests // SHORT_EACH))
    pairs = ((name, prompt) for prompt in cycle([*play.prompts, *MIXED]) for name in ways)
    asked = list(islice(pairs, number))

    def counted(endpoint: Endpoint, until: float) -> Conditional:
        """What comes in the long answers of a server."""
        counts = Conditional()
        try:
            with suppress(OutOfTime):
                if count(endpoint, counts, until):
                    return counts
            if play.watch.stopped():
                return counts
            why = "some tokens come without the best ones at their places (top_logprobs)"
            play.skip("long sampled answers", why)  # those that do are no sample: drafts decide which ones they are
            return Conditional()
        except CompletionError as error:
            play.broken = f"long sampled answers: {error}"
            return counts

    def count(endpoint: Endpoint, counts: Conditional, until: float) -> bool:
        """Ask for answers until there are enough, or the time is up; False where they cannot be read."""
        first = {"messages": list(play.prompts[0]), "max_tokens": 1}
        hot, cold = map(places, endpoint.ask([play.asked(first | {"temperature": t}) for t in (1.0, 0.5)]))
        if not all(answer and answer[0].top for answer in (hot, cold)):
            return False
        raw = is_raw(hot, cold)
        for begin in range(0, len(asked), 4 * endpoint.slots):
            some = asked[begin : begin + 4 * endpoint.slots]
            bodies = [
                play.asked({"messages": list(prompt), "max_tokens": scope.max_tokens, "seed": seed, **ways[name]})
                for (name, prompt), seed in zip(some, rng.integers(1 << 31, size=len(some)).tolist(), strict=True)
            ]
            answers = [places(one, most) for one in endpoint.ask(bodies)]
            if not all(place.top for answer in answers for place in answer):
                return False
            for (name, _), answer in zip(some, answers, strict=True):
                read_places(answer, ways[name], counts, words, name, raw=raw)
            if play.watch.over(until):
                break
        return True

    counts = counted(play.server, (perf_counter() + until) / 2)
    found = counts.findings(LEVEL * LONG)
    if found and not play.control.is_self:
        found = counts.findings(LEVEL * LONG, counted(play.control.source, until))
    return counts, found


def _cases(play: Play, ways: Mapping[str, Fields]) -> list[Texts]:
    """Prompts whose answers are free and copied, each sampled in every way."""
    return [
        Texts(name, {"messages": list(text), "max_tokens": SAMPLED_TOKENS, **way})
        for name, way in ways.items() for text in (play.prompts[0], MIXED[0])
    ]  # fmt: skip


@dataclass
class Texts:
    """A case of the sampling test: a request, and the answers to it by endpoint and control."""

    name: str
    body: Fields
    mine: list[Completion] = field(default_factory=list)
    others: list[Completion] = field(default_factory=list)

    def views(self, slack: float) -> list[Fields]:
        """The test in coarse bins and in fine ones. slack: see `stats.chi_square_of_two`."""
        texts = [one.text for one in self.mine], [one.text for one in self.others]
        return [_by_text(*texts, share, slack) for share in (0.08, 0.01)]

    def facts(self, slack: float) -> Fields:
        """For the certificate: the view that shows most, and of each outcome how often either had it."""
        return {"name": self.name, "requests": len(self.mine), **min(self.views(slack), key=lambda view: view["p"])}


def sample(play: Play, cases: Sequence[Texts], scope: Scope, until: float) -> list[Look]:
    """Ask for samples until the budget is spent, something is found or an endpoint breaks off."""
    whole = "" if scope.is_bounded else ", as many as were asked for, whatever time they take"
    play.watch.say(f"sampled requests{whole}")
    looks: list[Look] = []
    try:
        with suppress(OutOfTime):
            _look(play, cases, scope, until, looks)
    except CompletionError as error:
        play.broken = f"sampled requests: {error}"
    return looks


def _look(play: Play, cases: Sequence[Texts], scope: Scope, until: float, looks: list[Look]) -> None:
    """Add to `looks`, each of more requests than the one before."""
    rng = np.random.default_rng(scope.seed)
    began, each = perf_counter(), 8
    _ask(play, cases, each, rng)
    rate = (perf_counter() - began) / each
    total = MOST if scope.requests is None else scope.requests
    if scope.shift is not None and scope.requests is None:
        of: Fields = {"df": 10 * len(cases), "level": level_of(-1), "samples": 2}
        total = stats.samples_for(shift=scope.shift, **of)
        while total < MOST and stats.detectable(total, rounding=float(play.noise), **of) > scope.shift:
            total = total * 9 // 8  # rounding takes its part of what is found
    in_time = int((until - perf_counter()) / rate) if scope.is_bounded else total
    planned = max(each, min(total // len(cases), in_time))
    for look, (share, _) in enumerate(LOOKS):
        until_now = int(np.ceil(planned * share))
        while each < until_now and not (play.watch.stopped() or (scope.is_bounded and perf_counter() > until)):
            more = min(8 if scope.is_bounded else 64, until_now - each)
            _ask(play, cases, more, rng)
            each += more
            play.watch.step(each, planned)
        views = list(zip(*(case.views(float(play.noise)) for case in cases), strict=True))
        p = min(stats.tail(sum(v["statistic"] for v in view), sum(v["df"] for v in view)) for view in views)
        worst = min(stats.worst([v["p"] for v in view]) for view in views)
        looks.append(Look(each * len(cases), p, worst, level_of(look)))
        if looks[-1].accuses or each < until_now:
            break


def _ask(play: Play, cases: Sequence[Texts], each: int, rng: np.random.Generator) -> None:
    asked = [case for case in cases for _ in range(each)]
    rng.shuffle(asked)
    answers = []
    for endpoint in (play.server, play.control.source):
        seeds = rng.integers(1 << 31, size=len(asked)).tolist()
        answers.append(endpoint.ask([{**case.body, "seed": seed} for case, seed in zip(asked, seeds, strict=True)]))
    for case, mine, other in zip(asked, *answers, strict=True):
        case.mine.append(mine)
        case.others.append(other)


def _by_text(mine: Sequence[str], others: Sequence[str], share: float, slack: float) -> Fields:
    """Two samples of texts. Outcomes are beginnings, each continued by its next character while both samples together
    have it often enough: short where texts soon differ, and long where most are alike."""
    least = max(2 * stats.LEAST_COUNT, share * (len(mine) + len(others)))
    bins: list[tuple[str, list[int]]] = []

    def split(prefix: str, members: list[tuple[str, int]]) -> None:
        """Add the bins of the texts that begin with `prefix`; members: (text, which sample)."""
        groups = defaultdict[str, list[tuple[str, int]]](list)
        for text, side in members:
            groups[text[len(prefix) : len(prefix) + 1]].append((text, side))
        large = [char for char, group in groups.items() if len(group) >= least]
        rare = [one for char, group in groups.items() if char not in large for one in group]
        if not large or large == [""] or (len(large) == 1 and rare and len(rare) < least):
            bins.append((prefix, [side for _, side in members]))
            return
        if rare and len(rare) < least:
            rare += groups[fewest := min(large, key=lambda char: len(groups[char]))]
            large.remove(fewest)
        if rare:
            bins.append((prefix + "...", [side for _, side in rare]))
        for char in large:
            if char:
                split(prefix + char, groups[char])
            else:
                bins.append((prefix, [side for _, side in groups[char]]))

    split("", [(text, 0) for text in mine] + [(text, 1) for text in others])
    counts = np.array([[sides.count(side) for _, sides in bins] for side in (0, 1)], float)
    statistic, df = stats.chi_square_of_two(counts[0], counts[1], slack), len(bins) - 1
    shares = counts / counts.sum(1, keepdims=True)
    return {
        "outcomes": len(bins),
        "df": df,
        "statistic": statistic,
        "p": stats.tail(statistic, df),
        "tv": round(stats.total_variation(counts[0], shares[1]), 5),
        "tv_by_chance": round(stats.noise(counts.sum(0) / counts.sum(), len(mine)) * 2**0.5, 5),
        "seen": [[prefix, *pair] for (prefix, _), *pair in zip(bins, *shares.round(4).tolist(), strict=True)],
    }
