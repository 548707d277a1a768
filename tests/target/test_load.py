"""From a name or a folder to a target, and every way a folder can be wrong: one clear line each."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests import models
from tests.native import off

from paceline.core.segment import Segment
from paceline.engine.engine import Engine
from paceline.errors import ModelError, PromptError
from paceline.formats.folder import INDEX
from paceline.plugins import to_gguf
from paceline.rollout.policy import Policy
from paceline.target import load as module
from paceline.target.decoder import Decoder
from paceline.target.hf import HFTarget
from paceline.target.load import load, load_tokenizer, quantise_folder


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return models.make("llama2", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(good, tmp_path):
    """A model folder to spoil."""
    return Path(shutil.copytree(good, tmp_path / "tiny"))


def logits(target):
    slot = target.add_row(8)
    return target.verify([Segment.chunk(slot, np.arange(4, 12), last=True)]).logits.float()


def test_a_native_model_imports_what_it_needs_alone_and_before_it_answers(good):
    parts = ("draft.text.suffix_array", "target.graphs", "target.hf", "kernels.integer", "formats.gguf",
             "formats.gguf_file", "formats.gguf_tokenizer")  # fmt: skip
    unneeded = [f"paceline.{part}" for part in parts]
    assert all(map(find_spec, unneeded))
    code = f"""
