"""Heads as they are published: a config.json, and weights that every key of must be used.

    config, tensors = open_head("build/eagle", "eagle", target)        # ours, or anybody's
    check_all(path, tensors, shapes)                                   # missing, extra and misshapen keys by name

A folder holds model.safetensors. Files that were pickled (.bin, .pt) are read when they are named themselves, and then
as tensors alone (`weights_only`). Knows no head.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.draft.neural.checkpoint import CONFIG, KIND, WEIGHTS, open_drafter
from paceline.errors import MethodError, meant
from paceline.jsonl import loads
from paceline.target.base import Facts

PICKLED = (".bin", ".pt", ".pth")
"""Endings of files that torch pickled."""


def open_head(path: str | Path, kind: str, target: Facts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors (on the CPU, as they are stored) of the head at `path`, a folder or a file of weights
    beside its config.json.

    A head that `paceline train` wrote says which target it is for, which is checked unless `target` is None; of others
    the caller checks what they say. MethodError, one line, if there is no such head or it cannot be read."""
    file = Path(path).expanduser()
    folder = file.parent if file.is_file() else file
    if not folder.is_dir():
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise MethodError(f"there is no folder {folder} with a {kind} head.{meant(folder.name, siblings)}")
    config = _config(folder, kind)
    if KIND in config and file == folder:
        return open_drafter(folder, kind, target)
    return config, _weights(file if file != folder else _only_file(folder, kind))


def _config(folder: Path, kind: str) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        raise MethodError(f"{folder} has no {CONFIG}, so it is no {kind} head; name the folder that has both files")
    try:
        config: dict[str, Any] = loads(file.read_bytes())
        config.get(KIND)
    except (OSError, ValueError, AttributeError) as error:
        raise MethodError(f"{file} cannot be read ({error}); copy the head again") from None
    return config


def _only_file(folder: Path, kind: str) -> Path:
    """The safetensors file of a folder; MethodError that names the pickled ones if there are only those."""
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    pickled = sorted(p for p in folder.iterdir() if p.suffix in PICKLED)
    if pickled:
        raise MethodError(
            f"{folder} has {pickled[0].name} and no {WEIGHTS}: a pickled file is read only where it is named, "
            f"{kind}:{pickled[0]}"
        )
    raise MethodError(f"{folder} has no {WEIGHTS}: copy it or train the head again")


def _weights(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix not in PICKLED:
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        raise MethodError(f"{file} is cut off or damaged ({error}): copy it again") from None
    except pickle.UnpicklingError:
        raise MethodError(f"{file} holds more than tensors, which could be a program: it is not read") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise MethodError(f"{file} does not hold tensors by name: it is no checkpoint of a head")
    return tensors


def check_all(path: str | Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """MethodError unless there are tensors of just these names and shapes: a key that nobody reads would leave a head
    half random, or be another head."""
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or extra:
        parts = [f"has no {_few(missing)}"] * bool(missing) + [f"has {_few(extra)}, which nothing here reads"] * bool(
            extra
        )
        raise MethodError(f"{path} {' and '.join(parts)}: it is another kind of head, or a part of one")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise MethodError(
                f"{path} is no head for this target: its {name} is {list(tensors[name].shape)} "
                f"where {list(shape)} is wanted"
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
