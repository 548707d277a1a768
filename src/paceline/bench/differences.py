"""Tie or bug: why an answer differs from plain decoding, where it first does.

Greedy answers may differ in a dtype of few bits, because a forward over many tokens rounds differently from one over
a single token, and of two logits that are nearly equal the other one then wins. Whether that is what happened can be
seen: the two tokens' logits, computed exactly, lie closer together than the dtype's own noise, and no third is above
them. Anything else is a bug.

    with Judge(target, exact) as judge:
        judge.verdict(prefix, plain_token, other_token)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.bench.metrics import BASELINE, first_divergence
from paceline.bench.record import Answer
from paceline.bench.setting import Setting, Watch
from paceline.engine.round import Segment
from paceline.target.base import Target
from paceline.target.load import load
from paceline.target.quantised.checkpoint import exact_dtype


@dataclass(frozen=True)
class Judgement:
    """gap: how far the lower of the two logits lies below the best of all, exactly computed; noise: how much the
    dtype changes a logit there (the most over the vocabulary)."""

    verdict: str
    gap: float
    noise: float


class Judge:
    """target: the model as it ran. exact: the same in float32, or the target itself if that is its dtype.

    A prefix that goes on where the one before ended is read on from there: of one text, the shorter ones first."""

    def __init__(self, target: Target, exact: Target, chunk: int = 512):
        self._exact = _Reader(exact, 1, chunk)
        self._own = [_Reader(target, last, chunk) for last in (1, 16)]
        self._logits = lru_cache(maxsize=256)(self._both)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in (self._exact, *self._own):
            reader.close()

    def verdict(self, prefix: Sequence[int], plain: int, other: int) -> Judgement:
        """Whether `other` instead of `plain` after `prefix` (prompt and common tokens) is a tie."""
        exact, noise = self._logits(tuple(prefix))
        gap = float(exact.max() - exact[[plain, other]].min())
        return Judgement("tie" if gap <= 2 * noise else "bug", round(gap, 6), round(noise, 6))

    def _both(self, prefix: tuple[int, ...]) -> tuple[torch.Tensor, float]:
        """Logits after `prefix` in float32, and by how much the target's own differ, computed in two ways."""
        exact = self._exact.logits(prefix)
        own = [reader.logits(prefix) for reader in self._own]
        differences = [float((one - exact).abs().max()) for one in own]
        return exact, max(*differences, *(float((own[0] - one).abs().max()) for one in own), 1e-5)


class _Reader:
    """A row of a target, and what it has read. last: tokens before a prefix's end that are run in one forward;
    what comes before them is run in chunks, and kept for the next prefix."""

    def __init__(self, target: Target, last: int, chunk: int):
        self._target, self._last, self._chunk = target, last, chunk
        self._slot: int | None = None
        self._read: tuple[int, ...] = ()

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        """Logits after `prefix`, float32 [V]."""
        cut = max(len(prefix) - self._last, 0)
        if self._slot is None or prefix[:cut][: len(self._read)] != self._read:
            self.close()
            self._slot = self._target.add_row(len(prefix) + 1)
        tokens = np.array(prefix, np.int64)
        for begin in range(len(self._read), cut, self._chunk):
            part = tokens[begin : min(begin + self._chunk, cut)]
            self._target.verify([Segment.chunk(self._slot, part, last=False)])
            self._target.commit(self._slot, range(len(part)))
            self._read = prefix[: begin + len(part)]
        return self._target.verify([Segment.chunk(self._slot, tokens[cut:], last=True)]).of(0)[-1].float().cpu()

    def close(self) -> None:
        """Give the row back."""
        if self._slot is not None:
            self._target.drop_row(self._slot)
        self._slot, self._read = None, ()


# Where answers differ from plain decoding's, and whether each difference is a tie or a bug.

JUDGED = 20
"""Differing answers of a method that are judged; a method that differs more often has one cause for all."""

Facts = dict[str, Any]


