"""Whether a second device would pay: what is measured of it here, and what `tune` and `predict` say."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import gguf_files, models, native

from paceline.cli import main
from paceline.cost.draft_device import Measurement, advice, measure
from paceline.cost.mirror import LatencyModel
from paceline.target.load import load, load_tokenizer

PROMPTS = ["the cat and the dog", "there was", "and then the little cat text: hello the cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make("llama2", tmp_path_factory.mktemp("models") / "target", **native.TINY)


def test_the_parts_of_a_round_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is the target itself: its windows stand, so what comes next is the bonus token."""
    target, cores = load(folder, dtype="float32"), os.sched_getaffinity(0)
    threads = target.threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    answer = measure(target, load_tokenizer(folder), f"{folder},candidates=3", PROMPTS, max_tokens=24)
    assert answer.here is None, "one thread is not split"
    assert answer.latency.after > 0 < answer.latency.ahead
    assert 0 < answer.latency.hit <= 1
    assert answer.plain > answer.latency.after
    assert (target.threads, os.sched_getaffinity(0)) == (threads, cores)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="cores cannot be split")
def test_beside_is_measured_too_and_the_cores_are_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, cores = load(folder, dtype="float32"), os.sched_getaffinity(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    threads = target.threads
    answer = measure(target, load_tokenizer(folder), str(folder), PROMPTS[:1], max_tokens=24)
    assert answer.here is not None
    assert answer.here.together >= 1
    assert answer.here.rendezvous > 0
    assert answer.measured is not None
    assert answer.measured > answer.here.rendezvous
    assert (target.threads, os.sched_getaffinity(0)) == (threads, cores)


def test_what_is_said_of_it() -> None:
    latency = LatencyModel(0.0, 0.002, 0.004, 0.001, 0.5)
    measured = Measurement(latency, replace(latency, together=1.5), 0.006, 0.003)
    text = advice({"draft": "d", **measured.to_json()})
    assert "50% of rounds" in text
    assert "0.50 times" in text, "measured"
    assert "1.50 times as long" in text
    never = Measurement(LatencyModel(0, 1, 2, 1, 0.0), None, None, 1.0)
    assert "with no target" in advice({"draft": "d", **never.to_json()})


def test_tune_answers_and_predict_takes_its_hit_rate(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "tune.json"
    log.write_text(json.dumps({"prompt": "the little cat", "response": "the little cat and the little dog"}) + "\n")
    tune = ["tune", folder, "--traffic", log, "-o", out, "--batches", "1", "--seconds", "0.1", "--no-check"]
    assert main([str(a) for a in [*tune, "-d", "sam", "--mirror", folder, "--threads", "1"]]) == 0
    assert "A second device that drafts ahead" in capsys.readouterr().out
    hit = json.loads(out.read_text())["mirror"]["separate"]["hit"]
    predict = ["predict", folder, "--draft", folder, "--on", "H100-SXM", "--draft-on", "L4"]
    assert main([str(a) for a in [*predict, "--table", out, "--json"]]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["hit"] == hit
    assert facts["speedup"] == pytest.approx(facts["plain_round"] / facts["round"])
    assert main([str(a) for a in [*predict, "--hit", "0.9"]]) == 0
    assert "with two devices" in capsys.readouterr().out


def test_a_gguf_file_is_predicted_like_its_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = gguf_files.write(folder, tmp_path / "m.gguf", "F16")
    rounds = []
    for model in (folder, file):
        assert main(["predict", str(model), "--draft", str(model), "--on", "L4", "--json"]) == 0
        rounds.append(json.loads(capsys.readouterr().out)["round"])
    assert rounds[0] == rounds[1]
