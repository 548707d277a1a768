"""What a round costs on a machine: milliseconds by nodes, context and shape, filled in by `calibrate` and its like.

    table = Calibration("paceline", 1, 256, nodes=(1, 17), ms=(2.0, 3.0), prompt_tokens=(64, 256), prompt_ms=(6, 20))
    table.round_ms(9)                            # a round that verifies 9 nodes, milliseconds
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from paceline.cost.model import Floats, interpolate
from paceline.errors import PacelineError
from paceline.records import loads


@dataclass(frozen=True)
class Calibration:
    """Milliseconds of rounds on this machine, drafting not counted.

    engine    "paceline" or "transformers"; batch: rows in a round.
    nodes, ms           rounds over so many nodes of all rows together, chains, with `context` tokens behind each row.
    prompt_tokens, prompt_ms            two prompts, of all rows together, up to the first new token.
    tree_nodes, tree_ms                 as nodes and ms, trees.
    long_context, long_nodes, long_ms   chains with so many tokens behind each row.
    token_ms                            each accepted token: keeping it and writing its text.
    drafting_ms                         each round that drafts, beside its forward and its drafting.
    drafted_ms                          each token that it drafts, where drafting is not told."""

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
    drafting_ms: float = 0.0
    drafted_ms: float = 0.0

    def round_ms(self, nodes: float, context: float | None = None, tree: bool = False) -> float:
        """A round over `nodes` nodes of all rows together, with `context` tokens behind each row (None: as many as
        were calibrated with), none of them accepted."""
        return float(self.rounds_ms(nodes, self.context if context is None else context, tree))

    def rounds_ms(
        self, nodes: ArrayLike, contexts: ArrayLike, trees: ArrayLike = False, accepted: ArrayLike = 0
    ) -> Floats:
        """The same of many rounds, which accepted so many drafted tokens; the arguments broadcast against each other.
        trees: share of the rows whose draft is a tree."""
        at = np.asarray(nodes, float)
        ms = interpolate(self.nodes, self.ms, at) + self.token_ms * np.asarray(accepted, float)
        if self.tree_nodes:
            dearer = np.array(self.tree_ms) - interpolate(self.nodes, self.ms, self.tree_nodes)
            ms = ms + np.asarray(trees, float) * np.interp(at, (self.batch, *self.tree_nodes), (0.0, *dearer))
        if self.long_nodes:
            usual = interpolate(self.nodes, self.ms, self.long_nodes)
            longer = np.array(self.long_ms) - usual
            # Rounds at most proportional to their context, which noise may deny: none takes less than nothing.
            slope = np.clip(longer / (self.long_context - self.context), 0.0, usual / self.context)
            ms = ms + np.interp(at, self.long_nodes, slope) * (np.asarray(contexts, float) - self.context)
        return np.asarray(ms)

    def first_token_ms(self, tokens: float) -> float:
        """From a prompt of so many tokens, of all rows together, to its first new token: a straight line."""
        (a, b), (of_a, of_b) = self.prompt_tokens, self.prompt_ms
        return max(of_a + (of_b - of_a) * (tokens - a) / (b - a), 0.0)

    def at_pace(self, factor: float) -> Calibration:
        """The same where everything takes so many times as long."""
        told = asdict(self)
        for name in (name for name in told if name.endswith("ms")):
            ms = told[name]
            told[name] = tuple(factor * each for each in ms) if isinstance(ms, tuple) else factor * ms
        return Calibration(**told)

    @property
    def prompt_ms_per_token(self) -> float:
        """Milliseconds that each further token of a prompt takes."""
        return self.first_token_ms(self.prompt_tokens[-1] + 1) - self.first_token_ms(self.prompt_tokens[-1])

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """PacelineError if it is not a calibration."""
        try:
            found: dict[str, Any] = loads(text)
            found |= {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
            return cls(**found)
        except (ValueError, TypeError, AttributeError) as error:
            names = ", ".join(f.name for f in fields(cls))
            raise PacelineError(f"not a calibration ({error}); it has {names}") from None