import sys
from paceline.engine.engine import Engine
engine = Engine({str(good)!r}, draft="sam", device="cpu")
loaded = {{*sys.modules}}
engine.generate([[5, 6, 7, 8, 5, 6]])
late = [name for name in sys.modules if name not in loaded and ".kernels." in name]  # their import compiles
sys.exit(" ".join([*(set({unneeded}) & set(sys.modules)), *late]) or 0)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def fails(call, *words):
    """`call` raises a ModelError of one line that has all `words` in it."""
    with pytest.raises(ModelError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 400
    for word in words:
        assert word in line, line
    return line


@pytest.mark.parametrize("native", [True, False])
def test_the_last_bits_do_not_depend_on_where_weights_lie_in_the_file(native, folder, monkeypatch):
    """A tensor more moves all others. The library adds in another order for weights at another place in memory."""
    monkeypatch.setattr("paceline.kernels.preferred", lambda dtype: False)
    file = folder / "model.safetensors"
    weights, said = load_file(file), []
    for numbers in range(4):
        save_file(weights | {"more": torch.zeros(numbers)} if numbers else weights, file, {"format": "pt"})
        target = load(folder, dtype="float32", native=native, exact=False)
        slot = target.add_row(8)
        one = target.verify([Segment.chunk(slot, np.array([5]), last=True)]).logits
        said.append(torch.cat([one, logits(target)]))
    assert all(torch.equal(said[0], other) for other in said[1:])


# What works ---------------------------------------------------------------------------------------------------


def test_a_folder(good):
    target = load(good)
    assert isinstance(target, Decoder)
    assert (target.name, target.vocab_size, target.num_layers, target.max_context) == ("tiny", 320, 3, 128)
    assert target.dtype == torch.float32
    assert target.eos_token_ids == (models.EOS,)
    assert load(str(good)).name == "tiny"


def test_native_or_transformers(good):
    native, through = load(good, native=True), load(good, native=False)
    assert isinstance(native, Decoder)
    assert isinstance(through, HFTarget)
    assert (logits(native) - logits(through)).abs().max() < 1e-4


def test_what_the_native_decoder_cannot_run_goes_through_transformers(tmp_path):
    folder = models.make("gpt2", tmp_path / "g")
    assert isinstance(load(folder), HFTarget)
    with pytest.raises(ModelError, match="runs in transformers, which rounds no activations"):
        load(folder, activations=16)
    fails(lambda: load(folder, native=True), "native decoder cannot run it", "'gpt2'", "native=None")


def test_weights_in_shards_or_under_another_name(good, folder, tmp_path):
    models.model("llama2").save_pretrained(tmp_path / "s", max_shard_size="100KB")
    assert len(list((tmp_path / "s").glob("*.safetensors"))) > 2
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    for other in (tmp_path / "s", folder):
        assert torch.equal(logits(load(other)), logits(load(good)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", torch.bfloat16])
def test_a_dtype_of_ones_own(good, dtype):
    target = load(good, dtype=dtype)
    assert target.dtype == (getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    assert (logits(target) - logits(load(good))).abs().max() < 0.3


def test_auto_is_the_checkpoints_dtype(tmp_path, monkeypatch):
    half = models.make("llama2", tmp_path / "h", dtype=torch.bfloat16)
    monkeypatch.setattr(module, "has_units", lambda dtype: True)
    assert load(half).dtype == torch.bfloat16
    assert load(models.make("llama2", tmp_path / "other", dtype=torch.float16)).dtype == torch.float16
    edit(half / "config.json", dtype=GONE)
    assert load(half).dtype == torch.bfloat16, "the weights tell it too"
    monkeypatch.setattr(module, "has_units", lambda dtype: dtype == torch.float32)
    assert load(half).dtype == torch.float32, "without units for it, float32 is faster and as exact"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(1, None, (1,)), (1, 3, (1, 3)), ([1, 5], [5, 7], (1, 5, 7)), (None, [2], (2,)), (None, None, ())],
)
def test_all_end_tokens(folder, config, generation, expected):
    edit(folder / "config.json", eos_token_id=config)  # absent means the family's default, null means none
    edit(folder / "generation_config.json", eos_token_id=generation)
    assert load(folder).eos_token_ids == expected


def test_a_tokenizer_that_fills_the_vocabulary_may_get_a_token_from_its_class(tmp_path):
    folder = models.make("qwen2", tmp_path / "m", vocab_size=288)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("the cat") == load_tokenizer(models.make("qwen3", tmp_path / "other")).encode("the cat")
    with pytest.raises(PromptError, match="outside the model's 0"):
        Engine(folder).generate(["<|endoftext|>"])


def test_a_tokenizer_with_its_model_and_alone(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("the little dog")) == "the little dog"
    assert tokenizer.has_chat_template
    (folder / "config.json").unlink()
    assert load_tokenizer(folder).vocab_size == 288


# What cannot be found -----------------------------------------------------------------------------------------


def test_no_such_folder(good, monkeypatch):
    fails(lambda: load(good.parent / "tiyn"), "there is no folder", "Did you mean 'tiny'?")
    fails(lambda: load(f"{good.parent}/tinny"), "Did you mean 'tiny'?")
    fails(lambda: load("./nothing/here"), "there is no folder", "nor is there a folder nothing")
    fails(lambda: load(good / "model.safetensors"), "is a file", "name its folder")
    monkeypatch.chdir(good.parent.parent)  # a path of two parts is a path where the first exists
    fails(lambda: load(f"{good.parent.name}/tin"), "there is no folder", "Did you mean 'tiny'?")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub, and no connection."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["acme/tiny-llama", "tiny-llama"])
@pytest.mark.parametrize("call", [load, load_tokenizer])
def test_a_hub_id_while_offline(hub, name, call):
    fails(
        lambda: call(name),
        f"'{name}' is neither a folder here nor reachable on the hub",
        "a local folder works, named by its path, ./path/to/folder.",
    )


def test_a_folder_was_meant(hub, good, monkeypatch):
    monkeypatch.chdir(good.parent)
    fails(lambda: load("tinny"), "neither a folder here", "Did you mean 'tiny'?")


def test_a_hub_id_that_was_downloaded_before(hub, good):
    repository = hub / "models--acme--tiny-llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    shutil.copytree(good, repository / "snapshots" / "0123abcd")
    target = load("acme/tiny-llama")
    assert target.name == "acme/tiny-llama"
    assert torch.equal(logits(target), logits(load(good)))
    assert load_tokenizer("acme/tiny-llama").vocab_size == 288


def test_only_what_is_needed_is_downloaded(monkeypatch, good):
    asked = {}

    def download(name, **patterns):
        asked.update(patterns)
        files = "config.json model.safetensors pytorch_model.bin original/model.safetensors consolidated.safetensors"
        kept = huggingface_hub.utils.filter_repo_objects(files.split(), **patterns)
        assert set(kept) == {"config.json", "model.safetensors"}
        return str(good)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load("acme/tiny-llama")
    assert asked


# What is wrong with a folder -----------------------------------------------------------------------------------

GONE = object()
Change = Callable[[Path], object]


def edit(file, **changes):
    """Change entries of a JSON file; GONE removes one."""
    values = (json.loads(file.read_text()) if file.exists() else {}) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not GONE}))


def config(**changes):
    return lambda folder: edit(folder / "config.json", **changes)


def has(name, data):
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def lacks(name):
    return lambda folder: (folder / name).unlink()


def weights(change):
    """Change the tensors by name."""

    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return spoil


def first(size):
    """Keep the first bytes of the weights."""
    return lambda folder: has("model.safetensors", (folder / "model.safetensors").read_bytes()[:size])(folder)


def brace(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:8] + b"}" + data[9:])


