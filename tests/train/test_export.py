"""Medusa heads in vLLM's layout: by the names and words that vLLM reads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.cli import main
from paceline.errors import PacelineError
from paceline.target.load import load
from paceline.train.export import export_medusa
from tests import models


def medusa(folder, width=64, own=False):
    """Three heads of two blocks, as their authors publish them."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for head in range(3):
        for block in range(2):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(width, width, generator=generator)
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(width, generator=generator)
        if own:
            tensors[f"{head}.2.weight"] = torch.randn(models.VOCAB_SIZE, width, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2}))
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_the_targets_head_comes_along(tmp_path, tied):
    target = models.make("llama2", tmp_path / "target", tie_word_embeddings=tied)
    words = ["export", "vllm", str(medusa(tmp_path / "heads")), str(target), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    tensors, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "heads/model.safetensors")
    opened = load(target, dtype="float32")
    assert torch.equal(tensors.pop("lm_head.weight"), opened.head.dense())
    assert {name: t.tolist() for name, t in tensors.items()} == {
        f"blocks.{name.split('.')[0]}.layers.{name.split('.')[1]}.{name.split('.')[3]}": t.tolist()
        for name, t in before.items()
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["num_heads"], config["num_hidden_layers"]) == ("medusa", 3, 2)
    assert (config["original_lm_head"], config["medusa_fc_bias"], config["vocab_size"]) == (True, True, 320)


def test_heads_with_output_heads_keep_them(tmp_path):
    target = models.make("llama2", tmp_path / "target")
    export_medusa(medusa(tmp_path / "heads", own=True), target, tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {f"lm_heads.{k}.weight" for k in range(3)} <= names
    assert "lm_head.weight" not in names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["original_lm_head"] is False


def test_what_is_not_medusa_is_refused_in_one_line(tmp_path):
    target = models.make("llama2", tmp_path / "target")
    with pytest.raises(PacelineError, match=r"reads states of 48 numbers, and those of .* have 64"):
        export_medusa(medusa(tmp_path / "narrow", width=48), target, tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    save_file({"fc.weight": torch.zeros(2)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(PacelineError, match=r"holds no Medusa heads in the authors' layout: fc\.weight"):
        export_medusa(tmp_path / "other", target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
