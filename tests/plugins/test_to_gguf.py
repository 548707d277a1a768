"""Draft heads as GGUF files, read back by the package gguf: the head's numbers under llama.cpp's names."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from paceline.cli import main
from paceline.core.sampling import SamplingParams
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.errors import MethodError, ModelError, PacelineError
from paceline.plugins import to_gguf
from paceline.plugins.to_gguf import write_head
from paceline.target.load import load, quantise_folder
from tests import gguf_files, models
from tests.asks import asked
from tests.draft import blocks
from tests.draft.eagles import d2t_of, described, eagle3, speculators, write
from tests.paths import REPOSITORY

HIDDEN = 64
INNER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return models.model("llama2", num_hidden_layers=8, tie_word_embeddings=False, hidden_size=HIDDEN)


@pytest.fixture(scope="module")
def target(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


def read(file):
    """Metadata by key, and arrays by name."""
    reader = gguf.GGUFReader(file)
    facts = {key: field.contents() for key, field in reader.fields.items()}
    return facts, {one.name: one.data for one in reader.tensors}


def turned(rows, count):
    """Rows of `count` heads, with the numbers that rotate together side by side: pair i is rows i and i + half."""
    half = len(rows) // count // 2
    order = [head * 2 * half + i + side * half for head in range(count) for i in range(half) for side in (0, 1)]
    return rows[order]


def check_layers(found, tensors, paired):
    """The layers' tensors are there; returns their names."""
    seen = set()
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            _, number, part = name.removesuffix(".weight").split(".", 2)
            theirs = f"blk.{number}.{INNER[part]}.weight"
            heads = {"q_proj": 2, "k_proj": 1}.get(part.rpartition(".")[2])
            expected = turned(tensor.numpy(), heads) if heads and paired else tensor.numpy()
            np.testing.assert_array_equal(found[theirs], expected)
            seen.add(theirs)
    return seen


def test_an_eagle3_head(model, target, tmp_path):
    tensors = eagle3(model, prefix="layers.0.") | {"input_norm.weight": torch.rand(3 * HIDDEN)}
    config = speculators(model, norm_before_fc=True, norm_before_residual=True)
    head, file = write(tmp_path / "head", config, tensors), tmp_path / "head.gguf"
    assert write_head(f"eagle3:{head}", target, file, "f32") == "draft-eagle3"
    facts, found = read(file)
    names = check_layers(found, tensors, paired=True)
    assert found.keys() - names == {"fc.weight", "output.weight", "output_norm.weight", "enc.output_norm.weight", "d2t"}
    outer = {"fc": "fc", "lm_head": "output", "norm": "output_norm", "input_norm": "enc.output_norm"}
    for name, theirs in outer.items():
        np.testing.assert_array_equal(found[f"{theirs}.weight"], tensors[f"{name}.weight"].numpy())
    keep = np.flatnonzero(d2t_of(model)[1].numpy())  # token ids, not offsets
    np.testing.assert_array_equal(found["d2t"], keep)
    assert found["d2t"].dtype == np.int64
    wanted = {
        "general.architecture": "eagle3", "eagle3.target_layers": [2, 4, 5], "eagle3.target_hidden_size": HIDDEN,
        "eagle3.norm_before_residual": True, "eagle3.norm_before_fc": True, "eagle3.block_count": 1,
        "eagle3.embedding_length": HIDDEN, "eagle3.attention.head_count": 2, "eagle3.attention.head_count_kv": 1,
        "eagle3.attention.key_length": 24, "eagle3.rope.freq_base": 10000.0,
    }  # fmt: skip
    assert ({key: facts[key] for key in wanted}, len(facts["tokenizer.ggml.tokens"])) == (wanted, models.VOCAB_SIZE)


