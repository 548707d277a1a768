"""Rollouts of a batch of prompts: verify the old answers, generate the rest, store the new answers.

    engine = Engine(model, draft="past-answer,first=8+sam,past=65536", max_batch=512)
    store = RolloutStore("runs/answers.rollouts")
    rollouts = rollout(engine, prompts, store, copies=8, params=SamplingParams(temperature=1.0, max_tokens=1024))
    rollouts[0].tokens, rollouts[0].logprobs, rollouts.figures.reuse

A row's seed is made of the caller's seed, the prompt, the copy's number, the policy's version and the number of earlier
answers. So it is new in every epoch, also after a resume, and independent of the prompts' order and of processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.prompt import Prompt
from paceline.errors import PacelineError
from paceline.rollout.rules import Reuse, RolloutRule, rule_of
from paceline.rollout.store import Entry, Key, RolloutStore, digest, numbered, sampling_text, visit_after

log = logging.getLogger("paceline")


class Rollout(NamedTuple):
    """One answer.

    tokens    with the end token.
    logprobs  float [n]: of each token, reused ones too, under the present policy, after temperature and filters.
    reused    number of leading tokens taken from the old answer.
    old       number of tokens of the old answer, 0 if there is none.
    finished  whether it ended by itself; otherwise it was cut."""

    key: Key
    prompt: list[int]
    tokens: list[int]
    logprobs: NDArray[np.floating]
    reused: int
    old: int
    finished: bool
    text: str


@dataclass
class Figures:
    """Sums over rollouts.

    tokens       of all answers; `reused` of them are old, and `decoded` are new.
    offered      number of old answers to these prompts, with `old_tokens` tokens; `full` of them were reused whole.
    looked       positions where an old token was compared; drift: the sum of |p - q| there.
    rounds       forwards of the target in which an answer grew, summed over rows.
    seconds      from the first forward to the last, verification included.
    cpu_seconds  of this process in that time."""

    answers: int = 0
    tokens: int = 0
    reused: int = 0
    old_tokens: int = 0
    offered: int = 0
    full: int = 0
    looked: int = 0
    drift: float = 0.0
    rounds: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def decoded(self) -> int:
        """Tokens that were generated."""
        return self.tokens - self.reused

    @property
    def reuse(self) -> float:
        """Share of the old answers' tokens that were kept."""
        return self.reused / self.old_tokens if self.old_tokens else 0.0

    @property
    def full_reuse(self) -> float:
        return self.full / self.offered if self.offered else 0.0

    @property
    def mean_drift(self) -> float:
        """Mean of |p - q| over the old tokens that were compared."""
        return self.drift / self.looked if self.looked else 0.0

    def __add__(self, other: Figures) -> Figures:
        return Figures(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class Rollouts:
    """Answers in the order of the prompts, all copies of one prompt together; and their figures.

    rule      the name of the rule; lossless: whether answers have the policy's distribution."""

    answers: list[Rollout]
    rule: str
    lossless: bool
    figures: Figures = field(default_factory=Figures)

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> Rollout:
        return self.answers[index]


def rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    store: RolloutStore,
    *,
    copies: int = 1,
    params: SamplingParams,
    rule: str | RolloutRule = "residual",
    lenience: float | None = None,
    version: int = 0,
    seed: int = 0,
    keys: Sequence[Key] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Rollouts:
    """Answer every prompt `copies` times: keep what the rule accepts of the answers in `store`, and store the new ones.

    params    temperature must be above 0; `seed` is ignored.
    rule      as in `paceline.rollout.rules`; only the rule plain, which is not lossless, takes a lenience.
    version   of the policy: a number that grows when the weights change.
    seed      of all randomness.
    keys      one for each prompt, where the caller numbers the copies; then `copies` must be 1.
    progress  called with the number of new tokens after every round.

    An interruption or a failure leaves the store as it was. PacelineError for bad parameters, or if an answer fails."""
    if params.is_greedy:
        raise PacelineError("Rollouts are sampled: temperature is 0; it must be above 0.")
    if copies < 1 or (keys is not None and (copies != 1 or len(keys) != len(prompts))):
        raise PacelineError(f"copies is {copies}; it must be 1 or more, and 1 with a key for every prompt.")
    if isinstance(rule, str):
        rule = rule_of(rule, lenience=lenience, seed=seed)
    encoded = [engine.encode(prompt) for prompt in prompts for _ in range(copies)]
    given = [prompt for prompt in prompts for _ in range(copies)]
    keys = numbered([digest(prompt) for prompt in encoded]) if keys is None else keys
    olds = [_usable(store.get(key, version), rule, params, engine.target.vocab_size) for key in keys]
    begun, cpu = perf_counter(), process_time()
    rule.others = engine.rule
    rows: list[Row] = []
    reuses: list[Reuse] = []
    try:
        with engine.using(rule=rule):
            for prompt, key, old in zip(given, keys, olds, strict=True):
                row = engine.add(prompt, replace(params, seed=key.seed(seed, key.copy, version, visit_after(old))))
                rows.append(row)
                reuses.append(rule.begin(row, key, old))
                past = reuses[-1].old
                row.past = np.empty(0, np.int64) if past is None else past.tokens.astype(np.int64)
            for delta in engine.follow(rows):
                if delta.row.error:
                    raise PacelineError(delta.row.error)
                if progress is not None:
                    progress(len(delta.tokens))
    finally:
        for row in rows:
            engine.abort(row)
            rule.end(row)
    figures = Figures(seconds=perf_counter() - begun, cpu_seconds=process_time() - cpu)
    answers = [_answer(row, reuse) for row, reuse in zip(rows, reuses, strict=True)]
    dtype = np.float64 if engine.target.dtype == torch.float64 else np.float32  # as distributions are
    now = sampling_text(params)
    store.put((r.key, _entry(row, r, version, now, dtype)) for row, r in zip(rows, reuses, strict=True))
    for row, reuse, answer in zip(rows, reuses, answers, strict=True):
        figures += _figures(row, reuse, answer)
    if figures.reused and not any(row.stats.draft_tokens for row in rows):
        log.warning("old answers were verified token by token: the engine's drafter does not propose them")
    return Rollouts(answers, rule.name, rule.lossless, figures)


def _usable(old: Entry | None, rule: RolloutRule, params: SamplingParams, vocab_size: int) -> Entry | None:
    """The old answer, if there is one of this vocabulary. PacelineError if its probabilities cannot be compared."""
    if old is None or not len(old) or max(old.tokens.max(), old.top_ids.max(initial=0)) >= vocab_size:
        return None
    if rule.compares and old.sampling != (now := sampling_text(params)):
        pairs = zip(old.sampling.split(" "), now.split(" "), strict=False)
        changes = ", ".join(f"{a} and are to be verified with {b}" for a, b in pairs if a != b)
        raise PacelineError(
            f"The store's answers were sampled with {changes}: their probabilities are of another distribution, and "
            f"the rule {rule.name} compares them. Keep these parameters, begin a new store, or use one-hot."
        )
    return old


def _entry(row: Row, reuse: Reuse, version: int, sampling: str, dtype: type) -> Entry:
    count, width = row.num_new, len(reuse.top_ids[0]) if reuse.top_ids else 0
    ids = np.array(reuse.top_ids[:count], np.int32).reshape(count, width)
    best: Any = np.array(reuse.top_probs[:count], dtype).reshape(count, width)
    probs: Any = np.array(reuse.probs[:count], dtype)
    tokens = row.new_tokens.astype(np.int32)
    return Entry(tokens, probs, ids, best, version, reuse.visit, row.finish_reason == "stop", sampling)


def _answer(row: Row, reuse: Reuse) -> Rollout:
    # Tokens decided after the end of the answer do not count.
    reused, old = min(reuse.reused, row.num_new), 0 if reuse.old is None else len(reuse.old)
    prompt, tokens = row.tokens[: row.prompt_length].tolist(), row.new_tokens.tolist()
    logprobs = np.log(np.array(reuse.probs[: row.num_new]))
    return Rollout(reuse.key, prompt, tokens, logprobs, reused, old, row.finish_reason == "stop", row.text)


def _figures(row: Row, reuse: Reuse, answer: Rollout) -> Figures:
    return Figures(
        answers=1,
        tokens=len(answer.tokens),
        reused=answer.reused,
        old_tokens=answer.old,
        offered=int(answer.old > 0),
        full=int(0 < answer.old == answer.reused == len(answer.tokens)),
        looked=reuse.looked,
        drift=reuse.drift,
        rounds=row.stats.rounds,
    )
