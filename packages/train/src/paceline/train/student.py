"""A drafter in training: the states it reads of its frozen target, its distance from the target, and its drafts.

A recipe subclasses `Student`. Its loss and its held-out figures (`measure.py`) then come from here. A further distance
is a function in `loss.DISTANCES`, a further figure a field of `measure.Fit`; all recipes have it then.

Drafts have one form. The draft at position t of a text begins after token t + 1, which the target has just chosen. Its
depth k, counted from 0, predicts token t + 2 + k. The target's distribution of it follows from state t + 1 + k."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.segment import Needs, Segment
from paceline.formats.facts import BEFORE_NORM
from paceline.target.base import Target
from paceline.train.loss import IGNORE, distance


class Student(nn.Module):
    """A drafter whose forward(input_ids, labels) is its loss, [B, T] both: a label is the target's token, or IGNORE.

    teacher   the frozen target, a transformers model.
    loss      the distance that `distance` computes, a name of `loss.DISTANCES`.
    depths    depths that are measured.
    reads     layers whose inputs it reads; the last states, which all drafters learn from, are not named.
    tokens    tokens int64 [K], ascending: those that it drafts and whose probabilities the loss compares; None: all.
    cache     where its states come from, instead of the target's forward.
    begun     the recipe of the head with whose weights it began. earlier: the rows of that training's log.
    kind      the drafter's name in the registry.
    has_tree  whether drafts fill a tree of fixed shape, for which `slots.json` is written.
    at_once   whether one forward drafts all depths."""

    kind = ""
    depths = 5
    reads: tuple[int, ...] = ()
    tokens: Tensor | None = None
    cache: StateCache | None = None
    begun: dict[str, Any] | None = None
    earlier: Sequence[dict[str, Any]] = ()
    has_tree = False
    at_once = False
    compiled = False

    def __init__(self, teacher: Any, loss: str) -> None:
        super().__init__()
        # In a list: the target must not appear among the parameters.
        self._teacher = [teacher.eval().requires_grad_(False)]
        self.loss = loss

    @property
    def teacher(self) -> Any:
        return self._teacher[0]

    @torch.no_grad()
    def target_states(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(inputs of the layers in `reads` and of the final norm, [B, T, reads + 1, H]; the states after that norm)."""
        layers, body = (*self.reads, self.teacher.config.num_hidden_layers), self.teacher.model
        states = self.cache(input_ids, layers) if self.cache else target_states(self.teacher, input_ids, layers)
        return states, body.norm(states[..., -1, :])

    @torch.no_grad()
    def last_states(self, input_ids: Tensor) -> Tensor:
        """The target's states [B, T, H] after its final norm."""
        if self.cache:
            return self.target_states(input_ids)[1]
        last: Tensor = self.teacher.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return last

    def table(self, depth: int = 0) -> Tensor:
        """Weights [V, D] of the output head of a depth; the target's own by default."""
        table: Tensor = self.teacher.lm_head.weight
        return table

    def drafts(self, input_ids: Tensor, depths: int) -> tuple[Tensor, Iterator[Tensor]]:
        """(the target's last states [B, T, H]; for every depth k the inputs of its output head, [B, T - 1 - k, D])."""
        raise NotImplementedError

    def probs(self, hidden: Tensor, depth: int) -> Tensor:
        """The draft's distribution [N, V] for inputs [N, D] of the output head; 0 outside `tokens`."""
        table = self.table(depth)
        rows = table if self.tokens is None else table[self.tokens]
        return spread((hidden @ rows.T).float().softmax(-1), self.tokens, len(table))

    def target_probs(self, last: Tensor) -> Tensor:
        """The target's distribution [N, V] after states [N, H]."""
        probs: Tensor = self.teacher.lm_head(last).float().softmax(-1)
        return probs

    def distance(
        self, hidden: Tensor, last: Tensor, where: Tensor, depth: int = 0, weights: Tensor | None = None
    ) -> Tensor:
        """Mean distance from the target's distribution over the positions of `where` [...].

        hidden [..., D]: inputs of the output head of a depth; last [..., H]: the target's states there.
        weights [...]: of the positions; None: all the same."""
        table, of_target, compiled = self.table(depth), self.teacher.lm_head.weight, self.compiled and self.training
        if self.tokens is not None:
            few = of_target[self.tokens]
            table, of_target = few if table is of_target else table[self.tokens], few
        return distance(self.loss, hidden, table, last, of_target, where, compiled=compiled, weights=weights)

    def read_weights(self) -> tuple[int, int]:
        """How many weights a draft reads whatever its length, and how many for each of its tokens: its cost, where
        reading takes the time."""
        tensors = self.saved()
        own = sum(tensor.numel() for name, tensor in tensors.items() if tensor.ndim > 1 and "embed" not in name)
        table = self.table()
        head = table.shape[1] * (len(table) if self.tokens is None else len(self.tokens))
        if any(name.endswith(("lm_head.weight", "output.weight")) for name in tensors):
            head = 0  # The head is among its own weights.
        return (own + head, 0) if self.at_once else (0, own + head)

    def saved(self) -> dict[str, Tensor]:
        """The drafter's tensors, by their names in its file."""
        return dict(self.named_parameters())

    def facts(self) -> dict[str, Any]:
        """The drafter's own entries in config.json."""
        return {}

    def untrained(self) -> Student | None:
        """A drafter to measure for comparison."""
        return None


def spread(probs: Tensor, tokens: Tensor | None, size: int) -> Tensor:
    """Probabilities [N, K] of `tokens` int64 [K] as probabilities [N, size] of all tokens."""
    return probs if tokens is None else probs.new_zeros(len(probs), size).index_copy_(-1, tokens, probs)


def chain(hidden: Tensor, depths: int) -> Iterator[Tensor]:
    """The second of `Student.drafts` for a model that drafts token by token: hidden [B, T, D] at t predicts t + 1."""
    return (hidden[:, 1 + depth :] for depth in range(depths))


def known_depths(labels: Tensor, depths: int) -> Tensor:
    """bool [B, T, depths]: whether the tokens t + 1 to t + 2 + k after position t are all the target's own."""
    known = labels != IGNORE
    ahead = [torch.cat([known[:, k:], torch.zeros_like(known[:, :k])], 1) for k in range(depths + 1)]
    return torch.stack(ahead, -1).cumprod(-1)[..., 1:].bool()


# States of the target, from its forward or from files -----------------------------------------------------------------

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


def decoder_states(target: Target) -> States:
    """The same by our decoder, which on a CPU takes a sixth less time, in the numbers that drafters read there."""

    def states(input_ids: Tensor, layers: Sequence[int]) -> Tensor:
        places = [BEFORE_NORM if layer == target.num_layers else layer for layer in layers]
        rows = []
        for ids in input_ids.cpu().numpy():
            slot = target.add_row(len(ids))
            try:
                given = target.verify([Segment.chunk(slot, ids, last=True)], Needs(tuple(set(places)))).hidden
                rows.append(torch.stack([given[place] for place in places], -2).float())
            finally:
                target.drop_row(slot)
        return torch.stack(rows).to(input_ids.device)

    return states


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
        every = {_key(row): row for row in rows}  # Equal rows are kept once.
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
                filled[rows] = 1  # Marked after the states are on the disk, for other processes and power cuts.
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
