"""Models of the Llama family, whatever their tokenizer, draft heads and corpora as files for llama.cpp.

    paceline export gguf path/to/model model.gguf --dtype f32
    paceline export gguf demo-int4 demo-Q4_0.gguf             # blocks as `paceline quantize` made them
    paceline export gguf eagle3:build/eagle3 head.gguf --target smollm2 --dtype q8_0
    paceline export gguf corpus:build/corpus corpus.lookup    # for its type ngram-cache

llama.cpp's own converter refuses tokenizers that are not in its table. This one writes the vocabulary as it is, so
token ids are right. llama.cpp may split text differently ("default" is GPT-2's splitting), so give it token ids.

Heads are written as the draft types of llama.cpp's server of October 2026 read them, or refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from paceline.draft.methods.dflash import DFlashNetwork
from paceline.draft.methods.eagle3 import Eagle3Network
from paceline.draft.text.store import open_store
from paceline.errors import MethodError, ModelError, PacelineError
from paceline.formats.folder import open_weights, quantisation, read_config, untied
from paceline.formats.gguf_file import GGUF
from paceline.formats.heads import dflash, eagle
from paceline.formats.heads.dflash import CONFIDENCE, MASK, OUTPUT, SECOND, W1, W2
from paceline.formats.heads.files import open_head
from paceline.formats.heads.gguf import names_of
from paceline.formats.heads.layout import TABLE, table_and_head
from paceline.formats.heads.vocab import MEMBERS, OFFSETS
from paceline.formats.place import find, gguf_of, is_gguf
from paceline.formats.precision import quantised
from paceline.formats.shape import Shape
from paceline.jsonl import as_object
from paceline.kernels.blocks import Blocks, Weights
from paceline.kernels.ops import SILU
from paceline.outputs import replacing
from paceline.target.load import load, load_tokenizer, read_blocks

FILE_TYPES = {"int4": 2, "int8": 7}  # llama.cpp's numbers for files that are mostly Q4_0 and Q8_0.
TYPES = {"f32": (torch.float32, 0), "f16": (torch.float16, 1), "q8_0": (torch.float16, 7)}
"""The type of matrices that are not in blocks, and llama.cpp's number for it; vectors are always float32."""
TABLES = (TABLE, OFFSETS, MEMBERS)  # Tables of a head, written in llama.cpp's types.
HEADS = {"eagle3": Eagle3Network, "dflash": DFlashNetwork}


def write(model: str | Path, file: Path, dtype: str = "f16") -> None:
    """Write `model` to `file`; dtype: of matrices not in blocks. ModelError if it is no Llama with plain positions."""
    import gguf

    folder = find(model, ["*.json", "*.safetensors"])
    config = read_config(folder)
    if config.model_type != "llama":
        raise ModelError(f"{model} is a {config.model_type}; plain Llama is written")
    opened, kind = open_weights(folder), TYPES[dtype][1]
    config = untied(config, opened)
    weights: Weights = {name: value.get_tensor(name) for name, value in opened.items()}
    if quantisation(config):
        weights, own = read_blocks(folder, config, opened)[0], config.quantization_config["precision"]
        kind = FILE_TYPES["int8" if dtype == "q8_0" else own]  # q8_0 expands blocks of four bits.
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    with replacing(file) as part:
        writer = gguf.GGUFWriter(str(part), "llama")
        _describe(writer, str(model), config, kind)
        _vocabulary(writer, folder, config.vocab_size)
        _finish(writer, weights, config, dtype, partial(names.get_name, try_suffixes=(".weight",)))


