"""A Gemma 4's assistant as `mtp:PATH`: it computes what transformers' module does, and drafts for its own target alone.

That its drafts never change a text is tested with all other drafters, in test_drafter_contract.py."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.draft.methods.mtp import Mtp, MtpConfig
from paceline.draft.models.assistant import AssistantNetwork
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import BLOCK
from paceline.errors import PacelineError
from paceline.formats.heads.assistant import read_assistant
from paceline.formats.heads.vocab import Vocabulary
from paceline.target.base import Needs
from paceline.train.saving import save_vocabulary
from tests import gguf_files, models, native
from tests.draft.answered import weakened
from tests.draft.assistants import all_shared, knowing_assistant, random_assistant

FAMILIES = {"gemma4": 0, "gemma4-moe": 0, "gemma4, clusters": 16}
"""By family: number of clusters of tokens; 0: none. The moe's layers read keys as values, and share none."""
TEXTS = ((21, 3), (6, 1))
"""Two rows' lengths, one longer than the window of 8, and how many nodes of each are run together."""


def texts():
    rng = np.random.default_rng(0)
    return [rng.integers(4, models.VOCAB_SIZE, length) for length, _ in TEXTS]


@torch.no_grad()
def transformers_own(model, assistant, text, tokens, states):
    """Logits and states of transformers' module for nodes after a text whose keys are the target's own."""
    for kind in ("sliding_attention", "full_attention"):
        own = [layer.self_attn for layer in model.model.layers if layer.self_attn.layer_type == kind]
        [one for one in own if not one.is_kv_shared_layer][-1].store_full_length_kv = True
    shared = model.model(torch.from_numpy(text)[None], return_shared_kv_states=True).shared_kv_states
    read = torch.cat([model.model.embed_tokens(torch.from_numpy(tokens)), states], -1)
    out = [
        assistant(inputs_embeds=one[None, None], position_ids=torch.tensor([[len(text)]]), shared_kv_states=shared)
        for one in read
    ]
    return torch.cat([one.logits[0] for one in out]), torch.cat([one.last_hidden_state[0] for one in out])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_computes_what_transformers_module_does(tmp_path, name, exact):
    """Of several nodes in each of two rows, in one forward; over a window, and without one; in two steps."""
    model = models.model(name.partition(",")[0])
    assistant, target = random_assistant(model, clusters=FAMILIES[name]), native.of(model, eos=())
    assistant.save_pretrained(tmp_path)
    if exact:  # attention is compiled then
        target.make_exact()
    network = AssistantNetwork(read_assistant(tmp_path, target), target, MtpConfig(checkpoint=str(tmp_path)))
    rng, slots, states = np.random.default_rng(1), [], []
    for text in texts():
        slots.append(target.add_row(len(text)))
        whole = target.verify([Segment.chunk(slots[-1], text, last=False)], Needs(new_layers=(target.num_layers,)))
        target.commit(slots[-1], range(len(text)))
        states.append(whole.hidden[target.num_layers][-1:].expand(dict(TEXTS)[len(text)], -1))
    for _ in range(2):
        tokens = [rng.integers(4, models.VOCAB_SIZE, count) for _, count in TEXTS]
        nodes = [Segment.apart(slot, own, len(own)) for slot, own in zip(slots, tokens, strict=True)]
        out, read = network.forward(torch.cat(states), nodes)
        of_rows = zip(network.head(read).split([3, 1]), out.split([3, 1]), strict=True)
        for (logits, made), text, own, given in zip(of_rows, texts(), tokens, states, strict=True):
            theirs, after = transformers_own(model, assistant, text, own, given)
            drafted = logits > -torch.inf  # Theirs have the lowest logit less 1 for tokens of other clusters.
            torch.testing.assert_close(logits[drafted], theirs[drafted].float(), atol=1e-4, rtol=1e-4)
            assert (drafted.sum(1) == (theirs > theirs.amin(1, keepdim=True)).sum(1)).all() or not FAMILIES[name]
            torch.testing.assert_close(made, after, atol=1e-4, rtol=1e-4)
        states = list(out.split([3, 1]))


