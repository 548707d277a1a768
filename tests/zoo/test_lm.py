"""The recipe: a run cut in the middle ends where an unbroken one does, and both stages end in a model."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paceline.errors import PacelineError
from paceline.train.data import Source
from paceline.train.llama import ModelConfig
from paceline.train.loop import LoopConfig, Progress, learning_rate, share_done
from zoo.lm import Job, chat, distil, pretrain
from zoo.text import DataConfig
from zoo.tokenizer import train_tokenizer

STORY = "The cat sat on the mat. The dog sat by the door. The bird sang in the tree. "


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([STORY] * 20, vocabulary=320)


def test_schedule():
    config = LoopConfig(tokens=1000, peak_lr=1.0, warmup_steps=10, decay=0.2, final_lr=0.1)
    assert learning_rate(config, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(config, 9, 0.1) == learning_rate(config, 500, 0.8) == 1.0
    assert learning_rate(config, 500, 0.9) == pytest.approx(0.55)
    assert learning_rate(config, 500, 1.0) == pytest.approx(0.1)
    assert share_done(config, Progress(tokens=250)) == 0.25
    assert share_done(replace(config, tokens=0), Progress()) == 1.0  # what begins is measured as it is
    clock = LoopConfig(minutes=2)
    assert share_done(clock, Progress(seconds=60)) == 0.5
    assert share_done(clock, Progress(seconds=600)) == 1.0  # paused past its slot: over
    with pytest.raises(PacelineError, match="tokens or as minutes"):
        LoopConfig()


TINY = ModelConfig(hidden=16, layers=2, heads=2, kv_heads=1, intermediate=32, positions=64)
ROWS = DataConfig(
    length=16, rows=2, weights={"story": 1}, decay_weights={"story": 1}, generated=0, held_out=0.2, validation_rows=2
)


def story(folder):
    path = folder / "story.jsonl"
    with path.open("w") as file:
        for i in range(40):
            file.write(json.dumps({"text": f"{i}: {STORY}"}) + "\n")
            file.write(json.dumps({"question": f"Where is cat {i}?", "answer": f"On mat {i}."}) + "\n")
    return [Source("story", path)]


def tiny_run(tokenizer, folder, name, tokens=320):
    loop = LoopConfig(tokens=tokens, mixed_precision="no", warmup_steps=2, log_every=2)
    out, run = folder / name, folder / f"{name}-run"
    return pretrain(Job(story(folder), tokenizer, out, run, loop, ROWS, compiled=False), TINY)


def test_a_resumed_run_equals_an_unbroken_one(tokenizer, tmp_path, monkeypatch):
    from paceline.train import loop
    from zoo import lm

    assert tiny_run(tokenizer, tmp_path, "whole")
    real = loop.train
    monkeypatch.setattr(lm, "train", lambda *args: real(*args, stop_after=4))
    assert not tiny_run(tokenizer, tmp_path, "broken")
    assert not (tmp_path / "broken").exists()
    monkeypatch.setattr(lm, "train", real)
    assert tiny_run(tokenizer, tmp_path, "broken")
    whole, broken = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[key], broken[key]) for key in whole)

    def losses(name):
        rows = map(json.loads, (tmp_path / name / "training-pretrain.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    assert losses("whole") == losses("broken")


def test_a_kill_while_saving_leaves_the_old_checkpoint(tokenizer, tmp_path, monkeypatch):
    from paceline.train import loop
    from zoo import lm

    real = loop.train
    monkeypatch.setattr(lm, "train", lambda *args: real(*args, stop_after=4))
    assert not tiny_run(tokenizer, tmp_path, "run")
    checkpoint = tmp_path / "run-run" / "checkpoint.pt"
    before = checkpoint.read_bytes()

    def torn(state, path):
        path.write_bytes(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.torch, "save", torn)
    monkeypatch.setattr(lm, "train", lambda *args: real(*args, stop_after=6))
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tokenizer, tmp_path, "run")
    assert checkpoint.read_bytes() == before
    monkeypatch.undo()
    assert tiny_run(tokenizer, tmp_path, "run")


def test_a_checkpoint_of_an_earlier_version_is_refused(tokenizer, tmp_path):
    (tmp_path / "run-run").mkdir()
    (tmp_path / "run-run" / "checkpoint.safetensors").touch()
    with pytest.raises(PacelineError, match="of an earlier version of Paceline"):
        tiny_run(tokenizer, tmp_path, "run")


def test_what_belongs_to_another_model_is_refused(tokenizer, tmp_path):
    assert tiny_run(tokenizer, tmp_path, "one", tokens=32)
    loop = LoopConfig(tokens=64, mixed_precision="no")
    other = ModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, positions=64)
    places = tmp_path / "x", tmp_path / "one-run"
    with pytest.raises(PacelineError, match="checkpoint of another model"):
        pretrain(Job(story(tmp_path), tokenizer, *places, loop, ROWS, compiled=False), other)
    small = train_tokenizer([STORY] * 20, vocabulary=270)
    with pytest.raises(PacelineError, match="and its tokenizer 270: a draft model needs"):
        distil(Job(story(tmp_path), small, *places, loop, ROWS, compiled=False), tmp_path / "one")


def test_both_stages_end_in_a_model_transformers_loads(tokenizer, tmp_path):
    assert tiny_run(tokenizer, tmp_path, "base", tokens=64)
    loop = LoopConfig(tokens=64, warmup_steps=1, mixed_precision="no")
    rows = DataConfig(length=32, rows=2, weights={}, decay_weights={}, generated=20, held_out=0.2, validation_rows=2)
    run, out = tmp_path / "chat-run", tmp_path / "chat"
    assert chat(Job(story(tmp_path), tokenizer, out, run, loop, rows, compiled=False), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.bos_token_id]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert {f.name for f in out.glob("training-*")} == {
        f"training-{stage}.{kind}" for stage in ("pretrain", "chat") for kind in ("json", "jsonl")
    }


def test_muon_has_the_matrices_inside_and_adamw_the_rest():
    from paceline.train.loop import make_optimisers

    module = torch.nn.ModuleDict(
        {"embed_tokens": torch.nn.Embedding(5, 4), "proj": torch.nn.Linear(4, 4), "norm": torch.nn.LayerNorm(4)}
    )
    muon, adamw = make_optimisers(module, LoopConfig(tokens=1))
    assert [p.shape for g in muon.param_groups for p in g["params"]] == [(4, 4)]
    decays = [(g["weight_decay"], len(g["params"])) for g in adamw.param_groups]
    assert decays == [(0.1, 1), (0.0, 3)]
    (alone,) = make_optimisers(module, LoopConfig(tokens=1, optimiser="adamw"))
    assert sum(len(g["params"]) for g in alone.param_groups) == 5
    with pytest.raises(PacelineError, match="no optimiser 'sgd'"):
        LoopConfig(tokens=1, optimiser="sgd")
