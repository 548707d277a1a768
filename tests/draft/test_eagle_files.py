"""Which files `eagle` and `eagle3` read: those that others publish, written here by hand; and what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.formats.heads.layout import Layout, layer_config
from tests import models, native
from tests.draft.eagles import bound, d2t_of, described, eagle1, eagle3, said, speculators, write


@pytest.fixture(scope="module")
def model():
    return models.model("llama2", num_hidden_layers=8, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def target(model):
    return native.of(model)


def refusal(path, target, method="eagle3"):
    with pytest.raises(MethodError) as caught:
        bound(path, target, method)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Layouts --------------------------------------------------------------------------------------------------------------


def test_pickled_weights_are_read_where_they_are_named(model, target, tmp_path):
    tensors = eagle1(model)
    safe = write(tmp_path / "safe", described(model), tensors)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(described(model)))
    torch.save(tensors | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}, pickled / "pytorch_model.bin")
    message = refusal(pickled, target, "eagle")
    assert f"read only where it is named, eagle:{pickled / 'pytorch_model.bin'}" in message
    by_name = bound(pickled / "pytorch_model.bin", target, "eagle")
    torch.testing.assert_close(said(by_name), said(bound(safe, target, "eagle")), atol=0, rtol=0)
    torch.save({"fc.weight": print}, pickled / "pytorch_model.bin")
    assert "holds more than tensors" in refusal(pickled / "pytorch_model.bin", target, "eagle")
    (pickled / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut off")
    assert "cut off or damaged" in refusal(pickled / "pytorch_model.bin", target, "eagle")


def test_weights_in_shards_are_read_or_what_is_missing_is_named(model, target, tmp_path):
    tensors = eagle1(model)
    whole = write(tmp_path / "whole", described(model), tensors)
    shards, files = tmp_path / "shards", {name: f"model-{n % 2 + 1}-of-2.safetensors" for n, name in enumerate(tensors)}
    shards.mkdir()
    (shards / "config.json").write_text(json.dumps(described(model)))
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        save_file({name: tensors[name].contiguous() for name in tensors if files[name] == file}, shards / file)
    torch.testing.assert_close(
        said(bound(shards, target, "eagle")), said(bound(whole, target, "eagle")), atol=0, rtol=0
    )
    (shards / "model-2-of-2.safetensors").unlink()
    assert "lacks model-2-of-2.safetensors, 1 of the 2 files with its weights" in refusal(shards, target, "eagle")


def test_of_entries_in_groups_the_last_holds(target):
    """And where nothing says how many heads have keys, all have."""
    layout = Layout("eagle", groups=("first", "second"))
    groups = {"first": {"a": 2, "b": 2}, "second": {"a": 3}, "transformer_layer_config": {"a": 0, "b": 0, "c": 0}}
    given, _ = layout.read("head", {"a": 1, "b": 1, "c": 1, "d": 1, **groups}, {})
    assert [given[name] for name in "abcd"] == [3, 2, 1, 1]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 99}
    assert layer_config("head", sizes, {}, target).num_key_value_heads == 4


def test_a_missing_rope_theta_is_ten_thousand(model, tmp_path):
    """Whatever the target's is; top level, nested and missing."""
    far = models.model("llama2", num_hidden_layers=8, tie_word_embeddings=False, rope_parameters={
        "rope_type": "default", "rope_theta": 500000.0})  # fmt: skip
    target = native.of(far)
    forms = {
        "missing": {},
        "flat": {"rope_theta": 10000.0},
        "nested": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        "other": {"rope_theta": 500000.0},
        "other nested": {"rope_parameters": {"rope_theta": 500000.0}},
    }
    logits = {}
    for name, entries in forms.items():
        folder = write(tmp_path / name, described(far, **entries), eagle1(far))
        logits[name] = said(bound(folder, target, "eagle"))
    for same in ("flat", "nested"):
        torch.testing.assert_close(logits[same], logits["missing"], atol=0, rtol=0)
    torch.testing.assert_close(logits["other"], logits["other nested"], atol=0, rtol=0)
    assert (logits["other"] - logits["missing"]).abs().max() > 1e-3


