"""mtp is trained on what it meets in a draft, in every family; a head that is there is where tuning begins; what is
written drafts better."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from paceline.core.sampling import SamplingParams
from paceline.draft.methods.mtp import MtpNetwork
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.formats.heads.mtp import head_of
from paceline.train.loop import LoopConfig, read_log
from paceline.train.loss import IGNORE
from paceline.train.mtp import MtpConfig, MtpLoss, command
from paceline.train.options import DrafterOptions
from paceline.train.trainer import Training, train_head
from tests import models, native
from tests.draft import mtps
from tests.draft.test_mtp import STEPS, forced, make
from tests.train.conftest import rounds

FAMILIES = {
    "llama3": {}, "qwen2": {}, "qwen3": {"tie_word_embeddings": False}, "qwen3-moe": {}, "olmoe": {}, "smollm3": {},
    "phi3": {}, "granite": {"logits_scaling": 1.0}, "olmo2": {}, "gemma3": {}, "mistral-window": {},
    "qwen3-next": {}, "qwen3.5": {"tie_word_embeddings": False}, "qwen3.5-moe": {},
}  # fmt: skip


def loss_of(model, **more):
    loss = MtpLoss(model, MtpConfig(**more))
    models.randomize(loss.module)
    return loss.eval()


def drafting(loss, model):
    """The same head as a drafter runs it, by way of its file's names."""
    tensors = {name: tensor.detach() for name, tensor in loss.saved().items()}
    return MtpNetwork("x", head_of(tensors, tensors.__getitem__), native.of(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_training_is_a_step_of_drafting(family):
    """Step 0 reads what the target said, step s what the head said itself: at every position, with forced tokens."""
    model = models.model(family, **FAMILIES[family])
    loss = loss_of(model)
    text = np.random.default_rng(0).integers(4, models.VOCAB_SIZE, 14)
    ids = torch.from_numpy(text)[None]
    with torch.no_grad():
        states, _ = loss.states(ids)
        unrolled = [model.lm_head(read)[0] for read in loss.unroll(states, ids, STEPS)]
    drafter = drafting(loss, model)
    for pairs in range(1, len(text) - STEPS):
        for step, logits in enumerate(forced(drafter, states[0], text, pairs)):
            torch.testing.assert_close(logits, unrolled[step][pairs - 1], atol=3e-3, rtol=1e-3)


def test_a_step_weighs_less_than_the_one_before():
    """Where the target wrote the token; the weights' sum is 1."""
    model = models.model("qwen3", tie_word_embeddings=False)
    loss = loss_of(model)
    ids = torch.randint(4, models.VOCAB_SIZE, (2, 16))
    labels = ids.roll(-1, 1)
    labels[:, :5], labels[:, -1] = IGNORE, IGNORE
    states, last = loss.states(ids)
    total = torch.zeros(())
    for step, read in enumerate(loss.unroll(states, ids, 3)):
        p, q = model.lm_head(last[:, 1 + step :]).softmax(-1), model.lm_head(read).log_softmax(-1)
        total = total - 0.6**step / (1 + 0.6 + 0.36) * (p * q).sum(-1)[labels[:, 1 + step :] != IGNORE].mean()
    torch.testing.assert_close(loss(ids, labels).detach(), total.detach(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama2", "gemma3", "qwen3-moe"])
def test_a_new_head_begins_with_the_state_and_adds_nothing(family):
    """Its logits are about as large as 1: it is not sure of what it has not learnt."""
    model = models.model(family)
    loss, ids = MtpLoss(model), torch.randint(4, models.VOCAB_SIZE, (1, 9))
    with torch.no_grad():
        states, _ = loss.states(ids)
        (read,) = loss.unroll(states, ids, 1)
        wanted = F.rms_norm(states[:, :-1], states.shape[-1:], eps=1e-6) / model.lm_head.weight.norm(dim=1).mean()
        torch.testing.assert_close(read, wanted, atol=1e-4, rtol=1e-3)
        assert 0.5 < float(model.lm_head(read).std()) < 2


# The whole recipe ----------------------------------------------------------------------------------------------------

LOOP = LoopConfig(tokens=24 * 16 * 40, peak_lr=2e-2, warmup_steps=5, mixed_precision="no")
NOTHING = LoopConfig(tokens=0, mixed_precision="no")


def train(target, answers, out, loop):
    training = Training(target, answers, out, out.with_suffix(".run"), loop)
    assert train_head(training, MtpConfig(length=24, rows=16))
    config = json.loads((out / "config.json").read_text())
    return config


def test_a_new_head_learns_to_draft_and_is_tuned_on_from_the_targets_folder(lesson, tmp_path):
    target, answers = lesson
    before = train(target, answers, tmp_path / "none", NOTHING)["held_out"]["all"]
    after = train(target, answers, tmp_path / "head", LOOP)
    assert "untrained" not in after
    assert after["held_out"]["all"][0]["top1"] > before[0]["top1"] + 0.1
    assert after["held_out"]["all"][0]["loss"] < before[0]["loss"]
    losses = [row["loss"] for row in read_log(tmp_path / "head.run" / "log.jsonl") if "loss" in row]
    assert losses[-1] < losses[0]
    assert rounds(target, f"mtp:{tmp_path / 'head'}") < 0.9 * rounds(target, f"mtp:{tmp_path / 'none'}")

    own, tensors = tmp_path / "own", load_file(tmp_path / "head" / "model.safetensors")
    models.make_repetitive(own, tie_word_embeddings=False)
    mtps.add(own, tensors)
    assert rounds(own, "mtp") == rounds(target, f"mtp:{tmp_path / 'head'}")
    tuned = train(own, answers, tmp_path / "tuned", NOTHING)
    again = load_file(tmp_path / "tuned" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert tuned["untrained"] == tuned["held_out"]
    other = models.make("llama2", tmp_path / "other", seed=3, tie_word_embeddings=False)
    with pytest.raises(PacelineError, match="same shape, other weights"):
        Engine(other, f"mtp:{tmp_path / 'tuned'}", dtype="float32")


def test_experts_of_a_head_that_is_there_are_read_and_written(tmp_path):
    model = models.model("qwen3-moe", tie_word_embeddings=False)
    tensors = mtps.random_head(model)
    loss = MtpLoss(model, MtpConfig(), head_of(tensors, tensors.__getitem__))
    saved = loss.saved()
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    dense = models.model("qwen3-moe", tie_word_embeddings=False, mlp_only_layers=[2])
    loss = MtpLoss(dense, MtpConfig(), head_of(tensors, tensors.__getitem__))  # the layer before is alike
    assert loss.saved().keys() == tensors.keys()
    without = models.model("qwen3-moe", tie_word_embeddings=False, mlp_only_layers=[0, 1, 2])
    with pytest.raises(PacelineError, match="is like none of its layers"):
        MtpLoss(without, MtpConfig(), head_of(tensors, tensors.__getitem__))


@pytest.mark.parametrize("layout", ["deepseek", "mimo"])
def test_heads_in_other_layouts_are_tuned_for_mixtures_and_for_mimo(layout, lesson, tmp_path):
    """The head is known by the target's weights as its checkpoint has them, expert by expert."""
    folder = make(tmp_path / "model", layout)
    assert "untrained" in train(folder, lesson[1], tmp_path / "out", NOTHING)
    drafts = []
    for head in ("mtp", f"mtp:{tmp_path / 'out'}"):
        out = Engine(folder, f"{head},tree=0,draft=3", dtype="bfloat16").generate(
            [[5, 6, 7]], SamplingParams(max_tokens=9)
        )
        drafts.append((out[0].tokens, out[0].stats.accepted))
    assert drafts[0] == drafts[1]


def test_a_head_that_is_there_learns_slower_and_a_broken_one_is_refused_first(lesson, tmp_path, monkeypatch):
    target, answers = lesson
    made = []
    monkeypatch.setattr("paceline.train.mtp.train_head", lambda training, config: bool(made.append(config)) or True)
    models.make_repetitive(tmp_path / "own", tie_word_embeddings=False)
    model = models.model("llama2", tie_word_embeddings=False)
    mtps.add(tmp_path / "own", mtps.random_head(model))
    for folder, rate in ((target, 2e-3), (tmp_path / "own", 2e-4)):
        setup = DrafterOptions(target=str(folder), out=tmp_path / f"out-{folder.name}", data=[answers], tokens=8)
        command(setup, MtpConfig())
        assert made[-1].lr == rate
    mtps.add(tmp_path / "own", {"mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2, 64)})
    with pytest.raises(PacelineError, match="latent attention"):
        MtpConfig().check(tmp_path / "own")
