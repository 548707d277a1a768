"""An alarm for corruption in service: finished answers are scored again while the server is idle (`serve --audit`).

A share of the answers is read by the plain path: no draft, no reused prefix, a cache of its own, in pieces as a prompt.
Each token must be possible there, by the request's own parameters and grammar:

* Greedy: it is the best token, or a near tie with it (`reference.is_tie`). Rounding is measured by reading the text,
  prompt included, in pieces of other widths: for each prompt longer than all before, and wherever a token seems wrong.
  Exact logits have no rounding.
* Sampled: it is not filtered out, within the rounding of the filters' borders. Over many answers, rare tokens and the
  best token come as often as the model says. These counts are martingales (`chance.bounds`) if nobody chose the noise,
  so answers to a seed of the request do not count: a client could look for seeds that draw rare tokens. Window k of
  WINDOW tokens may give a false alarm with probability LEVEL / (k (k + 1)), so all windows with LEVEL.

Errors that the plain path shares, such as broken weights, are not found."""

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
from paceline.peers.reference import PIECE, SCALES, noise_of
from paceline.runs.chance import TILTS, bounds, is_tie
from paceline.target.base import Target

log = logging.getLogger("paceline.audit")

CHUNK = 256  # Most tokens of a forward, for which a new request has to wait.
LOGITS = 1 << 24  # Most logits of a forward.
PLACES = 16  # Places judged at once.
NEAR = 32  # To measure rounding, the last NEAR tokens are read in other widths, those before in pieces of NEAR.
CALIBRATED = 32  # Rounding is first measured at so many places of an answer.
WINDOW = 2000  # Sampled tokens counted together.
LEVEL = 1e-3  # Probability of a false alarm by counts, over all time.
RARE = (1e-3, 1e-5, 1e-7)  # Tokens below each of these probabilities are counted.
SHOWN = 20  # The latest alarms kept for /audit.
VERDICTS = ("same", "near_tie", "mismatch", "impossible")
"""Of a token and, the worst of its tokens', of an answer."""
WRONG = VERDICTS[2:]
MOST_SLACK = 30.0  # Largest logarithm of the factor by which rounding changes a probability.
TEXTS = ("stop", "bad_words", "logit_bias")  # Parameters that hold text of the request.


