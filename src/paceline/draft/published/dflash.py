"""DFlash and DSpark drafters, in Z Lab's files, DeepSeek's, or the `speculators` format, which name tensors alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from paceline.draft.models import layers as neural
from paceline.draft.models.checkpoint import check_all
from paceline.draft.models.layers import TABLE, Entries, Tensors
from paceline.draft.published.vocab import MEMBERS, OFFSETS, columns_of
from paceline.errors import MethodError
from paceline.target.base import Facts
from paceline.target.shape import Shape

MASK, OUTPUT = "mask_embedding", "lm_head.weight"
W1, W2 = (f"markov_head.markov_w{n}.weight" for n in (1, 2))
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
LARGEST = 64  # most positions of a block, and most layers
NUMBERS = {"block_size": (2, LARGEST), "markov_rank": (0, 2**24), "num_hidden_layers": (1, LARGEST)}
"""Entries that are whole numbers, from the least to the largest that can be read."""
INPUTS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
"""Entries that name the layers whose inputs a drafter reads; target_layer_ids names those whose outputs it reads."""
KINDS = {"full_attention", "sliding_attention"}
NEUTRAL = {"output_multiplier": 1, "final_logit_softcapping": 0, "input_embedding_scale": 1, "use_swa": False}
"""Options of published drafters that nothing here applies, with the values that ask for nothing."""


@dataclass(frozen=True)
class DFlashSpec:
    """A drafter's facts, as its config.json has them.

    taps             layers whose inputs the drafter reads. block: positions of a block, the last token's included.
    from_anchor      whether each position drafts the token after it; if not, each but the first drafts its own.
    mask             token whose embedding is the mask; None if the file has a vector for it.
    attention_spans  for each layer the most tokens that a position sees (None: all), and whether it sees no later one.
    rank             rank of the Markov head; 0 if there is none. has_confidence: whether there is a confidence head."""

    taps: tuple[int, ...]
    block: int
    from_anchor: bool
    mask: int | None
    attention_spans: tuple[tuple[int | None, bool], ...]
    rank: int
    has_confidence: bool

    @classmethod
    def read(cls, path: str, config: Entries, target: Facts) -> DFlashSpec:
        """Read config.json in any of the published layouts. MethodError for a drafter that cannot be read here."""
        nested = [config.get(key) or {} for key in ("transformer_layer_config", "dflash_config")]
        if not all(isinstance(part, dict) for part in nested):
            raise MethodError(f"{path}: transformer_layer_config or dflash_config is no group of named entries")
        given: dict[str, Any] = {**nested[0], **config, **nested[1]}
        inputs = next((given[key] for key in INPUTS if given.get(key)), None)
        ids = inputs or given.get("target_layer_ids") or ()
        ids = ids if isinstance(ids, list | tuple) else [ids]
        taps = tuple(layer if inputs else layer + 1 for layer in ids if type(layer) is int)
        layers, from_anchor = given.get("num_target_layers"), _from_anchor(given)
        rank, count = given.get("markov_rank") or 0, given.get("num_hidden_layers") or 1
        for (name, bounds), value in zip(NUMBERS.items(), (given.get("block_size"), rank, count), strict=True):
            neural.check_numbers(path, {name: value}, *bounds)
        kinds = given.get("layer_types") or ["full_attention"] * count
        unread = [key for key, neutral in NEUTRAL.items() if (given.get(key) or neutral) != neutral]
        if rank and given.get("markov_head_type", "vanilla") != "vanilla":
            unread.append(f"a {given['markov_head_type']} Markov head")
        refusals = {
            f" reads states of layers {', '.join(map(str, ids)) or 'none'} of {layers or 'some'}, and {target.name} "
            f"has {target.num_layers}, whose last output is not read: it is for another target":
                not taps or len(taps) < len(ids) or not all(0 <= tap < target.num_layers for tap in taps)
                or (layers or target.num_layers) != target.num_layers,
            " does not say sample_from_anchor: whether a position drafts the token after it":
                not isinstance(from_anchor, bool),
            f" asks for {', '.join(unread)}, which nothing here applies: it would draft badly": bool(unread),
            f": layer_types is {kinds!r}; {count} of {' and '.join(sorted(KINDS))} are wanted":
                not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= KINDS,
        }  # fmt: skip
        if why := next((why for why, is_so in refusals.items() if is_so), None):
            raise MethodError(f"{path}{why}")
        slides, window = [kind == "sliding_attention" for kind in kinds], given.get("sliding_window")
        if any(slides):
            neural.check_numbers(path, {"sliding_window": window})
        causal = False if given.get("sliding_window_non_causal") else given.get("is_causal", given.get("causal"))
        spans = tuple((window if one else None, one if causal is None else causal) for one in slides)
        has_confidence = bool(given.get("enable_confidence_head"))
        return cls(taps, given["block_size"], from_anchor, given.get("mask_token_id"), spans, rank, has_confidence)

    def shapes(self, shape: Shape, vocab: int, drafted: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of the tensors, without optional ones.

        vocab  number of the target's tokens. drafted: number of tokens that it drafts."""
        h = shape.hidden_size
        shapes = {"fc.weight": (h, len(self.taps) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
        for number in range(shape.num_layers):
            of_layer = neural.head_shapes(shape, h, ("input_layernorm",))
            shapes |= {f"layers.{number}.{name}": of for name, of in of_layer.items()}
        if self.rank:
            shapes |= {W1: (vocab, self.rank), W2: (drafted, self.rank)}
        return shapes | (dict(zip(CONFIDENCE, ((1, h + self.rank), (1,)), strict=True)) if self.has_confidence else {})


def _from_anchor(given: Mapping[str, Any]) -> Any:
    """DFlashSpec.from_anchor as a file says it, or as files of its kind mean it; None if that is not known.

    Readers of DSpark in the `speculators` format disagree, so such a file must say it."""
    stated, names = given.get("sample_from_anchor"), str(given.get("architectures"))
    if stated is not None or given.get("speculators_model_type") == "dspark":
        return stated
    return "DSpark" in names or given.get("projector_type") == "dspark" or (False if "DFlash" in names else None)


def read(
    path: str, config: Entries, tensors: Tensors, target: Facts
) -> tuple[DFlashSpec, PretrainedConfig, Tensor | None]:
    """Returns the drafter's facts, the configuration of its layers, and its vocabulary: the target's ids int64 [K]
    (None: all tokens). MethodError unless the tensors are a whole drafter for the target."""
    spec, vocab = DFlashSpec.read(path, config, target), target.vocab_size
    described = config.get("transformer_layer_config") or config
    layers = neural.layer_config(path, {"vocab_size": vocab, **described, "model_type": "qwen3"}, target)
    shape, drafted = Shape.of(layers), config.get("draft_vocab_size") or vocab
    h = shape.hidden_size
    neural.check_width(path, h, target)
    optional = {TABLE: (vocab, h), OUTPUT: (drafted, h), MASK: (h,), OFFSETS: (drafted,), MEMBERS: (vocab,)}
    optional = {name: of for name, of in optional.items() if name in tensors}
    check_all(path, tensors, spec.shapes(shape, vocab, drafted) | optional)
    if MASK not in tensors and not (type(spec.mask) is int and 0 <= spec.mask < vocab):
        raise MethodError(f"{path} has neither a tensor {MASK} nor a mask_token_id that is a token of the target")
    return spec, layers, columns_of(path, tensors, drafted, target)
