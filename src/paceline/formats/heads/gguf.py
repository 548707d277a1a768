"""Draft heads in GGUF files, as llama.cpp's server reads them and `paceline export gguf` writes them.

    config, tensors = read(Path("head.gguf"), "eagle3")    # as in the `speculators` format
    tensors = head_in(Path("model.gguf"), target.shape)    # a target's own head, by the names of `mtp.py`"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.options import quoted
from paceline.errors import MethodError
from paceline.formats.folder import open_weights
from paceline.formats.gguf import FREQUENCIES, rope_of, tensor_name, tensors_in, unpermuted
from paceline.formats.gguf_file import GGUF
from paceline.formats.heads.dflash import CONFIDENCE, CONVOLVED, SECOND, SELECT, W1, W2
from paceline.formats.heads.mtp import OUTER as NEXTN
from paceline.formats.heads.mtp import head_names, head_shape
from paceline.formats.heads.vocab import OFFSETS
from paceline.formats.place import gguf_of, is_gguf
from paceline.formats.shape import ATTENTION, ROUTER, Shape, layer_shapes
from paceline.kernels.blocks import Blocks, Weights, within

OUTER = {
    "fc.weight": "fc.weight",
    "lm_head.weight": "output.weight",
    "input_norm.weight": "enc.output_norm.weight",  # eagle3: over the tapped states
    "hidden_norm.weight": "enc.output_norm.weight",  # dflash: over the output of fc
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    **{W1: "markov_w1.weight", W2: "markov_w2.weight"},
    **{CONFIDENCE[0]: "conf_proj.weight", CONFIDENCE[1]: "conf_proj.bias"},
}
"""llama.cpp's names of a head's tensors, if they differ from those of a Qwen3."""
SELECTOR = {
    W1: "selector_predecessor.weight",
    W2: "selector_successor.weight",
    SELECT: "selector_hidden.weight",
}
"""llama.cpp's names of the tensors of DFlash2's selector."""
ENTRIES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "is_causal": "attention.causal",
    "output_multiplier": "logit_scale",
    **{key: key for key in ("target_hidden_size", "norm_before_residual", "norm_before_fc", "block_size",
                            "sample_from_anchor", "final_logit_softcapping", *SECOND.values())},
}  # fmt: skip
"""llama.cpp's keys of the entries of a config.json."""
REFUSED = ("hyper_connection_count", "expert_count", "embedding_scale", "rope.scaling.attn_factor")
FLAGS = {*ENTRIES.values(), "has_confidence_head", "rope.scaling.finetuned"}
"""Keys that may be true. The tensors show whether there is a confidence head, and "finetuned" changes nothing."""


