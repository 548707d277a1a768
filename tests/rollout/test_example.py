"""examples/rollout_rules.py: its task, its loop, and that a stopped run goes on as if it had not been."""

import json
import random
import sys

import pytest
import torch
from examples import rollout_rules
from examples.rollout_rules import EOS, MAX_NEW, Problem, encode, policy, problems, results, supervised


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    """Epochs of eight answers."""
    sizes = {"PROMPTS": 4, "GROUP": 2, "STEPS": 2, "HELD_OUT": 4, "TEST_EVERY": 2, "START_BATCH": 2, "SAVE_EVERY": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(rollout_rules, name, value)


def test_worked_answers_are_right_and_fit():
    train = problems(200, random.Random(1))
    for problem in train:
        tokens = [*encode(problem.worked), EOS]
        assert len(tokens) <= MAX_NEW
        assert problem.reward(tokens) == 1
        assert problem.reward(tokens[:-1]) == 0, "an answer that was cut"
    assert problems(1, random.Random(0)) == [Problem("7+7+1+5+9+8?", "14,15,20,29,37;37")]
    one = Problem("1+2?", "3;3")
    assert [one.reward([*encode(text), EOS]) for text in ("3;3", ";3", "3;2", "3", "")] == [1, 1, 0, 1, 0]
    held_out = problems(50, random.Random(1), frozenset(p.question for p in train))
    assert not {p.question for p in train} & {p.question for p in held_out}


def test_advantages_are_centred_in_each_group():
    values = rollout_rules.advantages([1.0, 0.0, 1.0, 1.0])
    assert values.tolist() == pytest.approx([0.707, -0.707, 0, 0], abs=1e-3)


def without_time(rows):
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    """Stopped in the middle of an epoch: that epoch is done again, and nothing is counted twice."""
    plan, start = rollout_rules.Plan("residual", 0, 2, "past-answer"), policy(0)

    def go(folder):
        run = rollout_rules.Run(plan, start, tmp_path / folder)
        while not run.is_done:
            run.epoch()
        return run

    whole, update, updates = go("whole"), rollout_rules.update, []

    def stop(*given):
        updates.append(update(*given))
        if len(updates) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as stopping:
        stopping.setattr(rollout_rules, "update", stop)
        with pytest.raises(KeyboardInterrupt):
            go("stopped")
    assert [row["epoch"] for row in rollout_rules.Run(plan, start, tmp_path / "stopped").rows] == [1]
    resumed = go("stopped")
    for one, other in zip(without_time(resumed.rows), without_time(whole.rows), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert [row["answers"] for row in whole.rows] == [8, 8]
    assert whole.rows[1]["reused"] > 0
    assert "accuracy" in whole.rows[-1]
    weights = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in weights)


def test_a_start_goes_on(tmp_path):
    whole = supervised(0, 3, tmp_path / "whole")
    supervised(0, 2, tmp_path / "stopped")
    (tmp_path / "stopped" / "start-0-2.pt").rename(tmp_path / "stopped" / "start-0-3.pt")
    for one, other in zip(whole.parameters(), supervised(0, 3, tmp_path / "stopped").parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["rollout_rules.py", *arguments])
    rollout_rules.main()


def test_the_script_does_it_all_and_goes_on(tmp_path, monkeypatch, capsys):
    asked = ("--rules", "vanilla,plain:0.5", "--epochs", "2", "--seeds", "1", "--start-steps", "1")
    run(monkeypatch, *asked, "--out", str(tmp_path))
    assert "| plain, lenience 1.649, not lossless |" in capsys.readouterr().out
    first = json.loads((tmp_path / "results.json").read_text())
    by_rule = {result["rule"]: result for result in first["results"]}
    assert list(by_rule) == ["vanilla", "plain:0.5"]
    assert [by_rule[rule]["lossless"] for rule in by_rule] == [True, False]
    for result in first["results"]:
        assert result["tokens_decoded"] > 0
        assert 0 <= result["final_accuracy"] <= 1
    assert by_rule["vanilla"]["reuse"] == 0 < by_rule["plain:0.5"]["reuse"]
    run(monkeypatch, *asked, "--out", str(tmp_path))
    assert "epoch" not in capsys.readouterr().out, "nothing was left to do"
    assert json.loads((tmp_path / "results.json").read_text()) == first


@pytest.mark.parametrize(("rules", "says"), [
    ("vanilla,residal", "no rollout rule 'residal'. Did you mean 'residual'?"),
    ("plain:x", "'x' is not a number; write plain:0.5 for e^0.5"), ("one-hot:1", "one-hot has no lenience"),
])
def test_mistakes_are_named_before_anything_is_written(tmp_path, monkeypatch, capsys, rules, says):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--out", str(tmp_path / "out"), "--rules", rules)
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_results_are_sums_and_means_over_seeds():
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
