"""Checkpoints of a training: one safetensors file with everything from which a run resumes exactly."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline.draft.neural.checkpoint import save_tensors
from paceline.errors import PacelineError
from paceline.jsonl import loads, replacing
from paceline.train.plan import Progress


class Resumable(Protocol):
    """Anything whose position in its data can be saved."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def save_checkpoint(
    path: Path, module: nn.Module, optimisers: Sequence[torch.optim.Optimizer], progress: Progress, stream: Resumable
) -> None:
    """One safetensors file, written beside its final place and moved there: a kill leaves the old one whole."""
    tensors = {f"model.{name}": p.detach() for name, p in module.named_parameters()}
    for number, optimiser in enumerate(optimisers):
        for index, state in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{index}.{key}": torch.as_tensor(v) for key, v in state.items()}
    tensors["rng"] = torch.get_rng_state()
    header = {"progress": vars(progress), "stream": stream.state_dict()}
    with replacing(path) as beside:
        save_tensors(beside, tensors, {"paceline": json.dumps(header)})


def load_checkpoint(
    path: Path, module: nn.Module, optimisers: Sequence[torch.optim.Optimizer], stream: Resumable
) -> Progress:
    """Put everything back as it was; raises when the file is broken or the checkpoint is of another model."""
    try:
        with safe_open(path, framework="pt") as file:
            header = loads(file.metadata()["paceline"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, TypeError, KeyError, ValueError) as error:
        raise PacelineError(f"{path} is not a whole checkpoint ({error}); delete it to start again") from None
    own = {f"model.{name}": p for name, p in module.named_parameters()}
    saved = {key: t for key, t in tensors.items() if key.startswith("model.")}
    states: dict[int, dict[int, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimiser."):
            _, number, index, name = key.split(".")
            states.setdefault(int(number), {}).setdefault(int(index), {})[name] = tensor
    if {k: p.shape for k, p in own.items()} != {k: t.shape for k, t in saved.items()} or len(states) > len(optimisers):
        raise PacelineError(f"{path} is a checkpoint of another model; choose other --checkpoints or delete it")
    with torch.no_grad():
        for key, parameter in own.items():
            parameter.copy_(saved[key])
    for number, optimiser in enumerate(optimisers):
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": states.get(number, {}), "param_groups": groups})
    torch.set_rng_state(tensors["rng"])
    stream.load_state_dict(header["stream"])
    return Progress(**header["progress"])
