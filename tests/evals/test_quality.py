"""`paceline quality`: figures against their definitions, and what is said where they cannot be had."""

import json
from math import exp

import numpy as np
import pytest
import torch

from paceline.cli import main
from paceline.errors import ModelError
from paceline.evals.quality import WINDOW, compare
from paceline.target.load import load
from tests import models

LONG = {"max_position_embeddings": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.make("llama2", tmp_path_factory.mktemp("models") / "tiny", **LONG)


@pytest.fixture(scope="module")
def measured(folder):
    tokens = np.random.default_rng(0).integers(4, 280, 3 * WINDOW + 5)
    return compare(load(folder, dtype="int8"), load(folder, dtype="float32"), tokens.tolist())


def test_figures_are_those_of_transformers(folder, measured):
    """Of the reference, by its own loss; of the other by that of its weights, dequantised."""
    from transformers import AutoModelForCausalLM

    tokens = torch.from_numpy(np.random.default_rng(0).integers(4, 280, 3 * WINDOW)).view(3, WINDOW)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        loss = float(model(tokens, labels=tokens).loss)
    assert measured.of_reference == pytest.approx(exp(loss), rel=1e-4)
    assert measured.perplexity == pytest.approx(measured.of_reference * exp(measured.loss), rel=0.05)
    assert measured.tokens == 3 * (WINDOW - 1)
    assert 0 < measured.kl < 0.1
    assert 0.8 < measured.top1 < 1
    assert 0 < measured.top1_error < 0.1


def test_a_model_beside_itself_has_lost_nothing(folder):
    model = load(folder, dtype="float32")
    same = compare(model, model, list(range(4, 260)) * 3)
    assert (same.loss, same.top1) == (0, 1)
    assert abs(same.kl) < 1e-6


def test_four_bits_lose_more_than_eight(folder, measured):
    tokens = np.random.default_rng(0).integers(4, 280, 3 * WINDOW).tolist()
    four = compare(load(folder, dtype="int4"), load(folder, dtype="float32"), tokens)
    assert four.kl > 2 * measured.kl
    assert four.top1 < measured.top1


def test_what_cannot_be_compared(folder, tmp_path):
    model = load(folder)
    with pytest.raises(ModelError, match="512 are the least"):
        compare(model, model, [5] * 500)
    other = load(models.make("llama2", tmp_path / "other", vocab_size=400, **LONG))
    with pytest.raises(ModelError, match="320 tokens and other 400"):
        compare(model, other, [5] * 600)


def test_the_command_and_what_it_keeps(folder, tmp_path, capsys):
    text, made = tmp_path / "text.txt", tmp_path / "made"
    (tmp_path / "m.gguf").touch()
    text.write_text("the cat and the little dog sat on the mat and said: hello. " * 60)
    assert main(["quantize", str(folder), str(made)]) == 0
    assert main(["quality", str(made), "--against", str(folder), "--text", str(text), "--save"]) == 0
    out = capsys.readouterr().out
    assert "same top token" in out
    kept = json.loads((made / "quality.json").read_text())
    assert kept["against"] == "tiny"
    assert any(kept["sentence"] in note for note in load(made).notes)
    for wrong, says in (
        (["quality", str(folder), "--text", str(text)], "--against or --dtype"),
        (["quality", str(folder), "--dtype", "int8", "--text", str(tmp_path / "absent")], "cannot be read"),
        (
            ["quality", str(tmp_path / "m.gguf"), "--dtype", "int8", "--text", str(text), "--save"],
            "--save writes into a model's folder",
        ),
    ):
        assert main(wrong) == 2
        assert says in capsys.readouterr().err
