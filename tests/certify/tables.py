"""Small servers over a table of probabilities: a correct one, and one for each bug that engines with drafts have had.

    server = TableServer(seed=3)                 # drafts, verifies, is lossless
    plain = TableServer(seed=3, drafts=False)    # the same model
    server.ask([{"messages": [...], "temperature": 1.0, "max_tokens": 12, "seed": 5}], slots=8)

The model is made of characters: what may follow hangs on the last three, on the place, and on how the prompt begins.
Requests under way run in rounds, as in a real engine; a planted bug overrides one method.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import regex

from paceline.certify.scenarios import ANIMALS, COLOURS
from paceline.net.completion import Completion, CompletionError

END, THOUGHT = "<end>", "</think>"
CHARS = [*"abcdefghijklmnopqrstuvwxyz0123456789 {}[]\":,-.", "\n", THOUGHT, END]
IDS = {char: i for i, char in enumerate(CHARS)}
V = len(CHARS)
EYE = np.eye(V)
ONE_OF = '"({})"'.format
LIST = r'\[' + ", ".join([ONE_OF("|".join(COLOURS))] * 3) + r"\]"
JSON = rf'\{{"name": {ONE_OF("|".join(ANIMALS))}, "colours": {LIST}, "again": {LIST}\}}'
Probs = np.ndarray[Any, np.dtype[np.float64]]


@lru_cache(64)
def tables(seed):
    """Logits by the last two tokens, by the third last, by topic or place; and what a drafter is wrong by."""
    rng = np.random.default_rng(seed)
    two, three, topic = rng.normal(size=(V, V, V)) * 2.6, rng.normal(size=(V, V)) * 0.8, rng.normal(size=(16, V)) * 0.8
    two[:, :, [IDS[THOUGHT], IDS[END]]] = -1e9
    return two, three, topic, rng.normal(size=(V, V)) * 1.2


@lru_cache(200_000)
def allowed(pattern, text):
    """0 for characters after which the text can still become one of the pattern, -inf for others."""
    if regex.fullmatch(pattern, text):
        fits = [char == END for char in CHARS]
    else:
        fits = [len(char) == 1 and regex.fullmatch(pattern, text + char, partial=True) is not None for char in CHARS]
        fits[-1] = not any(fits)
    return np.where(fits, 0.0, -np.inf)


@lru_cache(100_000)
def filtered(logits, temperature, top_k, top_p, min_p):
    values = np.frombuffer(logits)
    p = np.exp((values - values.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    p[order[top_k or V :]] = 0.0
    if top_p < 1:
        p[order[np.cumsum(p[order]) - p[order] >= top_p]] = 0.0
    p[p < min_p * p.max()] = 0.0
    return np.asarray(p / p.sum())


@lru_cache(100_000)
def reported(logits):
    """Log-probabilities of all tokens, and the best of them as they are reported."""
    values = np.frombuffer(logits)
    values = values - values.max() - np.log(np.exp(values - values.max()).sum())
    best = np.argsort(-values, kind="stable")[:20]
    return values, [{"token": CHARS[i], "logprob": float(values[i])} for i in best]


@dataclass
class Row:
    """A request: prompt and context in tokens, what it has said, and what its rounds remember."""

    body: dict[str, Any]
    prompt: list[int]
    rng: np.random.Generator
    hit: bool
    context: bytearray = field(default_factory=bytearray)
    said: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    rounds: int = 0
    reason: str = ""
    text: str = ""
    noise: Probs | None = None

    @property
    def temperature(self):
        return float(self.body.get("temperature", 1.0))

    @property
    def pattern(self):
        body = self.body
        is_json = body.get("tool_choice") == "required" or "response_format" in body
        return JSON if is_json else body.get("structured_outputs", {}).get("regex", "")

    @property
    def thinks(self):
        return bool(self.body.get("chat_template_kwargs", {}).get("enable_thinking"))


Draft = tuple[list[int], list[Probs]]
"""Tokens, and the distribution that each was drawn from."""


class TableServer:
    """A lossless one. drafts: False for plain decoding."""

    url, name, model, owner = "http://127.0.0.1:9000/v1", "tables", "tables", "tables"
    slots, length, most_context = 8, 4, 6000

    def __init__(self, seed=0, drafts=True):
        self.two, self.three, self.topics, self.error = tables(seed)
        self.drafts = drafts
        self.cached = set()
        self.seeds = np.random.default_rng([seed, 77])
        self.batch = 1
        self.requests = 0

    # Requests -----------------------------------------------------------------------------------------------------

    def ask(self, bodies, slots=None):
        rows = [self.row(body, n) for body in bodies for n in range(body.get("n", 1))]
        self.requests += len(bodies)
        waiting, active = rows[::-1], list[Row]()
        while waiting or active:
            while waiting and len(active) < (slots or self.slots):
                active.append(waiting.pop())
            self.batch = len(active)
            for number, row in enumerate(active):
                self.round(row, number)
            for row in active:
                if row.reason:
                    self.cached.add(tuple(row.prompt[:24]))
            active = [row for row in active if not row.reason]
        done, out = iter(rows), list[Completion]()
        for body in bodies:
            first, *others = [self.completion(next(done)) for _ in range(body.get("n", 1))]
            first.others = others
            out.append(first)
        return out

    def row(self, body, n):
        text = "\n".join(message["content"] for message in body["messages"]).lower() + "\n"
        prompt = [IDS.get(char, ord(char) % 26) for char in text]
        if len(prompt) + body["max_tokens"] > self.most_context:
            raise CompletionError(f"the context has {self.most_context} tokens")
        seed = body.get("seed")
        rng = np.random.default_rng([seed, n] if seed is not None else self.seeds.integers(1 << 31))
        row = Row(body, prompt, rng, tuple(prompt[:24]) in self.cached)
        row.context = bytearray(prompt)
        return row

    def completion(self, row):
        shown, tokens = {}, row.said
        text, thought = row.text, ""
        if row.thinks:
            thought, end, text = text.partition(THOUGHT)
            text = text if end else ""
        if row.body.get("tool_choice"):
            shown = {"tool_calls": [{"name": "note_animal", "arguments": text}]}
            text = ""
        logprobs = row.logprobs if row.body.get("logprobs") else []
        ids = tokens if row.body.get("return_token_ids") else []
        streamed = bool(row.body.get("stream"))
        return Completion(text, thought, row.reason, logprobs=logprobs, tokens=ids, streamed=streamed, **shown)

    # Rounds -------------------------------------------------------------------------------------------------------

    def round(self, row, number):
        """Draft, verify, accept."""
        tokens, qs = self.draft(row) if self.drafts else ([], [])
        most = row.body["max_tokens"] - len(row.said)
        tokens, qs = tokens[: most - 1], qs[: most - 1]
        ps = [self.target(row, tokens[:i]) for i in range(len(tokens) + 1)]
        accepted = self.accept(row, tokens, qs, ps, number)
        row.drafted, row.rounds = tokens, row.rounds + 1
        row.seen += [*accepted, *tokens[len(accepted) :]]
        self.emit(row, accepted, len(tokens))

    def draft(self, row):
        """What followed the last three tokens before, else drawn tokens in every other five places, else nothing."""
        context, tokens = row.context, list[int]()
        if (begin := context.rfind(context[-3:], 0, -1)) >= 0:
            tokens = list(context[begin + 3 : begin + 3 + self.length])
            return tokens, [self.point(token) for token in tokens]
        if len(row.said) // 5 % 2:
            return [], []
        qs = []
        for _ in range(self.length):
            q = self.q(row, tokens)
            qs.append(q)
            tokens.append(self.drawn(row, q))
        return tokens, qs

    def point(self, token):
        return EYE[token]

    def drawn(self, row, q):
        return self.pick(row, q)

    def pick(self, row, p):
        return min(int(p.cumsum().searchsorted(row.rng.random())), V - 1) if row.temperature else int(p.argmax())

    def logits(self, row, context):
        """Of the next token, before anything that the request asks for."""
        a, b, c = context[-3:]
        place = self.topics[len(context) % 16]
        return self.two[b, c] + self.three[a] + place + self.topics[sum(context[:12]) % 16]

    def q(self, row, tokens):
        context = [*row.context, *tokens]
        return self.warp(row, self.logits(row, context) + self.error[context[-1]], tokens)

    def target(self, row, tokens):
        return self.warp(row, self.logits(row, [*row.context, *tokens]), tokens)

    def counted(self, row, tokens):
        """What penalties count."""
        return [*row.said, *tokens]

    def mask(self, row, tokens):
        """What the grammar adds to the logits."""
        if not row.thinks and not row.pattern:
            return 0.0
        text = "".join(CHARS[token] for token in (*row.said, *tokens))
        if row.thinks and THOUGHT not in text:
            return np.where(np.arange(V) == IDS[THOUGHT], 1e9 + 3.0 * (len(text) - 24), 0.0)
        return allowed(row.pattern, text.partition(THOUGHT)[2] if row.thinks else text) if row.pattern else 0.0

    def warp(self, row, logits, tokens):
        """The distribution that the request asks for; greedy: all of it on the best token."""
        body = row.body
        if body.get("frequency_penalty") or body.get("presence_penalty"):
            logits = logits.copy()
            for token, count in Counter(self.counted(row, tokens)).items():
                logits[token] -= body.get("frequency_penalty", 0.0) * count + body.get("presence_penalty", 0.0)
        for token, bias in body.get("logit_bias", {}).items():
            logits = logits + bias * EYE[int(token)]
        logits = logits + self.mask(row, tokens)
        if not row.temperature:
            return self.point(int(logits.argmax()))
        how = (body.get(name, off) for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)))
        return filtered(logits.tobytes(), row.temperature, *how)

    def accept(self, row, tokens, qs, ps, number):
        """Speculative sampling; the last token is the target's own."""
        for i, token in enumerate(tokens):
            if row.rng.random() * qs[i][token] >= ps[i][token]:
                return [*tokens[:i], self.pick(row, self.residual(row, ps[i], qs[i]))]
        return [*tokens, self.pick(row, ps[-1])]

    def residual(self, row, p, q):
        rest = np.maximum(p - q, 0.0)
        return rest / rest.sum()

    def emit(self, row, tokens, drafted):
        for token in tokens:
            self.say(row, token)
            row.context.append(token)
            if row.reason:
                return

    def say(self, row, token):
        """A token of the answer, and whether it ends it."""
        body = row.body
        if body.get("logprobs"):
            row.logprobs.append(self.logprob(row, token))
        row.said.append(token)
        row.text += "" if CHARS[token] == END else CHARS[token]
        cut = min((at for stop in body.get("stop", ()) if (at := row.text.find(stop)) >= 0), default=-1)
        if token == IDS[END] or token in body.get("stop_token_ids", ()):
            row.reason = "stop"
            row.text = row.text[: -len(CHARS[token])] if token != IDS[END] else row.text
        elif cut >= 0:
            row.reason, row.text = "stop", row.text[:cut]
        elif len(row.said) >= body["max_tokens"]:
            row.reason = "length"

    def logprob(self, row, token):
        values, top = reported(self.logits(row, row.context).tobytes())
        return {"token": CHARS[token], "logprob": float(values[token]), "top_logprobs": list(top)}


