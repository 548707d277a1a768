"""The files of a head: a folder, a file of weights with its config.json, or a GGUF file."""

from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.core.options import quoted
from paceline.errors import MethodError
from paceline.formats.facts import Facts
from paceline.formats.folder import INDEX
from paceline.formats.heads.checkpoint import (
    CONFIG,
    KIND,
    PICKLED,
    WEIGHTS,
    in_shards,
    open_drafter,
    read_config,
    tensors_in,
)
from paceline.formats.heads.gguf import read


def open_head(path: str | Path, kind: str, target: Facts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the head at `path`, a folder, a file of weights with its config.json, or a GGUF file: its configuration, and
    its tensors, on the CPU, as they are stored.

    The target of a head that `paceline train` wrote is checked, unless `target` is None; callers check those of other
    heads. MethodError if there is no such head or it cannot be read."""
    file = Path(path).expanduser()
    if file.suffix == ".gguf" and file.is_file():
        return read(file, kind)
    if file.is_file() and file.suffix not in (*PICKLED, ".safetensors"):
        raise MethodError(f"{file} holds no weights: name a head's folder, or its file of weights beside its {CONFIG}")
    folder = file.parent if file.is_file() else file
    config = read_config(folder, kind)
    if KIND in config and file == folder:
        return open_drafter(folder, kind, target)
    pickled = sorted(one for one in folder.iterdir() if one.suffix in PICKLED)
    if file == folder and pickled and not (folder / WEIGHTS).is_file():
        raise MethodError(
            f"{folder} has {pickled[0].name} and no {WEIGHTS}: a pickled file is read only where it is named, "
            f"{kind}:{quoted(str(pickled[0]))}"
        )
    if file == folder and (folder / INDEX).is_file():
        return config, in_shards(folder)
    return config, tensors_in(folder / WEIGHTS if file == folder else file)
