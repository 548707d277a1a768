"""Models of the newest families whose files are damaged or contradict themselves: one line for each, and no more."""

import json
import shutil
from functools import cache
from math import inf

import pytest
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue
from tests import gguf_files, models

ARCHITECTURES = {"gpt-oss": "gpt-oss", "gemma4": "gemma4", "glm-flash": "deepseek2", "qwen3.5": "qwen35"}
KINDS = {str: "STRING", bool: "BOOL", int: "INT64", float: "FLOAT32", list: "ARRAY"}
"""GGUF's types of facts by Python's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a family's model."""
    return cache(lambda family: models.make(family, tmp_path_factory.mktemp(family) / "model"))


@pytest.fixture
def refusal(command):
    """The only line in which a model is refused."""

    def of(path):
        said = command("generate", path, "hi", "-n", 2)
        lines = [line for line in said.err.splitlines() if "compiling kernels" not in line]
        assert (said.code, said.out, len(lines), lines[0][:7]) == (2, "", 1, "error: ")
        return lines[0]

    return of


def changed(key, value):
    """A change of a fact of a file, or of a family's where the key has one of no family; None takes it out."""

    def change(writer):
        (facts,) = writer.kv_data
        own = key if key.split(".")[0] in ("general", "tokenizer") else f"{writer.arch}.{key}"
        facts.pop(own, None)
        if value is not None:
            inner = {list: GGUFValueType.INT32}.get(type(value))
            facts[own] = GGUFValue(value, GGUFValueType[KINDS[type(value)]], inner)

    return change


FACTS = [
    ("attention.head_count", None, "does not say its attention.head_count"),
    ("attention.head_count", 0, "num_attention_heads is 0; it must be a whole number from 1"),
    ("attention.head_count", "many", "attention.head_count is 'many'; it must be a number"),
    ("embedding_length", -1, "hidden_size is -1"),
    ("block_count", 1 << 40, "num_hidden_layers is 1099511627776"),
    ("context_length", 1 << 40, "max_position_embeddings is 1099511627776"),
    ("context_length", 0, "max_position_embeddings is 0"),
    ("attention.layer_norm_rms_epsilon", inf, "rms_norm_eps is inf"),
    ("general.architecture", [1], "is of architecture [1]"),
    ("tokenizer.ggml.pre", [1], "splits text by the rule None"),
    ("tokenizer.ggml.tokens", 3, "has no tokens"),
    ("tokenizer.ggml.token_type", 3, "has no token_type"),
    ("tokenizer.ggml.model", None, "is of kind None"),
]
OWN_FACTS = {
    "gpt-oss": [
        ("attention.sliding_window", 0, "there is no sliding_window"),
        ("attention.key_length", 0, "heads have 0 numbers"),
        ("expert_used_count", 9, "num_experts_per_tok is 9, and there are 8 experts"),
    ],
    "gemma4": [
        ("attention.sliding_window", 0, "'sliding_window' expected int"),
        ("attention.sliding_window_pattern", None, "does not say which layers have a window"),
        ("attention.shared_kv_layers", 1.5, "attention.shared_kv_layers is 1.5; it must be a whole number"),
        ("attention.shared_kv_layers", 5, "not every kind of them has a layer before them"),
        ("attention.value_length", 7, "gemma4.attention.value_length is 7, and heads have 32 numbers"),
        ("attention.key_length_swa", 0, "heads have 0 numbers"),
    ],
    "glm-flash": [
        ("attention.key_length_mla", None, "has no attention.key_length_mla"),
        ("attention.kv_lora_rank", 0, "kv_lora_rank is 0"),
        ("expert_group_count", 3, "the best 2 of 3 groups of 8 experts cannot be chosen"),
        ("expert_used_count", 9, "num_experts_per_tok is 9, and there are 8 experts"),
    ],
    "qwen3.5": [
        ("ssm.conv_kernel", 0, "linear_conv_kernel_dim is 0"),
        ("ssm.group_count", 3, "linear_num_value_heads, 4, is no multiple of linear_num_key_heads, 3"),
        ("rope.dimension_count", 5, "which are no pairs"),
    ],
}


