"""LoRA adapters are merged as peft merges them, into folders, blocks and GGUF files, or refused in one line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import gguf_files, models
from transformers import AutoModelForCausalLM

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.engine.engine import Engine
from paceline.errors import ModelError
from paceline.formats.adapter import CONFIG, WEIGHTS, Adapter
from paceline.plugins import to_gguf
from paceline.target.load import load, load_tokenizer, quantise_folder

TEXT = [5, 17, 9, 40, 22, 31, 8, 13]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return models.make("llama2", tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def adapter(base, tmp_path):
    return made(base, tmp_path / "adapter")


def made(base, folder, **changes):
    """Write a random adapter with peft."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    network = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**config))
    for name, parameter in network.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    network.save_pretrained(folder)
    return folder


def merged(base, adapter):
    """The logits after TEXT of the model that peft merges, [T, V]."""
    from peft import PeftModel

    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    with torch.no_grad():
        logits = network(torch.tensor([TEXT])).logits[0]
    return logits


def logits(target):
    slot = target.add_row(len(TEXT))
    return target.verify([Segment.chunk(slot, np.array(TEXT), last=False, scored=len(TEXT))]).logits.float()


def said(model, **options):
    return logits(load(model, **options))


def is_near(logits, expected, base):
    """Whether rounding moved the logits, and not a change that is missing."""
    effect = (said(base, dtype="float32") - expected).abs().mean()
    return bool((logits - expected).abs().mean() < 0.2 * effect)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}},
        {"target_modules": ["q_proj", "down_proj", "lm_head"]},
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
    ],
)
def test_it_is_merged_as_peft_merges_it(changes, base, tmp_path):
    folder = made(base, tmp_path / "adapter", **changes)
    expected = merged(base, folder)
    assert (said(folder, dtype="float32") - expected).abs().max() < 1e-4
    assert (said(base, dtype="float32") - expected).abs().max() > 0.05


@pytest.mark.parametrize(
    "changes",
    [
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_tied_embeddings_change_as_peft_changes_them(changes, tmp_path):
    base = models.make("smollm", tmp_path / "base")
    folder = made(base, tmp_path / "adapter", target_modules=["v_proj"], **changes)
    assert (said(folder, dtype="float32") - merged(base, folder)).abs().max() < 1e-4


def test_a_matrix_that_it_brings_along_is_the_one_that_it_changes():
    """As of an output head that was the embedding: peft writes what the head was."""
    down, up, own = torch.randn(2, 5), torch.randn(3, 2), torch.randn(3, 5)
    made = Adapter(Path("adapter"), "base", {"lora_alpha": 4})
    parts = {"lora_A": down, "lora_B": up, "base_layer": own}
    vars(made)["tensors"] = {f"a.{part}.weight": tensor for part, tensor in parts.items()}
    torch.testing.assert_close(made.merged({"a.weight": torch.zeros(3, 5)})["a.weight"], own + 2 * up @ down)


def test_a_tied_head_changes_as_in_training_and_its_embedding_stays(tmp_path):
    base = models.make("smollm", tmp_path / "base")
    folder = made(base, tmp_path / "adapter", target_modules=["v_proj", "lm_head"])
    from peft import PeftModel

    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    with torch.no_grad():  # peft's merge would change the embedding, too
        expected = network(torch.tensor([TEXT])).logits[0]
    assert (said(folder, dtype="float32") - expected).abs().max() < 1e-4


def test_a_head_in_blocks_that_was_tied_changes_alone(tmp_path):
    base = models.make("smollm", tmp_path / "base")
    folder = made(base, tmp_path / "adapter", target_modules=["v_proj"], modules_to_save=["lm_head"])
    expected = merged(base, folder)
    quantise_folder(base, tmp_path / "int8", "int8")
    entry(base_model_name_or_path="../int8")(folder)
    assert is_near(said(folder, dtype="auto-float32"), expected, base)


def test_drafts_stay_lossless_and_it_is_another_model(adapter, base):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = [
        Engine(model, draft, dtype="float32").generate([TEXT], params)[0].tokens
        for model, draft in ((adapter, "none"), (adapter, "suffix"), (base, "none"))
    ]
    assert texts[0] == texts[1] != texts[2]
    one, other = load(adapter), load(base)
    assert (one.name, one.folder) == ("adapter", adapter)
    assert one.weights_fingerprint != other.weights_fingerprint
    assert one.tokenizer is not None


def test_the_base_may_lie_beside_it_and_be_a_file_or_in_blocks(base, adapter, tmp_path):
    expected = merged(base, adapter)
    to_gguf.write(base, tmp_path / "base.gguf")
    quantise_folder(base, tmp_path / "int8", "int8")
    for name in ("base.gguf", "int8"):
        config = json.loads((adapter / CONFIG).read_text())
        (adapter / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": f"../{name}"}))
        assert is_near(said(adapter, dtype="auto-float32", native=True), expected, base), name
    notes = load(adapter, dtype="auto-float32").notes
    assert any(re.search(r"\d+ weights of .*int8 have the changes", note) for note in notes)


def test_a_hybrid_in_a_file_has_its_value_heads_in_another_order(tmp_path):
    base = models.make("qwen3.5", tmp_path / "base")
    gguf_files.write(base, tmp_path / "base.gguf")
    for modules, refused in ((["q_proj", "down_proj"], False), (["out_proj"], True)):
        folder = made(base, tmp_path / modules[0], target_modules=modules)
        expected, config = merged(base, folder), json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "../base.gguf"}))
        if refused:
            with pytest.raises(ModelError, match="changes layers with a state"):
                load(folder)
        else:
            torch.testing.assert_close(said(folder, dtype="float32"), expected, atol=1e-4, rtol=1e-4)


