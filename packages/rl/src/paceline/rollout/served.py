"""Rollouts with reuse through an endpoint that generates and scores, such as `Remote` of vLLM's server, unchanged.

One request scores prompt and old answer, the rule decides by the scores, and the server generates the rest from the
prompt and the accepted prefix, with the remaining budget. A server scores at temperature 1 without filters, so answers
are drawn at temperature 1 too.

    residual   compares bins of the best tokens of both policies (`rules.decide_between`); one more request scores the
               new answer for the next epoch
    one-hot    keeps an old token y with probability p(y); after a rejection draws one token with y banned
    plain      the published rule, not lossless; one more request as for residual
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.core.noise import Noise
from paceline.errors import PacelineError
from paceline.rollout.rules import TOP, decide_between
from paceline.rollout.store import Entry, visit_after

if TYPE_CHECKING:
    from paceline.net.endpoint import Endpoint

BANNED = -100.0  # Added to the logits of banned tokens.
SAMPLING = "temperature=1.0, as a server scores"


class Scored(NamedTuple):
    """A server's scores of a position: probabilities of the best tokens, and of the text's own token (None:
    not reported)."""

    best: Mapping[int, float]
    token: float | None


async def score(endpoint: Endpoint, tokens: Sequence[int], begin: int, top: int) -> list[Scored]:
    """Scores of the tokens from position `begin` on, with the `top` best of each."""
    done = await endpoint.complete({**_asked(tokens, 1), "prompt_logprobs": top})
    scored = []
    for token, place in zip(tokens[begin:], done.prompt_logprobs[begin:], strict=True):
        best = sorted(place.items(), key=itemgetter(1), reverse=True)[:top]  # The token's own may come beside them.
        chance = math.exp(place[token]) if token in place else None
        scored.append(Scored({i: math.exp(logprob) for i, logprob in best}, chance))
    return scored


async def generate(endpoint: Endpoint, tokens: Sequence[int], count: int, banned: Sequence[int] = ()) -> list[int]:
    """At most `count` more tokens, an end token included, none of them banned."""
    bias = {"logit_bias": {str(token): BANNED for token in banned}} if banned else {}
    return (await endpoint.complete({**_asked(tokens, count), "return_token_ids": True, **bias})).tokens


def _asked(tokens: Sequence[int], count: int) -> dict[str, Any]:
    return {"prompt": list(map(int, tokens)), "max_tokens": count, "temperature": 1.0}


@dataclass(frozen=True)
class ServedRule:
    """A rule over a server. name: residual, one-hot or plain. top: best tokens to ask the server for, for residual."""

    name: str = "residual"
    lenience: float | None = None
    top: int = TOP

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

    def decide(self, place: Scored, old: Entry, i: int, noise: Noise) -> int | frozenset[int]:
        """The token at position i of the answer; or the tokens to exclude, if the policy has to draw it."""
        token = int(old.tokens[i])
        if self.name == "residual":
            q = dict(zip(old.top_ids[i].tolist(), old.top_probs[i].tolist(), strict=True))
            return decide_between(place.best, q, token, noise, i)
        if place.token is None:
            raise PacelineError("The server did not report the probability of a token that it was asked about.")
        if self.name == "one-hot":
            return token if noise.happens(place.token, i) else frozenset([token])
        lenience = 1.0 if self.lenience is None else self.lenience
        chance = 1.0 if math.isinf(lenience) else lenience * place.token / float(old.probs[i])
        if noise.happens(min(1.0, chance), i):
            return token
        return frozenset()


class ServedRollout(NamedTuple):
    """An answer, the number of its tokens from the old answer, and its entry for the store."""

    tokens: list[int]
    reused: int
    entry: Entry


async def answer(
    endpoint: Endpoint, prompt: Sequence[int], old: Entry | None, rule: ServedRule, *, budget: int,
    ends: frozenset[int], noise: Noise, version: int,
) -> ServedRollout:  # fmt: skip
    """Answer `prompt` with at most `budget` tokens, keeping what the rule accepts of the old answer.

    ends   the tokens that end an answer.
    noise  of this row, not used before."""
    visit = visit_after(old)
    if old is not None and rule.name == "residual" and not old.top_ids.size:
        old = None  # Its rule recorded no best tokens.
    tokens: list[int] = []
    reused = 0
    if old is not None:
        text = old.tokens[:budget].tolist()
        scored = await score(endpoint, [*prompt, *text], len(prompt), rule.asked)
        for i, place in enumerate(scored):
            choice = rule.decide(place, old, i, noise)
            left = choice != text[i]
            if isinstance(choice, frozenset):
                [choice] = await generate(endpoint, [*prompt, *tokens], 1, sorted(choice))
                left = choice != text[i] or not rule.lossless  # As published, a rejection ends the reuse.
            tokens.append(choice)
            if left:
                break
            reused += 1
    if len(tokens) < budget and not ends.intersection(tokens[-1:]):
        tokens += await generate(endpoint, [*prompt, *tokens], budget - len(tokens))
    return ServedRollout(tokens, reused, await _entry(endpoint, prompt, tokens, rule, ends, version, visit))


async def _entry(
    endpoint: Endpoint, prompt: Sequence[int], tokens: list[int], rule: ServedRule, ends: frozenset[int], version: int,
    visit: int,
) -> Entry:  # fmt: skip
    """The entry of the new answer, scored unless the rule needs no old probabilities."""
    scored = [] if rule.name == "one-hot" else await score(endpoint, [*prompt, *tokens], len(prompt), rule.asked)
    best = [list(place.best.items()) for place in scored]
    width = len(best[0]) if best else 0
    ids: Any = np.array([[i for i, _ in pairs] for pairs in best], np.int32).reshape(len(tokens), width)
    top = np.array([[p for _, p in pairs] for pairs in best]).reshape(len(tokens), width)
    probs = np.array([math.nan if place.token is None else place.token for place in scored] or [math.nan] * len(tokens))
    finished = bool(ends.intersection(tokens[-1:]))
    return Entry(np.array(tokens, np.int32), probs, ids, top, version, visit, finished, SAMPLING)