def test_an_embedding_of_its_own_goes_along(model, target, tmp_path):
    table = model.model.embed_tokens.weight.detach()
    for number, own in enumerate((table, table + 1)):
        head = write(tmp_path / f"{number}", speculators(model), eagle3(model) | {"embed_tokens.weight": own})
        write_head(f"eagle3:{head}", target, tmp_path / "head.gguf")
        assert ("token_embd.weight" in read(tmp_path / "head.gguf")[1]) == bool(number)


OUTER = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}


def test_a_dflash_head_with_a_mask_token(model, target, tmp_path):
    head, file = blocks.save(tmp_path / "head", model, "random"), tmp_path / "head.gguf"
    assert write_head(f"dflash:{head}", target, file, "f32") == "draft-dflash"
    (facts, found), tensors = read(file), load_file(head / "model.safetensors")
    names = check_layers(found, tensors, paired=False)
    assert found.keys() - names == {f"{theirs}.weight" for theirs in OUTER.values()}
    for name, theirs in OUTER.items():
        np.testing.assert_array_equal(found[f"{theirs}.weight"], tensors[f"{name}.weight"].numpy())
    wanted = {
        "general.architecture": "dflash", "dflash.block_size": blocks.BLOCK, "dflash.sample_from_anchor": False,
        "dflash.target_layers": [1, 3], "dflash.has_confidence_head": False, "tokenizer.ggml.mask_token_id": 3,
    }  # fmt: skip
    assert {key: facts[key] for key in wanted} == wanted
    assert "dflash.attention.causal" not in facts


def test_a_dflash2_head(model, target, tmp_path):
    head, file = blocks.save(tmp_path / "head", model, "second"), tmp_path / "head.gguf"
    assert write_head(f"dflash:{head}", target, file, "f16") == "draft-dflash"
    (facts, found), tensors = read(file), load_file(head / "model.safetensors")
    theirs = {f"candidate_selector.{end}_codebook": f"selector_{end}.weight" for end in ("predecessor", "successor")}
    theirs["candidate_selector.hidden_projection.weight"] = "selector_hidden.weight"
    for number in range(blocks.LAYERS):
        for ours, part in (("attention", "attn"), ("mlp", "ffn")):
            theirs[f"layers.{number}.{ours}_conv.base_kernel"] = f"blk.{number}.{part}_conv_base"
            theirs[f"layers.{number}.{ours}_conv.kernel_projection.weight"] = f"blk.{number}.{part}_conv_proj.weight"
    for ours, name in theirs.items():
        kind = np.float32 if ours.endswith("base_kernel") else np.float16
        np.testing.assert_array_equal(found[name], tensors[ours].numpy().astype(kind), strict=True)
    assert len(found) == len(tensors)
    wanted = {
        "dflash.selector_rank": 8, "dflash.selector_top_k": blocks.BEST, "dflash.conv_kernel_size": 2,
        "dflash.conv_group_size": blocks.GROUP, "dflash.block_size": blocks.BLOCK, "dflash.target_layers": [1, 3],
        "tokenizer.ggml.mask_token_id": 3,
    }  # fmt: skip
    assert {key: facts[key] for key in wanted} == wanted


