"""Checkpoints of drafters: a folder with model.safetensors, and a config.json that names their target.

    config, tensors = open_drafter(out, "kind", target)
    config, tensors = open_head("build/eagle", "eagle", target)        # ours, or a published head
    check_all(path, tensors, shapes)                                   # all tensors are used, and none is missing

Our config.json has {"paceline_drafter": kind, "paceline": version, "target": {...}} and what the drafter adds, such as
its recipe and its data. Whatever does not fit is an error of one line. Pickled files (.bin, .pt) are read only if the
path names the file, and only for tensors."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from packaging.version import InvalidVersion, Version
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline import __version__
from paceline.core.options import quoted
from paceline.errors import PATHS, MethodError, ModelError, meant
from paceline.formats.facts import Facts
from paceline.formats.folder import open_weights
from paceline.jsonl import loads
from paceline.kernels.blocks import KINDS, Blocks, WeightsByName, tensors_of

WEIGHTS, CONFIG = "model.safetensors", "config.json"
KIND = "paceline_drafter"
BLOCKS = "blocks"  # entry of config.json with the formats of matrices in blocks, by name
PICKLED = (".bin", ".pt", ".pth")  # endings of files that torch pickled


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter's checkpoint says of the target for which it was trained. An empty fingerprint is unknown."""

    name: str
    tokenizer_fingerprint: str
    weights_fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int

    @classmethod
    def of(cls, target: Facts) -> Self:
        """Make the facts of a loaded target, with its tokenizer's fingerprint if it has a tokenizer."""
        tokenizer = target.tokenizer.fingerprint if target.tokenizer else ""
        sizes = target.hidden_size, target.num_layers, target.vocab_size
        return cls(target.name, tokenizer, target.weights_fingerprint, *sizes)


