"""What a round costs on a machine: a table of milliseconds by nodes, context and shape, filled in by `calibrate`.

    table = Calibration("paceline", 1, 256, nodes=(1, 17), ms=(2.0, 3.0), prompt_tokens=(64, 256), prompt_ms=(6, 20))
    table.round_ms(9)                            # a round that verifies 9 nodes, milliseconds
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from paceline.cost.model import Floats, interpolate


@dataclass(frozen=True)
class Calibration:
    """Milliseconds of rounds on this machine, without the drafter's time.

    engine    "paceline"; batch: rows in a round.
    nodes, ms           rounds by the nodes of all rows together; chains, on a context of `context` tokens in each row.
    prompt_tokens, prompt_ms            two prompts, of all rows together, up to the first new token.
    tree_nodes, tree_ms                 as nodes and ms, for trees.
    long_context, long_nodes, long_ms   chains with a context of `long_context` tokens in each row.
    token_ms                            each accepted token: keeping it and writing its text."""

    engine: str
    batch: int
    context: int
    nodes: tuple[int, ...]
    ms: tuple[float, ...]
    prompt_tokens: tuple[int, int]
    prompt_ms: tuple[float, float]
    tree_nodes: tuple[int, ...] = ()
    tree_ms: tuple[float, ...] = ()
    long_context: int = 0
    long_nodes: tuple[int, ...] = ()
    long_ms: tuple[float, ...] = ()
    token_ms: float = 0.0

    def round_ms(self, nodes: float, context: float | None = None, tree: bool = False) -> float:
        """A round over `nodes` nodes of all rows together that accepts none of them, with a context of `context` tokens
        in each row (None: the one of the calibration)."""
        return float(self.rounds_ms(nodes, self.context if context is None else context, tree))

    def rounds_ms(
        self, nodes: ArrayLike, contexts: ArrayLike, trees: ArrayLike = False, accepted: ArrayLike = 0
    ) -> Floats:
        """The same of many rounds; the arguments broadcast against each other.

        trees: share of the rows whose draft is a tree; accepted: drafted tokens that each round accepted."""
        at = np.asarray(nodes, float)
        ms = interpolate(self.nodes, self.ms, at) + self.token_ms * np.asarray(accepted, float)
        if self.tree_nodes:
            dearer = np.array(self.tree_ms) - interpolate(self.nodes, self.ms, self.tree_nodes)
            ms = ms + np.asarray(trees, float) * np.interp(at, (self.batch, *self.tree_nodes), (0.0, *dearer))
        if self.long_nodes:
            usual = interpolate(self.nodes, self.ms, self.long_nodes)
            longer = np.array(self.long_ms) - usual
            # Noise may give a slope that makes short contexts free: a round is at most proportional to its context.
            slope = np.clip(longer / (self.long_context - self.context), 0.0, usual / self.context)
            ms = ms + np.interp(at, self.long_nodes, slope) * (np.asarray(contexts, float) - self.context)
        return np.asarray(ms)