def test_heads_over_a_smaller_vocabulary_bring_their_output(model, target, tmp_path):
    """As `paceline train dflash` makes them: the mask a vector, the output head some of the target's rows."""
    offsets, members = d2t_of(model)
    keep = members.nonzero()[:, 0]
    tensors = blocks.random_tensors(model) | {"mask_embedding": torch.rand(HIDDEN), "d2t": offsets, "t2d": members}
    tensors |= {"confidence_head.proj.weight": torch.rand(1, HIDDEN), "confidence_head.proj.bias": torch.rand(1)}
    own = {"sample_from_anchor": True, "enable_confidence_head": True, "draft_vocab_size": len(keep)}
    config = blocks.config(model, **own, dflash_config={"target_layer_ids": list(blocks.IDS)})
    head, file = write(tmp_path / "head", config, tensors), tmp_path / "head.gguf"
    assert write_head(f"dflash:{head}", target, file, "f32") == "draft-dspark"
    facts, found = read(file)
    np.testing.assert_array_equal(found["d2t"], keep.numpy())
    np.testing.assert_array_equal(found["output.weight"], model.lm_head.weight.detach()[keep].numpy())
    mask, table = facts["tokenizer.ggml.mask_token_id"], model.model.embed_tokens.weight.detach().numpy()
    assert mask == models.VOCAB_SIZE - 1
    np.testing.assert_array_equal(found["token_embd.weight"][mask], tensors["mask_embedding"].numpy())
    np.testing.assert_array_equal(np.delete(found["token_embd.weight"], mask, 0), np.delete(table, mask, 0))
    # A Markov head that adds nothing: without one, llama.cpp leaves the first position out.
    assert found["markov_w1.weight"].shape == (models.VOCAB_SIZE, 1)
    assert found["markov_w2.weight"].shape == (len(keep), 1)
    assert not found["markov_w2.weight"].any()
    sure = np.append(tensors["confidence_head.proj.weight"].numpy(), [[0]], 1)
    np.testing.assert_array_equal(found["conf_proj.weight"], sure)
    assert (facts["dflash.sample_from_anchor"], facts["dflash.has_confidence_head"]) == (True, True)


def test_a_dspark_head(model, target, tmp_path):
    head, file = blocks.save(tmp_path / "head", model), tmp_path / "head.gguf"
    assert write_head(f"dflash:{head}", target, file, "f32") == "draft-dspark"
    (facts, found), tensors = read(file), load_file(head / "model.safetensors")
    for theirs, name in {
        "markov_w1.weight": "markov_head.markov_w1.weight", "markov_w2.weight": "markov_head.markov_w2.weight",
        "conf_proj.weight": "confidence_head.proj.weight", "conf_proj.bias": "confidence_head.proj.bias",
    }.items():  # fmt: skip
        np.testing.assert_array_equal(found[theirs], tensors[name].numpy())
    assert facts["dflash.has_confidence_head"]
    assert "output.weight" not in found, "it is the target's"


def test_a_confidence_head_without_a_markov_head_stays_behind(model, target, tmp_path):
    """llama.cpp reads it with a Markov head alone."""
    tensors = blocks.random_tensors(model) | {"confidence_head.proj.weight": torch.rand(1, HIDDEN)}
    tensors |= {"confidence_head.proj.bias": torch.rand(1)}
    head = write(tmp_path / "head", blocks.config(model, enable_confidence_head=True, is_causal=True), tensors)
    assert write_head(f"dflash:{head}", target, tmp_path / "head.gguf") == "draft-dflash"
    facts, found = read(tmp_path / "head.gguf")
    assert not {"conf_proj.weight", "conf_proj.bias"} & found.keys()
    assert (facts["dflash.has_confidence_head"], facts["dflash.attention.causal"]) == (False, True)


def heads(model):
    """Heads of all kinds that are written: method, config.json and tensors."""
    offsets, members = d2t_of(model)
    few = {"d2t": offsets, "t2d": members, "mask_embedding": torch.rand(HIDDEN)}
    own = {"draft_vocab_size": len(offsets), "dflash_config": {"target_layer_ids": list(blocks.IDS)}}
    norms = {"norm_before_fc": True, "norm_before_residual": True}
    table = {"embed_tokens.weight": torch.rand(models.VOCAB_SIZE, HIDDEN)}
    slides = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    alone = blocks.knowing(model) | {"confidence_head.proj.weight": torch.rand(1, HIDDEN)}
    return {
        "eagle3": ("eagle3", speculators(model), eagle3(model)),
        "eagle3 with norms": (
            "eagle3", speculators(model, **norms),
            eagle3(model) | table | {"input_norm.weight": torch.rand(3 * HIDDEN)}),
        "dflash": ("dflash", blocks.config(model), blocks.random_tensors(model)),
        "dflash, causal": ("dflash", blocks.config(model, is_causal=True), blocks.random_tensors(model)),
        "dflash of few tokens": ("dflash", blocks.config(model, **own), blocks.random_tensors(model) | few),
        "dspark": ("dflash", blocks.dspark(model), blocks.knowing(model)),
        "dflash with windows": (
            "dflash", blocks.config(model, is_causal=False, **slides), blocks.random_tensors(model)),
        "dflash2": ("dflash", blocks.second(model), blocks.second_tensors(model)),
        "dflash2 with a window, scaled": (
            "dflash", blocks.second(model, output_multiplier=0.5, final_logit_softcapping=2.0, **slides),
            blocks.second_tensors(model)),
        "dspark, whose confidence reads states alone": (
            "dflash", blocks.dspark(model, confidence_head_with_markov=False), alone),
    }  # fmt: skip


