"""An alarm for corruption in service: finished answers are scored again while nothing is asked (`serve --audit`).

A share of the answers is read by the plain path: no draft, no reused prefix, a cache of its own, in pieces as a prompt.
Each token must be one that the model could say there, by the request's own parameters and grammar:

* Greedy: the best one, or a near tie with it (`reference.is_tie`). Rounding is measured by reading a text in other
  widths, the prompt too, as a server reads it in pieces of its choice: on answers to longer prompts than any before,
  and at every place where a token seems wrong. With exact logits there is none.
* Sampled: none that is filtered out, as far as rounding moves the filters' borders; and over many answers, rare tokens
  and the best one come as often as the model says. These counts are martingales (`chance.bounds`) if nobody chose the
  noise, so answers to a seed that the request gave do not count: a client could look for seeds that draw rare tokens.
  Window k of WINDOW tokens may give a false alarm with probability LEVEL / (k (k + 1)), so all windows with LEVEL.

What the plain path computes wrongly itself, such as broken weights, shows nowhere here."""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from collections.abc import Generator, Iterator
from copy import copy
from dataclasses import replace
from itertools import accumulate
from math import exp, inf
from random import random
from time import perf_counter, time
from typing import Any

import numpy as np
import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams, probabilities, warp
from paceline.core.segment import Segment
from paceline.core.tree import IntArray
from paceline.engine.engine import Engine
from paceline.peers.reference import PIECE, SCALES, is_tie, noise_of
from paceline.runs.chance import TILTS, bounds
from paceline.target.base import Target

log = logging.getLogger("paceline.audit")

CHUNK = 256  # most tokens of a forward: a request that comes meanwhile waits for one
LOGITS = 1 << 24  # most logits of a forward
PLACES = 16  # places that are judged in one go
NEAR = 32  # tokens before a place that are read in other widths to measure rounding; all others in pieces of so many
CALIBRATED = 32  # places of an answer at which rounding is measured beforehand
WINDOW = 2000  # sampled tokens that are counted together
LEVEL = 1e-3  # probability of a false alarm by counts, over all time
RARE = (1e-3, 1e-5, 1e-7)  # tokens below these probabilities are counted
SHOWN = 20  # latest alarms that /audit tells
VERDICTS = ("same", "near_tie", "mismatch", "impossible")
"""Of a token and, the worst of its tokens', of an answer."""
WRONG = VERDICTS[2:]
MOST_SLACK = 30.0  # largest logarithm of a factor
TEXTS = ("stop", "bad_words", "logit_bias")  # parameters that hold some of the request's text