def test_an_engine_begins_with_the_targets_last_state_and_what_the_nodes_made(tmp_path):
    """The first draft of a chain is transformers' own, token by token."""
    model = models.model("gemma4")
    assistant = random_assistant(model)
    assistant.save_pretrained(tmp_path)
    engine = Engine(native.of(model, eos=()), f"mtp:{tmp_path},tree=0,draft=3", budget=False)
    row = engine.add(texts()[0].tolist(), SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    drafter, seen = engine.drafter, []
    usual = drafter.propose
    drafter.propose = lambda asks: seen.extend(made := usual(asks)) or made
    engine.step()
    with torch.no_grad():
        states = model.model(torch.from_numpy(texts()[0])[None]).last_hidden_state[0, -1:]
        token, expected = row.tokens[21], []
        for _ in range(3):
            logits, states = transformers_own(model, assistant, texts()[0], np.array([token]), states)
            expected.append(token := int(logits.argmax()))
    assert seen[0].tokens[1:].tolist() == expected


@pytest.mark.parametrize(("batch", "options"), [(1, ""), (8, ""), (8, ",tree=0"), (8, ",dtype=int8")])
def test_batches_of_one_and_eight_write_what_plain_decoding_does(tmp_path, batch, options):
    model = weakened(models.model("gemma4", tie_word_embeddings=False), 0.05, sureness=4)
    knowing_assistant(model, 0.02).save_pretrained(tmp_path)
    rng, target = np.random.default_rng(2), native.of(model, eos=())
    prompts = [rng.integers(4, models.VOCAB_SIZE, n).tolist() for n in (23, 5, 1, 12, 40, 7, 9, 31, 2, 16)]
    wish = SamplingParams(max_tokens=12, ignore_eos=True)
    out = Engine(target, f"mtp:{tmp_path}{options}", max_batch=batch, budget=False).generate(prompts, wish)
    assert [one.tokens for one in out] == [one.tokens for one in Engine(target).generate(prompts, wish)]
    assert sum(sum(one.stats.accepted[2:]) for one in out) > 0


def test_states_of_reused_tokens_are_not_wanted(tmp_path):
    """So a folder of prompts' keys and values serves it."""
    model = models.model("gemma4")
    random_assistant(model).save_pretrained(tmp_path / "assistant")
    prompt = np.random.default_rng(3).integers(4, models.VOCAB_SIZE, BLOCK + 9).tolist()
    wish = SamplingParams(max_tokens=4, ignore_eos=True)
    for reused in (0, BLOCK):
        engine = Engine(native.of(model, eos=()), f"mtp:{tmp_path / 'assistant'}", prefix_cache=tmp_path / "kept")
        (done,) = engine.generate([prompt], wish)
        assert done.stats.draft_tokens
        assert done.reused == reused


@pytest.mark.parametrize("clusters", [0, 16])
def test_a_small_vocabulary(tmp_path, clusters):
    """It leaves out rows of the output head; a head that reads the likeliest clusters has no use for it."""
    model, keep = models.model("gemma4"), torch.tensor([7, 30, 200])
    random_assistant(model, clusters=clusters).save_pretrained(tmp_path)
    save_vocabulary(tmp_path / "few.safetensors", Vocabulary(keep))
    drafter = Mtp(MtpConfig(checkpoint=str(tmp_path), vocab=str(tmp_path / "few.safetensors")))
    if clusters:
        with pytest.raises(PacelineError, match=r"^vocab=.*few.safetensors: the head of .* reads the likeliest tokens"):
            drafter.bind(native.of(model))
        return
    drafter.bind(native.of(model))
    assert drafter.model.columns.tolist() == keep.tolist()


def test_the_assistant_of_a_unified_gemma_is_read_alike(tmp_path):
    model, both = models.model("gemma4"), []
    for kind in ("", "_unified"):
        random_assistant(model).save_pretrained(tmp_path / kind)
        file = tmp_path / kind / "config.json"
        file.write_text(file.read_text().replace('"gemma4_', f'"gemma4{kind}_'))
        both.append(read_assistant(tmp_path / kind, native.of(model)))
    assert both[0].shape == both[1].shape
    assert both[0].tensors.keys() == both[1].tensors.keys()


def changed(folder, **entries):
    """Change entries of the layers' configuration, or of the whole for those that are there."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name, value in entries.items():
        (config if name in config else config["text_config"])[name] = value
    file.write_text(json.dumps(config))


OTHERS = {
    "a Llama": ("llama2", {}, "is the assistant of another model than .*: it drafts for a Gemma 4, and this is none"),
    "width": ("gemma4", {"backbone_hidden_size": 96}, "reads states of 96 numbers, and here they have 64"),
    "tokens": ("gemma4", {"vocab_size": 288}, "knows 288 tokens, and here are 320"),
    "heads": ("gemma4-moe", {}, "layer 0 reads keys of layers with a window in 1 heads of 16 numbers; here they are 2"),
    "angles": (
        "gemma4",
        {"rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        }},
        "layer 0 reads keys of layers with a window, which rotate by other angles here",
    ),
    "experts": ("gemma4", {"enable_moe_block": True}, "config.json cannot be used: .*enable_moe_block"),
    "an activation": ("gemma4", {"hidden_activation": "relu"}, "activation 'relu' is not one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_an_assistant_of_another_model_is_refused_in_one_line(tmp_path, name):
    family, entries, says = OTHERS[name]
    random_assistant(models.model("gemma4")).save_pretrained(tmp_path)
    changed(tmp_path, **entries)
    with pytest.raises(PacelineError, match=says) as error:
        Engine(native.of(models.model(family)), f"mtp:{tmp_path}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("post_projection.weight", None, r"has no post_projection.weight"),
        ("model.layers.1.self_attn.q_norm.weight", torch.ones(3), r"q_norm.weight is \[3\] where \[16\] is wanted"),
        ("masked_embedding.token_ordering", torch.zeros(320, dtype=torch.int64), "is no order of 320 tokens in 16"),
        ("model.layers.0.self_attn.k_proj.weight", torch.ones(16, 32), "which nothing here reads"),
    ],
)
def test_a_damaged_assistant_is_refused_in_one_line(tmp_path, name, damage, says):
    random_assistant(models.model("gemma4"), clusters=16).save_pretrained(tmp_path)
    tensors = load_file(file := tmp_path / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if damage is None else {name: damage}), file, {"format": "pt"})
    with pytest.raises(PacelineError, match=says) as error:
        Engine(native.of(models.model("gemma4")), f"mtp:{tmp_path}")
    assert "\n" not in str(error.value)


def in_a_file(assistant, at, kind="F32"):
    """The assistant as llama.cpp's converter writes it: a Gemma 4 of another name, with two products more."""
    config = assistant.config.get_text_config().to_dict() | {"num_kv_shared_layers": 0, "final_logit_softcapping": 30.0}
    (at / "whole").mkdir()
    (at / "whole" / "config.json").write_text(json.dumps(config))
    state = {name: one.clone() for name, one in assistant.state_dict().items() if name.startswith("model.")}
    save_file(state, at / "whole" / "model.safetensors", {"format": "pt"})
    models.tokenizer().save_pretrained(at / "whole")

    def more(writer):
        writer.add_uint32("gemma4-assistant.embedding_length_out", assistant.backbone_hidden_size)
        writer.add_nextn_predict_layers(len(assistant.model.layers))
        writer.add_shared_kv_layers(len(assistant.model.layers))
        for part in ("pre", "post"):
            values = getattr(assistant, f"{part}_projection").weight.numpy()
            writer.add_tensor(f"nextn.{part}_projection.weight", values)

    return gguf_files.write(at / "whole", at / "assistant.gguf", kind, architecture="gemma4-assistant", more=more)


@pytest.mark.parametrize("family", ["gemma4", "gemma4-moe"])
def test_an_assistant_in_a_file_is_the_one_in_the_folder(tmp_path, family):
    """In numbers; in blocks beside a target in blocks it drafts, and the text is the target's."""
    model = models.model(family)
    assistant, target = random_assistant(model), native.of(model, eos=())
    assistant.requires_grad_(False).save_pretrained(tmp_path / "folder")
    file = in_a_file(assistant, tmp_path)
    ours, theirs = (read_assistant(path, target) for path in (tmp_path / "folder", file))
    assert ours.shape.layers == theirs.shape.layers
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[name], one.view_as(ours.tensors[name])) for name, one in theirs.tensors.items())
    (tmp_path / "blocks").mkdir()
    file, wish = in_a_file(assistant, tmp_path / "blocks", "Q8_0"), SamplingParams(max_tokens=9, ignore_eos=True)
    blocks = native.of(model, eos=(), precision="int8")
    prompts = [text.tolist() for text in texts()]
    out = Engine(blocks, f"mtp:{file}").generate(prompts, wish)
    assert [one.tokens for one in out] == [one.tokens for one in Engine(blocks).generate(prompts, wish)]
    assert sum(one.stats.draft_tokens for one in out) > 0
    with pytest.raises(PacelineError, match="reads states of 64 numbers, and here they have 128"):
        Engine(native.of(models.model(family, hidden_size=128)), f"mtp:{file}")


def test_transformers_makes_assistants_only_as_the_tests_ask():
    """When this fails, `all_shared` has done its service."""
    model = models.model("gemma4")
    config = random_assistant(model).config.get_text_config()
    with pytest.raises(ValueError, match="set of layer types"):
        assert config.kv_sharing_modes
    with all_shared():
        assert set(config.kv_sharing_modes) == {"reuse"}