NAMES = ("eagle3", "eagle3 with norms", "dflash", "dflash, causal", "dflash of few tokens", "dspark",
         "dflash with windows", "dflash2", "dflash2 with a window, scaled",
         "dspark, whose confidence reads states alone")  # fmt: skip


IN_BLOCKS = ("eagle3 with norms", "dflash of few tokens", "dspark", "dflash2")
"""Between them they have every tensor that is written."""


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "f32") for name in NAMES), *((name, "q8_0") for name in IN_BLOCKS)]
)
def test_what_is_written_is_read_back_and_drafts_alike(model, target, tmp_path, name, dtype):
    """With plain decoding's text; in eight bits not every draft is the same."""
    method, config, tensors = heads(model)[name]
    folder, file = write(tmp_path / "head", config, tensors), tmp_path / "head.gguf"
    write_head(f"{method}:{folder}", target, file, dtype)
    loaded, prompts = load(target, dtype="float32", device="cpu"), [[5, 17, 200, 31, 5, 17, 9], [44]]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = [one.tokens for one in Engine(loaded).generate(prompts, params)]
    counts, drafts = [], []
    for path in (folder, file):
        engine = Engine(loaded, f"{method}:{path},tree=9")
        out = engine.generate(prompts, params)
        assert [one.tokens for one in out] == plain
        counts.append([(one.stats.accepted, one.stats.draft_tokens) for one in out])
        row = engine.add(prompts[0], params)
        engine.step()
        drafts.append(engine.drafter.propose(asked(row))[0].tokens.tolist())
    assert len(drafts[0]) > 1
    if dtype == "f32":
        assert counts[0] == counts[1]
        assert drafts[0] == drafts[1]


def test_llama3s_rotations_are_factors_in_a_file(model, target, tmp_path, monkeypatch):
    llama3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
    plain = write(tmp_path / "plain", speculators(model), eagle3(model))
    layers = described(model, rope_parameters=llama3)
    folder = write(tmp_path / "head", speculators(model, transformer_layer_config=layers), eagle3(model))
    factors = gguf_files.factors(LlamaConfig(head_dim=24, rope_parameters=llama3), 10000.0, 24)
    finish = to_gguf._finish
    monkeypatch.setattr(
        to_gguf, "_finish", lambda writer, *rest: (
            writer.add_context_length(64), writer.add_tensor("rope_freqs.weight", factors), finish(writer, *rest)))
    write_head(f"eagle3:{plain}", target, tmp_path / "head.gguf", "f32")
    loaded, tables = load(target, dtype="float32", device="cpu"), []
    for path in (folder, tmp_path / "head.gguf"):
        drafter = create(f"eagle3:{path}")
        drafter.bind(loaded)
        tables.append(drafter.model.network.layers.ops.turns)
    for turns in (*tables, loaded.ops.turns):
        turns.reach(64)
    for name in ("cos", "sin"):
        torch.testing.assert_close(getattr(tables[0], name), getattr(tables[1], name))
    assert not torch.equal(tables[0].cos, loaded.ops.cos)


