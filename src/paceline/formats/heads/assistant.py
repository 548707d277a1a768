"""Gemma 4's assistants, in folders as Google publishes them and in llama.cpp's files: layers without keys and values of
their own, which attend to those of their target.

    found = read_assistant(path, target)    # PacelineError if it is another target's"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, PretrainedConfig

from paceline.errors import MethodError, printable
from paceline.formats import folder as files
from paceline.formats.checks import check_config, unsupported
from paceline.formats.facts import Inside
from paceline.formats.gguf import config_of, tensors_in
from paceline.formats.gguf_file import GGUF
from paceline.formats.heads.checkpoint import check_all
from paceline.formats.heads.layout import renamed
from paceline.formats.place import is_gguf
from paceline.formats.rotary import turns_of
from paceline.formats.shape import LayerKind, Shape, layer_shapes
from paceline.kernels.blocks import WeightsByName, within

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")  # The layers of both are the same.
HEAD, CENTROIDS, ORDER = "lm_head.weight", "centroids.weight", "token_ordering"
GGUF_FAMILY = "gemma4-assistant"
_NAMES: Mapping[str, str | None] = {r"model\.(.+)": r"\1", r"masked_embedding\.(.+)": r"\1"}


class Assistant(NamedTuple):
    """What is read of an assistant's folder or file.

    shape    of its layers. The `source` of a kind is the target's layer whose keys and values it reads.
    tensors  by names such as "layers.0.mlp.up_proj.weight", HEAD, CENTROIDS and ORDER.
    best     of how many clusters of tokens the head makes logits; 0: it makes those of all tokens."""

    shape: Shape
    tensors: WeightsByName
    best: int


def is_assistant(path: Path) -> bool:
    """Whether a folder or file holds a Gemma 4's assistant."""
    if is_gguf(path):
        with path.open("rb") as opened:  # The architecture comes first.
            return GGUF_FAMILY.encode() in opened.read(1 << 12)
    file = path / "config.json"
    return file.is_file() and files.read_json(file).get("model_type") in MODEL_TYPES


def read_assistant(path: Path, target: Inside) -> Assistant:
    """Read the assistant in a folder or file, for this target. PacelineError if it cannot be read or is another
    target's."""
    if is_gguf(path):
        return _in_file(path, target)
    config = files.read_config(path)
    shape = _shape_over(path, _as_if_whole(config, path), config.backbone_hidden_size, target)
    opened = files.open_weights(path)
    tensors = renamed({name: opened[name].get_tensor(name) for name in opened}, _NAMES)
    table = tensors.pop("embed_tokens.weight", None)
    if table is not None and (config.tie_word_embeddings or HEAD not in tensors):
        tensors[HEAD] = table
    best = config.centroid_intermediate_top_k if config.use_ordered_embeddings else 0
    clusters = config.num_centroids if best else 0
    check_all(path, tensors, _shapes(shape, target.hidden_size, clusters))
    if best and not (best <= clusters and _is_order(tensors[ORDER], clusters)):
        raise MethodError(f"{path}: its {ORDER} is no order of {shape.vocab_size} tokens in {clusters} clusters")
    return Assistant(shape, tensors, best)


def _in_file(path: Path, target: Inside) -> Assistant:
    """Read an assistant of llama.cpp's converter, which leaves clusters out: a Gemma 4 with two products more."""
    file, start, plain = GGUF(path), f"{GGUF_FAMILY}.", "gemma4."
    facts = {f"{plain}{key}": value for key, value in within(file.metadata, start).items()}
    none = {f"{plain}{key}": 0 for key in ("attention.shared_kv_layers", "nextn_predict_layers")}
    file.family, file.metadata = plain[:-1], file.metadata | facts | none
    shape = _shape_over(path, config_of(file), int(facts.get(f"{plain}embedding_length_out", 0)), target)
    names = {HEAD: "model.embed_tokens.weight"}
    names |= {f"{part}_projection.weight": f"nextn.{part}_projection.weight" for part in ("pre", "post")}
    shapes = _shapes(shape, target.hidden_size, 0)
    theirs = {name: names.get(name, f"model.{name}") for name in shapes}
    weights, _ = tensors_in(file, shape, {theirs[name]: size for name, size in shapes.items()})
    return Assistant(shape, {name: weights[theirs[name]] for name in shapes}, 0)


