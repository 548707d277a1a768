"""The certificate: greedy, stop strings, sampling and acceptance of one engine, in one dictionary.

    certificate = certify(engine, Models(exact, own, tokenizer, ends, vocab_size), prompts, starts, Scope(shift=0.02))
    certificate["lossless"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from paceline.certify import acceptance
from paceline.certify.engines import Output, UnderTest
from paceline.certify.greedy import Greedy, Stops, check_stops
from paceline.certify.options import Scope, Watch
from paceline.certify.reference import Model
from paceline.certify.sampled import Case, Sampled, distribution_of, needed, sample
from paceline.engine.sampling import SamplingParams
from paceline.target.tokenizer import Tokenizer

Prompts = Sequence[Sequence[int]]

WAYS = (
    ("temperature 1", SamplingParams(temperature=1.0)),
    ("temperature 0.5", SamplingParams(temperature=0.5)),
    ("repetition penalty 1.2, top-k 40, top-p 0.98", SamplingParams(
        temperature=1.0, repetition_penalty=1.2, top_k=40, top_p=0.98)),
    ("temperature 1.5, top-p 0.9", SamplingParams(temperature=1.5, top_p=0.9)),
)  # fmt: skip
"""How the cases of the sampling test are sampled, in turn."""
AHEAD = 2
"""Tokens that a request has beyond those that are tested, so that drafts may reach beyond them."""
PENALTY = 1.2
"""Repetition penalty of one of the greedy passes."""


@dataclass(frozen=True)
class Models:
    """The model that the engine runs. exact: in float32; own: in the engine's dtype, None where that is float32."""

    exact: Model
    own: Model | None
    tokenizer: Tokenizer | None
    ends: Sequence[int]
    vocab_size: int


def certify(
    engine: UnderTest,
    models: Models,
    prompts: Prompts,
    starts: Prompts,
    scope: Scope = Scope(),
    *,
    draft: str | None = None,
    chains: bool = False,
    watch: Watch = Watch(),
) -> dict[str, Any]:
    """Test `engine` and say what was found.

    prompts  for greedy answers; starts  short ones, for the distribution of what comes next.
    draft    the drafter's spec, where it can be replayed for the reference acceptance; chains: cut to chains."""
    began = perf_counter()
    greedy, outputs = _greedy(engine, models, prompts, scope, watch)
    stops = _stops(engine, models, prompts, outputs, scope, watch)
    watch.say("how often drafts are accepted")
    accepted = acceptance.Acceptance(acceptance.measured([one.lengths for one in outputs]))
    if draft is not None:
        accepted.reference = acceptance.reference(
            draft, models.tokenizer, models.ends, models.vocab_size, prompts, [one.tokens for one in outputs],
            chains=chains,
        )  # fmt: skip
    sampled = _sampled(engine, models, starts, scope, watch)
    return {
        "lossless": not greedy.bugs and not stops.wrong and sampled.lossless,
        "engine": engine.name,
        "draft": draft,
        "greedy": greedy.facts(),
        "stops": stops.facts(),
        "sampled": sampled.facts(),
        "power": sampled.power(scope.shift) | {"greedy_rate": round(3 / max(greedy.tokens, 3), 6)},
        "acceptance": accepted.facts(),
        "not_tested": _not_tested(engine, stops, sampled),
        "plan": asdict(scope),
        "ran_on": engine.facts,
        "seconds": round(perf_counter() - began, 1),
    }


def _greedy(
    engine: UnderTest, models: Models, prompts: Prompts, scope: Scope, watch: Watch
) -> tuple[Greedy, list[Output]]:
    """Every prompt alone, all together, with a penalty, and between rows that sample. Returns the first answers too."""
    greedy = Greedy(models.exact, models.own, models.ends)
    params = SamplingParams(max_tokens=scope.max_tokens)
    watch.say("greedy answers")

    def judged(outputs: Sequence[Output], params: SamplingParams, company: str) -> None:
        for number, (prompt, one) in enumerate(zip(prompts, outputs, strict=True)):
            greedy.read(number, prompt, one.tokens, params, company)
            watch.step(number + 1, len(prompts))

    alone = [engine.answer([prompt], [params])[0] for prompt in prompts]
    judged(alone, params, "alone")
    if engine.batch > 1:
        judged(engine.answer(prompts, [params] * len(prompts)), params, f"in batches of {engine.batch}")
        if engine.mixes:
            hot = [SamplingParams(temperature=1.0, max_tokens=1 + i % 7, seed=i) for i in range(len(prompts))]
            mixed = engine.answer(
                [prompt for prompt in prompts for _ in range(2)],
                [one for hot_one in hot for one in (params, hot_one)],
            )
            judged(mixed[::2], params, "between rows that sample")
    penalised = replace(params, repetition_penalty=PENALTY)
    if engine.honours(penalised):
        company = f"in batches of {engine.batch}, repetition penalty {PENALTY}"
        judged(engine.answer(prompts, [penalised] * len(prompts)), penalised, company)
    return greedy, alone


def _stops(
    engine: UnderTest, models: Models, prompts: Prompts, outputs: Sequence[Output], scope: Scope, watch: Watch
) -> Stops:
    tokenizer = models.tokenizer
    if tokenizer is None or not engine.honours(SamplingParams(stop=("x",))):
        return Stops()
    watch.say("stop strings")

    def decode(prompt: Sequence[int], answer: Sequence[int]) -> str:
        detokenizer = tokenizer.detokenizer(list(prompt))
        return "".join(detokenizer.push(t) for t in answer if t not in models.ends) + detokenizer.flush()

    return check_stops(engine, prompts, outputs, SamplingParams(max_tokens=scope.max_tokens), decode)


def _sampled(engine: UnderTest, models: Models, starts: Prompts, scope: Scope, watch: Watch) -> Sampled:
    if scope.requests == 0:
        return Sampled([], [], 0)
    watch.say("the exact distribution of first tokens")
    model = models.own or models.exact  # rounding shifts probabilities too
    cases = []
    for i, start in enumerate(starts):
        name, way = WAYS[i % len(WAYS)]
        params = replace(way, max_tokens=scope.length + AHEAD, ignore_eos=True)
        if engine.honours(params):
            distribution = distribution_of(model, start, params, scope.length)
            if distribution.df:
                cases.append(Case(name, list(start), params, distribution))
        watch.step(i + 1, len(starts))
    if not cases:
        return Sampled([], [], 0)
    requests = scope.requests if scope.requests is not None else needed(cases, scope.shift)
    watch.say(f"{requests:,} sampled requests")
    return sample(engine, cases, requests, np.random.default_rng(scope.seed), watch.step)


def _not_tested(engine: UnderTest, stops: Stops, sampled: Sampled) -> list[str]:
    """What the certificate does not speak of, in words."""
    names = [name for name, way in WAYS if not engine.honours(way)]
    missing = [f"sampling by {name}: this engine is not asked for it" for name in names]
    if not sampled.cases:
        missing.append("sampling")
    if not stops.answers:
        missing.append("stop strings")
    if engine.batch == 1:
        missing.append("batches")
    elif not engine.mixes:
        missing.append("greedy and sampled requests in one batch")
    return missing