def a_folder(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def of_eight_bits(tensors):
    key = next(key for key in tensors if "down_proj" in key)
    tensors[key] = (tensors[key] * 100).to(torch.int8)


def with_tensor(name, dtype=torch.float32):
    return weights(lambda tensors: tensors.update({f"model.layers.0.{name}": torch.ones(4).to(dtype)}))


def without_layer_1(tensors):
    for key in [key for key in tensors if ".1." in key]:
        del tensors[key]


ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]},
}  # fmt: skip


def rope(value):
    return config(rope_parameters=GONE, rope_theta=value)


def quantise(folder):
    quantise_folder(folder, folder.parent / "quantised", "int8")


def by_layer(folder):
    made = transformers.Gemma4TextConfig(num_hidden_layers=6, per_layer_config={0: {"intermediate_size": 8}})
    made.save_pretrained(folder)


def small(kind, **changes):
    """The configuration of another family."""
    return lambda folder: models.config(kind, **changes).save_pretrained(folder)


CUT_OFF = ("model.safetensors is cut off or damaged", "copy or download it again")
CONFIGURATIONS = [
    ([lacks("config.json")], ("has no config.json, so it is not a model folder",)),
    ([lacks("config.json"), has("adapter_config.json", "{}")], ("merge it into its base model",)),
    ([has("config.json", '{"model_type": "llama",')], ("config.json cannot be read: not JSON", "column 24")),
    ([has("config.json", "[]")], ("should hold a JSON object, not a list",)),
    ([has("config.json", b"\xff\xfe")], ("config.json cannot be read: not UTF-8",)),
    ([config(model_type=GONE)], ("has no model_type",)),
    ([config(model_type="no-such-model")], ("does not know model type 'no-such-model'",)),
    ([config(hidden_size="many")], ("config.json: hidden_size is 'many'; it must be a whole number",)),
    ([config(bos_token_id="many")], ("config.json cannot be used", "bos_token_id", "many")),
    (
        [
            has("own.py", "raise SystemExit('this code must not run')"),
            config(model_type="own", auto_map={"AutoConfig": "own.OwnConfig"}),
        ],
        ("needs code from its own folder", "trust_remote_code=True"),
    ),
    ([has("generation_config.json", "{")], ("generation_config.json cannot be read: not JSON",)),
    ([config(model_type="vit", architectures=["ViTModel"])], ("cannot load it as a causal language model",)),
    ([config(num_hidden_layers=-1)], ("config.json: num_hidden_layers",)),
    ([config(num_hidden_layers=0)], ("config.json: num_hidden_layers",)),
    ([config(model_type="qwen3", num_hidden_layers=10**12)], ("num_hidden_layers is 1000000000000",)),
    ([config(model_type="qwen3_5", text_config={"num_hidden_layers": 10**12})], ("num_hidden_layers is 10000",)),
    ([config(model_type="qwen3_5_text", text_config={})], ("a qwen3_5_text has no text_config",)),
    *[
        ([config(model_type="qwen3_next", **{key: 0})], (f"{key} is 0; it must be a whole number from 1",))
        for key in ("linear_num_value_heads", "linear_conv_kernel_dim", "shared_expert_intermediate_size")
    ],
    ([config(max_position_embeddings=10**13)], ("config.json: max_position_embeddings",)),
    ([config(max_position_embeddings="2048")], ("config.json", "max_position_embeddings")),
    ([config(hidden_size=2.5)], ("config.json", "hidden_size")),
    ([config(vocab_size=-5)], ("config.json: vocab_size",)),
    *[([rope(value)], ("config.json: rope_theta",)) for value in ("10000", None, -1.0)],
    *[
        ([config(rope_parameters={"rope_type": "default", "rope_theta": value})], ("config.json: rope_theta",))
        for value in ("10000", None)
    ],
    ([config(rope_parameters=[])], ("config.json", "rope_parameters")),
    *[
        ([config(rope_parameters=GONE, rope_scaling={**ROPES[kind], key: value})], ("config.json: rope_parameters",))
        for kind, key, value in (
            ("linear", "factor", "x"), ("linear", "factor", None), ("linear", "factor", 0), ("llama3", "factor", [1]),
            ("llama3", "low_freq_factor", 0), ("yarn", "factor", "x"), ("yarn", "beta_fast", -1),
            ("yarn", "attention_factor", "x"), ("yarn", "beta_slow", math.nan), ("longrope", "factor", "x"),
            ("longrope", "short_factor", "x"), ("longrope", "short_factor", [1.0] * 9),
        )
    ],
    ([by_layer], ("config.json: layers of this gemma4_text differ in intermediate_size, and only",)),
    ([small("gemma4", num_kv_shared_layers=4)], ("num_kv_shared_layers is 4, and not every kind of them",)),
    ([small("gemma4-moe", top_k_experts=9)], ("top_k_experts is 9, and there are 8 experts",)),
    ([small("gemma4-moe", moe_intermediate_size=None)], ("enable_moe_block is set, and num_experts, top_k_experts",)),
    ([small("glm-flash", n_group=3)], ("the best 2 of 3 groups of 8 experts cannot be chosen",)),
    ([config(model_type="mistral", per_layer_config={"1": {"num_key_value_heads": 1}})],
     ("config.json: layers of this mistral differ in num_key_value_heads, and only",)),
    ([config(num_key_value_heads=3)], ("num_attention_heads, 4, is no multiple of num_key_value_heads, 3",)),
    *[([config(model_type="mistral", sliding_window=value)], ("sliding_window is",)) for value in (0, -1)],
    ([config(model_type="smollm3", no_rope_layers=[1] * 5)], ("no_rope_layers names 5 layers of 3",)),
    ([config(model_type="granite", logits_scaling=0.0)], ("logits_scaling is 0.0; it must be a number above 0",)),
    *[
        ([config(model_type="olmoe", num_experts=count, num_experts_per_tok=chosen)], (word,))
        for count, chosen, word in (
            (0, 1, "num_experts is 0"),
            (1 << 40, 1, "num_experts is 1099511627776; it must be a whole number from 1 to 4,096"),
            (8, 9, "num_experts_per_tok is 9, and there are 8 experts"),
        )
    ],
    *[
        ([lambda folder, name=name, ids=ids: edit(folder / name, eos_token_id=ids)], (f"{name}", "eos_token_id"))
        for ids in ("2", [2, "3"], [2, None], [[2]], {"a": 2}, -1, 2.0, True)
        for name in ("generation_config.json", "config.json")
    ],
]
WEIGHTS = [
    (
        [lacks("model.safetensors"), has("pytorch_model.bin", "")],
        ("weights are read from safetensors only, and it has pytorch_model.bin", "convert with transformers: "),
    ),
    ([lacks("model.safetensors")], ("has no weights",)),
    *[([first(size)], CUT_OFF) for size in (0, 4, 1000, -1)],
    ([brace], CUT_OFF),
    ([a_folder], ("model.safetensors cannot be read as weights: it is a folder",)),
    (
        [has("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n")],
        ("is a Git LFS pointer", "git lfs pull"),
    ),
    ([has(INDEX, "{}")], ("has no weight_map",)),
    ([weights(without_layer_1)], ("lacks model.layers.1.", " and 7 more", "incomplete")),
    ([weights(lambda tensors: tensors.pop("lm_head.weight"))], ("lacks lm_head.weight",)),
    ([weights(of_eight_bits)], ("down_proj.weight holds I8 numbers", "quantized")),
    ([with_tensor("self_attn.q_proj.bias", torch.float8_e4m3fn)], ("q_proj.bias holds F8_E4M3 numbers",)),
    *[
        ([weights(of_eight_bits), config(quantization_config=method)], (f"quantized by {word}", "does not know"))
        for method, word in (({"quant_method": "modelopt"}, "'modelopt'"), ({"bits": 8}, "{'bits': 8}"))
    ],
    *[
        ([with_tensor(name)], (f"has model.layers.0.{name}, and nothing here reads it", "scales"))
        for name in ("mlp.up_proj.weight_scale", "mlp.up_proj.weight_scale_inv", "mlp.up_proj.weight_scale_2",
                     "mlp.up_proj.scales", "mlp.up_proj.SCB")
    ],
    ([has("adapter_config.json", "{}")], ("holds an adapter", "merge it into its base model first")),
    ([config(num_hidden_layers=2)], ("has weights of 3 layers, and its config.json asks for 2",)),
    ([config(intermediate_size=128)], ("model.layers.0.mlp.", " where config.json asks for [", "128", "96")),
]
TOKENIZERS = [
    ([config(vocab_size=280)], ("has token ids up to 287 but the model knows only 0 to 279", "different models")),
    ([lacks("tokenizer.json")], ("has no tokenizer", "tokenizer.json")),
    ([has("tokenizer.json", "{}")], ("the tokenizer in ", " cannot be read: KeyError")),
]


