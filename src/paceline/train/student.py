"""A drafter in training: what it reads of its frozen target, its distance from it, and what it drafts.

A recipe subclasses `Student`. Its loss and its held-out figures (`measure.py`) then come from here. A further distance
is a function in `loss.DISTANCES`, a further figure a field of `measure.Fit`; all recipes have it then.

Drafts have one form. The draft at position t of a text begins after token t + 1, which the target has just chosen. Its
depth k, counted from 0, predicts token t + 2 + k. The target's distribution of it follows from state t + 1 + k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.train.loss import IGNORE, distance
from paceline.train.states import StateCache, target_states


class Student(nn.Module):
    """A drafter whose forward(input_ids, labels) is its loss, [B, T] both: a label is the target's token, or IGNORE.

    teacher   the frozen target, a transformers model.
    loss      the distance that `distance` computes, a name of `loss.DISTANCES`.
    depths    depths that are measured.
    reads     layers whose inputs it reads; the last states, which all drafters learn from, are not named.
    tokens    tokens int64 [K], ascending: those that it drafts and whose probabilities the loss compares; None: all.
    cache     where its states come from, instead of the target's forward.
    kind      the drafter's name in the registry.
    has_tree  whether drafts fill a tree of fixed shape, for which `slots.json` is written."""

    kind = ""
    depths = 5
    reads: tuple[int, ...] = ()
    tokens: Tensor | None = None
    cache: StateCache | None = None
    has_tree = False
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

    def distance(self, hidden: Tensor, last: Tensor, where: Tensor, depth: int = 0) -> Tensor:
        """Mean distance from the target's distribution over the positions of `where` [...].

        hidden [..., D]: inputs of the output head of a depth; last [..., H]: the target's states there."""
        table, of_target, compiled = self.table(depth), self.teacher.lm_head.weight, self.compiled and self.training
        if self.tokens is not None:
            few = of_target[self.tokens]
            table, of_target = few if table is of_target else table[self.tokens], few
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