class BlockServer(TableServer):
    """Block verification (arXiv 2403.10444, algorithm 2): the longest draft that a joint test lets stand."""

    def accept(self, row, tokens, qs, ps, number):
        weight, weights, stands = 1.0, [1.0], 0
        for i, token in enumerate(tokens, 1):
            weight = min(1.0, weight * ps[i - 1][token] / qs[i - 1][token])
            weights.append(weight)
            chance = self.last_weight(weights)
            if i < len(tokens):
                rest = np.maximum(weight * ps[i] - qs[i], 0.0).sum()
                chance = rest / (rest + 1 - weight) if rest + 1 - weight > 0 else 0.0
            stands = i if row.rng.random() < chance else stands
        if stands == len(tokens):
            return [*tokens, self.pick(row, ps[-1])]
        rest = np.maximum(weights[stands] * ps[stands] - qs[stands], 0.0)
        return [*tokens[:stands], self.pick(row, rest / rest.sum() if rest.sum() > 0 else ps[stands])]

    def last_weight(self, weights):
        return weights[-1]


class SharedNoise(TableServer):
    """What is drawn after a rejection is drawn by the noise that drew the draft."""

    def draft(self, row):
        row.noise = row.rng.gumbel(size=V)
        return super().draft(row)

    def drawn(self, row, q):
        return self.pick_by(row, q)

    def pick_by(self, row, p):
        return int((np.log(np.maximum(p, 1e-300)) + row.noise).argmax()) if row.temperature else int(p.argmax())

    def accept(self, row, tokens, qs, ps, number):
        for i, token in enumerate(tokens):
            if row.rng.random() * qs[i][token] >= ps[i][token]:
                return [*tokens[:i], self.pick_by(row, self.residual(row, ps[i], qs[i]))]
        return [*tokens, self.pick(row, ps[-1])]


