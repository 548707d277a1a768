"""Check a model's configuration and weights: can anything run them, and can the native decoder?

`folder.py` reads a model, this module checks it, and `shape.py` describes it. Every fault is a ModelError of one
line."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from paceline.errors import ModelError, printable, shortened
from paceline.formats import rotary, shape
from paceline.kernels.ops import SILU

# The configuration ---------------------------------------------------------------------------------------------------


WHOLE, REAL, ALL, NATIVE = True, False, False, True
LIMITS: dict[str, tuple[float, bool, bool]] = {
    name: (most, is_whole, is_native)
    for most, is_whole, is_native, names in (
        (1 << 31, WHOLE, ALL, "vocab_size"),
        (1 << 26, WHOLE, ALL, "intermediate_size"),
        (1 << 24, WHOLE, ALL, "hidden_size max_position_embeddings"),  # Published models have up to 10 M positions.
        (1 << 16, WHOLE, ALL, "num_hidden_layers num_attention_heads num_key_value_heads head_dim"),
        (1e30, REAL, ALL, "rope_theta"),
        (1 << 31, WHOLE, NATIVE, "sliding_window"),
        (1 << 26, WHOLE, NATIVE, "moe_intermediate_size shared_expert_intermediate_size"),
        (1 << 16, WHOLE, NATIVE, "decoder_sparse_step linear_num_key_heads linear_num_value_heads"),
        (1 << 16, WHOLE, NATIVE, "linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"),
        (1 << 16, WHOLE, NATIVE, "q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"),
        (1 << 12, WHOLE, NATIVE, "num_experts num_experts_per_tok num_local_experts n_routed_experts top_k_experts"),
        (1 << 12, WHOLE, NATIVE, "n_group topk_group n_shared_experts"),
        (1 << 24, REAL, NATIVE, "query_pre_attn_scalar attention_multiplier embedding_multiplier"),
        (1 << 24, REAL, NATIVE, "final_logit_softcapping swiglu_alpha swiglu_limit routed_scaling_factor"),
        (1 << 24, REAL, NATIVE, "residual_multiplier logits_scaling original_max_position_embeddings"),
        (1, REAL, NATIVE, "partial_rotary_factor rms_norm_eps"),
    )
    for name in names.split()
}
"""Limits of entries of a configuration and of its rotary parameters: the largest value, whether they are WHOLE numbers
from 1 or REAL numbers above 0, and whether the limit holds for ALL or only for NATIVE families. Entries may be absent
or null."""
SHARED_HEADS = {"num_attention_heads": "num_key_value_heads", "linear_num_value_heads": "linear_num_key_heads"}
"""Numbers of heads that are multiples of other numbers of heads."""
NOT_RUN = {
    "clip_qkv": "it clips queries, keys and values",
    "attn_logit_softcapping": "it caps attention scores",
    "use_bidirectional_attention": "tokens see those after them",
}
"""Entries that the native decoder refuses unless they are absent, null, false or IN_IMAGES, and what they do."""
IN_IMAGES = "vision"


def is_number(value: Any, is_whole: bool = True) -> bool:
    """Whether a JSON value is a number, not a boolean. is_whole: it must be a whole number."""
    return isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)


def short(value: Any) -> str:
    """Shorten a value for a message."""
    return shortened(repr(value))


def check_limits(value_of: Callable[[str, None], Any], file: Path | str, is_native: bool) -> None:
    """Raise ModelError if an entry is outside its limit. is_native: also check the limits of native families."""
    for key, (most, is_whole, for_native) in LIMITS.items():
        value = value_of(key, None) if is_native or not for_native else None
        if value is None or (is_number(value, is_whole) and 0 < value <= most):
            continue
        wanted = f"a whole number from 1 to {most:,}" if is_whole else f"a number above 0 and up to {most:,}"
        raise ModelError(f"{file}: {key} is {short(value)}; it must be {wanted}")


def check_config(config: PretrainedConfig, file: Path | str) -> None:
    """Raise ModelError if an entry is outside its limit, or if entries contradict each other."""
    inner = config.get_text_config()
    if isinstance(inner, Mapping):
        raise ModelError(f"{file}: a {config.model_type} has no text_config, and here is one")
    known, own = shape.OF_LAYERS.get(inner.model_type), getattr(inner, "per_layer_attributes", None)
    if own is not None and not (known and own <= known):
        what = " and ".join(sorted(own)) or "their entries"
        raise ModelError(
            f"{file}: layers of this {inner.model_type} differ in {what}, and only "
            "models whose layers are alike in this can be targets"
        )
    is_native = inner.model_type in shape.FAMILIES
    for layer in shape.kinds_of_layers(inner):
        check_limits(partial(getattr, layer), file, is_native)
    rope = getattr(inner, "rope_parameters", None) or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"{file}: rope_parameters is {short(rope)}; it must be an object")
    for part in [rope, *shape.ropes_of(inner)]:
        base = "null" if part.get("rope_theta", 1.0) is None else part.get("rope_theta")
        check_limits({**part, "rope_theta": base}.get, file, is_native)
    if is_native and (reason := next(_contradictions(inner), None)):
        raise ModelError(f"{file}: {reason}")


def _contradictions(config: PretrainedConfig) -> Iterator[str]:
    """Why no decoder can follow a configuration, although its entries are within their limits."""
    for layer, (heads, fewer) in product(shape.kinds_of_layers(config), SHARED_HEADS.items()):
        count, shared = getattr(layer, heads, None), getattr(layer, fewer, None)
        if count and shared and count % shared:
            yield f"{heads}, {count}, is no multiple of {fewer}, {shared}"
    experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    for key in ("num_experts_per_tok", "top_k_experts"):
        chosen = getattr(config, key, None)
        if experts and chosen and chosen > experts:
            yield f"{key} is {chosen}, and there are {experts} experts"
    groups, best = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    if experts and groups > 1 and (best > groups or experts % groups or experts < 2 * groups):
        yield f"the best {best} of {groups} groups of {experts} experts cannot be chosen"
    kinds, shared = getattr(config, "layer_types", None) or [], getattr(config, "num_kv_shared_layers", None) or 0
    ropes = getattr(config, "rope_parameters", None) or {}
    if config.model_type in shape.OF_LAYERS and (absent := sorted({*kinds} & {*shape.ATTENTION} - ropes.keys())):
        yield f"layer_types has {absent[0]}, and rope_parameters has not"
    is_off = getattr(config, "use_sliding_window", True) is False
    if shape.ATTENTION[1] in kinds and getattr(config, "sliding_window", None) is None and not is_off:
        yield f"layer_types has {shape.ATTENTION[1]}, and there is no sliding_window"
    if shared and {*kinds[:-shared]} != {*kinds}:
        yield f"num_kv_shared_layers is {shared}, and not every kind of them has a layer before them"
    needed = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if getattr(config, "enable_moe_block", False) and not all(getattr(config, key, None) for key in needed):
        yield f"enable_moe_block is set, and {', '.join(needed)} are not"
    for key in ("no_rope_layers", "mlp_layer_types"):
        named = getattr(config, key, None)
        if named and len(named) != config.num_hidden_layers:
            yield f"{key} names {len(named)} layers of {config.num_hidden_layers}"
    if any(_unknown_ropes(config)):
        return
    for nested in {"", *(kind for kind in shape.ATTENTION if kind in (getattr(config, "rope_parameters", None) or {}))}:
        try:
            inverse, scale = rotary.frequencies(config, 2, nested)
            kinds = map(shape.kind_of_rope, shape.ropes_of(config))
            turning = inverse[inverse != 0] if "proportional" in kinds else inverse  # The others stand still.
            fits = float(turning.min()) > 0 and float(inverse.max()) < inf and 0 < scale < inf
            why = "" if fits else "the frequencies that it gives are no numbers above 0"
        except Exception as error:  # transformers may raise anything.
            why = printable(error)
        if why:
            yield f"rope_parameters, {short(shape.ropes_of(config))}, cannot be used: {why}"


def unsupported(config: PretrainedConfig) -> str | None:
    """Why the native decoder cannot run this configuration, in a few words; None if it can."""
    return next(_unsupported(config), None)


def _unsupported(config: PretrainedConfig) -> Iterator[str]:
    if config.model_type not in shape.FAMILIES:
        yield f"model type {config.model_type!r} is not one of {', '.join(shape.FAMILIES)}"
    yield from _unknown_ropes(config)
    known: tuple[str, ...] = shape.ATTENTION
    if "delta" in shape.FAMILIES[config.model_type](config):
        known = (*known, shape.DELTA)
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in known:
            yield f"layers of kind {kind!r} are not one of {', '.join(known)}"
    if (activation := shape.activation_of(config)) not in shape.ACTIVATIONS:
        yield f"activation {activation!r} is not one of {', '.join(shape.ACTIVATIONS)}"
    if shape.DELTA in known and shape.ACTIVATIONS[activation] != SILU:
        yield f"its convolution is followed by {activation}, and SiLU is what runs here"
    yield from (why for key, why in NOT_RUN.items() if getattr(config, key, None) not in (None, False, 0, IN_IMAGES))
    s = shape.Shape.of(config)
    if s.latent is not None and config.v_head_dim != s.head_dim:
        yield f"its values have {config.v_head_dim} numbers, and its keys {s.head_dim}"
    if s.latent is not None and (s.head_dim - s.latent.turned) % 2:
        yield f"{s.head_dim - s.latent.turned} numbers of a key do not rotate, which are no pairs"
    if s.latent is not None and s.latent.query_rank is None and s.qkv_bias:
        yield "its keys have biases, and its queries have none"
    if s.head_dim % 2 or s.rotary_dim % 2:
        yield f"it rotates {s.rotary_dim or s.head_dim} numbers of a head, which are no pairs"


def _unknown_ropes(config: PretrainedConfig) -> Iterator[str]:
    """The kinds of rotary parameters that the native decoder does not know, in a few words each."""
    known, kinds = shape.STATIC_ROPE, map(shape.kind_of_rope, shape.ropes_of(config))
    return (f"rope type {kind!r} is not one of {', '.join(known)}" for kind in kinds if kind not in known)


# The weights ---------------------------------------------------------------------------------------------------------

_FLOATS = ("F16", "BF16", "F32", "F64")  # number formats of safetensors that need no scale
_MASKS = ("BOOL", "U8", "I64")  # formats of masks and positions, which old checkpoints have
_SCALE = re.compile(r"(?<!input)(?<!activation)(?<!\.[kqv])_scale(_inv|_\d)?$|\.(scales|SCB)$")
"""Matches the names of weights' scales. Scales of activations, and of cached keys and values, change no weight."""


