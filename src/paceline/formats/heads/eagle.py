"""Heads of EAGLE, EAGLE-3 and P-EAGLE.

EAGLE's are read in the authors' format, which `paceline train eagle` writes, and in the `speculators` format. EAGLE-3's
are read in the `speculators` format, which `paceline train eagle3` writes, and in the formats of the authors
("midlayer."), SpecForge, ModelOpt and SGLang. P-EAGLE's have a state for tokens that are not drafted yet.

Our names are those of the `speculators` format, without optional tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from torch import Tensor
from transformers import PretrainedConfig

from paceline.errors import MethodError
from paceline.formats.facts import BEFORE_NORM, Facts
from paceline.formats.heads.checkpoint import check_all
from paceline.formats.heads.layout import (
    TABLE,
    Entries,
    Layout,
    Tensors,
    check_numbers,
    check_width,
    count_layers,
    head_shapes,
    is_copy,
    layer_config,
    table_and_head,
)
from paceline.formats.heads.vocab import MEMBERS, OFFSETS, columns_of
from paceline.formats.shape import Shape

EAGLE = Layout(
    "eagle",
    names={r"fusion_fc\.(.+)": r"fc.\1", r"transformer\.(.+)": r"layers.0.\1"},
    known=("bias", "eagle_fc_bias", "fusion_bias", "skip_prenorm", "skip_output_norm"),  # The tensors show a bias.
)


def eagle_shapes(shape: Shape, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's tensors. names: tensors of its file, which tell which optional ones it has."""
    h = shape.hidden_size
    optional = {name: of for name, of in {"fc.bias": (h,), TABLE: (shape.vocab_size, h)}.items() if name in names}
    return {"fc.weight": (h, 2 * h)} | optional | head_shapes(shape, norms=())


def read_eagle(
    path: str, config: Entries, tensors: Tensors, target: Facts
) -> tuple[PretrainedConfig, dict[str, Tensor]]:
    """Read a head. Returns its layers' configuration, and its tensors by our names, without an embedding. MethodError
    unless they are a head for the target."""
    given, tensors = EAGLE.read(path, config, tensors)
    layers = layer_config(path, {"vocab_size": target.vocab_size, **given}, tensors, target, count_layers(tensors))
    shape = Shape.of(layers)
    check_width(path, shape.hidden_size, target)
    check_all(path, tensors, eagle_shapes(shape, list(tensors)))
    # Quantising and training (`Drafter.bind`) change the target's table.
    is_plain = target.weights_fingerprint and target.quantised is None
    if is_plain and not is_copy(tensors.get(TABLE), table_and_head(target)[0]):
        raise MethodError(f"{path} brings another embedding than the target's: it is a head for another target")
    return layers, {name: tensor for name, tensor in tensors.items() if name != TABLE}


# EAGLE-3 --------------------------------------------------------------------------------------------------------------

OUTPUT, NORM = "lm_head.weight", "norm.weight"
EAGLE3 = Layout(
    "eagle3",
    groups=("eagle_config", "dflash_config"),
    names={
        **{rf"additional_layers\.{n}\.hidden_norm\.(.+)": rf"layers.{n + 1}.input_layernorm.\1" for n in range(8)},
        **{rf"additional_layers\.{n}\.(.+)": rf"layers.{n + 1}.\1" for n in range(8)},
        r"(?:layers|midlayer)\.([1-9]\d*)\.hidden_norm\.(.+)": r"layers.\1.input_layernorm.\2",
    },
    flags={
        "use_mtp_layernorm": (False,),
        "next_layer_regular": (True,),
        "parallel_draft_step": (0, 1),
        "logit_scale": (1,),
        "parallel_drafting": (False, True),
    },
    known=(
        "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_last_layernorm",
        "use_input_layernorm_in_first_layer", "use_aux_hidden_state", "has_lm_head",
    ),
)  # fmt: skip
"""Files with several layers have several names for the norm before a later layer's attention."""
SWITCHES = {
    "use_last_layernorm": NORM,
    "use_input_layernorm_in_first_layer": "layers.0.input_layernorm.weight",
    "use_aux_hidden_state": "fc.weight",
}
"""Entries that are on if they are missing, and the tensors that nothing reads if they are off."""
IDS = "eagle_aux_hidden_state_layer_ids"
MASK = "mask_hidden"  # P-EAGLE's state of a drafted token
MASK_IDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class Flags:
    """How a head differs from the paper's (EAGLE-3.1), as its config.json says.

    norm_before_residual  whether the layer adds to the normed feature.
    norm_before_fc        whether one norm is over all tapped states.
    fc_norm               whether each tapped state has a norm.
    norm_output           whether the next node reads the normed output."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the flags in config.json. A missing flag is off, except norm_before_residual in the `speculators` format
        of EAGLE-3."""
        inner = config.get("eagle_config") or {}
        named = {f.name: inner.get(f.name, config.get(f.name)) for f in fields(cls)}
        given = {name: bool(value) for name, value in named.items() if value is not None}
        return cls(**{"norm_before_residual": config.get("speculators_model_type") == "eagle3", **given})


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads by default: the paper's layers, or a small target's last three."""
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(range(max(num_layers - 3, 0), num_layers))


def taps_of(path: str, config: Mapping[str, Any], target: Facts) -> tuple[int, ...]:
    """The layers whose inputs a head reads, as in `Needs.hidden_layers`. MethodError if the target lacks them.

    Ids at the top of config.json count inputs. Ids in `eagle_config` count outputs (SpecForge, ModelOpt), unless the
    first is 2, as in the paper's inputs (SGLang does so, too), or any equals the number of layers, which no output
    has."""
    last, inner = target.num_layers, config.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state", config.get("use_aux_hidden_state")) is False:
        return (last,)
    named = next((config[key] for key in (IDS, "aux_hidden_state_layer_ids") if config.get(key)), None)
    taps = tuple(named or inner.get(IDS) or default_taps(last))
    if not named and inner.get(IDS) and taps[0] != 2 and last not in taps:
        taps = tuple(layer + 1 if type(layer) is int else layer for layer in taps)
    if not all(type(layer) is int and 0 <= layer <= last for layer in taps):
        raise MethodError(
            f"{path} reads the inputs of layers {', '.join(map(str, taps))}, and {target.name} has layers 0 to "
            f"{last - 1}: it is a head for another target"
        )
    return tuple(BEFORE_NORM if layer == last else layer for layer in taps)


def eagle3_shapes(shape: Shape, width: int, taps: int, vocab: int, flags: Flags) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's tensors that are not optional.

    width  width of a tapped state. taps: number of tapped states."""
    h = shape.hidden_size
    shapes = {"fc.weight": (h, taps * width), NORM: (h,), OUTPUT: (vocab, h)}
    shapes |= head_shapes(shape, width=2 * h, norms=("input_layernorm", "hidden_norm"))
    if flags.norm_before_fc:
        shapes["input_norm.weight"] = (taps * width,)
    if flags.fc_norm:
        shapes |= {f"fc_norm.{n}.weight": (width,) for n in range(taps)}
    return shapes