class SixteenBits(TableServer):
    """Drafts are drawn in float64, and verified with their probabilities in 16 bits."""

    def accept(self, row, tokens, qs, ps, number):
        return super().accept(row, tokens, [q.astype(np.float16).astype(np.float64) for q in qs], ps, number)


class TemperatureOnOneSide(TableServer):
    """Drafts stand by the target's probabilities at temperature 1."""

    def target(self, row, tokens):
        if not row.temperature:
            return super().target(row, tokens)
        kept, row.body = row.body, {**row.body, "temperature": 1.0}
        p = super().target(row, tokens)
        row.body = kept
        return p


class FiltersFirst(TemperatureOnOneSide):
    """Drafts stand by the target's filters before the temperature."""

    def target(self, row, tokens):
        p = super().target(row, tokens) ** (1 / (row.temperature or 1.0))
        return p / p.sum()


class TopPOnOneSide(TableServer):
    """Drafts stand by the target's probabilities before top-p."""

    def target(self, row, tokens):
        kept, row.body = row.body, {**row.body, "top_p": 1.0}
        p = super().target(row, tokens)
        row.body = kept
        return p


class BlockOffByOne(BlockServer):
    """The last drafted token stands by the weight of the one before."""

    def last_weight(self, weights):
        return weights[-2]