@pytest.mark.parametrize(
    ("family", "key", "value", "words"),
    [("gemma4", *case) for case in FACTS] + [(family, *case) for family, own in OWN_FACTS.items() for case in own],
)
def test_a_fact_that_cannot_be(family, key, value, words, folder, refusal, tmp_path):
    file = gguf_files.write(folder(family), tmp_path / "m.gguf", more=changed(key, value), pre="qwen2")
    assert words in refusal(file)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_that_is_damaged(family, folder, refusal, tmp_path):
    whole = gguf_files.write(folder(family), tmp_path / "whole.gguf").read_bytes()
    name = ARCHITECTURES[family].encode()
    cases = {
        whole[: len(whole) // 2]: "is cut off: blk.",
        whole[:500]: "is cut off or damaged",
        whole.replace(b"blk.1.ffn_norm", b"blk.0.ffn_norm").replace(b"blk.1.post_attention_norm",
            b"blk.0.post_attention_norm"): "_norm.weight twice",
        whole.replace(name + b".block_count", name + b".head_kinds1"): "does not say its block_count",
    }  # fmt: skip
    for data, words in cases.items():
        (tmp_path / "m.gguf").write_bytes(data)
        assert words in refusal(tmp_path / "m.gguf")
    for tensor in ("token_embd.weight", "blk.2.ffn_norm.weight", "blk.2.post_attention_norm.weight"):
        if tensor.encode() in whole:
            file = gguf_files.write(folder(family), tmp_path / "m.gguf", leave_out=tensor)
            assert tensor in refusal(file)


ENTRIES = [
    ("gpt-oss", "sliding_window", None, "layer_types has sliding_attention, and there is no sliding_window"),
    ("gpt-oss", "num_local_experts", 0, "num_experts is 0"),
    ("gpt-oss", "num_experts_per_tok", 9, "num_experts_per_tok is 9, and there are 8 experts"),
    ("gpt-oss", "layer_types", [], "layer_types"),
    ("gemma4", "model_type", [], "has no model_type"),
    ("gemma4", "head_dim", 0, "head_dim is 0"),
    ("gemma4", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
     "layer_types has sliding_attention, and rope_parameters has not"),
    ("gemma4", "rms_norm_eps", 2.0, "rms_norm_eps is 2.0; it must be a number above 0 and up to 1"),
    ("glm-flash", "n_group", 3, "the best 2 of 3 groups of 8 experts cannot be chosen"),
    ("glm-flash", "mlp_layer_types", ["dense", "sparse"], "mlp_layer_types names 2 layers of 3"),
    ("glm-flash", "vocab_size", 321, "has shape [320, 64] where config.json asks for [321, 64]"),
    ("qwen3.5", "linear_num_key_heads", 3, "linear_num_value_heads, 4, is no multiple of linear_num_key_heads, 3"),
    ("qwen3.5", "num_hidden_layers", 1 << 20, "num_hidden_layers is 1048576"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "entry", "value", "words"), ENTRIES)
def test_an_entry_that_cannot_be(family, entry, value, words, folder, refusal, tmp_path):
    copied = shutil.copytree(folder(family), tmp_path / "m")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {entry: value}))
    assert words in refusal(copied)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_folder_that_is_damaged(family, folder, refusal, tmp_path):
    for file, size, words in (
        ("model.safetensors", 5000, "is cut off or damaged"), ("model.safetensors", None, "has no weights"),
        ("config.json", 100, "cannot be read"), ("tokenizer.json", None, "has no tokenizer"),
    ):  # fmt: skip
        copied = shutil.copytree(folder(family), tmp_path / f"{file} {size}")
        whole = (copied / file).read_bytes()
        (copied / file).unlink() if size is None else (copied / file).write_bytes(whole[:size])
        assert words in refusal(copied)
