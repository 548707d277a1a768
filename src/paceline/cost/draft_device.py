"""Would a second device pay? Measures the parts of a round of `mirror` here, for the latency model in `mirror.py`.

    result = measure(target, tokenizer, "models/demo-draft", prompts)
    result.latency.speedup, pays_from(result.latency), result.measured

First in line, with as many threads as `mirror` leaves to the target: the target's forward, drafting a window, drafting
ahead, and the hit rate. Then with the draft in a process of its own: the time of a message, and how much slower the
target's forward is while the draft works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from paceline.cost.mirror import LatencyModel, pays_from
from paceline.draft.mirror import Mirror
from paceline.draft.neural.draft_worker import DraftWorker
from paceline.engine.engine import Engine
from paceline.engine.prompt import Prompt
from paceline.engine.sampling import SamplingParams
from paceline.target.base import Target
from paceline.target.tokenizer import Tokenizer

FORWARD = ("prepare", "layers", "head", "accept")
"""Parts of the engine's clock that belong to the target."""
SMALLEST = 1e-6
"""Seconds; a divisor is at least this."""


@dataclass(frozen=True)
class Measurement:
    """Whether drafting ahead pays.

    latency   with a second device that shares nothing with the first.
    here      on this machine's own cores, with what sharing them costs; None where they cannot be split.
    measured  seconds of a round of mirror here; plain: of plain speculation with the same draft on all cores."""

    latency: LatencyModel
    here: LatencyModel | None
    measured: float | None
    plain: float

    def to_json(self) -> dict[str, Any]:
        """For tables and reports."""
        models = {"separate": self.latency} | ({} if self.here is None else {"here": self.here})
        facts = {
            name: {**vars(model), "round": model.round, "speedup": model.speedup, "pays_from": pays_from(model)}
            for name, model in models.items()
        }
        gain = None if self.measured is None else self.plain / self.measured
        return {**facts, "measured_round": self.measured, "plain_round": self.plain, "measured_speedup": gain}


class _Times(NamedTuple):
    """Seconds of each round after the prompt: the target's part, and the whole round."""

    forward: list[float]
    whole: list[float]


def measure(
    target: Target,
    tokenizer: Tokenizer | None,
    draft: str,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 48,
    stopped: Callable[[], bool] = lambda: False,
) -> Measurement:
    """Measure what `mirror:{draft}` would gain with a second device, and what it gains on this machine's cores.

    MethodError if the draft cannot run ahead."""
    params = SamplingParams(max_tokens=max_tokens)
    cores = torch.get_num_threads()
    splits = cores > 1 and target.device.type == "cpu"

    def run(spec: str, threads: int) -> tuple[_Times, Mirror, float]:
        """Times of the rounds, the drafter, and seconds of a message to its process (0 without one)."""
        with target.threads_of(threads):
            engine = Engine(target, spec, tokenizer=tokenizer, max_batch=1)
            mirror = engine.drafter
            assert isinstance(mirror, Mirror)
            try:
                trip = mirror.side.round_trip() if isinstance(mirror.side, DraftWorker) else 0.0
                return _rounds(engine, prompts, params, stopped), mirror, trip
            finally:
                mirror.close()

    alone, mirror, _ = run(f"mirror:{draft},where=line", max(cores - 1, 1))
    counts = mirror.counts
    latency = LatencyModel(0.0, _median(alone.forward), _median(counts.ahead), _median(counts.fresh), counts.hit_rate)
    same = re.sub(r",\s*candidates=[^,]*", "", draft)
    plain, _, _ = run(f"mirror:{same},where=line,candidates=0", cores)
    if not splits or stopped():
        return Measurement(latency, None, None, _mean(plain.whole))
    both, _, trip = run(f"mirror:{draft},check=false", cores)
    slower = _median(both.forward) - latency.after
    together = 1 + max(0.0, slower) / max(min(latency.after, latency.ahead), SMALLEST)
    here = replace(latency, together=together, rendezvous=trip)
    return Measurement(replace(latency, rendezvous=trip), here, _mean(both.whole), _mean(plain.whole))


def advice(facts: Mapping[str, Any]) -> str:
    """Sentences on `Measurement.to_json` with the name of the draft added as "draft"."""
    lines = [f"A second device that drafts ahead ({facts['draft']}): {_described(facts['separate'])}"]
    if "here" in facts:
        lines.append(
            f"On this machine's own cores, where both at once take {facts['here']['together']:.2f} times as long: "
            f"{_described(facts['here'])} Measured, over plain speculation with all cores: "
            f"{facts['measured_speedup']:.2f} times."
        )
    return "\n".join(lines)


def _described(latency: Mapping[str, Any]) -> str:
    forward, pays = latency["before"] + latency["after"], latency["pays_from"]
    where = "with no target of any size" if pays is None else (
        f"with a target whose forward takes {1e3 * pays * forward:.3g} ms or more, {pays:.2g} times this one's"
    )  # fmt: skip
    return (
        f"windows are ready in {latency['hit']:.0%} of rounds; a round of {1e3 * latency['round']:.2f} ms, "
        f"{latency['speedup']:.2f} times as fast as plain speculation with the same draft and device. It pays {where}."
    )


def _rounds(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, stopped: Callable[[], bool]) -> _Times:
    """Answer the prompts one after another; the rounds that read a prompt are not timed."""
    times = _Times([], [])
    for prompt in prompts:
        row = engine.add(prompt, params)
        while row.finish_reason is None:
            if stopped():
                engine.abort(row)
                return times
            before, began, has_answer = _forward(engine), perf_counter(), row.num_new > 1
            engine.step()
            if has_answer:
                times.forward.append(_forward(engine) - before)
                times.whole.append(perf_counter() - began)
    return times


def _forward(engine: Engine) -> float:
    return sum(engine.clock.seconds.get(part, 0.0) for part in FORWARD)


def _median(times: Sequence[float]) -> float:
    return median(times) if times else 0.0


def _mean(times: Sequence[float]) -> float:
    """For whole rounds, which are of two kinds: with a window that was ready, and without."""
    return fmean(times) if times else 0.0