class BonusDropped(TableServer):
    """After a draft that stands whole, the last token is in the context and not in the answer."""

    def emit(self, row, tokens, drafted):
        if drafted and len(tokens) == drafted + 1 and len(row.said) + drafted < row.body["max_tokens"]:
            super().emit(row, tokens[:-1], drafted)
            row.context.append(tokens[-1])
        else:
            super().emit(row, tokens, drafted)


class BonusDoubled(TableServer):
    """After a draft that stands whole, the last token is there twice."""

    def emit(self, row, tokens, drafted):
        whole = drafted and len(tokens) == drafted + 1
        super().emit(row, [*tokens, tokens[-1]] if whole else tokens, drafted)


class NotRenormalised(TableServer):
    """What is drawn after a rejection is drawn by the residual as it is; what is left over goes to its best token."""

    def residual(self, row, p, q):
        rest = np.maximum(p - q, 0.0)
        rest[rest.argmax()] += 1 - rest.sum()
        return rest


class ResidualUnused(TableServer):
    """What is drawn after a rejection is drawn by the target."""

    def residual(self, row, p, q):
        return p


class PenaltiesLate(TableServer):
    """Penalties do not count the drafted token just before."""

    def counted(self, row, tokens):
        return [*row.said, *tokens[:-1]]


class PenaltiesSeeRejected(TableServer):
    """Penalties count drafted tokens, whether they stood or not."""

    def counted(self, row, tokens):
        return [*row.seen, *tokens]


class GrammarAfterReasoning(TableServer):
    """In the round in which the reasoning ends, the tokens after it are free."""

    def mask(self, row, tokens):
        ends = row.thinks and IDS[THOUGHT] in tokens
        return 0.0 if ends else super().mask(row, tokens)

    def draft(self, row):
        if row.thinks and IDS[THOUGHT] not in row.said:
            return [IDS[THOUGHT], *row.context[-2:]], [self.point(t) for t in (IDS[THOUGHT], *row.context[-2:])]
        return super().draft(row)


class GrammarOfBonus(TableServer):
    """The token after a draft that stands whole is free."""

    def accept(self, row, tokens, qs, ps, number):
        if row.pattern and len(tokens) == self.length:
            p = np.exp(self.logits(row, [*row.context, *tokens]))
            ps = [*ps[:-1], p / p.sum()]
        return super().accept(row, tokens, qs, ps, number)


class StaleState(TableServer):
    """A round without a draft, after one whose draft was accepted, has not read the last token."""

    stale = False

    def round(self, row, number):
        had = len(row.drafted) and row.context[-1 - len(row.drafted) : -1] == bytes(row.drafted)
        self.after_accepted = bool(had)
        super().round(row, number)

    def accept(self, row, tokens, qs, ps, number):
        if self.after_accepted and not tokens:
            ps = [self.warp(row, self.logits(row, row.context[:-1]), [])]
        return super().accept(row, tokens, qs, ps, number)


class WrongAfterHits(TableServer):
    """Where the prompt is cached, the topic is forgotten."""

    def logits(self, row, context):
        return super().logits(row, context) - (self.topics[sum(context[:12]) % 16] if row.hit else 0.0)


