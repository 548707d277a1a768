"""Drafters for an enlarged model: what they draft with grows by the factor the model grew by, and drafts the same.

    large_spec("model:demo-draft,stop=svip", target, Enlargement.read(folder))     # "model:~/.cache/...,stop=svip"

A draft model is enlarged like any model (`large.py`), its exits with it; one that was cut from the target exactly as
the target was. An adapter, which reads and writes the target's hidden states, is padded as the target's own attention
is; a head over its states state by state (`large_head.py`). Whatever else a drafter reads, a corpus say, stays as it
is. Knows no drafter by name.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from paceline.bench.large import cache_home, copy_files, fingerprint_of, large_folder, padded
from paceline.bench.large_head import large_head
from paceline.bench.proportions import Enlargement, Proportions
from paceline.draft.neural.checkpoint import CONFIG, KIND, TargetFacts, open_drafter, save_drafter
from paceline.draft.shapes import SLOTS_FILE
from paceline.errors import ModelError
from paceline.records import loads
from paceline.spec import parse, split
from paceline.target.base import Target
from paceline.target.load import SMALL_FILES, find, read_config
from paceline.target.shape import Shape, unsupported


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
    return part.replace(checkpoint, str(large_adapter(Path(checkpoint), target, done)), 1)


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


def large_adapter(folder: Path, target: Target, done: Enlargement) -> Path:
    """An adapter for the small target as one for the enlarged `target`; a copy in the cache, made the first time.

    Its tensors are attention (q_proj, k_proj, v_proj, o_proj) and norms over the target's hidden states."""
    kind = (_config(str(folder)) or {})[KIND]
    config, tensors = open_drafter(folder, kind, None)
    folder = folder.expanduser()
    facts = TargetFacts.of(target)
    kept = cache_home() / f"{folder.resolve().name}-{facts.weights_fingerprint}-{fingerprint_of(folder)}"
    if (kept / CONFIG).exists():
        return kept
    if "exit_layer" not in config:
        copy_files(folder, kept)
        large_head(folder, kept, target, done)
        return kept
    factor = done.width_factor  # of width and heads alike
    large = {
        name: padded(name, tensor, tuple(factor * side for side in tensor.shape), factor)
        for name, tensor in tensors.items()
    }
    own = {key: value for key, value in config.items() if key not in (KIND, "paceline", "target")}
    own["exit_layer"] = config["exit_layer"] * done.layer_factor
    copy_files(folder, kept)
    save_drafter(kept, kind, config=own, tensors=large, target=facts)
    return kept