@pytest.mark.parametrize(
    ("call", "changes", "words"),
    [
        *[(load, *case) for case in (*CONFIGURATIONS, *WEIGHTS)],
        *[(partial(load, native=False), *case) for case in WEIGHTS],
        *[(quantise, *case) for case in WEIGHTS],
        *[(load_tokenizer, *case) for case in TOKENIZERS],
    ],
)
def test_a_mistake_is_one_line(call, changes, words, folder):
    for change in changes:
        change(folder)
    fails(lambda: call(folder), str(folder) if call is load_tokenizer else "", *words)


def test_mistakes_of_other_folders(folder, tmp_path):
    fails(lambda: load(folder.parent), "has no config.json", f"Did you mean {folder}?")
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    fails(lambda: load(folder, native=True), "native decoder cannot run it", "quantized")
    models.model("llama2").save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    shards[1].unlink()
    fails(lambda: load(tmp_path / "shards"), f"lacks {shards[1].name}, 1 of the {len(shards)} files")
    foreign = models.make("gpt2", tmp_path / "foreign")
    weights(without_layer_1)(foreign)
    fails(lambda: load(foreign), "lacks ", " more", "incomplete")


def test_a_head_that_is_the_embedding_may_be_absent(folder):
    weights(lambda tensors: tensors.pop("lm_head.weight"))(folder)
    edit(folder / "config.json", tie_word_embeddings=True)
    assert load(folder).vocab_size == 320


