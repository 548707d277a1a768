"""Checkpoints of drafters: a folder with model.safetensors, and a config.json that says which target they are for.

    save_drafter(out, "kind", config={"exit": 2, "recipe": {...}}, tensors=tensors, target=TargetFacts.of(target))
    config, tensors = open_drafter(out, "kind", target)

config.json holds {"paceline_drafter": kind, "paceline": version, "target": {...}} and what the drafter adds, such as
its recipe and its data. Nothing is unpickled. Whatever does not fit is an error of one line. Knows no drafter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import __version__
from paceline.errors import MethodError, meant
from paceline.jsonl import loads, replacing, write_whole
from paceline.target.base import Facts

WEIGHTS, CONFIG = "model.safetensors", "config.json"
KIND = "paceline_drafter"


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter's checkpoint remembers of the target it was trained for. An empty fingerprint is unknown."""

    name: str
    tokenizer_fingerprint: str
    weights_fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int

    @classmethod
    def of(cls, target: Facts) -> TargetFacts:
        """The facts of a loaded target, with the fingerprint of its tokenizer if it has one."""
        return cls(
            target.name,
            target.tokenizer.fingerprint if target.tokenizer is not None else "",
            target.weights_fingerprint,
            target.hidden_size,
            target.num_layers,
            target.vocab_size,
        )


def save_drafter(
    out: Path, kind: str, *, config: dict[str, Any], tensors: Mapping[str, Tensor], target: TargetFacts
) -> None:
    """Write a drafter into the folder `out`; other files in it stay.

    A kill leaves the old checkpoint, or one without config.json, which is refused: never one half old, half new."""
    text = json.dumps({KIND: kind, "paceline": __version__, "target": asdict(target), **config}, indent=2) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / WEIGHTS) as beside:
        save_tensors(beside, tensors, {"format": "pt"})
        (out / CONFIG).unlink(missing_ok=True)
    write_whole(out / CONFIG, text)


def save_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """`save_file`, but a full disk raises OSError."""
    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    file.chmod(0o644)  # safetensors writes for the owner alone


def open_drafter(
    path: str | Path, kind: str, target: Facts | None, *, any_target: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors (on the CPU, as they are stored) of the drafter in folder `path`.

    target      the target it is to draft for; None: not checked.
    any_target  it drafts for every target with the tokenizer of the one it was trained for.

    Raises MethodError, one line, if there is no such drafter, it is of another kind, cut off, or for another target.
    """
    folder = Path(path).expanduser()
    config = read_drafter(folder, kind)
    if target is not None:
        check_target(folder, _facts(folder, config), target, any_target=any_target)
    return config, _tensors(folder)


def read_drafter(folder: Path, kind: str) -> dict[str, Any]:
    """config.json of the drafter of this kind in `folder`; MethodError if there is no such drafter."""
    if not folder.is_dir():
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise MethodError(f"there is no folder {folder} with a {kind} drafter.{meant(folder.name, siblings)}")
    file = folder / CONFIG
    if not file.exists():
        raise MethodError(f"{folder} has no {CONFIG}, so it is not a drafter; name the folder its training wrote")
    try:
        config: dict[str, Any] = loads(file.read_bytes())
        stored = config.get(KIND)
    except (OSError, ValueError, AttributeError) as error:
        raise MethodError(f"{file} cannot be read ({error}); train or copy the drafter again") from None
    if stored is None:
        raise MethodError(f"{folder} is a model and not a {kind} drafter: its {CONFIG} has no {KIND}")
    if stored != kind:
        raise MethodError(f"{folder} holds a drafter of kind {stored} where {kind} is wanted: write {stored}:{folder}")
    _check_version(config.get("paceline"), folder)
    return config


def _check_version(wrote: Any, folder: Path) -> None:
    """MethodError for a checkpoint of a later version than this, whose format nobody can know here."""
    if wrote is None:
        return
    numbers = re.match(r"(\d+)\.(\d+)", str(wrote))
    if numbers is None:
        raise MethodError(f"{folder / CONFIG} does not say which version of paceline wrote it: train the drafter again")
    own = re.match(r"(\d+)\.(\d+)", __version__)
    assert own is not None
    if tuple(map(int, numbers.groups())) > tuple(map(int, own.groups())):
        raise MethodError(
            f"{folder} was written by paceline {wrote} and this is {__version__}: upgrade, or train the drafter again"
        )


def check_target(folder: Path, made_for: TargetFacts, target: Facts, *, any_target: bool = False) -> None:
    """MethodError, with both names and what differs, if a drafter `made_for` one target does not fit another."""
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


def _tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    if not file.exists():
        raise MethodError(f"{folder} has no {WEIGHTS}: copy it or train the drafter again")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise MethodError(f"{file} is cut off or damaged ({error}): copy it again") from None
