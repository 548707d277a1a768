"""What the answers of an endpoint are compared with.

The control is the same model without drafts: another server, an engine of this process, or the same server with its
drafts switched off. Greedy tokens are compared one by one, and samples of texts with each other. Without a control,
the server is compared with itself: every greedy token must be the best by its own log-probabilities, a request must be
answered as it is alone, and sampled tokens must fall on their ranks as often as the log-probabilities say. This shows
errors of verification, but no cache or mask that spoils all of these alike."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isnan, nan
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from paceline.certify.options import REQUESTS
from paceline.certify.verdict import CONTEXT
from paceline.net.client import Retry
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Endpoint, Remote

TIE = 0.25  # Nats: two tokens further apart are no tie. bfloat16 resolves logits near 32 in such steps.
BEST = 5  # Rounding is measured by the log-probabilities of this many tokens at each place.
BROKEN = "\N{REPLACEMENT CHARACTER}"
SHIFTED = 0.5  # Nats: rounding moves the log-probability of a best token by less.
Fields = dict[str, Any]  # Fields of a request's body, or facts of a finding, by name.
AFTER_LOADING = "; the budget begins when all is loaded"
RETRY = Retry(tries=3, longest=5.0)
OWNER, OFF = "paceline", {"draft": "none"}
"""The owner that our server names for its model, and what switches its drafts off for one request. llama.cpp's server
has dropped the field that did, and ignores it silently."""
Messages = tuple[dict[str, str], ...]
HELLO: Fields = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def request(prompt: Sequence[int], **fields: Any) -> Fields:
    """A request for the answer to a prompt of token ids, with its tokens; greedy unless `fields` say otherwise."""
    return {"prompt": list(prompt), "return_token_ids": True, "temperature": 0.0, **fields}


class Control:
    """Answers of `source` to compare with. Each request is asked alone, and once.

    is_self  `source` is the endpoint under test, with its drafts: only effects of company and caches show."""

    def __init__(self, source: Endpoint, is_self: bool = False):
        self.source, self.is_self = source, is_self
        self._answers: dict[str, Completion] = {}

    @property
    def name(self) -> str:
        return "its own answers alone and its own log-probabilities" if self.is_self else self.source.name

    def expected(self, bodies: Sequence[Fields]) -> list[Completion]:
        """The answers to `bodies`. Only those not asked before are asked now."""
        keys = [json.dumps(body, sort_keys=True) for body in bodies]
        wanted = {key: body for key, body in zip(keys, bodies, strict=True) if key not in self._answers}
        answers = self.source.ask(list(wanted.values()), 1) if wanted else []
        self._answers |= dict(zip(wanted, answers, strict=True))
        return [self._answers[key] for key in keys]


def control_of(server: Remote) -> Control:
    """A control that is the server with its drafts off, if a request can switch them off; else the server itself."""
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
    """One token of a reply: its text, its log-probability (NaN:
    not reported), and the best tokens there, best first."""

    token: str
    logprob: float
    top: list[tuple[str, float]]


def places(reply: Completion, most: int | None = None) -> list[Place]:
    """The tokens of a reply; empty where the server reports no log-probabilities.

    most: number of best tokens that were asked for; the last is left out, because vLLM may report the sampled token in
    its place. Raises CompletionError if the log-probabilities cannot be read."""
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
    """How far rounding moves log-probabilities: twice the 90th percentile of the differences measured, TIE / 2 at most,
    and TIE / 2 before anything was compared. The best few tokens of each place are compared, because the
    log-probability of an almost certain token hardly moves, whatever its logit does."""

    level: float | None = None

    def add(self, answers: Sequence[tuple[Completion, Completion | None]]) -> None:
        """Compare the log-probabilities of each pair of answers, up to the first token that differs."""
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
    """Whether the server writes the leading space of a token, so that "Th" and " Th" are two tokens."""
    return any(token.startswith(" ") for place in reply for token in (place.token, *(best for best, _ in place.top)))


def _same(one: str, other: str, exact: bool) -> bool:
    """Whether two servers may mean the same token: some leave out special tokens' names, incomplete characters or,
    unless `exact`, the space before a token."""
    if one == other or (not exact and (one.strip() or one) == (other.strip() or other)):
        return True
    unspelled = [not text or BROKEN in text or text.startswith("bytes:") for text in (one, other)]
    named = [re.fullmatch(r"<\S+>|\[[A-Z]+\]", text) is not None for text in (one, other)]
    return all(unspelled) or (unspelled[0] and named[1]) or (unspelled[1] and named[0])


ENDING = frozenset({"stop", "stop_token_ids"})
"""Fields that end an answer before the control's, which is asked without them."""


