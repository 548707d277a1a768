"""What is wrong with a model folder is said in one line before anything is made of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import models
from transformers import AutoConfig

from paceline.errors import ModelError
from paceline.target.load import load


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    models.make("llama2", folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | entries))


def told(folder: Path) -> str:
    """What `load` says, in one line of an ordinary length."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(folder)) + 300
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 0),
        ("max_position_embeddings", 10**13),
        ("max_position_embeddings", "2048"),
        ("hidden_size", 2.5),
        ("vocab_size", -5),
        ("rope_theta", "10000"),
        ("rope_theta", None),
        ("rope_theta", -1.0),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "10000"}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": None}),
        ("rope_parameters", []),
    ],
    ids=str,
)
def test_a_number_of_the_configuration(folder: Path, key: str, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    if key == "rope_theta":
        config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    line = told(folder)
    assert line.startswith(str(folder / "config.json"))
    assert "rope_theta" in line if key == "rope_parameters" and value else key in line


@pytest.mark.parametrize("ids", ["2", [2, "3"], [2, None], [[2]], {"a": 2}, -1, 2.0, True], ids=str)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_tokens(folder: Path, name: str, ids: Any) -> None:
    edit(folder / name, eos_token_id=ids)
    line = told(folder)
    assert name in line
    assert "eos_token_id" in line


def test_weights_that_are_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert told(folder).endswith("model.safetensors cannot be read as weights: it is a folder")


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _to_int8(weights: dict[str, torch.Tensor]) -> None:
    key = next(key for key in weights if "down_proj" in key)
    weights[key] = (weights[key] * 100).to(torch.int8)


def test_weights_of_eight_bits(folder: Path) -> None:
    _rewrite(folder, _to_int8)
    line = told(folder)
    assert "down_proj.weight holds I8 numbers" in line
    assert "quantized" in line


def test_a_layer_fewer_than_the_weights(folder: Path) -> None:
    layers = AutoConfig.from_pretrained(folder).num_hidden_layers
    edit(folder / "config.json", num_hidden_layers=layers - 1)
    assert f"has weights of {layers} layers, and its config.json asks for {layers - 1}" in told(folder)


def test_transformers_models_are_checked_as_well(folder: Path) -> None:
    layers = AutoConfig.from_pretrained(folder).num_hidden_layers
    edit(folder / "config.json", num_hidden_layers=layers - 1)
    with pytest.raises(ModelError, match=f"has weights of {layers} layers"):
        load(folder, native=False)
    edit(folder / "config.json", num_hidden_layers=layers)
    _rewrite(folder, _to_int8)
    with pytest.raises(ModelError, match="holds I8 numbers"):
        load(folder, native=False)
