"""mtp: in every layout it computes what transformers' module does; targets load, with their heads, as before."""

import json

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from paceline.cli.options import WITH_HEAD, drafter_for, open_engine
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.draft import registry
from paceline.draft.methods.mtp import Mtp, MtpNetwork
from paceline.draft.models.layers import placed
from paceline.engine.engine import Engine
from paceline.engine.options import EngineOptions
from paceline.errors import ModelError, PacelineError
from paceline.formats.heads.gguf import head_in
from paceline.formats.heads.mtp import head_names, head_of
from paceline.kernels.blocks import Blocks
from paceline.target.decoder import Decoder
from paceline.target.hf import HFTarget
from paceline.target.load import load, quantise_folder
from tests import gguf_files, models, native
from tests.asks import asked
from tests.draft import mtps
from tests.draft.answered import weakened
from tests.draft.eagles import write
from tests.pairs import paired

STEPS = 3
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
PROMPTS = [[5, 17, 200, 31, 5, 17, 9], [44], [60, 61, 60]]


def network_of(model, tensors):
    return MtpNetwork("x", head_of(tensors, tensors.__getitem__), native.of(model))


@torch.inference_mode()
def forced(head, states, text, pairs):
    """Logits of a draft after `pairs` pairs of a text whose tokens are the text's own, step by step."""
    slot, logits, tokens = head.cache.add_row(len(text)), [], text[1 : pairs + 1].tolist()
    features = head.first(states[:pairs])
    for step in range(STEPS):
        done = pairs - 1 + step if step else 0
        segment = Segment(slot, np.array(tokens), np.arange(-1, len(tokens) - 1), start=done, num_logits=1)
        out, read = head.forward(head.embedded(torch.tensor(tokens[done:])), features, [segment])
        logits.append(head.head(read)[0])
        features = out[-1:]
        tokens.append(int(text[pairs + 1 + step]))
    return logits


@torch.no_grad()
def transformers_own(model, tensors, text, pairs):
    """The same with transformers' module and cache."""
    layer, ids, cache = mtps.reference(model, tensors), torch.from_numpy(text)[None], DynamicCache()
    hidden, embedded = model.model(ids[:, :pairs]).last_hidden_state, model.model.embed_tokens(ids)
    if model.config.model_type == "gemma3_text":  # the head reads rows as they are stored
        embedded = F.embedding(ids, model.model.embed_tokens.weight)
    logits = []
    for step in range(STEPS):
        places = torch.arange(pairs)[None] if not step else torch.tensor([[pairs - 1 + step]])
        given = embedded[:, 1 : pairs + 1] if not step else embedded[:, pairs + step : pairs + step + 1]
        nested = {"layer_type": "full_attention"} if model.config.model_type == "gemma3_text" else {}
        turns = model.model.rotary_emb(given, places, **nested)
        hidden = layer(given, hidden[:, -len(places[0]) :], turns, None, places, cache)
        logits.append(model.lm_head(hidden[0, -1]))
    return logits


