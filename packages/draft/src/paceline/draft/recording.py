"""Drafters without our engine: `Recording` replaces a model, and `Chains` serves hosts that cannot verify trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from paceline.draft.base import Ask, Drafter, DraftTree
from paceline.draft.fallback import Fallback
from paceline.formats.facts import Facts
from paceline.formats.tokenizer import Tokenizer


@dataclass
class Recording:
    """A model's facts, for a drafter that is bound to recorded answers or to another engine's model.

    dtype, device  names, or as torch has them, if they are another model's."""

    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    name: str = "a recording"
    weights_fingerprint: str = ""
    max_context: int = 1 << 40
    num_layers: int = 0
    hidden_size: int = 0
    dtype: Any = "float32"
    device: Any = "cpu"
    quantised: str | None = None
    activations: int | None = None
    exact: bool = False
    folder: Path | None = None
    brings_head: bool = False
    threads: None = None
    ends: None = None
    inside: None = None

    @classmethod
    def elsewhere(cls, model: Facts, **own: Any) -> Recording:
        """Copy the facts of `model` for a place where it does not run. own: facts that differ there."""
        here = ("threads", "ends", "inside")
        return cls(**{f.name: getattr(model, f.name) for f in fields(cls) if f.name not in here} | own)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Recording:
        """Make a recording in the tokens of a tokenizer, which must have an end token (`open_tokenizer` checks)."""
        assert tokenizer.eos_token_id is not None
        return cls(tokenizer, (tokenizer.eos_token_id,), tokenizer.vocab_size)


class Chains(Fallback):
    """Reduces the drafts of `inner`, which may be bound already, to the best chain of each tree.

    vocab_size  a chain ends before the first token id that is not below this; None: there is no limit."""

    def __init__(self, inner: Drafter, vocab_size: int | None = None):
        super().__init__([inner])
        self.vocab_size = vocab_size

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        return [self._chain(tree, ask.most) for tree, ask in zip(super().propose(asks), asks, strict=True)]

    def _chain(self, tree: DraftTree, most: int) -> DraftTree:
        chain = tree.trunk()[:most]
        if self.vocab_size is not None:
            unknown = np.flatnonzero((chain < 0) | (chain >= self.vocab_size))
            chain = chain[: unknown[0]] if len(unknown) else chain
        if tree.is_chain and len(chain) == tree.num_drafted and tree.probe is None:
            return tree
        return DraftTree.chain(int(tree.tokens[0]), chain, source=tree.source, owner=tree.owner, calls=tree.calls)