def test_it_can_be_quantised(base, adapter, tmp_path):
    quantise_folder(adapter, tmp_path / "int8", "int8")
    assert is_near(said(tmp_path / "int8"), merged(base, adapter), base)
    assert load(tmp_path / "int8").tokenizer is not None
    assert load_tokenizer(adapter).fingerprint == load_tokenizer(base).fingerprint, "an adapter without one of its own"
    words = models.tokenizer(276)
    words.save_pretrained(adapter)
    quantise_folder(adapter, tmp_path / "other", "int8")
    assert load_tokenizer(tmp_path / "other").fingerprint == load_tokenizer(adapter).fingerprint
    assert not (tmp_path / "other" / CONFIG).exists()


def test_an_adapter_of_the_first_layers_is_not_quantised_as_the_whole_model(base, adapter, tmp_path):
    few = json.loads((base / "config.json").read_text()) | {"num_hidden_layers": 2}
    (adapter / "config.json").write_text(json.dumps(few))
    tensors(lambda every: [every.pop(name) for name in [*every] if ".layers.2." in name])(adapter)
    assert load(adapter).num_layers == 2
    with pytest.raises(ModelError, match="adapter cannot be quantised: it is an adapter of a model's first layers"):
        quantise_folder(adapter, tmp_path / "int8", "int8")


def entry(**changes):
    def change(folder):
        config = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps(config))

    return change


def beside(**changes):
    """Write the base's config.json beside the adapter, with changes."""

    def change(folder):
        base = Path(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"])
        (folder / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | changes))

    return change


def tensors(change):
    def changed(folder):
        every = load_file(folder / WEIGHTS)
        change(every)
        save_file(every, folder / WEIGHTS)

    return changed


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def rank_0():
    return {Q.format("A"): torch.ones(0, 64), Q.format("B"): torch.ones(64, 0)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (entry(peft_type="IA3"), "of type IA3"),
        (entry(use_dora=True), "use_dora"),
        (entry(bias="all"), "has bias"),
        (entry(init_lora_weights="pissa_niter_4"), "changed its base model"),
        (entry(lora_alpha="much"), "are numbers"),
        (entry(lora_alpha=float("nan")), "are numbers"),
        (entry(alpha_pattern={"(": 3}), "are numbers"),
        (entry(alpha_pattern=[3]), "are numbers"),
        (entry(base_model_name_or_path="../adapter"), "a whole model is needed"),
        (entry(base_model_name_or_path=None), "names no base model"),
        (entry(base_model_name_or_path="./nowhere"), "there is no folder nowhere"),
        (lambda folder: (folder / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
        (tensors(dict.clear), "it has no changes"),
        (beside(num_hidden_layers=9), "lacks model.layers.3."),
        (beside(hidden_size=128), "asks for [320, 128]"),
        (beside(model_type="gpt2"), "the native decoder cannot run it"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"cut"), "cut off or damaged"),
        (tensors(lambda every: every.pop(Q.format("B"))), "q_proj.weight is incomplete"),
        (tensors(lambda every: every.update({Q.format("A"): torch.ones(0, 64)})), "of another shape"),
        (tensors(lambda every: every.update(rank_0())), "of another shape"),
        (tensors(lambda every: every.update({Q.format("B"): torch.zeros(3, 4)})), "of another shape"),
        (tensors(lambda every: every.update({"base_model.model.model.norm.weight": torch.ones(3)})), "has shape [3]"),
        (tensors(lambda every: every.update({"base_model.model.more.weight": torch.ones(3)})), "which"),
    ],
)
def test_what_cannot_be_merged_is_refused(change, words, adapter):
    change(adapter)
    with pytest.raises(ModelError) as caught:
        load(adapter)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_family_of_transformers_is_refused(adapter):
    with pytest.raises(ModelError, match="only the native decoder merges adapters"):
        load(adapter, native=False)