def open_drafter(path: str | Path, kind: str, target: Facts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the drafter in folder `path`. Returns its configuration, and its tensors on the CPU as they are stored.

    target  the target for which it will draft; None: it is not checked.

    Raises MethodError if there is no such drafter, or it is of another kind, cut off, or for another target."""
    folder = Path(path).expanduser()
    config = read_drafter(folder, kind)
    if target is not None:
        check_target(folder, _facts(folder, config), target)
    return config, _expanded(folder, config.get(BLOCKS, {}), tensors_in(folder / WEIGHTS))


def read_drafter(folder: Path, kind: str) -> dict[str, Any]:
    """Read config.json of the drafter of this kind in `folder`. MethodError if there is no such drafter."""
    config = read_config(folder, kind)
    stored = config.get(KIND)
    if stored is None:
        raise MethodError(f"{folder} is a model and no drafter of kind {kind}: its {CONFIG} has no {KIND}")
    if stored != kind:
        spec = f"{stored}:{quoted(str(folder))}"
        raise MethodError(f"{folder} holds a drafter of kind {stored} where {kind} is wanted: write {spec}")
    _check_version(config.get("paceline"), folder)
    return config


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """Read config.json in a drafter's folder. MethodError if it is missing or cannot be read."""
    file = folder / CONFIG
    if folder.is_file():
        raise MethodError(f"{folder} is a file; name the folder of a drafter of kind {kind}")
    if not folder.is_dir():
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        near = meant(folder.name, siblings, PATHS)
        raise MethodError(f"there is no folder {folder} with a drafter of kind {kind}.{near}")
    if not file.is_file():
        raise MethodError(
            f"{folder} has no {CONFIG}, so it is no drafter of kind {kind}; name the folder that has both files"
        )
    try:
        config: dict[str, Any] = loads(file.read_bytes())
        config.get(KIND)
    except (OSError, ValueError, AttributeError) as error:
        raise MethodError(f"{file} cannot be read ({error}); train or copy the drafter again") from None
    return config


def in_shards(folder: Path) -> dict[str, Tensor]:
    try:
        return {name: file.get_tensor(name) for name, file in open_weights(folder).items()}
    except ModelError as error:
        raise MethodError(str(error)) from None


def tensors_in(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise MethodError(f"{file.parent} has no {file.name}: copy it or train the drafter again")
    try:
        if file.suffix not in PICKLED:
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise MethodError(f"{file} holds more than tensors, which could be a program: it is not read") from None
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        raise MethodError(f"{file} is cut off or damaged ({error}): copy it again") from None
    if not isinstance(tensors, dict) or not all(isinstance(one, Tensor) for one in tensors.values()):
        raise MethodError(f"{file} does not hold tensors by name: it is no checkpoint of a head")
    return tensors


def _expanded(folder: Path, formats: Mapping[str, str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Expand the tensors that are in blocks to bfloat16."""
    kinds = {kind.name: kind for kind in KINDS.values()}
    try:
        dense = {name: Blocks(kinds[kind], tensors[name]).dense(torch.bfloat16) for name, kind in formats.items()}
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise MethodError(f"{folder / CONFIG} and {WEIGHTS} disagree about blocks ({error}): copy them again") from None
    return tensors | dense


def _check_version(wrote: Any, folder: Path) -> None:
    """Raise MethodError for a checkpoint of a later version, whose format is not known here."""
    try:
        is_later = wrote is not None and Version(str(wrote)).release[:2] > Version(__version__).release[:2]
    except InvalidVersion:
        why = "does not say which version of paceline wrote it: train the drafter again"
        raise MethodError(f"{folder / CONFIG} {why}") from None
    if is_later:
        raise MethodError(
            f"{folder} was written by paceline {wrote} and this is {__version__}: upgrade, or train the drafter again"
        )


def check_target(folder: Path, made_for: TargetFacts, target: Facts, *, any_target: bool = False) -> None:
    """Raise MethodError, with both names and what differs, if a drafter `made_for` a target does not fit `target`.

    any_target  whether the drafter drafts for every target with the same tokenizer."""
    here = TargetFacts.of(target)
    if made_for.tokenizer_fingerprint and here.tokenizer_fingerprint:
        if made_for.tokenizer_fingerprint != here.tokenizer_fingerprint:
            raise _other(folder, made_for, here, "the two have different tokenizers")
    elif made_for.vocab_size != here.vocab_size:
        raise _other(folder, made_for, here, f"{made_for.vocab_size} tokens there, {here.vocab_size} here")
    if any_target:
        return
    for what in ("hidden_size", "num_layers", "vocab_size"):
        there, now = getattr(made_for, what), getattr(here, what)
        if there != now:
            raise _other(folder, made_for, here, f"{what.replace('_', ' ')} {there} there, {now} here")
    if made_for.weights_fingerprint and here.weights_fingerprint:
        there, now = made_for.weights_fingerprint, here.weights_fingerprint
        if there != now:
            raise _other(folder, made_for, here, f"same shape, other weights ({there} there, {now} here)")


def _other(folder: Path, made_for: TargetFacts, here: TargetFacts, why: str) -> MethodError:
    return MethodError(f"{folder} was trained for {made_for.name}, not for {here.name}: {why}; train one for it")


def _facts(folder: Path, config: dict[str, Any]) -> TargetFacts:
    try:
        return TargetFacts(**config["target"])
    except (KeyError, TypeError) as error:
        raise MethodError(f"{folder / CONFIG} does not say which target the drafter is for ({error})") from None


def recorded_target(path: str | Path) -> TargetFacts | None:
    """Read the target for which a folder of `paceline train` was made; None if it does not say."""
    folder = Path(path).expanduser()
    config = read_config(folder, "model") if (folder / CONFIG).is_file() else {}
    return _facts(folder, config) if "target" in config else None


def check_all(path: str | Path, tensors: WeightsByName, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise MethodError unless the tensors have exactly these names and shapes, and are floats of 16 bits or more, or
    blocks.

    With a missing tensor a head would be half random, with another one it would be another head, and weights of fewer
    bits have scales that nothing reads."""
    for name, tensor in tensors_of(tensors).items():
        if name.endswith(("weight", "bias")) and (not tensor.is_floating_point() or tensor.itemsize < 2):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise MethodError(f"{path}: its {name} holds {kind} numbers; heads are read in 16 or 32 bits")
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or extra:
        parts = [f"has no {_few(missing)}"] if missing else []
        parts += [f"has {_few(extra)}, which nothing here reads"] if extra else []
        raise MethodError(f"{path} {' and '.join(parts)}: it is another kind of head, or a part of one")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise MethodError(
                f"{path} is no head for this target: its {name} is {list(tensors[name].shape)} "
                f"where {list(shape)} is wanted"
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
