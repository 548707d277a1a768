"""GGUF files as models: what a file says against the folder that it was made from, and every way it can be wrong."""

import shutil
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests import models
from tests.gguf_files import write
from tests.native import TEXT, logits, off
from transformers import AutoModelForCausalLM

from paceline import processor
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import ModelError
from paceline.formats.gguf import checkpoint_of, config_of, end_tokens, weights_of
from paceline.formats.gguf_file import GGUF
from paceline.formats.gguf_tokenizer import same_tokens, tokenizer_of
from paceline.formats.precision import Precision, multipliable, round_inputs
from paceline.kernels import integer
from paceline.kernels.blocks import Q8_0, Blocks, quantise
from paceline.kernels.linear import BlockLinear, has_units
from paceline.peers import setup
from paceline.target.decoder import Decoder
from paceline.target.load import build, load, load_tokenizer, tokenizer_for

FAMILIES = [family for family in models.NATIVE if family != "qwen3-bias"]  # llama.cpp's Qwen3 has no biases
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Of a model whose weights fit into blocks of 256."""
PERIODIC = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
IN_FILES = {
    "gemma3": {"query_pre_attn_scalar": 32},
    "gpt-oss": {"swiglu_limit": 7.0},
    "qwen3-next": PERIODIC | {"mlp_only_layers": []},
    "qwen3.5-moe": PERIODIC,
}
"""What files of a family do not say, with the value that they mean."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.make_repetitive(tmp_path_factory.mktemp("models") / "tiny")


def test_facts_and_numbers_are_what_the_reference_reads(tiny, tmp_path):
    def more(writer):
        writer.add_array("test.numbers", [1, -2, 3])
        writer.add_array("test.floats", [0.5, 1.5])
        writer.add_bool("test.flag", True)
        writer.add_uint64("test.large", 1 << 40)
        writer.add_string("test.text", "héllo ▁")

    path = write(tiny, tmp_path / "m.gguf", lambda name: "F16" if "ffn" in name else "Q8_0", more=more)
    reference, ours = gguf.GGUFReader(path), GGUF(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert list(ours.places) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        mine = ours.tensor(tensor.name)
        dense = mine.float() if isinstance(mine, torch.Tensor) else mine.dense()
        assert torch.equal(dense, torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))


@pytest.mark.parametrize("alignment", [1, 8, 32])
def test_tensors_begin_where_the_alignment_says_wherever_the_facts_end(alignment, tmp_path):
    numbers = np.arange(5, dtype=np.float32)
    for length in range(32):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_custom_alignment(alignment)
        writer.add_string("test.text", "a" * length)
        for name in ("one", "other"):
            writer.add_tensor(name, numbers)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        file = GGUF(tmp_path / "m.gguf")
        for name in ("one", "other"):
            assert torch.equal(file.tensor(name), torch.from_numpy(numbers))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_says_what_its_folder_says(family, tmp_path):
    folder = models.make(family, tmp_path / "folder", **IN_FILES.get(family, {}))
    right = load(folder, dtype="float32")
    made = load(write(folder, tmp_path / "m.gguf"), dtype="float32")
    if family in ("llama3", "phi3-long", *models.HYBRID):  # factors, or rates of decay, are rounded in the file
        assert off(logits(made), logits(right)) < 1e-5
    else:
        assert torch.equal(logits(made), logits(right))
    assert (made.vocab_size, made.max_context) == (right.vocab_size, right.max_context)
    assert made.eos_token_ids == right.eos_token_ids
    assert made.weight_bytes == right.weight_bytes


