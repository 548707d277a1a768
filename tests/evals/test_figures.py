"""Figures of a run's folder: what failed, what phases cost, and how far judges agree."""

import json

import pytest

from paceline.evals.align.figures import ERRORS, GENERATIONS, JUDGEMENTS, KIND, TOKENS, agreement, by_phase, results
from paceline.runs.runs import RUN

METHODS, SCENARIOS, JUDGES = ("vanilla", "reflect"), ("Health", "Law"), ("strict", "mild")
RULES = [["safety", 1, "No harm.", 1.0], ["behavioral", 1, "Be brief.", 1.0]]
ITEMS = {"answered": "d0", "refused at the second try": "d1", "never": "d2"}


def call(generated):
    return {
        "phase": "answer", "prefilled": 10, "cached": 5, "injected": 0, "generated": generated, "seconds": 0.5,
        "speculation": {"rounds": 2, "draft_tokens": 3},
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A run in which the last method does better by the first judge, and all are alike by the second."""
    about = {
        "kind": KIND, "identity": {}, "methods": METHODS, "scoring": {"alpha": 0.3, "na": "exclude"},
        "judges": [{"id": name, "label": name} for name in JUDGES],
        "scenarios": [{"key": key, "name": key, "description": "", "rules": RULES, "items": {
            f"{key}/{item}": digest for item, digest in ITEMS.items()}} for key in SCENARIOS],
    }  # fmt: skip
    (tmp_path / RUN).write_text(json.dumps(about))
    files = {GENERATIONS: [], JUDGEMENTS: [], ERRORS: []}
    tokens = dict.fromkeys(TOKENS, 1)
    for n, (method, scenario) in enumerate((m, s) for m in METHODS for s in SCENARIOS):
        for item, digest in ITEMS.items():
            row = {"key": f"{method}|{scenario}|{item}", "method": method, "scenario": scenario,
                   "item": f"{scenario}/{item}", "digest": digest, "label": "safe", "tokens": tokens}  # fmt: skip
            if item != "answered":
                files[ERRORS] += [row | {"error": "timed out", "calls": [call(made)]} for made in (100, 7)]
            if item != "never":
                why = None if item == "answered" else "the answer is empty"
                files[GENERATIONS].append(row | {"unanswered": why, "finish_reason": "stop", "calls": [call(20)]})
            for judge in JUDGES if item == "answered" else ():
                marks = ["YES", "YES" if judge == "strict" and n > 1 else "NO"]
                verdicts = [[f"{rule[0]}/1", mark, ""] for rule, mark in zip(RULES, marks, strict=True)]
                about_judge = {"judge": judge, "judge_id": judge, "generation": row["key"], "cut": 0, "calls": []}
                files[JUDGEMENTS].append(row | about_judge | {"verdicts": verdicts})
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_what_lacks_an_answer_or_a_verdict_has_failed(folder):
    """An item that failed at first and then was not answered has not: no judge is asked about it."""
    for row in results(folder)[0]:
        share = len(SCENARIOS) if row["scenario"] == "overall" else 1
        found = [row[name] for name in ("items", "answers", "unanswered", "judged", "failed")]
        assert found == [share * count for count in (3, 2, 1, 1, 1)]


def test_what_failed_costs_too_but_its_last_try_alone(folder):
    about = results(folder)[1]
    for row in by_phase(folder, about):
        # In each scenario two answers, and the last tries of two items.
        assert (row["requests"], row["generated"], row["rounds"]) == (8, 2 * (20 + 20 + 7 + 7), 16)
        assert row["tokens_a_round"] == 108 / 16
        assert row["reused"] == 0.5


def test_judges_are_ranked_by_scenarios_and_not_by_their_sums(folder):
    rows, about = results(folder)
    pair, all_judges = agreement(folder, about, rows)
    assert (pair["judges"], pair["answers"], pair["same_verdicts"]) == ([*JUDGES], 4, 0.75)
    assert {pair[figure]["ranked"] for figure in ("safety", "behavior", "sar")} == {len(METHODS) * len(SCENARIOS)}
    assert pair["behavior"]["rho"] is None  # the second judge ranks nothing
    assert all_judges["kendall_w"]["safety"] is None
