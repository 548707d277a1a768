"""Drafters for an enlarged model: what they draft with grows by the factor the model grew by, and drafts the same.

    large_spec("model:demo-draft,stop=svip", target, Enlargement.read(folder))     # "model:~/.cache/...,stop=svip"

A draft model is enlarged like any model (`large.py`), its exits with it; one that was cut from the target exactly as
the target was. A head or an adapter over the target's states is padded state by state. Whatever else a drafter reads,
such as a corpus, stays as it is. No drafter is known by name here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.bench.large import Enlargement, Proportions, cache_home, copy_files, fingerprint_of, large_folder
from paceline.draft.neural.checkpoint import CONFIG, KIND, TargetFacts, open_drafter, save_drafter
from paceline.draft.shapes import SLOTS_FILE
from paceline.draft.spec import parse, split
from paceline.errors import ModelError
from paceline.jsonl import loads
from paceline.target.base import Target
from paceline.target.load import SMALL_FILES, find, read_config
from paceline.target.shape import Shape, unsupported

GROWING = ("hidden_size", "num_attention_heads", "num_key_value_heads")
"""Entries of a configuration that grow with the width."""
LAYERS = "eagle_aux_hidden_state_layer_ids"
TABLES = ("lm_head", "lm_heads", "embed_tokens", "position_embedding")
"""Tensors with a row for every token or depth: their number stays."""


def large_spec(spec: str, target: Target, done: Enlargement) -> str:
    """`spec` with every model in it replaced by one enlarged as the target was; errors as `large.enlarge`.

    target: the enlarged one."""
    return "+".join(_large_part(part, target, done) for part in split(spec))


def _large_part(part: str, target: Target, done: Enlargement) -> str:
    parsed = parse(part)
    checkpoint = parsed.checkpoint
    if checkpoint is not None and ":" in checkpoint and not Path(checkpoint).expanduser().exists():
        return part.replace(checkpoint, _large_part(checkpoint, target, done), 1)  # a drafter inside a drafter
    config = _config(checkpoint) if checkpoint else None
    if checkpoint is None or config is None:
        return part
    if "model_type" in config and not _is_head(config):
        grown = large_draft_model(checkpoint, done)
        if (slots := Path(checkpoint).expanduser() / SLOTS_FILE).exists():
            shutil.copy(slots, grown)  # the accuracies of a model tuned with noise are those of the large one
        return _with_exits(part.replace(checkpoint, str(grown), 1), parsed.options.get("exits"), grown)
    return part.replace(checkpoint, str(large_head(Path(checkpoint), target, done)), 1)


def _is_head(config: dict[str, Any]) -> bool:
    """Whether a configuration is one of a head over the target's states, and of no model."""
    return KIND in config and "exits" not in config and "exit_layer" not in config


def _with_exits(part: str, exits: str | None, grown: Path) -> str:
    """`part` with the exits that it names, after the same layers of the enlarged draft."""
    if exits is None or not all(exit.strip().isdecimal() for exit in exits.split(",")):
        return part  # what is no number will be refused by name
    factor = Enlargement.read(grown).layer_factor
    return part.replace(f"exits={exits}", f"exits={','.join(str(factor * int(exit)) for exit in exits.split(','))}", 1)


def _config(checkpoint: str) -> dict[str, Any] | None:
    """config.json of a draft model or of an adapter; None for whatever else a drafter may read."""
    try:
        config = loads((Path(checkpoint).expanduser() / CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) and ("model_type" in config or KIND in config) else None


def large_draft_model(checkpoint: str, done: Enlargement) -> Path:
    """A draft model, as many times larger as the target was made; if it was cut from the target, layer by layer like
    it, so that it is the same part of it as before."""
    folder = find(checkpoint, [*SMALL_FILES, "*.safetensors"])
    config = read_config(folder)
    if reason := unsupported(config):
        raise ModelError(f"{checkpoint} cannot be enlarged: {reason}")
    shape = Shape.of(config)
    if done.fits(shape):
        return large_folder(folder, done)
    times = done.large.parameters / done.small.parameters
    return large_folder(folder, round(times * Proportions.of(shape).parameters))


def large_head(folder: Path, target: Target, done: Enlargement) -> Path:
    """A head or adapter over the small target's states as one for the enlarged `target`; a copy in the cache, made the
    first time. One that does not say how wide it is has the target's sizes. ModelError for one of another width."""
    folder = folder.expanduser()
    facts = TargetFacts.of(target)
    made = cache_home() / f"{folder.resolve().name}-{facts.weights_fingerprint}-{fingerprint_of(folder)}"
    if (made / CONFIG).exists():
        return made
    kind = str((_config(str(folder)) or {})[KIND])
    config, tensors = open_drafter(folder, kind, None)
    layers = config.get("transformer_layer_config") or config
    width = layers.get("hidden_size", done.small.hidden_size)
    if width != done.small.hidden_size:
        raise ModelError(f"{folder} cannot be enlarged: it is {width} wide, its target {done.small.hidden_size}")
    sizes = Sizes(width, layers.get("intermediate_size", done.small.intermediate_size), done)
    own = {key: value for key, value in config.items() if key not in (KIND, "paceline", "target")}
    if "transformer_layer_config" in own:
        own["transformer_layer_config"] = sizes.described(layers)
    elif "hidden_size" in own:
        own = sizes.described(own)
    if own.get(LAYERS):
        own[LAYERS] = [layer * done.layer_factor for layer in own[LAYERS]]
    if "exit_layer" in own:
        own["exit_layer"] *= done.layer_factor
    large = {name: sizes.grown(name, tensor) for name, tensor in tensors.items()}
    copy_files(folder, made)
    save_drafter(made, kind, config=own, tensors=large, target=facts)
    return made


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
        part, padded = places
        if part == padded:
            return old
        moved = old.movedim(axis, -1)
        parts = moved.unflatten(-1, (-1, part))
        return torch.nn.functional.pad(parts, (0, padded - part)).flatten(-2).movedim(-1, axis).contiguous()
