"""Play situations in which engines with drafts have broken: a few requests each, whose answers are known or comparable.

A scenario makes groups of steps. The requests of a step run together, the steps of a group follow each other, and a
group alone shows its bug. Greedy answers are compared with the control's answers to the same requests, asked alone.
Sampled answers are only checked for their form. A new entry of `SCENARIOS` is a new test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from math import ceil
from time import perf_counter
from typing import Any

from paceline.certify.asking import (
    BROKEN,
    ENDING,
    HELLO,
    Control,
    Fields,
    Messages,
    Noise,
    compare,
    own_best,
    parts_of,
    places,
)  # fmt: skip
from paceline.certify.options import REQUESTS, STRUCTURED
from paceline.certify.verdict import Divergence
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Endpoint, OutOfTime
from paceline.runs.progress import Progress

Sign = Callable[[Completion], bool]
Form = Callable[[Completion, Mapping[str, Any], Sequence[Completion]], str]
"""Why an answer is wrong by itself, "" if it is right: of the answer, its request, and the answers to those before it
in its step. It hangs on nothing else, so that a request that is made smaller is judged by what it still asks for."""
REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call")
SPECIAL = re.compile(r"<\|\w+\|>|</s>|<eos>|<end_of_turn>")
SURE = 4  # Words of a sampled answer that cannot all be certain.
SPENT = "the budget was spent"
ENOUGH = 5  # A scenario ends after so many bugs.
PROBING = 0.4  # Share of the time of scenarios for finding out what an endpoint takes.
TIMED, ANSWERS, SHORTEST = 16, 128, 8
"""Tokens of the answer that is timed; answers, one after another, that there must be time for; least tokens of each."""
LINES, TEXTS = REQUESTS["lines"], REQUESTS["mixed"]
MIXED: tuple[Messages, ...] = tuple(({"role": "user", "content": text},) for text in TEXTS)
LENGTHS = (512, 1024, 2048, 4096, 8192)  # Words of long prompts; a word is at least a token.
PATTERN = "[a-c]{2}-[0-9]{3}( [a-c]{2}-[0-9]{3}){3}"
SCHEMA = REQUESTS["schema"]
ANIMALS, COLOURS = SCHEMA["properties"]["name"]["enum"], SCHEMA["properties"]["colours"]["items"]["enum"]
TOOL = {"type": "function", "function": {"name": "note_animal", "parameters": SCHEMA}}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}}
ASKED = "Name an animal and three colours, and the same three colours again, as JSON."


def of_schema(text: str) -> str:
    """Why a text is not JSON of SCHEMA."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except ValueError as error:
        return f"the answer is not JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"the answer breaks the schema: {error.message}"
    return ""


FORMS: Mapping[str, Callable[[Completion], str]] = {
    "JSON schema": lambda one: of_schema(one.text),
    "regular expression": lambda one: "" if re.fullmatch(PATTERN, one.text.strip()) else f"no match of {PATTERN}",
    "tool calls": lambda one: of_schema(one.tool_calls[0]["arguments"]) if one.tool_calls else "there is no tool call",
}
"""By feature, why a whole answer is wrong."""


FEATURES: Mapping[str, Sequence[Fields]] = REQUESTS["features"] | {
    "JSON schema": [FORMAT],
    "regular expression": [{"structured_outputs": {"regex": PATTERN}}, {"regex": PATTERN}, {"guided_regex": PATTERN}],
    "tool calls": [{"tools": [TOOL], "tool_choice": choice} for choice in ("required", "auto")],
}
"""What an endpoint may take: fields that ask for it, of which the first that it takes count."""
SIGNS: Mapping[str, Sign] = {
    "log-probabilities": lambda one: bool(one.logprobs),
    "streams": lambda one: one.streamed,
    "n": lambda one: len(one.others) == 2,
    "token ids": lambda one: bool(one.tokens),
    "reasoning": lambda one: bool(one.reasoning),
    "JSON schema": lambda one: not FORMS["JSON schema"](one),
    "regular expression": lambda one: not FORMS["regular expression"](one),
    "tool calls": lambda one: not FORMS["tool calls"](one),
}
"""Signs that an answer shows a feature; any answer shows the others."""
LONG = {**dict.fromkeys(STRUCTURED, 160), "regular expression": 40, "reasoning": 160}
"""Tokens of the features that show in a whole answer alone; one of several is enough, for a bug may spoil some."""


