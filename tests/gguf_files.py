"""Model folders written as GGUF files by the package gguf, as llama.cpp's converter would; and random blocks.

file = write(folder, tmp_path / "model.gguf", "Q8_0")
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.formats.experts import as_checkpoint
from paceline.formats.shape import Delta, Shape
from paceline.kernels.blocks import Blocks, Kind, kind_of

INNER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks", "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps", "mlp.experts.down_proj": "ffn_down_exps",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate.e_score_correction": "exp_probs_b", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.k_b": "attn_k_b", "self_attn.v_b": "attn_v_b",
    "layer_scalar": "layer_output_scale", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm", "shared_head.head": "nextn.shared_head_head",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
ARCHITECTURES = {
    "mistral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next",
    "gemma4_text": "gemma4", "glm4_moe_lite": "deepseek2",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "gpt_oss": "gpt-oss",
}  # fmt: skip
OUTER = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip

Change = Callable[[gguf.GGUFWriter], None]


def name_of(name: str, posts: bool = False) -> str:
    """posts: the norm after attention is that, and not the one before the MLP."""
    name = re.sub(r"(sinks|layer_scalar)$", r"\1.weight", name).replace("correction_bias", "correction.bias")
    stem, _, end = name.replace("mlp.gate.per_expert_scale", "mlp.experts.down_proj.scale").rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    if name.endswith((".A_log", ".dt_bias")):
        return f"blk.{layer}.ssm_a" if name.endswith(".A_log") else f"blk.{layer}.ssm_dt.bias"
    part = INNER[re.sub(r"experts\.\d+", "experts", part)]
    return f"blk.{layer}.{'post_attention_norm' if posts and part == 'ffn_norm' and 'post' in stem else part}.{end}"


def write(
    folder: Path,
    file: Path,
    kind: str | Callable[[str], str] = "F32",
    *,
    more: Change = lambda writer: None,
    leave_out: str = "nothing",
    architecture: str | None = None,
    pre: str = "gpt-2",
    parts: int = 0,
    add_bos: bool = True,
    fused: bool = False,
) -> Path:
    """kind: of all matrices, or of each by its name. more: adds facts. parts: tensors of a file, 0: all in one.
    fused: gates and ups of experts are one tensor."""
    config = AutoConfig.from_pretrained(folder)
    family = architecture or ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(file), family, split_max_tensors=parts)
    s = Shape.of(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(s.hidden_size)
    writer.add_block_count(s.num_layers)
    writer.add_head_count(s.num_heads)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_key_length(s.head_dim if s.latent is None else s.latent.rank + s.latent.turned)
    writer.add_value_length(s.head_dim if s.latent is None else s.latent.rank)
    writer.add_rope_dimension_count(s.rotary_dim or s.head_dim)
    if config.model_type == "gemma4_text":
        _differing(writer, s, config)
    elif s.latent is not None:
        _latent(writer, s, config)
    else:
        writer.add_feed_forward_length(s.intermediate_size)
        writer.add_head_count_kv(s.num_kv_heads)
    if s.window is not None:
        writer.add_sliding_window(s.window)
    factors = _positions(writer, config, s.head_dim)
    _own_facts(writer, s, config)
    _vocabulary(writer, folder, s.vocab_size, pre)
    writer.add_add_bos_token(add_bos)
    more(writer)
    for name, values in factors.items():
        writer.add_tensor(name, values)
    heads = {"attn_q": s.num_heads, "attn_k": s.num_kv_heads}
    stacks: dict[str, list[Any]] = {}
    tensors = as_checkpoint(load_file(folder / "model.safetensors"))
    if s.latent is not None:
        tensors = _of_latent(tensors, s)
    if s.delta is not None:
        tensors = {name: one for key, values in tensors.items() for name, one in _of_states(key, values, s.delta)}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        theirs = name_of(name, posts=s.norms[1] is not None or s.delta is not None or s.sinks)
        if theirs == leave_out or (s.tied and theirs == "output.weight"):
            continue
        part = theirs.split(".")[-2]
        values = tensors[name].float() + (s.norm_offset if part.endswith("norm") and part != "ssm_norm" else 0)
        if family in ("llama", "granite", "smollm3") and part in heads:
            values = values.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).reshape(values.shape)
        if part.endswith("_exps") and not theirs.endswith(".scale"):
            stacks.setdefault(theirs, []).append(values.numpy())
        else:
            _add(writer, theirs, values.numpy(), kind if isinstance(kind, str) else kind(theirs))
    for gate in [theirs for theirs in stacks if "ffn_gate_exps" in theirs and (fused or family == "gemma4")]:
        both = zip(stacks.pop(gate), stacks.pop(gate.replace("gate", "up")), strict=True)
        stacks[gate.replace("gate", "gate_up")] = [np.concatenate(pair) for pair in both]
    for theirs, experts in stacks.items():
        _add(writer, theirs, np.stack(experts), kind if isinstance(kind, str) else kind(theirs))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if not parts else sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))[0]


def _add(writer: gguf.GGUFWriter, name: str, values: Any, kind: str) -> None:
    values = np.ascontiguousarray(values)
    if values.ndim < 2 or name.endswith(".bias") or kind == "F32" or "ffn_gate_inp" in name or "conv1d" in name:
        writer.add_tensor(name, values)
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    elif kind == "BF16":
        data = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=Type.BF16)
    else:
        try:
            data = gguf.quants.quantize(values, Type[kind])
        except NotImplementedError:  # the package can only read it
            known = kind_of(Type[kind])
            assert known is not None
            data = random_blocks(known, *values.shape, seed=len(name), sizes=(0.02, 0.2)).data.numpy()
        writer.add_tensor(name, data, raw_dtype=Type[kind])


def random_blocks(
    kind: Kind, outputs: int, width: int, seed: int = 0, sizes: tuple[float, float] = (1e-3, 10.0)
) -> Blocks:
    """Blocks of random bytes, of any format: those whose largest weight is in the range `sizes`."""
    rng, count, chosen = np.random.default_rng(seed), outputs * width // kind.inputs, list[Any]()
    while sum(map(len, chosen)) < count:
        some = rng.integers(0, 256, (4 * count, kind.nbytes), np.uint8)
        with np.errstate(all="ignore"):
            largest = abs(gguf.quants.dequantize(some, Type(kind.number))).max(1)
        chosen.append(some[(sizes[0] < largest) & (largest < sizes[1])])
    return Blocks(kind, torch.from_numpy(np.concatenate(chosen)[:count].reshape(outputs, -1)))


def _latent(writer: gguf.GGUFWriter, s: Shape, config: Any) -> None:
    """Facts of latent attention and of its router."""
    writer.add_feed_forward_length(s.intermediate_size)
    writer.add_head_count_kv(1)
    for name, size in (("key", s.head_dim), ("value", config.v_head_dim)):
        getattr(writer, f"add_{name}_length_mla")(size)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _of_latent(tensors: dict[str, torch.Tensor], s: Shape) -> dict[str, torch.Tensor]:
    """Tensors with the matrices of keys and values apart, those of keys with rows and columns exchanged."""
    made = {}
    for name, tensor in tensors.items():
        if "kv_b_proj" not in name or s.latent is None:
            made[name] = tensor
            continue
        still = s.head_dim - s.latent.turned
        keys, values = tensor.view(s.num_heads, -1, s.latent.rank).split([still, s.head_dim], 1)
        made |= {name.replace("kv_b_proj", "k_b"): keys.transpose(1, 2), name.replace("kv_b_proj", "v_b"): values}
    return made


def _differing(writer: gguf.GGUFWriter, s: Shape, config: Any) -> None:
    """In what layers of Gemma 4 differ."""
    sizes = [kind.sizes for kind in s.layers]
    inner, heads = ([one[part] for one in sizes if one] for part in (2, 0))
    writer.add_feed_forward_length(inner if len({*inner}) > 1 else inner[0])
    writer.add_head_count_kv(heads if len({*heads}) > 1 else heads[0])
    small = next(kind.sizes[1] for kind in s.layers if kind.sizes and kind.window)
    writer.add_key_length_swa(small)
    writer.add_value_length_swa(small)
    writer.add_rope_dimension_count_swa(small)
    writer.add_rope_freq_base_swa(float(config.rope_parameters["sliding_attention"]["rope_theta"]))


def _own_facts(writer: gguf.GGUFWriter, s: Shape, config: Any) -> None:
    """What only some families have."""
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "gemma4_text":
        writer.add_sliding_window_pattern([kind.window is not None for kind in s.layers])
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(s.beside)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma3_text":
        # Published files do not say these: layers repeat every six, and the scale is that of the head.
        writer.add_sliding_window_pattern([kind.window is not None for kind in s.layers])
        assert config.query_pre_attn_scalar == config.head_dim
    if s.experts is not None:
        writer.add_expert_count(s.experts.count)
        writer.add_expert_used_count(s.experts.chosen)
    if s.experts is not None and config.model_type != "olmoe":
        writer.add_expert_feed_forward_length(s.experts.size)
    if s.experts is not None and s.experts.shared:
        writer.add_expert_shared_feed_forward_length(s.experts.shared)
    if (d := s.delta) is not None:
        writer.add_ssm_conv_kernel(d.kernel)
        writer.add_ssm_state_size(d.key_dim)
        writer.add_ssm_group_count(d.key_heads)
        writer.add_ssm_time_step_rank(d.value_heads)
        writer.add_ssm_inner_size(d.values)
        period = [kind.recurrent for kind in s.layers].index(False) + 1
        assert [(n + 1) % period != 0 for n in range(s.num_layers)] == [kind.recurrent for kind in s.layers]
        writer.add_full_attention_interval(period)
        pairs = s.rotary_dim // 2
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])


def _of_states(name: str, tensor: torch.Tensor, d: Delta) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of a hybrid by the names of Qwen 3.5, in the order and with the numbers of llama.cpp's converter."""
    start, inside, part = name.partition("linear_attn.")
    part = part.removesuffix(".weight")
    if not inside:
        yield name, tensor
    elif part == "in_proj_qkvz":
        wide = d.value_heads // d.key_heads * d.value_dim
        q, k, v, z = tensor.unflatten(0, (d.key_heads, -1)).split([d.key_dim, d.key_dim, wide, wide], 1)
        yield f"{start}{inside}in_proj_qkv.weight", torch.cat([one.flatten(0, 1) for one in (q, k, v)])
        yield f"{start}{inside}in_proj_z.weight", z.flatten(0, 1)
    else:
        if part == "A_log":
            tensor = -tensor.exp()
        elif part == "conv1d":
            tensor = tensor.squeeze(1)
        if part == "out_proj" and not d.joined:
            tensor = _tiled(tensor.T, d, d.value_dim).T
        elif part in ("in_proj_qkv", "conv1d") and not d.joined:
            tensor = torch.cat([tensor[: 2 * d.keys], _tiled(tensor[2 * d.keys :], d, d.value_dim)])
        elif part not in ("norm", "in_proj_ba", "conv1d", "out_proj") and not d.joined:
            tensor = _tiled(tensor, d, d.value_dim if part == "in_proj_z" else 1)
        yield name, tensor


