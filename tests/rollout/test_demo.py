"""The demo: its task, its loop, that a stopped run goes on as if it had not been, its command and its page."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli import main
from paceline.rollout.demo import grpo
from paceline.rollout.demo.grpo import policy, supervised
from paceline.rollout.demo.run import plans, results
from paceline.rollout.demo.task import EOS, MAX_NEW, TASKS, Problem, decode, encode, problems


def test_worked_answers_are_right_and_fit() -> None:
    for task in TASKS:
        for problem in problems(task, 200, random.Random(0)):
            tokens = [*encode(problem.worked), EOS]
            assert len(tokens) <= MAX_NEW
            assert problem.reward(tokens) == 1
            assert problem.reward(tokens[:-1]) == 0, "an answer that was cut"
            assert decode(problem.prompt) == problem.question
    assert problems("sums", 1, random.Random(0))[0] == Problem("7+7+1+5+9+8?", "14,15,20,29,37;37")
    one = Problem("21?", "2,12;12")
    assert [one.reward([*encode(text), EOS]) for text in ("2,12;12", ";12", "2,12;21", "12", "")] == [1, 1, 0, 1, 0]


def test_problems_differ_from_each_other_and_from_others() -> None:
    train = problems("sort", 50, random.Random(1))
    held_out = problems("sort", 50, random.Random(1), frozenset(p.question for p in train))
    assert len({p.question for p in [*train, *held_out]}) == 100


def test_advantages_are_centred_in_each_group() -> None:
    values = grpo.advantages([1.0] * 4 + [0.0] * 4 + [1.0] * 8).view(2, 8)
    assert torch.allclose(values.sum(1), torch.zeros(2), atol=1e-5)
    assert values[0, 0] > 0.9
    assert (values[1] == 0).all()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of eight answers."""
    for name, value in {"PROMPTS": 4, "GROUP": 2, "STEPS": 2, "HELD_OUT": 4, "TEST_EVERY": 2}.items():
        monkeypatch.setattr(grpo, name, value)


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tiny: None, tmp_path: Path) -> None:
    """Stopped in the middle of an epoch: that epoch is done again, and nothing is counted twice."""
    plan, start = grpo.Plan("sums", "residual", 0, 2, "past-answer"), policy(0)

    def go(folder: str, until: Callable[[], None] = lambda: None) -> grpo.Run:
        run = grpo.Run(plan, start, tmp_path / folder)
        while not run.is_done:
            run.epoch(until)
        return run

    whole = go("whole")
    batches = iter(range(100))

    def stop() -> None:
        if next(batches) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go("stopped", stop)
    resumed = grpo.Run(plan, start, tmp_path / "stopped")
    assert [row["epoch"] for row in resumed.rows] == [1]
    resumed = go("stopped")
    for one, other in zip(without_time(resumed.rows), without_time(whole.rows), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert [row["answers"] for row in whole.rows] == [8, 8]
    assert whole.rows[1]["reused"] > 0
    assert "accuracy" in whole.rows[-1]
    weights = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in weights)


def test_a_stopped_start_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "START_BATCH", 2)
    monkeypatch.setattr(grpo, "SAVE_EVERY", 1)
    whole = supervised("sums", 0, 3, tmp_path / "whole", lambda *_: None)

    def stop(done: int, *_: object) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervised("sums", 0, 3, tmp_path / "stopped", stop)
    resumed = supervised("sums", 0, 3, tmp_path / "stopped", lambda *_: None)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_the_command_does_it_all_and_goes_on(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.rollout.demo.grpo.START_BATCH", 2)
    rules = ["--rules", "vanilla,plain:0.5", "--epochs", "2", "--seeds", "1", "--start-steps", "1"]
    command = ["rollout", "demo", *rules, "--out", str(tmp_path), "--json"]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    by_rule = {result["rule"]: result for result in first["results"]}
    assert list(by_rule) == ["vanilla", "plain:0.5"]
    assert [by_rule[rule]["lossless"] for rule in by_rule] == [True, False]
    assert "not lossless" in by_rule["plain:0.5"]["name"]
    for result in first["results"]:
        assert result["tokens_decoded"] > 0
        assert 0 <= result["final_accuracy"] <= 1
    assert by_rule["vanilla"]["reuse"] == 0 < by_rule["plain:0.5"]["reuse"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 7
    assert "not lossless" in page
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert json.loads((tmp_path / "results.json").read_text()) == first
    assert main([*command[:-1]]) == 0
    assert "plain, e^0.5 (not lossless)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rules", "vanilla,residal"], "no rollout rule 'residal'. Did you mean 'residual'?"),
        (["--rules", "plain:x"], "'x' is not a number; write plain:0.5 for e^0.5"),
        (["--rules", "one-hot:1"], "one-hot has no lenience"),
        (["--task", "chess"], "There is no task 'chess'; tasks: sums, sort"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["rollout", "demo", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_results_are_sums_and_means_over_seeds() -> None:
    one = {"answers": 8, "tokens": 100, "reused": 60, "decoded": 40, "old_tokens": 80, "offered": 8, "full": 4}
    one |= {"looked": 10, "drift": 0.5, "rounds": 9, "seconds": 1.0, "cpu_seconds": 0.5, "reward": 0.5}
    rows = [
        {**one, "rule": "residual", "seed": seed, "epoch": epoch, "accuracy": 0.2 + 0.2 * seed}
        for seed in (0, 1)
        for epoch in (1, 2)
    ]
    [result] = results(rows)
    assert (result["tokens_decoded"], result["reuse"], result["full_reuse"]) == (80, 0.75, 0.5)
    assert (result["final_accuracy"], result["seconds"], result["drift"]) == (0.3, 2.0, 0.05)
    assert len(plans("sums", ["vanilla", "plain:1"], range(3), 24, "none")) == 6