def probe(
    endpoint: Endpoint, features: Mapping[str, Sequence[Fields]] = FEATURES, signs: Mapping[str, Sign] = SIGNS,
    there: dict[str, Fields] | None = None,
) -> dict[str, Fields]:  # fmt: skip
    """Find the features of an endpoint, each with the fields that ask for it.
    Features that take whole answers come last.

    there  filled in place, so that a caller who runs out of time has the features found so far."""
    there = {} if there is None else there
    for name, ways in sorted(features.items(), key=lambda feature: LONG.get(feature[0], 0)):
        for fields in ways:
            body, shows = _body(user(ASKED), LONG.get(name, 4), **fields), signs.get(name, bool)
            hot = [body | {"temperature": 1.0, "seed": seed} for seed in range(3 if name in LONG else 1)]
            try:
                greedy = shows(endpoint.ask([body], 1)[0])
                # With drafts, some servers refuse fields in a sampled request that they take in a greedy one.
                sampled = [] if greedy and name in LONG else [shows(one) for one in endpoint.ask(hot)]
            except CompletionError as error:
                _check_life(endpoint, fields, error)
                continue
            if greedy or (name in LONG and any(sampled)):
                there[name] = fields
                break
    return there


def _check_life(endpoint: Endpoint, fields: Fields, error: CompletionError) -> None:
    """Raise a CompletionError that names the fields if the endpoint is dead since a request with them."""
    try:
        endpoint.ask([HELLO], 1)
    except CompletionError:
        asked = f"a request with {json.dumps(fields)}, greedy or at temperature 1"
        advice = "Start it again, and name that by --leave-out to test the rest"
        why = f"{endpoint.name} answers nothing any more since {asked}: {error}. {advice}"
        raise CompletionError(why) from None


@dataclass(frozen=True)
class Case:
    """A request, and what its answer must be.

    plain  the request to the control whose answer this one must equal, up to max_tokens and stop strings; None: any
           answer is right.
    form   returns why an answer is wrong by itself, or "".
    needs_control  whether a wrong form speaks against drafts only if a control without drafts has it right."""

    body: Fields
    plain: Fields | None = None
    form: Form | None = None
    needs_control: bool = False


@dataclass(frozen=True)
class Step:
    """Requests that are asked together, `slots` at a time."""

    cases: Sequence[Case]
    slots: int = 1


Group = list[Step]


@dataclass(frozen=True)
class Scenario:
    """A test by name. needs: features without which it shows nothing."""

    name: str
    groups: Callable[[Play], Iterable[Group]]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wrong:
    """A wrong answer. group: the requests that show it; the last case of the last step is the wrong one."""

    scenario: str
    group: Group
    case: Case
    answer: Completion
    right: Completion | None
    divergence: Divergence


