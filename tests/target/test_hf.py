"""transformers models as targets: ragged rows, trees, hidden states; and the proof that refuses the rest."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import models
from tests.native import logits, off

from paceline.core.clock import Clock
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment
from paceline.engine.engine import Engine
from paceline.errors import ModelError
from paceline.formats.facts import BEFORE_NORM
from paceline.target import hf
from paceline.target.base import Needs
from paceline.target.hf import HFTarget, _RowsCache
from paceline.target.layout import SHARED_QUERIES
from paceline.target.load import load

RUNS = [*models.FOREIGN, "llama2", "qwen3"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=RUNS)
def target(request):
    return HFTarget(models.model(request.param), name=request.param)


def tokens(n, seed):
    return np.random.default_rng(seed).integers(4, models.VOCAB_SIZE, n)


def random_tree(n, seed):
    """Parents of a tree of n nodes."""
    draw = np.random.default_rng(seed)
    return np.array([-1, *(int(draw.integers(0, i)) for i in range(1, n))], np.int64)


def path_to(parent, node):
    path = [node]
    while parent[path[0]] >= 0:
        path.insert(0, int(parent[path[0]]))
    return path


@torch.inference_mode()
def plain(target, ids, hidden=False):
    """Logits [T, V] (or all hidden states) of a forward with nothing of ours in it."""
    out = target.model(torch.tensor(np.array(ids))[None], output_hidden_states=hidden, use_cache=False)
    return [h[0] for h in out.hidden_states] if hidden else out.logits[0]


def check(target, texts, segments, verdict):
    """Every wanted logit is that of a plain forward over the row's text and the node's path."""
    for s, segment in enumerate(segments):
        n = len(segment.tokens)
        assert verdict.of(s).shape == (segment.num_logits, target.vocab_size)
        for i, node in enumerate(range(n - segment.num_logits, n)):
            ids = texts[segment.slot] + segment.tokens[path_to(segment.parent, node)].tolist()
            assert (verdict.of(s)[i] - plain(target, ids)[-1]).abs().max() <= TOLERANCE


def test_ragged_rows_and_trees(target):
    """Rows come and go over several rounds, in any order, with trees of any shape, and keep part of them."""
    draw = np.random.default_rng(1)
    texts = {}
    for slot in [target.add_row(4) for _ in range(4)]:
        texts[slot] = []
    for round in range(5):
        if round == 2:  # a hole between the slots, and a new row in it later
            target.drop_row(1)
            del texts[1]
        if round == 3:
            assert target.add_row(0) == 1
            texts[1] = []
        segments = []
        for slot in draw.permutation(list(texts)).tolist():
            n = int(draw.integers(1, 9))
            seed = int(draw.integers(1 << 30))
            segments.append(
                Segment(slot, tokens(n, seed), random_tree(n, seed), num_logits=int(draw.integers(0, n + 1)))
            )
        verdict = target.verify(segments)
        check(target, texts, segments, verdict)
        for segment in segments:
            path = path_to(segment.parent, int(draw.integers(len(segment.tokens))))
            target.commit(segment.slot, path)
            texts[segment.slot] += segment.tokens[path].tolist()
            assert target.length(segment.slot) == len(texts[segment.slot])
    for slot in list(texts):
        target.drop_row(slot)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_chain_may_end_where_the_context_does(target, count):
    """Nodes that are added to a draft for speed must fit, too."""
    for before in (models.MAX_CONTEXT - count - 1, models.MAX_CONTEXT - count):
        slot, text = target.add_row(4), tokens(before, before)
        target.verify([Segment.chunk(slot, text, last=False)])
        target.commit(slot, range(before))
        chain = [Segment(slot, tokens(count, 1), np.arange(-1, count - 1), num_logits=count)]
        check(target, {slot: text.tolist()}, chain, target.verify(chain))
        target.drop_row(slot)


def test_a_prompt_chunk_beside_trees(target):
    slots = [target.add_row(8) for _ in range(3)]
    long = tokens(SHARED_QUERIES + 20, 0)
    segments = [
        Segment(slots[1], tokens(3, 1), random_tree(3, 1), num_logits=3),
        Segment.chunk(slots[0], long, last=True),
        Segment.chunk(slots[2], tokens(5, 2), last=False),
    ]
    layers = tuple(range(target.num_layers + 1))
    verdict = target.verify(segments, Needs(hidden_layers=layers, top_k=5), clock=(clock := Clock()))
    assert [*clock.seconds] == ["prepare", "layers", "head", "top_k"]
    assert verdict.logits_at == [0, 3, 4, 4]
    assert verdict.hidden_at == [0, 3, 3 + len(long), 8 + len(long)]
    check(target, {slot: [] for slot in slots}, segments, verdict)
    states = plain(target, long, hidden=True)
    for layer in layers:
        assert (verdict.hidden[layer][3 : 3 + len(long)] - states[layer]).abs().max() <= TOLERANCE
    for node in range(3):
        states = plain(target, segments[0].tokens[path_to(segments[0].parent, node)], hidden=True)
        for layer in layers:
            assert (verdict.hidden[layer][node] - states[layer][-1]).abs().max() <= TOLERANCE
    assert verdict.top_k is not None
    values, ids = verdict.top_k
    assert torch.equal(values, verdict.logits.gather(1, ids))
    assert torch.equal(ids[:, 0], verdict.logits.argmax(1))
    for slot in slots:
        target.drop_row(slot)


def test_one_forward_for_all_rows(target, monkeypatch):
    calls = []
    forward = target.model.forward
    monkeypatch.setattr(target.model, "forward", lambda **kw: calls.append(kw["input_ids"].shape) or forward(**kw))
    slots = [target.add_row(4) for _ in range(3)]
    target.verify(
        [Segment(s, tokens(n, n), random_tree(n, n), num_logits=n) for s, n in zip(slots, (4, 1, 7), strict=True)]
    )
    assert calls == [(3, 7)]
    for slot in slots:
        target.drop_row(slot)


def test_greedy_text_is_that_of_generate(target):
    prompts = [np.tile(tokens(7, seed), 3)[:n].tolist() for seed, n in enumerate([21, 5, 13])]
    found = Engine(target, draft="prompt-lookup").generate(prompts, SamplingParams(max_tokens=30))
    for prompt, answer in zip(prompts, found, strict=True):
        expected = target.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=30, eos_token_id=-1, pad_token_id=models.EOS
        )
        assert answer.tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", RUNS)
def test_half_precision_passes_the_proof(family):
    assert HFTarget(models.model(family).to(torch.bfloat16), name=family).dtype == torch.bfloat16


def test_a_model_in_training_is_put_to_work():
    model = models.model("gpt2").train()
    assert model.config.attn_pdrop > 0
    HFTarget(model)  # its dropout would fail the proof


def test_a_prompt_begins_without_our_mask_where_the_models_own_is_right(monkeypatch):
    """One that makes none for our cache is found out by the proof, and given ours."""
    model, long = models.model("llama3"), tokens(SHARED_QUERIES + 20, 0)
    forward = model.forward

    def sees_all(*args, attention_mask=None, past_key_values=None, **kw):
        if attention_mask is None and isinstance(past_key_values, _RowsCache):
            count = kw["input_ids"].shape[1]
            attention_mask = torch.zeros(1, 1, count, count)
        return forward(*args, attention_mask=attention_mask, past_key_values=past_key_values, **kw)

    for right in (True, False):
        if not right:
            monkeypatch.setattr(model, "forward", sees_all)
        target = HFTarget(model)
        assert target.masks_itself == right
        for prompt in (long, long[:9]):
            slot = target.add_row(4)
            segments = [Segment.chunk(slot, prompt, last=True)]
            check(target, {slot: []}, segments, target.verify(segments))
            target.drop_row(slot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_query_heads_share_key_heads_with_the_same_bits(dtype, monkeypatch):
    model = models.model("llama3").to(dtype)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    logits = []
    for switch in ("0", "1"):  # a user's "0" stands
        monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", switch)
        target = HFTarget(model)
        slot = target.add_row(4)
        target.verify([Segment.chunk(slot, tokens(40, 0), last=False)])
        target.commit(slot, range(40))
        logits.append(target.verify([Segment(slot, tokens(9, 1), random_tree(9, 1), num_logits=9)]).logits)
    assert torch.equal(*logits)


# Refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3", "some layers have a sliding window, and cannot forget a rejected draft"),
        ("mistral-window", "a sliding window"),
        ("mamba", "some layers have a running state instead of attention"),
        ("gpt-neo", "a sliding window"),
        ("bloom", r"its attention counts distances in the cache \(ALiBi\)"),
        ("falcon-alibi", "ALiBi"),
        ("mpt", "ALiBi"),
        ("openai-gpt", "it does not keep its keys and values in a cache"),
    ],
)
def test_what_cannot_be_a_target(family, reason):
    """In one line, with the architecture and the reason in words: no names of Python."""
    with pytest.raises(ModelError, match=rf"{family} \(.*\) cannot be a target: .*{reason}") as caught:
        HFTarget(models.model(family), name=family)
    reason = str(caught.value).split(":", 1)[1].replace("ALiBi", "")
    assert not re.search(r"\n|'|_|[a-z][A-Z]|argument|object|unpack", reason)
    if family == "falcon-alibi":
        assert HFTarget(models.model(family, alibi=False)).num_layers


def test_weights_that_are_no_numbers_are_said_to_be():
    model = models.model("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="its logits are NaN"):
        HFTarget(model)


def test_code_that_fails_on_our_cache(monkeypatch):
    model = models.model("llama2")
    forward = model.forward

    def picky(attention_mask=None, **others):
        if attention_mask is not None:
            _, _ = attention_mask.shape
        return forward(attention_mask=attention_mask, **others)

    monkeypatch.setattr(model, "forward", picky)
    with pytest.raises(ModelError, match="its code does not run on a cache, positions and a mask from outside"):
        HFTarget(model, name="picky")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_the_proof_finds_what_ignores_mask_or_positions(ignored, dtype, monkeypatch):
    model = models.model("llama2").to(dtype)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **kw: forward(**{k: v for k, v in kw.items() if k != ignored}))
    with pytest.raises(ModelError, match="verified as a tree its logits are wrong"):
        HFTarget(model, name="deaf")
    HFTarget(model, name="deaf", prove=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_proof_finds_a_bias_by_place_in_the_cache(dtype, monkeypatch):
    """MPT's attention bias grows with the distance between cache places, which for tree nodes is not that in the
    text: a small error, and a model that would be wrong only a little."""
    monkeypatch.setattr(hf, "_refuse", lambda *_: None)  # which knows that bias by its name
    with pytest.raises(ModelError, match="verified as a tree its logits are wrong"):
        HFTarget(models.model("mpt").to(dtype), name="mpt")


def test_the_proof_finds_an_attention_that_does_not_suit_the_model():
    model = models.model("gptj")
    model.config._attn_implementation = "sdpa"  # not written for it: transformers itself would choose eager
    with pytest.raises(ModelError, match="logits are wrong"):
        HFTarget(model, name="gptj")


def test_what_only_the_native_decoder_can_do_is_refused(target):
    slot = target.add_row(4)
    for needs in (Needs(resume_layer=1), Needs(callback_layer=1), Needs(hidden_layers=(1, BEFORE_NORM))):
        for ask in (target.check, lambda needs: target.verify([Segment.chunk(slot, tokens(2, 0), last=True)], needs)):
            with pytest.raises(ModelError, match="this drafter needs the native decoder"):
                ask(needs)
    resumed = Segment(slot, tokens(3, 0), random_tree(3, 0), hidden=torch.zeros(3, target.hidden_size))
    with pytest.raises(ModelError, match="cannot resume from a drafter's states"):
        target.verify([resumed])
    target.drop_row(slot)


def test_blocks_of_fp8_are_expanded_to_any_dtype(tmp_path):
    """By transformers, where there is no GPU: to the dtype of the scales, whatever was asked for."""
    pytest.importorskip("accelerate")
    folder = models.make("llama2", tmp_path, hidden_size=128, intermediate_size=256, head_dim=32)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        blocks = tensors[name].unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
        scale = blocks.abs().amax((1, 3)) / 448
        eight = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors |= {name: eight.view(tensors[name].shape), f"{name}_scale_inv": scale}
        tensors[f"dense {name}"] = (eight.float() * scale[:, None, :, None]).view(tensors[name].shape)
    dense = {name.removeprefix("dense "): tensors.pop(name) for name in [*tensors] if name.startswith("dense ")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    right = models.model("llama2", hidden_size=128, intermediate_size=256, head_dim=32)
    right.load_state_dict(dense, strict=False)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "config.json").write_text(json.dumps(config))
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.05)):
        made = load(folder, dtype=dtype, device="cpu")
        assert made.dtype == getattr(torch, dtype)
        assert off(logits(made), logits(HFTarget(right))) < tolerance


def test_loading_prints_nothing(tmp_path, capfd):
    folder = models.make("gpt2", tmp_path)
    capfd.readouterr()
    load(folder)
    assert capfd.readouterr() == ("", "")
