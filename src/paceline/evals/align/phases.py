"""What each phase of the methods cost on our engine: tokens a round, prompt tokens reused, seconds; two runs compared.

A phase is what a request is for: "step 1" to "step 3" of align3, "answer", "feedback" and "refine" of self-refine,
"judge". Tokens a round are new tokens for each forward of the model that gave any; plain decoding is 1.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.evals.align.figures import planned_rows
from paceline.evals.align.store import ERRORS, GENERATIONS, JUDGEMENTS, read_about

Answer = tuple[str, str]
"""(item, method)."""
SUMS = ("requests", "prefilled", "cached", "injected", "generated", "rounds", "draft_tokens", "seconds")


def by_phase(folder: Path, about: dict[str, Any], only: Container[Answer] | None = None) -> list[dict[str, Any]]:
    """One row a method and phase, in the order they are met; nothing if the model was asked over HTTP.

    only  answers that count; None: all."""
    sums: dict[tuple[str, str], dict[str, float]] = {}
    # Of what failed, the last try alone.
    failed = {row["key"]: row for row in planned_rows(folder / ERRORS, about)}
    for row in chain(*(planned_rows(folder / file, about) for file in (GENERATIONS, JUDGEMENTS)), failed.values()):
        if only is not None and (row["item"], row["method"]) not in only:
            continue
        for call in row.get("calls") or ():
            if call["speculation"] is not None:
                _add(sums.setdefault((row["method"], call["phase"]), dict.fromkeys(SUMS, 0)), call)
    return [{"method": method, "phase": phase, **_figures(one)} for (method, phase), one in sums.items()]


def _add(sums: dict[str, float], call: dict[str, Any]) -> None:
    sums["requests"] += 1
    for name in ("prefilled", "cached", "injected", "generated", "seconds"):
        sums[name] += call[name] or 0
    for name in ("rounds", "draft_tokens"):
        sums[name] += call["speculation"][name]


def _figures(sums: dict[str, float]) -> dict[str, Any]:
    told: dict[str, Any] = {name: int(value) for name, value in sums.items() if name != "seconds"}
    return told | {
        "seconds": round(sums["seconds"], 3),
        "tokens_a_round": sums["generated"] / sums["rounds"] if sums["rounds"] else None,
        "reused": sums["cached"] / sums["prefilled"] if sums["prefilled"] else None,
    }


def compare(folder: Path, plain: Path) -> dict[str, Any]:
    """Two runs phase by phase, on what both have answered: whether that is identical, rounds and prefill saved.

    Raises PacelineError if they have nothing in common."""
    ours, theirs = _answers(folder), _answers(plain)
    both = ours.keys() & theirs.keys()
    if not both:
        raise PacelineError(f"{folder} and {plain} have no answers in common; run both with the same options")
    different = sorted(item for item in both if ours[item] != theirs[item])
    before = {(row["method"], row["phase"]): row for row in by_phase(plain, read_about(plain), both)}
    phases = []
    for row in by_phase(folder, read_about(folder), both):
        other = before.get((row["method"], row["phase"]))
        if other is None:
            continue
        run, ran = row["prefilled"] - row["cached"], other["prefilled"] - other["cached"]
        phases.append(
            row
            | {
                "tokens_a_round_before": other["tokens_a_round"],
                "seconds_before": other["seconds"],
                "prefill": run,
                "prefill_before": ran,
                "prefill_saved": 1 - run / ran if ran else None,
            }
        )
    return {"answers": len(both), "different": different, "phases": phases}


def _answers(folder: Path) -> dict[Answer, Any]:
    found = planned_rows(folder / GENERATIONS, read_about(folder))
    return {(row["item"], row["method"]): (row["response"], row["thought"]) for row in found}
