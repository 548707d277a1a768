"""From a name or a folder to a target, and every way a folder can be wrong: one clear line each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import models

from paceline.engine.round import Segment
from paceline.errors import ModelError
from paceline.target import load as module
from paceline.target.base import Target
from paceline.target.decoder import Decoder
from paceline.target.folder import INDEX
from paceline.target.hf import HFTarget
from paceline.target.load import load, load_tokenizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make("llama2", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A model folder to spoil."""
    return Path(shutil.copytree(good, tmp_path / "tiny"))


def logits(target: Target) -> torch.Tensor:
    slot = target.add_row(8)
    return target.verify([Segment.chunk(slot, np.arange(4, 12), last=True)]).logits.float()


def fails(call: Callable[[], object], *words: str) -> str:
    """`call` raises a ModelError of one line that has all `words` in it."""
    with pytest.raises(ModelError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 400
    for word in words:
        assert word in line, line
    return line


def edit(file: Path, **changes: object) -> None:
    """Change entries of a JSON file; None removes one."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


# What works ---------------------------------------------------------------------------------------------------


def test_a_folder(good: Path) -> None:
    target = load(good)
    assert isinstance(target, Decoder)
    assert (target.name, target.vocab_size, target.num_layers, target.max_context) == ("tiny", 320, 3, 128)
    assert target.dtype == torch.float32
    assert target.eos_token_ids == (models.EOS,)
    assert load(str(good)).name == "tiny"


def test_native_or_transformers(good: Path) -> None:
    native, through = load(good, native=True), load(good, native=False)
    assert isinstance(native, Decoder)
    assert isinstance(through, HFTarget)
    assert (logits(native) - logits(through)).abs().max() < 1e-4


def test_what_the_native_decoder_cannot_run_goes_through_transformers(tmp_path: Path) -> None:
    folder = models.make("gpt2", tmp_path / "g")
    assert isinstance(load(folder), HFTarget)
    fails(lambda: load(folder, native=True), "native decoder cannot run it", "'gpt2'", "native=None")


def test_shards(good: Path, tmp_path: Path) -> None:
    sharded = models.model("llama2")
    sharded.save_pretrained(tmp_path / "s", max_shard_size="100KB")
    assert len(list((tmp_path / "s").glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(tmp_path / "s")), logits(load(good)))


def test_weights_under_another_name(folder: Path, good: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert torch.equal(logits(load(folder)), logits(load(good)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", torch.bfloat16])
def test_a_dtype_of_ones_own(good: Path, dtype: str | torch.dtype) -> None:
    target = load(good, dtype=dtype)
    assert target.dtype == (getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    assert (logits(target) - logits(load(good))).abs().max() < 0.3


def test_auto_is_the_checkpoints_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = models.make("llama2", tmp_path / "h", dtype=torch.bfloat16)
    monkeypatch.setattr(module, "_has_units", lambda dtype: True)
    assert load(half).dtype == torch.bfloat16
    edit(half / "config.json", dtype=None)
    assert load(half).dtype == torch.bfloat16, "the weights tell it too"
    monkeypatch.setattr(module, "_has_units", lambda dtype: dtype == torch.float32)
    assert load(half).dtype == torch.float32, "without units for it, float32 is faster and as exact"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(1, None, (1,)), (1, 3, (1, 3)), ([1, 5], [5, 7], (1, 5, 7)), (None, [2], (2,)), (None, None, ())],
)
def test_all_end_tokens(folder: Path, config: object, generation: object, expected: tuple[int, ...]) -> None:
    edit(folder / "config.json", eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    if config is None:  # absent means the family's default, null means none
        values = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
        (folder / "config.json").write_text(json.dumps(values))
    assert load(folder).eos_token_ids == expected


def test_a_tokenizer(good: Path) -> None:
    tokenizer = load_tokenizer(good)
    assert tokenizer.decode(tokenizer.encode("the little dog")) == "the little dog"
    assert tokenizer.has_chat_template


def test_a_folder_with_a_tokenizer_alone(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert load_tokenizer(folder).vocab_size == 288


# What cannot be found -----------------------------------------------------------------------------------------


def test_no_such_folder(good: Path) -> None:
    fails(lambda: load(good.parent / "tiyn"), "there is no folder", "Did you mean 'tiny'?")
    fails(lambda: load(f"{good.parent}/tinny"), "Did you mean 'tiny'?")
    fails(lambda: load("./nothing/here"), "there is no folder", "nor is there a folder nothing")
    fails(lambda: load(good / "model.safetensors"), "is a file", "name its folder")


def test_a_path_of_two_parts_is_a_path_where_the_first_exists(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(good.parent.parent)
    fails(lambda: load(f"{good.parent.name}/tin"), "there is no folder", "Did you mean 'tiny'?")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no connection."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["acme/tiny-llama", "tiny-llama"])
@pytest.mark.parametrize("call", [load, load_tokenizer])
def test_a_hub_id_while_offline(hub: Path, name: str, call: Callable[[str], object]) -> None:
    fails(
        lambda: call(name),
        f"'{name}' is neither a folder here nor reachable on the hub",
        "a local folder works: paceline generate ./path/to/folder",
    )


def test_a_folder_was_meant(hub: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(good.parent)
    fails(lambda: load("tinny"), "neither a folder here", "Did you mean 'tiny'?")


def test_a_hub_id_that_was_downloaded_before(hub: Path, good: Path) -> None:
    repository = hub / "models--acme--tiny-llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    shutil.copytree(good, repository / "snapshots" / "0123abcd")
    target = load("acme/tiny-llama")
    assert target.name == "acme/tiny-llama"
    assert torch.equal(logits(target), logits(load(good)))
    assert load_tokenizer("acme/tiny-llama").vocab_size == 288


def test_only_what_is_needed_is_downloaded(monkeypatch: pytest.MonkeyPatch, good: Path) -> None:
    asked = {}

    def download(name: str, **patterns: list[str]) -> str:
        asked.update(patterns)
        files = "config.json model.safetensors pytorch_model.bin original/model.safetensors consolidated.safetensors"
        kept = huggingface_hub.utils.filter_repo_objects(files.split(), **patterns)
        assert set(kept) == {"config.json", "model.safetensors"}
        return str(good)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load("acme/tiny-llama")
    assert asked


# What is wrong with config.json -------------------------------------------------------------------------------


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    fails(lambda: load(folder), str(folder), "has no config.json, so it is not a model folder")
    fails(lambda: load(folder.parent), "has no config.json")
    (folder / "adapter_config.json").write_text("{}")
    fails(lambda: load(folder), "merge it into its base model")


def test_the_model_is_one_folder_down(folder: Path) -> None:
    fails(lambda: load(folder.parent), f"Did you mean {folder}?")


def test_config_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')
    fails(lambda: load(folder), "config.json cannot be read: not JSON", "column 24")
    (folder / "config.json").write_text("[]")
    fails(lambda: load(folder), "should hold a JSON object, not a list")
    (folder / "config.json").write_bytes(b"\xff\xfe")
    fails(lambda: load(folder), "config.json cannot be read: not UTF-8")


def test_config_of_something_else(folder: Path) -> None:
    edit(folder / "config.json", model_type=None)
    fails(lambda: load(folder), "has no model_type")
    edit(folder / "config.json", model_type="no-such-model")
    fails(lambda: load(folder), "does not know model type 'no-such-model'")


def test_config_with_nonsense_in_it(folder: Path) -> None:
    edit(folder / "config.json", hidden_size="many")
    fails(lambda: load(folder), "config.json cannot be used", "hidden_size", "many")


def test_a_model_with_code_of_its_own_is_not_run_unasked(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemExit('this code must not run')")
    edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    fails(lambda: load(folder), "needs code from its own folder", "trust_remote_code=True")


def test_generation_config_is_not_json(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    fails(lambda: load(folder), "generation_config.json cannot be read: not JSON")


def test_not_a_language_model(folder: Path) -> None:
    edit(folder / "config.json", model_type="vit", architectures=["ViTModel"])
    fails(lambda: load(folder), "transformers cannot load it as a causal language model")


# What is wrong with the weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
def test_no_safetensors(folder: Path, native: bool) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fails(
        lambda: load(folder, native=native),
        "weights are read from safetensors only, and it has pytorch_model.bin",
        "convert with transformers: AutoModelForCausalLM.from_pretrained",
    )
    (folder / "pytorch_model.bin").unlink()
    fails(lambda: load(folder, native=native), "has no weights")


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_weights_cut_off(folder: Path, keep: int, native: bool) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    fails(lambda: load(folder, native=native), f"{file} is cut off or damaged", "copy or download it again")


def test_weights_damaged(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:8] + b"}" + file.read_bytes()[9:])
    fails(lambda: load(folder), "is cut off or damaged")


def test_a_pointer_instead_of_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n")
    fails(lambda: load(folder), "is a Git LFS pointer", "git lfs pull")


def test_a_shard_is_missing(tmp_path: Path) -> None:
    models.model("llama2").save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].unlink()
    fails(lambda: load(tmp_path), f"lacks {shards[1].name}, 1 of the {len(shards)} files")
    (tmp_path / INDEX).write_text("{}")
    fails(lambda: load(tmp_path), "has no weight_map")


@pytest.mark.parametrize(("family", "native"), [("llama2", True), ("llama2", False), ("gpt2", None)])
def test_tensors_are_missing(tmp_path: Path, family: str, native: bool | None) -> None:
    folder = models.make(family, tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    gone = [key for key in sorted(tensors) if ".1." in key][:4]
    save_file({k: v for k, v in tensors.items() if k not in gone}, folder / "model.safetensors", {"format": "pt"})
    line = fails(lambda: load(folder, native=native), "lacks", "and 2 more", "incomplete")
    assert sum(key in line for key in gone) == 2


def test_the_head_is_missing(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fails(lambda: load(folder), "lacks lm_head.weight")
    edit(folder / "config.json", tie_word_embeddings=True)
    assert load(folder).vocab_size == 320


@pytest.mark.parametrize("native", [True, False])
def test_a_tensor_of_another_shape(folder: Path, native: bool) -> None:
    edit(folder / "config.json", intermediate_size=128)
    line = fails(lambda: load(folder, native=native), "model.layers.0.mlp.")
    shapes = ("[96, 64] where config.json asks for [128, 64]", "[64, 96] where config.json asks for [64, 128]")
    assert any(shape in line for shape in shapes)


def test_quantized_weights_are_not_for_the_native_decoder(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    fails(lambda: load(folder, native=True), "native decoder cannot run it", "quantized")


# What is wrong with the tokenizer -----------------------------------------------------------------------------


def test_more_tokens_than_the_model_knows(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=280)
    fails(
        lambda: load_tokenizer(folder),
        "has token ids up to 287 but the model knows only 0 to 279",
        "different models",
    )


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    fails(lambda: load_tokenizer(folder), "has no tokenizer", "tokenizer.json")


def test_a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    fails(lambda: load_tokenizer(folder), f"the tokenizer in {folder} cannot be read: KeyError")


# Words --------------------------------------------------------------------------------------------------------


def test_unknown_words(good: Path) -> None:
    fails(lambda: load(good, dtype="bfloat61"), "unknown dtype 'bfloat61'", "Did you mean 'bfloat16'?")
    fails(lambda: load(good, dtype=torch.int8), "unknown dtype 'torch.int8'", "float32")
    fails(lambda: load(good, device="gpu"), "device 'gpu' cannot be used", "cpu")
    absent = () if torch.cuda.is_available() else ("cuda", "cuda:1")
    for word in (
        "meta",
        "xla",
        "hpu",
        "privateuseone",
        "lazy",
        "",
        *absent,
    ):  # torch knows them, and none computes here
        fails(lambda word=word: load(good, device=word), f"device {word!r} cannot be used", "cpu")  # type: ignore[misc]
    assert load(good, device="cpu").device == torch.device("cpu")


def test_words_are_checked_before_anything_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("downloaded"))
    fails(lambda: load("acme/tiny-llama", dtype="int3"), "unknown dtype")
    fails(lambda: load("acme/tiny-llama", device="gpu"), "cannot be used")
