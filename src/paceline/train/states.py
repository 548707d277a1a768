"""States of a frozen target over training rows: from its forward, or from files that several trainings share.

    run = partial(target_states, teacher)
    run(input_ids, (2, 15, 30))                       # [B, T, 3, H]; of 30 layers, number 30 is the final norm
    cached = StateCache.open(folder, fingerprint, run, rows, width)
    cached(input_ids, (2, 15, 30))                    # runs the target where the files do not have the states yet
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

States = Callable[[Tensor, Sequence[int]], Tensor]
"""Token ids [B, T] and numbers of layers to the inputs of these layers, [B, T, layers, H]."""


@torch.no_grad()
def target_states(teacher: Any, input_ids: Tensor, layers: Sequence[int]) -> Tensor:
    """The inputs [B, T, layers, H] of layers of a transformers model; the number after the last is the final norm."""
    read: dict[int, Tensor] = {}

    def note(layer: int) -> Callable[..., None]:
        return lambda module, given: read.update({layer: given[0]})

    places = [*teacher.model.layers, teacher.model.norm]
    with ExitStack() as hooks:
        for layer in set(layers):
            hooks.enter_context(places[layer].register_forward_pre_hook(note(layer)))
        teacher.model(input_ids=input_ids, use_cache=False)
    return torch.stack([read[layer] for layer in layers], -2)


class StateCache:
    """The states of training rows in files: a pair of files a layer, made when a drafter first reads that layer. One
    has the states in bfloat16, 2 H bytes a token: 0.8 GB for a million tokens of width 384. The other has a byte per
    row, which says whether its states are there.

    The files' names have the fingerprints of the target and the rows. Several processes may fill them at once."""

    def __init__(self, name: Path, run: States, rows: dict[bytes, np.ndarray], width: int) -> None:
        self._name, self._run, self._rows = name, run, list(rows.values())
        self._numbers = {key: number for number, key in enumerate(rows)}
        self._shape = (len(rows), len(self._rows[0]), width)
        self._files: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def open(cls, folder: Path, fingerprint: str, run: States, rows: Iterable[np.ndarray], width: int) -> Self:
        """The cache of these rows [length] and the target with this fingerprint; made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        every = {_key(row): row for row in rows}  # equal rows once
        digest = hashlib.sha256(b"".join([fingerprint.encode(), *every])).hexdigest()[:16]
        return cls(folder / f"states-{digest}", run, every, width)

    def fill(self, layers: Sequence[int], batch: int = 8) -> None:
        """Run the target over all rows whose states are not in the files."""
        files = [self._of_layer(layer) for layer in layers]
        for start in range(0, len(self._rows), batch):
            numbers = range(start, min(start + batch, len(self._rows)))
            missing = [self._rows[n] for n in numbers if not all(filled[n] for _, filled in files)]
            if missing:
                self(torch.from_numpy(np.stack(missing)).long(), layers)

    def __call__(self, input_ids: Tensor, layers: Sequence[int]) -> Tensor:
        """The states in float32. Rows that the cache was not made for are computed and not stored."""
        keys = [_key(row) for row in input_ids.cpu().numpy().astype(np.int32)]
        known = [self._numbers.get(key, -1) for key in keys]
        files = [self._of_layer(layer) for layer in layers]
        missing = [i for i, n in enumerate(known) if n < 0 or not all(filled[n] for _, filled in files)]
        at = torch.tensor(known).clamp_min(0)
        out = torch.stack([states[at] for states, _ in files], -2).to(input_ids.device)
        if missing:
            out[missing] = self._run(input_ids[missing], layers).to(out)
        if new := [i for i in missing if known[i] >= 0]:
            rows = at[new]
            for place, (layer, (states, filled)) in enumerate(zip(layers, files, strict=True)):
                states[rows] = out[new, :, place].cpu()
                with Path(f"{self._name}-{layer}.bin").open("rb") as file:
                    os.fsync(file.fileno())
                filled[rows] = 1  # after the states, on the disk too: another process may read, or the power fail
        return out.float()

    def _of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(states [rows, length, H], which rows are filled), mapped from the layer's files."""
        if layer not in self._files:
            count, length, width = self._shape
            name = f"{self._name}-{layer}"
            states = torch.from_file(f"{name}.bin", True, count * length * width, dtype=torch.bfloat16)
            filled = torch.from_file(f"{name}.rows", True, count, dtype=torch.uint8)
            self._files[layer] = states.view(self._shape), filled
        return self._files[layer]


def _key(row: np.ndarray) -> bytes:
    return hashlib.sha256(row.astype("<i4").tobytes()).digest()[:16]
