"""Rollouts with reuse through a server that generates and scores, such as vLLM's: nothing of it is replaced.

One request scores prompt and old answer; the rule is applied to what it reports; the rest is generated from prompt and
kept prefix, with what is left of the budget. The server's scores are of temperature 1 without filters, so that is the
only law there is here.

    residual   bins of the best tokens of both policies (`bins.decide_between`); one more request scores the new answer,
               for the next epoch
    one-hot    keeps y with probability p(y); after a rejection one token is drawn with y banned
    plain      the published rule, not lossless; one more request as for residual
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from paceline.engine.sampling import RowRandom
from paceline.errors import PacelineError
from paceline.rollout.bins import decide_between
from paceline.rollout.store import Entry

BANNED = -100.0
"""Added to the logit of a token that must not come."""
LAW = "temperature=1.0, as a server scores"


class Scored(NamedTuple):
    """What a server says of one place: the best tokens' probabilities, and the probability of the token that is there
    (None where it is not among them)."""

    best: Mapping[int, float]
    token: float | None


class Server(Protocol):
    """What is asked of a server. All at temperature 1."""

    async def score(self, tokens: Sequence[int], begin: int, top: int) -> list[Scored]:
        """Every token from place `begin` on, with the `top` best of each place; top 0: only the token's own."""

    async def generate(self, tokens: Sequence[int], count: int, banned: Sequence[int]) -> list[int]:
        """At most `count` tokens more, an end token included, without those that are banned."""


@dataclass(frozen=True)
class ServedRule:
    """name: residual, one-hot or plain. top: best tokens that the server reports, for residual alone."""

    name: str = "residual"
    lenience: float | None = None
    top: int = 20

    def __post_init__(self) -> None:
        if self.name not in ("residual", "one-hot", "plain"):
            raise PacelineError(f"There is no rule {self.name!r} over a server; rules: residual, one-hot, plain.")
        if self.lenience is not None and (self.name != "plain" or not self.lenience >= 0):
            raise PacelineError("lenience is of the rule plain alone, which is not lossless; it must be 0 or more.")

    @property
    def lossless(self) -> bool:
        """Whether answers have the policy's distribution."""
        return self.name != "plain"

    @property
    def asked(self) -> int:
        """Best tokens to ask the server for."""
        return self.top if self.name == "residual" else 0

    def decide(self, place: Scored, old: Entry, i: int, random: RowRandom) -> int | frozenset[int]:
        """The token at place i of the answer; or the tokens that it is not, where the policy has to draw it."""
        token = int(old.tokens[i])
        if self.name == "residual":
            q = dict(zip(old.top_ids[i].tolist(), old.top_probs[i].tolist(), strict=True))
            return decide_between(place.best, q, token, random)
        if place.token is None:
            raise PacelineError("The server did not report the probability of a token that it was asked about.")
        if self.name == "one-hot":
            return token if random.keep(place.token) else frozenset([token])
        lenience = 1.0 if self.lenience is None else self.lenience
        if math.isinf(lenience) or random.keep(min(1.0, lenience * place.token / float(old.probs[i]))):
            return token
        return frozenset()


class ServedRollout(NamedTuple):
    """An answer, how many of its tokens are the old one's, and what to put into the store."""

    tokens: list[int]
    reused: int
    entry: Entry


async def answer(
    server: Server,
    prompt: Sequence[int],
    old: Entry | None,
    rule: ServedRule,
    *,
    budget: int,
    ends: frozenset[int],
    random: RowRandom,
    version: int,
) -> ServedRollout:
    """Answer `prompt` with at most `budget` tokens, with the old answer where it stands.

    ends     the tokens that end an answer. random: this row's, never used before."""
    if old is not None and rule.name == "residual" and not old.top_ids.size:
        old = None  # it was written by a rule that keeps less
    tokens: list[int] = []
    reused = 0
    if old is not None:
        text = old.tokens[:budget].tolist()
        scored = await server.score([*prompt, *text], len(prompt), rule.asked)
        for i, place in enumerate(scored):
            choice = rule.decide(place, old, i, random)
            left = choice != text[i]
            if isinstance(choice, frozenset):
                [choice] = await server.generate([*prompt, *tokens], 1, sorted(choice))
                left = choice != text[i] or not rule.lossless  # as published, a rejection ends the reuse
            tokens.append(choice)
            if left:
                break
            reused += 1
    if len(tokens) < budget and not ends.intersection(tokens[-1:]):
        tokens += await server.generate([*prompt, *tokens], budget - len(tokens), ())
    visit = old.visit + 1 if old is not None else 0
    return ServedRollout(tokens, reused, await _entry(server, prompt, tokens, rule, ends, version, visit))


async def _entry(
    server: Server,
    prompt: Sequence[int],
    tokens: list[int],
    rule: ServedRule,
    ends: frozenset[int],
    version: int,
    visit: int,
) -> Entry:
    """The new answer as the next epoch needs it; scored, unless the rule asks for no old probabilities."""
    scored = [] if rule.name == "one-hot" else await server.score([*prompt, *tokens], len(prompt), rule.asked)
    best = [sorted(place.best.items(), key=_second, reverse=True)[: rule.asked] for place in scored]
    width = len(best[0]) if best else 0
    ids: Any = np.array([[i for i, _ in pairs] for pairs in best], np.int32).reshape(len(tokens), width)
    top = np.array([[p for _, p in pairs] for pairs in best]).reshape(len(tokens), width)
    probs = np.array([math.nan if place.token is None else place.token for place in scored] or [math.nan] * len(tokens))
    finished = bool(ends.intersection(tokens[-1:]))
    return Entry(np.array(tokens, np.int32), probs, ids, top, version, visit, finished, LAW)


def _second(pair: tuple[int, float]) -> float:
    return pair[1]
