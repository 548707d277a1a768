"""The certificate: greedy, stop strings, sampling and acceptance of one engine, in one dictionary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from paceline.certify.conditional import Conditional, read
from paceline.certify.engines import answers, honours
from paceline.certify.greedy import Reader, check_stops
from paceline.certify.options import REQUESTS, SHIFT, Scope, Watch
from paceline.certify.sampled import AT_ONCE, Case, Sampled, distribution_of, needed, sample
from paceline.certify.verdict import LEVEL, LONG, Greedy, Stops, certificate, with_long
from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter
from paceline.draft.recording import Chains, Recording
from paceline.errors import PacelineError
from paceline.target.tokenizer import Tokenizer
from paceline.workbench.client import Completion
from paceline.workbench.endpoint import Endpoint
from paceline.workbench.reference import Model, Rounding
from paceline.workbench.walk import RecordedAnswer, Tally, replay, replayable

Prompts = Sequence[Sequence[int]]
Control = Callable[[], Endpoint] | None


@dataclass(frozen=True)
class Pass:
    """A way of asking for greedy answers to all prompts.

    company  what they are asked for together with, for the certificate; {batch} is the engine's.
    changes  fields of SamplingParams.
    batch    an engine must answer at least this many at once, or the pass would repeat another one.
    alone    one request after another; mixed: between requests that sample."""

    company: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    alone: bool = False
    mixed: bool = False

    def fits(self, engine: Endpoint) -> bool:
        """Whether the engine can be asked this way."""
        takes = honours(engine, replace(SamplingParams(), **self.changes))
        return takes and engine.slots >= self.batch and (engine.mixes or not self.mixed)

    def ask(self, engine: Endpoint, prompts: Prompts, params: SamplingParams) -> list[Completion]:
        """The greedy answers, in the order of the prompts."""
        if self.alone:
            return answers(engine, prompts, [params] * len(prompts), 1)
        if not self.mixed:
            return answers(engine, prompts, [params] * len(prompts))
        both = [(p, SamplingParams(temperature=1.0, max_tokens=1 + i % 7, seed=i)) for i, p in enumerate(prompts)]
        asked = [one for prompt, hot in both for one in ((prompt, params), (prompt, hot))]
        return answers(engine, [prompt for prompt, _ in asked], [wanted for _, wanted in asked])[::2]


PASSES = (
    Pass("alone", alone=True),
    Pass("in batches of {batch}", batch=2),
    Pass("between rows that sample", batch=2, mixed=True),
    Pass("in batches of {batch}, repetition penalty 1.2", {"repetition_penalty": 1.2}),
)
"""How greedy answers are asked for. The replies of the first pass are those that stop strings are cut out of."""
WAYS = {name: SamplingParams(**fields) for name, fields in REQUESTS["sampling"].items()}
"""How sampled answers are sampled, in turn."""
AHEAD = 2  # tokens that a request has beyond those that are tested, so that drafts may reach beyond them
REPEATED = 6  # times that a beginning stands in the prompt of a long sampled answer, so that there is much to copy
LONG_TOKENS = 6.0
"""Tokens of long sampled answers that a shift of 1 would take; one of a tenth takes a hundred times as many."""
SHARES = 0.2, 0.25, 0.4, 0.6
"""Shares of the budget after which greedy answers are asked no more, stop strings are not cut out of them any more,
first tokens are sampled no more, and long answers are not; scenarios have the rest."""
INTERRUPTED = "it was interrupted"
TOO_SHORT = "the budget was spent before enough answers were sampled for a test; give a longer --budget"
LEAST_SECONDS = 5.0  # for sampling, however small the budget
REQUESTS_EACH = 16  # sampled requests for each long answer, where their number was asked for


@dataclass(frozen=True)
class Models:
    """The model in float32, and in the engine's dtype (None where that is float32). max_context: the engine's."""

    exact: Model
    own: Model | None
    tokenizer: Tokenizer | None
    ends: Sequence[int]
    vocab_size: int
    max_context: int = 1024

    @property
    def rounding(self) -> Rounding:
        return Rounding(self.exact, self.own)


def certify(
    engine: Endpoint, models: Models, prompts: Prompts, starts: Prompts, scope: Scope = Scope(), *,
    draft: str | None = None, chains: bool = False, control: Control = None, watch: Watch = Watch(),
) -> dict[str, Any]:  # fmt: skip
    """Test `engine` and say what was found.

    prompts  for greedy answers; starts  short ones, for the distribution of what comes next.
    draft    the drafter's spec, where it can be replayed for the reference acceptance; chains: cut to chains.
    control  opens the same engine without drafts; only what differs from it is then held against the engine."""
    began = perf_counter()
    ends = (began + share * scope.seconds if scope.is_bounded else inf for share in SHARES)
    until_greedy, until_stops, until_first, until_long = ends
    scope = replace(scope, shift=scope.shift or SHIFT)
    greedy, replies, left_out = _greedy(engine, models, prompts, scope, watch, until_greedy)
    prompts_read = prompts[: len(replies)]
    stops = _stops(engine, models, prompts_read, replies, scope, watch, until_stops)
    watch.say("how often drafts are accepted")
    reference = None
    if draft is not None and replies:
        recording = Recording(models.tokenizer, tuple(models.ends), models.vocab_size)
        reference = replayed(draft, recording, prompts_read, [one.tokens for one in replies], chains=chains)
    latest = max(until_long, began + LEAST_SECONDS)
    sampled = _sampled(engine, models, starts, scope, watch, control, until_first, latest)
    facts = sampled.facts()
    if sampled.cases and facts["lossless"] and not watch.stopped():
        space = models.max_context - scope.max_tokens
        repeating = [list(one) * max(1, min(REPEATED, space // len(one))) for one in starts]
        facts = _long(facts, engine, models, [*repeating, *prompts], scope, watch, control, until_long, latest)
    is_short = scope.is_bounded and not sampled.looks and not facts.get("long")
    broken = INTERRUPTED if watch.stopped() else TOO_SHORT if is_short else ""
    return certificate(
        greedy, stops, facts, sampled.power(scope), scope, broken=broken,
        engine=engine.name, draft=draft, ran_on=engine.facts,
        not_tested=[*left_out, *_not_tested(engine, stops, facts)],
        acceptance=acceptance(measured(replies), reference),
        seconds=round(perf_counter() - began, 1),
    )  # fmt: skip


def _greedy(
    engine: Endpoint, models: Models, prompts: Prompts, scope: Scope, watch: Watch, until: float
) -> tuple[Greedy, list[Completion], list[str]]:
    """The passes that fit the engine, until `until`, and one answer always; returns the replies of the first pass too,
    as many as were read, and what was left out, in words."""
    watch.say("greedy answers")
    reader = Reader(models.rounding, models.ends)
    first, left_out = list[Completion](), list[str]()
    for each in PASSES:
        company = each.company.format(batch=engine.slots)
        if not each.fits(engine):
            continue
        params = replace(SamplingParams(max_tokens=scope.max_tokens), **each.changes)
        size = 1 if each.alone else _at_once(engine, until)
        replies, read = list[Completion](), 0
        while read < len(prompts) and not (watch.stopped() or ((first or read) and watch.over(until))):
            if read == len(replies):
                replies += each.ask(engine, prompts[read : read + size], params)
            reader.read(read, prompts[read], replies[read].tokens, params, company)
            read += 1
            watch.step(read, len(prompts))
        first = first or replies[:read]
        if read < len(prompts):
            rest = f" to {len(prompts) - read} of {len(prompts)} prompts" if read else ""
            left_out.append(f"greedy answers {company}{rest}: the budget was spent")
    return reader.found, first, left_out


def _at_once(engine: Endpoint, until: float) -> int:
    """How many requests an engine is handed together; few where time may be up before they are answered."""
    return AT_ONCE if until == inf else 2 * engine.slots


def _stops(
    engine: Endpoint, models: Models, prompts: Prompts, replies: Sequence[Completion], scope: Scope, watch: Watch,
    until: float,
) -> Stops:  # fmt: skip
    tokenizer = models.tokenizer
    if tokenizer is None or not honours(engine, SamplingParams(stop=("x",))):
        return Stops()
    watch.say("stop strings")

    def decode(prompt: Sequence[int], answer: Sequence[int]) -> str:
        detokenizer = tokenizer.detokenizer(list(prompt))
        return "".join(detokenizer.push(t) for t in answer if t not in models.ends) + detokenizer.flush()

    params, size = SamplingParams(max_tokens=scope.max_tokens), _at_once(engine, until)
    return check_stops(engine, prompts, replies, params, decode, size, lambda: watch.over(until))


def _sampled(
    engine: Endpoint, models: Models, starts: Prompts, scope: Scope, watch: Watch, control: Control, until: float,
    latest: float,
) -> Sampled:  # fmt: skip
    cases: list[Case] = []
    if scope.requests != 0:
        watch.say("the exact distribution of first tokens")
        for i, (name, way) in enumerate(WAYS.items()):
            if watch.stopped() or (cases and watch.over(until)):
                break
            start = starts[(i + 2) % len(starts)]  # penalties with a text of few different tokens
            params = replace(way, max_tokens=scope.length + AHEAD, ignore_eos=True)
            if honours(engine, params):
                distribution = distribution_of(models.rounding, start, params, scope.length)
                if distribution.df:
                    cases.append(Case(name, list(start), params, distribution))
            watch.step(i + 1, len(WAYS))
    if not cases:
        return Sampled([], [], 0)
    requests = scope.requests if scope.requests is not None else needed(cases, scope.shift or SHIFT)
    watch.say(f"{requests:,} sampled requests" + " at most" * (until < inf))
    rng, size = np.random.default_rng(scope.seed), _at_once(engine, until)
    return sample(engine, cases, requests, rng, watch.step, control, until, latest, size, watch.stopped)


def _long(
    sampled: dict[str, Any], engine: Endpoint, models: Models, prompts: Prompts, scope: Scope, watch: Watch,
    control: Control, until: float, latest: float,
) -> dict[str, Any]:  # fmt: skip
    """The facts of sampled answers, with those of answers as long as greedy ones."""
    ways = [(name, way) for name, way in WAYS.items() if honours(engine, way)]
    number = int(np.ceil(LONG_TOKENS / (scope.shift or SHIFT) ** 2 / scope.max_tokens))
    if scope.requests is not None:
        number = min(number, -(-scope.requests // REQUESTS_EACH))
    every = [(list(prompts[i % len(prompts)]), *ways[(i + i // len(prompts)) % len(ways)]) for i in range(number)]
    drafted = list[list[int | None]]([[], []])

    def counted(engine: Endpoint, run: int, most: int, until: float) -> Conditional:
        """What comes in the answers of an engine, some of them at once, until time is up."""
        watch.say(f"{most:,} long sampled answers" + " at most" * (until < inf))
        rng, counts, done = np.random.default_rng([scope.seed, run + 1]), Conditional(), 0
        size = 4 * engine.slots if until == inf else engine.slots
        while done < most and not watch.over(until if done else max(until, latest)):
            asked = every[done : min(done + size, most)]
            each = [
                replace(way, max_tokens=scope.max_tokens, ignore_eos=True, seed=seed)
                for (_, _, way), seed in zip(asked, rng.integers(1 << 31, size=len(asked)).tolist(), strict=True)
            ]
            replies = answers(engine, [prompt for prompt, _, _ in asked], each)
            drafted[run] += [one.speculation.get("num_draft_tokens") for one in replies]
            for (prompt, name, _), params, one in zip(asked, each, replies, strict=True):
                if done and watch.over(until):
                    return counts
                read(models.rounding, prompt, one.tokens, params, name, counts)
                done += 1
                watch.step(done, most)
        return counts

    counts, level = counted(engine, 0, number, until), LEVEL * LONG
    found = counts.findings(level)
    if found and control is not None:
        found = counts.findings(level, counted(control(), 1, counts.tokens // scope.max_tokens, inf))
    known = [n for n in (sampled["draft_tokens"], *drafted[0]) if n is not None]
    return with_long(sampled, counts.facts(level), found) | {"draft_tokens": sum(known) if known else None}


def _not_tested(engine: Endpoint, stops: Stops, sampled: dict[str, Any]) -> list[str]:
    """What the certificate does not speak of, in words."""
    names = [name for name, way in WAYS.items() if not honours(engine, way)]
    missing = [f"sampling by {name}: this engine is not asked for it" for name in names]
    if not sampled["cases"]:
        missing.append("sampling")
    elif sampled["draft_tokens"] == 0:
        missing.append("drafts in sampled answers: none was made")
    elif sampled["draft_tokens"] is None:
        missing.append("drafts in sampled answers: the engine does not say how many it made")
    if not stops.answers:
        missing.append("stop strings")
    if engine.slots == 1:
        missing.append("batches")
    elif not engine.mixes:
        missing.append("greedy and sampled requests in one batch")
    return missing


# Reference acceptance -----------------------------------------------------------------------------------------------
#
# An engine can be lossless and useless: with a wrong flag, template or kernel every draft is refused, the text stays
# right and nothing gets faster. The reference is the same drafter over the same answers, replayed without any model;
# for a host that verifies chains, its trees cut to their best chain.

COLLAPSED = 0.8
"""Acceptance has collapsed where fewer drafted tokens are accepted a round than this share of the reference's."""


