"""Choose a drafter and its number of tokens, or off, from the cost of rounds and the tokens that drafts bring.

    costs = Costs([1, 8], [400], plain, waits, firsts)                 # of our engine's table, or of a running server
    drafts = [Drafts(method, 5, tokens, rounds, drafted, bins)]        # of replayed answers
    choices = choose(costs, drafts, Goals(token_ms=40))                # tokens for each load, 0: off
    configuration(choices[0], "0.32.0")

A token takes the time of a round over the new tokens of the round, and a share of other requests' prompts that run in
between. A round with drafts is assumed to last as long as a plain round over as many tokens: verifying five tokens of
each of 8 requests takes as long as a plain round of 40 requests, which reads more keys and values and is no shorter. If
rounds with drafts were measured, `share` corrects this.

Arrays have DRAWS rows: the first is the estimate, the others are bootstrap draws (Efron 1979) over conversations and
measured requests, and give the intervals."""

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIGURATION = "configuration.json"  # A file in the folder of `paceline tune server`.
DRAWS = 201
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # Numbers of drafted tokens to try.
SHARE_ERROR = 0.25  # Standard error of `Costs.share` before anything is measured.
SCHEDULES_FROM = (0, 24)  # vLLM's first version that takes num_speculative_tokens_per_batch_size as a list.
ENGINES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("engines.toml").read_text("utf-8"))
"""What is known of each server's configuration."""


class Method(NamedTuple):
    """A drafter of an engine. replay: our drafter that drafts alike, "" for the server's own drafts; config: fields of
    vLLM's speculative_config, as JSON; flags: options of other engines."""

    engine: str
    name: str
    replay: str = ""
    config: str = ""
    flags: str = ""


def methods(engine: str) -> list[Method]:
    """The drafters of an engine that can be replayed."""
    return [
        Method(engine, one["name"], one["replay"], json.dumps(one.get("config", {})), one.get("flags", ""))
        for one in ENGINES[engine]["methods"]
    ]


class Goals(NamedTuple):
    """Goals of a request: milliseconds to the first token, and for each token after it; None: no goal."""

    first_ms: float | None = None
    token_ms: float | None = None


@dataclass
class Costs:
    """Seconds by load and length of context.

    loads     requests at once, ascending; contexts: mean tokens of the contexts of each length.
    plain     a plain round's seconds, [DRAWS, loads, contexts]; waits: a token's wait for others' prompts, same shape.
    firsts    seconds to the first token of the measured requests, by load and context, for goodput.
    share     cost of drafted tokens, drafting included, as a share of a plain round's growth, [DRAWS]."""

    loads: Sequence[int]
    contexts: Sequence[float]
    plain: Floats
    waits: Floats
    firsts: dict[tuple[int, int], Floats] = field(default_factory=dict)
    share: Floats = field(default_factory=lambda: np.ones(DRAWS))

    def growth(self, load: int, context: int, drafted: float) -> Floats:
        """Seconds by which a plain round gets longer if it runs as many tokens as a round with drafts, [DRAWS]; linear
        between the loads and beyond the last two. load, context: places in `loads`, which has two or more, and in
        `contexts`; drafted: tokens of each request."""
        sizes, plain = np.array(self.loads), self.plain[:, :, context]
        tokens = self.loads[load] * (1 + drafted)
        at = int(np.clip(np.searchsorted(sizes, tokens) - 1, 0, len(sizes) - 2))
        part = (tokens - sizes[at]) / (sizes[at + 1] - sizes[at])
        longer = plain[:, at] + part * (plain[:, at + 1] - plain[:, at])
        return np.maximum(longer - plain[:, load], 0.0)

    def round(self, load: int, context: int, drafted: float) -> Floats:
        """Seconds of a round in which each request has `drafted` drafted tokens, [DRAWS]."""
        return self.plain[:, load, context] + self.share * self.growth(load, context, drafted)

    def relative(self, load: int, drafted: float) -> float:
        """Time of a round with `drafted` tokens over a plain round's, as the mean over all contexts."""
        plain = self.plain[0, load].mean()
        return float(np.mean([self.round(load, at, drafted)[0] for at in range(len(self.contexts))]) / plain)

    def place(self, running: float) -> int:
        """The place in `loads` of the largest load that is no larger than `running`; 0 if all are larger."""
        return max((i for i, load in enumerate(self.loads) if load <= running), default=0)

    def gains(self, load: int, survival: Sequence[float], drafted: float) -> list[float]:
        """Gains over plain decoding of drafts that are cut to 0, 1, ... and at last all of their tokens.

        survival  share of the drafts whose token at each position was accepted. drafted: mean tokens of a draft, all of
                  which are verified, also those that no position shows."""
        verified, tokens = [*map(float, range(len(survival))), drafted], accumulate(survival, initial=1.0)
        return [of_round / self.relative(load, k) for k, of_round in zip(verified, tokens, strict=True)]

    @classmethod
    def assumed(cls, share: float) -> Self:
        """Assume costs for a server that was not measured: under any load, a drafted token for each request costs
        `share` of a plain round."""
        plain = np.tile(np.array([[1.0], [1.0 + share]]), (DRAWS, 1, 1))
        return cls([1 << 30, 1 << 31], [0.0], plain, np.zeros_like(plain))

    def calibrate(self, rounds: Sequence[tuple[int, int, float, Floats]]) -> None:
        """Fit `share`, 0 or more, to measured rounds: (load, context, drafted tokens of a request, seconds [DRAWS]).
        Uses least squares weighted by certainty, with a prior of 1, without which noise would decide if few rounds had
        a draft."""
        plain = np.array([self.plain[:, load, context] for load, context, *_ in rounds])
        growth = np.array([self.growth(load, context, drafted) for load, context, drafted, _ in rounds]) / plain
        measured = np.array([seconds for *_, seconds in rounds]) / plain - 1
        weights = 1 / np.maximum(measured.var(1, keepdims=True), 1e-6)
        found = (weights * growth * measured).sum(0) + SHARE_ERROR**-2
        self.share = np.maximum(found / ((weights * growth**2).sum(0) + SHARE_ERROR**-2), 0.0)


