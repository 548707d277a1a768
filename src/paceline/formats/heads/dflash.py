"""DFlash, DFlash2 and DSpark drafters, in Z Lab's files, DeepSeek's, or the `speculators` format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from paceline.errors import MethodError
from paceline.formats.facts import Facts
from paceline.formats.heads.checkpoint import check_all
from paceline.formats.heads.layout import (
    TABLE,
    Entries,
    Layout,
    Tensors,
    check_numbers,
    check_width,
    head_shapes,
    layer_config,
)
from paceline.formats.heads.vocab import MEMBERS, OFFSETS, columns_of
from paceline.formats.shape import Shape

MASK, OUTPUT = "mask_embedding", "lm_head.weight"
W1, W2 = (f"markov_head.markov_w{n}.weight" for n in (1, 2))
SELECT = "candidate_selector.hidden_projection.weight"
CONVOLVED = {"attention": "attention_conv", "mlp": "mlp_conv"}  # parts of DFlash2's layers, and their convolutions
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
LARGEST = 64  # largest number of a block's positions, and of layers
NUMBERS = {"block_size": (2, LARGEST), "markov_rank": (0, 2**24), "num_hidden_layers": (1, LARGEST)}
"""Entries that are whole numbers, with the smallest and the largest number that can be read."""
INPUTS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
"""Entries that name the layers whose inputs a drafter reads. (target_layer_ids names layers whose outputs it reads.)"""
KIND = "speculators_model_type"
SECOND = {"rank": "selector_rank", "best": "selector_top_k", "kernel": "conv_kernel_size", "group": "conv_group_size"}
"""Fields of `DFlashSpec` for DFlash2, and their entries."""
LAYOUT = Layout(
    "dflash",
    groups=("dspark_config", "dflash_config"),
    names={
        r"encoder\.fc\.(.+)": r"fc.\1",
        r"encoder\.output_norm_enc\.(.+)": r"hidden_norm.\1",
        r"confidence_head\.(weight|bias)": r"confidence_head.proj.\1",
        r"candidate_selector\.predecessor_codebook(\.weight)?": W1,  # DFlash2's selector, stored as a Markov head
        r"candidate_selector\.successor_codebook(\.weight)?": W2,
    },
    flags={
        "input_embedding_scale": (1,),
        "use_swa": (False,),
        "attention_mode": ("gqa",),
        "projector_type": ("dflash", "dspark"),
        "shift_label": (False,),
    },
    known=(
        "sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov", "sliding_window_non_causal",
        "is_causal", "causal", "mask_token_id", "target_layer_ids", "block_size", "markov_rank",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class DFlashSpec:
    """A drafter's facts, as its config.json has them.

    taps             layers whose inputs the drafter reads. block: positions of a block, with the last token's.
    from_anchor      True: each position drafts the token after it; False: each but the first drafts its own token.
    mask             token whose embedding is the mask; None: the file has a vector for it.
    is_causal        whether a position sees no later position of the block; None: only in layers with a window.
    rank             rank of the Markov head; 0: there is none. has_confidence: whether there is a confidence head.
    best             DFlash2: number of a position's best tokens among which the token before decides; 0: all.
    kernel, group    DFlash2: positions that a convolution reads, and channels with a common addition to the kernel.
    scale, cap       factor of the logits, and bound to which tanh limits them; 0: none.
    allowed          number of tokens that may be drafted; None: all. Others are padding."""

    taps: tuple[int, ...]
    block: int
    from_anchor: bool
    mask: int | None
    is_causal: bool | None
    rank: int
    has_confidence: bool
    best: int = 0
    kernel: int = 0
    group: int = 1
    scale: float = 1.0
    cap: float = 0.0
    allowed: int | None = None

    @classmethod
    def read(cls, path: str, given: Entries, target: Facts) -> DFlashSpec:
        """Read the entries of a config.json. MethodError for a drafter that cannot be read here."""
        inputs = next((given[key] for key in INPUTS if given.get(key)), None)
        ids = inputs or given.get("target_layer_ids") or ()
        ids = ids if isinstance(ids, list | tuple) else [ids]
        if not ids and given.get("block_size") is None:
            raise MethodError(f"{path} is no drafter of kind dflash: it says neither block_size nor target_layer_ids")
        taps = tuple(layer if inputs else layer + 1 for layer in ids if type(layer) is int)
        layers, from_anchor = given.get("num_target_layers"), _from_anchor(given)
        own: dict[str, Any] = {ours: given.get(key) for ours, key in SECOND.items()}
        is_second = any(own.values()) or "dflash2" in f"{given.get('architectures')} {given.get(KIND)}".lower()
        if is_second:
            check_numbers(path, {SECOND[ours]: value for ours, value in own.items()})
        else:
            own = {"rank": given.get("markov_rank") or 0}
        rank, count = own["rank"], given.get("num_hidden_layers") or 1
        for (name, bounds), value in zip(NUMBERS.items(), (given.get("block_size"), rank, count), strict=True):
            check_numbers(path, {name: value}, *bounds)
        if rank and given.get("markov_head_type", "vanilla") != "vanilla":
            raise MethodError(f"{path} asks for a {given['markov_head_type']} Markov head, which nothing here applies")
        if not ids:
            raise MethodError(f"{path} does not say target_layer_ids: the layers of its target whose states it reads")
        if (
            len(taps) < len(ids) or not all(0 <= tap < target.num_layers for tap in taps)
            or (layers or target.num_layers) != target.num_layers
        ):  # fmt: skip
            raise MethodError(
                f"{path} reads states of layers {', '.join(map(str, ids))} of {layers or 'some'}, and "
                f"{target.name} has {target.num_layers}, whose last output is not read: it is for another target"
            )
        if not isinstance(from_anchor, bool):
            raise MethodError(f"{path} does not say sample_from_anchor: whether a position drafts the token after it")
        if is_second and from_anchor:
            raise MethodError(f"{path}: sample_from_anchor is true, and DFlash2's first position drafts nothing")
        non_causal = given.get("sliding_window_non_causal", given.get(KIND) == "dflash2")
        causal = False if non_causal else given.get("is_causal", given.get("causal"))
        if (allowed := given.get("selector_vocab_size")) is not None:
            check_numbers(path, {"selector_vocab_size": allowed})
        scale, cap = given.get("output_multiplier") or 1.0, given.get("final_logit_softcapping") or 0.0
        if not isinstance(scale, int | float) or not isinstance(cap, int | float):
            raise MethodError(f"{path}: output_multiplier or final_logit_softcapping is no number")
        has_confidence = bool(given.get("enable_confidence_head"))
        return cls(
            taps, given["block_size"], from_anchor, given.get("mask_token_id"), causal, has_confidence=has_confidence,
            scale=scale, cap=cap, allowed=allowed, **own
        )  # fmt: skip

    def shapes(self, shape: Shape, vocab: int, drafted: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that are not optional.

        vocab  number of the target's tokens. drafted: number of tokens that may be drafted."""
        h = shape.hidden_size
        shapes = head_shapes(shape)
        shapes |= {"fc.weight": (h, len(self.taps) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
        for number in range(shape.num_layers):
            for conv in CONVOLVED.values() if self.kernel else ():
                shapes[f"layers.{number}.{conv}.base_kernel"] = (2, self.kernel, h)
                rows = 2 * self.kernel * (h // self.group)
                shapes[f"layers.{number}.{conv}.kernel_projection.weight"] = (rows, h)
        if self.best:
            shapes[SELECT] = (self.rank, h)
        if self.rank:
            shapes |= {W1: (vocab, self.rank), W2: (drafted, self.rank)}
        return shapes | (dict(zip(CONFIDENCE, ((1, h + self.rank), (1,)), strict=True)) if self.has_confidence else {})


def _from_anchor(given: Mapping[str, Any]) -> Any:
    """DFlashSpec.from_anchor as the file says, or as files of its kind imply; None if neither is known.

    Readers of DSpark in the `speculators` format disagree, so such a file must say it."""
    stated, names = given.get("sample_from_anchor"), str(given.get("architectures"))
    if stated is not None or given.get("speculators_model_type") == "dspark":
        return stated
    is_dspark = "DSpark" in names or given.get("projector_type") == "dspark" or "dspark_config" in given
    return is_dspark or (False if "DFlash" in names else None)


def read(
    path: str, config: Entries, tensors: Tensors, target: Facts
) -> tuple[DFlashSpec, PretrainedConfig, Tensor | None, Tensors]:
    """Read a drafter. Returns its facts, its layers' configuration, its vocabulary (the target's ids int64 [K]; None:
    all tokens), and its tensors by our names. MethodError unless the tensors are a whole drafter for the target."""
    given, tensors = LAYOUT.read(path, config, tensors)
    spec, vocab = DFlashSpec.read(path, given, target), target.vocab_size
    layers = layer_config(path, {"vocab_size": vocab, **given}, tensors, target)
    shape, drafted = Shape.of(layers), given.get("draft_vocab_size") or vocab
    h = shape.hidden_size
    check_width(path, h, target)
    if h % spec.group:
        raise MethodError(f"{path}: conv_group_size is {spec.group}, which does not divide a width of {h}")
    one = tensors.get(CONFIDENCE[0])
    if one is not None and one.ndim == 2 and given.get("confidence_head_with_markov") is False:
        tensors = {**tensors, CONFIDENCE[0]: F.pad(one, (0, spec.rank))}  # It reads only states.
    optional = {TABLE: (vocab, h), OUTPUT: (drafted, h), MASK: (h,), OFFSETS: (drafted,), MEMBERS: (vocab,)}
    optional = {name: of for name, of in optional.items() if name in tensors}
    check_all(path, tensors, spec.shapes(shape, vocab, drafted) | optional)
    if MASK not in tensors and not (type(spec.mask) is int and 0 <= spec.mask < vocab):
        raise MethodError(f"{path} has neither a tensor {MASK} nor a mask_token_id that is a token of the target")
    return spec, layers, columns_of(path, tensors, drafted, target), tensors
