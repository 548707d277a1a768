"""The certificate: greedy, stop strings, sampling and acceptance of one engine, in one dictionary.

certificate = certify(engine, Models(exact, own, law), prompts, Plan(shift=0.02), ...)
certificate["lossless"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from paceline.certify import acceptance
from paceline.certify.engines import Said, UnderTest
from paceline.certify.greedy import Greedy, Judge, Stops, check_stops
from paceline.certify.reference import Model
from paceline.certify.sampled import Case, Sampled, law_of, needed, power_of, sample
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
"""Tokens that a request has beyond those whose law is tested, so that drafts may reach beyond them."""
PENALTY = 1.2
"""Repetition penalty of one of the greedy passes."""


@dataclass(frozen=True)
class Plan:
    """What is tested, and how closely.

    shift      the smallest shift of a sampled law that is to be found; it decides how many requests there are.
    requests   of the sampling test; None: as many as `shift` takes, 0: no sampling.
    length     tokens whose joint law is tested.
    max_tokens of a greedy answer."""

    shift: float = 0.02
    requests: int | None = None
    length: int = 3
    max_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """The model that the engine runs. exact: in float32; own: in the engine's dtype, None where that is float32."""

    exact: Model
    own: Model | None
    tokenizer: Tokenizer | None
    ends: Sequence[int]
    vocab_size: int


@dataclass(frozen=True)
class Watch:
    """Hears how far it has come: say(text), and step(done, of) within what was said last."""

    say: Callable[[str], None] = lambda text: None
    step: Callable[[int, int], None] = lambda done, of: None


def certify(
    engine: UnderTest,
    subject: Subject,
    prompts: Prompts,
    starts: Prompts,
    plan: Plan = Plan(),
    *,
    draft: str | None = None,
    chains: bool = False,
    watch: Watch = Watch(),
) -> dict[str, Any]:
    """Test `engine` and say what was found.

    prompts  for greedy answers; starts  short ones, for the law of what comes next.
    draft    the drafter's spec, where it can be replayed for the reference acceptance; chains: cut to chains."""
    began = perf_counter()
    greedy, said = _greedy(engine, subject, prompts, plan, watch)
    stops = _stops(engine, subject, prompts, said, plan, watch)
    watch.say("how often drafts are accepted")
    accepted = acceptance.Acceptance(acceptance.measured([one.lengths for one in said]))
    if draft is not None:
        accepted.reference = acceptance.reference(
            draft, subject.tokenizer, subject.ends, subject.vocab_size, prompts, [one.tokens for one in said],
            chains=chains,
        )  # fmt: skip
    sampled = _sampled(engine, subject, starts, plan, watch)
    return {
        "lossless": not greedy.bugs and not stops.wrong and sampled.lossless,
        "engine": engine.name,
        "draft": draft,
        "greedy": greedy.facts(),
        "stops": stops.facts(),
        "sampled": sampled.facts(),
        "power": power_of(sampled, plan.shift) | {"greedy_rate": round(3 / max(greedy.tokens, 3), 6)},
        "acceptance": accepted.facts(),
        "not_tested": _not_tested(engine, stops, sampled),
        "plan": asdict(plan),
        "ran_on": engine.facts,
        "seconds": round(perf_counter() - began, 1),
    }


def _greedy(
    engine: UnderTest, subject: Subject, prompts: Prompts, plan: Plan, watch: Watch
) -> tuple[Greedy, list[Said]]:
    """Every prompt alone, all together, with a penalty, and between rows that sample. Returns the first answers too."""
    greedy, judge = Greedy(), Judge(subject.exact, subject.own, subject.ends)
    wish = SamplingParams(max_tokens=plan.max_tokens)
    watch.say("greedy answers")

    def judged(said: Sequence[Said], wish: SamplingParams, company: str) -> None:
        for number, (prompt, one) in enumerate(zip(prompts, said, strict=True)):
            judge.read(greedy, number, prompt, one.tokens, wish, company)
            watch.step(number + 1, len(prompts))

    alone = [engine.answer([prompt], [wish])[0] for prompt in prompts]
    judged(alone, wish, "alone")
    if engine.batch > 1:
        judged(engine.answer(prompts, [wish] * len(prompts)), wish, f"in batches of {engine.batch}")
        if engine.mixes:
            hot = [SamplingParams(temperature=1.0, max_tokens=1 + i % 7, seed=i) for i in range(len(prompts))]
            mixed = engine.answer(
                [prompt for prompt in prompts for _ in range(2)],
                [one for hot_one in hot for one in (wish, hot_one)],
            )
            judged(mixed[::2], wish, "between rows that sample")
    penalised = replace(wish, repetition_penalty=PENALTY)
    if engine.honours(penalised):
        company = f"in batches of {engine.batch}, repetition penalty {PENALTY}"
        judged(engine.answer(prompts, [penalised] * len(prompts)), penalised, company)
    return greedy, alone


def _stops(
    engine: UnderTest, subject: Subject, prompts: Prompts, said: Sequence[Said], plan: Plan, watch: Watch
) -> Stops:
    tokenizer = subject.tokenizer
    if tokenizer is None or not engine.honours(SamplingParams(stop=("x",))):
        return Stops()
    watch.say("stop strings")

    def decode(prompt: Sequence[int], answer: Sequence[int]) -> str:
        detokenizer = tokenizer.detokenizer(list(prompt))
        return "".join(detokenizer.push(t) for t in answer if t not in subject.ends) + detokenizer.flush()

    return check_stops(engine, prompts, said, SamplingParams(max_tokens=plan.max_tokens), decode)


def _sampled(engine: UnderTest, subject: Subject, starts: Prompts, plan: Plan, watch: Watch) -> Sampled:
    if plan.requests == 0:
        return Sampled([], [], 0)
    watch.say("the exact law of first tokens")
    law_model = subject.own or subject.exact  # rounding shifts probabilities too
    cases = []
    for i, start in enumerate(starts):
        name, way = WAYS[i % len(WAYS)]
        wish = replace(way, max_tokens=plan.length + AHEAD, ignore_eos=True)
        if engine.honours(wish):
            law = law_of(law_model, start, wish, plan.length)
            if law.df:
                cases.append(Case(name, list(start), wish, law))
        watch.step(i + 1, len(starts))
    if not cases:
        return Sampled([], [], 0)
    requests = plan.requests if plan.requests is not None else needed(cases, plan.shift)
    watch.say(f"{requests:,} sampled requests")
    return sample(engine, cases, requests, np.random.default_rng(plan.seed), watch.step)


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
