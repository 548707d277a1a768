"""Draft models out of tables, and the drafter `model` on them, for tests that need no weights.

target = TableTarget(vocab_size=8, order=2, seed=4)
engine = Engine(target, drafter(like(target, noise=1.0), stop="svip"))
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from paceline.core.request import Row
from paceline.draft.methods.model import Model, OwnTokenizerConfig
from paceline.draft.models.draft_model import TextModel
from paceline.draft.models.stop import RULES
from paceline.target.base import Needs
from tests.asks import asked
from tests.fakes import TableTarget

SPECS = {
    **{rule: {"stop": rule} for rule in RULES},
    "short": {"stop": "fixed", "draft": 1},
    "tree": {"stop": "fixed", "tree": 7, "width": 2},
    "wide tree": {"stop": "svip", "tree": 12, "width": 4},
}
"""Options of a drafter with a model: every stop rule, chains and trees."""


class DraftTable(TableTarget):
    """A table as a draft model: a row's nodes are run in several forwards, and committed after other rows' forwards.

    ran  for every forward, how many nodes it ran of each of its rows."""

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.ran = []
        self._before = {}

    def verify(self, segments, needs=Needs(), on_layer=None, clock=None):  # fmt: skip
        self._before = dict(self._running)
        verdict = super().verify(segments, needs, on_layer, clock)
        self._running = self._before | self._running
        self.ran.append([len(segment.tokens) - segment.start for segment in segments])
        return verdict

    def _check(self, segment):
        if segment.start:
            before = self._before[segment.slot]
            assert segment.start == len(before.tokens), "what was run is behind the row, no more and no less"
            assert (segment.tokens[: segment.start] == before.tokens).all()
            assert (segment.parent[: segment.start] == before.parent).all()
        assert segment.start < len(segment.tokens), "nothing to run"
        super()._check(replace(segment, start=0))


def like(target, noise=1.0, seed=1, **kw):
    """A draft model whose logits are the target's with some noise; without any it is the target."""

    def logits(prefix):
        random = np.random.default_rng([seed, len(prefix), *prefix])
        return target.logits_after(prefix).numpy() + noise * random.normal(size=target.vocab_size)

    return DraftTable(target.vocab_size, order=target.order, max_context=target.max_context, logits=logits, **kw)


def drafter(model, **options):
    """`model` with a draft model that is already there."""
    return OnModel(model, OwnTokenizerConfig(checkpoint="given", **options))


class OnModel(Model):
    """Checks, before every round, that the draft model holds the row's tokens and how far."""

    model: TextModel

    def __init__(self, network, config):
        super().__init__(config)
        self.network = network
        self.lags = []

    def open(self, target):
        few = self.network.vocab_size < target.vocab_size
        columns = torch.arange(self.network.vocab_size) if few else None
        return TextModel(self.network, target.vocab_size, columns, context=self.config.context)

    def propose(self, asks):
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

    def __init__(self, made, target, params):
        made.bind(target)
        self.made, self.params = made, params  # drafts of 3 tokens

    def __call__(self, tokens, new, noise):
        params = replace(self.params, max_tokens=new + 4)
        row = Row(0, tokens[: len(tokens) - new], params, max_context=1 << 20)
        row.extend(tokens[len(tokens) - new :])
        row.noise = noise
        self.made.start(row)
        (tree,) = self.made.propose(asked(row))
        self.made.drop(row)
        return tree


def positions(signals, otherwise):
    """Logits that depend on the number of tokens before alone."""
    return lambda prefix: signals.get(len(prefix), otherwise)
