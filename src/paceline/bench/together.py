"""How much of an answer is another one's, token by token: the E and P of Zhang et al. 2025 (arXiv 2510.22876).

The paper compares texts that it encodes again, and fails on what a program writes after an end token. Here token ids
are compared, up to and with the first end token.

    exact([5, 6, 7], [5, 6, 7])           # True
    partial([5, 6, 9], [5, 6, 7])         # 2 / 3
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.bench.pairs import Answers
from paceline.bench.record import Reply, good


def exact(tokens: Sequence[int], reference: Sequence[int], ends: Collection[int] = ()) -> bool:
    """E of one answer: whether it is the reference, token for token."""
    return up_to_end(tokens, ends) == up_to_end(reference, ends)


def partial(tokens: Sequence[int], reference: Sequence[int], ends: Collection[int] = ()) -> float:
    """P of one answer: how many tokens at its beginning are the reference's, over the reference's number.

    Low from the first token on: positions or masks are wrong. A good beginning that drifts: the cache is."""
    mine, other = up_to_end(tokens, ends), up_to_end(reference, ends)
    same = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    return same / len(other) if other else float(not mine)


def up_to_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """The tokens up to and with the first that ends an answer."""
    return list(tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))])


# Figures of requests that are answered together: how long each waits, what realigning costs, what lies idle.

PLAIN = "none"
"""The drafter that proposes nothing."""


def together(answers: Answers, plain: Answers) -> dict[str, Any]:
    """The figures below, by name."""
    middle, late, latest = latency(answers) or (None, None, None)
    return {
        "latency_p50": middle,
        "latency_p90": late,
        "latency_p99": latest,
        "align_share": align_share(answers),
        "group_rate": group_rate(answers),
        "idle_slots": idle_slots(answers),
        "moved_bytes": moved_bytes(answers),
        "partial_match": partial_match(answers, plain),
    }


def scheduled(result: Mapping[str, Any]) -> dict[str, Any]:
    """Drafter, schedule and batch of a result of `metrics.summarize`; plain decoding is a batch of one."""
    return result.get("scheduled") or {"drafter": result["method"], "schedule": "ragged", "batch": 1}


def beside_plain(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By method, tokens per second over those of plain decoding in a ragged batch of the same size."""
    speeds = {r["method"]: r["tokens_per_second"] for r in results if r["tokens_per_second"]}
    how = {r["method"]: scheduled(r) for r in results}
    plain = {
        how[name]["batch"]: speed
        for name, speed in speeds.items()
        if (how[name]["drafter"], how[name]["schedule"]) == (PLAIN, "ragged")
    }
    return {name: speed / plain[how[name]["batch"]] for name, speed in speeds.items() if how[name]["batch"] in plain}


def latency(answers: Answers) -> tuple[float, float, float] | None:
    """50th, 90th and 99th percentile of the seconds from handing a prompt over to its last token, waiting included."""
    seconds = [turn.times[-1] for turn in _turns(answers) if turn.times]
    if not seconds:
        return None
    middle, late, latest = np.percentile(seconds, [50, 90, 99])
    return float(middle), float(late), float(latest)


def align_share(answers: Answers) -> float | None:
    """Share of the time of all parts that realigning rows takes, 0 to 1; None where no schedule is measured."""
    turns = _turns(answers)
    whole = sum(sum(turn.parts.values()) for turn in turns)
    aligning = sum(turn.parts.get("align", 0.0) for turn in turns)
    return aligning / whole if whole and _counts(answers) else None


def group_rate(answers: Answers) -> float | None:
    """Rounds in which a whole batch of equally long rows ran, over all rounds after prompts (Zhang et al. 2025)."""
    counts = _counts(answers)
    return counts["same_length"] / counts["drafting"] if counts.get("drafting") else None


def idle_slots(answers: Answers) -> float | None:
    """Share of a round's row slots in which no row ran, over all rounds, the last ones of a group included."""
    counts = _counts(answers)
    return 1 - counts["rows"] / counts["slots"] if counts.get("slots") else None


def moved_bytes(answers: Answers) -> float | None:
    """Bytes of keys and values read and written in a round to realign its rows."""
    counts = _counts(answers)
    return counts["moved_bytes"] / counts["rounds"] if counts.get("rounds") else None


def partial_match(answers: Answers, plain: Answers) -> float | None:
    """Mean share of a turn that is plain decoding's, up to the first token that differs; 1 where all are the same.

    P of Zhang et al. 2025 (arXiv 2510.22876), on tokens; their E is `identical`."""
    others = {(other.question, other.repeat): other for other in good(plain)}
    both = [(a, others[a.question, a.repeat]) for a in good(answers) if (a.question, a.repeat) in others]
    shares = [
        partial(mine.tokens, other.tokens)
        for answer, known in both
        for mine, other in zip(answer.turns, known.turns, strict=False)
    ]
    return float(np.mean(shares)) if shares else None


def _counts(answers: Answers) -> dict[str, int]:
    """The counts of all groups together."""
    counts: dict[str, int] = {}
    for turn in _turns(answers):
        for name, count in turn.batch.items():
            counts[name] = counts.get(name, 0) + count
    return counts


def _turns(answers: Answers) -> list[Reply]:
    return [turn for answer in good(answers) for turn in answer.turns]