@pytest.mark.parametrize(
    ("method", "arch", "facts", "says"),
    [
        ("dflash", "eagle3", {}, "holds a drafter of kind eagle3: write eagle3:"),
        ("eagle3", "llama", {}, "is of architecture llama; GGUF drafts are read of eagle3 and dflash"),
        ("dflash", "dspark", {}, "convert it anew"),
        ("dflash", "dflash", {"hyper_connection_count": 4}, "has dflash.hyper_connection_count"),
        ("eagle3", "eagle3", {"use_magic": True}, "has eagle3.use_magic, which nothing here applies"),
        ("dflash", "dflash", {"block_size": 4, "selector_top_k": 16}, "selector_rank is None"),
        ("dflash", "dflash", {"attention.sliding_window": 6}, "and no list of the layers that have it"),
        ("dflash", "dflash", {"rope.dimension_count": 12, "attention.key_length": 24}, "partial_rotary_factor is 0.5"),
        ("eagle3", "eagle3", {}, "does not say hidden_size"),
    ],
)  # fmt: skip
def test_other_gguf_files_are_refused(
    target, tmp_path, method, arch, facts, says
):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), arch)
    for key, value in facts.items():
        (writer.add_bool if value is True else writer.add_uint32)(f"{arch}.{key}", value)
    writer.add_tensor("fc.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(PacelineError) as error:
        Engine(load(target, dtype="float32", device="cpu"), f"{method}:{tmp_path / 'x.gguf'}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_blocks_of_four_bits_stay_or_become_eight(target, tmp_path):
    quantise_folder(target, tmp_path / "int4", "int4")
    for dtype, number, inner in (("f16", 2, "Q4_0"), ("q8_0", 7, "Q8_0")):
        to_gguf.write(tmp_path / "int4", tmp_path / "x.gguf", dtype)
        reader = gguf.GGUFReader(tmp_path / "x.gguf")
        assert reader.fields["general.file_type"].contents() == number
        assert {one.tensor_type.name for one in reader.tensors if "attn_q." in one.name} == {inner}


def test_eight_bits(model, target, tmp_path):
    tensors = eagle3(model)
    head = write(tmp_path / "head", speculators(model), tensors)
    write_head(f"eagle3:{head}", target, tmp_path / "head.gguf", "q8_0")
    found = {one.name: one for one in gguf.GGUFReader(tmp_path / "head.gguf").tensors}
    one = found["blk.0.attn_q.weight"]
    assert one.tensor_type == gguf.GGMLQuantizationType.Q8_0
    expected = turned(tensors["midlayer.self_attn.q_proj.weight"].numpy(), 2)
    assert np.abs(gguf.quants.dequantize(one.data, one.tensor_type) - expected).max() < 0.01
    np.testing.assert_array_equal(found["d2t"].data, np.flatnonzero(d2t_of(model)[1].numpy()))  # as it is in all types


def test_the_vocabulary_of_a_gguf_target(target, model, tmp_path):
    file = gguf_files.write(target, tmp_path / "target.gguf", more=lambda writer: writer.add_mask_token_id(9))
    head = write(tmp_path / "head", speculators(model), eagle3(model))
    write_head(f"eagle3:{head}", file, tmp_path / "head.gguf")
    (own, _), (facts, _) = read(file), read(tmp_path / "head.gguf")
    keys = {key for key in own if key.startswith("tokenizer.ggml.") and not key.endswith("mask_token_id")}
    assert {key: own[key] for key in keys} == {key: facts[key] for key in facts if key.startswith("tokenizer.")}


def test_what_llama_cpp_cannot_run_is_refused(model, target, tmp_path):
    norms = {f"fc_norm.{n}.weight": torch.ones(HIDDEN) for n in range(3)}
    slides = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    cases = {
        "fc_norm": ("eagle3", speculators(model, fc_norm=True), eagle3(model) | norms, "has fc_norm: .*--no-fc-norm"),
        "output": ("eagle3", speculators(model, norm_output=True), eagle3(model), "has norm_output: .*no-norm-output"),
        "taps": (
            "eagle3", speculators(model, eagle_aux_hidden_state_layer_ids=[1, 5]),
            eagle3(model) | {"fc.weight": torch.rand(HIDDEN, 2 * HIDDEN)}, "has 1 layers over 2 states: ",
        ),
        "a window of eagle3": (
            "eagle3",
            speculators(model, transformer_layer_config=described(model, use_sliding_window=True, sliding_window=6)),
            eagle3(model, prefix="layers.0."),
            "no window",
        ),
        "window": ("dflash", blocks.config(model, **slides), blocks.random_tensors(model), "sliding windows"),
        "candidates": (
            "dflash", blocks.second(model, selector_vocab_size=300), blocks.second_tensors(model), "drafts all tokens"),
        "mask": (
            "eagle3", speculators(model, speculators_model_type="peagle", mask_token_id=3),
            eagle3(model) | {"mask_hidden": torch.rand(1, 1, 3 * HIDDEN)}, "P-EAGLE"),
        "other": ("eagle3", described(model, hidden_size=48, draft_vocab_size=9), eagle3(model), "states of 48"),
    }
    for name, (method, config, tensors, words) in cases.items():
        head = write(tmp_path / name, config, tensors)
        with pytest.raises(MethodError, match=words):
            write_head(f"{method}:{head}", target, tmp_path / "head.gguf")
    assert not [*tmp_path.glob("*.gguf*")]


def test_the_command(model, target, tmp_path, capsys):
    head = write(tmp_path / "head", speculators(model), eagle3(model))

    def run(*words):
        return main(["export", "gguf", *map(str, words)]), *capsys.readouterr()

    status, said, _ = run(f"eagle3:{head}", tmp_path / "head.gguf", "--target", target)
    assert (status, said) == (0, f"--spec-type draft-eagle3\nwrote {tmp_path / 'head.gguf'}\n")
    assert run(target, tmp_path / "model.gguf", "--dtype", "q8_0")[0] == 0
    assert read(tmp_path / "model.gguf")[0]["general.file_type"] == 7
    demo = REPOSITORY / "models" / "demo"
    for words, says in (
        ([f"eagle3:{demo}-eagle3", tmp_path / "x.gguf", "--target", demo], "demo-eagle3 has fc_norm and norm_output: "),
        (["eagle3:nowhere", tmp_path / "x.gguf", "--target", target], "there is no folder"),
        ([f"eagle3:{head}", tmp_path / "x.gguf"], "--target MODEL is for draft heads"),
        ([f"corpus:{tmp_path / 'none'}", tmp_path / "cache"], "there is no store"),
    ):
        status, _, told = run(*words)
        error, *more = reversed(told.splitlines())
        assert (status, says in error) == (2, True)
        assert all("compiling kernels" in line for line in more)  # where that takes long
    assert not (tmp_path / "x.gguf").exists()


def test_what_cannot_be_written_is_one_line(target, tmp_path):
    """A number that is none, with blocks and without; a tokenizer that is no BPE, or not there."""
    folder, file = Path(shutil.copytree(target, tmp_path / "copy")), tmp_path / "x.gguf"
    for text in ('{"model": {"type": "Unigram", "vocab": []}}', None):
        (folder / "tokenizer.json").unlink()
        if text:
            (folder / "tokenizer.json").write_text(text)
        with pytest.raises(ModelError, match="has no byte-level BPE"):
            to_gguf.write(folder, file)
    shutil.copy(target / "tokenizer.json", folder)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    for dtype in ("f32", "q8_0"):
        with pytest.raises(ModelError, match=f"{name} has numbers that are not finite"):
            to_gguf.write(folder, file, dtype)
    assert not [*tmp_path.glob("*.gguf*")]