def read(file: Path, method: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a head. Returns its config.json and tensors. PacelineError for a file of another kind."""
    opened = GGUF(file)
    family, start = str(opened.family), f"{opened.family}."
    facts = within(opened.metadata, start)
    if family != method:
        if family in ("eagle3", "dflash"):
            raise MethodError(f"{file} holds a drafter of kind {family}: write {family}:{quoted(str(file))}")
        old = ": convert it anew" if family in ("dspark", "dflash-draft") else ""
        raise MethodError(f"{file} is of architecture {family}; GGUF drafts are read of eagle3 and dflash{old}")
    unknown = [key for key, value in facts.items() if value is True and key not in FLAGS]
    if odd := [key for key in REFUSED if facts.get(key)] + unknown:
        raise MethodError(f"{file} has {start}{odd[0]}, which nothing here applies: it would draft badly")
    config = {ours: facts[key] for ours, key in ENTRIES.items() if key in facts}
    size, turned = config.get("head_dim"), facts.get("rope.dimension_count")
    slides = facts.get("attention.sliding_window_pattern")
    if facts.get("attention.sliding_window") and not isinstance(slides, list):
        raise MethodError(f"{file} has a sliding window, and no list of the layers that have it: convert it anew")
    rope = rope_of(opened, facts, float(facts.get("rope.freq_base", 10000.0)), 1.0)
    if FREQUENCIES in opened.places:  # Llama 3's factors are the same for texts of any length.
        factors = _dense(opened.tensor(FREQUENCIES)).flatten().tolist()
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        rope |= {"factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": 2**24}
    config |= {
        "rope_parameters": rope,
        "partial_rotary_factor": turned / size if turned and size else None,
        "aux_hidden_state_layer_ids": facts.get("target_layers", facts.get("extract_layers")),
        "mask_token_id": opened.metadata.get("tokenizer.ggml.mask_token_id"),
        "layer_types": [ATTENTION[bool(one)] for one in slides or ()],
    }
    if family == "dflash":
        config.setdefault("is_causal", False)
        config.setdefault("sample_from_anchor", "markov_w1.weight" in opened.places)
    tensors = _tensors(opened, family, config, is_second=bool(config.get(SECOND["best"])))
    if W1 in tensors:
        config["markov_rank"] = tensors[W1].shape[-1]
    rows = tensors.get("lm_head.weight", tensors.get(OFFSETS))
    config["draft_vocab_size"] = None if rows is None else len(rows)
    return config | {"enable_confidence_head": CONFIDENCE[0] in tensors}, tensors


def names_of(method: str, layers: int, *, is_second: bool) -> dict[str, str]:
    """llama.cpp's names of a head's tensors, by our names. is_second: it is DFlash2."""
    parts = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    names = ["embed_tokens", "norm", *(f"layers.{n}.{part}" for n in range(layers) for part in parts)]
    names = [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
    foreign = "input_norm.weight" if method == "dflash" else "hidden_norm.weight"
    theirs = {name: str(tensor_name("qwen3", f"model.{name}")) for name in names} | OUTER
    del theirs[foreign]
    if is_second:
        theirs |= SELECTOR
        for n in range(layers):
            for part, conv in zip(("attn_conv", "ffn_conv"), CONVOLVED.values(), strict=True):
                theirs[f"layers.{n}.{conv}.base_kernel"] = f"blk.{n}.{part}_base"
                theirs[f"layers.{n}.{conv}.kernel_projection.weight"] = f"blk.{n}.{part}_proj.weight"
    return theirs


def _tensors(file: GGUF, family: str, config: dict[str, Any], *, is_second: bool) -> dict[str, Tensor]:
    """The tensors by our names. Others keep their names, so that they are refused."""
    layers = min(int(config.get("num_hidden_layers") or 0), len(file.places))
    ours = {theirs: own for own, theirs in names_of(family, layers, is_second=is_second).items()}
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"} if family == "eagle3" else {}
    tensors = {}
    for theirs, place in file.places.items():
        if theirs == FREQUENCIES:
            continue
        name = ours.get(theirs, theirs)
        if theirs == OFFSETS:  # These are token ids, of a type that no weight has.
            ids = place.data[place.begin : place.begin + 8 * place.shape[0]].clone().view(torch.int64)
            tensors[name] = ids - torch.arange(len(ids))
            continue
        tensor = file.tensor(theirs)
        if count := heads.get(name.split(".")[-2]):
            tensor = unpermuted(tensor, config[count])
        tensors[name] = _dense(tensor)
    return tensors


def _dense(tensor: Tensor | Blocks) -> Tensor:
    return tensor.dense(torch.bfloat16) if isinstance(tensor, Blocks) else tensor


# A target's own head -------------------------------------------------------------------------------------------------


_HEADER = 1 << 25
"""Bytes within which a file names its tensors; a file in parts names some in its later parts."""


def has_head(path: Path) -> bool:
    """Whether a model's folder or file brings a multi-token-prediction head. ModelError if it cannot be read."""
    if is_gguf(path):
        file = gguf_of(path)
        # Reading a vocabulary takes most of a second, and this is asked before each answer of a command.
        with file.open("rb") as opened:
            names = b".nextn.eh_proj" in opened.read(_HEADER)
        return (names or "-of-" in file.name) and first_head(GGUF(file)) is not None
    return not (path / "adapter_config.json").exists() and bool(head_names(open_weights(path)))


def first_head(file: GGUF) -> int | None:
    """The number of the block with the first head."""
    products = (re.fullmatch(r"blk\.(\d+)\.nextn\.eh_proj\.weight", name) for name in file.places)
    return min((int(match[1]) for match in products if match), default=None)


def head_in(path: Path, target: Shape) -> Weights:
    """Read the first multi-token-prediction head in a model's file, or in its own file, for a target of this shape.
    Its matrices stay in the file's blocks. Returns no weights if there is none. PacelineError if it cannot be read."""
    file = GGUF(path)
    first = first_head(file)
    if first is None:
        return {}
    start, layer = f"blk.{first}.", f"model.layers.{first}."
    last = f"{start}nextn.shared_head_norm.weight"
    outer = [f"{start}nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm")]
    outer.append(last if last in file.places else "output_norm.weight")
    router = f"layers.0.{ROUTER}.weight"
    shape = head_shape(target, [router] if tensor_name(file.family, layer + f"{ROUTER}.weight") in file.places else [])
    of_layer = layer_shapes(shape, kind=shape.layers[0])
    of_layer |= {f"{name}.weight": (shape.hidden_size,) for name in shape.norms[:1] if name}
    read, used = tensors_in(file, shape, {layer + name: size for name, size in of_layer.items()})
    copies = {f"{start}nextn.{part}.weight" for part in ("shared_head_head", "embed_tokens")}  # the target's own
    if other := sorted(n for n in file.places if n.startswith(start) and n not in {*used, *outer, *copies}):
        raise MethodError(f"{path}: its head has {other[0]}, which no layer of the target has: nothing here runs it")
    weights = {f"layers.0.{name.removeprefix(layer)}": weight for name, weight in read.items()}
    product, *norms = file.tensor(outer[0]), *(_dense(file.tensor(name)) for name in outer[1:])
    # Files store norms with the family's offset added; some do not add it to a head's norms, whose mean is then near 0.
    norms = [one - shape.norm_offset if one.float().mean() > shape.norm_offset / 2 else one for one in norms]
    return weights | dict(zip(NEXTN, [product, *norms], strict=True))