def read(
    target: Target, text: IntArray, start: int, width: int, before: int = CHUNK
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read `text` in a cache of its own, in forwards of `width` from token `start` on, else of `before`. Yields
    after each of them (i, logits [k, V] of the tokens text[i : i + k]); k is 0 within the beginning."""
    target = target.apart()
    slot, at = target.add_row(len(text)), 0
    try:
        while at < len(text) - 1:
            inside = at >= start - 1
            piece = text[at : min(at + width, len(text) - 1) if inside else min(at + before, start - 1)]
            segment = Segment.chunk(slot, piece, last=False, scored=len(piece) if inside else 0)
            logits = target.verify([segment]).logits
            target.commit(slot, range(len(piece)))
            yield at + 1, logits
            at += len(piece)
    finally:
        target.drop_row(slot)


class Counts:
    """Rare tokens and best tokens of a window, and how often they should come. number: the window's, from 1."""

    def __init__(self, number: int):
        self.number, self.tokens = number, 0
        self._bounds = np.zeros((len(RARE) + 2, len(TILTS)))

    @property
    def p_value(self) -> float:
        return min(1.0, self._bounds.size * exp(min(0.0, self._bounds.min())))

    @property
    def is_proof(self) -> bool:
        """Whether chance alone gives such a window too rarely."""
        return self.p_value < LEVEL / (self.number * (self.number + 1))

    def add(self, probs: torch.Tensor, tighter: torch.Tensor, tokens: torch.Tensor, slack: float) -> None:
        """Count `tokens` [k]. probs, tighter: their distributions [k, V], with filters that let most pass, and least.

        slack  the logarithm of the factor by which rounding changes a probability at most."""
        wider, best = exp(slack) * (1 + 1e-6), probs.argmax(-1)
        own, of_best, most = _at(probs, tokens), _at(probs, best), _at(tighter, best)
        kept = (most / of_best).clamp_min(1.0) * wider  # the share of what may be filtered out goes to all others
        for i, rare in enumerate(RARE):
            self._add(i, (own < rare) & (own > 0), torch.where(probs < rare, probs, 0.0).sum(-1) * kept)
        self._add(-2, tokens == best, torch.maximum(of_best, most) * wider)
        self._add(-1, tokens != best, 1 - torch.minimum(of_best, most) / wider)
        self.tokens += len(tokens)

    def _add(self, test: int, hits: torch.Tensor, high: torch.Tensor) -> None:
        self._bounds[test] += bounds(float(hits.sum()), high.cpu().double().clamp(0.0, 1.0).numpy())


def _at(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The value [k] of each row's token, of values [k, V]."""
    return values.gather(-1, tokens.unsqueeze(-1))[:, 0]


def judge(
    logits: torch.Tensor, params: SamplingParams, text: IntArray, at: int, noise: float, counts: Counts | None = None
) -> list[str]:
    """The verdicts on the tokens text[at : at + k], from their logits [k, V]; counts: where sampled ones are counted.

    noise  by how much rounding moves a logit."""
    contexts = [text[:end] for end in range(at, at + len(logits))]
    tokens = torch.from_numpy(text[at : at + len(logits)]).to(logits.device)
    noise *= max(params.repetition_penalty, 1 / params.repetition_penalty)
    if params.is_greedy:
        scores = warp(logits, params, contexts)
        gaps = (scores.amax(-1) - _at(scores, tokens)).tolist()
        wrong = "mismatch", "impossible"
        return ["same" if not gap else "near_tie" if is_tie(gap, noise) else wrong[gap == inf] for gap in gaps]
    slack = min(2 * noise / params.temperature, MOST_SLACK)
    looser = _moved(params, slack)
    probs = probabilities(logits, looser, contexts)
    if counts is not None:
        tighter = probabilities(logits, _moved(params, -slack), contexts) if slack else probs
        counts.add(probs, tighter, tokens, slack)
    found = ["same" if own > 0 else "impossible" for own in _at(probs, tokens).tolist()]
    for i in [i for i, verdict in enumerate(found) if verdict == "impossible" and noise]:
        raised = logits[i : i + 1].float().clone()
        raised[0, tokens[i]] += 2 * noise
        if probabilities(raised, looser, contexts[i : i + 1])[0, tokens[i]] > 0:
            found[i] = "near_tie"
    return found


def _moved(params: SamplingParams, slack: float) -> SamplingParams:
    """The request's filters where probabilities are off by the factor e^slack: they let more pass, or less below 0."""
    p, by = params.top_p, exp(slack)
    return replace(params, top_p=min(1.0, p * by / (1 + p * (by - 1))), min_p=min(1.0, params.min_p / by))


class Audit:
    """Keeps a share of the answers and scores them, in the engine's thread alone.

    share   of the answers that are kept. most: tokens of the answers that wait, prompts included; the newest stay.
    texts   whether an alarm repeats the request's token ids.
    backlog tokens of the answers that wait.
    answers, tokens  numbers of answers and tokens by verdict. alarms: the latest ones, as /audit tells them."""

    def __init__(
        self, engine: Engine, share: float, most: int = 1 << 18, *, texts: bool = False, prefix: str = "paceline"
    ):
        self.engine, self.share, self.most, self.texts, self.prefix = engine, share, most, texts, prefix
        self.answers, self.tokens = Counter(dict.fromkeys(VERDICTS, 0)), Counter(dict.fromkeys(VERDICTS, 0))
        self.bad_of = {kind: [0, 0] for kind in ("reused", "fresh", "drafted", "plain")}
        self.alarms: deque[dict[str, Any]] = deque(maxlen=SHOWN)
        self.num_alarms, self.seconds, self.p_value, self.window = 0, 0.0, 1.0, Counts(1)
        self.noise = 0.0
        self.backlog, self._waiting = 0, deque[Row]()
        self._longest = 0
        self._work: Generator[None, None, None] | None = None

    def keep(self, row: Row) -> None:
        """Note an answer that has ended, if chance picks it and its law is the model's."""
        if random() >= self.share or not row.num_new or row.finish_reason == "error":
            return
        if self.engine.rule.lossless:
            kept = copy(row)  # without what may be many times as large as its tokens
            kept.logprobs, kept.prompt_logprobs = [], []
            self._waiting.append(kept)
            self.backlog += len(kept)
        while self.backlog > self.most:
            self._next()

    def _next(self) -> Row:
        """The oldest answer, which waits no more."""
        row = self._waiting.popleft()
        self.backlog -= len(row)
        return row

    @torch.inference_mode()
    def step(self) -> bool:
        """Do a short piece of work, a forward of CHUNK tokens at most. Returns False where there is none."""
        if self._work is None:
            if not self._waiting:
                return False
            self._work = self._score(self._next())
        began, most = perf_counter(), torch.get_num_threads()
        torch.set_num_threads(self.engine.threads.using)  # as many as its rounds had
        try:
            ended = next(self._work, True)
        except Exception:  # such as too little memory: whoever asks next must not suffer
            log.exception("an answer could not be audited")
            ended = True
        finally:
            torch.set_num_threads(most)
        self._work = None if ended else self._work
        self.seconds += perf_counter() - began
        return True

    def _score(self, row: Row) -> Generator[None, None, None]:
        """Read an answer, and note what is found; the work stops at a token that is wrong."""
        params, text, start = row.params, row.tokens, row.prompt_length
        if (grammar := params.grammar) is not None and hasattr(grammar, "fresh"):
            params = replace(params, grammar=grammar.fresh())  # others may read the answer's own one meanwhile
        if start > self._longest and not self.engine.target.exact:  # other kernels may run from some width on
            self._longest, noise = start, (yield from self._measure(text[: start + CALIBRATED], start))
            self.noise = max(self.noise, noise)
        counted = not params.is_greedy and params.seed is None
        found, counts = Counter[str](), self.window if counted else None
        width = max(min(CHUNK, LOGITS // self.engine.target.vocab_size), PIECE)
        at_once = PLACES if params.grammar is None else 1  # a mask may take as long as a forward
        for first, logits in read(self.engine.target, text, start, width):
            for i in range(0, len(logits), at_once):
                some = logits[i : i + at_once]
                for at, verdict in enumerate(judge(some, params, text, first + i, self.noise, counts), first + i):
                    noise = self.noise
                    if verdict in WRONG and not self.engine.target.exact:
                        noise = yield from self._measure(text[: at + 1], at)
                        [verdict] = judge(logits[at - first : at - first + 1], params, text, at, noise)
                    found[verdict] += 1
                    if verdict in WRONG:
                        place = {"token": at - start, "drafter": _drafter(row, at - start), "rounding": noise}
                        self._alarm(row, verdict, place)
                        self._note(row, found, verdict)
                        return
                yield
            yield
        self._note(row, found, "near_tie" if found["near_tie"] else "same")
        if counts is not None:
            self._look(row)

    def _measure(self, text: IntArray, first: int) -> Generator[None, None, float]:
        """By how much rounding moves a logit of the tokens from `first` on, which are read in other widths, too."""
        readings, start = [], max(first - NEAR, 1)
        for width, before in ((CHUNK, CHUNK), (PIECE, NEAR), (1, NEAR)):
            kept = []
            for at, logits in read(self.engine.target, text, start, width, before):
                if at + len(logits) > first:
                    kept.append(logits[max(first - at, 0) :].float().cpu())
                yield
            readings.append(torch.cat(kept))
        return SCALES[0] * float(noise_of(readings[0], readings[1:]).max())

    def _look(self, row: Row) -> None:
        """Look at the window after an answer; a full one, or one that proves something, is the last of its kind."""
        self.p_value = self.window.p_value
        if self.window.is_proof:
            self._alarm(row, "counts", {"p_value": self.p_value, "tokens": self.window.tokens})
        if self.window.is_proof or self.window.tokens >= WINDOW:
            self.window = Counts(self.window.number + 1)

    def _note(self, row: Row, found: Counter[str], verdict: str) -> None:
        self.answers[verdict] += 1
        self.tokens.update(found)
        for kind in ("reused" if row.reused else "fresh", "drafted" if row.stats.accepted_tokens else "plain"):
            self.bad_of[kind][0] += 1
            self.bad_of[kind][1] += verdict in WRONG

    def _alarm(self, row: Row, verdict: str, facts: dict[str, Any]) -> None:
        """Raise the alarm: a line in the log, which repeats the request without its text unless that is wanted."""
        plain, names = SamplingParams(), SamplingParams.option_names()
        given = {name: getattr(row.params, name) for name in names if self.texts or name not in TEXTS}
        asked = {name: value for name, value in given.items() if value != getattr(plain, name)}
        asked |= {"seed": row.noise.seed, "draft": row.params.draft, "grammar": row.params.grammar is not None}
        more = {"prompt_tokens": row.tokens[: row.prompt_length].tolist(), "tokens": row.new_tokens.tolist()}
        alarm = {
            "time": round(time(), 3), "request": row.id, "verdict": verdict, **facts, "prompt": row.prompt_length,
            "answer": row.num_new, "reused": row.reused, "parameters": asked, **(more if self.texts else {}),
        }  # fmt: skip
        self.alarms.append(alarm)
        self.num_alarms += 1
        log.warning("an answer is not the model's: %s", json.dumps(alarm, default=str))

    # What is told ----------------------------------------------------------------------------------------------

    def now(self) -> dict[str, Any]:
        """For /audit. by_kind: answers, and wrong ones among them; where they differ, the cause is near."""
        return {
            "share": self.share, "answers": dict(self.answers), "tokens": dict(self.tokens),
            "rounding": self.noise, "window": {"number": self.window.number, "tokens": self.window.tokens},
            "p_value": self.p_value, "by_kind": {kind: list(counts) for kind, counts in self.bad_of.items()},
            "backlog_tokens": self.backlog, "seconds": round(self.seconds, 3), "alarms": list(self.alarms),
        }  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """For /metrics."""
        for name, counts in (("answers", self.answers), ("tokens", self.tokens)):
            what = f"Audited {name} by verdict"
            family = CounterMetricFamily(f"{self.prefix}:audit_{name}", what, labels=["verdict"])
            for verdict in VERDICTS:
                family.add_metric([verdict], counts[verdict])
            yield family
        for name, value in (("alarms", self.num_alarms), ("seconds", self.seconds)):
            yield CounterMetricFamily(f"{self.prefix}:audit_{name}", f"Audit: {name}", value=value)
        latest = self.alarms[-1]["time"] if self.alarms else 0.0
        gauges = {"p_value": self.p_value, "backlog_tokens": self.backlog, "last_alarm_timestamp_seconds": latest}
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"{self.prefix}:audit_{name}", f"Audit: {name}", value=value)


def _drafter(row: Row, index: int) -> str:
    """The drafter of the answer's token `index`; "" for one of the target's own."""
    ends = accumulate(length for _, length in row.runs)
    return next((name for (name, _), end in zip(row.runs, ends, strict=True) if index < end), "")
