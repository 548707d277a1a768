"""What a model folder says of itself, checked before anything is made of it: the numbers of its config.json, its end
tokens, and the tensors that are there. Each mistake is a ModelError of one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from paceline.errors import ModelError, shortened

LONGEST_CONTEXT = 1 << 24
"""Most tokens of a context. A decoder keeps its rotary angles of every position; published models go up to 10 M."""
FLOATS = ("F16", "BF16", "F32", "F64")
"""Number formats of safetensors that are weights as they stand."""

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
"""Whole numbers of a configuration, from 1 to this; what is absent has a default of its own."""


def check_config(config: PretrainedConfig, file: Path) -> None:
    """ModelError if a size is not a whole number in its range, or the base of the rotary angles no number above 0."""
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
    """ModelError for weights that are not floating-point numbers: what scales them is not known here."""
    for key in keys:
        kind = tensors[key].get_slice(key).get_dtype()
        if kind not in FLOATS:
            raise ModelError(
                f"{folder}: {key} holds {kind} numbers, so its weights are quantized, and config.json does not say "
                f"how: use the model in one of {', '.join(FLOATS)}"
            )


def check_layers(folder: Path, num_layers: int, keys: Iterable[str]) -> None:
    """ModelError if there are weights of layers that the configuration does not have: they would not be run."""
    numbers = [int(found[1]) for key in keys if (found := re.match(r"(?:model\.)?layers\.(\d+)\.", key))]
    if numbers and max(numbers) >= num_layers:
        raise ModelError(
            f"{folder} has weights of {max(numbers) + 1} layers, and its config.json asks for {num_layers}: "
            "one of the two is of another model"
        )