def write_head(head: str, target: str | Path, file: Path, dtype: str = "f16") -> str:
    """Write a draft head, "eagle3:FOLDER" or "dflash:FOLDER", to `file`. Returns the server's `--spec-type` for it.

    target  the model that it drafts for. Its tokens are written too, and what the head takes from it: the embedding, if
            the mask is a vector, and the rows of the output head for a smaller vocabulary.
    dtype   of matrices, a key of TYPES.

    Raises MethodError for a head of another target, or one that llama.cpp would run otherwise than it was trained."""
    import gguf

    method, _, folder = head.partition(":")
    model = load(target, native=True)
    config, tensors = open_head(folder, method, model)
    network: Any = HEADS[method](folder, config, tensors, model)
    layout = eagle.EAGLE3 if method == "eagle3" else dflash.LAYOUT
    tensors = {name: one for name, one in layout.named(tensors).items() if name not in TABLES}
    if not torch.equal(network.table, table_and_head(model)[0]):
        tensors[TABLE] = network.table
    facts = (_eagle3 if method == "eagle3" else _dflash)(folder, network, tensors)
    facts["target_layers"] = list(network.taps)
    is_second = method == "dflash" and network.form.best > 0
    names = names_of(method, network.config.num_hidden_layers, is_second=is_second)
    naming = {ours: theirs for ours, theirs in names.items() if ours in CONFIDENCE or not ours.endswith(".bias")}
    with replacing(file) as part:
        writer: Any = gguf.GGUFWriter(str(part), method)
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array,
               float: writer.add_float32}  # fmt: skip
        _describe(writer, folder, network.config, TYPES[dtype][1])
        if is_gguf(target):
            for key, value in GGUF(gguf_of(target)).metadata.items():
                if key.startswith("tokenizer.ggml.") and type(value) in add and not key.endswith(".mask_token_id"):
                    add[type(value)](key, value)
        else:
            _vocabulary(writer, find(target, ["*.json"]), model.vocab_size)
        if method == "dflash":
            mask = network.form.mask
            if MASK in tensors:  # llama.cpp takes a token's embedding: the last token's, which is rare or unused.
                mask, tensors[TABLE] = model.vocab_size - 1, network.table.clone()
                tensors[TABLE][mask] = tensors.pop(MASK)
            writer.add_mask_token_id(mask)
        for key, value in facts.items():
            add[type(value)](f"{method}.{key}", value)
        if network.columns is not None:
            writer.add_tensor("d2t", network.columns.cpu().numpy().astype(np.int64))
        _finish(writer, {**tensors}, network.config, dtype, naming.get)
    kind = "dspark" if W1 in tensors and not is_second else method
    return f"draft-{kind}"


