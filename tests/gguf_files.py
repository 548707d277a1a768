"""Model folders written as GGUF files by the package gguf, as llama.cpp's converter would; and random blocks.

file = write(folder, tmp_path / "model.gguf", "Q8_0")
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoConfig

from paceline.target.quantised.blocks import Blocks, Kind, kind_of
from paceline.target.shape import Shape

INNER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

Change = Callable[[gguf.GGUFWriter], None]


def name_of(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{INNER[part]}.{end}"


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
) -> Path:
    """kind: of all matrices, or of each by its name. more: adds facts. parts: tensors of a file, 0: all in one."""
    config = AutoConfig.from_pretrained(folder)
    family = architecture or {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(file), family, split_max_tensors=parts)
    s = Shape.of(config)
    writer.add_context_length(s.max_context)
    writer.add_embedding_length(s.hidden_size)
    writer.add_block_count(s.num_layers)
    writer.add_feed_forward_length(s.intermediate_size)
    writer.add_head_count(s.num_heads)
    writer.add_head_count_kv(s.num_kv_heads)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_dimension_count(s.head_dim)
    if s.window is not None:
        writer.add_sliding_window(s.window)
    factors = _positions(writer, config, s.head_dim)
    _vocabulary(writer, folder, s.vocab_size, pre)
    more(writer)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    heads = {"attn_q": s.num_heads, "attn_k": s.num_kv_heads}
    for name, tensor in load_file(folder / "model.safetensors").items():
        theirs = name_of(name)
        if theirs == leave_out or (s.tied and theirs == "output.weight"):
            continue
        part = theirs.split(".")[-2]
        values = tensor.float()
        if family == "llama" and part in heads:
            values = values.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).reshape(values.shape)
        _add(writer, theirs, values.numpy(), kind if isinstance(kind, str) else kind(theirs))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if not parts else sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))[0]


def _add(writer: gguf.GGUFWriter, name: str, values: Any, kind: str) -> None:
    values = np.ascontiguousarray(values)
    if values.ndim < 2 or kind == "F32":
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


def _positions(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> Any:
    """Facts about rotary positions; Llama 3's factors, which are a tensor."""
    rope = dict(config.rope_parameters)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2).double() / head_dim)
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
    writer.add_add_bos_token(True)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text("utf-8"))
