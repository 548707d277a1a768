"""Reads files of all formats by tables, and refuses by name what nothing here runs.

    entries, tensors = LAYOUT.read(path, config, tensors)    # by our names
    layers = layer_config(path, entries, tensors, target)

A drafter that is read wrongly drafts badly, and nobody notices. So an entry that changes the computation is followed,
or raises an error that names it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from paceline.core.options import quoted
from paceline.errors import MethodError, ModelError, printable
from paceline.formats.checks import check_config, unsupported
from paceline.formats.facts import Facts
from paceline.formats.shape import ATTENTION, Shape, layer_shapes
from paceline.kernels.linear import Linear

TABLE = "embed_tokens.weight"  # a head's own input embedding, often a copy of the target's
NORM = "input_layernorm"
Entries = Mapping[str, Any]  # entries of a config.json
Tensors = Mapping[str, Tensor]  # a checkpoint's tensors by name


T = TypeVar("T")
LAYERS = "transformer_layer_config"  # entry of the `speculators` format with the layers' entries
READ = {name: name for name in ("eagle", "eagle3", "dflash", "mtp")}
READ |= {"peagle": "eagle3", "dspark": "dflash", "dflash2": "dflash"}
"""By `speculators_model_type`: the drafter that reads it."""
OTHERS = {
    "EAGLE-4": (r"efficient_lm_head.*", r"eagle4"),
    "EAGLE with Medusa's heads": (r"parallel_draft_heads\..*", r"$^"),
    "a head whose layer has experts": (r".*\.mlp\.experts\..*", r"moe\w*eagle"),
    "a head with latent attention (MLA)": (r".*\.kv_a_proj\w*\..*", r"eagle\d?deepseekv\d"),
    "a head with gates or sinks of attention": (
        r".*\.(g_proj|attention_sink_bias)(\..*)?|aux_hidden_norms\..*", r"laguna"
    ),
    "DFly, Domino, DSpine, JetSpec or LiLiCorr": (
        r"(layer_fusion|context_norm|hidden_correction)\..*", r"dfly|domino|dspine|jetspec|lilicorr"
    ),
    "an MLP or LSTM speculator": (
        r"(speculator\.)?((emb|proj|head|ln)\.\d+|\w+_(emb|proj)\.\d+|(cell|state)_ln)\..*",
        r"(mlp|lstm|variant)_?speculator|^mlp$",
    ),
}  # fmt: skip
"""Drafters that nothing here runs. Patterns of them: a tensor's whole name, and entries SIGNS in small letters."""
ASSISTANT = r"gemma4_?(unified_?)?assistant"  # what those entries of a Gemma 4's assistant hold
SIGNS = ("speculators_model_type", "architectures", "model_type", "projector_type")
FLAGS: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1,),
    "is_neox_style": (True,),
    "attn_output_gate": (False,),
    "attention_value_scale": (1,),
    "rope_method": (),
    "draft_ffn_type": ("dense",),
    "parallel_drafting": (False,),
}
"""Entries of any format that change what is computed, with the values that are run here. Null is always run."""
HARMLESS = {
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "do_sample", "early_stopping",
    "trust_remote_code", "embed_requires_grad", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "norm_topk_prob",  # The tensors show biases and experts.
    "use_sliding_window",
}  # fmt: skip
"""Entries of any format that may be true: they change nothing, or `layer_config` reads them."""
COMMON: Mapping[str, str | None] = {
    r"(.+\.)?rotary_emb\.inv_freq": None,  # It follows from the configuration.
    r"verifier_(lm_head|norm)\..+": None,  # These are the target's.
    r"midlayer\.(\d+\..+)": r"layers.\1",
    r"midlayer\.(.+)": r"layers.0.\1",
}
"""Our names of tensors in files of any format, for `renamed`."""