def read(
    target: Target, text: IntArray, start: int, width: int, before: int = CHUNK
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read `text` in a cache of its own, in forwards of `width` tokens from `start` on, and of `before` tokens before
    it. Yields (i, logits [k, V] of the tokens text[i : i + k]) after each forward; k is 0 before `start`."""
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
    """Counts of rare tokens and best tokens in a window, with bounds on how often they should come. number: of the
    window, from 1."""

    def __init__(self, number: int):
        self.number, self.tokens = number, 0
        self._bounds = np.zeros((len(RARE) + 2, len(TILTS)))

    @property
    def p_value(self) -> float:
        return min(1.0, self._bounds.size * exp(min(0.0, self._bounds.min())))

    @property
    def is_proof(self) -> bool:
        """Whether such a window is too rare to be chance."""
        return self.p_value < LEVEL / (self.number * (self.number + 1))

    def add(self, probs: torch.Tensor, tighter: torch.Tensor, tokens: torch.Tensor, slack: float) -> None:
        """Count `tokens` [k]. probs, tighter: their distributions [k, V], with the widest and the tightest filters.

        slack  logarithm of the largest factor by which rounding changes a probability."""
        wider, best = exp(slack) * (1 + 1e-6), probs.argmax(-1)
        own, of_best, most = _at(probs, tokens), _at(probs, best), _at(tighter, best)
        kept = (most / of_best).clamp_min(1.0) * wider  # Tokens that may be filtered out leave others their share.
        for i, rare in enumerate(RARE):
            self._add(i, (own < rare) & (own > 0), torch.where(probs < rare, probs, 0.0).sum(-1) * kept)
        self._add(-2, tokens == best, torch.maximum(of_best, most) * wider)
        self._add(-1, tokens != best, 1 - torch.minimum(of_best, most) / wider)
        self.tokens += len(tokens)

    def _add(self, test: int, hits: torch.Tensor, high: torch.Tensor) -> None:
        self._bounds[test] += bounds(float(hits.sum()), high.cpu().double().clamp(0.0, 1.0).numpy())


def _at(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The values [k] of each row's token in `values` [k, V]."""
    return values.gather(-1, tokens.unsqueeze(-1))[:, 0]


def judge(
    logits: torch.Tensor, params: SamplingParams, text: IntArray, at: int, noise: float, counts: Counts | None = None
) -> list[str]:
    """Verdicts on the tokens text[at : at + k], from their logits [k, V]. counts: counts sampled tokens.

    noise  how far rounding moves a logit."""
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
    """The request's filters if probabilities are off by the factor e^slack: wider, or tighter if slack is negative."""
    p, by = params.top_p, exp(slack)
    return replace(params, top_p=min(1.0, p * by / (1 + p * (by - 1))), min_p=min(1.0, params.min_p / by))


class Audit:
    """Keeps a share of the answers and scores them, in the engine's thread alone.

    share   share of the answers to keep; most: tokens that may wait, prompts included. The newest answers stay.
    texts   whether an alarm repeats the request's token ids.
    backlog tokens of the waiting answers.
    answers, tokens  numbers of answers and of tokens by verdict; alarms: the latest alarms, for /audit."""

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
        """Keep a finished answer to be scored, if chance picks it and its sampling was lossless."""
        if random() >= self.share or not row.num_new or row.finish_reason == "error":
            return
        if self.engine.rule.lossless:
            kept = copy(row)  # Log-probabilities may be many times as large as the tokens, and are dropped.
            kept.logprobs, kept.prompt_logprobs = [], []
            self._waiting.append(kept)
            self.backlog += len(kept)
        while self.backlog > self.most:
            self._next()

    def _next(self) -> Row:
        """Take the oldest answer off the queue."""
        row = self._waiting.popleft()
        self.backlog -= len(row)
        return row

    @torch.inference_mode()
    def step(self) -> bool:
        """Do a short piece of work: at most a forward of CHUNK tokens. Returns False if there is none."""
        if self._work is None:
            if not self._waiting:
                return False
            self._work = self._score(self._next())
        began, most = perf_counter(), torch.get_num_threads()
        torch.set_num_threads(self.engine.threads.using)  # An audit uses as many threads as the engine's rounds.
        try:
            ended = next(self._work, True)
        except Exception:  # An error, such as too little memory, must not harm the next request.
            log.exception("an answer could not be audited")
            ended = True
        finally:
            torch.set_num_threads(most)
        self._work = None if ended else self._work
        self.seconds += perf_counter() - began
        return True

    def _score(self, row: Row) -> Generator[None, None, None]:
        """Read an answer and note the verdict. Stops at a wrong token."""
        params, text, start = row.params, row.tokens, row.prompt_length
        if (grammar := params.grammar) is not None and hasattr(grammar, "fresh"):
            params = replace(params, grammar=grammar.fresh())  # Another thread may read with the answer's own grammar.
        if start > self._longest and not self.engine.target.exact:  # Longer prompts may run other kernels.
            self._longest, noise = start, (yield from self._measure(text[: start + CALIBRATED], start))
            self.noise = max(self.noise, noise)
        counted = not params.is_greedy and params.seed is None
        found, counts = Counter[str](), self.window if counted else None
        width = max(min(CHUNK, LOGITS // self.engine.target.vocab_size), PIECE)
        at_once = PLACES if params.grammar is None else 1  # A grammar's mask may take as long as a forward.
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
        """Measure how far rounding moves logits of the tokens from `first` on, by reading them in other widths."""
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
        """Look at the window after an answer. A new window begins if this one is full or proves an error."""
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
        """Raise the alarm: a line in the log with the request's parameters,
        and its token ids only if `texts` is set."""
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

    # For /audit and /metrics
    # ----------------------------------------------------------------------------------------------

    def now(self) -> dict[str, Any]:
        """Facts for /audit. by_kind: (answers, wrong answers) by kind;
        the kind with more wrong ones points to the cause."""
        return {
            "share": self.share, "answers": dict(self.answers), "tokens": dict(self.tokens),
            "rounding": self.noise, "window": {"number": self.window.number, "tokens": self.window.tokens},
            "p_value": self.p_value, "by_kind": {kind: list(counts) for kind, counts in self.bad_of.items()},
            "backlog_tokens": self.backlog, "seconds": round(self.seconds, 3), "alarms": list(self.alarms),
        }  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """Yield the counters for /metrics."""
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
    """The drafter of the answer's token `index`; "" if the token is the target's own."""
    ends = accumulate(length for _, length in row.runs)
    return next((name for (name, _), end in zip(row.runs, ends, strict=True) if index < end), "")
