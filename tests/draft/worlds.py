"""Worlds in which the best stop rule is known: tokens of given kinds, a clock of one's own.

python -m tests.draft.worlds        # the table of docs/draft-models.md
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import torch

from paceline.draft.models.stop import Adaptive, Outcome, StopRule

ROW = 7


def confident(probability: float, others: int = 63) -> torch.Tensor:
    """Logits [1, 1 + others] whose best token has that probability."""
    rest = (1 - probability) / others
    return torch.tensor([[probability] + [rest] * others], dtype=torch.float64).log()


@dataclass
class World:
    """Rounds with a clock of their own. Every drafted token is of some kind, independent of the others.

    kinds  (probability of the best token, probability of being accepted, share of tokens). Costs are in plain
    decoding steps: step a token's drafting, node its verification, extra what drafting costs a round anyway. noise:
    of every time that is measured."""

    kinds: Sequence[tuple[float, float, float]]
    step: float
    node: float = 0.01
    extra: float = 0.03
    noise: float = 0.1

    @property
    def acceptance(self) -> float:
        return sum(accepted * share for _, accepted, share in self.kinds)

    def cost(self, drafted: int) -> float:
        return 1 + (self.extra + drafted * (self.step + self.node) if drafted else 0)

    def best_fixed(self) -> float:
        """Tokens a step with the best length, 0 among them."""
        lengths = range(41)
        return max((sum(self.acceptance**j for j in range(k + 1))) / self.cost(k) for k in lengths)

    def best(self, deepest: int = 22) -> float:
        """Tokens a step with the best policy there is: every continuation worked out, for a rate that is found by
        trying it (Dinkelbach)."""
        rate = 1.0
        for _ in range(8):

            @cache
            def ahead(chance: float, depth: int, rate: float = rate) -> tuple[float, float]:
                """Expected tokens and steps from here on; chance: that all so far are accepted."""
                tokens, steps = chance * self.acceptance, self.step + self.node
                for _, accepted, share in self.kinds if depth < deepest else ():
                    more = ahead(round(chance * accepted, 3), depth + 1)
                    tokens, steps = tokens + share * more[0], steps + share * more[1]
                return (tokens, steps) if tokens > rate * steps else (0.0, 0.0)

            tokens, steps = ahead(1.0, 1)
            rate = max(1.0, (1 + tokens) / (1 + self.extra + steps)) if steps else rate
        return rate

    def rate(self, rule: StopRule, rounds: int, seed: int, skip: int = 300) -> tuple[float, list[int]]:
        """Tokens a step of `rule`, as expected of what it drafted, and how much that was, in the rounds behind the
        first `skip`."""
        luck = random.Random(seed)
        brought = took = 0.0
        lengths = []
        for turn in range(rounds + skip):
            rule.begin([ROW])
            drafted = accepted = 0
            stands, chance_of_all, expected = True, 1.0, 1.0
            while drafted < rule.most(ROW):
                best, chance, _ = luck.choices(self.kinds, [share for _, _, share in self.kinds])[0]
                drafted += 1
                stands = stands and luck.random() < chance
                accepted += stands
                chance_of_all *= chance
                expected += chance_of_all
                (signal,) = rule.signals(confident(best))
                enough = rule.stop(ROW, drafted, signal)
                rule.stepped(self.step * math.exp(luck.gauss(0, self.noise)))
                if enough:
                    break
            rest = self.cost(drafted) - drafted * self.step
            rule.learn([Outcome(ROW, drafted, accepted)], rest * math.exp(luck.gauss(0, self.noise)))
            if turn >= skip:
                brought, took = brought + expected, took + self.cost(drafted)
                lengths.append(drafted)
        return brought / took, lengths


BIMODAL = [(0.99, 0.97, 0.6), (0.3, 0.4, 0.4)]
WORLDS = {
    "cheap steps": World([(0.8, 0.8, 1.0)], step=0.02),
    "one kind": World([(0.5, 0.5, 1.0)], step=0.1),
    "two kinds": World(BIMODAL, step=0.1),
    "two kinds, dear steps": World(BIMODAL, step=0.3),
    "three kinds": World([(0.99, 0.98, 0.6), (0.8, 0.75, 0.2), (0.3, 0.3, 0.2)], step=0.1),
    "a boaster": World([(0.95, 0.6, 0.5), (0.7, 0.3, 0.5)], step=0.1),
    "verifying is dear": World([(0.8, 0.8, 1.0)], step=0.05, node=0.2),
    "drafting does not pay": World([(0.5, 0.5, 1.0)], step=0.6),
}


def line(world: World) -> str:
    """A world's line in the table."""
    kinds = ", ".join(f"{best:g}: {chance:g} ({share:.0%})" for best, chance, share in world.kinds)
    found = fmean(world.rate(Adaptive(), 2000, seed)[0] for seed in range(4))
    speeds = f"{world.best_fixed():.2f} | {world.best():.2f} | {found:.2f}"
    return f"| {kinds} | {world.step:g}, {world.node:g} | {speeds} |"


if __name__ == "__main__":
    for world in WORLDS.values():
        print(line(world))
