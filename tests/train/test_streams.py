"""Streams of a draft model: what their loss is, whom they see, and that what is written drafts."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from paceline.draft.methods.model import Model
from paceline.draft.models.streams import FILE
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.train.draft import StreamsConfig, StreamsLoss, later, seen, train_streams
from paceline.train.loop import LoopConfig
from paceline.train.loss import IGNORE
from paceline.train.measure import measure
from paceline.train.trainer import Training
from tests import models
from tests.train.conftest import following_answers
from tests.train.test_s2d import SMALL

COUNT, LAYERS, RANK = 2, 2, 4


def batch():
    """Ids and labels [3, 12]; some of the labels are not learnt."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, 288, (3, 13)))
    labels = ids[:, 1:].clone()
    labels[:, :2], labels[1, 6] = IGNORE, IGNORE
    return ids[:, :-1], labels


def made(keep=False):
    """Streams that say something else than their token."""
    torch.manual_seed(2)
    module = StreamsLoss(models.model("llama2", **SMALL), COUNT, LAYERS, RANK, keep)
    with torch.no_grad():
        module.up.normal_(std=0.3)
        module.embedding.normal_()
    return module


def test_the_loss_is_the_weighted_sum_of_what_each_stream_is_to_say():
    module, (ids, labels) = made(), batch()
    logits = module.teacher.lm_head(module.states(ids))
    expected = torch.zeros(())
    for j in range(COUNT + 1):
        expected = expected + 0.5**j * cross_entropy(logits[:, j].flatten(0, 1), later(labels, j).flatten())
    torch.testing.assert_close(module(ids, labels), expected)


def test_a_token_is_the_draft_models_own():
    """Main states are those of the model without streams; later tokens change nothing before them, nor in streams."""
    module, (ids, _) = made(), batch()
    states = module.states(ids)
    plain = module.teacher.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(states[:, 0], plain, atol=1e-4, rtol=1e-4)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 280
    torch.testing.assert_close(module.states(changed)[:, :, :7], states[:, :, :7], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(states[:, 1], states[:, 0], atol=0.1)


def test_who_sees_whom():
    mask = seen(3, 2)
    rows = {(0, 1): {(0, 0), (0, 1)}, (1, 1): {(0, 0), (0, 1), (1, 1)}, (2, 0): {(0, 0), (1, 0), (2, 0)}}
    for (kind, place), others in rows.items():
        seen_by = {divmod(i, 3) for i in mask[3 * kind + place].nonzero().flatten().tolist()}
        assert seen_by == others


def test_only_what_the_target_wrote_in_one_piece_is_learnt():
    labels = torch.tensor([[5, 6, IGNORE, 7, 8, 9]])
    assert later(labels, 1).tolist() == [[6, IGNORE, IGNORE, 8, 9, IGNORE]]
    assert later(labels, 2).tolist() == [[IGNORE, IGNORE, IGNORE, 9, IGNORE, IGNORE]]


def test_with_keep_the_draft_learns_nothing():
    module = made(keep=True)
    assert {name for name, _ in module.named_parameters()} == {"down", "up", "embedding"}
    module(*batch()).backward()
    assert module.embedding.grad is not None
    assert module.teacher.lm_head.weight.grad is None


def test_how_well_streams_foresee_their_own_model():
    """A stream is measured against what the model itself says at that place."""
    module, (ids, labels) = made(), batch()
    held = {"made": (ids.numpy(), labels.numpy())}
    fits = [fit.row for fit in measure(module, held)["made"]]
    logits = module.teacher.lm_head(module.states(ids)).detach()
    known = later(labels, 2)[:, :-2] != IGNORE
    right = logits[:, 0, 2:].argmax(-1)[known] == logits[:, 2, :-2].argmax(-1)[known]
    assert fits[1]["top1"] == pytest.approx(float(right.float().mean()), abs=1e-4)
    assert all(0 < fit["overlap"] < 1 for fit in fits)


def test_streams_that_were_trained_foresee_and_draft(tmp_path):
    target = models.make("llama2", tmp_path / "target", **SMALL)
    draft = models.make("llama2", tmp_path / "draft", **SMALL | {"num_hidden_layers": 2})
    narrow = models.make("llama2", tmp_path / "narrow", **SMALL | {"vocab_size": 288})
    loop = LoopConfig(tokens=6400, mixed_precision="no", peak_lr=0.01, warmup_steps=20)
    made = following_answers(tmp_path / "mine.jsonl")
    training = Training(target, made, tmp_path / "streams", tmp_path / "run", loop)
    config = StreamsConfig(length=32, rows=4)
    with pytest.raises(PacelineError, match="has 288 tokens"):
        train_streams(training, narrow, config)
    assert train_streams(training, draft, config)
    facts = json.loads((training.out / "config.json").read_text())["streams"]
    assert facts["layers"] == 1
    assert min(fit["top1"] for fit in facts["fit"]["all"]) > 0.06, "one of 36 by chance"
    assert load_file(training.out / FILE)["embedding"].shape == (2, 32)
    AutoModelForCausalLM.from_pretrained(training.out)  # a model for others, too
    drafter = Engine(target, f"model:{training.out},streams=2", dtype="float32", device="cpu").drafter
    assert isinstance(drafter, Model)
    assert drafter.model.num_streams == 2
