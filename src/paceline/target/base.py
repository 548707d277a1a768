"""Target: the interface of the model whose output must not change. Knows nothing of drafters or acceptance.

A target owns a ragged cache: every row has a slot and a length of its own. `verify` runs segments (a row's tree, or
a chunk of its prompt) through the model in ONE forward, writing their keys and values behind the row; `commit` keeps
those of the accepted path and forgets the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.clock import Clock
from paceline.target.tokenizer import Tokenizer
from paceline.tree import DraftTree, IntArray, depths


@dataclass(frozen=True)
class Needs:
    """What a drafter asks of the target's forward; the engine provides just that.

    hidden_layers  hidden states wanted: l means the input of layer l (l = 0: the embeddings), num_layers means
                   after the final norm. Given for every token of the forward, prompts included.
    top_k          that many best logits of every verified node.
    resume_layer   layers 0..resume_layer-1 of drafted nodes are the drafter's own work: segments may come with
                   `hidden`, and the target goes on from there.
    callback_layer call `Drafter.on_layer` when this many layers are done.
    """

    hidden_layers: tuple[int, ...] = ()
    top_k: int = 0
    resume_layer: int | None = None
    callback_layer: int | None = None

    def __or__(self, other: Needs) -> Needs:
        """What two drafters need together."""
        return Needs(
            tuple(sorted({*self.hidden_layers, *other.hidden_layers})),
            max(self.top_k, other.top_k),
            self.resume_layer if self.resume_layer is not None else other.resume_layer,
            self.callback_layer if self.callback_layer is not None else other.callback_layer,
        )


_UNKNOWN: IntArray = np.empty(0, np.int64)


def _unknown() -> IntArray:
    return _UNKNOWN


@dataclass(slots=True)
class Segment:
    """Tokens of one row in one forward: a tree, or a chunk of the prompt (a chain).

    slot     the row's slot in the cache; the row's committed length is the target's to know.
    tokens   int64 [n]; parent int64 [n] as in DraftTree.
    start    nodes before `start` already have their keys and values behind the row (a self-drafter put them there);
             only nodes start..n-1 are run.
    num_logits  logits are wanted for the last `num_logits` nodes.
    depth    int64 [n]: how far each node is below the first; worked out if not given.
    hidden   [n - start, H] or None: states of the nodes after layer `resume_layer - 1`; those layers are not run.
    """

    slot: int
    tokens: IntArray
    parent: IntArray
    start: int = 0
    num_logits: int = 0
    hidden: torch.Tensor | None = None
    depth: IntArray = field(default_factory=_unknown)

    def __post_init__(self) -> None:
        if self.depth is _UNKNOWN:
            self.depth = depths(self.parent)

    def longer(self, count: int) -> Segment:
        """With so many nodes more, one below the other, whose tokens are 0."""
        n = len(self.tokens)
        return Segment(
            self.slot,
            np.concatenate([self.tokens, np.zeros(count, np.int64)]),
            np.concatenate([self.parent, np.arange(n - 1, n + count - 1)]),
            self.start,
            self.num_logits,
            self.hidden,
            np.concatenate([self.depth, self.depth[-1] + 1 + np.arange(count)]),
        )

    @classmethod
    def tree(cls, slot: int, tree: DraftTree) -> Segment:
        """Verify every node of `tree`."""
        return cls(slot, tree.tokens, tree.parent, num_logits=len(tree), hidden=tree.hidden, depth=tree.depth)

    @classmethod
    def chunk(cls, slot: int, tokens: IntArray, last: bool) -> Segment:
        """Known tokens, one after another; logits behind the last one if `last`."""
        return cls(slot, tokens, np.arange(-1, len(tokens) - 1), num_logits=int(last))


@dataclass(slots=True)
class Verdict:
    """What one forward says, packed in the order of the segments.

    logits          [M, V] for the nodes whose logits were wanted, in the model's dtype.
    logits_at       where segment s begins: its logits are logits[logits_at[s] : logits_at[s + 1]].
    hidden          {layer: [N, H]} for all nodes that were run; hidden_at as logits_at.
    top_k           (values [M, k], token ids [M, k]) or None.
    """

    logits: torch.Tensor
    logits_at: list[int]
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden_at: list[int] = field(default_factory=list)
    top_k: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, s: int) -> torch.Tensor:
        """Logits of segment s, [its num_logits, V]."""
        return self.logits[self.logits_at[s] : self.logits_at[s + 1]]


LayerCallback = Callable[[int, torch.Tensor], None]
"""Called as callback(layers done, hidden [N, H]) in the middle of a forward."""


class Target(ABC):
    """A model behind the one loop.

    vocab_size, num_layers, hidden_size, max_context (tokens a row may hold) and eos_token_ids are plain attributes, and
    so is weight_bytes, the bytes of weights that a forward over one token reads: all but the input embedding, of which
    it reads one row, unless that is the output head as well. weights_fingerprint tells one training from another.
    `tokenizer` is the engine's, if it has one: drafters with token ids on disk compare its fingerprint with theirs.
    `clock` is the engine's; verify books its parts "prepare", "layers" and "head" there.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int = 0
    weights_fingerprint: str = ""
    name: str
    dtype: torch.dtype
    device: torch.device
    clock: Clock
    tokenizer: Tokenizer | None = None

    def check(self, needs: Needs) -> None:  # noqa: B027
        """Raise ModelError if this target cannot give a drafter what it needs."""

    @abstractmethod
    def add_row(self, expected_length: int) -> int:
        """A slot for a new, empty row; room for `expected_length` tokens is made at once, more when needed."""

    @abstractmethod
    def drop_row(self, slot: int) -> None:
        """Free a slot."""

    @abstractmethod
    def length(self, slot: int) -> int:
        """Committed tokens of a row that the cache holds."""

    @abstractmethod
    def verify(
        self, segments: Sequence[Segment], needs: Needs = Needs(), on_layer: LayerCallback | None = None
    ) -> Verdict:
        """One forward over every segment. Nothing is committed."""

    @abstractmethod
    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the keys and values of the nodes `path` (node numbers of the segment just run, in order, 0 first)
        as the row's next tokens, and forget the segment's other nodes."""
