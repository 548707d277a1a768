"""From acceptance to time: what a replay would have gained on a machine whose forwards cost so and so much.

    cost = read_cost("linear:0.01", forward_ms=23)
    predict(tally, cost)          # speed-up over plain decoding, one request at a time

A round costs a forward over its nodes and the drafter's own time; plain decoding costs a forward over one node for
every token. Forwards are taken round by round from the histogram of tree sizes, so the table need not be straight.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.cost.model import Floats, Rounds, interpolate, speedup_from_rounds
from paceline.errors import PacelineError
from paceline.jsonl import loads
from paceline.replay.walk import Tally


@dataclass(frozen=True)
class Cost:
    """What a forward costs, relative to a forward over one node.

    nodes, times  a table, nodes ascending from 1; between its entries a straight line, after the last the same slope.
    forward_ms    milliseconds of a forward over one node; None: drafting is taken to cost nothing."""

    nodes: tuple[float, ...] = (1.0,)
    times: tuple[float, ...] = (1.0,)
    forward_ms: float | None = None

    def of(self, nodes: Floats) -> Floats:
        """Relative time of forwards by their nodes."""
        return interpolate(self.nodes, self.times, nodes)


def predict(tally: Tally, cost: Cost) -> float:
    """Speed-up over plain decoding: tokens over what the rounds cost, in forwards over one node."""
    drafting = 0.0 if cost.forward_ms is None else 1e3 * tally.seconds / cost.forward_ms
    return speedup_from_rounds(rounds(tally), cost.of, drafting)


def rounds(tally: Tally) -> Rounds:
    """A replay's rounds, for the cost model."""
    sizes = {int(nodes): int(tally.sizes[nodes]) for nodes in np.flatnonzero(tally.sizes)}
    return Rounds(tally.new_tokens, sizes, tally.seconds)


def read_cost(text: str, forward_ms: float | None = None) -> Cost:
    """`flat` (nodes are free), `linear:X` (each node after the first costs X of a forward), or a JSON file of
    {"nodes": time}, in any unit, with an entry for "1". PacelineError for anything else."""
    if text == "flat":
        return Cost(forward_ms=forward_ms)
    if text.startswith("linear:"):
        try:
            step = float(text.removeprefix("linear:"))
        except ValueError:
            step = -1.0
        if not 0 <= step < np.inf:
            raise PacelineError(f"--verify-cost {text}: linear:X wants a number, 0 or more, such as linear:0.01")
        return Cost((1.0, 2.0), (1.0, 1.0 + step), forward_ms)
    try:
        entries = loads(Path(text).read_bytes())
        table = sorted((float(nodes), float(time)) for nodes, time in entries.items())
    except OSError:
        raise PacelineError(f"--verify-cost {text}: no such file; give flat, linear:X or a JSON file") from None
    except (ValueError, AttributeError, TypeError):
        raise PacelineError(f'{text} is not a table of verification costs such as {{"1": 23.1, "64": 31.0}}') from None
    if not table or table[0][0] != 1 or not all(0 < time < np.inf for _, time in table):
        raise PacelineError(f'{text} must have an entry for "1" node, the plain forward, and times above 0')
    return Cost(tuple(n for n, _ in table), tuple(time / table[0][1] for _, time in table), forward_ms)
