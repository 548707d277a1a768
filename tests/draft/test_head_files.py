"""Heads of others, in small files written here by the published layouts, never by our own saver."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.core.sampling import SamplingParams
from paceline.draft.models.fixed_tree import HeadsDrafter
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.errors import MethodError
from paceline.target.load import load
from tests import models
from tests.draft.head_worlds import World, random_tensors
from tests.plain import texts

H, V, K = models.COMMON["hidden_size"], models.VOCAB_SIZE, 3
NEW = SamplingParams(max_tokens=8)


@cache
def world():
    return World()


def opened(path, kind="medusa"):
    drafter = create(f"{kind}:{path},tree=7")
    drafter.bind(world().target)
    assert isinstance(drafter, HeadsDrafter)
    return drafter


def write(folder, config, name, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".pt"):
        torch.save(dict(tensors), folder / name)
    else:
        save_file(dict(tensors), folder / name)
    return folder


def blocks(layers=1):
    shapes = {}
    for k in range(K):
        for j in range(layers):
            shapes |= {f"{k}.{j}.linear.weight": (H, H), f"{k}.{j}.linear.bias": (H,)}
    return random_tensors(shapes)


def tables(rows=V):
    return {k: random_tensors({"t": (rows, H)}, seed=9 + k)["t"] for k in range(K)}


def by_hand(tensors, head, k, layers=1):
    """Logits of head k on a fixed state, from the authors' definition."""
    x = state()
    for j in range(layers):
        x = x + nn.functional.silu(x @ tensors[f"{k}.{j}.linear.weight"].T + tensors[f"{k}.{j}.linear.bias"])
    return x @ (world().target.head.dense() if head is None else head).T


def state():
    return random_tensors({"s": (1, H)}, seed=4)["s"] * 10


def guessed(drafter, k):
    with torch.inference_mode():
        return drafter.model.outputs[k](drafter.model.heads.network[k](state()))


def check_lossless(path, kind="medusa"):
    here = world()
    out = Engine(here.target, f"{kind}:{path},tree=7").generate(here.prompts[:3], NEW)
    assert texts(here.prompts[:3], out) == texts(here.prompts[:3], Engine(here.target).generate(here.prompts[:3], NEW))
    assert sum(done.stats.draft_tokens for done in out) > 0


V01 = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}


def test_medusa_v01_is_a_pickle_read_by_name_alone(tmp_path):
    """Output heads of their own; config.json says 2 heads, the file has 3."""
    own = tables()
    tensors = blocks() | {f"{k}.1.weight": own[k] for k in range(K)}
    folder = write(tmp_path / "v01", V01, "medusa_lm_head.pt", tensors)
    with pytest.raises(MethodError, match=r"a pickled file is read only where it is named, medusa:.*medusa_lm_head.pt"):
        opened(folder)
    drafter = opened(folder / "medusa_lm_head.pt")
    assert len(drafter.model.heads.network) == K
    for k in range(K):
        torch.testing.assert_close(guessed(drafter, k), by_hand(tensors, own[k], k))
    check_lossless(folder / "medusa_lm_head.pt")


def test_a_pickle_that_holds_a_program_is_not_run(tmp_path):
    class Program:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    folder = write(tmp_path / "v01", V01, "other.pt", {})
    torch.save({"0.0.linear.weight": Program()}, folder / "medusa_lm_head.pt")
    with pytest.raises(MethodError, match="holds more than tensors"):
        opened(folder / "medusa_lm_head.pt")
    assert not (tmp_path / "ran").exists()


def test_medusa_v2_shares_the_targets_output_head(tmp_path):
    tensors = blocks(2)
    folder = write(tmp_path / "v2", V01 | {"version": "2"}, "medusa_lm_head.safetensors", tensors)
    drafter = opened(folder)
    for k in range(K):
        torch.testing.assert_close(guessed(drafter, k), by_hand(tensors, None, k, layers=2))
    check_lossless(folder)


