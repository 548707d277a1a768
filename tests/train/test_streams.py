"""Streams of a draft model: what their loss is, whom they see, and that what is written drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from paceline.draft.model import Model
from paceline.draft.neural.streams import FILE
from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.train.__main__ import app
from paceline.train.loss import IGNORE
from paceline.train.streams import StreamsLoss, later, measure, seen
from tests import models
from tests.train.test_s2d import SMALL, answers

COUNT, LAYERS, RANK = 2, 2, 4


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [3, 12]; some of the labels are not learnt."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, 288, (3, 13)))
    labels = ids[:, 1:].clone()
    labels[:, :2], labels[1, 6] = IGNORE, IGNORE
    return ids[:, :-1], labels


def made(keep: bool = False) -> StreamsLoss:
    """Streams that say something else than their token."""
    torch.manual_seed(0)
    module = StreamsLoss(models.model("llama2", **SMALL), COUNT, LAYERS, RANK, keep)
    with torch.no_grad():
        module.up.normal_(std=0.3)
        module.embedding.normal_()
    return module


def test_the_loss_is_the_weighted_sum_of_what_each_stream_is_to_say() -> None:
    module, (ids, labels) = made(), batch()
    logits = module.draft.lm_head(module.states(ids))
    expected = torch.zeros(())
    for j in range(COUNT + 1):
        expected = expected + 0.5**j * cross_entropy(logits[:, j].flatten(0, 1), later(labels, j).flatten())
    torch.testing.assert_close(module(ids, labels), expected)


def test_a_token_is_the_draft_models_own() -> None:
    """Main states are those of the model without streams; later tokens change nothing before them, nor in streams."""
    module, (ids, _) = made(), batch()
    states = module.states(ids)
    plain = module.draft.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(states[:, 0], plain, atol=1e-4, rtol=1e-4)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 280
    torch.testing.assert_close(module.states(changed)[:, :, :7], states[:, :, :7], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(states[:, 1], states[:, 0], atol=0.1)


def test_who_sees_whom() -> None:
    mask = seen(3, 2)
    rows = {(0, 1): {(0, 0), (0, 1)}, (1, 1): {(0, 0), (0, 1), (1, 1)}, (2, 0): {(0, 0), (1, 0), (2, 0)}}
    for (kind, place), others in rows.items():
        found = {divmod(i, 3) for i in mask[3 * kind + place].nonzero().flatten().tolist()}
        assert found == others


def test_only_what_the_target_wrote_in_one_piece_is_learnt() -> None:
    labels = torch.tensor([[5, 6, IGNORE, 7, 8, 9]])
    assert later(labels, 1).tolist() == [[6, IGNORE, IGNORE, 8, 9, IGNORE]]
    assert later(labels, 2).tolist() == [[IGNORE, IGNORE, IGNORE, 9, IGNORE, IGNORE]]


def test_with_keep_the_draft_learns_nothing() -> None:
    module = made(keep=True)
    assert {name for name, _ in module.named_parameters()} == {"down", "up", "embedding"}
    module(*batch()).backward()
    assert module.embedding.grad is not None
    assert module.draft.lm_head.weight.grad is None


def test_how_well_streams_foresee_their_own_model() -> None:
    """A stream is measured against what the model itself says at that place."""
    module, (ids, labels) = made(), batch()
    held = {"made": (ids.numpy(), labels.numpy())}
    fits = measure(module, held, batch=2)
    logits = module.draft.lm_head(module.states(ids)).detach()
    kept = later(labels, 2)[:, :-2] != IGNORE
    right = logits[:, 0, 2:].argmax(-1)[kept] == logits[:, 2, :-2].argmax(-1)[kept]
    assert fits[1]["top1"] == pytest.approx(float(right.float().mean()))
    assert all(0 < fit["overlap"] < 1 for fit in fits)


@pytest.fixture
def _fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.mark.usefixtures("_fresh_accelerator")
def test_the_command_writes_a_draft_that_says_several_tokens_a_forward(tmp_path: Path) -> None:
    target = models.make("llama2", tmp_path / "target", **SMALL)
    draft = models.make("llama2", tmp_path / "draft", **SMALL | {"num_hidden_layers": 2})
    data, out = answers(tmp_path / "mine.jsonl"), tmp_path / "streams"

    def run(*options: str, draft: Path = draft):
        where = ["--data", str(data), "--out", str(out), "--checkpoints", str(tmp_path / "run")]
        return CliRunner().invoke(app, ["streams", str(target), "--draft", str(draft), *where, *options])

    narrow = models.make("llama2", tmp_path / "narrow", **SMALL | {"vocab_size": 288})
    for options, of, says in (
        (["--tokens", "64", "--layers", "9"], draft, "--layers is 9"),
        (["--tokens", "64"], narrow, "has 288 tokens"),
    ):
        error = run(*options, draft=of).exception
        assert isinstance(error, PacelineError)
        assert says in str(error)
        assert not out.exists()
    done = run("--tokens", "6400", "--length", "32", "--rows", "4", "--lr", "0.01")
    assert done.exit_code == 0, done.output
    assert "stream 2" in done.output
    config = json.loads((out / "config.json").read_text())
    fits = config["streams"]["fit"]
    assert config["streams"]["layers"] == 1
    assert min(fit["top1"] for fit in fits) > 0.06, "one of 36 by chance"
    assert load_file(out / FILE)["embedding"].shape == (2, 32)
    AutoModelForCausalLM.from_pretrained(out)  # a model for others, too

    prompts, params = [[5, 6, 7], [8], [30] * 9], SamplingParams(max_tokens=12)
    engines = [Engine(target, spec, dtype="float32", device="cpu") for spec in ("none", f"model:{out},streams=2")]
    plain, drafted = ([d.tokens for d in e.generate(prompts, params)] for e in engines)
    assert drafted == plain
    assert isinstance(engines[1].drafter, Model)
    assert engines[1].drafter.num_streams == 2
