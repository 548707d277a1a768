"""What the answers of an endpoint are compared with.

The control is the same model without drafts: another server, an engine of this process, or the same server with its
drafts switched off. Greedy tokens are compared one by one, and samples of texts with each other. Without a control
every greedy token must be the server's own best by the log-probabilities that it reports, requests must be answered as
they are when asked alone, and sampled tokens must fall on their ranks as often as the log-probabilities say. What
verification itself gets wrong is then seen; a cache or a mask that spoils all of that alike is not."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, NamedTuple

import numpy as np

from paceline.certify.verdict import CONTEXT
from paceline.workbench.client import Completion, CompletionError, Retry
from paceline.workbench.endpoint import Endpoint, Remote

TIE = 0.25  # greatest gap, in nats, between two tokens that may be a tie: what bfloat16 resolves of logits near 32
BEST = 5  # tokens of a place whose log-probabilities are compared to measure rounding
SHIFTED = 0.5  # nats by which rounding does not move the log-probability of a best token
Fields = dict[str, Any]  # fields of a request's body that say how tokens are chosen
RETRY = Retry(tries=3, longest=5.0)
OWNER, OFF = "paceline", {"draft": "none"}
"""The owner that our server names for its model, and what switches its drafts off for one request. llama.cpp's server
has dropped the field that did, and ignores it silently."""
Messages = tuple[dict[str, str], ...]
HELLO: Fields = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


class Control:
    """What answers are compared with: `source`, asked alone, once for every request.

    is_self  it is the endpoint itself, with its drafts: what it shows depends on company and caches alone."""

    def __init__(self, source: Endpoint, is_self: bool = False):
        self.source, self.is_self = source, is_self
        self._answers: dict[str, Completion] = {}

    @property
    def name(self) -> str:
        return "its own answers alone and its own log-probabilities" if self.is_self else self.source.name

    def expected(self, bodies: Sequence[Fields]) -> list[Completion]:
        """The answers, each asked for when it is first wanted."""
        keys = [json.dumps(body, sort_keys=True) for body in bodies]
        wanted = {key: body for key, body in zip(keys, bodies, strict=True) if key not in self._answers}
        answers = self.source.ask(list(wanted.values()), 1) if wanted else []
        self._answers |= dict(zip(wanted, answers, strict=True))
        return [self._answers[key] for key in keys]


def control_of(server: Remote) -> Control:
    """The server with its drafts off, where a request can say so, else the server itself."""
    server.ask([HELLO], 1)
    if server.owner != OWNER:
        return Control(server, is_self=True)
    off = Remote(f"{server.url}#{server.model}", key=server.key, slots=server.slots, extra=OFF, retry=RETRY)
    try:
        off.ask([HELLO], 1)
    except CompletionError:
        off.close()
        return Control(server, is_self=True)
    return Control(off)


class Place(NamedTuple):
    """One token of a reply: its text, its log-probability (NaN: not reported), and the best ones there, best first."""

    token: str
    logprob: float
    top: list[tuple[str, float]]


def places(reply: Completion, most: int | None = None) -> list[Place]:
    """The tokens of a reply; empty where the server reports no log-probabilities.

    most: best tokens that were asked for. Of these the last is left out: in its place, or beside it, vLLM reports the
    token that came where that is none of them. CompletionError for what are no log-probabilities."""
    made = []
    try:
        for one in reply.logprobs:
            top = [(str(t["token"]), float(t["logprob"])) for t in one.get("top_logprobs") or ()]
            best = sorted((t for t in top if not isnan(t[1])), key=lambda t: -t[1])
            logprob = nan if one["logprob"] is None else float(one["logprob"])
            made.append(Place(str(one["token"]), logprob, best[: most - 1] if most else best))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CompletionError(f"the server sent what are no log-probabilities: {error!r}") from None
    return made


@dataclass
class Noise:
    """How far rounding moves log-probabilities, measured: twice what nine in ten of those compared in any step differ
    by, and no more than TIE / 2. Before anything could be compared it is TIE / 2. The best few of each place are
    compared: the log-probability of a token that is almost certain hardly moves, whatever its logit does."""

    level: float | None = None

    def add(self, answers: Sequence[tuple[Completion, Completion | None]]) -> None:
        """Compare the log-probabilities of the answers of a step, up to where their texts part."""
        apart = [
            abs(value - theirs[token])
            for one, other in answers if other is not None
            for a, b in _alike(places(one), places(other)) if (theirs := {b.token: b.logprob, **dict(b.top)})
            for token, value in a.top[:BEST] or [(a.token, a.logprob)] if not isnan(value - theirs.get(token, nan))
        ]  # fmt: skip
        if len(apart) >= 10:
            self.level = min(TIE / 2, max(self.level or 1e-3, 2 * float(np.quantile(apart, 0.9))))

    def __float__(self) -> float:
        return TIE / 2 if self.level is None else self.level


def _alike(one: Sequence[Place], other: Sequence[Place]) -> Iterator[tuple[Place, Place]]:
    """Pairs of places, up to the first two tokens that differ."""
    exact = _has_spaces(one) and _has_spaces(other)
    for a, b in zip(one, other, strict=False):
        if not _same(a.token, b.token, exact):
            return
        yield a, b


def _has_spaces(reply: Sequence[Place]) -> bool:
    """Whether the server writes the space that a token begins with: then "Th" and " Th" are two tokens."""
    return any(token.startswith(" ") for place in reply for token in (place.token, *(best for best, _ in place.top)))


def _same(one: str, other: str, exact: bool) -> bool:
    """Whether two servers may mean one token: some leave out the name of a special token, what is no whole character,
    or, unless `exact`, the space before it."""
    if one == other or (not exact and (one.strip() or one) == (other.strip() or other)):
        return True
    unspelled = [not text or "\N{REPLACEMENT CHARACTER}" in text or text.startswith("bytes:") for text in (one, other)]
    named = [re.fullmatch(r"<\S+>|\[[A-Z]+\]", text) is not None for text in (one, other)]
    return all(unspelled) or (unspelled[0] and named[1]) or (unspelled[1] and named[0])


ENDING = frozenset({"stop", "stop_token_ids"})
"""Fields that end an answer before the control's, which is asked without them."""