@dataclass(frozen=True)
class Layout:
    """The files that a drafter reads.

    method  the drafter's name.
    groups  entries of config.json that have entries; those of later groups win.
    names   our names, for `renamed`. flags: like FLAGS, for these files.
    known   entries that may be true, because they are read or change nothing; other entries that are true are
            refused."""

    method: str
    groups: tuple[str, ...] = ()
    names: Mapping[str, str | None] = field(default_factory=dict)
    flags: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    known: tuple[str, ...] = ()

    def read(self, path: str, config: Entries, tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
        """Return all entries of a config.json in a single dictionary, and the tensors by our names. MethodError names
        an entry or tensor that changes the computation and is not run here."""
        layers, *groups = (config.get(key) or {} for key in (LAYERS, *self.groups))
        if not all(isinstance(part, Mapping) for part in (layers, *groups)):
            raise MethodError(f"{path}: {' or '.join((LAYERS, *self.groups))} is no group of named entries")
        given = {**layers, **config}
        for part in groups:
            given |= part
        tensors = self.named(tensors)
        refuse_others(path, self.method, given, tensors)
        flags = {**FLAGS, **self.flags}
        odd = [key for key, read in flags.items() if given.get(key) is not None and given[key] not in read]
        odd += [key for key in given if given[key] is True and key not in {*flags, *self.known, *HARMLESS}]
        if odd:
            said = ", ".join(f"{key} is {given[key]!r}" for key in odd)
            raise MethodError(f"{path}: {said}, which nothing here applies: it would draft badly")
        return given, tensors

    def named(self, tensors: Tensors) -> Tensors:
        """The tensors by our names."""
        return renamed(renamed(tensors, {r"(?:draft_)?model\.(.+)": r"\1"}), {**COMMON, **self.names})


def renamed(tensors: Mapping[str, T], names: Mapping[str, str | None]) -> dict[str, T]:
    """Rename tensors to our names.

    names  by pattern of a whole name: our name, with \\1 for a group; None: nothing reads the tensor. Other names stay,
           and so does a name if another tensor already has our name."""
    out = {}
    for name, tensor in tensors.items():
        found = ((re.fullmatch(pattern, name), ours) for pattern, ours in names.items())
        ours = next((ours and match.expand(ours) for match, ours in found if match), name)
        if ours is not None:
            out[name if ours in tensors else ours] = tensor
    return out


def count_heads(path: str, names: Iterable[str], start: str = "") -> tuple[int, int]:
    """Count heads, and blocks of each. names: begin with `start`, the head's number and the block's number."""
    found = [match for name in names if (match := re.match(rf"{start}(\d+)\.(\d+)\.", name))]
    if not found:
        raise MethodError(f"{path} has no heads: none of its tensors has a name such as {start}0.0.linear.weight")
    heads, blocks = (1 + max(int(match[group]) for match in found) for group in (1, 2))
    return heads, blocks


def refuse_others(path: str, method: str, given: Entries, names: Iterable[str]) -> None:
    """Raise MethodError, which says what it is, for a drafter that `method` does not read. names: its tensors'
    names."""
    kind = str(given.get("speculators_model_type") or "")
    signs = [(f"{key} is {given[key]}", str(given[key]).lower()) for key in SIGNS if given.get(key)]
    if any(re.search(ASSISTANT, value) for _, value in signs):
        raise MethodError(f"{path} is a Gemma 4's assistant: write mtp:{quoted(path)}")
    for what, (tensors, entries) in OTHERS.items():
        found = [sign for sign, value in signs if re.search(entries, value)]
        found += [f"it has {name}" for name in names if re.fullmatch(tensors, name)]
        if found:
            raise MethodError(f"{path} is {what} ({found[0]}): nothing here runs it, and {method} would draft badly")
    if kind and READ.get(kind) != method:
        raise MethodError(
            f"{path} is a drafter of type {kind}: " + (f"write {READ[kind]}:{quoted(path)}" if kind in READ else
                                                       f"types that are read are {', '.join(READ)}")
        )  # fmt: skip


# The configuration of layers -----------------------------------------------------------------------------------------

_READ = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "vocab_size",
)  # fmt: skip
"""Entries of a head's config.json that describe its layers."""
_SIZES = {*_READ[:6], "vocab_size"}


def count_layers(names: Iterable[str]) -> int:
    """Count layers by the names of tensors, because config.json of published heads with a single layer may say 40."""
    return 1 + max((int(match[1]) for name in names if (match := re.match(r"layers\.(\d+)\.", name))), default=0)


