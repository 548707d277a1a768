"""Checks of a model folder before it is loaded: the numbers of its config.json, its end tokens, and its tensors.
Each mistake is a ModelError of one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from paceline.errors import ModelError, shortened

LONGEST_CONTEXT = 1 << 24
"""Most tokens of a context. Rotary angles of every position are kept in memory; published models go up to 10 M."""
FLOATS = ("F16", "BF16", "F32", "F64")
"""Number formats of safetensors that are weights without a scale."""

_SIZES = {
    "vocab_size": 1 << 31,
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 26,
    "num_hidden_layers": 1 << 16,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": LONGEST_CONTEXT,
}
"""Largest values of a configuration's whole numbers, which begin at 1 and may be absent."""


def check_config(config: PretrainedConfig, file: Path) -> None:
    """ModelError if a size is not a whole number in its range, or rope_theta is not a number above 0."""
    inner = config.get_text_config()
    for key, most in _SIZES.items():
        value = getattr(inner, key, None)
        if value is not None and not (_is_whole(value) and 1 <= value <= most):
            raise ModelError(f"{file}: {key} is {_short(value)}; it must be a whole number from 1 to {most:,}")
    rope = getattr(inner, "rope_parameters", None) or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"{file}: rope_parameters is {_short(rope)}; it must be an object")
    if "rope_theta" in rope and not _is_positive(base := rope["rope_theta"]):
        raise ModelError(f"{file}: rope_theta is {_short(base)}; it must be a number above 0, such as 10000.0")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e30


def _short(value: Any) -> str:
    return shortened(repr(value))


def end_tokens(ids: Any, file: Path) -> set[int]:
    """The token ids of an eos_token_id, which is one, a list of them or nothing; ModelError for anything else."""
    every = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(_is_whole(i) and i >= 0 for i in every):
        raise ModelError(f"{file}: eos_token_id is {_short(ids)}; it must be a token id or a list of them")
    return set(every)


def check_numbers(folder: Path, keys: Iterable[str], tensors: Mapping[str, Any]) -> None:
    """ModelError for weights that are not floating-point numbers, for their scale is not known."""
    for key in keys:
        kind = tensors[key].get_slice(key).get_dtype()
        if kind not in FLOATS:
            raise ModelError(
                f"{folder}: {key} holds {kind} numbers, so its weights are quantized, and config.json does not say "
                f"how: use the model in one of {', '.join(FLOATS)}"
            )


def check_layers(folder: Path, num_layers: int, keys: Iterable[str]) -> None:
    """ModelError if there are weights of layers that the configuration does not have."""
    numbers = [int(match[1]) for key in keys if (match := re.match(r"(?:model\.)?layers\.(\d+)\.", key))]
    if numbers and max(numbers) >= num_layers:
        raise ModelError(
            f"{folder} has weights of {max(numbers) + 1} layers, and its config.json asks for {num_layers}: "
            "one of the two is of another model"
        )


def refuse_absent(folder: Path, absent: Sequence[str]) -> None:
    """ModelError if tensors that the configuration asks for are absent."""
    if absent:
        more = f" and {len(absent) - 2} more" if len(absent) > 2 else ""
        raise ModelError(
            f"{folder} lacks {', '.join(absent[:2])}{more}, which its config.json asks for: "
            "the weights are incomplete or of another model"
        )


def check_shape(folder: Path, key: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """ModelError if a tensor has another shape than the configuration asks for."""
    if list(shape) != list(wanted):
        raise ModelError(
            f"{folder}: {key} has shape {list(shape)} where config.json asks for {list(wanted)}: "
            "the weights are of another model"
        )