FAMILIES = {
    "llama3": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3-moe": {},
    "granite": {"logits_scaling": 1.0},
    "olmo2": {},
    "gemma3": {"layer_types": ["full_attention"] * 3},
    "qwen3-next": {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "mlp_only_layers": []},
    "qwen3.5": {"tie_word_embeddings": False},
    "qwen3.5-moe": {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "glm-flash": {},
}


@pytest.mark.parametrize(("layout", "family"), paired(mtps.LAYOUTS, FAMILIES))
def test_a_head_computes_what_transformers_module_does(family, layout):
    """transformers 5.23's MtpLayer, several steps deep on its own output, with forced tokens."""
    model = models.model(family, **FAMILIES[family])
    tensors = mtps.random_head(model)
    text = np.random.default_rng(0).integers(4, models.VOCAB_SIZE, 14)
    with torch.no_grad():
        states = model.model(torch.from_numpy(text)[None]).last_hidden_state[0]
    head = network_of(model, mtps.in_layout(tensors, layout, model.config.num_hidden_layers))
    for ours, theirs in zip(forced(head, states, text, 9), transformers_own(model, tensors, text, 9), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)


def test_in_an_engine_the_head_reads_the_targets_last_states(tmp_path):
    model = models.model("qwen3", tie_word_embeddings=False)
    tensors = mtps.random_head(model)
    engine = Engine(native.of(model, eos=()), f"mtp:{mtps.save(tmp_path, tensors)},tree=0,draft=1")
    row = engine.add(np.random.default_rng(0).integers(4, models.VOCAB_SIZE, 9).tolist(), GREEDY)
    engine.step()
    (tree,) = engine.drafter.propose(asked(row))
    after = transformers_own(model, tensors, np.array([*row.tokens, 0, 0, 0]), 9)[0]
    assert tree.tokens[1:].tolist() == [int(after.argmax())]


# Whole models --------------------------------------------------------------------------------------------------------

MODELS = {"qwen": "qwen3", "deepseek": "qwen3-moe", "mimo": "qwen2"}


def make(folder, layout, tensors=None):
    """A model whose layers add little, with its head in its checkpoint."""
    model = models.model(MODELS[layout], tie_word_embeddings=False)
    if layout != "deepseek":  # which has experts
        weakened(model, 0.05)
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    head = mtps.knowing_head(model, 0.02) if tensors is None else tensors
    mtps.add(folder, mtps.in_layout(head, layout, model.config.num_hidden_layers))
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    if layout == "mimo":
        config |= {"model_type": "mimo", "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("layout", MODELS)
def test_a_model_drafts_with_the_head_in_its_own_folder(tmp_path, layout):
    """And writes what it writes without; the head is no part of the model's fingerprint."""
    folder = make(tmp_path / "model", layout)
    target = load(folder, dtype="float32", device="cpu")
    assert target.tokenizer is not None
    plain = [one.tokens for one in Engine(target).generate(PROMPTS, GREEDY)]
    for options in ("", ",tree=0,draft=3", ",tree=5"):
        out = Engine(target, f"mtp{options}").generate(PROMPTS, GREEDY)
        assert [one.tokens for one in out] == plain
        if layout != "deepseek" and not options.endswith("auto"):  # auto may see that drafting does not pay here
            assert sum(sum(one.stats.accepted[1:]) for one in out) > 0
    bare = make(tmp_path / "bare", layout, mtps.random_head(models.model(MODELS[layout])))
    assert load(bare, dtype="float32", device="cpu").weights_fingerprint == target.weights_fingerprint


def test_a_head_in_a_folder_of_speculators_drafts(tmp_path):
    model = models.model("qwen3", tie_word_embeddings=False)
    weakened(model, 0.05)
    tensors = mtps.in_layout(mtps.knowing_head(model, 0.02), "speculators", 3)
    folder = write(tmp_path, {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}, tensors)
    target = native.of(model, eos=())
    plain = [one.tokens for one in Engine(target).generate(PROMPTS, GREEDY)]
    out = Engine(target, f"mtp:{folder}").generate(PROMPTS, GREEDY)
    assert [one.tokens for one in out] == plain
    assert sum(sum(one.stats.accepted[1:]) for one in out) > 0


def test_a_model_in_blocks_uses_the_head_of_the_folder_it_was_made_from(tmp_path):
    folder = make(tmp_path / "model", "qwen")
    quantise_folder(folder, tmp_path / "int8", "int8")
    target = load(tmp_path / "int8", device="cpu", exact=True)
    plain = [one.tokens for one in Engine(target).generate(PROMPTS, GREEDY)]
    for dtype in ("auto", "int8"):
        out = Engine(target, f"mtp:{folder},dtype={dtype}").generate(PROMPTS, GREEDY)
        assert [one.tokens for one in out] == plain
        assert sum(sum(one.stats.accepted[1:]) for one in out) > 0
    with pytest.raises(PacelineError, match="has no multi-token-prediction head"):
        Engine(target, "mtp")


@pytest.mark.parametrize(("family", "kind"), [
    ("llama3", "F32"), ("qwen3", "Q8_0"), ("qwen3-moe", "F32"), ("gemma3", "F32"), ("olmo2", "F32"),
    ("qwen3.5", "F32"), ("qwen3.5-moe", "Q8_0"), ("qwen3-next", "F32"), ("glm-flash", "F32"),
])  # fmt: skip
def test_a_model_in_a_gguf_file_drafts_with_the_head_in_it(tmp_path, family, kind):
    """llama.cpp's `nextn` tensors of the block after the model's own; the head is no part of the fingerprint."""
    changes = FAMILIES[family] | {"tie_word_embeddings": False}
    changes |= {"query_pre_attn_scalar": 32} if family == "gemma3" else {}
    folder, model = models.make(family, tmp_path / "model", **changes), models.model(family, **changes)
    bare = load(gguf_files.write(folder, tmp_path / "bare.gguf", kind), dtype="auto-float32", device="cpu", exact=True)
    head = mtps.random_head(model)
    mtps.add(folder, mtps.in_layout(head, "deepseek", 3))

    def more(writer):
        writer.add_block_count(4)
        writer.add_uint32(f"{writer.arch}.nextn_predict_layers", 1)

    file = gguf_files.write(folder, tmp_path / "model.gguf", kind, more=more)
    target = load(file, dtype="auto-float32", device="cpu", exact=True)
    assert isinstance(target, Decoder)
    assert (target.num_layers, target.weights_fingerprint) == (3, bare.weights_fingerprint)
    found, wanted = head_in(file, target.shape), head_of(head, head.__getitem__)
    assert found.keys() == wanted.keys()
    for name in wanted:
        dense = found[name].dense() if isinstance(found[name], Blocks) else found[name]
        torch.testing.assert_close(dense, wanted[name], atol=0.01 if kind == "Q8_0" else 1e-6, rtol=0)
    plain = [one.tokens for one in Engine(bare).generate(PROMPTS, GREEDY)]
    for spec in ("mtp", f"mtp:{file},tree=0,draft=3"):
        out = Engine(target, spec).generate(PROMPTS, GREEDY)
        assert [one.tokens for one in out] == plain
        assert sum(one.stats.draft_tokens for one in out) > 0
    assert "has no multi-token-prediction head" in refusal("", bare)
    assert "runs in transformers" in refusal(file, HFTarget(models.model("llama3")))


def test_auto_takes_the_head_that_the_model_brings(tmp_path):
    """And leaves it out for a model without one; then what its other drafters do is the same."""
    folder = make(tmp_path / "model", "qwen")
    target = load(folder, dtype="float32", device="cpu")
    plain = [one.tokens for one in Engine(target).generate(PROMPTS, GREEDY)]
    engine = Engine(target, "auto:mtp?|suffix", budget=False)
    assert [part.name for part in engine.drafter.parts] == ["mtp", "suffix"]
    assert [one.tokens for one in engine.generate(PROMPTS, GREEDY)] == plain
    bare = load(models.make("qwen3", tmp_path / "bare"), dtype="float32", device="cpu")
    assert (target.brings_head, bare.brings_head) == (True, False)
    assert [part.name for part in Engine(bare, "auto:mtp?|suffix").drafter.parts] == ["suffix"]
    with pytest.raises(PacelineError, match="has no multi-token-prediction head"):
        Engine(bare, "auto:mtp|suffix")


def test_a_model_that_brings_a_head_drafts_with_it_unless_told_otherwise(tmp_path):
    folder, bare = make(tmp_path / "model", "qwen"), models.make("qwen3", tmp_path / "bare")
    file = gguf_files.write(bare, tmp_path / "bare.gguf")
    assert drafter_for(str(folder), None) == WITH_HEAD
    assert drafter_for(str(folder), "sam") == "sam"
    assert {drafter_for(str(place), None) for place in (bare, file, tmp_path / "none", "smollm2")} == {"suffix"}
    engine = open_engine(str(folder), drafter_for(str(folder), None), EngineOptions(dtype="float32"))
    assert [part.name for part in engine.drafter.parts] == ["mtp", "suffix"]


def test_a_head_keeps_its_files_blocks_beside_a_target_in_blocks(tmp_path):
    model = models.model("qwen3", tie_word_embeddings=False)
    folder = models.make("qwen3", tmp_path / "model", tie_word_embeddings=False)
    mtps.add(folder, mtps.in_layout(mtps.random_head(model), "deepseek", 3))

    def more(writer):
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)

    kinds = lambda name: "IQ4_NL" if "attn_v" in name else "Q4_0"  # noqa: E731
    file, shape = gguf_files.write(folder, tmp_path / "m.gguf", kinds, more=more), native.of(model).shape
    for target, dtype, held in (
        (load(file), "auto", {"Q4_0", "Q8_0"}),  # IQ4_NL is held as Q8_0
        (load(file), "int8", {"Q8_0"}),
        (load(file, dtype="float32"), "auto", set()),
        (load(folder, dtype="int8"), "auto", {"Q4_0", "Q8_0"}),
    ):
        here = placed(head_in(file, shape), target, dtype)
        blocks = [weight for weight in here.values() if isinstance(weight, Blocks)]
        assert {weight.kind.name for weight in blocks} == held
        assert {weight.activations for weight in blocks} <= {target.activations}
        Engine(target, f"mtp:{file}" if dtype == "auto" else f"mtp:{file},dtype={dtype}").generate(PROMPTS[:1], GREEDY)
        assert "embedding" not in vars(target), "the target's whole table is not expanded"


@pytest.mark.parametrize("offset", [1.0, 0.0])
def test_a_head_alone_in_a_gguf_file(tmp_path, offset):
    """Of a family whose norms have an offset, which some files add to the head's own norms and some do not; its last
    norm may be the model's place for one."""
    model = models.model("qwen3.5", tie_word_embeddings=False)
    head, target = mtps.random_head(model), native.of(model)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = head[f"mtp.{name}.weight"] / 4 - 0.25
    theirs = {"fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm"}
    written = {}
    for name, tensor in head.items():
        part = name.removeprefix("mtp.").removesuffix(".weight")
        inner = gguf_files.INNER.get(part.removeprefix("layers.0."), "").replace("ffn_norm", "post_attention_norm")
        add = 0.0 if "norm" not in part else 1.0 if inner else offset
        written["output_norm" if part == "norm" else f"blk.3.{inner or theirs[part]}"] = tensor + add

    def write_file(file, tensors):
        writer = gguf.GGUFWriter(str(file), "qwen35")
        for name, tensor in tensors.items():
            writer.add_tensor(f"{name}.weight", tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    file = write_file(tmp_path / "mtp.gguf", written)
    found, wanted = head_in(file, target.shape), head_of(head, head.__getitem__)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-6, rtol=0)
    plain = [one.tokens for one in Engine(target).generate(PROMPTS, GREEDY)]
    out = Engine(target, f"mtp:{file}").generate(PROMPTS, GREEDY)
    assert [one.tokens for one in out] == plain
    sinks = write_file(tmp_path / "sinks.gguf", {**written, "blk.3.attn_sinks": torch.ones(4)})
    assert "its head has blk.3.attn_sinks.weight, which no layer" in refusal(sinks, target)


def test_of_several_heads_the_first_drafts():
    model = models.model("llama2", tie_word_embeddings=False)
    for layout in mtps.LAYOUTS:
        one = mtps.in_layout(mtps.random_head(model), layout, 9)
        other = mtps.in_layout(mtps.random_head(model, seed=8), layout, 10)
        if layout != "deepseek":  # that of the tenth layer is another one's already
            other = {name.replace("layers.0.", "layers.1."): t for name, t in other.items()}
            other = {name: t for name, t in other.items() if "layers.1." in name}
        whole = {**other, **one}
        assert head_names(whole) == head_names(one)


# Refusals ------------------------------------------------------------------------------------------------------------


def refusal(path, target):
    with pytest.raises(PacelineError) as caught:
        registry.create(f"mtp:{path}" if path else "mtp").bind(target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_head_for_a_target_is_refused_in_one_line(tmp_path):
    model = models.model("llama2", tie_word_embeddings=False)
    target, good = native.of(model), mtps.random_head(model)
    layer = "mtp.layers.0."

    def says(tensors, of=target):
        return refusal(mtps.save(tmp_path / "head", tensors), of)

    latent = good | {f"{layer}self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2, 64)}
    assert "has latent attention (MLA), which nothing here runs" in says(latent)
    assert "has latent attention (MLA)" in says(mtps.in_layout(latent, "deepseek", 3), HFTarget(model))
    shared = good | {f"{layer}mlp.shared_expert.up_proj.weight": torch.zeros(2, 64)}
    assert "has experts that all tokens share" in says(shared)
    mixture = mtps.random_head(models.model("qwen3-moe"))
    assert "has other experts than its target's" in says(mixture)
    assert "mtp runs a layer of the target's kind, and a model runs in transformers" in says(good, HFTarget(model))
    assert "has layers.0.mtp.fc.bias, which nothing here reads" in says(good | {"mtp.fc.bias": torch.zeros(64)})
    assert "has no multi-token-prediction head; `paceline train mtp` makes one" in says({"x": torch.zeros(1)})
    for entries, what in (
        ({"model_type": "mlp_speculator"}, "is an MLP or LSTM speculator (model_type is mlp_speculator)"),
        ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "is an MLP or LSTM speculator (architectures"),
        ({"speculators_model_type": "eagle3"}, "is a drafter of type eagle3: write eagle3:"),
    ):
        assert what in refusal(write(tmp_path / "other", entries, {"emb.0.weight": torch.zeros(2, 2)}), target)
    one = {"model.mtp_layers.0.input_proj.weight": torch.tensor(1.0)}
    assert "its fc.weight is [] where [64, 128]" in says(mtps.in_layout(good, "mimo", 3) | one)
    small = models.model("llama2", hidden_size=48, num_attention_heads=4, head_dim=12)
    assert "is no head for this target" in says(mtps.random_head(small))
    assert "is not from a model's folder" in refusal("", target)
    assert "is a file" in refusal(mtps.save(tmp_path / "head", good) / "model.safetensors", target)


@pytest.mark.parametrize("native_decoder", [True, False])
def test_more_layers_than_asked_for_are_refused_unless_they_are_heads(tmp_path, native_decoder):
    folder = models.make("qwen3", tmp_path, tie_word_embeddings=False)
    model = models.model("qwen3", tie_word_embeddings=False)
    mtps.add(folder, mtps.in_layout(mtps.random_head(model), "deepseek", 3))
    assert load(folder, dtype="float32", device="cpu", native=native_decoder).num_layers == 3
    mtps.add(folder, {"model.layers.4.mlp.up_proj.weight": torch.zeros(96, 64)})
    with pytest.raises(ModelError, match=r"has weights of 5 layers, and its config\.json asks for 3"):
        load(folder, dtype="float32", device="cpu", native=native_decoder)


def test_of_experts_those_that_a_token_uses_are_read(tmp_path):
    model = models.model("qwen3-moe", tie_word_embeddings=False)
    tensors = mtps.random_head(model)
    made = registry.create(f"mtp:{mtps.save(tmp_path, tensors)}")
    assert isinstance(made, Mtp)
    made.bind(native.of(model))
    every = sum(tensor.nbytes for tensor in tensors.values())
    unused = sum(t.nbytes for name, t in tensors.items() if ".experts." in name) * 6 / 8  # 2 of 8 are used
    assert made.weight_bytes == every - unused + model.lm_head.weight.nbytes
