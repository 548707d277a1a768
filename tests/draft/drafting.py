"""Draft models out of tables, and the drafter `model` on them, for tests that need no weights.

target = TableTarget(vocab_size=8, order=2, seed=4)
engine = Engine(target, drafter(like(target, noise=1.0), stop="svip"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paceline.core.clock import Clock
from paceline.core.noise import Noise
from paceline.core.request import Row
from paceline.core.sampling import SamplingParams
from paceline.core.segment import Segment, Verdict
from paceline.core.tree import DraftTree
from paceline.draft.base import Ask
from paceline.draft.methods.model import Model, OwnTokenizerConfig
from paceline.draft.models.draft_model import TextModel
from paceline.draft.models.stop import RULES
from paceline.target.base import LayerCallback, Needs, Target
from tests.asks import asked
from tests.fakes import Prefix, TableTarget

SPECS: dict[str, dict[str, Any]] = {
    **{rule: {"stop": rule} for rule in RULES},
    "short": {"stop": "fixed", "draft": 1},
    "tree": {"stop": "fixed", "tree": 7, "width": 2},
    "wide tree": {"stop": "svip", "tree": 12, "width": 4},
}
"""Options of a drafter with a model: every stop rule, chains and trees."""


class DraftTable(TableTarget):
    """A table as a draft model: a row's nodes are run in several forwards, and committed after other rows' forwards.

    ran  for every forward, how many nodes it ran of each of its rows."""

    def __init__(self, *args: Any, **kw: Any):
        super().__init__(*args, **kw)
        self.ran: list[list[int]] = []
        self._before: dict[int, Segment] = {}

    def verify(
        self, segments: Sequence[Segment], needs: Needs = Needs(), on_layer: LayerCallback | None = None,
        clock: Clock | None = None,
    ) -> Verdict:  # fmt: skip
        self._before = dict(self._running)
        verdict = super().verify(segments, needs, on_layer, clock)
        self._running = self._before | self._running
        self.ran.append([len(segment.tokens) - segment.start for segment in segments])
        return verdict

    def _check(self, segment: Segment) -> None:
        if segment.start:
            before = self._before[segment.slot]
            assert segment.start == len(before.tokens), "what was run is behind the row, no more and no less"
            assert (segment.tokens[: segment.start] == before.tokens).all()
            assert (segment.parent[: segment.start] == before.parent).all()
        assert segment.start < len(segment.tokens), "nothing to run"
        super()._check(replace(segment, start=0))


def like(target: TableTarget, noise: float = 1.0, seed: int = 1, **kw: Any) -> DraftTable:
    """A draft model whose logits are the target's with some noise; without any it is the target."""

    def logits(prefix: Prefix) -> np.ndarray:
        random = np.random.default_rng([seed, len(prefix), *prefix])
        return target.logits_after(prefix).numpy() + noise * random.normal(size=target.vocab_size)

    return DraftTable(target.vocab_size, order=target.order, max_context=target.max_context, logits=logits, **kw)


def drafter(model: Target, **options: Any) -> OnModel:
    """`model` with a draft model that is already there."""
    return OnModel(model, OwnTokenizerConfig(checkpoint="given", **options))


class OnModel(Model):
    """Checks, before every round, that the draft model holds the row's tokens and how far."""

    model: TextModel

    def __init__(self, network: Target, config: OwnTokenizerConfig):
        super().__init__(config)
        self.network = network
        self.lags: list[int] = []

    def open(self, target: Target) -> TextModel:
        few = self.network.vocab_size < target.vocab_size
        columns = torch.arange(self.network.vocab_size) if few else None
        return TextModel(self.network, target.vocab_size, columns, context=self.config.context)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        rows = [row for row, _ in asks]
        for row in rows:
            cached = self.model.length(row)
            assert cached < len(row)
            self.lags.append(len(row) - 1 - cached)
            if isinstance(self.network, TableTarget):
                held = self.network.rows(self.model.slot(row))
                assert held == row.tokens[cached - len(held) : cached].tolist()
                assert self.config.context is not None or len(held) == cached
        trees = super().propose(asks)
        for row, tree in zip(rows, trees, strict=True):
            assert tree.max_depth <= row.max_draft
        return trees


class Replaying:
    """What a drafter proposes behind some tokens as a function without a memory, for enumeration."""

    def __init__(self, made: Model, target: TableTarget, params: SamplingParams):
        made.bind(target)
        self.made, self.params = made, params  # drafts of 3 tokens

    def __call__(self, tokens: Sequence[int], new: int, noise: Noise) -> DraftTree:
        params = replace(self.params, max_tokens=new + 4)
        row = Row(0, tokens[: len(tokens) - new], params, max_context=1 << 20)
        row.extend(tokens[len(tokens) - new :])
        row.noise = noise
        self.made.start(row)
        (tree,) = self.made.propose(asked(row))
        self.made.drop(row)
        return tree


def positions(signals: Mapping[int, np.ndarray], otherwise: np.ndarray) -> Callable[[Prefix], np.ndarray]:
    """Logits that depend on the number of tokens before alone."""
    return lambda prefix: signals.get(len(prefix), otherwise)
