"""A model of the Llama family as a GGUF file for llama.cpp, whatever its tokenizer.

    python -m paceline.plugins.to_gguf models/demo demo.gguf --dtype f32
    python -m paceline.plugins.to_gguf demo-int4 demo-Q4_0.gguf             # blocks as `paceline quantize` made them

llama.cpp's own converter refuses tokenizers that are not in its table. This one writes the vocabulary as it is, so
token ids are right. llama.cpp may split text differently ("default" is GPT-2's splitting), so give it token ids."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from paceline.errors import ModelError
from paceline.target.folder import find, open_weights, quantisation, read_config
from paceline.target.load import load_tokenizer
from paceline.target.quantised import checkpoint
from paceline.target.quantised.blocks import Blocks, Weights
from paceline.target.shape import Shape

FILE_TYPES = {"int4": 2, "int8": 7}  # llama.cpp's numbers for files that are mostly Q4_0 and Q8_0
TYPES = {"f32": (np.float32, 0), "f16": (np.float16, 1)}
"""NumPy's type of matrices, and llama.cpp's number for it; vectors are always float32."""


def write(model: str | Path, file: Path, dtype: str = "f16") -> None:
    """Write `model` to `file`; dtype: of matrices not in blocks. ModelError if it is no Llama with plain positions."""
    import gguf

    folder = find(model, ["*.json", "*.safetensors"])
    config = read_config(folder)
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "llama" or rope.get("rope_type", "default") != "default":
        raise ModelError(
            f"{model} is a {config.model_type} with {rope.get('rope_type')} positions; plain Llama is written"
        )
    opened, kind = open_weights(folder), TYPES[dtype][1]
    weights: Weights = {name: value.get_tensor(name) for name, value in opened.items()}
    if quantisation(config):
        weights, kind = checkpoint.read(folder, config, opened)[0], FILE_TYPES[config.quantization_config["precision"]]
    writer = gguf.GGUFWriter(str(file), "llama")
    _describe(writer, config, float(rope.get("rope_theta", 10000.0)), kind)
    _vocabulary(writer, folder, config)
    for name, values, of in _arrays(weights, config, TYPES[dtype][0]):
        writer.add_tensor(name, values, raw_dtype=None if of is None else gguf.GGMLQuantizationType(of))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: PretrainedConfig, theta: float, kind: int) -> None:
    shape = Shape.of(config)
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_file_type(kind)


def _vocabulary(writer: Any, folder: Path, config: PretrainedConfig) -> None:
    """Write tokens, their kinds and the merges of a byte-level BPE."""
    import gguf

    known = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    ids = {**known["model"]["vocab"], **{one["content"]: one["id"] for one in known["added_tokens"]}}
    special = {one["id"] for one in known["added_tokens"] if one["special"]}
    texts = {id: text for text, id in ids.items()}
    tokens = [texts.get(i, f"[unused{i}]") for i in range(config.vocab_size)]
    kinds = [
        gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL if i in texts else gguf.TokenType.UNUSED
        for i in range(config.vocab_size)
    ]
    merges = known["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    end = load_tokenizer(folder).eos_token_id
    if end is not None:
        writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _arrays(
    weights: Weights, config: PretrainedConfig, matrices: Any
) -> Iterator[tuple[str, NDArray[Any], int | None]]:
    """(llama.cpp's name, array, number of the kind of blocks or None). Queries and keys are permuted for its rotary."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in weights.items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            raise ModelError(f"{name} has no place in a plain Llama")
        if theirs == "output.weight" and config.tie_word_embeddings:
            continue
        tensor = weight.data if isinstance(weight, Blocks) else weight
        if count := heads.get(name.removesuffix(".weight").rpartition(".")[2]):
            half = tensor.shape[0] // count // 2
            tensor = tensor.reshape(count, 2, half, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        if isinstance(weight, Blocks):
            yield theirs, tensor.contiguous().numpy(), weight.kind.number
        else:
            values = tensor.float().numpy()
            yield theirs, np.ascontiguousarray(values, np.float32 if values.ndim == 1 else matrices), None


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.plugins.to_gguf", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", help="a folder or a Hugging Face id")
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", choices=list(TYPES), default="f16")
    given = parser.parse_args()
    write(given.model, given.file, given.dtype)
    print(f"wrote {given.file}")


if __name__ == "__main__":
    main()
