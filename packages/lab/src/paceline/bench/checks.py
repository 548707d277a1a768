"""Find reasons to doubt a run: answers that differ from plain decoding's, and signs of other processes.

Answers may differ in a dtype of few bits: a forward over many tokens rounds differently from a forward over one, and
may swap two nearly equal logits. Such a tie can be recognised: the exact logits of the two tokens lie closer together
than the dtype's noise, and no third logit is above them. Other differences are bugs.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.bench.metrics import BASELINE, OVERALL, first_divergence, matched, waits
from paceline.bench.record import Answer
from paceline.bench.setting import Setting
from paceline.core.noise import Noise
from paceline.formats.precision import exact_dtype
from paceline.peers import PEER
from paceline.peers.reference import PlainDecoding, Rounding, Sampled, distance
from paceline.runs.chance import is_tie
from paceline.runs.progress import Progress
from paceline.target.load import load

JUDGED = 20  # Most differing answers of a method to judge; more of them have the same cause.
FACTOR = 1.1  # Speed-ups may exceed the mean accepted tokens by this factor of noise; more is impossible.
SCATTER = 2.0  # Largest ratio on a quiet machine: mean time of plain rounds over that of the fastest tenth.
ROUNDS = 50  # Fewer plain rounds show no scatter.
OTHERS = 0.5  # A quiet machine's load average exceeds the run's own threads by no more.

Facts = dict[str, Any]


class _Difference(NamedTuple):
    """An answer and plain decoding's, and the turn and token at which they first differ."""

    answer: Answer
    plain: Answer
    turn: int
    at: int

    @property
    def key(self) -> tuple[Any, ...]:
        """The values of KEY, which identify the difference."""
        return self.answer.method, self.answer.question, self.answer.repeat, self.turn, self.at


KEY = ("method", "question", "repeat", "turn", "at")


def judge_differences(setting: Setting, answers: Sequence[Answer], summary: Facts, progress: Progress) -> list[Facts]:
    """Every answer that differs from plain decoding's, with a verdict. With a large model a verdict takes seconds, so
    only JUDGED answers of a method get one, and none once the run is stopped. Our engine's sampled answers are judged
    by their noise; other engines have noise of their own.

    summary  the folder's summary, whose verdicts are reused."""
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
    missing = {key for key in chosen - known.keys() if not sampled or not key[0].startswith(PEER)}
    judged: list[Facts] = []
    rounding, done = None, 0
    for difference in differences:
        drawn = sampled and difference.answer.method.startswith(PEER)
        verdict = _unjudged("sampled") if drawn else known.get(difference.key, _unjudged("not judged"))
        if difference.key in missing and not progress.stopped():
            rounding = rounding or _rounding(setting, progress)
            verdict = _verdict(rounding, setting, difference)
            done += 1
            progress.step(done, len(missing))
        facts = dict(zip(KEY, difference.key, strict=True))
        judged.append(facts | {"task": difference.answer.task} | verdict)
    return judged


def _differences(answers: Sequence[Answer]) -> list[_Difference]:
    """The differences by question; for a question, the shortest common beginning first."""
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


def _rounding(setting: Setting, progress: Progress) -> Rounding:
    """Measures rounding: the exact model, and the model as it ran,
    over single tokens and over as many as a draft has."""
    exact = setting.target
    progress.say("comparing differing answers with the model in float32")
    if exact.dtype != torch.float32:
        dtype = exact_dtype(setting.benchmark.dtype, exact.quantised)
        bits = exact.activations if dtype != "float32" else None
        exact = load(setting.benchmark.model, dtype=dtype, device=setting.benchmark.device, activations=bits)
    own = None if exact is setting.target else PlainDecoding(setting.target, pieces=True)
    return Rounding(PlainDecoding(exact, pieces=own is None), own)


def _verdict(rounding: Rounding, setting: Setting, difference: _Difference) -> Facts:
    """Judge the first token that differs. An answer that only ends too soon or too late is a bug."""
    answer, plain, turn, at = difference
    tokens, plain_tokens = answer.turns[turn].tokens, plain.turns[turn].tokens
    if not tokens or not plain_tokens:  # Only texts were compared.
        return _unjudged("not judged")
    if at >= min(len(tokens), len(plain_tokens)):
        return _unjudged("bug")
    prompt = setting.prompt(setting.question(answer.question), [each.text for each in plain.turns[:turn]])
    seed, temperature = plain.turns[turn].seed, setting.benchmark.options.temperature
    sampled = None if seed is None else Sampled(Noise(seed), at, temperature)
    gap, noise = distance(rounding, [*prompt, *plain_tokens[:at]], (plain_tokens[at], tokens[at]), sampled)
    return {"verdict": "tie" if is_tie(gap, noise) else "bug", "gap": round(gap, 6), "noise": round(noise, 6)}


def is_impossible(speedup: float | None, mean_accepted_tokens: float | None) -> bool:
    """Whether this speed-up over plain decoding in the same engine can only be a measuring error.

    A round that verifies a draft takes at least as long as a plain round."""
    return bool(speedup and mean_accepted_tokens) and speedup > FACTOR * mean_accepted_tokens  # type: ignore[operator]


def disturbances(
    answers: Sequence[Answer], results: Iterable[Mapping[str, Any]], *, threads: int | None = None
) -> list[str]:
    """Signs of other processes, in one sentence; an empty list if there are none.

    results: from `metrics.summarize`; threads: the run's own, which the load average includes."""
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
