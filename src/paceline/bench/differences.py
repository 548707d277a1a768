"""Where answers differ from plain decoding's, and whether each difference is a tie or a bug.

    judge_differences(setting, answers, summary, Watch())      # a dict for every answer that differs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from paceline.bench.judge import Judge
from paceline.bench.metrics import BASELINE, first_divergence
from paceline.bench.record import Answer
from paceline.bench.setting import Setting, Watch
from paceline.target.load import load
from paceline.target.quantised import exact_dtype

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
