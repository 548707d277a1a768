"""States of a frozen target over training rows, kept in a file: several trainings of heads share one forward.

    cache = StateCache.open(folder, teacher, rows)
    cache.of(input_ids)                        # [B, T, H], run and written where it is not there yet

Before the final norm, in bfloat16: 2 H bytes a token, 0.8 GB for a million tokens of 384 numbers. The file is made for
one target and one set of rows, whose fingerprints are in its name, and several processes may fill it at once.

Doesn't know: what is trained.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.train.data import Rows

States = Callable[[Tensor], Tensor]
"""Token ids [B, T] to states [B, T, H]."""


class StateCache:
    """A file of states [rows, T, H], and a byte for each row that says whether it is there."""

    def __init__(self, file: Path, run: States, numbers: Mapping[bytes, int], length: int, width: int) -> None:
        size = len(numbers) * length * width
        data = torch.from_file(str(file), shared=True, size=size, dtype=torch.bfloat16)
        self._states = data.view(len(numbers), length, width)
        self._filled = torch.from_file(
            str(file.with_suffix(".rows")), shared=True, size=len(numbers), dtype=torch.uint8
        )
        self._run, self._numbers = run, numbers

    @classmethod
    def open(cls, folder: Path, fingerprint: str, run: States, rows: Mapping[str, Rows], width: int) -> "StateCache":
        """The cache of these rows and the target of that fingerprint, made now if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        every = [row for ids, _ in rows.values() for row in ids]
        numbers = {_key(row): number for number, row in enumerate(every)}
        digest = hashlib.sha256(b"".join([fingerprint.encode(), *numbers])).hexdigest()[:16]
        return cls(folder / f"states-{digest}.bin", run, numbers, len(every[0]), width)

    def of(self, input_ids: Tensor) -> Tensor:
        """States [B, T, H] of rows [B, T]; rows that are not among those of the cache are run and not kept."""
        keys = [_key(row) for row in input_ids.cpu().numpy().astype(np.int32)]
        known = [self._numbers.get(key, -1) for key in keys]
        missing = [i for i, number in enumerate(known) if number < 0 or not self._filled[number]]
        out = self._states[torch.tensor(known).clamp_min(0)].to(input_ids.device)
        if missing:
            out[missing] = self._run(input_ids[missing]).to(out)
        for i in missing:
            if known[i] >= 0:
                self._states[known[i]] = out[i].cpu()
                self._filled[known[i]] = 1  # after the states: another process may be reading
        return out


def _key(row: np.ndarray) -> bytes:
    return hashlib.sha256(row.astype("<i4").tobytes()).digest()[:16]