@dataclass(frozen=True)
class Drafts:
    """Results of a method's drafts of at most `k` tokens: counts by conversation, [conversations]. bins: the length of
    each conversation's context; None: any length."""

    method: Method
    k: int
    tokens: Floats
    rounds: Floats
    drafted: Floats
    bins: NDArray[np.int64] | None = None


class Expected(NamedTuple):
    """Expected results of drafts of at most k tokens (0: plain) at a load and a length of context (None: all). gain:
    tokens a second over plain decoding's, with a 95 % interval; goodput: share of requests that meet the goals."""

    load: int
    context: float | None
    k: int
    gain: float
    low: float
    high: float
    goodput: float


@dataclass(frozen=True)
class Choice:
    """A method at its best. schedule: number of tokens by load, 0 for off; fixed: the best number for all loads
    together; expected: results of `schedule` by load and context; plain_goodput: plain decoding's goodput by load;
    most: for each load, the engine's method and drafts with the largest gain, even if its interval holds 1."""

    method: Method
    schedule: dict[int, int]
    fixed: int
    expected: list[Expected]
    plain_goodput: dict[int, float]
    most: list[tuple[str, Expected]] = field(default_factory=list)


def choose(costs: Costs, drafts: Sequence[Drafts], goals: Goals = Goals()) -> list[Choice]:
    """Each method's choice, best first: by goodput over the loads, then by the mean logarithm of the gain. Off is
    chosen if no drafts are shown to gain, that is, if the lower end of every interval is 1 or less."""
    loads, lengths = range(len(costs.loads)), range(len(costs.contexts))
    plain = [_expected(costs, load, None, goals) for load in loads]
    rated, most = [], dict[str, list[tuple[str, Expected]]]()
    for method in dict.fromkeys(one.method for one in drafts):
        every = [None, *(one for one in drafts if one.method == method)]
        table = [[_expected(costs, load, one, goals) for one in every] for load in loads]
        best = [_best(row) for row in table]
        here = [(method.name, max(row[1:], key=lambda one: one.gain)) for row in table]
        pairs = zip(here, most.get(method.engine, here), strict=True)
        most[method.engine] = [max(pair, key=lambda of: of[1].gain) for pair in pairs]
        fixed = max(range(len(every)), key=lambda n: _worth([row[n] for row in table])) if any(best) else 0
        contexts = (None, *lengths) if len(lengths) > 1 else (None,)
        expected = [_expected(costs, load, every[best[load]], goals, at) for load in loads for at in contexts]
        schedule = {row[n].load: row[n].k for row, n in zip(table, best, strict=True)}
        choice = Choice(method, schedule, table[0][fixed].k, expected, {one.load: one.goodput for one in plain})
        kept = best if method.engine == "vllm" else [fixed] * len(best)
        rated.append((_worth([row[n] for row, n in zip(table, kept, strict=True)]), choice))
    ranked = sorted(rated, key=lambda pair: pair[0], reverse=True)
    return [replace(choice, most=most[choice.method.engine]) for _, choice in ranked]


def not_chosen(choice: Choice) -> list[str]:
    """Sentences on the gain of the best drafts at loads where off was chosen, and on the load where that changes."""
    off = [(name, one) for name, one in choice.most if not choice.schedule[one.load]]
    lines = [
        f"Off at {one.load} at once: the best drafts, {name}, {one.k} drafted, would have {one.gain:.2f} times the "
        f"tokens a second ({one.low:.2f} to {one.high:.2f})."
        for name, one in off
    ]
    known = [one for _, one in choice.most]
    for one, after in pairwise(known):
        if (one.gain > 1) != (after.gain > 1):
            load = one.load + (after.load - one.load) * (one.gain - 1) / (one.gain - after.gain)
            lines += [f"Their gain {'ends' if one.gain > 1 else 'begins'} at about {load:.0f} at once."] * bool(off)
    if off and all(one.gain <= 1 for one in known):
        lines.append("At no load that was measured would drafts gain.")
    if any(one.low <= 1 < one.gain for _, one in off):
        lines.append("Where an interval has 1 inside it, more --minutes or a longer log may show a gain.")
    return lines