def layer_config(
    where: Any, config: Entries, tensors: Tensors, target: Facts, count: int | None = None
) -> PretrainedConfig:
    """Make the configuration of a head's layers from its config.json. Whether there are biases and
    norms of queries and keys is told by the tensors' names.

    The default of rope_theta is 10000, whatever the target's is, and that of head_dim is hidden_size / heads, because
    published heads were trained so. Rotary tables cover the target's context.

    count  number of layers; None: as config.json says.

    MethodError for layers that the native decoder cannot run."""
    config = {**config, **(config.get(LAYERS) or {})}
    given = {key: config[key] for key in _READ if config.get(key) is not None}
    if config.get("hidden_activation"):
        given["hidden_act"] = config["hidden_activation"]
    missing = [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if key not in given]
    if missing:
        raise MethodError(
            f"{where} does not say {', '.join(missing)} of its layers: it is no head that can be read here"
        )
    given["num_hidden_layers"] = count or given.get("num_hidden_layers", 1)
    check_numbers(where, {name: value for name, value in given.items() if name in _SIZES})
    check_numbers(where, {"num_hidden_layers": given["num_hidden_layers"]}, most=256)
    given.setdefault("head_dim", given["hidden_size"] // given["num_attention_heads"])
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    endings = {name.split(".", 2)[-1] for name in tensors if name.startswith("layers.")}
    biased, whole = ("self_attn.q_proj.bias" in endings), "self_attn.o_proj.bias" in endings
    family = "qwen3" if "self_attn.q_norm.weight" in endings else "qwen2" if biased and not whole else "llama"
    rope = _rope(where, config)
    try:
        made = AutoConfig.for_model(
            family, **given, rope_parameters=rope, max_position_embeddings=target.max_context,
            tie_word_embeddings=False, attention_bias=biased, mlp_bias="mlp.up_proj.bias" in endings,
        )  # fmt: skip
        check_config(made, where)
    except ModelError as error:
        raise MethodError(str(error)) from None
    except Exception as error:  # transformers may raise anything.
        raise MethodError(f"{where}: its layers cannot be described: {printable(error)}") from None
    made.layer_types, made.sliding_window = _windows(where, config, given["num_hidden_layers"])
    if reason := unsupported(made):
        raise MethodError(f"{where}: its layers cannot be run here, {reason}")
    return made


def _rope(where: Any, config: Entries) -> dict[str, Any]:
    """Make transformers' rope_parameters from entries in any form."""
    scaled = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {**scaled} if isinstance(scaled, Mapping) else {"rope_theta": scaled}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    if not isinstance(theta, int | float) or not 0 < theta < float("inf"):
        raise MethodError(f"{where}: rope_theta is {theta!r}; a positive number is wanted")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise MethodError(f"{where}: partial_rotary_factor is {rope['partial_rotary_factor']!r}, which nothing applies")
    if rope["rope_type"] in ("yarn", "longrope", "llama3") and not rope.get("original_max_position_embeddings"):
        length = {"max_position_embeddings": config.get("max_position_embeddings")}
        check_numbers(where, length)  # This is the head's length, but its tables cover the target's context.
        rope["original_max_position_embeddings"] = length["max_position_embeddings"]
    return rope


def _windows(where: Any, config: Entries, count: int) -> tuple[Sequence[str], int | None]:
    """The kind of each layer, and the window of sliding layers. `use_sliding_window` decides if it is given."""
    (full, slides), flag, stated = ATTENTION, config.get("use_sliding_window"), config.get("num_hidden_layers")
    first = (config.get("max_window_layers") or 0) if flag else count
    kinds = config.get("layer_types") or [slides if n >= first else full for n in range(count)]
    if isinstance(kinds, list) and len(kinds) == stated:
        kinds = kinds[:count]
    if not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= {*ATTENTION}:
        wanted = f"{count} of {' and '.join(sorted(ATTENTION))} are wanted"
        raise MethodError(f"{where}: layer_types is {kinds!r}; {wanted}")
    if flag is False or slides not in kinds:
        return [full] * count, None
    check_numbers(where, {"sliding_window": config.get("sliding_window")})
    return kinds, config["sliding_window"]


# What a head shares with its target, and the shapes of its layers ----------------------------------------------------


def table_and_head(target: Facts) -> tuple[Tensor, Linear]:
    """The target's input embedding [V, H] and output head. MethodError without access to them."""
    if (ends := target.ends) is None:
        raise MethodError(
            f"{target.name} shows neither its embedding nor its output head: a head over its states needs both"
        )
    return ends


def is_copy(own: Tensor | None, table: Tensor) -> bool:
    """Whether a head's own embedding equals the target's `table` up to rounding to 16 bits; True if it has none."""
    if own is None or own.shape != table.shape:
        return own is None
    own = own.to(table)
    return torch.equal(own, table) or torch.allclose(own, table, rtol=2**-7, atol=1e-6)


def check_width(path: str, width: int, target: Facts) -> None:
    """Raise MethodError unless the target's states have `width` numbers."""
    if width != target.hidden_size:
        raise MethodError(
            f"{path} reads states of {width} numbers, and those of {target.name} have {target.hidden_size}: "
            "it is a head for another target"
        )


def check_numbers(where: Any, entries: Entries, least: int = 1, most: int = 2**24) -> None:
    """Raise MethodError, which names the entry, unless all entries are whole numbers from `least` to `most`."""
    for name, value in entries.items():
        if type(value) is not int or not least <= value <= most:
            raise MethodError(f"{where}: {name} is {value!r}; a whole number from {least} to {most} is wanted")


def head_shapes(
    shape: Shape, prefixes: Sequence[str] | None = None, *, width: int | None = None, norms: tuple[str, ...] = (NORM,)
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Names and shapes of the tensors of a head's layers.

    prefixes  what each layer's names begin with; None: "layers.0.", "layers.1.", ...
    width     width of the first attention's input; None: the hidden size. EAGLE-3's is twice that.
    norms     names of the norms before the first attention; EAGLE-1 has none. Later layers have NORM."""
    shapes: dict[str, tuple[int, ...]] = {}
    for n, prefix in enumerate(prefixes or [f"layers.{n}." for n in range(shape.num_layers)]):
        of_layer = layer_shapes(shape, None if n else width)
        of_layer |= {f"{name}.weight": (shape.hidden_size,) for name in ((NORM,) if n else norms)}
        shapes |= {f"{prefix}{name}": size for name, size in of_layer.items()}
    return shapes