class _Difference(NamedTuple):
    """An answer and plain decoding's, and the turn and token at which they first differ."""

    answer: Answer
    plain: Answer
    turn: int
    at: int

    @property
    def facts(self) -> Facts:
        """What is recorded of it, beside a verdict."""
        return {
            "method": self.answer.method,
            "task": self.answer.task,
            "question": self.answer.question,
            "repeat": self.answer.repeat,
            "turn": self.turn,
            "at": self.at,
        }


def judge_differences(
    setting: Setting, answers: Sequence[Answer], summary: Mapping[str, Any], watch: Watch
) -> list[Facts]:
    """Every answer that differs from plain decoding's, with a verdict. With a large model a verdict takes seconds, so
    JUDGED of every method get one, and no more once the run is stopped. Sampled answers cannot be judged.

    summary  the one that the folder holds; its verdicts are kept."""
    differences = _differences(answers)
    if setting.benchmark.options.temperature:
        return [difference.facts | _unjudged("sampled") for difference in differences]
    by_method: dict[str, list[_Difference]] = {}
    for difference in differences:
        by_method.setdefault(difference.answer.method, []).append(difference)
    known = _verdicts(summary)
    chosen = {_key(difference.facts) for group in by_method.values() for difference in group[:JUDGED]}
    missing = chosen - known.keys()
    verdicts, judge, judged = [], None, 0
    with ExitStack() as stack:
        for difference in differences:
            key = _key(difference.facts)
            verdict = known.get(key, _unjudged("not judged"))
            if key in missing and not watch.stopped():
                judge = judge or stack.enter_context(_judge(setting, watch))
                verdict = _verdict(judge, setting, difference)
                judged += 1
                watch.judged(judged, len(missing))
            verdicts.append(difference.facts | verdict)
    return verdicts


def _differences(answers: Sequence[Answer]) -> list[_Difference]:
    """By question; of one question the shortest common beginning first, so that a judge reads each beginning once."""
    plain = {(a.repeat, a.question): a for a in answers if a.method == BASELINE and a.failed is None}
    differences = []
    for answer in answers:
        other = plain.get((answer.repeat, answer.question))
        if answer.method == BASELINE or answer.failed is not None or other is None:
            continue
        if where := first_divergence(answer, other):
            differences.append(_Difference(answer, other, *where))
    return sorted(differences, key=lambda each: (each.answer.question, each.answer.repeat, each.turn, each.at))


def _verdicts(summary: Mapping[str, Any]) -> dict[tuple[Any, ...], Facts]:
    """The verdicts of a summary, by `_key`."""
    judged = [facts for result in summary.get("results", []) for facts in result["differs"]]
    return {
        _key(facts): {name: facts[name] for name in _unjudged("")}
        for facts in judged
        if facts["verdict"] in ("tie", "bug")
    }


def _key(facts: Facts) -> tuple[Any, ...]:
    return tuple(facts[name] for name in ("method", "question", "repeat", "turn", "at"))


def _unjudged(verdict: str) -> Facts:
    return {"verdict": verdict, "gap": None, "noise": None}


def _judge(setting: Setting, watch: Watch) -> Judge:
    exact = setting.target
    watch.say("comparing differing answers with the model in float32")
    if exact.dtype != torch.float32:
        exact = load(setting.folder, dtype=exact_dtype(setting.benchmark.dtype), device=setting.benchmark.device)
    return Judge(setting.target, exact)


def _verdict(judge: Judge, setting: Setting, difference: _Difference) -> Facts:
    """Of the first token that differs. An answer that only ends sooner or later than it must is a bug."""
    answer, plain, turn, at = difference
    tokens, plain_tokens = answer.turns[turn].tokens, plain.turns[turn].tokens
    if at >= min(len(tokens), len(plain_tokens)):
        return _unjudged("bug")
    messages: list[dict[str, str]] = []
    for n in range(turn + 1):
        messages.append({"role": "user", "content": setting.question(answer.question).turns[n]})
        if n < turn:
            messages.append({"role": "assistant", "content": plain.turns[n].text})
    prefix = [*setting.transcriber.prompt(messages), *plain_tokens[:at]]
    return asdict(judge.verdict(prefix, plain_tokens[at], tokens[at]))