def ended(right: Completion, body: Fields) -> str | int | None:
    """Where the control's answer ends for this request: its text before the stop string, or the number of tokens before
    the stop token. None if the request has neither, or the tokens are unknown."""
    if stop := body.get("stop"):
        return right.text.partition(stop[0])[0]
    ids = body.get("stop_token_ids")
    return [*right.tokens, ids[0]].index(ids[0]) if ids and right.tokens else None


BANNED = -100.0  # A token with this bias is never chosen.


def compare(
    reply: Completion, right: Completion, body: Fields, noise: Noise,
    biases: Mapping[str, float] = MappingProxyType({}),
) -> Fields | None:  # fmt: skip
    """Compare a reply with `right`, cut by the request's max_tokens and stops. Returns the fields of a Divergence, or
    None if they agree. After a tie nothing more is compared, since the two texts go their own ways.

    biases  the request's biases, by the control's spelling of the tokens."""
    mine, others = places(reply), places(right)
    exact = _has_spaces(mine) and _has_spaces(others)
    same = list(_alike(mine, others))
    at = len(same)
    facts: Fields = {"at": at, "noise": float(noise), "before": "".join(a.token for a, _ in same[-CONTEXT:])}
    if exact and (banned := _banned(mine, biases)) is not None and _banned(others, biases) is None:
        word, before = mine[banned].token, "".join(place.token for place in mine[max(0, banned - CONTEXT) : banned])
        why = f"it says {word!r}, which the request's logit_bias forbids"
        return facts | {"at": banned, "before": before, "said": word, "why": why}
    wanted, is_cut = ended(right, body), bool(body.keys() & ENDING)
    agree = not is_cut and bool(reply.text) and reply.text == right.text  # The texts count, not how tokens are spelled.
    if at < min(len(mine), len(others)) and not agree:
        said, best = mine[at], others[at]
        gap = _gap(others, at, said, body, exact, biases)
        unranked = f"the control has another token, and this one is not among its {len(best.top)} best"
        return facts | {"said": said.token, "best": best.token, "gap": gap, "why": unranked if gap is None else ""}
    for number, (a, b) in enumerate(same):
        if abs(a.logprob - b.logprob) > SHIFTED and b.logprob > -3:
            why = f"the log-probability of {a.token!r} is {a.logprob:.3f}, and the control's {b.logprob:.3f}"
            return facts | {"at": number, "said": a.token, "best": b.token, "why": why}
    if mine and not isinstance(wanted, str) and (why := _other_text(reply, right, mine, others, wanted)):
        return facts | {"why": why}
    if isinstance(wanted, int):  # Some servers list the stop token, others do not.
        right_end = at in (wanted, wanted + 1) or at == len(others)
        return None if right_end else facts | {"why": f"it has {at} tokens, and must end after {wanted}"}
    if is_cut:
        right_end = wanted is None or reply.text.strip() == wanted.strip()
        return None if right_end else facts | {"why": f"it ends in {reply.text[-40:]!r}, not in {str(wanted)[-40:]!r}"}
    if mine and others:
        long = min(len(others), body["max_tokens"])
        return None if at == long or agree else facts | {"why": f"it has {len(mine)} tokens, and the control {long}"}
    return None if right.text.startswith(reply.text) and (reply.text or not right.text) else facts | {"gap": 0.0}


def _banned(reply: Sequence[Place], biases: Mapping[str, float]) -> int | None:
    """Where a reply first has a token that the request's biases forbid."""
    return next((at for at, place in enumerate(reply) if biases.get(place.token, 0.0) <= BANNED), None)