@pytest.mark.parametrize("family", ["llama2", "mistral-window", "qwen2", "qwen3", "smollm", "gemma3", "olmoe"])
def test_blocks_in_a_file_are_those_made_of_the_folder(family, tmp_path):
    """The same bytes, so the same logits to the last bit."""
    sizes = {"hidden_size": 128, "num_experts": 4} if family == "olmoe" else {"head_dim": 32}
    folder = models.make(family, tmp_path / "folder", **sizes, **IN_FILES.get(family, {}))
    made = load(write(folder, tmp_path / "m.gguf", "Q8_0"), dtype="auto-float32")
    right = load(folder, dtype="int8")
    assert isinstance(made, Decoder)
    assert isinstance(made.layers[0].attention.qkv, BlockLinear)
    assert torch.equal(logits(made), logits(right))
    assert made.weight_bytes == right.weight_bytes

    def four(name):
        return "Q8_0" if name.startswith(("token_embd", "output")) else "Q4_0"

    made = load(write(folder, tmp_path / "four.gguf", four), dtype="auto-float32")
    assert torch.equal(logits(made), logits(load(folder, dtype="int4")))


def mixed(name):
    """As in a Q4_K_M: the parts of one product differ."""
    return "Q6_K" if name.startswith("token_embd") or "attn_v" in name or "ffn_down" in name else "Q4_K"


def low_bits(name):
    return "IQ2_XXS" if "ffn_up" in name else "Q2_K" if "ffn_down" in name else "Q8_0"


def dequantised(path, dtype=torch.float32):
    """The model in a file, every tensor as the reference reads it."""
    dense = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    file = GGUF(path)
    config = config_of(file)
    file.tensor = lambda name: torch.from_numpy(np.array(dense[name]))
    return Decoder(config, weights_of(file, config), dtype=dtype)


def test_a_dtype_for_which_the_processor_has_no_units_is_said_to_be_slow(tmp_path):
    folder = models.make("smollm", tmp_path / "folder")
    with processor.forced("avx2"):
        assert load(folder, dtype="bfloat16").notes == [
            "this CPU has no units for bfloat16, so it is many times as slow as --dtype float32"
        ]
        assert load(folder, dtype="float32").notes == []


def test_a_16_or_32_bit_dtype_expands_blocks_and_rounds_nothing(tmp_path):
    """Of every type, those that are not multiplied as blocks too."""
    folder = models.make("smollm", tmp_path / "folder", **WIDE, num_hidden_layers=1)
    for kind in ("MXFP4", "Q8_0"):
        path = write(folder, tmp_path / f"{kind}.gguf", lambda name, kind=kind: "Q6_K" if "attn_v" in name else kind)
        for dtype in (torch.float32, torch.bfloat16):
            made, right = load(path, dtype=dtype, exact=False), dequantised(path, dtype)
            assert isinstance(made, Decoder)
            assert torch.equal(logits(made), logits(right)), (kind, dtype)
            assert not any(isinstance(p, BlockLinear) for layer in made.layers for p in layer.products)
            assert made.weight_bytes == right.weight_bytes
            assert made.quantised is None
        note, *slow = load(path, dtype="bfloat16").notes
        assert len(slow) == (not has_units(torch.bfloat16))
        assert note.startswith(f"{kind} has its weights in bfloat16, expanded from {kind} and Q6_K, ")
        assert " MB instead of " in note
    kept, expanded = load(tmp_path / "Q8_0.gguf"), load(tmp_path / "Q8_0.gguf", dtype="float32")
    assert kept.quantised is not None
    assert kept.weights_fingerprint == expanded.weights_fingerprint  # of the file, whatever is computed
    assert kept.weight_bytes < expanded.weight_bytes / 3


def test_all_types_of_a_file_are_named(tiny, tmp_path):
    path = write(tiny, tmp_path / "m.gguf", lambda name: "Q8_0" if name.startswith("token_embd") else "F16")
    assert "has its weights in F16 and Q8_0, 1" in "\n".join(load(path).notes)


