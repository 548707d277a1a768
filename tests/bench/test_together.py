"""Figures of requests that are answered together, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.metrics import beside_plain, summarize
from paceline.bench.record import Answer
from paceline.workbench.contestant import Reply


def answer(question: str, tokens: list[int], times: list[float], **more: object) -> Answer:
    reply = Reply(3, tokens, "", times[-1], [1] * len(tokens), times, **more)  # type: ignore[arg-type]
    return Answer("x", 0, question, "all", "all", 0, [reply])


def test_figures() -> None:
    counts = {"rounds": 5, "rows": 9, "slots": 10, "drafting": 4, "same_length": 1, "moved_bytes": 1000}
    mine = [
        answer("a", [5, 6, 7, 8], [1, 2, 3, 4], parts={"forward": 3.0, "align": 1.0}, batch=counts),
        answer("b", [5, 6], [1, 2], parts={"forward": 4.0}),
    ]
    plain = [answer("a", [5, 6, 9, 8], [1, 2, 3, 4]), answer("b", [5, 6], [1, 2])]
    figures = summarize([*mine, *(replace(one, method="none") for one in plain)], {})[2]
    assert figures["partial_match"] == 0.75
    assert figures["align_share"] == 1 / 8
    assert figures["group_rate"] == 1 / 4
    assert figures["idle_slots"] == pytest.approx(0.1)
    assert figures["moved_bytes"] == 200
    assert figures["latency_p50"] == 3
    unscheduled = summarize([replace(one, method="none") for one in plain], {})[0]
    assert unscheduled["partial_match"] == 1
    assert unscheduled["idle_slots"] is unscheduled["group_rate"] is unscheduled["align_share"] is None


def test_beside_plain_at_the_same_batch() -> None:
    def result(drafter: str, schedule: str, batch: int, speed: float | None) -> dict[str, object]:
        how = {"drafter": drafter, "schedule": schedule, "batch": batch}
        return {"method": f"{drafter} {schedule} {batch}", "tokens_per_second": speed, "scheduled": how}

    results = [
        {"method": "none", "tokens_per_second": 10.0, "scheduled": None},
        result("sam", "equal", 1, 15.0),
        result("sam", "equal", 4, 30.0),
        result("none", "ragged", 4, 40.0),
        result("sam", "equal", 8, 50.0),
        result("sam", "ragged", 4, None),
    ]
    gains = {"none": 1.0, "sam equal 1": 1.5, "sam equal 4": 0.75, "none ragged 4": 1.0}
    assert beside_plain(results) == gains
