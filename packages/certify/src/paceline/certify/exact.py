"""An oracle that knows the model: it reads every answer of an engine that takes token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, ClassVar

import numpy as np

from paceline.certify import stats
from paceline.certify.acceptance import Rounds, acceptance, measured
from paceline.certify.asking import Control, Fields, Messages, request
from paceline.certify.conditional import Conditional
from paceline.certify.greedy import PASSES, Reader, replayed, stop_strings
from paceline.certify.options import REQUESTS, SHIFT
from paceline.certify.parts import Learnt, Oracle, Part, Read, Run
from paceline.certify.sampled import COARSE, FINE, Distribution, KnownCase, Prefix, needed
from paceline.certify.scenarios import SPENT
from paceline.certify.stats import Floats
from paceline.certify.verdict import Stops
from paceline.core.params import SamplingParams
from paceline.draft.recording import Recording
from paceline.errors import PacelineError
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Endpoint
from paceline.peers.reference import Model, Rounding, distributions

Prompts = Sequence[Sequence[int]]
WAYS = REQUESTS["sampling"]
"""How sampled answers are sampled, in turn."""
AHEAD = 2  # A request asks for so many tokens more than are tested, so that drafts may reach beyond those.
REPEATED = 6  # The prompt of a long sampled answer repeats its beginning so often, so that there is much to copy.
LONG_TOKENS = 6.0
"""Tokens of long sampled answers that a shift of 1 would take; one of a tenth takes a hundred times as many."""
REQUESTS_EACH = 16  # Sampled requests for each long answer, if their number is given.
FOLLOWED, NAMED = 0.01, 0.002
"""A prefix at least as probable as FOLLOWED is continued by its next tokens, and a token at least as probable as NAMED
has an outcome of its own. Both are shares of all answers."""
AT_ONCE = 8  # Places in memory at once; each holds a distribution over the vocabulary for every world.


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


def distribution_of(rounding: Rounding, prompt: Sequence[int], params: SamplingParams, length: int) -> Distribution:
    """The distribution of the first `length` tokens after `prompt`, sampled by `params`,
    which end no answer that soon."""
    probability: dict[Prefix, Floats] = {(): np.ones(1)}
    level: list[Prefix] = [()]
    for _ in range(length):
        below: list[Prefix] = []
        for prefix, following in zip(level, _next(rounding, prompt, level, params), strict=True):
            here = probability[prefix][:, None] * following
            named = np.flatnonzero(here[0] >= NAMED)
            probability[prefix] = np.maximum(0.0, here.sum(1) - here[:, named].sum(1))
            for token in named.tolist():
                probability[*prefix, token] = here[:, token]
                below.append((*prefix, token))
        level = [prefix for prefix in below if probability[prefix][0] >= FOLLOWED]
        if not level:
            break
    worlds = np.stack(list(probability.values()), 1)
    worlds /= worlds.sum(1, keepdims=True)
    worlds[worlds < 1e-12] = 0.0  # Such a rest is rounding: all tokens after the prefix have outcomes of their own.
    bins = stats.pooled(worlds[0], FINE)
    fine = stats.by_bin(worlds, bins)
    return Distribution(dict(zip(probability, bins.tolist(), strict=True)), fine, stats.pooled(fine[0], COARSE), length)


def _next(rounding: Rounding, prompt: Sequence[int], prefixes: Sequence[Prefix], params: SamplingParams) -> Floats:
    """The distribution of the token after each prefix in every world, float64 [N, W, V]."""
    texts = [[*prompt, *prefix] for prefix in prefixes]
    exact, *moved = rounding.after(texts)
    return distributions([exact.double(), *moved], params, texts, len(prompt)).swapaxes(0, 1)


def read(
    rounding: Rounding, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, group: str,
    counts: Conditional,
) -> None:  # fmt: skip
    """Add every place of an answer to `counts`. group: how it was sampled, in words."""
    text = [*prompt, *tokens]
    before = [text[:end] for end in range(len(prompt), len(text))]
    logits = rounding.along(text, len(prompt))
    for begin in range(0, len(before), AT_ONCE):
        some = before[begin : begin + AT_ONCE]
        worlds = distributions(logits[:, begin : begin + AT_ONCE], params, some, len(prompt))
        for place, context in enumerate(some):
            counts.add(group, worlds[:, place], context, len(prompt), text[len(context)])
