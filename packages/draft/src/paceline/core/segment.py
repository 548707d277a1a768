"""Segment, Needs and Verdict: the input of a target's forward, what drafters want of it, and its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from paceline.core.tree import DraftTree, IntArray, depths

if TYPE_CHECKING:
    import torch

_UNKNOWN: IntArray = np.empty(0, np.int64)

Sees = Literal["ancestors", "all", "none"]


@dataclass(slots=True)
class Segment:
    """A row's tokens in a forward: a tree, or a chunk of the prompt (a chain).

    slot        the row's slot in the cache; the target knows the row's committed length.
    tokens      int64 [n]. parent: int64 [n], as in DraftTree.
    start       number of the first node to run. Keys and values of earlier nodes are in the cache: a drafter ran them.
    num_logits  how many nodes, the last ones, need logits.
    hidden      [n - start, H] or None: states of the nodes before layer `resume_layer`; earlier layers are not run.
    depth       int64 [n]: depth of each node, 0 for the first; computed if not given.
    is_prompt   whether the tokens are a piece of the row's prompt.
    sees        which nodes a node sees beside the row's committed tokens: its "ancestors" and itself; "all"; or "none",
                and all nodes then have the same position. A target runs the first kind, drafters' layers all three."""

    slot: int
    tokens: IntArray
    parent: IntArray
    start: int = 0
    num_logits: int = 0
    hidden: torch.Tensor | None = None
    depth: IntArray = field(default_factory=lambda: _UNKNOWN)
    is_prompt: bool = False
    sees: Sees = "ancestors"

    def __post_init__(self) -> None:
        if self.depth is _UNKNOWN:
            self.depth = depths(self.parent)

    @property
    def num_run(self) -> int:
        """Number of nodes that the forward runs."""
        return len(self.tokens) - self.start

    def longer(self, count: int) -> Segment:
        """Add a chain of `count` nodes with token 0."""
        n = len(self.tokens)
        return Segment(
            self.slot,
            np.concatenate([self.tokens, np.zeros(count, np.int64)]),
            np.concatenate([self.parent, np.arange(n - 1, n + count - 1)]),
            self.start,
            self.num_logits,
            self.hidden,
            np.concatenate([self.depth, self.depth[-1] + 1 + np.arange(count)]),
            self.is_prompt,
        )

    @classmethod
    def tree(cls, slot: int, tree: DraftTree) -> Segment:
        """Make a segment that verifies all nodes of `tree`."""
        return cls(slot, tree.tokens, tree.parent, num_logits=len(tree), hidden=tree.hidden, depth=tree.depth)

    @classmethod
    def chunk(cls, slot: int, tokens: IntArray, last: bool, scored: int = 0) -> Segment:
        """Make a segment of a piece of a prompt. scored: how many last tokens need logits. last: the last token
        does."""
        return cls(slot, tokens, np.arange(-1, len(tokens) - 1), num_logits=max(int(last), scored), is_prompt=True)

    @classmethod
    def apart(cls, slot: int, tokens: IntArray, num_logits: int) -> Segment:
        """Make a segment of nodes that see the row's committed tokens alone."""
        above, depth = np.full(len(tokens), -1), np.zeros(len(tokens), np.int64)
        return cls(slot, tokens, above, num_logits=num_logits, depth=depth, sees="none")


@dataclass(frozen=True)
class Needs:
    """The outputs and hooks of the target's forward that a drafter needs.

    hidden_layers   hidden states: l is the input of layer l (0: the embeddings), num_layers the output of the final
                    norm, BEFORE_NORM its input. The drafter gets them for all tokens, prompts included.
    new_layers      the same for tokens that the target runs. Those that a row takes over from another have none.
    top_k           number of best logits of each verified node.
    resume_layer    the drafter itself runs drafted nodes through the layers below this one, and leaves their states in
                    `Segment.hidden`; the target runs the other layers.
    callback_layer  number of layers after which `Drafter.on_layer` is called."""

    hidden_layers: tuple[int, ...] = ()
    new_layers: tuple[int, ...] = ()
    top_k: int = 0
    resume_layer: int | None = None
    callback_layer: int | None = None

    @property
    def whole_prompt(self) -> bool:
        """Whether the drafter needs the states of all prompt tokens, run or reused."""
        return bool(self.hidden_layers) or self.callback_layer is not None

    @property
    def all_layers(self) -> tuple[int, ...]:
        """The layers whose states the forward returns."""
        return tuple(sorted({*self.hidden_layers, *self.new_layers}))

    def __or__(self, other: Needs) -> Needs:
        """Join the needs of two drafters."""
        return Needs(
            tuple(sorted({*self.hidden_layers, *other.hidden_layers})),
            tuple(sorted({*self.new_layers, *other.new_layers})),
            max(self.top_k, other.top_k),
            self.resume_layer if self.resume_layer is not None else other.resume_layer,
            self.callback_layer if self.callback_layer is not None else other.callback_layer,
        )


@dataclass(slots=True)
class Verdict:
    """The output of a forward, packed in the order of the segments.

    logits     [M, V] for the nodes whose logits were wanted, in the model's dtype.
    logits_at  segment s has logits[logits_at[s] : logits_at[s + 1]].
    hidden     by layer: [N, H] for all nodes that were run. hidden_at: like logits_at, for hidden.
    top_k      (values [M, k], token ids [M, k]) or None."""

    logits: torch.Tensor
    logits_at: list[int]
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden_at: list[int] = field(default_factory=list)
    top_k: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def on(
        cls, segments: Sequence[Segment], logits: torch.Tensor, hidden: dict[int, torch.Tensor], top_k: Any = None
    ) -> Verdict:
        """Make the verdict of these segments, whose logits and states are packed in their order."""
        counts = [s.num_logits for s in segments], [s.num_run for s in segments]
        logits_at, hidden_at = ([*accumulate(each, initial=0)] for each in counts)
        return cls(logits, logits_at, hidden, hidden_at, top_k)

    def count(self, s: int) -> int:
        """Number of nodes of segment s that have logits."""
        return self.logits_at[s + 1] - self.logits_at[s]

    def of(self, s: int) -> torch.Tensor:
        """Logits [n, V] of segment s."""
        return self.logits[self.logits_at[s] : self.logits_at[s + 1]]

    def select(self, logits: Sequence[slice]) -> Verdict:
        """The verdict with fewer logits: segment i keeps the slice `logits[i]` of the packed logits."""

        def joined(packed: torch.Tensor) -> torch.Tensor:
            return packed[[row for part in logits for row in range(part.start, part.stop)]]

        ends = list(accumulate((part.stop - part.start for part in logits), initial=0))
        top_k = None if self.top_k is None else (joined(self.top_k[0]), joined(self.top_k[1]))
        return Verdict(joined(self.logits), ends, self.hidden, self.hidden_at, top_k)