@dataclass(frozen=True)
class Eagle3Head:
    """A head as its file has it.

    layers   configuration of the head's decoder layers. taps: the target's states that it reads, as in `Needs`.
    columns  the target's ids int64 [K] of the head's vocabulary; None: all tokens.
    weights  the tensors by our names. If the output head is missing, it is the target's; a missing norm or `fc` is not
             applied.
    table    the head's embedding [V, H]; if it equals the target's, it is the target's tensor, which saves memory.
    mask     the token of P-EAGLE's mask; None for EAGLE-3."""

    layers: PretrainedConfig
    flags: Flags
    taps: tuple[int, ...]
    columns: Tensor | None
    weights: Tensors
    table: Tensor
    mask: int | None = None

    @classmethod
    def read(cls, path: str, config: Entries, tensors: Tensors, target: Facts) -> Self:
        """Read a head from its config and its tensors. MethodError if they are no head for the target."""
        given, tensors = EAGLE3.read(path, config, tensors)
        off = {name for switch, name in SWITCHES.items() if given.get(switch) is False}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in off}
        described = {"vocab_size": target.vocab_size, **given}
        layers = layer_config(path, described, tensors, target, count_layers(tensors))
        shape, flags, taps = Shape.of(layers), Flags.of(config), taps_of(path, config, target)
        width = given.get("target_hidden_size") or shape.hidden_size
        check_width(path, width, target)
        vocab = given.get("draft_vocab_size") or target.vocab_size
        shapes = eagle3_shapes(shape, width, len(taps), vocab, flags)
        shapes = {name: of for name, of in shapes.items() if name not in off}
        mask, kind = None, f"{given.get('architectures')} {given.get('speculators_model_type')}".lower()
        if MASK in tensors or given.get("parallel_drafting") or "peagle" in kind:
            shapes[MASK] = (len(taps) * width,)
            mask = next((given[key] for key in MASK_IDS if given.get(key) is not None), None)
            check_numbers(path, {MASK_IDS[0]: mask}, 0, target.vocab_size - 1)
            tensors |= {MASK: tensors[MASK].flatten()} if MASK in tensors else {}
        table = _table(path, tensors.get(TABLE), shape, target)
        if OUTPUT not in tensors and OFFSETS not in tensors and vocab == target.vocab_size:
            if given.get("tie_word_embeddings"):
                tensors[OUTPUT] = table
            elif shape.hidden_size == target.hidden_size:
                del shapes[OUTPUT]
        optional = {TABLE: (target.vocab_size, shape.hidden_size), OFFSETS: (vocab,), MEMBERS: (target.vocab_size,)}
        check_all(path, tensors, shapes | {name: of for name, of in optional.items() if name in tensors})
        columns = columns_of(path, tensors, vocab, target)
        return cls(layers, flags, taps, columns, {name: tensors[name] for name in shapes}, table, mask)


def _table(path: str, own: Tensor | None, shape: Shape, target: Facts) -> Tensor:
    """The head's own embedding, or the target's if there is none or the two are equal."""
    if own is None and shape.hidden_size != target.hidden_size:
        raise MethodError(f"{path} is {shape.hidden_size} wide, the target's embedding {target.hidden_size}: "
                          "it needs an embedding of its own, and brings none")  # fmt: skip
    if own is not None and shape.hidden_size != target.hidden_size:
        return own.to(target.device, target.dtype)
    table, _ = table_and_head(target)
    return table if own is None or is_copy(own, table) else own.to(table)
