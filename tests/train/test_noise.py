"""Fine-tuning with noise: the model learns to predict past junk, and what is written is a model with a tree."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.formats.adapter import Adapter
from paceline.formats.folder import tuned_note
from paceline.formats.heads.checkpoint import TargetFacts
from paceline.outputs import write_whole
from paceline.target.load import load
from paceline.train.data import split_rows
from paceline.train.loop import LoopConfig
from paceline.train.noise import MOST_ROWS, NoiseConfig, NoisyConfig, clean_loss, measure_slots, train_noisy
from paceline.train.trainer import Training
from tests import models

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
TOKENS = 110 * 128


def answers(file):
    """Texts that count on from a random token: what comes can be told past any junk, from what was before it."""
    rng = np.random.default_rng(0)
    with file.open("w") as out:
        for n in range(60):
            text = [int(4 + (start + i) % 36) for start in [rng.integers(36)] for i in range(25)]
            row = {"id": f"answer {n}", "source": "made", "prompt_tokens": text[:5], "tokens": text[5:]}
            out.write(json.dumps(row) + "\n")
    return file


def tuned(tmp_path, name, lengths, **more):
    target = tmp_path / "target"
    if not target.exists():
        models.make("llama2", target, **SMALL)
    loop = LoopConfig(tokens=TOKENS, mixed_precision="no", optimiser="adamw", peak_lr=1e-2, warmup_steps=5, log_every=5)
    config = NoisyConfig(noise=NoiseConfig(lengths), length=32, rows=4, held_out=0.2, **more)
    made = answers(tmp_path / "answers.jsonl")
    training = Training(target, made, tmp_path / name, tmp_path / f"{name}-run", loop)
    assert train_noisy(training, config, [target], compiled=False)
    return tmp_path / name


def test_noise_makes_a_model_that_drafts_for_itself(tmp_path):
    """The same start, data, order and steps, with noise and without."""
    plain, noisy = tuned(tmp_path, "plain", (0, 0)), tuned(tmp_path, "noisy", (5, 5))
    records = [json.loads((folder / "noise.json").read_text()) for folder in (plain, noisy)]
    assert records[1]["tuned_from"]["name"] == "target"
    weights = [
        TargetFacts.of(load(folder, device="cpu")).weights_fingerprint for folder in (tmp_path / "target", noisy)
    ]
    assert records[1]["tuned_from"]["weights_fingerprint"] == weights[0] != weights[1]
    assert records[1]["recipe"]["config"]["noise"]["lengths"] == [5, 5]
    assert records[1]["losses"]["target"] > records[1]["loss"] + 1
    slots = [json.loads((folder / "slots.json").read_text())["accuracies"] for folder in (plain, noisy)]
    assert np.shape(slots[1]) == (5, 10)
    first = [np.array(table)[:, 0].mean() for table in slots]
    assert first[1] > first[0] + 0.1
    mean = []
    for folder in (plain, noisy):
        prompts = [[4 + (s + i) % 36 for i in range(3)] for s in range(0, 36, 3)]
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        spec = f"jacobi:{folder},tree=8,retrieve=none"
        expected, done = (Engine(folder, draft, dtype="float32").generate(prompts, params) for draft in ("none", spec))
        assert [one.tokens for one in done] == [one.tokens for one in expected]
        mean.append(sum(one.new_tokens for one in done) / sum(one.rounds for one in done))
    assert mean[1] > mean[0] + 0.2


def test_reports_name_the_model_it_was_made_from(tmp_path):
    assert tuned_note(str(tmp_path)) is None
    write_whole(tmp_path / "noise.json", '{"tuned_from": {"name": "target"}}')
    assert "fine-tuned with noise from target" in str(tuned_note(str(tmp_path)))
    write_whole(tmp_path / "noise.json", "not JSON")
    assert tuned_note(str(tmp_path)) is None


def test_an_adapter_is_written_that_is_merged_on_loading(tmp_path):
    pytest.importorskip("peft")
    folder = tuned(tmp_path, "adapted", (3, 6), lora=4)
    assert [NoisyConfig(**of).loop["peak_lr"] for of in ({}, {"lora": 4}, {"lora": 4, "lr": 0.5})] == [3e-5, 3e-4, 0.5]
    assert not (folder / "model.safetensors").exists()
    before, after = (load(tmp_path / name, dtype="float32") for name in ("target", "adapted"))
    record = json.loads((folder / "noise.json").read_text())
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    _, held = split_rows(tmp_path / "answers.jsonl", 32, 0, 0.2)
    held = {name: (ids[:MOST_ROWS], labels[:MOST_ROWS]) for name, (ids, labels) in held.items()}
    unchanged = clean_loss(network.eval(), held)
    names = dict(network.named_parameters())
    weights = Adapter.of(folder).merged({name: p.detach() for name, p in names.items()})
    moved = {name for name, p in names.items() if not torch.equal(p, weights[name])}
    assert moved
    assert all("layers" in name and names[name].ndim == 2 for name in moved)
    network.load_state_dict(weights)
    assert clean_loss(network, held) == pytest.approx(record["loss"], abs=1e-3)
    assert record["loss"] < unchanged == pytest.approx(record["losses"]["target"])
    assert after.weights_fingerprint != before.weights_fingerprint
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    expected, done = (Engine(folder, draft).generate([[4, 5, 6]], params) for draft in ("none", f"jacobi:{folder}"))
    assert done[0].tokens == expected[0].tokens


def test_slots_are_those_of_the_model_itself(tmp_path):
    """A model that sees its last token alone is right only in slots whose token stands where it was; chance else."""
    folder = models.make("llama2", tmp_path / "m", **SMALL)
    _, held = split_rows(answers(tmp_path / "answers.jsonl"), 32, 0, 0.2)
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    table, again = ([fit.ranks for fit in measure_slots(network, held, NoiseConfig(), 0)] for _ in range(2))
    assert table == again
    assert all(0 <= sum(row) <= 1 for row in table)