def _best(row: Sequence[Expected]) -> int:
    """The place of the best in `row`, among plain decoding, which is first, and drafts that are shown to gain."""
    return max((n for n, one in enumerate(row) if not n or one.low > 1), key=lambda n: _worth([row[n]]))


def _worth(several: Sequence[Expected]) -> tuple[float, float]:
    return round(float(np.mean([one.goodput for one in several])), 3), float(np.mean(np.log([e.gain for e in several])))


def _expected(costs: Costs, load: int, drafts: Drafts | None, goals: Goals, context: int | None = None) -> Expected:
    """Results to expect at a load. drafts None: of plain decoding; context None: over all lengths alike."""
    plain, drafted, good = np.zeros(DRAWS), np.zeros(DRAWS), []
    for at in range(len(costs.contexts)) if context is None else [context]:
        wait = costs.waits[:, load, at]
        before = after = wait + costs.plain[:, load, at]
        of_each = before[:1]
        if drafts is not None:
            chosen = slice(None) if drafts.bins is None else drafts.bins == at
            tokens, rounds, nodes = (count[chosen] for count in (drafts.tokens, drafts.rounds, drafts.drafted))
            if rounds.sum():
                seconds = costs.round(load, at, nodes.sum() / rounds.sum())
                weights = _weights(len(tokens))
                after = wait + seconds * (weights @ rounds) / (weights @ tokens)
                of_each = wait[0] + seconds[0] * rounds / tokens
        plain, drafted = plain + before, drafted + after
        pairs = (costs.firsts.get((load, at), np.zeros(1)), goals.first_ms), (of_each, goals.token_ms)
        good.append(np.prod([np.mean([goal is None or 1e3 * s <= goal for s in seconds]) for seconds, goal in pairs]))
    gains = plain / drafted
    low, high = np.percentile(gains[1:], [2.5, 97.5]).tolist()
    length, k = None if context is None else costs.contexts[context], 0 if drafts is None else drafts.k
    return Expected(costs.loads[load], length, k, float(gains[0]), low, high, float(np.mean(good)))


def _weights(conversations: int) -> Floats:
    """How often each conversation is drawn, [DRAWS, conversations]. The first row draws each once.
    Every call agrees."""
    drawn = np.random.default_rng(0).multinomial(conversations, np.full(conversations, 1 / conversations), DRAWS - 1)
    return np.vstack([np.ones(conversations), drawn]).astype(np.float64)


def configuration(choice: Choice, version: str) -> dict[str, Any]:
    """The configuration for the choice's server. version: the server's."""
    method, known = choice.method, ENGINES[choice.method.engine]
    scheduled = method.engine == "vllm" and _at_least(version, SCHEDULES_FROM)
    k = max(choice.schedule.values()) if scheduled else choice.fixed
    flags, config = known["off"], None
    if k and method.engine == "vllm":
        config = {**json.loads(method.config or "{}"), "num_speculative_tokens": k}
        if scheduled and len(set(choice.schedule.values())) > 1:
            config["num_speculative_tokens_per_batch_size"] = ranges(choice.schedule)
        text = shlex.quote(json.dumps(config))
        flags = f"--speculative-config {text}" if method.replay else f"in its --speculative-config {text}"
    elif k:
        flags = (method.flags if method.replay else known["own"]).format(k=k, more=k + 1)
    facts = {"engine": method.engine, "version": version, "written_for": known["written_for"]}
    facts |= {"method": method.name if k else "off", "tokens_by_load": choice.schedule}
    return facts | {"speculative_config": config, "flags": flags}


def ranges(schedule: Mapping[int, int]) -> list[list[int]]:
    """A schedule as [[first load, last load, tokens], ...].
    A range ends at the geometric mean of its load and the next."""
    found: list[list[int]] = []
    loads = sorted(schedule)
    for load, after in zip(loads, [*loads[1:], loads[-1]], strict=True):
        last = int((load * after) ** 0.5)
        if found and found[-1][2] == schedule[load]:
            found[-1][1] = last
        else:
            found.append([found[-1][1] + 1 if found else 1, last, schedule[load]])
    return found


def _at_least(version: str, least: tuple[int, ...]) -> bool:
    """Whether a version such as 0.32.0+cpu is `least` or later. An unknown version is."""
    numbers = tuple(int(part) for part in version.split(".")[: len(least)] if part.isdigit())
    return not numbers or numbers >= least
