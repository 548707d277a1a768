"""Checkpoints of drafters: what is written comes back, and what does not fit is refused by name, in one line."""

import json
import os
from dataclasses import replace

import pytest
import torch
from tests import models, native
from tests.fakes import TableTarget

from paceline.errors import MethodError
from paceline.formats.heads.checkpoint import CONFIG, WEIGHTS, TargetFacts, check_target, open_drafter
from paceline.formats.precision import quantised
from paceline.target.load import load, load_tokenizer
from paceline.train.saving import save_drafter

TENSORS = {"adapter.weight": torch.randn(3, 4), "norm": torch.randn(4).bfloat16(), "ids": torch.arange(5)}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = models.make("llama2", tmp_path_factory.mktemp("models") / "mine")
    made = load(folder)
    made.tokenizer = load_tokenizer(folder)
    return made


@pytest.fixture
def saved(tmp_path, target):
    out = tmp_path / "drafter"
    save_drafter(out, "demo", config={"exit": 2, "data": ["a"]}, tensors=TENSORS, target=TargetFacts.of(target))
    return out


def refusal(*args, **kw):
    with pytest.raises(MethodError) as caught:
        open_drafter(*args, **kw)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_was_saved_comes_back(saved, target):
    config, tensors = open_drafter(saved, "demo", target)
    assert config["exit"] == 2
    assert config["data"] == ["a"]
    assert config["target"]["name"] == "mine"
    assert config["target"]["hidden_size"] == 64
    assert config["target"]["tokenizer_fingerprint"] == target.tokenizer.fingerprint
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert sorted(p.name for p in saved.iterdir()) == [CONFIG, WEIGHTS]


def test_a_kill_while_saving_leaves_no_mixture(saved, target, monkeypatch):
    def killed(source, to):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(saved, "demo", config={}, tensors={"norm": torch.ones(2)}, target=TargetFacts.of(target))
    monkeypatch.undo()
    assert "has no config.json" in refusal(saved, "demo", target)
    save_drafter(saved, "demo", config={}, tensors={"norm": torch.ones(2)}, target=TargetFacts.of(target))
    assert list(open_drafter(saved, "demo", target)[1]) == ["norm"]
    assert sorted(p.name for p in saved.iterdir()) == [CONFIG, WEIGHTS]


def test_what_is_not_a_drafter_is_refused(saved, target, tmp_path):
    assert "there is no folder" in refusal(tmp_path / "draftr", "demo", target)
    assert "Did you mean 'drafter'?" in refusal(tmp_path / "draftr", "demo", target)
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(tmp_path / "empty", "demo", target)
    model = models.make("llama2", tmp_path / "model")
    assert "is a model and no drafter of kind demo" in refusal(model, "demo", target)
    assert "holds a drafter of kind demo where other is wanted" in refusal(saved, "other", target)
    (saved / CONFIG).write_text("[1, 2")
    assert "cannot be read" in refusal(saved, "demo", target)
    (saved / CONFIG).write_text('{"paceline_drafter": "demo"}')
    assert "does not say which target" in refusal(saved, "demo", target)


@pytest.mark.parametrize("version", ["99.0", "1.0.0", "0.99.1", "new", 7, [1]])
def test_a_later_version_is_refused(saved, target, version):
    config = json.loads((saved / CONFIG).read_text())
    (saved / CONFIG).write_text(json.dumps(config | {"paceline": version}))
    assert "paceline" in refusal(saved, "demo", target)
    (saved / CONFIG).write_text(json.dumps(config | {"paceline": "0.0.9"}))
    open_drafter(saved, "demo", target)


def test_cut_off_weights_are_refused(saved, target):
    whole = (saved / WEIGHTS).read_bytes()
    for length in (0, 7, len(whole) // 2, len(whole) - 1):
        (saved / WEIGHTS).write_bytes(whole[:length])
        assert "cut off or damaged" in refusal(saved, "demo", target)
    (saved / WEIGHTS).unlink()
    assert f"has no {WEIGHTS}" in refusal(saved, "demo", target)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_size": 32}, "hidden size 32 there, 64 here"),
        ({"num_layers": 9}, "num layers 9 there, 3 here"),
        ({"vocab_size": 999}, "vocab size 999 there, 320 here"),
        ({"tokenizer_fingerprint": "0" * 16}, "different tokenizers"),
        ({"weights_fingerprint": "0" * 16}, "same shape, other weights"),
    ],
)
def test_another_target_is_refused_by_both_names(tmp_path, target, change, why):
    facts = replace(TargetFacts.of(target), name="theirs", **change)
    save_drafter(tmp_path / "d", "demo", config={}, tensors=TENSORS, target=facts)
    message = refusal(tmp_path / "d", "demo", target)
    assert "was trained for theirs, not for mine" in message
    assert why in message
    if "tokenizer_fingerprint" in change:
        with pytest.raises(MethodError, match=why):
            check_target(tmp_path / "d", facts, target, any_target=True)
    else:
        check_target(tmp_path / "d", facts, target, any_target=True)
    open_drafter(tmp_path / "d", "demo", None)


def test_without_a_tokenizer_the_vocabulary_has_to_do(tmp_path):
    facts = TargetFacts.of(TableTarget(vocab_size=8))
    assert (facts.tokenizer_fingerprint, facts.weights_fingerprint) == ("", "")
    check_target(tmp_path, facts, TableTarget(vocab_size=8))
    with pytest.raises(MethodError, match="8 tokens there, 9 here"):
        check_target(tmp_path, facts, TableTarget(vocab_size=9), any_target=True)


@pytest.mark.parametrize("family", ["llama2", "qwen2-tied"])
def test_weights_are_known_by_what_they_are_not_by_how_they_are_held(tmp_path, family):
    folder = models.make(family, tmp_path / "a")
    one = TargetFacts.of(load(folder)).weights_fingerprint
    assert len(one) == 16
    assert TargetFacts.of(load(folder, dtype="bfloat16")).weights_fingerprint == one
    assert TargetFacts.of(native.of(models.model(family))).weights_fingerprint == one
    tuned = models.model(family)
    with torch.no_grad():  # what merging a small adapter would do
        tuned.model.layers[2].self_attn.q_proj.weight *= 1.02
    assert TargetFacts.of(native.of(tuned)).weights_fingerprint != one


def test_matrices_in_blocks_come_back_as_numbers(tmp_path, target):
    weights = {"wide.weight": torch.randn(48, 64), "narrow.weight": torch.randn(8, 12), "bias": torch.ones(3)}
    facts = TargetFacts.of(target)
    save_drafter(tmp_path / "d", "demo", config={}, tensors=quantised(weights, "int8"), target=facts)
    _, tensors = open_drafter(tmp_path / "d", "demo", target)
    assert tensors.keys() == weights.keys()
    assert tensors["wide.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(tensors["wide.weight"].float(), weights["wide.weight"], atol=0.03, rtol=0.01)
    assert torch.equal(tensors["narrow.weight"], weights["narrow.weight"])
    config = json.loads((tmp_path / "d" / CONFIG).read_text())
    assert config["blocks"] == {"wide.weight": "Q8_0"}
    for wrong in ({"wide.weight": "Q9"}, {"other.weight": "Q8_0"}):
        (tmp_path / "d" / CONFIG).write_text(json.dumps(config | {"blocks": wrong}))
        assert "disagree about blocks" in refusal(tmp_path / "d", "demo", target)