def test_eight_bits_are_made_of_blocks_of_fewer(tmp_path):
    """Of expanded weights; blocks of eight bits stay as they are."""
    folder = models.make("smollm", tmp_path / "folder", **WIDE, num_hidden_layers=1)
    path = write(folder, tmp_path / "m.gguf", lambda name: "Q8_0" if name.startswith("token_embd") else "Q4_1")
    made, file = load(path, dtype="int8-float32"), GGUF(path)
    assert isinstance(made, Decoder)
    weights = weights_of(file, config_of(file))
    right = {name: quantise(w.dense(), Q8_0) if isinstance(w, Blocks) else w for name, w in weights.items()}
    assert round_inputs(path, right, None, torch.float32) == made.activations == 16
    assert torch.equal(logits(made), logits(Decoder(config_of(file), right, dtype=torch.float32)))
    note, *others = made.notes
    assert others == integer.warnings()
    assert note.startswith("m has its weights in Q8_0, 8.5 bits a weight, made of Q4_1 and Q8_0, ")
    assert made.weights_fingerprint == load(path, dtype="float32").weights_fingerprint
    refused(path, "has its weights in Q4_1 and Q8_0", "so int4 cannot be made of it", dtype="int4")


def test_of_blocks_that_are_expanded_no_input_is_rounded(tiny, tmp_path):
    path = write(tiny, tmp_path / "m.gguf", lambda name: "Q8_0")
    refused(path, "m: activations are rounded", "it has none", dtype="float32", activations=8)


def test_blocks_are_not_made_of_blocks_of_as_many_bits(tiny, tmp_path):
    path = write(tiny, tmp_path / "m.gguf", lambda name: "Q8_0" if name.startswith("token_embd") else "F16")
    for dtype in ("int8", "int4-float32"):
        words = ("has its weights in F16 and Q8_0", "already", f"so {dtype[:4]} cannot be made of it", "auto-float32")
        refused(path, *words, dtype=dtype)


STATES = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 8, "linear_value_head_dim": 64,
}  # fmt: skip
"""Of a hybrid with several value heads in a block of 256."""


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama2", {"num_hidden_layers": 1}), ("qwen2-tied", {"num_hidden_layers": 1}), ("qwen3.5", STATES)],
)
def test_mixed_kinds_are_what_the_reference_makes_of_them(family, changes, tmp_path):  # fmt: skip
    folder = models.make(family, tmp_path / "folder", **WIDE | changes)
    path = write(folder, tmp_path / "m.gguf", mixed)
    target = load(path, dtype="auto-float32")
    assert "Q4_K and Q6_K" in str(target.quantised) or "Q6_K and Q4_K" in str(target.quantised)
    assert off(logits(target), logits(dequantised(path))) < 0.08
    answers = Engine(target).generate([TEXT], SamplingParams(max_tokens=12, ignore_eos=True))
    drafted = Engine(target, "sam").generate([TEXT], SamplingParams(max_tokens=12, ignore_eos=True))
    assert answers[0].tokens == drafted[0].tokens


@pytest.mark.parametrize("family", ["gpt-oss", "gemma4", "gemma4-moe", "glm-flash", "smollm", *models.HYBRID])
def test_a_file_says_the_same_expanded_for_other_engines(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(models.make(family, tmp_path / "model", **IN_FILES.get(family, {})), tmp_path / "m.gguf")
    expanded = AutoModelForCausalLM.from_pretrained(setup.expanded(file, torch.float32))
    with torch.no_grad():
        theirs = expanded(torch.tensor([TEXT]), use_cache=False).logits[0]
    torch.testing.assert_close(logits(load(file, dtype="float32")), theirs, atol=2e-4, rtol=1e-4)


def test_experts_in_mxfp4_are_multiplied_as_they_are(tmp_path):
    folder = models.make("gpt-oss", tmp_path / "model", swiglu_limit=7.0)
    path = write(folder, tmp_path / "m.gguf", lambda name: "MXFP4" if "_exps" in name else "F32")
    made = load(path, dtype="auto-float32")
    assert str(made.quantised).startswith("MXFP4 and F32")
    assert not any("Q8_0" in note for note in made.notes)
    assert off(logits(made), logits(dequantised(path))) < 0.05


def test_answers_of_gpt_oss_do_not_end_with_their_first_part():
    texts = ["a", "<|end|>", "<|return|>", "<|call|>", "<|tool_response>"]
    facts = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": [1, 3, 3, 3, 4]}
    assert end_tokens(facts) == {2, 3, 4}
    assert end_tokens({name: values[:2] for name, values in facts.items()}) == {1}


def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path):
    folder = models.make("qwen3-moe", tmp_path / "model")
    apart, joined = (write(folder, tmp_path / f"{fused}.gguf", "Q8_0", fused=fused) for fused in (False, True))
    assert len(GGUF(joined).places) == len(GGUF(apart).places) - 3
    assert torch.equal(logits(load(joined)), logits(load(apart)))


