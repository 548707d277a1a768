"""A drafter in training: what it reads of its frozen target, its distance from it, and what it drafts.

A recipe subclasses `Student`. Its loss and its held-out figures (`measure.py`) then come from here. A further distance
is a function in `loss.DISTANCES`, a further figure a field of `measure.Fit`; all recipes have it then.

Drafts have one form. The draft at position t of a text begins after token t + 1, which the target has just chosen. Its
depth k, counted from 0, predicts token t + 2 + k. The target's distribution of that token follows from its state at
t + 1 + k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.train.loss import IGNORE, distance


class Student(nn.Module):
    """A drafter whose forward(input_ids, labels) is its loss. input_ids, labels [B, T]; a label is the next token, or
    IGNORE if that is not the target's own.

    teacher   the frozen target, a transformers model.
    loss      the distance that `distance` computes, a name of `loss.DISTANCES`.
    depths    depths that are measured.
    kind      the drafter's name in the registry.
    has_tree  whether drafts fill a tree of fixed shape, for which `slots.json` is written."""

    kind = ""
    depths = 5
    has_tree = False
    compiled = False

    def __init__(self, teacher: Any, loss: str) -> None:
        super().__init__()
        # In a list: the target must not appear among the parameters.
        self._teacher = [teacher.eval().requires_grad_(False)]
        self.loss = loss

    @property
    def teacher(self) -> Any:
        """The frozen target."""
        return self._teacher[0]

    @torch.no_grad()
    def last_states(self, input_ids: Tensor) -> Tensor:
        """The target's states [B, T, H] after its final norm."""
        last: Tensor = self.teacher.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return last

    def table(self, depth: int = 0) -> Tensor:
        """Weights [V, D] of the output head of a depth; the target's own by default."""
        table: Tensor = self.teacher.lm_head.weight
        return table

    def drafts(self, input_ids: Tensor, depths: int) -> tuple[Tensor, Iterator[Tensor]]:
        """(the target's last states after the final norm, [B, T, H]; for every depth k the inputs of its output head,
        [B, T - 1 - k, D])."""
        raise NotImplementedError

    def probs(self, hidden: Tensor, depth: int) -> Tensor:
        """The draft's distribution [N, V] for inputs [N, D] of the output head."""
        return (hidden @ self.table(depth).T).float().softmax(-1)

    def target_probs(self, last: Tensor) -> Tensor:
        """The target's distribution [N, V] after states [N, H]."""
        probs: Tensor = self.teacher.lm_head(last).float().softmax(-1)
        return probs

    def distance(self, hidden: Tensor, last: Tensor, where: Tensor, depth: int = 0) -> Tensor:
        """Mean distance from the target's distribution over the positions of `where` [...].

        hidden [..., D]: inputs of the output head of a depth; last [..., H]: the target's states there."""
        table, of_target, compiled = self.table(depth), self.teacher.lm_head.weight, self.compiled and self.training
        return distance(self.loss, hidden, table, last, of_target, where, compiled=compiled)

    def saved(self) -> dict[str, Tensor]:
        """The drafter's tensors, by their names in its file."""
        return dict(self.named_parameters())

    def facts(self) -> dict[str, Any]:
        """The drafter's own entries in config.json."""
        return {}

    def untrained(self) -> Student | None:
        """A drafter to measure for comparison."""
        return None


def chain(hidden: Tensor, depths: int) -> Iterator[Tensor]:
    """The second of `Student.drafts` for a model that drafts token by token: hidden [B, T, D] at t predicts t + 1."""
    return (hidden[:, 1 + depth :] for depth in range(depths))


def known_depths(labels: Tensor, depths: int) -> Tensor:
    """bool [B, T, depths]: whether the tokens t + 1 to t + 2 + k after position t are all the target's own."""
    known = labels != IGNORE
    ahead = [torch.cat([known[:, k:], torch.zeros_like(known[:, :k])], 1) for k in range(depths + 1)]
    return torch.stack(ahead, -1).cumprod(-1)[..., 1:].bool()