def write_lookup(corpus: str | Path, file: Path) -> None:
    """Write a corpus as a static lookup cache: what came after every two tokens. StoreError if there is none.

    The file holds int32 numbers, a record for every two tokens: the two, -1 twice, the number of different tokens that
    came after them, then each of these with its count."""
    store = open_store(corpus, kind="corpus")
    text, ends = store.array("text").astype(np.int64), store.array("ends")
    document = np.searchsorted(ends, np.arange(len(text)), side="right")
    size, whole = int(text.max()) + 1, document[:-2] == document[2:]
    triples, counts = np.unique(((text[:-2] * size + text[1:-1]) * size + text[2:])[whole], return_counts=True)
    pairs, first, followers = np.unique(triples // size, return_index=True, return_counts=True)
    begins = np.cumsum(5 + 2 * followers) - (5 + 2 * followers)
    records = np.empty(5 * len(pairs) + 2 * len(triples), "<i4")
    for at, values in enumerate((pairs // size, pairs % size, -1, -1, followers)):
        records[begins + at] = values
    places = np.repeat(begins + 5 - 2 * first, followers) + 2 * np.arange(len(triples))
    records[places], records[places + 1] = triples % size, counts
    with replacing(file) as part:
        records.tofile(part)


def _eagle3(folder: str, network: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """llama.cpp's further entries for an eagle3 head."""
    flags, layers, taps = network.flags, network.config.num_hidden_layers, len(network.taps)
    if network.mask is not None:
        raise MethodError(f"{folder} is P-EAGLE, which llama.cpp has no type for")
    norms = {"norm.weight", "layers.0.input_layernorm.weight"} - network.weights.keys()
    if norms or network.layers.shape.window or min(network.taps) < 0:
        raise MethodError(f"{folder}: llama.cpp's eagle3 has all norms, no window, and reads inputs of layers alone")
    other = [] if (layers, taps) == (1, 3) else [f"{layers} layers over {taps} states"]
    if other := other + [name for name in ("fc_norm", "norm_output") if getattr(flags, name)]:
        raise MethodError(
            f"{folder} has {' and '.join(other)}: llama.cpp's eagle3 has one layer over three states and neither norm; "
            "`paceline train eagle3 --no-fc-norm --no-norm-output` makes heads that can be written"
        )
    norms = {key: getattr(flags, key) for key in ("norm_before_residual", "norm_before_fc")}
    return {"target_hidden_size": tensors["fc.weight"].shape[1] // taps, **norms}


def _dflash(folder: str, network: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """llama.cpp's further entries for a dflash head; `tensors` become those that it reads."""
    form, shape, facts = network.form, network.layers.shape, dict[str, Any]()
    slides, (causal, *others) = [kind.window for kind in shape.layers], {causal for _, causal in network.spans}
    if others or len({*slides} - {None}) > 1:
        raise MethodError(f"{folder} has layers that differ in more than sliding windows of one size: not written")
    if any(slides):
        pattern = [window is not None for window in slides]
        facts = {"attention.sliding_window": max(filter(None, slides)), "attention.sliding_window_pattern": pattern}
    if form.best and (network.columns is not None or form.allowed or shape.hidden_size < form.best * (form.best + 1)):
        raise MethodError(f"{folder}: llama.cpp's DFlash2 drafts all tokens, and has fewer candidates in such a width")
    facts |= {entry: getattr(form, name) for name, entry in SECOND.items()} if form.best else {}
    facts |= {"logit_scale": float(form.scale)} if form.scale != 1 else {}
    facts |= {"final_logit_softcapping": float(form.cap)} if form.cap else {}
    if network.columns is not None:
        tensors.setdefault(OUTPUT, network.head.dense())
    tensors |= {CONFIDENCE[0]: network.weights[CONFIDENCE[0]]} if form.has_confidence else {}
    if not form.rank and form.from_anchor:  # llama.cpp drafts so with a Markov head alone: one of zeros
        drafted = len(network.table if network.columns is None else network.columns)
        tensors |= {W1: torch.zeros(len(network.table), 1), W2: torch.zeros(drafted, 1)}
        if form.has_confidence:
            tensors[CONFIDENCE[0]] = torch.nn.functional.pad(tensors[CONFIDENCE[0]], (0, 1))
    elif not form.rank and form.has_confidence:  # llama.cpp has this head beside a Markov head alone
        del tensors[CONFIDENCE[0]], tensors[CONFIDENCE[1]]
    facts |= {"sample_from_anchor": form.from_anchor, "has_confidence_head": CONFIDENCE[0] in tensors}
    return {"block_size": form.block, **facts} | ({"attention.causal": True} if causal else {})


def _describe(writer: Any, name: str, config: PretrainedConfig, kind: int) -> None:
    shape, rope = Shape.of(config), getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"{name} has {rope['rope_type']} positions; plain ones are written")
    if shape.activation != SILU:
        raise ModelError(f"{name} has GELU; SiLU is written")
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_file_type(kind)


def _vocabulary(writer: Any, folder: Path, size: int) -> None:
    """Write `size` tokens, their kinds and the merges of a byte-level BPE."""
    import gguf

    file = folder / "tokenizer.json"
    known = as_object(file.read_bytes(), "a tokenizer.json") if file.is_file() else {"model": {}}
    if known["model"].get("type") != "BPE":
        raise ModelError(f"{file} has no byte-level BPE; no other tokenizer is written")
    ids = {**known["model"]["vocab"], **{one["content"]: one["id"] for one in known["added_tokens"]}}
    special = {one["id"] for one in known["added_tokens"] if one["special"]}
    texts = {id: text for text, id in ids.items()}
    tokens = [texts.get(i, f"[unused{i}]") for i in range(size)]
    kinds = [
        gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL if i in texts else gguf.TokenType.UNUSED
        for i in range(size)
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


def _finish(writer: Any, weights: Weights, config: Any, dtype: str, naming: Callable[[str], str | None]) -> None:
    """Write the tensors under llama.cpp's names, and the file. Queries and keys are permuted, but for dflash: numbers
    that rotate together stand side by side."""
    import gguf

    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads = {} if writer.arch == "dflash" else heads
    for name, weight in (quantised(weights, "int8") if dtype == "q8_0" else weights).items():
        theirs = naming(name)
        if theirs is None:
            raise ModelError(f"{name} has no place in llama.cpp's layout")
        if isinstance(weight, Blocks):
            tensor, values, of = weight.data, weight.dense(), gguf.GGMLQuantizationType(weight.kind.number)
        else:
            tensor = values = weight.detach().cpu().to(TYPES[dtype][0] if weight.ndim == 2 else torch.float32)
            of = None
        if not values.isfinite().all():
            raise ModelError(f"{name} has numbers that are not finite, or too large for {dtype}")
        if count := heads.get(name.removesuffix(".weight").rpartition(".")[2]):
            half = tensor.shape[0] // count // 2
            tensor = tensor.reshape(count, 2, half, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(theirs, tensor.contiguous().numpy(), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def export(what: str, file: Path, dtype: str = "f16", target: str | None = None) -> str:
    """Write a model, a head ("eagle3:FOLDER", "dflash:FOLDER") or a corpus ("corpus:FOLDER") to `file`; returns
    the options of llama.cpp's server for it. Raises PacelineError."""
    kind, _, rest = what.partition(":")
    if (kind in HEADS) != (target is not None):
        raise PacelineError("--target MODEL is for draft heads, and they need it")
    if kind in HEADS:
        return f"--spec-type {write_head(what, str(target), file, dtype)}"
    if kind == "corpus":
        write_lookup(rest, file)
    else:
        write(what, file, dtype)
    return ""