def _shape_over(path: Path, config: PretrainedConfig, width: int, target: Inside) -> Shape:
    """The shape of layers that read the target's keys and values. width: of the states that it reads."""
    whole = Shape.of(config)
    _check(path, width, whole, target)
    return replace(whole, layers=tuple(_over(path, n, config, whole, target) for n in range(whole.num_layers)))


def _as_if_whole(config: PretrainedConfig, path: Path) -> PretrainedConfig:
    """The configuration of the assistant's layers, as if they had keys and values."""
    text = config.get_text_config().to_dict() | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    text.pop("model_type")
    try:
        made = AutoConfig.for_model("gemma4_text", **text)
        check_config(made, path / "config.json")
        reason = unsupported(made)
    except Exception as error:  # transformers may raise anything.
        raise MethodError(f"{path}: its layers cannot be described: {printable(error)}") from None
    if reason:
        raise MethodError(f"{path}: its layers cannot be run here, {reason}")
    return made


def _other(path: Path, target: Inside, why: str) -> MethodError:
    return MethodError(f"{path} is the assistant of another model than {target.name}: {why}")


def _check(path: Path, width: int, shape: Shape, target: Inside) -> None:
    """Raise MethodError unless the target's states and tokens are those that the assistant reads."""
    if not (target.shape.v_norm and target.shape.scaled):
        raise _other(path, target, "it drafts for a Gemma 4, and this is none")
    if width != target.hidden_size:
        sizes = f"it reads states of {width} numbers, and here they have {target.hidden_size}"
        raise _other(path, target, sizes)
    if shape.vocab_size != target.vocab_size:
        raise _other(path, target, f"it knows {shape.vocab_size} tokens, and here are {target.vocab_size}")


def _over(path: Path, number: int, config: PretrainedConfig, shape: Shape, target: Inside) -> LayerKind:
    """The kind of a layer that reads the last of the target's layers which have keys and values and a window, or none,
    as it has. Its window is larger by 1: transformers counts it from the last key."""
    kind = shape.layers[number]
    alike = [
        (n, other)
        for n, other in enumerate(target.shape.layers)
        if other.has_keys and (other.window is None) == (kind.window is None)
    ]
    what = f"its layer {number} reads keys of layers with{'out' * (kind.window is None)} a window"
    if not alike:
        raise _other(path, target, f"{what}, and here are none")
    source, there = alike[-1]
    mine, theirs = shape.of_layer(kind), target.shape.of_layer(there)
    sizes = [(of.num_kv_heads, of.head_dim) for of in (mine, theirs)]
    if sizes[0] != sizes[1]:
        own, here = (f"{heads} heads of {size} numbers" for heads, size in sizes)
        raise _other(path, target, f"{what} in {own}; here they are {here}")
    angles = turns_of(config, replace(mine, max_context=1), rope=kind.rope).frequencies
    here = target.layers[source].ops.turns.frequencies
    if angles.shape != here.shape or not torch.allclose(angles, here, rtol=1e-3):
        raise _other(path, target, f"{what}, which rotate by other angles here")
    window = None if kind.window is None else kind.window + 1
    return replace(kind, source=source, window=window, keys_only=False)


def _shapes(shape: Shape, width: int, clusters: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors, for a target whose states have `width` numbers."""
    h = shape.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (h, 2 * width), "post_projection.weight": (width, h), "norm.weight": (h,),
        HEAD: (shape.vocab_size, h),
    }  # fmt: skip
    if clusters:
        shapes |= {CENTROIDS: (clusters, h), ORDER: (shape.vocab_size,)}
    for number, kind in enumerate(shape.layers):
        of_layer = layer_shapes(shape, kind=kind) | {f"{shape.norms[0]}.weight": (h,)}
        shapes |= {f"layers.{number}.{name}": size for name, size in of_layer.items()}
    return shapes


def _is_order(order: torch.Tensor, clusters: int) -> bool:
    every = torch.arange(len(order))
    return len(order) % clusters == 0 and torch.equal(order.long().sort().values, every)
