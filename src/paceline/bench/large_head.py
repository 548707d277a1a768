"""Heads over a target's states, for an enlarged target: as much larger as it became, and drafting the same.

The states of an enlarged model are those of the small one with zeros after them, so everything that reads or writes
states gets zeros there. A matrix that reads several states side by side is padded state by state. Norms see a smaller
mean of squares and are rescaled, as the target's own are. Knows no head by name: only how its tensors are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.bench.proportions import Enlargement
from paceline.draft.neural.checkpoint import CONFIG, KIND, TargetFacts, open_drafter, save_drafter
from paceline.errors import ModelError
from paceline.records import loads
from paceline.target.base import Target

GROWING = ("hidden_size", "num_attention_heads", "num_key_value_heads")
"""Entries of a configuration that grow with the width."""
LAYERS = "eagle_aux_hidden_state_layer_ids"
TABLES = ("lm_head", "lm_heads", "embed_tokens", "position_embedding")
"""Tensors with a row for every token or depth: their number stays."""


def large_head(folder: Path, kept: Path, target: Target, done: Enlargement) -> None:
    """Write the head in `folder` for the enlarged `target` into `kept`. A head that does not say how wide it is has the
    target's sizes. ModelError for one of another width."""
    kind = str(loads((folder / CONFIG).read_bytes())[KIND])
    config, tensors = open_drafter(folder, kind, None)
    layers = config.get("transformer_layer_config") or config
    width = layers.get("hidden_size", done.small.hidden_size)
    inner = layers.get("intermediate_size", done.small.intermediate_size)
    if width != done.small.hidden_size:
        raise ModelError(f"{folder} cannot be enlarged: it is {width} wide, its target {done.small.hidden_size}")
    sizes = Sizes(width, inner, done)
    large = {name: sizes.grown(name, tensor) for name, tensor in tensors.items()}
    own = {key: value for key, value in config.items() if key not in (KIND, "paceline", "target")}
    if "transformer_layer_config" in own:
        own["transformer_layer_config"] = sizes.described(layers)
    elif "hidden_size" in own:
        own = sizes.described(own)
    if own.get(LAYERS):
        own[LAYERS] = [layer * done.layer_factor for layer in own[LAYERS]]
    save_drafter(kept, kind, config=own, tensors=large, target=TargetFacts.of(target))


class Sizes:
    """How a head's tensors and its configuration grow. width: of a state; inner: of its MLP."""

    def __init__(self, width: int, inner: int, done: Enlargement):
        self.width, self.inner, self.factor = width, inner, done.width_factor
        self.large_inner = round(inner * done.large.intermediate_size / done.small.intermediate_size)

    def described(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of the large head's layers."""
        grown = {key: layers[key] * self.factor for key in GROWING if key in layers}
        eps = layers.get("rms_norm_eps", 1e-6) / self.factor
        return {**layers, **grown, "intermediate_size": self.large_inner, "rms_norm_eps": eps}

    def grown(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """Tensor `name` of the large head."""
        if not old.is_floating_point():
            return old
        kind = name.removesuffix(".weight").removesuffix(".bias").split(".")
        if any("norm" in part for part in kind):
            if kind[-1] in ("q_norm", "k_norm"):
                return old
            # Where the state is zero it may be anything.
            return self._spread(old * self.factor**-0.5, 0, self._places(kind, 0, len(old)))
        for axis, size in enumerate(old.shape):
            old = self._spread(old, axis, self._places(kind, axis, size))
        return old

    def _places(self, kind: list[str], axis: int, size: int) -> tuple[int, int]:
        """Size of the parts of an axis that are padded each, and what they are padded to."""
        if axis == 0 and any(part in TABLES for part in kind):
            return size, size
        if (axis == 0 and kind[-1] in ("gate_proj", "up_proj")) or (axis == 1 and kind[-1] == "down_proj"):
            return size, self.large_inner
        if (axis == 0 and kind[-1] in ("q_proj", "k_proj", "v_proj")) or (axis == 1 and kind[-1] == "o_proj"):
            return size, size * self.factor
        return self.width, self.width * self.factor

    @staticmethod
    def _spread(old: torch.Tensor, axis: int, places: tuple[int, int]) -> torch.Tensor:
        """`old` with every part of an axis followed by zeros."""
        part, room = places
        if part == room:
            return old
        moved = old.movedim(axis, -1)
        parts = moved.unflatten(-1, (-1, part))
        return torch.nn.functional.pad(parts, (0, room - part)).flatten(-2).movedim(-1, axis).contiguous()