def ended(right: Completion, body: Fields) -> str | int | None:
    """The text that the control's answer has by the request's stop string, or the number of tokens before its stop
    token; None for a request with neither, or where that is unknown."""
    if stop := body.get("stop"):
        return right.text.partition(stop[0])[0]
    ids = body.get("stop_token_ids")
    return [*right.tokens, ids[0]].index(ids[0]) if ids and right.tokens else None


def compare(reply: Completion, right: Completion, body: Fields, noise: Noise) -> Fields | None:
    """The fields of a Divergence where the reply is not what the request asks for of `right`, by max_tokens and what
    ends it; None where it is. After a tie the texts are two, and nothing more is compared."""
    mine, others = places(reply), places(right)
    same = list(_alike(mine, others))
    at = len(same)
    facts: Fields = {"at": at, "noise": float(noise), "before": "".join(a.token for a, _ in same[-CONTEXT:])}
    wanted, is_cut = ended(right, body), bool(body.keys() & ENDING)
    agree = not is_cut and bool(reply.text) and reply.text == right.text  # however the tokens are spelled
    if at < min(len(mine), len(others)) and not agree:
        said, best = mine[at], others[at]
        gap = _gap(others, at, said.token, body, _has_spaces(mine) and _has_spaces(others))
        unranked = f"the control has another token, and this one is not among its {len(best.top)} best"
        return facts | {"said": said.token, "best": best.token, "gap": gap, "why": unranked if gap is None else ""}
    for number, (a, b) in enumerate(same):
        if abs(a.logprob - b.logprob) > SHIFTED and b.logprob > -3:
            why = f"the log-probability of {a.token!r} is {a.logprob:.3f}, and the control's {b.logprob:.3f}"
            return facts | {"at": number, "said": a.token, "best": b.token, "why": why}
    if isinstance(wanted, int):  # servers list the token that ends it, or do not
        right_end = at in (wanted, wanted + 1) or at == len(others)
        return None if right_end else facts | {"why": f"it has {at} tokens, and must end after {wanted}"}
    if is_cut:
        right_end = wanted is None or reply.text.strip() == wanted.strip()
        return None if right_end else facts | {"why": f"it ends in {reply.text[-40:]!r}, not in {str(wanted)[-40:]!r}"}
    joined = "".join(b.token for b in others).strip()  # tokens that are spelled as the text is
    if mine and len(mine) == len(others) and reply.text.strip() != right.text.strip() == joined:
        return facts | {"why": f"the tokens are right, and the text ends in {reply.text[-40:]!r}"}
    if mine and others:
        long = min(len(others), body["max_tokens"])
        return None if at == long or agree else facts | {"why": f"it has {len(mine)} tokens, and the control {long}"}
    return None if right.text.startswith(reply.text) and (reply.text or not right.text) else facts | {"gap": 0.0}


def _gap(right: Sequence[Place], at: int, said: str, body: Fields, exact: bool) -> float | None:
    """How far apart the two tokens are by the control, after penalties; None where it does not rank the other one.

    Servers report log-probabilities before penalties, and count the tokens of the answer, or those of the prompt too:
    the smaller gap of both. An unranked token is no better than the last ranked one."""
    top, best = right[at].top, right[at]
    ranked = max((logprob for token, logprob in top if _same(token, said, exact)), default=None)
    often, once = body.get("frequency_penalty", 0.0), body.get("presence_penalty", 0.0)
    if not often and not once:
        return None if ranked is None else abs(best.logprob - ranked)
    written = [place.token for place in right[:at]]
    prompt = json.dumps(body["messages"])
    other = min((logprob for _, logprob in top), default=-100.0) if ranked is None else ranked

    def penalised(token: str, logprob: float, with_prompt: bool) -> float:
        count = written.count(token) + (prompt.count(token.strip()) if with_prompt else 0)
        return logprob - often * count - once * (count > 0)

    return min(abs(penalised(best.token, best.logprob, way) - penalised(said, other, way)) for way in (False, True))


PLAIN = frozenset({
    "messages", "max_tokens", "temperature", "logprobs", "top_logprobs", "stream", "n", "stop", "stop_token_ids",
    "return_token_ids",
})  # fmt: skip
"""Fields that leave the log-probabilities that servers report those of the tokens' choice."""


def own_best(reply: Completion, body: Fields, noise: Noise) -> Iterator[Fields]:
    """The tokens of a greedy reply that are not the server's own best; none where fields move what it reports."""
    mine = places(reply) if body.keys() <= PLAIN and not body.get("temperature") else []
    for at, place in enumerate(mine):
        best, logprob = place.top[0] if place.top else (place.token, place.logprob)
        if place.logprob < logprob and place.token != best:
            before = "".join(one.token for one in mine[max(0, at - CONTEXT) : at])
            gap = logprob - place.logprob
            yield {"at": at, "said": place.token, "best": best, "gap": gap, "noise": float(noise), "before": before}