def test_medusa_inside_a_whole_model(tmp_path):
    """A folder that is target and heads at once."""
    own = tables()
    tensors = blocks() | {f"{k}.1.weight": own[k] for k in range(K)}
    model = world().model
    folder = write(tmp_path / "whole", model.config.to_dict() | V01, "none.safetensors", {})
    whole = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(whole | {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "none.safetensors").unlink()
    target = load(folder, dtype="float32", device="cpu")
    out = Engine(target, f"medusa:{folder},tree=7").generate(world().prompts[:2], NEW)
    assert texts(world().prompts[:2], out) == texts(
        world().prompts[:2], Engine(world().target).generate(world().prompts[:2], NEW)
    )
    for k in range(K):
        torch.testing.assert_close(guessed(opened(folder), k), by_hand(tensors, own[k], k))


def vllm(tensors):
    out = {}
    for name, tensor in tensors.items():
        k, j, _, part = name.split(".")
        out[f"blocks.{k}.layers.{j}.{part}"] = tensor
    return out


VLLM = {"model_type": "medusa", "num_heads": K, "num_hidden_layers": 1, "medusa_fc_bias": True, "hidden_size": H}


def test_medusa_as_vllm_reads_it(tmp_path):
    tensors, own = blocks(), tables()
    heads = {f"lm_heads.{k}.weight": own[k] for k in range(K)}
    drafter = opened(write(tmp_path / "own", VLLM, "model.safetensors", vllm(tensors) | heads))
    for k in range(K):
        torch.testing.assert_close(guessed(drafter, k), by_hand(tensors, own[k], k))
    shared = {"lm_head.weight": world().target.head.dense().clone()}
    drafter = opened(write(tmp_path / "shared", VLLM, "model.safetensors", vllm(tensors) | shared))
    assert drafter.model.heads.outputs is None, "it is the target's, which is in memory already"
    plain = {name: t for name, t in vllm(tensors).items() if not name.endswith("bias")}
    drafter = opened(write(tmp_path / "no bias", VLLM, "model.safetensors", plain | shared))
    zeros = {name: t * (0 if name.endswith("bias") else 1) for name, t in tensors.items()}
    torch.testing.assert_close(guessed(drafter, 0), by_hand(zeros, None, 0))


def test_medusa_with_a_cut_vocabulary_as_vllm_reads_it(tmp_path):
    kept, own = torch.arange(2, V, 3), tables(rows=len(range(2, V, 3)))
    heads = {f"lm_heads.{k}.weight": own[k] for k in range(K)} | {"token_map": kept}
    config = VLLM | {"truncated_vocab_size": len(kept)}
    folder = write(tmp_path / "cut", config, "model.safetensors", vllm(blocks()) | heads)
    drafter = opened(folder)
    assert set(drafter.model.candidates(state(), 0)[0].tolist()) <= set(kept.tolist())
    check_lossless(folder)


def hydra(prefix, copies=3):
    """The authors' layout: of prefix-mlp heads the even places are dropouts; tied blocks are there again and again."""
    shapes = {}
    for k in range(K):
        first = 1 if prefix else 0
        for part in ("linear", "res_connection"):
            shapes |= {f"hydra_mlp.{k}.{first}.{part}.weight": (H, (k + 2) * H)}
            shapes |= {f"hydra_mlp.{k}.{first}.{part}.bias": (H,)}
        shapes |= {f"hydra_lm_head.{k}.1.weight": (V, H), f"hydra_lm_head.{k}.1.bias": (V,)}
    tensors = random_tensors(shapes, seed=1)
    for k in range(K):
        block = random_tensors({"linear.weight": (H, H), "linear.bias": (H,)}, seed=20 + k)
        for n in range(1, copies):
            at = 2 * n + 1 if prefix else n
            tensors |= {f"hydra_mlp.{k}.{at}.{name}": tensor.clone() for name, tensor in block.items()}
    if prefix:
        s = world().target.shape
        kv, inner = s.num_kv_heads * s.head_dim, s.intermediate_size
        at = "prefix_embeding_layer.layers.0."
        tensors |= random_tensors(
            {
                "prefix_embeding_layer.embed_tokens.weight": (V, H),
                "prefix_embeding_layer.norm.weight": (H,),
                f"{at}input_layernorm.weight": (H,),
                f"{at}post_attention_layernorm.weight": (H,),
                f"{at}self_attn.q_proj.weight": (s.num_heads * s.head_dim, H),
                f"{at}self_attn.k_proj.weight": (kv, H),
                f"{at}self_attn.v_proj.weight": (kv, H),
                f"{at}self_attn.o_proj.weight": (H, s.num_heads * s.head_dim),
                f"{at}self_attn.rotary_emb.inv_freq": (s.head_dim // 2,),
                f"{at}mlp.gate_proj.weight": (inner, H),
                f"{at}mlp.up_proj.weight": (inner, H),
                f"{at}mlp.down_proj.weight": (H, inner),
            },
            seed=2,
        )
    return tensors


HYDRA = {"hydra_num_heads": K, "hydra_num_layers": 3, "grounded_heads": True, "hidden_state_offset": 0}


@pytest.mark.parametrize("prefix", [False, True])
def test_hydra(tmp_path, prefix):
    tensors = hydra(prefix)
    config = HYDRA | {"hydra_head_arch": "prefix-mlp" if prefix else "mlp"}
    folder = write(tmp_path / "hydra", config, "hydra_lm_head.pt", tensors)
    path = folder / "hydra_lm_head.pt"
    drafter = opened(path, "hydra")
    assert len(drafter.model.heads.network) == K
    first, nth = ("1", (3, 5)) if prefix else ("0", (1, 2))
    tokens = [random_tensors({"e": (1, H)}, seed=n)["e"] for n in (5, 6)]
    u = torch.cat([state(), *tokens], -1)  # head 1 reads the root and one drafted token
    z = (
        u @ tensors[f"hydra_mlp.1.{first}.res_connection.weight"].T
        + tensors[f"hydra_mlp.1.{first}.res_connection.bias"]
    )
    z += nn.functional.silu(
        u @ tensors[f"hydra_mlp.1.{first}.linear.weight"].T + tensors[f"hydra_mlp.1.{first}.linear.bias"]
    )
    for n in nth:
        z = z + nn.functional.silu(
            z @ tensors[f"hydra_mlp.1.{n}.linear.weight"].T + tensors[f"hydra_mlp.1.{n}.linear.bias"]
        )
    logits = z @ tensors["hydra_lm_head.1.1.weight"].T + tensors["hydra_lm_head.1.1.bias"]
    with torch.inference_mode():
        torch.testing.assert_close(drafter.model.outputs[1](drafter.model.heads.network(1, state(), tokens)), logits)
    check_lossless(path, "hydra")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"1.0.linear.bias": None}, r"has no 1.0.linear.bias"),
        ({"1.0.linear.bias": None, "more.weight": torch.zeros(2)}, r"has no 1.0.linear.bias and has more.weight"),
        (
            {"2.0.linear.weight": torch.zeros(H, H - 1)},
            r"its 2.0.linear.weight is \[64, 63\] where \[64, 64\] is wanted",
        ),
        ({"0.1.weight": torch.zeros(V, H)}, r"has no lm_heads.1.weight, lm_heads.2.weight"),
        ({f"{k}.1.weight": torch.zeros(V - 1, H) for k in range(K)}, r"its lm_heads.0.weight is \[319, 64\] where"),
        (dict.fromkeys(blocks()) | {"a": torch.zeros(1)}, "has no heads: none of its tensors has a name"),
    ],
)
def test_every_key_is_read_or_the_heads_are_refused(tmp_path, change, says):
    tensors = {name: t for name, t in (blocks() | change).items() if t is not None}
    folder = write(tmp_path / "odd", V01 | {"version": "2"}, "medusa_lm_head.safetensors", tensors)
    with pytest.raises(MethodError, match=says) as error:
        opened(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hydra_head_arch": "eagle-mlp"}, "heads of kind 'eagle-mlp'"),
        ({"grounded_heads": False}, "do not read drafted tokens"),
        ({"hidden_state_offset": 1}, "reads a state other than the last one"),
    ],
)
def test_hydra_of_another_kind_is_refused(tmp_path, change, says):
    folder = write(tmp_path / "odd", HYDRA | {"hydra_head_arch": "mlp"} | change, "model.safetensors", hydra(False))
    with pytest.raises(MethodError, match=says):
        opened(folder, "hydra")
    extra = hydra(False) | {"hydra_mlp.9.0.linear.weight": torch.zeros(H, H), "odd": torch.zeros(1)}
    shutil.rmtree(folder)
    with pytest.raises(MethodError, match=r"has no hydra_lm_head\.3\.bias"):
        opened(write(folder, HYDRA | {"hydra_head_arch": "mlp"}, "model.safetensors", extra), "hydra")