def check_formats(folder: Path, config: PretrainedConfig, ours: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Raise ModelError for weights that are no floats, unless `config` names a method by which we or transformers read
    them. Transformers would read others without their scales.

    ours  `folder.quantisation`. tensors: open safetensors files by tensor."""
    method = getattr(config, "quantization_config", None)
    if method is not None and not ours:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN  # The import takes a second.

        given = method if isinstance(method, Mapping) else {}
        if str(given.get("quant_method")) in KNOWN or given.get("load_in_8bit") or given.get("load_in_4bit"):
            return
        raise ModelError(
            f"{folder}: its weights are quantized by {short(given.get('quant_method', method))}, which transformers "
            f"{transformers.__version__} does not know: use the model in 16 or 32 bits, or as a GGUF file"
        )
    for key, file in tensors.items():
        kind = file.get_slice(key).get_dtype()
        if kind in _FLOATS or key in ours.get("kinds", ()) or (kind in _MASKS and not key.endswith(".weight")):
            continue
        raise ModelError(
            f"{folder}: {key} holds {kind} numbers, so its weights are quantized, and config.json does not say "
            f"how: use the model in one of {', '.join(_FLOATS)}"
        )


Shapes = Mapping[str, Sequence[int]]
"""Shapes of tensors by name."""


def check_shapes(
    folder: Path, wanted: Shapes, found: Shapes, num_layers: int, config: str = "config.json"
) -> None:  # fmt: skip
    """Raise ModelError unless a folder or file has the wanted tensors, in their shapes, and no others that change the
    model, such as weights of layers after `num_layers`, or scales of weights. config: source of the wanted shapes."""
    layers = [match for key in found if (match := re.match(r"(?:model\.)?layers\.(\d+)\.(\w+)", key))]
    heads = {match[1] for match in layers if match[2] == "eh_proj"}  # heads of multi-token prediction
    numbers = [int(match[1]) for match in layers if match[1] not in heads]
    if numbers and max(numbers) >= num_layers:
        raise ModelError(
            f"{folder} has weights of {max(numbers) + 1} layers, and its {config} asks for {num_layers}: "
            "one of the two is of another model"
        )
    if scales := sorted(filter(_SCALE.search, found.keys() - wanted.keys())):
        raise ModelError(
            f"{folder} has {scales[0]}, and nothing here reads it: without their scales weights are other numbers; "
            "use the model in 16 or 32 bits, or as a GGUF file"
        )
    if absent := [key for key in wanted if key not in found]:
        more = f" and {len(absent) - 2} more" if len(absent) > 2 else ""
        raise ModelError(
            f"{folder} lacks {', '.join(absent[:2])}{more}, which its {config} asks for: "
            "the weights are incomplete or of another model"
        )
    for key, size in wanted.items():
        if list(found[key]) != list(size):
            raise ModelError(
                f"{folder}: {key} has shape {list(found[key])} where {config} asks for {list(size)}: "
                "the weights are of another model"
            )