class WrongAboveFour(TableServer):
    """In batches of more than four, the fifth row and later ones accept what is drafted."""

    def accept(self, row, tokens, qs, ps, number):
        if self.batch > 4 and number >= 4 and tokens:
            return [*tokens, self.pick(row, ps[-1])] if ps[0][tokens[0]] > 0 or not row.pattern else super().accept(
                row, tokens, qs, ps, number
            )
        return super().accept(row, tokens, qs, ps, number)


class WrongBeyond64(TableServer):
    """Beyond 64 tokens of context a draft's second token stands unread."""

    def accept(self, row, tokens, qs, ps, number):
        if len(row.context) > 64 and len(tokens) > 1 and not row.pattern:
            ps = [ps[0], qs[1], *ps[2:]]
        return super().accept(row, tokens, qs, ps, number)


class TopKAcceptance(TableServer):
    """A drafted token stands where it is among the target's three best."""

    def accept(self, row, tokens, qs, ps, number):
        if not row.temperature:
            return super().accept(row, tokens, qs, ps, number)
        for i, token in enumerate(tokens):
            if token not in np.argsort(-ps[i])[:3] or ps[i][token] == 0:
                return [*tokens[:i], self.pick(row, ps[i])]
        return [*tokens, self.pick(row, ps[-1])]


class CopiesAccepted(TableServer):
    """What is copied from the text stands, when sampling."""

    def accept(self, row, tokens, qs, ps, number):
        copied = tokens and all(q.max() == 1 for q in qs) and row.temperature and not row.pattern
        return [*tokens, self.pick(row, ps[-1])] if copied else super().accept(row, tokens, qs, ps, number)


class StopInsideDraft(TableServer):
    """A stop string is looked for at the end of a round alone."""

    def emit(self, row, tokens, drafted):
        stops, row.body = row.body, {**row.body, "stop": ()}
        super().emit(row, tokens[:-1], drafted)
        ends = [one for one in stops.get("stop", ()) if (row.text + CHARS[tokens[-1]]).endswith(one)]
        row.body = {**stops, "stop": ends}
        if not row.reason:
            super().emit(row, tokens[-1:], drafted)
        row.body = stops


class DraftsLogprobs(TableServer):
    """The log-probability of an accepted token is the drafter's."""

    def emit(self, row, tokens, drafted):
        first = len(row.logprobs)
        super().emit(row, tokens, drafted)
        for i, one in enumerate(row.logprobs[first : first + len(tokens) - 1]):
            context = [*row.context[: len(row.context) - len(tokens) + i]]
            values = self.logits(row, context) + self.error[context[-1]]
            one["logprob"] = float(values[IDS[one["token"]]] - np.log(np.exp(values).sum()))


class StreamLosesRounds(TableServer):
    """A stream has the last token of each round twice where a whole draft stood."""

    def completion(self, row):
        done = super().completion(row)
        if row.body.get("stream") and len(done.text) > 20:
            done.text, done.logprobs = done.text[:19] + done.text[20:], done.logprobs[:19] + done.logprobs[20:]
        return done


class ChoicesShareCache(TableServer):
    """Of several answers to a request, the later ones go on from the first one's context."""

    def row(self, body, n):
        row = super().row(body, n)
        if n:
            row.context[-1] = IDS["x"]
        return row


SAMPLED = "sampled"
BUGS = {
    SharedNoise: SAMPLED, TemperatureOnOneSide: SAMPLED, TopPOnOneSide: SAMPLED, BlockOffByOne: SAMPLED,
    NotRenormalised: SAMPLED, TopKAcceptance: SAMPLED, CopiesAccepted: SAMPLED, BonusDropped: "one request at a time",
    BonusDoubled: "one request at a time", PenaltiesSeeRejected: "penalties and biases", FiltersFirst: SAMPLED,
    ResidualUnused: SAMPLED, PenaltiesLate: "penalties and biases",
    GrammarAfterReasoning: "JSON schema after reasoning", GrammarOfBonus: "JSON schema",
    StaleState: "one request at a time", WrongAfterHits: "prompts that are in the prefix cache",
    WrongAboveFour: "8 requests at once", WrongBeyond64: "steps with and without a draft in turn",
    StopInsideDraft: "stop strings, 4 at once", DraftsLogprobs: "one request at a time", StreamLosesRounds: "streams",
    ChoicesShareCache: "several answers to a request",
}
"""Each bug, and a test that shows it."""