@dataclass
class Play:
    """Runs scenarios.

    until     when the budget is spent (perf_counter); left_out: features that are not asked for.
    noise     how far rounding moves log-probabilities; rate: tokens a second of one request alone, 0: not measured.
    ignored   errors that occur with drafts and without, by scenario: they do not speak against drafts.
    lacking   features that the control lacks, if it is another server; unasked: features there was no time to ask for.
    budget    seconds of all tests; None: the time until `until`."""

    server: Endpoint
    control: Control
    prompts: Sequence[Messages]
    max_tokens: int
    until: float
    watch: Progress = field(default_factory=Progress)
    left_out: Collection[str] = ()
    budget: float | None = None
    features: dict[str, Fields] = field(default_factory=dict)
    noise: Noise = field(default_factory=Noise)
    rate: float = 0.0
    answers: int = 0
    tokens: int = 0
    ignored: dict[str, str] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)
    unasked: set[str] = field(default_factory=set)
    seconds: float = 0.0
    divergences: list[Divergence] = field(default_factory=list)
    rows: list[Fields] = field(default_factory=list)
    bugs: list[Wrong] = field(default_factory=list)

    def run(self, scenarios: Sequence[Scenario] | None = None) -> None:
        """Find out what the endpoint takes, and play all scenarios."""
        self.watch.say("what the endpoint takes")
        wanted = {name: ways for name, ways in FEATURES.items() if name not in self.left_out}
        began = perf_counter()
        self.seconds = self.until - began
        probing = began + PROBING * self.seconds
        self.server.over = self.control.source.over = lambda: self.watch.over(min(self.until, probing))
        try:
            self._look(wanted)
            probing = self.until
            for number, scenario in enumerate(SCENARIOS if scenarios is None else scenarios):
                self.rows.append(self._scenario(scenario))
                self.watch.step(number + 1, len(SCENARIOS))
        finally:
            self.server.over = self.control.source.over = lambda: False

    def _look(self, wanted: Mapping[str, Sequence[Fields]]) -> None:
        """Find out what the endpoint takes, how fast it answers, and how long answers can be in the time."""
        both, there, self.unasked = self.control.source is not self.server, dict[str, Fields](), {*wanted}
        signs = {name: sign for name, sign in SIGNS.items() if name != "streams" or not both}  # Controls may buffer.
        with suppress(OutOfTime):
            began = perf_counter()
            (one,) = self.server.ask([_body(user(ASKED), TIMED)], 1)
            count = one.usage.get("completion_tokens") or len(one.logprobs) or TIMED
            self.rate = count / (perf_counter() - began)
            for name in sorted(wanted, key=lambda feature: LONG.get(feature, 0)):
                probe(self.control.source, {name: wanted[name]}, signs, there if both else self.features)
                if name in there:  # The slow features come last for control and endpoint alike.
                    probe(self.server, {name: [there[name]]}, {"streams": SIGNS["streams"]}, self.features)
                elif both:
                    self.lacking.add(name)
                self.unasked.remove(name)
        affordable = self.rate * (self.until - perf_counter()) / ANSWERS
        if self.rate:
            self.max_tokens = min(self.max_tokens, max(SHORTEST, int(min(affordable, self.max_tokens))))

    def not_tested(self) -> list[str]:
        """Scenarios not played, or not to their end, with the reason, and features left out as asked."""
        left_out = [f"{name}: left out as asked" for name in sorted(self.left_out)]
        rows = [row for row in self.rows if row["verdict"] in ("not tested", "partly")]
        both = [f"{name}: {what}" for name, what in self.ignored.items()]
        return left_out + both + [f"{row['scenario']}: {row['why']}{self._enough(row['why'])}" for row in rows]

    def _enough(self, why: str) -> str:
        """Name a budget that may do for a scenario that had no time; "" for other reasons."""
        played = [row for row in self.rows if row["why"] != SPENT]
        if why != SPENT or not played or not self.rate:
            return ""
        seconds = 2 * sum(row["seconds"] for row in played) * len(self.rows) / len(played)
        budget = (self.budget or self.seconds) * max(seconds / self.seconds, 1.5)
        return f", at {self.rate:.0f} tokens/s; --budget {ceil(budget / 60)}m may do"

    def two_models(self) -> str:
        """Why endpoint and control are not one model with and without drafts; "" if they may be.

        The first token of an answer depends on its prompt alone, and no draft comes before it."""
        alone = [one for one in self.divergences if one.company == SCENARIOS[0].name]
        first = [one for one in alone if one.at == 0 and not one.is_tie and one.said != one.best]
        asked = next((row["answers"] for row in self.rows if row["scenario"] == SCENARIOS[0].name), 0)
        if self.control.is_self or len(first) < max(2, asked / 2):
            return ""
        return (
            f"{len(first)} of {asked} answers differ in their first token, before which there is no draft. Two models "
            "were compared: look for another quantisation, dtype, revision, chat template or tokenizer"
        )

    def skip(self, name: str, why: str) -> None:
        """Note that a test was left out."""
        none = dict.fromkeys(("answers", "bugs", "ties", "seconds"), 0)
        self.rows.append({"scenario": name, "verdict": "not tested", **none, "why": why})

    def _scenario(self, scenario: Scenario) -> Fields:
        began, answers, found = perf_counter(), self.answers, list[Wrong]()
        missing = [name for name in scenario.needs if name not in self.features]
        if self.watch.over(self.until) or self.unasked.intersection(missing):
            why = SPENT
        elif missing:
            whose = "the control" if self.lacking >= set(missing) else "the endpoint"
            why = f"{whose} shows no {', no '.join(missing)}"
        else:
            self.watch.say(scenario.name)
            why = self._groups(scenario, found)
        bugs = [one for one in found if not one.divergence.is_tie]
        self.bugs += bugs
        self.divergences += [one.divergence for one in found]
        asked = self.answers - answers
        passed = "passed" if not why else "partly" if asked else "not tested"
        return {
            "scenario": scenario.name,
            "verdict": "wrong" if bugs else passed,
            "answers": asked,
            "bugs": len(bugs),
            "ties": len(found) - len(bugs),
            "seconds": round(perf_counter() - began, 1),
            "why": "" if bugs else why,
        }

    def _groups(self, scenario: Scenario, found: list[Wrong]) -> str:
        """Play the groups of a scenario, and add findings to `found`. Returns why it ended early, or ""."""
        try:
            for group in scenario.groups(self):
                if self.watch.over(self.until):
                    return SPENT
                found += self.play(group, scenario.name)
                if sum(not one.divergence.is_tie for one in found) >= ENOUGH:
                    break
        except OutOfTime:
            return SPENT
        except CompletionError as error:
            return str(error)
        return ""

    def play(self, group: Group, scenario: str) -> list[Wrong]:
        """Ask for a group, and compare.
        The control is asked first, so that its caches are cold if it is the same server."""
        self.control.expected([case.plain for step in group for case in step.cases if case.plain is not None])
        found = []
        for number, step in enumerate(group):
            replies = self.server.ask([self.asked(case.body) for case in step.cases], step.slots)
            rights = [None if case.plain is None else self.expected(case) for case in step.cases]
            self.noise.add(list(zip(replies, rights, strict=True)))
            for at, (case, reply, right) in enumerate(zip(step.cases, replies, rights, strict=True)):
                self.answers += 1
                self.tokens += len(reply.logprobs)
                others = [one for one in step.cases if one is not case]
                before = replies[:at]
                if self._control_too(case, reply, right, before, scenario):
                    continue
                for wrong in self.wrong(case, reply, right, before):
                    one = Divergence(self.answers - 1, company=scenario, **wrong)
                    shown = [*group[:number], Step([*others, case], step.slots)]
                    found.append(Wrong(scenario, shown, case, reply, right, one))
        return found

    def wrong(
        self, case: Case, reply: Completion, right: Completion | None, before: Sequence[Completion] = ()
    ) -> Iterator[Fields]:
        """Yield fields of divergences: an error of the answer's form, and the first difference from the control.

        before  answers to the requests before this one in its step."""
        if case.form is not None and (why := case.form(reply, case.body, before)):
            yield {"at": len(reply.logprobs), "why": why, "before": reply.text[-80:]}
        elif right is not None:
            biases = self._biases(case.body)
            every = (compare(one, right, case.body, self.noise, biases) for one in (reply, *reply.others))
            yield from [one for one in every if one is not None][:1]
        if self.control.is_self:
            yield from own_best(reply, case.body, self.noise)

    def _biases(self, body: Fields) -> dict[str, float]:
        """A request's biases by the texts of their tokens. A bias of 100 makes the control say the text."""
        of: Mapping[str, float] = body.get("logit_bias") or {}
        bodies = [self.asked(HELLO | {"temperature": 0.0, "logit_bias": {token: 100}}) for token in of]
        said = [one[0].token if (one := places(answer)) else "" for answer in self.control.expected(bodies)]
        # A text said under two biases is said whatever is asked, so its token is unknown.
        spelt = (text.strip() and BROKEN not in text and said.count(text) == 1 for text in said)
        return {text: float(bias) for text, bias, known in zip(said, of.values(), spelt, strict=True) if known}

    def _control_too(
        self, case: Case, reply: Completion, right: Completion | None, before: Sequence[Completion], scenario: str
    ) -> bool:
        """Whether the control's answer to the very same request is wrong in the same way."""
        is_cut = bool(case.body.keys() & ENDING)
        if (self.control.is_self and not case.needs_control) or (case.form is None and not is_cut):
            return False
        if (found := next(self.wrong(case, reply, right, before), None)) is None:
            return False
        what, why = found.get("why") or "another text", "with drafts; without them it is unknown"
        if not self.control.is_self:
            (own,) = self.control.source.ask([self.asked(case.body)], 1)
            form = case.form or (lambda *_: "")
            is_broken = form(reply, case.body, before)
            theirs = form(own, case.body, before) if is_broken else parts_of(own) == parts_of(reply)
            if not theirs:
                return False
            why = "with drafts and without"
        self.ignored.setdefault(scenario, f"{what}, {why}")
        return True

    def asked(self, body: Fields) -> Fields:
        """The body with log-probabilities, where the endpoint has them."""
        return {**self.features.get("log-probabilities", {}), **body}

    # Parts of scenarios -------------------------------------------------------------------------------------------

    def case(self, messages: Messages, **fields: Any) -> Case:
        """A greedy request whose answer is the control's."""
        body = _body(messages, **{"max_tokens": self.max_tokens, **fields})
        return Case(body, self.asked(body))

    def expected(self, case: Case) -> Completion:
        assert case.plain is not None
        return self.control.expected([case.plain])[0]