def test_formats_that_are_not_multiplied_are_held_as_q8_0(tmp_path):
    folder = models.make("smollm", tmp_path / "folder", **WIDE, num_hidden_layers=1)
    path = write(folder, tmp_path / "m.gguf", low_bits)
    made, right = load(path, dtype="auto-float32"), dequantised(path)
    assert made.notes[1].startswith("m: matrices held as Q8_0: 1 in IQ2_XXS and 1 in Q2_K; ")
    assert off(logits(made), logits(right)) < 0.08
    assert made.weights_fingerprint == load(path, dtype="float32").weights_fingerprint
    read = replace(checkpoint_of(GGUF(path)), remarks=["what its file says"])
    notes = build(read, Precision.of("auto-float32"), torch.device("cpu")).notes
    assert [*made.notes, "m: what its file says"] == notes


@pytest.mark.parametrize(("family", "becomes"), [("llama2", "Q2_K"), ("smollm", "Q8_0")])
def test_an_embedding_that_is_not_the_head_too_is_not_multiplied(family, becomes, tmp_path):
    folder = models.make(family, tmp_path / "folder", **WIDE, num_hidden_layers=1)
    path = write(folder, tmp_path / "m.gguf", lambda name: "Q2_K" if "token_embd" in name else "Q8_0")
    weights, _ = multipliable(checkpoint_of(GGUF(path)).weights)
    table = weights["model.embed_tokens.weight"]
    assert isinstance(table, Blocks)
    assert table.kind.name == becomes


def test_a_model_in_several_files_is_one(tiny, tmp_path):
    first = write(tiny, tmp_path / "m.gguf", parts=7)
    assert torch.equal(logits(load(first, dtype="float32")), logits(load(tiny, dtype="float32")))
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    refused(parts[1], "name the first")
    parts[1].unlink()
    refused(first, f"{parts[1].name} is not in its folder")


def test_16_bit_files_are_read_and_can_be_quantised(tiny, tmp_path):
    own = load(tiny, dtype="float32")
    for kind in ("F16", "BF16"):
        path = write(tiny, tmp_path / f"{kind}.gguf", kind)
        assert off(logits(load(path, dtype="float32")), logits(own)) < 0.01
        made = load(path, dtype="int8")
        assert made.quantised is not None
        assert off(logits(made), logits(own)) < 0.08


def test_answers_end_at_the_files_tokens_and_at_known_ones(tiny, tmp_path):
    path = write(tiny, tmp_path / "m.gguf", more=lambda writer: writer.add_eot_token_id(3))
    assert load(path).eos_token_ids == (1, 3)
    known = {"tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|im_end|>"], "tokenizer.ggml.token_type": [1, 3, 1]}
    named = {f"tokenizer.ggml.{key}_token_id": number for key, number in (("eos", 0), ("eot", 5), ("eom", 6))}
    assert end_tokens(known | named) == {0, 1, 5, 6}


def test_a_file_drafts_for_its_folder(tiny, tmp_path):
    path = write(tiny, tmp_path / "m.gguf", "Q8_0")
    engine, prompt, wish = (
        Engine(tiny, f"model:{path}", dtype="float32"),
        [5, 6, 7, 5, 6],
        SamplingParams(max_tokens=20),
    )
    (done,) = engine.generate([prompt], wish)
    assert done.tokens == Engine(tiny, dtype="float32").generate([prompt], wish)[0].tokens
    assert sum(done.stats.accepted[1:]) > 0
    for dtype, quantised in (("auto", True), ("float32", False)):  # the target's dtype does not expand a draft
        drafter = Engine(tiny, f"model:{path},dtype={dtype}", dtype="float32").drafter
        network = drafter.model.network
        assert (network.dtype, bool(network.quantised)) == (torch.float32, quantised)


