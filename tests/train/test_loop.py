"""The loop of all recipes: its learning rate, its budget, and what of a log a resumed run keeps."""

import json

import pytest

from paceline.train.loop import LoopConfig, Progress, Reporter, learning_rate, read_log, share_done


def test_the_learning_rate_rises_stays_and_falls():
    config = LoopConfig(tokens=1000, peak_lr=2.0, warmup_steps=4, decay=0.25, final_lr=0.1)
    assert [learning_rate(config, step, 0.0) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    ends = [learning_rate(config, 9, done) for done in (0.75, 0.875, 1.0)]
    assert ends == pytest.approx([2.0, 1.1, 0.2])


def test_a_budget_is_in_tokens_or_in_minutes():
    progress = Progress(tokens=250, seconds=30.0)
    assert [share_done(LoopConfig(tokens=tokens), progress) for tokens in (1000, 100, 0)] == [0.25, 1.0, 1.0]
    assert share_done(LoopConfig(minutes=2.0), progress) == 0.25


def test_rows_after_the_checkpoint_are_dropped(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"step": step, "tokens": step, "loss": 1.0}) + "\n" for step in (20, 40, 60)))
    with Reporter(LoopConfig(tokens=1000), log, quiet=False) as reporter:
        reporter.start(Progress(step=40))
    assert [row["step"] for row in read_log(log)] == [20, 40]