def _other_text(
    reply: Completion, right: Completion, mine: Sequence[Place], others: Sequence[Place], ends_after: int | None
) -> str:
    """Why a reply has the control's tokens but another text; "" if the text is right, or if the two servers spell or
    part answers differently. ends_after: number of tokens before the stop token, whose text the reply may leave out."""
    parts = [parts_of(one)[1:] for one in (reply, right)]
    if [*map(bool, parts[0])] != [*map(bool, parts[1])]:  # Only one of the two parts answers.
        return ""
    if len(mine) == len(others) and parts[0] != parts[1]:
        return f"the tokens are right, and not what was made of them: {str(parts[0])[-60:]}"
    tokens = [place.token for place in others]
    written = (n for n in (len(tokens), len(tokens) - 1) if "".join(tokens[:n]).strip() == right.text.strip())
    if (most := next(written, None)) is None:  # The last token may be an end token, without text.
        return ""
    wanted = ["".join(tokens[: min(most, len(mine) - less)]).strip() for less in range(1 + (ends_after is not None))]
    if reply.text.strip() in wanted or BROKEN in wanted[0]:  # Servers do not write half a character.
        return ""
    return f"the tokens are right, and the text ends in {reply.text[-40:]!r}"


def parts_of(reply: Completion) -> tuple[str, str, list[tuple[str, Any]]]:
    """The parts that a server makes of an answer: text, thought and tool calls, with arguments parsed so that spacing
    does not count."""
    called = list[tuple[str, Any]]()
    for call in reply.tool_calls:
        arguments = call["arguments"]
        with suppress(ValueError):
            arguments = json.loads(arguments)
        called.append((call["name"], arguments))
    return reply.text, reply.reasoning.strip(), called


MOVED = frozenset({
    "response_format", "structured_outputs", "regex", "guided_regex", "tool_choice", "frequency_penalty",
    "presence_penalty", "logit_bias", "min_tokens",
})  # fmt: skip
"""Fields that change which token is best, but not the log-probabilities that servers report."""


def _gap(
    right: Sequence[Place], at: int, said: Place, body: Fields, exact: bool, biases: Mapping[str, float]
) -> float | None:
    """The gap between the two tokens by the control, after penalties and biases; None if it is unknown.

    Servers report log-probabilities before penalties and biases. Some penalise tokens of the answer alone, others those
    of the prompt too, so the smaller of both gaps counts. If a field moves the choice, the control may not rank the
    token: then its log-probability is what its own server reports, but no better than the last ranked one."""
    top, best = right[at].top, right[at]
    other = max((logprob for token, logprob in top if _same(token, said.token, exact)), default=None)
    if other is None and body.keys() & MOVED:
        known = (logprob for logprob in (said.logprob, *(logprob for _, logprob in top)) if not isnan(logprob))
        other = min(known, default=None)
    if other is None:
        return None
    often, once = body.get("frequency_penalty", 0.0), body.get("presence_penalty", 0.0)
    written, prompt = [place.token for place in right[:at]], json.dumps(body["messages"])

    def moved(token: str, logprob: float, with_prompt: bool) -> float:
        count = written.count(token) + (prompt.count(token.strip()) if with_prompt else 0)
        return logprob - often * count - once * (count > 0) + biases.get(token, 0.0)

    return min(abs(moved(best.token, best.logprob, way) - moved(said.token, other, way)) for way in (False, True))


PLAIN = frozenset({
    "messages", "max_tokens", "temperature", "logprobs", "top_logprobs", "stream", "n", "stop", "stop_token_ids",
    "return_token_ids",
})  # fmt: skip
"""Fields under which tokens are chosen by exactly the log-probabilities that servers report."""


def own_best(reply: Completion, body: Fields, noise: Noise) -> Iterator[Fields]:
    """Yield the tokens of a greedy reply that are not the server's own best. Yields nothing if the body has fields
    beyond PLAIN or samples."""
    mine = places(reply) if body.keys() <= PLAIN and not body.get("temperature") else []
    for at, place in enumerate(mine):
        best, logprob = place.top[0] if place.top else (place.token, place.logprob)
        if place.logprob < logprob and place.token != best:
            before = "".join(one.token for one in mine[max(0, at - CONTEXT) : at])
            gap = logprob - place.logprob
            yield {"at": at, "said": place.token, "best": best, "gap": gap, "noise": float(noise), "before": before}


def chats(given: Sequence[Any] | None) -> list[Messages]:
    """Prompts as chat messages; the built-in questions if none are given."""
    prompts: Sequence[Any] = REQUESTS["questions"] if given is None else given
    return [tuple(one) if _is_chat(one) else ({"role": "user", "content": str(one)},) for one in prompts]


def _is_chat(prompt: Any) -> bool:
    """Whether a prompt is messages, and not a text or token ids."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
