"""Would a second device pay? The parts of a round of `mirror`, measured here, for the law in `mirror.py`.

    answer = measure(target, tokenizer, "models/demo-draft", prompts)
    answer.law.speedup, pays_from(answer.law), answer.measured

In line, with as many threads as `mirror` leaves to the target: the target's forward, drafting a window, drafting ahead,
and how often that was of use, over all prompts. Beside, in a process: the time of a message, and by how much the
target's forward is slower while the draft works; what it takes then is compared with the law.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

from paceline.cost.mirror import Law, pays_from
from paceline.draft.mirror import Mirror
from paceline.draft.neural.draft_worker import DraftWorker
from paceline.engine.engine import Engine
from paceline.engine.prompt import Prompt
from paceline.engine.sampling import SamplingParams
from paceline.target.base import Target
from paceline.target.tokenizer import Tokenizer

FORWARD = ("prepare", "layers", "head", "accept")
"""Parts of the engine's clock that are the target's."""
SMALLEST = 1e-6
"""Seconds below which a time is none."""


@dataclass(frozen=True)
class Answer:
    """Whether drafting beside the target pays.

    law       of a second device that shares nothing with the first.
    here      of this machine's own cores, with what sharing them costs; None where they cannot be split.
    measured  a round of mirror here, seconds; plain: of plain speculation with the same draft on all cores."""

    law: Law
    here: Law | None
    measured: float | None
    plain: float

    def to_json(self) -> dict[str, Any]:
        """For tables and reports."""
        laws = {"separate": self.law, "here": self.here}
        told = {
            name: {**vars(law), "round": law.round, "speedup": law.speedup, "pays_from": pays_from(law)}
            for name, law in laws.items()
            if law is not None
        }
        gain = None if self.measured is None else self.plain / self.measured
        return {**told, "measured_round": self.measured, "plain_round": self.plain, "measured_speedup": gain}


@dataclass
class _Times:
    """Of rounds after a prompt, seconds: the target's part, and the whole."""

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
) -> Answer:
    """Whether `draft`, as `mirror:` takes it, would pay on a device of its own, and does on cores of its own.

    MethodError if it cannot draft ahead."""
    params = SamplingParams(max_tokens=max_tokens)
    cores = torch.get_num_threads()
    splits = cores > 1 and target.device.type == "cpu"

    def run(spec: str, threads: int) -> tuple[_Times, Mirror, float]:
        """Times of the rounds, the drafter, and seconds of a message to its process, if it has one."""
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
    law = Law(0.0, _middle(alone.forward), _middle(counts.ahead), _middle(counts.fresh), counts.hit_rate)
    same = re.sub(r",\s*kappa=[^,]*", "", draft)
    plain, _, _ = run(f"mirror:{same},where=line,kappa=0", cores)
    if not splits or stopped():
        return Answer(law, None, None, _mean(plain.whole))
    both, _, trip = run(f"mirror:{draft},check=false", cores)
    slower = _middle(both.forward) - law.after
    together = 1 + max(0.0, slower) / max(min(law.after, law.ahead), SMALLEST)
    here = replace(law, together=together, rendezvous=trip)
    return Answer(replace(law, rendezvous=trip), here, _mean(both.whole), _mean(plain.whole))


def advice(told: Mapping[str, Any]) -> str:
    """What `Answer.to_json` says, in sentences."""
    lines = [f"A second device that drafts ahead ({told['draft']}): {_of_law(told['separate'])}"]
    if "here" in told:
        lines.append(
            f"On this machine's own cores, where both at once take {told['here']['together']:.2f} times as long: "
            f"{_of_law(told['here'])} Measured, and over plain speculation with all cores: "
            f"{told['measured_speedup']:.2f} times."
        )
    return "\n".join(lines)


def _of_law(law: Mapping[str, Any]) -> str:
    forward, pays = law["before"] + law["after"], law["pays_from"]
    where = "beside no target of any size" if pays is None else (
        f"beside a target whose forward takes {1e3 * pays * forward:.3g} ms or more, {pays:.2g} times this one's"
    )  # fmt: skip
    return (
        f"windows are there in {law['hit']:.0%} of rounds; a round of {1e3 * law['round']:.2f} ms, "
        f"{law['speedup']:.2f} times as fast as plain speculation with the same draft and device. It pays {where}."
    )


def _rounds(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, stopped: Callable[[], bool]) -> _Times:
    """Answer the prompts, one after another."""
    times = _Times([], [])
    for prompt in prompts:
        row = engine.add(prompt, params)
        while row.finish_reason is None:
            if stopped():
                engine.abort(row)
                return times
            before, began, begun = _forward(engine), perf_counter(), row.num_new > 1
            engine.step()
            if begun:
                times.forward.append(_forward(engine) - before)
                times.whole.append(perf_counter() - began)
    return times


def _forward(engine: Engine) -> float:
    return sum(engine.clock.seconds.get(part, 0.0) for part in FORWARD)


def _middle(times: Sequence[float]) -> float:
    return median(times) if times else 0.0


def _mean(times: Sequence[float]) -> float:
    """Of whole rounds, which are of two kinds: with a window that was there, and without."""
    return fmean(times) if times else 0.0