def test_scales_of_activations_and_of_a_cache_change_no_weight(folder):
    before = logits(load(folder))
    for name in ("mlp.up_proj.input_scale", "self_attn.k_scale"):
        with_tensor(name)(folder)
    assert torch.equal(logits(load(folder)), before)


def test_a_head_that_is_not_the_embedding_is_the_models(tmp_path):
    """Whatever config.json says: so it is in transformers and in llama.cpp's converter."""
    folder, other = models.make("smollm", tmp_path / "m"), tmp_path / "int8"
    tied = load(folder)

    weights(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(folder)
    same = load(folder)
    assert (same.weight_bytes, same.weights_fingerprint) == (tied.weight_bytes, tied.weights_fingerprint)
    weights(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0)}))(folder)
    made, right = load(folder), load(folder, native=False)
    assert isinstance(right, HFTarget)
    assert (logits(made) - logits(right)).abs().max() < 1e-4
    assert (logits(made) - logits(tied)).abs().max() > 1
    quantise_folder(folder, other, "int8")
    assert off(logits(load(other)), logits(right)) < 0.1
    to_gguf.write(folder, tmp_path / "m.gguf", "f32")
    assert (logits(load(tmp_path / "m.gguf")) - logits(right)).abs().max() < 1e-4
    policy = Policy(right.model, "none", eos_token_ids=(), max_batch=1)
    with policy.engine() as engine:
        assert isinstance(engine.target, Decoder)
        assert (logits(engine.target) - logits(right)).abs().max() < 1e-4


# Words --------------------------------------------------------------------------------------------------------


def test_unknown_words(good, monkeypatch):
    fails(lambda: load(good, dtype="bfloat61"), "unknown dtype 'bfloat61'", "Did you mean 'bfloat16'?")
    fails(lambda: load(good, dtype=torch.int8), "unknown dtype 'torch.int8'", "float32")
    fails(lambda: load(good, device="gpu"), "device 'gpu' cannot be used", "cpu")
    absent = () if torch.cuda.is_available() else ("cuda", "cuda:1")
    for word in ("meta", "xla", "hpu", "privateuseone", "lazy", "", *absent):  # known to torch; none computes here
        fails(lambda word=word: load(good, device=word), f"device {word!r} cannot be used", "cpu")
    assert load(good, device="cpu").device == torch.device("cpu")
    # They are checked before anything is downloaded.
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("downloaded"))
    fails(lambda: load("acme/tiny-llama", dtype="int3"), "unknown dtype")
    fails(lambda: load("acme/tiny-llama", device="gpu"), "cannot be used")


@pytest.mark.parametrize("family", ["gemma4", "gemma4-moe"])
def test_of_a_gemma_4_with_images_the_text_part_is_run(family: str, tmp_path: Path) -> None:
    text = models.make(family, tmp_path / "text")
    weights = load_file(text / "model.safetensors")
    inner = models.config(family)
    whole = tmp_path / "whole"
    transformers.Gemma4Config(text_config=inner.to_dict(), tie_word_embeddings=True).save_pretrained(whole)
    named = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    named |= {"model.vision_tower.patch_embedder.input_proj.weight": torch.zeros(2, 2)}
    save_file(named, whole / "model.safetensors", {"format": "pt"})
    for folder in (text, whole):
        quantise_folder(folder, folder / "int8", "int8")
    right, found = ([load(folder), load(folder / "int8")] for folder in (text, whole))
    assert all(torch.equal(logits(one), logits(other)) for one, other in zip(right, found, strict=True))