# Mistakes ------------------------------------------------------------------------------------------------------------


def refused(path, *words, dtype="auto", activations=None):
    with pytest.raises(ModelError) as error:
        load(path, dtype=dtype, activations=activations)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_a_file_may_have_a_template_of_its_own_for_tools(tiny, tmp_path):
    def more(writer):
        texts = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
        writer.add_chat_template([{"name": name, "template": text} for name, text in texts.items()])

    folder = shutil.copytree(tiny, tmp_path / "without")
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(write(folder, tmp_path / "m.gguf", more=more, add_bos=False))
    asked = [{"role": "user", "content": "hello"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert [tokenizer.render_chat(asked), tokenizer.render_chat(asked, tools=tools)] == ["plain", "look"]


def test_facts_of_hybrids_that_make_no_model(tmp_path):
    folder = models.make("qwen3.5", tmp_path / "model")
    for key, value, word in (
        ("ssm.time_step_rank", 0, "linear_num_value_heads is 0"),
        ("ssm.group_count", 3, "linear_num_value_heads, 4, is no multiple of linear_num_key_heads, 3"),
        ("ssm.inner_size", 48, "blk.0.ssm_conv1d.weight has shape [160, 3] where metadata asks for [112, 3]"),
        ("full_attention_interval", 2, "m.gguf lacks blk.1.attn_q_norm.weight"),
        ("attention.recurrent_layers", [True], "layer_types"),
        ("rope.dimension_count", 5, "5 numbers of a head, which are no pairs"),
    ):
        add = {int: "add_uint32", list: "add_array"}[type(value)]
        changed = lambda writer, key=key, value=value, add=add: getattr(writer, add)(f"qwen35.{key}", value)  # noqa: E731
        refused(write(folder, tmp_path / "m.gguf", more=changed), word)
    dense = models.make("qwen3-next", tmp_path / "next", **PERIODIC)  # the last layer has no experts
    refused(write(dense, tmp_path / "m.gguf"), "lacks blk.2.ffn_gate_inp.weight")


def test_files_that_are_not_of_a_known_form(tiny, tmp_path):
    whole = write(tiny, tmp_path / "m.gguf").read_bytes()
    spoilt = tmp_path / "spoilt.gguf"
    for data, word in {
        b"": "is not a GGUF file",
        b"PK\3\4" + whole[4:]: "it begins with b'PK",
        b"version https://git-lfs.github.com/spec/v1\n": "git lfs pull",
        whole[:4] + struct.pack("<I", 1) + whole[8:]: "version 1, and 2 and 3 are read",
        whole[:4] + struct.pack(">I", 3) + whole[8:]: "version 50331648, and 2 and 3 are read",
        whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:]: "is cut off or damaged",
    }.items():
        spoilt.write_bytes(data)
        refused(spoilt, word)
    refused(tmp_path / "absent.gguf", "there is no file", "owner/name:FILE.gguf")
    for size in [5, 9, 30, 100, 1000, 5000, len(whole) // 2, len(whole) - 33]:
        spoilt.write_bytes(whole[:size])
        refused(spoilt, "cut off")


def test_a_file_spoilt_anywhere_in_front_is_refused_or_read_but_never_a_bug(tiny, tmp_path):
    whole, spoilt = write(tiny, tmp_path / "m.gguf").read_bytes(), tmp_path / "spoilt.gguf"
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(8, 12_000, 3):
            data[at] = rng.integers(256)
        spoilt.write_bytes(data)
        with suppress(ModelError):
            assert GGUF(spoilt).metadata


@pytest.mark.parametrize(
    "key", ["attention.head_count", "attention.key_length", "embedding_length", "rope.freq_base", "rope.scale_linear"]
)
def test_a_fact_that_should_be_a_number_is_one(key, tiny, tmp_path):
    file = GGUF(write(tiny, tmp_path / "m.gguf"))
    text = f"{key} is 'wide'; it must be a( whole)? number"
    for value, words in (("wide", text), ([1, 2], f"{key} differs from layer")):
        file.metadata[f"llama.{key}"] = value
        with pytest.raises(ModelError, match=words):
            config_of(file)


def test_what_a_file_leaves_out_is_what_llama_cpp_takes(tmp_path):
    granite = GGUF(write(models.make("granite", tmp_path / "granite"), tmp_path / "granite.gguf"))
    del granite.metadata["granite.attention.scale"]
    assert config_of(granite).attention_multiplier == 16**-0.5
    gemma = GGUF(write(models.make("gemma3", tmp_path / "gemma", **IN_FILES["gemma3"]), tmp_path / "gemma.gguf"))
    slides, gemma.places = "gemma3.attention.sliding_window_pattern", gemma.places | dict.fromkeys(map(str, range(62)))
    for pattern, period in ((None, 6), (3, 3)):
        gemma.metadata |= {"gemma3.block_count": 12, slides: pattern}
        full = [kind == "full_attention" for kind in config_of(gemma).layer_types]
        assert full == [(layer + 1) % period == 0 for layer in range(12)]
    assert config_of(gemma).query_pre_attn_scalar == 32  # of a head
    gemma.metadata["gemma3.block_count"] = 62  # Gemma 3 27B alone: its heads are not as wide as their share
    assert config_of(gemma).query_pre_attn_scalar == 64 // 4


def test_a_fact_may_be_given_for_every_layer(tiny, tmp_path):
    file = GGUF(write(tiny, tmp_path / "m.gguf"))
    right = config_of(file)
    for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length", "feed_forward_length"):
        file.metadata[f"llama.{key}"] = [file.metadata[f"llama.{key}"]] * 3
    assert config_of(file).to_dict() == right.to_dict()


def test_experts_that_cannot_be(tmp_path):
    folder = models.make("olmoe", tmp_path / "folder")
    for count, chosen, words in (
        (0, 1, "num_experts is 0"),
        (4, 9, "num_experts_per_tok is 9, and there are 4 experts"),
        (4, 2, "has shape [8, 64] where metadata asks for [4, 64]"),
    ):

        def more(writer, count=count, chosen=chosen):
            writer.add_expert_count(count)
            writer.add_expert_used_count(chosen)

        refused(write(folder, tmp_path / "m.gguf", more=more), words)


def odd_yarn(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(2.0)
    writer.add_float32("llama.rope.scaling.yarn_log_multiplier", 0.5)


def test_positions_scaled_as_older_files_say_it(tiny, tmp_path):
    file = GGUF(write(tiny, tmp_path / "m.gguf"))
    for given, factor in ((None, None), (1.0, None), (4.0, 4.0)):
        file.metadata["llama.rope.scale_linear"] = given
        rope = dict(config_of(file).rope_parameters)
        assert (rope.get("factor"), rope["rope_type"] == "linear") == (factor, factor is not None)


def test_models_that_are_not_supported(tiny, tmp_path):
    path = tmp_path / "m.gguf"
    refused(write(tiny, path, architecture="gemma2"), "architecture 'gemma2'", "llama, qwen2, qwen3, gemma3")
    refused(write(tiny, path, more=lambda w: w.add_expert_count(8)), "a mixture of 8 experts")
    refused(write(tiny, path, more=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)), "'longrope'")
    refused(write(tiny, path, more=odd_yarn), "with yarn_log_multiplier")
    file = GGUF(write(tiny, path))
    file.places["output_norm.weight"] = replace(file.places["output_norm.weight"], type=15)
    with pytest.raises(ModelError, match=r"output_norm.weight is of ggml's type 15, which .* gguf cannot read"):
        file.tensor("output_norm.weight")
    refused(write(tiny, path, more=lambda w: w.add_value_length(8)), "attention.value_length is 8")
    refused(write(tiny, path, more=lambda w: w.add_rope_dimension_count(8)), "rope.dimension_count is 8")
    key = "llama.attention.sliding_window"
    for n in (-1, 1 << 40):
        refused(write(tiny, path, more=lambda w, n=n: w.add_int64(key, n)), f"sliding_window is {n}")
    refused(write(tiny, path, more=lambda w: w.add_block_count(1 << 15)), "has 32768 layers")
    gemma = models.make("gemma3", tmp_path / "gemma3", **IN_FILES["gemma3"])
    key = "gemma3.attention.sliding_window_pattern"
    refused(write(gemma, path, more=lambda w: w.add_string(key, "six")), "pattern is 'six'; it must be a whole number")
    refused(write(tiny, path, leave_out="blk.1.attn_v.weight"), "lacks blk.1.attn_v.weight")
    refused(write(tiny, path, leave_out="token_embd.weight"), "has no token_embd.weight")
    refused(write(tiny, path, more=lambda w: w.add_block_count(2)), "a llama of 2 layers does not have", "blk.2.")
    extra = np.ones((4, 4), np.float32)
    refused(write(tiny, path, more=lambda w: w.add_tensor("blk.0.attn_sinks.weight", extra)), "attn_sinks", "0 more")
    refused(write(tiny, path, more=lambda w: w.add_causal_attention(False)), "attention.causal False")
    refused(write(tiny, path, more=lambda w: w.add_attn_logit_softcapping(50.0)), "attn_logit_softcapping 50.0")


def test_files_of_the_newer_families_that_make_no_model(tmp_path):
    path = tmp_path / "m.gguf"
    flash = models.make("glm-flash", tmp_path / "flash")
    of_a_softmax = gguf.ExpertGatingFuncType.SOFTMAX
    refused(write(flash, path, more=lambda w: w.add_expert_gating_func(of_a_softmax)), "is a DeepSeek", "GLM 4.7 Flash")
    file = GGUF(write(flash, path))
    del file.metadata["deepseek2.attention.key_length_mla"]
    with pytest.raises(ModelError, match=r"has no attention.key_length_mla: it is of an old converter"):
        config_of(file)
    file = GGUF(write(models.make("gemma4-moe", tmp_path / "gemma"), path))
    del file.metadata["gemma4.attention.sliding_window_pattern"]
    with pytest.raises(ModelError, match="does not say which layers have a window"):
        config_of(file)


def test_tokenizers_that_cannot_be_trusted(tiny, tmp_path):
    path = write(tiny, tmp_path / "m.gguf", pre="default")
    target = load(path)  # it can still be given token ids
    assert target.tokenizer is None
    with pytest.raises(ModelError, match="--tokenizer PATH"):
        load_tokenizer(path)
    for facts, word in (
        ({}, "of kind None"),
        ({"model": "t5"}, "of kind 't5', and llama"),
        ({"model": "gpt2", "pre": "qwen2", "tokens": ["a"], "token_type": [1]}, "has no merges"),
        ({"model": "llama", "scores": [0.0]}, "has no tokens"),
        ({"model": "llama", "scores": [0.0], "tokens": ["a"]}, "has no token_type"),
        ({"model": "llama", "scores": [0.0], "tokens": ["a"], "token_type": []}, "cannot be rebuilt (zip"),
        (
            {"model": "gpt2", "pre": "qwen2", "tokens": ["a"], "token_type": [1], "merges": ["nonsense"]},
            "cannot be rebuilt",
        ),
    ):
        file = GGUF(path)
        file.metadata = {f"tokenizer.ggml.{key}": value for key, value in facts.items()}
        with pytest.raises(ModelError) as error:
            tokenizer_of(file, "m")
        assert word in str(error.value)
        assert "--tokenizer PATH" in str(error.value)


def test_a_tokenizer_with_a_token_more_than_the_file_is_another(tiny, tmp_path):
    file, tokenizer = GGUF(write(tiny, tmp_path / "m.gguf")), load_tokenizer(tiny)
    assert same_tokens(tokenizer, file, all_of_them=False)
    last = max(tokenizer.inner.get_vocab().values())
    del file.metadata["tokenizer.ggml.tokens"][last:]
    assert not same_tokens(tokenizer, file, all_of_them=False)


def test_a_file_without_tokens_takes_any_tokenizer_that_it_has_rows_for(tiny, tmp_path):
    file, tokenizer = GGUF(write(tiny, tmp_path / "m.gguf")), load_tokenizer(tiny)
    file.metadata = {key: value for key, value in file.metadata.items() if not key.startswith("tokenizer.")}
    assert same_tokens(tokenizer, file, all_of_them=False)
    assert not same_tokens(tokenizer, file, all_of_them=True)
    file.places["token_embd.weight"] = replace(file.places["token_embd.weight"], shape=(287, 64))
    assert not same_tokens(tokenizer, file, all_of_them=False)


def test_a_token_of_the_tokenizers_class_is_not_compared(tmp_path):
    folder = models.make("qwen2", tmp_path / "m")
    file = GGUF(write(folder, tmp_path / "m.gguf"))
    assert "<|endoftext|>" in load_tokenizer(folder).inner.get_vocab()
    assert all(same_tokens(load_tokenizer(folder), file, all_of_them=everything) for everything in (True, False))


def test_conversations_begin_as_the_file_says(tiny, tmp_path):
    """Whoever's tokenizer it is, and whether the template writes BOS or not. In a folder the template alone decides."""
    folder = Path(shutil.copytree(tiny, tmp_path / "folder"))
    template, chat = (folder / "chat_template.jinja").read_text(), [{"role": "user", "content": "hello"}]
    for text in (template, template.replace("{{ bos_token }}", "")):
        (folder / "chat_template.jinja").write_text(text)
        own = load_tokenizer(folder).encode_chat(chat)
        assert (own[0] == models.BOS) == (text == template)
        for adds in (True, False):
            path, beside = (write(folder, at / "m.gguf", add_bos=adds) for at in (tmp_path, folder))
            for made in (load_tokenizer(path), load_tokenizer(beside), tokenizer_for(path, folder)):
                right = [models.BOS, *own] if adds and own[0] != models.BOS else own
                assert made.encode_chat(chat) == right
                assert made.encode_text(made.render_chat(chat)) == right


def test_a_tokenizer_beside_the_file_is_taken_if_it_is_the_models(tiny, tmp_path):
    path = write(tiny, tmp_path / "m.gguf", pre="default")
    for file in tiny.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load_tokenizer(path).encode("the cat") == load_tokenizer(tiny).encode("the cat")
    models.tokenizer(270).save_pretrained(tmp_path)  # another one
    with pytest.raises(ModelError, match="'default'"):
        load_tokenizer(path)


def test_each_weight_is_given_back_when_it_is_packed(tiny, tmp_path, monkeypatch):
    """Layer by layer, so that the file is not in memory beside the panels."""
    file, given = write(tiny, tmp_path / "m.gguf", "Q8_0"), list[list[Any]]()
    monkeypatch.setattr("paceline.target.decoder.give_back", lambda weights: given.append([*weights]))
    made = load(file)
    assert isinstance(made, Decoder)
    everything, *layers = given
    opened = GGUF(file)
    assert len(everything) == len(weights_of(opened, config_of(opened)))
    assert len(layers) == made.num_layers + 1  # the head is first
    assert {id(weight) for layer in layers for weight in layer} <= {id(weight) for weight in everything}
    blocks = {id(weight) for weight in everything if isinstance(weight, Blocks)}
    looked_up = {id(made._table.weight)}
    assert blocks - {id(weight) for layer in layers for weight in layer} == looked_up
