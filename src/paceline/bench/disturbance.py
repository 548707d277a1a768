"""Whether something else used the processor during a run: what its own figures say. Knows no engine and no file.

    disturbances(answers, summarize(answers, facts), threads=2)     # [] on a quiet machine
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from paceline.bench.metrics import BASELINE, OVERALL
from paceline.bench.record import PEER, Answer, good

ABOVE = 1.1
"""Speed-ups may be above the mean accepted tokens by this factor: that much is noise, more is impossible."""
SCATTER = 2.0
"""Mean time of a plain round over that of the fastest tenth: on a quiet machine they are nearly alike."""
ROUNDS = 50
"""Fewest plain rounds that say how they scatter."""
MORE = 0.5
"""Processes that want to run beside the threads of the run."""


def is_impossible(speedup: float | None, mean_accepted_tokens: float | None) -> bool:
    """Whether no sound measurement can give this speed-up over plain decoding in the same engine.

    A round that verifies a draft takes at least as long as one without."""
    return bool(speedup and mean_accepted_tokens) and speedup > ABOVE * mean_accepted_tokens  # type: ignore[operator]


def disturbances(
    answers: Sequence[Answer], results: Iterable[Mapping[str, Any]], *, threads: int | None = None
) -> list[str]:
    """What a run shows of other processes, in one sentence with its signs; nothing if there are none.

    results: of `metrics.summarize`; threads: the run's own, which the load average counts too."""
    signs = [*_impossible(results), *_scattered(answers), *_loaded(answers, threads)]
    if not signs:
        return []
    return [f"Timings are not reliable, another process seems to have used the processor: {'; '.join(signs)}."]


def _impossible(results: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"{row['method']} has {row['speedup']:.2f} times plain decoding's speed at {row['mean_accepted_tokens']:.2f} "
        "mean accepted tokens, which is impossible"
        for row in results
        if row["category"] == OVERALL
        and not row["method"].startswith(PEER)
        and is_impossible(row["speedup"], row["mean_accepted_tokens"])
    ]


def _scattered(answers: Sequence[Answer]) -> list[str]:
    plain = (answer for answer in good(answers) if answer.method == BASELINE)
    times = [turn.times or () for answer in plain for turn in answer.turns]
    waits = [after - before for of_turn in times for before, after in pairwise(of_turn)]
    if len(waits) < ROUNDS:
        return []
    fast, mean = float(np.percentile(waits, 10)), float(np.mean(waits))
    if mean <= SCATTER * fast:
        return []
    return [f"plain rounds took {1e3 * mean:.1f} ms in the mean, the fastest tenth {1e3 * fast:.1f} ms or less"]


def _loaded(answers: Sequence[Answer], threads: int | None) -> list[str]:
    loads = [answer.load for answer in answers if answer.load is not None]
    if threads is None or not loads or median(loads) <= threads + MORE:
        return []
    return [f"the load average was {median(loads):.1f} with {threads} thread{'s' if threads != 1 else ''} of its own"]