def test_a_head_of_another_width_brings_its_embedding(model, target, tmp_path):
    wide, narrow = model.config.hidden_size, 48
    small = models.model("llama2", hidden_size=narrow, tie_word_embeddings=False)
    tensors = eagle3(small) | {"fc.weight": torch.randn(narrow, 3 * wide) * 0.1}
    config = described(small, draft_vocab_size=len(d2t_of(small)[0]), target_hidden_size=wide)
    assert "needs an embedding of its own" in refusal(write(tmp_path / "a", config, tensors), target)
    tensors["embed_tokens.weight"] = torch.randn(models.VOCAB_SIZE, narrow)
    drafter = bound(write(tmp_path / "b", config, tensors), target)
    assert drafter.model.network.table.shape == (models.VOCAB_SIZE, narrow)
    assert said(drafter).isfinite().all()


def test_only_tokens_of_a_heads_own_vocabulary_are_drafted(model, target, tmp_path):
    path = write(tmp_path, described(model, draft_vocab_size=len(d2t_of(model)[0])), eagle3(model))
    drafter, drafted = bound(path, target), set[int]()
    observe = drafter.observe

    def watched(round):
        drafted.update(*(tree.tokens[1:].tolist() for tree in round.trees))
        observe(round)

    drafter.observe = watched
    Engine(target, drafter).generate([[5, 6, 7]], SamplingParams(max_tokens=16, ignore_eos=True))
    assert drafter.model.columns is not None
    assert set() < drafted <= set(drafter.model.columns.tolist())


# Refusals -------------------------------------------------------------------------------------------------------------


def test_every_key_is_used_or_the_load_is_refused(model, target, tmp_path):
    good = eagle1(model)
    extra = good | {"embedding_layernorm.weight": torch.ones(64), "pre_lm_head_layernorm.weight": torch.ones(64)}
    message = refusal(write(tmp_path / "extra", described(model), extra), target, "eagle")
    assert "has embedding_layernorm.weight, pre_lm_head_layernorm.weight, which nothing here reads" in message
    message = refusal(write(tmp_path / "v3", described(model), good), target, "eagle3")
    assert "has no layers.0.hidden_norm.weight, layers.0.input_layernorm.weight, norm.weight" in message


def test_heads_for_another_target_are_refused_in_one_line(model, target, tmp_path):
    small = models.model("llama2", hidden_size=48, tie_word_embeddings=False)
    message = refusal(write(tmp_path / "size", described(small), eagle1(small)), target, "eagle")
    assert "reads states of 48 numbers, and those of decoder have 64" in message
    message = refusal(write(tmp_path / "size3", described(small), eagle3(small)), target, "eagle3")
    assert "reads states of 48 numbers, and those of decoder have 64" in message
    other = eagle1(model) | {"embed_tokens.weight": torch.zeros(models.VOCAB_SIZE, 64)}
    message = refusal(write(tmp_path / "table", described(model), other), target, "eagle")
    assert "brings another embedding than the target's" in message
    large = speculators(model, eagle_aux_hidden_state_layer_ids=[2, 16, 29])
    message = refusal(write(tmp_path / "taps", large, eagle3(model, prefix="layers.0.")), target)
    assert "reads the inputs of layers 2, 16, 29, and decoder has layers 0 to 7" in message
    far = eagle3(model, prefix="layers.0.")
    far["d2t"] = far["d2t"] + 200
    del far["t2d"]
    assert "it is a head for another target" in refusal(write(tmp_path / "ids", speculators(model), far), target)
    crossed = eagle3(model, prefix="layers.0.")
    crossed["t2d"] = crossed["t2d"].flip(0)
    assert "d2t and t2d disagree" in refusal(write(tmp_path / "crossed", speculators(model), crossed), target)


def test_what_is_no_head_is_refused_in_one_line(model, target, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(tmp_path / "empty", target)
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "has no model.safetensors" in refusal(tmp_path / "empty", target)
    save_file({"x": torch.zeros(1)}, tmp_path / "empty" / "model.safetensors")
    assert "does not say hidden_size, intermediate_size" in refusal(tmp_path / "empty", target)
    folder = write(tmp_path / "gelu", described(model, hidden_act="gelu"), eagle1(model))
    assert "activation 'gelu' is not one of silu" in refusal(folder, target, "eagle")