def acceptance(tokens: float | None, reference: float | None) -> dict[str, Any]:
    """For the certificate: new tokens a round, the target's own included, and those of the same drafter replayed."""
    known = tokens is not None and reference is not None
    collapsed = known and tokens - 1 < COLLAPSED * (reference - 1) and reference - tokens > 0.05  # type: ignore[operator]
    return {
        "tokens_a_round": None if tokens is None else round(tokens, 3),
        "reference": None if reference is None else round(reference, 3),
        "collapsed": collapsed,
    }


def measured(answers: Sequence[Completion]) -> float | None:
    """Tokens a round, without each answer's first, which runs the prompt and has no draft; None if it is not known."""
    told = [(len(one.tokens) - 1, rounds - 1) for one in answers if (rounds := one.rounds)]
    tokens, rounds = (sum(counts) for counts in zip(*told, strict=True)) if told else (0, 0)
    return tokens / rounds if rounds else None


def replayed(
    draft: str, recording: Recording, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *,
    chains: bool,
) -> float | None:  # fmt: skip
    """Tokens a round of the drafter alone, replayed over `answers`; None if it asks the target for more than tokens.

    The first token of an answer counts as its prompt's, as in `measured`. chains: its trees are cut to chains."""
    try:
        drafter: Drafter = replayable(draft, recording)
    except PacelineError:
        return None
    drafter = Chains(drafter) if chains else drafter
    tally = Tally()
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if len(answer) > 1:
            turn = RecordedAnswer(np.array([*prompt, answer[0]], np.int64), np.array(answer[1:], np.int64))
            replay(drafter, turn, i, tally)
    return tally.mean_accepted_tokens or None