def user(text: str) -> Messages:
    return ({"role": "user", "content": text},)


def _body(messages: Messages, max_tokens: int, **fields: Any) -> Fields:
    return {"messages": list(messages), "temperature": 0.0, "max_tokens": max_tokens, **fields}


def _alone(play: Play) -> Iterator[Group]:
    for prompt in play.prompts:
        yield [Step([play.case(prompt)])]


def _mixed(play: Play) -> Iterator[Group]:
    for prompt in MIXED:
        yield [Step([play.case(prompt, max_tokens=3 * play.max_tokens)])]


def _prefixes(play: Play) -> Iterator[Group]:
    for number, text in enumerate(TEXTS):
        shared = f"Text {number}. " + " ".join(LINES) + " " + text
        short, longer = play.case(user(shared)), play.case(user(f"{shared} Then write the first line again."))
        yield [Step([case]) for case in (short, short, longer, longer, short)]
        turn = {"role": "assistant", "content": play.expected(short).text}
        again = play.case((*user(shared), turn, {"role": "user", "content": "Write that again."}))
        yield [Step([short]), Step([again]), Step([again])]


def _long(play: Play) -> Iterator[Group]:
    for words in LENGTHS:
        lines = (f"{i}. {line}" for i, line in enumerate(cycle(LINES), 1))
        text = "\n".join(islice(lines, words // 7)) + "\nWrite the last three lines again."
        yield [Step([play.case(user(text))])]


def _at_once(slots: int) -> Callable[[Play], Iterator[Group]]:
    def groups(play: Play) -> Iterator[Group]:
        yield [Step([play.case(one) for one in islice(cycle((*play.prompts, *MIXED)), slots)], slots)]

    return groups


def _joining(play: Play) -> Iterator[Group]:
    """Ask for three times as many requests as run together, of all lengths, so that rows leave and others join."""
    prompts = islice(cycle((*play.prompts, *MIXED)), 24)
    whole = [play.case(one) for one in prompts]
    lengths = [max(1, play.max_tokens * share // 8) for share in (8, 1, 4, 2, 7)]
    cases = zip(whole, cycle(lengths))
    yield [Step([Case(one.body | {"max_tokens": n}, one.plain) for one, n in cases], 8)]


def _stops(play: Play) -> Iterator[Group]:
    for prompt in (*play.prompts[:3], MIXED[0]):
        case = play.case(prompt)
        text = play.expected(case).text
        cuts = [text[len(text) * share // 8 :][:2] for share in range(1, 8)]
        strings = [one for one in dict.fromkeys(cuts) if one.strip() and BROKEN not in one]
        yield [Step([Case(case.body | {"stop": [one]}, case.plain) for one in strings], 4)]


def _stop_tokens(play: Play) -> Iterator[Group]:
    for prompt in (*play.prompts[:3], MIXED[0]):
        case = play.case(prompt, **play.features["token ids"])
        tokens = play.expected(case).tokens
        ids = [tokens[len(tokens) * share // 8] for share in (2, 4, 5, 6)] if tokens else []
        yield [Step([Case(case.body | {"stop_token_ids": [one]}, case.plain) for one in ids], 4)]


def _fields(play: Play) -> Iterator[Group]:
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "min_p"):
        if name in play.features:
            cases = [play.case(one, **play.features[name]) for one in (*play.prompts[:3], *MIXED)]
            yield [Step(cases, 1)]
            yield [Step(cases, 8)]


def _choices(play: Play) -> Iterator[Group]:
    for prompt in (*play.prompts[:2], *MIXED[:2]):
        case = play.case(prompt)
        yield [Step([Case(case.body | play.features["n"], case.plain)])]


def _streams(play: Play) -> Iterator[Group]:
    cases = [play.case(one) for one in (*play.prompts[:4], *MIXED)]
    yield [Step([Case(case.body | {"stream": True}, case.plain) for case in cases], slots) for slots in (1, 8)]


def _structured(feature: str, *more: str) -> Callable[[Play], Iterator[Group]]:
    """Make groups of greedy and sampled answers of a form, alone and together."""

    def groups(play: Play) -> Iterator[Group]:
        fields = {key: value for name in (feature, *more) for key, value in play.features[name].items()}
        greedy = [play.case(user(f"{ASKED} {line}"), **fields, max_tokens=200) for line in LINES[:4]]
        hot = [case.body | {"temperature": 1.0, "seed": seed} for seed, case in enumerate(greedy * 4)]
        sampled = [Case(body, form=_in_form) for body in hot]
        yield [Step([Case(case.body, case.plain, _in_form) for case in greedy])]
        yield [Step(sampled[:4])]
        yield [Step(sampled, 8)]

    return groups


def _in_form(one: Completion, body: Mapping[str, Any], before: Sequence[Completion] = ()) -> str:
    """Why an answer lacks the form that its request asks for, or "". Answers cut by max_tokens are not judged."""
    if one.finish_reason == "length" or (one.reasoning and not one.text):
        return ""
    asked = (name for name in FORMS if any(fields.items() <= body.items() for fields in FEATURES[name]))
    return next((why for name in asked if (why := FORMS[name](one))), "")


def _counts(play: Play) -> Iterator[Group]:
    """Check what short, long, greedy, sampled and streamed answers say of themselves; and a chat of three turns."""
    most = play.max_tokens
    fields: list[Fields] = [{"max_tokens": n} for n in dict.fromkeys((1, 2, 7, most))]
    fields.append({"max_tokens": most, "temperature": 1.0, "seed": 1})
    for name, more in (("streams", {}), ("stop", {}), ("min_tokens", {"min_tokens": most // 2}), ("token ids", {})):
        if name in play.features:
            fields.append({"max_tokens": most, **play.features[name], **more})
    bodies = [_body(play.prompts[0], 1) | one for one in fields]
    yield [Step([Case(body, form=counted, needs_control=True) for body in bodies])]
    hot = _body(user("Write a few random words."), min(most, 24)) | {"temperature": 1.5}
    yield [Step([Case(hot, form=alike, needs_control=True)] * 3)]
    if "n" in play.features:
        yield [Step([Case(hot | play.features["n"], form=alike, needs_control=True)])]
    turns = play.prompts[0]
    for question in ("Say that again.", "And once more."):
        said = {"role": "assistant", "content": play.expected(play.case(turns)).text}
        turns = (*turns, said, {"role": "user", "content": question})
    yield [Step([play.case(turns)])]


def counted(one: Completion, body: Mapping[str, Any], before: Sequence[Completion] = ()) -> str:
    """Why tokens, limits, finish_reason or log-probabilities of an answer contradict each other, or ""."""
    most, least = body["max_tokens"], body.get("min_tokens", 0)
    of_tokens = places(one)
    usage, listed = one.usage.get("completion_tokens"), len(one.tokens) or len(of_tokens)
    count = listed if usage is None else usage
    if one.finish_reason not in REASONS:
        return f"finish_reason is {one.finish_reason!r}"
    spare = one.finish_reason == "stop"  # Servers may list the end token, so one token more or less is right.
    if usage is not None and listed and abs(usage - listed) > spare:
        return f"usage counts {usage} tokens, and {listed} are listed"
    if count > most:
        return f"it has {count} tokens; {most} were asked for"
    if one.finish_reason == "length" and count and count < most:
        return f"finish_reason is length after {count} of {most} tokens"
    if one.finish_reason == "stop" and count and count < least:
        return f"it ends after {count} tokens; at least {least} were asked for"
    if SPECIAL.search(one.text):
        return f"a special token is in the text: {one.text[-40:]!r}"
    if len(of_tokens) >= SURE and all(place.logprob == 0.0 for place in of_tokens):
        return "every token is reported with log-probability 0"
    return ""


def alike(one: Completion, body: Mapping[str, Any], before: Sequence[Completion] = ()) -> str:
    """Why sampled answers without a seed look drawn alike, among the answers of one request or of several, or ""."""
    every, seen = [one.text, *(other.text for other in one.others)], [*(other.text for other in before), one.text]
    if body.get("seed") is not None or not body.get("temperature") or len(one.text.split()) < SURE:
        return ""
    if len(every) > 2 and len(set(every)) == 1:
        return f"its {len(every)} sampled answers are all the same"
    if len(seen) > 2 and len(set(seen)) == 1:
        return f"{len(seen)} requests without a seed have the same sampled answer"
    return ""


SCENARIOS = (
    Scenario("one request at a time", _alone),
    Scenario("counts, limits and reasons", _counts),
    Scenario("stop strings, 4 at once", _stops, ("stop",)),
    Scenario("steps with and without a draft in turn", _mixed),
    Scenario("prompts that are in the prefix cache", _prefixes),
    Scenario("8 requests at once", _at_once(8)),
    Scenario("32 requests at once", _at_once(32)),
    Scenario("requests that join and leave", _joining),
    Scenario("stop tokens", _stop_tokens, ("token ids", "log-probabilities")),
    Scenario("penalties and biases", _fields, ("frequency_penalty",)),
    Scenario("several answers to a request", _choices, ("n",)),
    Scenario("streams", _streams, ("streams",)),
    Scenario("JSON schema", _structured("JSON schema"), ("JSON schema",)),
    Scenario("regular expression", _structured("regular expression"), ("regular expression",)),
    Scenario("tool calls", _structured("tool calls"), ("tool calls",)),
    Scenario("JSON schema after reasoning", _structured("JSON schema", "reasoning"), ("JSON schema", "reasoning")),
    Scenario("long contexts", _long),
)