def _tiled(rows: torch.Tensor, d: Delta, size: int) -> torch.Tensor:
    """Rows of value heads, of `size` each: first the first head of each key head, then the second of each."""
    return rows.unflatten(0, (d.key_heads, -1, size)).transpose(0, 1).flatten(0, 2)


def _positions(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> dict[str, Any]:
    """Facts about rotary positions; the factors of Llama 3 and Phi, which are tensors."""
    rope = dict(config.rope_parameters)
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[1])
        names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
        return {name: np.array(rope[factor], np.float32) for name, factor in names.items()}
    if kind == "proportional":
        turned = int(rope["partial_rotary_factor"] * head_dim // 2)
        return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (head_dim // 2 - turned), np.float32)}
    return {"rope_freqs.weight": factors(config, rope["rope_theta"], head_dim)} if kind == "llama3" else {}


def factors(config: Any, theta: float, head_dim: int) -> Any:
    """Llama 3's factors of the usual frequencies, float32 [head_dim / 2]."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    return (plain / scaled.double()).float().numpy()


def _vocabulary(writer: gguf.GGUFWriter, folder: Path, size: int, pre: str) -> None:
    known = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    ids = {**known["model"]["vocab"], **{one["content"]: one["id"] for one in known["added_tokens"]}}
    special = {one["id"] for one in known["added_tokens"] if one["special"]}
    texts = {i: text for text, i in ids.items()}
    T = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(size)])
    kinds = [T.CONTROL if i in special else T.NORMAL if i in texts else T.UNUSED for i in range(size)]
    writer.add_token_types(kinds)
    merges = known["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text("utf-8"))
