"""What to draft, how many tokens, or nothing: from the cost of rounds and from what drafts bring.

    costs = Costs([1, 8], [400], plain, waits, firsts)                 # of our engine's table, or of a running server
    drafts = [Drafts(method, 5, tokens, rounds, drafted, bins)]        # of replayed answers
    choices = choose(costs, drafts, Goals(token_ms=40))                # tokens for each load, 0: off
    configuration(choices[0], "0.32.0")

A token takes the time of a round over the tokens that the round brings, and a share of the prompts of others that run
in between. A round with drafts is taken to last as long as a plain round over as many tokens: one that verifies five
tokens of each of 8 requests as long as a plain one of 40 requests, which reads more keys and values and is no shorter.
Where rounds with drafts were measured, `share` brings the two together.

Arrays have DRAWS rows: the first is the estimate, the others are bootstrap draws (Efron 1979) over conversations and
over measured requests, of which intervals are made."""

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIGURATION = "configuration.json"  # file of the folder of `paceline tune server`
DRAWS = 201
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # tokens of a draft that are tried
SHARE_ERROR = 0.25  # standard error of `Costs.share` before anything is measured
SCHEDULES_FROM = (0, 24)  # vLLM's first version with num_speculative_tokens_per_batch_size as a list
ENGINES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("engines.toml").read_text("utf-8"))
"""What is known of each server's configuration."""


class Method(NamedTuple):
    """A drafter of an engine. replay: our drafter that drafts alike, "" for the server's own drafts; config: fields of
    vLLM's speculative_config, as JSON; flags: of others."""

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
    """What a request must meet to count: milliseconds to the first token, and a token after it; None: anything does."""

    first_ms: float | None = None
    token_ms: float | None = None


@dataclass
class Costs:
    """Seconds, by load and length of context.

    loads     requests at once, ascending. contexts: mean tokens of each length's contexts.
    plain     [DRAWS, loads, contexts] of a plain round; waits: the same, that a token waits for the prompts of others.
    firsts    to the first token, of the measured requests, by load and context; for goodput.
    share     [DRAWS] of a plain round's growth that drafted tokens cost, drafting included."""

    loads: Sequence[int]
    contexts: Sequence[float]
    plain: Floats
    waits: Floats
    firsts: dict[tuple[int, int], Floats] = field(default_factory=dict)
    share: Floats = field(default_factory=lambda: np.ones(DRAWS))

    def growth(self, load: int, context: int, drafted: float) -> Floats:
        """[DRAWS] seconds by which a plain round over the tokens of such a round is longer, linear between the loads
        and beyond the last two. load, context: places in `loads`, two at least, and `contexts`; drafted: tokens of each
        request."""
        sizes, plain = np.array(self.loads), self.plain[:, :, context]
        tokens = self.loads[load] * (1 + drafted)
        at = int(np.clip(np.searchsorted(sizes, tokens) - 1, 0, len(sizes) - 2))
        part = (tokens - sizes[at]) / (sizes[at + 1] - sizes[at])
        longer = plain[:, at] + part * (plain[:, at + 1] - plain[:, at])
        return np.maximum(longer - plain[:, load], 0.0)

    def round(self, load: int, context: int, drafted: float) -> Floats:
        """[DRAWS] seconds of a round in which each request has `drafted` drafted tokens."""
        return self.plain[:, load, context] + self.share * self.growth(load, context, drafted)

    def relative(self, load: int, drafted: float) -> float:
        """Such a round over a plain one, mean of all contexts."""
        plain = self.plain[0, load].mean()
        return float(np.mean([self.round(load, at, drafted)[0] for at in range(len(self.contexts))]) / plain)

    @classmethod
    def assumed(cls, share: float) -> Self:
        """Costs of a server that was not measured: under any load a drafted token of each request costs this share of a
        plain round."""
        plain = np.tile(np.array([[1.0], [1.0 + share]]), (DRAWS, 1, 1))
        return cls([1 << 30, 1 << 31], [0.0], plain, np.zeros_like(plain))

    def calibrate(self, rounds: Sequence[tuple[int, int, float, Floats]]) -> None:
        """Fit `share`, 0 or more, to measured rounds: load, context, drafted tokens of a request, and [DRAWS] seconds
        of each. Least squares, each with the weight of its certainty, and a share of 1 to begin with: where few rounds
        had a draft, noise would decide otherwise."""
        plain = np.array([self.plain[:, load, context] for load, context, *_ in rounds])
        growth = np.array([self.growth(load, context, drafted) for load, context, drafted, _ in rounds]) / plain
        measured = np.array([seconds for *_, seconds in rounds]) / plain - 1
        weights = 1 / np.maximum(measured.var(1, keepdims=True), 1e-6)
        found = (weights * growth * measured).sum(0) + SHARE_ERROR**-2
        self.share = np.maximum(found / ((weights * growth**2).sum(0) + SHARE_ERROR**-2), 0.0)


@dataclass(frozen=True)
class Drafts:
    """What a method's drafts of at most `k` tokens bring: counts of each conversation, [conversations], whose context
    has the length `bins`; without bins of all lengths."""

    method: Method
    k: int
    tokens: Floats
    rounds: Floats
    drafted: Floats
    bins: NDArray[np.int64] | None = None


class Expected(NamedTuple):
    """What to expect of drafts of at most k tokens, 0: of none, at a load and a length of context (None: of all). gain:
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
    """A method at its best. schedule: for each load its number of tokens, 0 where off is best. fixed: the best number
    for all loads together. expected: of `schedule`, by load and context; plain_goodput: of plain decoding, by load.
    most: by load, the drafts of any method of the engine that gain most, shown to or not, and their method."""

    method: Method
    schedule: dict[int, int]
    fixed: int
    expected: list[Expected]
    plain_goodput: dict[int, float]
    most: list[tuple[str, Expected]] = field(default_factory=list)


def choose(costs: Costs, drafts: Sequence[Drafts], goals: Goals = Goals()) -> list[Choice]:
    """Each method's choice, the best first: by goodput over the loads, then by the mean logarithm of the gain. Where no
    drafts are shown to gain, that is, where their intervals hold 1, off is chosen."""
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
    """What drafts would have brought where off was chosen, and at which load that changes, in sentences."""
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
    """The place of the best of plain decoding, which is first, and of drafts that are shown to gain."""
    return max((n for n, one in enumerate(row) if not n or one.low > 1), key=lambda n: _worth([row[n]]))


def _worth(several: Sequence[Expected]) -> tuple[float, float]:
    return round(float(np.mean([one.goodput for one in several])), 3), float(np.mean(np.log([e.gain for e in several])))


def _expected(costs: Costs, load: int, drafts: Drafts | None, goals: Goals, context: int | None = None) -> Expected:
    """What to expect at a load, of plain decoding without `drafts`. context None: of all lengths alike."""
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
    """[DRAWS, conversations]: how often each is drawn; the first row has all once. The same at every call."""
    drawn = np.random.default_rng(0).multinomial(conversations, np.full(conversations, 1 / conversations), DRAWS - 1)
    return np.vstack([np.ones(conversations), drawn]).astype(np.float64)


def configuration(choice: Choice, version: str) -> dict[str, Any]:
    """What to write into the configuration of the choice's server, which says that it is of `version`."""
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
    """[[first load, last load, tokens], ...] of a schedule by load: each goes half the way, as a ratio, to the next."""
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
    """Whether a version such as 0.32.0+cpu is `least` or later; one that is unknown is."""
    numbers = tuple(int(part) for part in version.split(".")[: len(least)] if part.isdigit())
    return not numbers or numbers >= least
