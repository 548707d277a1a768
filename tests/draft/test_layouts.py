"""Every published layout, with random files of exactly its names: what a file computes is what a few lines of plain
torch do with its numbers, and what nothing here runs is refused in one line that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.draft import registry
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.formats.facts import BEFORE_NORM
from tests import models, native
from tests.asks import asked
from tests.draft import blocks
from tests.draft.eagles import (
    LENGTH,
    bound,
    d2t_of,
    described,
    eagle1,
    eagle3,
    geometry,
    given,
    layer_tensors,
    said,
    speculators,
    write,
)

H, DIM = 64, 24
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def model():
    return models.model("llama2", num_hidden_layers=8, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def target(model):
    return native.of(model)


# What heads compute --------------------------------------------------------------------------------------------------


def norm(x, weight):
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, 1e-5)


@dataclass
class By:
    """How a case's layers compute: frequencies and factor of rotations, window, activation, first residual."""

    inverse: torch.Tensor = field(default_factory=lambda: 10000.0 ** -(torch.arange(0, DIM, 2) / DIM))
    scale: float = 1.0
    window: int | None = None
    act: Callable[[torch.Tensor], torch.Tensor] = F.silu
    normed_residual: bool = False


def layer(t, x, residual, by):
    """A Llama's layer with two heads and one of keys, over the attention's input x."""
    at = torch.arange(len(x))
    angle = at[:, None].float() * by.inverse
    cos, sin = (torch.cat([part, part], -1)[:, None] * by.scale for part in (angle.cos(), angle.sin()))

    def project(name):
        bias = t.get(f"self_attn.{name}_proj.bias", torch.zeros(1))
        return (x @ t[f"self_attn.{name}_proj.weight"].T + bias).unflatten(-1, (-1, DIM))

    def turned(y):
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat([-second, first], -1) * sin

    q, k, v = (project(name) for name in "qkv")
    q, k = (norm(y, t.get(f"self_attn.{name}_norm.weight")) for y, name in ((q, "q"), (k, "k")))
    scores = torch.einsum("nhd,md->hnm", turned(q), turned(k)[:, 0]) / DIM**0.5
    far = at[:, None] - at[None, :]
    seen = (far >= 0) & (far < (by.window or len(x)))
    out = torch.einsum("hnm,md->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[:, 0]).flatten(1)
    h = residual + out @ t["self_attn.o_proj.weight"].T
    y = norm(h, t["post_attention_layernorm.weight"])
    gate, up, down = (t[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return h + (by.act(y @ gate.T) * (y @ up.T)) @ down.T


def inside(t, start):
    return {name.removeprefix(start): tensor for name, tensor in t.items() if name.startswith(start)}


def eagle3_logits(t, table, head, by, mask=None):  # fmt: skip
    """Li et al. 2025. A norm that is not among `t` is not applied; without fc the state itself is the feature. mask: a
    token; two pairs of it and of mask_hidden come after the given ones (P-EAGLE)."""
    fc = t.get("fc.weight", torch.eye(H))
    states, tokens = given(fc.shape[1])
    if "fc_norm.0.weight" in t:
        states = torch.cat([norm(s, t[f"fc_norm.{n}.weight"]) for n, s in enumerate(states.split(H, -1))], -1)
    states = norm(states, t["input_norm.weight"]) if "input_norm.weight" in t else states
    if mask is not None:
        states, tokens = torch.cat([states, t["mask_hidden"][0].expand(2, -1)]), torch.cat([tokens, mask.expand(2)])
    features, first = states @ fc.T, inside(t, "layers.0.")
    normed = norm(features, first["hidden_norm.weight"])
    x = torch.cat([norm(table[tokens], first.get("input_layernorm.weight")), normed], -1)
    y = layer(first, x, normed if by.normed_residual else features, by)
    if second := inside(t, "layers.1."):
        y = layer(second, norm(y, second["input_layernorm.weight"]), y, by)
    return norm(y, t.get("norm.weight")) @ head.T


def eagle1_logits(t, table, head, by):
    states, tokens = given(H)
    x = torch.cat([table[tokens], states], -1) @ t["fc.weight"].T + t["fc.bias"]
    return layer(inside(t, "layers.0."), x, x, by) @ head.T


# Files ---------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A file: entries of its config.json beside the usual, tensors that it has besides or (None) lacks, its names by
    `named`, and how its numbers compute. `alike`: tensors that the reference takes as well."""

    config: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    named: tuple[str, str] = ("", "")
    by: By = field(default_factory=By)
    alike: dict[str, Any] = field(default_factory=dict)
    head: str = HEAD
    taps: tuple[int, ...] = (2, 4, 5)
    base: str = "authors"


def rope(kind, **entries):
    config = LlamaConfig(head_dim=DIM, rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **entries})
    inverse, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return By(inverse=inverse, scale=scale)


OFF, SLIDES = {"embed_tokens.weight": None}, {"layer_types": ["sliding_attention"], "sliding_window": 4}
IDS = "eagle_aux_hidden_state_layer_ids"
YARN = {"rope_type": "yarn", "factor": 4.0}
BIASES = {f"layers.0.self_attn.{name}_proj.bias": torch.randn(48 if name == "q" else 24) for name in "qkv"}
SECOND = {"layers.1.input_layernorm.weight": torch.rand(H) + 0.5}
NORMS = {f"layers.0.self_attn.{name}_norm.weight": torch.rand(DIM) + 0.5 for name in "qk"}
OF_STATES = {f"fc_norm.{n}.weight": torch.rand(H) + 0.5 for n in range(3)}
OVER_STATES = {"input_norm.weight": torch.rand(3 * H) + 0.5}
WHOLE = {"d2t": None, "t2d": None, HEAD: None}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}

EAGLE3 = {
    "authors": Case(),
    "speculators": Case(base="speculators"),
    "speculators, normed residual": Case(
        {"norm_before_residual": None}, base="speculators", by=By(normed_residual=True)),
    "SpecForge": Case({"eagle_config": {IDS: [1, 3, 4]}}),
    "EAGLE-3.1": Case(
        {"eagle_config": {IDS: [1, 3, 4], "fc_norm": True, "norm_output": True}}, OF_STATES, alike=OF_STATES),
    "EAGLE-3.1 in speculators": Case(
        {"fc_norm": True, "norm_output": True}, OF_STATES, alike=OF_STATES, base="speculators"),
    "one norm over states": Case(
        {"norm_before_fc": True}, OVER_STATES, alike=OVER_STATES, base="speculators"),
    "ids of outputs": Case({"eagle_config": {IDS: [0, 3, 5]}}, taps=(1, 4, 6)),
    "ids that begin with the paper's": Case({"eagle_config": {IDS: [2, 4, 6]}}, taps=(2, 4, 6)),
    "ids of inputs at the top": Case({IDS: [1, 3, 4]}, taps=(1, 3, 4)),
    "ids by the other name": Case({"aux_hidden_state_layer_ids": [1, 3, 4]}, taps=(1, 3, 4)),
    "ids in another order": Case({IDS: [3, 1, 2]}, taps=(3, 1, 2)),
    "state before the last norm": Case({"eagle_config": {IDS: [4, 6, 8]}}, taps=(4, 6, BEFORE_NORM)),
    "ModelOpt": Case(
        {"eagle_config": {"use_aux_hidden_state": True, "use_last_layernorm": True, "next_layer_regular": True,
                          "use_mtp_layernorm": False, "parallel_draft_step": 1}}, named=("layers.", "midlayer.")),
    "Automodel": Case({"num_aux_hidden_states": 3}, named=("", "model.")),
    "two layers": Case({"num_hidden_layers": 2}, SECOND, alike=SECOND),
    "two layers of ModelOpt": Case({}, SECOND, named=("layers.", "midlayer."), alike=SECOND),
    "two layers of SGLang": Case({}, SECOND, named=("layers.1.", "additional_layers.0."), alike=SECOND),
    "two layers with one name of norms": Case(
        {}, SECOND, named=("layers.1.input_layernorm", "layers.1.hidden_norm"), alike=SECOND),
    "forty layers that are one": Case({"num_hidden_layers": 40}),
    "no last norm": Case({"eagle_config": {"use_last_layernorm": False}}, alike={"norm.weight": None}),
    "no norm of the embedding": Case(
        {"use_input_layernorm_in_first_layer": False}, alike={"layers.0.input_layernorm.weight": None}),
    "one state": Case(
        {"eagle_config": {"use_aux_hidden_state": False}}, alike={"fc.weight": None}, taps=(8,)),
    "window": Case(SLIDES, by=By(window=4)),
    "window by a flag": Case({"use_sliding_window": True, "sliding_window": 4}, by=By(window=4)),
    "window in speculators": Case(SLIDES, base="speculators layers", by=By(window=4)),
    "window that is off": Case(SLIDES | {"use_sliding_window": False}),
    "yarn of the head's own length": Case(
        {"rope_scaling": YARN, "max_position_embeddings": 32},
        by=rope(**{"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})),
    "llama3's rotations": Case({"rope_scaling": LLAMA3}, by=rope(**{"kind": "llama3", **LLAMA3})),
    "qwen3": Case({"model_type": "qwen3"}, NORMS, alike=NORMS),
    "activation": Case({"hidden_activation": "gelu_pytorch_tanh"}, by=By(act=lambda x: F.gelu(x, approximate="tanh"))),
    "qwen2": Case({"model_type": "qwen2"}, BIASES, alike=BIASES),
    "qwen2 without biases": Case({"model_type": "qwen2"}),
    "the target's head": Case({"draft_vocab_size": None}, WHOLE, head="target"),
    "tied": Case({"draft_vocab_size": None, "tie_word_embeddings": True}, WHOLE, head="table"),
    "leftovers": Case({}, {
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12), "verifier_lm_head.weight": torch.ones(9, H),
        "verifier_norm.weight": torch.ones(H)}),
}  # fmt: skip


def renamed(tensors, old, new):
    """The tensors; those whose names begin with `old` begin with `new`."""
    return {new + name.removeprefix(old) if name.startswith(old) else name: one for name, one in tensors.items()}


def made(case, model):
    """config.json and tensors of a case's file, and the tensors that compute, by our names."""
    tensors = eagle3(model, prefix="layers.0.")
    for name in ("hidden_norm", "input_layernorm"):
        tensors[f"layers.0.{name}.weight"] = 1 + torch.randn(H, generator=torch.Generator().manual_seed(9)) * 0.3
    more = dict(case.more)
    if SECOND.keys() <= more.keys():
        more |= {f"layers.1.{name}": one for name, one in layer_tensors(7, width=H, **geometry(model)).items()}
    size = len(d2t_of(model)[0])
    if case.base == "authors":
        config = described(model, draft_vocab_size=size) | case.config
    elif case.base == "speculators":
        config = speculators(model) | case.config
    else:
        config = speculators(model, transformer_layer_config=described(model) | case.config)
    whole = {name: one for name, one in (tensors | more).items() if one is not None}
    computing = {name: one for name, one in (tensors | more | case.alike).items() if one is not None}
    old, new = case.named
    if case.base == "authors" and old != "layers.":
        whole = {name.replace("layers.0.", "midlayer."): one for name, one in whole.items()}
    return config, renamed(whole, old, new), computing


@pytest.mark.parametrize("name", EAGLE3)
def test_an_eagle3_head_computes_what_its_file_says(model, target, tmp_path, name):
    case = EAGLE3[name]
    config, tensors, computing = made(case, model)
    drafter = bound(write(tmp_path, config, tensors), target, "eagle3")
    table = model.model.embed_tokens.weight.detach()
    head = {"target": model.lm_head.weight.detach(), "table": table}.get(case.head)
    wanted = eagle3_logits(computing, table, computing[HEAD] if head is None else head, case.by)
    torch.testing.assert_close(said(drafter), wanted, atol=1e-4, rtol=1e-4)
    assert drafter.model.pending.layers == case.taps
    assert drafter.model.network.flags.norm_output == name.startswith("EAGLE-3.1")


@pytest.mark.parametrize("options", ["tree=0", "tree=8,width=3", "dtype=int8"])
@pytest.mark.parametrize("name", ["window", "one state", "state before the last norm", "two layers", "tied"])
def test_texts_are_plain_decodings(model, target, tmp_path, name, options):
    config, tensors, _ = made(EAGLE3[name], model)
    path, params = write(tmp_path, config, tensors), SamplingParams(max_tokens=10, ignore_eos=True)
    prompts = [[5, 17, 200, 31, 5, 17, 9], [44], [60, 61, 60] * 7]
    plain = [one.tokens for one in Engine(target).generate(prompts, params)]
    out = Engine(target, f"eagle3:{path},{options}").generate(prompts, params)
    assert [one.tokens for one in out] == plain
    assert sum(one.stats.draft_tokens for one in out) > 0


PARALLEL = {
    "speculators": ({"speculators_model_type": "peagle", "mask_token_id": 7}, "speculators", (1, 1)),
    "speculators, as they also write it": (
        {"speculators_model_type": "peagle", "mask_token_id": 7, "norm_before_residual": True}, "speculators", (1, 1)),
    "SpecForge": (
        {"architectures": ["PEagleDraftModel"], "dflash_config": {"mask_token_id": 7},
         "eagle_config": {IDS: [1, 3, 4]}}, "authors", (1, 1)),
    "NeMo and Amazon": ({"parallel_drafting": True, "ptd_token_id": 7}, "authors", (1,)),
    "by its tensor": ({"pard_token": 7}, "authors", (1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", PARALLEL)
def test_a_p_eagle_head_computes_what_its_file_says(model, target, tmp_path, name):
    """One forward over what waits of two texts and two masks after each; its cache then holds no mask."""
    entries, base, ones = PARALLEL[name]
    config, tensors, computing = made(Case(entries | {"num_hidden_layers": 2}, SECOND, base=base), model)
    if base == "speculators":
        config |= {"norm_before_residual": entries.get("norm_before_residual")}
    state = torch.randn(*ones, 3 * H, generator=torch.Generator().manual_seed(2))
    drafter = bound(write(tmp_path, config, tensors | {"mask_hidden": state}), target, "eagle3")
    states, tokens = given(3 * H)
    drafts = []
    for number in range(2):
        row = Row(number, [5, *tokens.tolist()], SamplingParams(max_tokens=9), max_context=64)
        drafter.start(row)
        drafter.model.pending._states[row.id] = [states]
        drafts.append(drafter.model.begin(row, 3))
    filled = drafter.model.fill(drafts)
    table, by = model.model.embed_tokens.weight.detach(), By(normed_residual=bool(entries.get("norm_before_residual")))
    wanted = eagle3_logits(computing | {"mask_hidden": state.view(1, -1)}, table, computing[HEAD], by, torch.tensor(7))
    for draft, block in zip(drafts, filled, strict=True):
        torch.testing.assert_close(block.logits, wanted[-3:], atol=1e-4, rtol=1e-4)
        drafter.model.commit(draft, [])
        assert drafter.model.pending.cached(draft.row) == LENGTH


EAGLE1 = {
    "authors": Case(),
    "without an embedding": Case({}, OFF),
    "qwen2": Case({"model_type": "qwen2"}, BIASES, alike=BIASES),
    "window": Case(SLIDES, by=By(window=4)),
    "a window that mistral's code ignores": Case({"model_type": "mistral", "sliding_window": 4}),
    "speculators": Case(
        {"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"]}, OFF,
        named=("layers.0.", "transformer.")),
    "leftovers": Case({"num_hidden_layers": 32}, {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}),
}  # fmt: skip


@pytest.mark.parametrize("name", EAGLE1)
@pytest.mark.parametrize("rounded", [None, torch.bfloat16, torch.float16])
def test_an_eagle_head_computes_what_its_file_says(model, target, tmp_path, name, rounded):
    """Its embedding is the target's, or a copy of it that was rounded."""
    case, tensors = EAGLE1[name], eagle1(model)
    if rounded is not None:
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].to(rounded)
    whole = {name: one for name, one in (tensors | case.more).items() if one is not None}
    old, new = case.named
    drafter = bound(write(tmp_path, described(model) | case.config, renamed(whole, old, new)), target, "eagle")
    table, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    wanted = eagle1_logits(tensors | case.alike, table, head, case.by)
    torch.testing.assert_close(said(drafter), wanted, atol=1e-4, rtol=1e-4)


def test_past_a_window_nothing_is_seen(model, target, tmp_path):
    """In an engine with a prompt in pieces, whose beginning two texts do not share: they draft alike if the target's
    states are alike, which those of its first layer are."""
    config = described(model, draft_vocab_size=len(d2t_of(model)[0]), **SLIDES) | {IDS: [0, 0, 0]}
    path = write(tmp_path, config, eagle3(model))
    end, drafts = [7, 9, 11, 30, 8], []
    for begin in ([5, 6] * 20, [80, 90, 100, 110] * 10):
        engine = Engine(target, f"eagle3:{path},tree=0,draft=3")
        row = engine.add(begin + end, SamplingParams(max_tokens=9, ignore_eos=True))
        engine.step()
        row.tokens[-1] = 12  # whatever the target said
        drafts.append(engine.drafter.propose(asked(row))[0].tokens.tolist())
    assert len(drafts[0]) > 1
    assert drafts[0] == drafts[1]


# What is refused -----------------------------------------------------------------------------------------------------

ZERO, GONE = torch.zeros(2, 2), object()
REFUSED = {
    "P-EAGLE without a mask": (
        "eagle3", {}, {"mask_hidden": torch.zeros(1, 1, 3 * H)}, "mask_token_id is None; a whole number from 0 to 319"),
    "P-EAGLE without a state": (
        "eagle3", {"speculators_model_type": "peagle", "mask_token_id": 3}, {}, "has no mask_hidden"),
    "P-EAGLE of SpecForge without a state": (
        "eagle3", {"architectures": ["PEagleDraftModel"], "mask_token_id": 3}, {}, "has no mask_hidden"),
    "P-EAGLE by a flag without a state": (
        "eagle3", {"parallel_drafting": True, "ptd_token_id": 3}, {}, "has no mask_hidden"),
    "P-EAGLE's mask beyond the vocabulary": (
        "eagle3", {"mask_token_id": 320}, {"mask_hidden": torch.zeros(1, 1, 3 * H)}, "mask_token_id is 320"),
    "parallel steps of another drafter": ("eagle", {"parallel_drafting": True}, {}, "parallel_drafting is True"),
    "EAGLE-4": ("eagle3", {"architectures": ["LlamaForCausalLMEagle4"]}, {}, "is EAGLE-4"),
    "experts": ("eagle3", {"architectures": ["Qwen3MoEForCausalLMEagle3"]}, {}, "a head whose layer has experts"),
    "experts' tensors": (
        "eagle3", {}, {"midlayer.mlp.experts.0.up_proj.weight": ZERO}, "a head whose layer has experts"),
    "latent attention": ("eagle3", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, "latent attention (MLA)"),
    "MLA's tensors": ("eagle3", {}, {"midlayer.self_attn.kv_a_proj_with_mqa.weight": ZERO}, "latent attention (MLA)"),
    "Medusa's heads on top": (
        "eagle3", {}, {"parallel_draft_heads.0.medusa_layers.0.linear.weight": ZERO}, "EAGLE with Medusa's heads"),
    "mtp's norms": ("eagle3", {"eagle_config": {"use_mtp_layernorm": True}}, {}, "use_mtp_layernorm is True"),
    "wide layers": ("eagle3", {"eagle_config": {"next_layer_regular": False}}, {}, "next_layer_regular is False"),
    "parallel steps": ("eagle3", {"eagle_config": {"parallel_draft_step": 4}}, {}, "parallel_draft_step is 4"),
    "an unknown flag": (
        "eagle3", {"eagle_config": {"use_magic": True}}, {}, "use_magic is True, which nothing here applies"),
    "an unknown flag at the top": ("eagle3", {"use_magic": True}, {}, "use_magic is True, which nothing here applies"),
    "an unknown flag of layers": ("eagle", {"transformer_layer_config": {"use_magic": True}}, {}, "use_magic is True"),
    "an unknown flag of blocks": ("dflash", {"use_magic": True}, {}, "use_magic is True"),
    "norms of HASS": ("eagle", {}, {"embed_layernorm.weight": torch.ones(H)}, "has embed_layernorm.weight, which"),
    "norms of vLLM's form": ("eagle", {"add_para_norm": True}, {}, "add_para_norm is True"),
    "a scale of logits": ("eagle3", {"logit_scale": 0.5}, {}, "logit_scale is 0.5"),
    "long context": ("eagle3", {"rope_method": "llama"}, {}, "rope_method is 'llama'"),
    "half rotations": ("eagle3", {"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor is 0.5"),
    "half rotations, nested": (
        "eagle", {"rope_parameters": {"partial_rotary_factor": 0.5}}, {}, "partial_rotary_factor is 0.5"),
    **{
        f"rotations of {method}, {kind} with {'nothing' if factor is GONE else repr(factor)}": (
            method, {"rope_scaling": {"rope_type": kind} | ({} if factor is GONE else {"factor": factor})}, {}, says)
        for method in ("eagle", "eagle3", "dflash") for kind, factor, says in (
            ("linear", GONE, "Missing required keys in `rope_parameters` for 'rope_type'='linear': {'factor'}"),
            ("linear", "two", "cannot be used"), ("linear", None, "cannot be used"), ("yarn", [2], "cannot be used"),
            ("yarn", "two", "cannot be used"), ("yarn", 0, "cannot be used"), ("llama3", GONE, "Missing required keys"),
            ("longrope", 2.0, "Missing required keys"), ("dynamic", GONE, "Missing required keys"),
        )
    },
    "yarn of no length": (
        "eagle", {"rope_scaling": YARN, "max_position_embeddings": None}, {}, "max_position_embeddings is None"),
    "a window without a length": ("eagle3", {"layer_types": ["sliding_attention"]}, {}, "sliding_window is None"),
    "windows of a list": ("eagle3", {"layer_types": "full"}, {}, "layer_types is 'full'; 1 of"),
    "ids that are no numbers": ("eagle3", {"eagle_config": {IDS: ["1"]}}, {}, "reads the inputs of layers 1"),
    "eight bits": (
        "eagle3", {}, {"midlayer.mlp.up_proj.weight": torch.zeros(40, H).to(torch.float8_e4m3fn)},
        "its layers.0.mlp.up_proj.weight holds float8_e4m3fn numbers"),
    "eight bits of eagle": (
        "eagle", {}, {"fc.weight": torch.zeros(H, 2 * H, dtype=torch.int8)}, "its fc.weight holds int8 numbers"),
    "another drafter's": (
        "eagle", {"speculators_model_type": "eagle3"}, {}, "is a drafter of type eagle3: write eagle3:"),
    "an MLP speculator": ("eagle3", {"speculators_model_type": "mlp"}, {}, "is an MLP or LSTM speculator"),
    "IBM's": (
        "medusa", {"model_type": "mlp_speculator"}, {"speculator.emb.0.weight": ZERO}, "is an MLP or LSTM"),
    "Arctic's, by its class": (
        "medusa", {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, {}, "is an MLP or LSTM speculator (arch"),
    "Arctic's": (
        "medusa", {}, {"speculator.forget_emb.0.weight": ZERO},
        "is an MLP or LSTM speculator (it has speculator.forget"),
    "an unknown speculator": (
        "eagle3", {"speculators_model_type": "new"}, {}, "is a drafter of type new: types that are read are eagle"),
    "JetSpec": (
        "dflash", {"speculators_model_type": "jetspec"}, {}, "JetSpec or LiLiCorr (speculators_model_type is jetspec"),
    "LiLiCorr's projector": (
        "dflash", {"dflash_config": {"projector_type": "lilicorr"}}, {}, "JetSpec or LiLiCorr (projector_type is"),
    "Domino": ("dflash", {"dflash_config": {"projector_type": "domino"}}, {}, "(projector_type is domino)"),
    "a new projector": ("dflash", {"dflash_config": {"projector_type": "new"}}, {}, "projector_type is 'new'"),
    "LiLiCorr beside": (
        "dflash", {"architectures": ["LiLiCorrDraftModel", "DFlashDraftModel"]}, {},
        "JetSpec or LiLiCorr (architectures"),
    "shifted labels": ("dflash", {"dflash_config": {"shift_label": True}}, {}, "shift_label is True"),
    "MLA of DFlash": ("dflash", {"dflash_config": {"attention_mode": "mla"}}, {}, "attention_mode is 'mla'"),
    "DFlash2's tensors without its entries": (
        "dflash", {}, {"layers.0.attention_conv.base_kernel": ZERO}, "has layers.0.attention_conv.base_kernel, which"),
    "DFly": ("dflash", {}, {"layer_fusion.weight": ZERO}, "is DFly"),
    "gates": ("dflash", {"attn_output_gate": True}, {}, "attn_output_gate is True"),
    "sinks": ("dflash", {}, {"layers.0.self_attn.attention_sink_bias": ZERO}, "gates or sinks of attention"),
    "interleaved rotations": ("dflash", {"is_neox_style": False}, {}, "is_neox_style is False"),
    "a mixture": ("dflash", {"draft_ffn_type": "moe"}, {}, "draft_ffn_type is 'moe'"),
    "Gemma's": ("eagle", {"model_type": "gemma4_assistant"}, {}, "is a Gemma 4's assistant: write mtp:"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_here_runs_is_refused_by_name(model, target, tmp_path, name):
    method, config, tensors, says = REFUSED[name]
    usual = described(model, draft_vocab_size=len(d2t_of(model)[0]) if method == "eagle3" else None)
    own = {"eagle": eagle1, "eagle3": eagle3, "medusa": lambda _: {}, "dflash": blocks.random_tensors}[method](model)
    if method == "dflash":
        usual, inner = blocks.config(model), config.get("dflash_config", {})
        config = config | {"dflash_config": usual["dflash_config"] | inner}
    with pytest.raises(MethodError) as error:
        registry.create(f"{method}:{write(tmp_path, usual | config, own | tensors)}").bind(target)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
