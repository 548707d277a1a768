"""A draft model for any target: it learns from the target's own answers, is measured, and drafts."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.target.load import load, load_tokenizer
from paceline.train.data import parse_sources
from paceline.train.draft import DistilLoss, DraftConfig, train_draft
from paceline.train.generated import generated_rows
from paceline.train.loop import LoopConfig
from paceline.train.measure import measure
from paceline.train.trainer import Training
from tests import models

SHAPE = {"hidden": 64, "layers": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model whose next token hangs mostly on the last one, so that a small draft can learn it."""
    folder = models.make("llama2", tmp_path_factory.mktemp("models") / "mine")
    weights = load_file(folder / "model.safetensors")
    small = {k: w * 0.01 if "o_proj" in k or "down_proj" in k else w for k, w in weights.items()}
    save_file(small, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    asked = folder / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"the cat {i} and the dog {i * 7}"}) + "\n" for i in range(40)))
    prompts = parse_sources([f"asked={asked}"])
    return generated_rows(target, prompts=prompts, count=120, max_tokens=20, temperature=1.0, out=folder / "own.jsonl")


def test_a_draft_learns_is_measured_and_drafts(target, answers, tmp_path):
    def trained(name, tokens):
        loop = LoopConfig(tokens=tokens, mixed_precision="no", peak_lr=1e-2, warmup_steps=2)
        config = DraftConfig(**SHAPE, length=64, rows=8, held_out=0.1)
        training = Training(target, answers, tmp_path / name, tmp_path / f"{name}-run", loop)
        assert train_draft(training, config, compiled=False)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert list(config["held_out"]) == ["asked", "all"]
        overlap = config["held_out"]["all"][0]["overlap"]
        return overlap

    assert trained("long", 64 * 8 * 30) > trained("short", 64 * 8) + 0.1
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    assert config["target"]["tokenizer_fingerprint"] == load_tokenizer(target).fingerprint
    assert load(tmp_path / "long").vocab_size == models.VOCAB_SIZE
    params = SamplingParams(max_tokens=30)
    prompts = ["the cat 3", "a dog"]
    drafted = Engine(str(target), f"model:{tmp_path / 'long'}", dtype="float32").generate(prompts, params)
    plain = Engine(str(target), "none", dtype="float32").generate(prompts, params)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert sum(sum(one.stats.accepted[1:]) for one in drafted) > 0


def test_padding_is_not_learnt_and_who_agrees_wholly_overlaps_wholly():
    target, draft = models.model("llama2"), models.model("llama2", 1)
    ids = torch.randint(4, 288, (1, 6))
    loss = DistilLoss(draft, target, 0).eval()
    longer, one = (torch.cat([ids, torch.zeros((1, n), dtype=torch.long)], 1) for n in (5, 1))
    torch.testing.assert_close(loss(longer, longer), loss(one, ids))
    held = {"a": (ids[:, :-1].numpy(), ids[:, 1:].numpy())}
    assert measure(DistilLoss(target, target, 0), held)["all"][0].row["overlap"] == pytest.approx(1)


def launched(target, answers, out, processes, rows=8):
    """`paceline train model` under accelerate's launcher, as docs/train.md has it, without a GPU."""
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={processes}", "--num_machines=1"]
    launcher += ["--mixed_precision=no", "--dynamo_backend=no"] if processes > 1 else []
    shape = ["--hidden=64", "--layers=1", "--length=64", f"--rows={rows}", "--no-compiled", "--tokens=20480"]
    places = ["--data", str(answers), "--out", str(out), "--checkpoints", f"{out}-run"]
    recipe = ["-m", "paceline", "train", "model", str(target), *places, *shape]
    command = [sys.executable, *(launcher if processes > 1 else []), *recipe]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accelerates_launcher_starts_two_processes(target, answers, tmp_path):
    def losses(name):
        rows = map(json.loads, (tmp_path / f"{name}-run" / "log.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    for name, processes in (("one", 1), ("two", 2)):
        done = launched(target, answers, tmp_path / name, processes)
        assert done.returncode == 0, done.stderr
    assert len(losses("one")) == 2
    assert losses("one") == pytest.approx(losses("two"), rel=2e-2)
    assert (tmp_path / "two" / "model.safetensors").exists()
    uneven = launched(target, answers, tmp_path / "uneven", 2, rows=7)
    assert "a batch of 7 rows cannot be shared by 2 processes" in uneven.stderr
