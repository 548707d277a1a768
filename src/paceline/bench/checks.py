"""What casts doubt on a run: answers that differ from plain decoding's, and signs of another process.

Greedy answers may differ in a dtype of few bits: a forward over many tokens rounds differently from one over a single
token, and of two logits that are nearly equal the other one then wins. Such a tie can be recognised: the two tokens'
logits, computed exactly, lie closer together than the dtype's own noise, and no third is above them. The rest are bugs.
        judge.verdict(prefix, plain_token, other_token)
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from paceline.bench.metrics import BASELINE, OVERALL, first_divergence, matched, waits
from paceline.bench.record import Answer
from paceline.bench.setting import Setting, Watch
from paceline.core.segment import Segment
from paceline.target.base import Target
from paceline.target.load import load
from paceline.target.quantised.blocks import exact_dtype
from paceline.workbench.contestant import PEER

JUDGED = 20  # differing answers of a method that are judged; a method that differs more often has one cause for all
FACTOR = 1.1  # speed-ups may exceed the mean accepted tokens by this factor: that much is noise, more is impossible
SCATTER = 2.0  # mean time of a plain round over that of the fastest tenth: on a quiet machine they are nearly alike
ROUNDS = 50  # fewest plain rounds whose scatter says something
OTHERS = 0.5  # load average beyond the run's own threads that is still quiet

Facts = dict[str, Any]


@dataclass(frozen=True)
class Judgement:
    """gap: how far the lower of the two logits lies below the best of all, exactly computed; noise: how much the
    dtype changes a logit there (the most over the vocabulary)."""

    verdict: str
    gap: float
    noise: float


class Judge:
    """target: the model as it ran. exact: the same in float32, or the target itself if that is its dtype.

    A prefix that continues the one before is read on from there, so of one text ask for the shorter ones first."""

    def __init__(self, target: Target, exact: Target, chunk: int = 512):
        self._exact = _Reader(exact, 1, chunk)
        self._own = [_Reader(target, last, chunk) for last in (1, 16)]
        self._logits = lru_cache(maxsize=256)(self._both)

    def __enter__(self) -> Self:
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
        pairs = [(own[0], exact), (own[1], exact), (own[0], own[1])]
        return exact, max(1e-5, *(float((one - other).abs().max()) for one, other in pairs))


class _Reader:
    """A row of a target and the tokens it has read. last: tokens before a prefix's end that are run in one forward;
    those before them are run in chunks and reused for the next prefix."""

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
        if self._slot is not None:
            self._target.drop_row(self._slot)
        self._slot, self._read = None, ()


class _Difference(NamedTuple):
    """An answer and plain decoding's, and the turn and token at which they first differ."""

    answer: Answer
    plain: Answer
    turn: int
    at: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies it: the values of KEY."""
        return self.answer.method, self.answer.question, self.answer.repeat, self.turn, self.at


KEY = ("method", "question", "repeat", "turn", "at")


def judge_differences(setting: Setting, answers: Sequence[Answer], summary: Facts, watch: Watch) -> list[Facts]:
    """Every answer that differs from plain decoding's, with a verdict. With a large model a verdict takes seconds, so
    JUDGED of every method get one, and no more once the run is stopped. Sampled answers cannot be judged.

    summary  the one that the folder holds; its verdicts are reused."""
    differences = _differences(answers)
    sampled = bool(setting.benchmark.options.temperature)
    known = {
        tuple(facts[name] for name in KEY): {name: facts[name] for name in ("verdict", "gap", "noise")}
        for result in summary.get("results", [])
        for facts in result["differs"]
        if facts["verdict"] in ("tie", "bug")
    }
    by_method: dict[str, list[_Difference]] = {}
    for difference in differences:
        by_method.setdefault(difference.answer.method, []).append(difference)
    chosen = {difference.key for group in by_method.values() for difference in group[:JUDGED]}
    missing = set() if sampled else chosen - known.keys()
    judged: list[Facts] = []
    judge, done = None, 0
    with ExitStack() as stack:
        for difference in differences:
            verdict = _unjudged("sampled") if sampled else known.get(difference.key, _unjudged("not judged"))
            if difference.key in missing and not watch.stopped():
                judge = judge or stack.enter_context(_judge(setting, watch))
                verdict = _verdict(judge, setting, difference)
                done += 1
                watch.judged(done, len(missing))
            facts = dict(zip(KEY, difference.key, strict=True))
            judged.append(facts | {"task": difference.answer.task} | verdict)
    return judged


def _differences(answers: Sequence[Answer]) -> list[_Difference]:
    """By question; of one question the shortest common beginning first, so that a judge reads each beginning once."""
    others = [answer for answer in answers if answer.method != BASELINE]
    differences = [
        _Difference(answer, plain, *where)
        for answer, plain in matched(others, _plain(answers))
        if (where := first_divergence(answer, plain))
    ]
    return sorted(differences, key=lambda each: (each.answer.question, each.answer.repeat, each.turn, each.at))


def _plain(answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.method == BASELINE]


def _unjudged(verdict: str) -> Facts:
    return {"verdict": verdict, "gap": None, "noise": None}


def _judge(setting: Setting, watch: Watch) -> Judge:
    exact = setting.target
    watch.say("comparing differing answers with the model in float32")
    if exact.dtype != torch.float32:
        dtype = exact_dtype(setting.benchmark.dtype, exact.quantised)
        bits = exact.activations if dtype != "float32" else None
        exact = load(setting.benchmark.model, dtype=dtype, device=setting.benchmark.device, activations=bits)
    return Judge(setting.target, exact)


def _verdict(judge: Judge, setting: Setting, difference: _Difference) -> Facts:
    """Of the first token that differs. An answer that only ends sooner or later than it must is a bug."""
    answer, plain, turn, at = difference
    tokens, plain_tokens = answer.turns[turn].tokens, plain.turns[turn].tokens
    if at >= min(len(tokens), len(plain_tokens)):
        return _unjudged("bug")
    prompt = setting.prompt(setting.question(answer.question), [each.text for each in plain.turns[:turn]])
    return asdict(judge.verdict([*prompt, *plain_tokens[:at]], plain_tokens[at], tokens[at]))


def is_impossible(speedup: float | None, mean_accepted_tokens: float | None) -> bool:
    """Whether no sound measurement can give this speed-up over plain decoding in the same engine.

    A round that verifies a draft takes at least as long as one without."""
    return bool(speedup and mean_accepted_tokens) and speedup > FACTOR * mean_accepted_tokens  # type: ignore[operator]


def disturbances(
    answers: Sequence[Answer], results: Iterable[Mapping[str, Any]], *, threads: int | None = None
) -> list[str]:
    """The signs of other processes in one sentence; nothing if there are none.

    results: of `metrics.summarize`; threads: the run's own, which the load average counts too."""
    signs = [
        f"{row['method']} has {row['speedup']:.2f} times plain decoding's speed at {row['mean_accepted_tokens']:.2f} "
        "mean accepted tokens, which is impossible"
        for row in results
        if row["category"] == OVERALL
        and not row["method"].startswith(PEER)
        and is_impossible(row["speedup"], row["mean_accepted_tokens"])
    ]
    rounds = waits(_plain(answers))
    if len(rounds) >= ROUNDS:
        fast, mean = float(np.percentile(rounds, 10)), float(np.mean(rounds))
        if mean > SCATTER * fast:
            signs.append(
                f"plain rounds took {1e3 * mean:.1f} ms in the mean, the fastest tenth {1e3 * fast:.1f} ms or less"
            )
    loads = [answer.load for answer in answers if answer.load is not None]
    if threads is not None and loads and median(loads) > threads + OTHERS:
        own = f"{threads} thread{'s' if threads != 1 else ''}"
        signs.append(f"the load average was {median(loads):.1f} with {own} of its own")
    if not signs:
        return []
    return [f"Timings are not reliable, another process seems to have used the processor: {'; '.join(signs)}."]
