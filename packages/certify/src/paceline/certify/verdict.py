"""Facts and verdict of a certificate, the same for engines asked with token ids and servers asked with messages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.certify import stats
from paceline.certify.options import SHIFT, Scope
from paceline.runs.chance import is_tie

SHOWN = 5  # Most ties, and most bugs, that a certificate shows.
CONTEXT = 12  # Tokens shown before a divergence.
LEVEL = 1e-3  # Share of certificates that accuse a lossless engine by chance.
LONG, TIES = 0.2, 0.1  # Shares of LEVEL for long sampled answers and for the number of ties.
WEAK, LENIENT = 0.1, 1.2
"""A certificate that would miss a larger shift than this, and than the one asked for, cannot say; LENIENT: by how much
it may be larger all the same, for rounding and whole numbers of requests."""
LOSSLESS, NOT_LOSSLESS, CANNOT_SAY, TWO_MODELS = "lossless", "not lossless", "cannot say", "two models"
NO_DRAFT = "nothing is drafted, for --draft names no drafter"
EXIT_STATUS = {LOSSLESS: 0, NOT_LOSSLESS: 1, CANNOT_SAY: 3, TWO_MODELS: 3}
"""Of `paceline certify`, by the certificate's verdict; 2 is for what could not be run."""


@dataclass(frozen=True)
class Finding:
    """Evidence against an engine. test: greedy, sampled or stops; what: in words; p: its chance in a lossless engine,
    corrected for the number of tests; 0 if a lossless engine never does it."""

    test: str
    what: str
    p: float = 0.0


@dataclass(frozen=True)
class Divergence:
    """A token that is not the reference's best: a tie if rounding may explain it, else a bug.

    prompt, at  number of the prompt, and of the token in the answer; company: how the answer was asked for.
    said, best  the engine's token and the reference's, ids or texts; None if an answer has none there.
    gap         gap between their logits; None: unknown, which is a bug; noise: how far rounding moves a logit there.
    why         the error in words, if it is none of the gap; before: the last few tokens before it."""

    prompt: int
    at: int
    company: str
    said: int | str | None = None
    best: int | str | None = None
    gap: float | None = None
    noise: float = 0.0
    why: str = ""
    before: Sequence[int] | str = ()

    @property
    def is_tie(self) -> bool:
        """Whether rounding may have moved both logits across the gap."""
        return not self.why and self.gap is not None and is_tie(self.gap, self.noise)

    def facts(self) -> dict[str, Any]:
        gap = None if self.gap is None else round(self.gap, 6)
        verdict = "tie" if self.is_tie else "bug"
        return asdict(self) | {"gap": gap, "noise": round(self.noise, 6), "verdict": verdict}


@dataclass
class Greedy:
    """Answers that were read token by token, and where they diverged.

    seeded   number of answers sampled with a seed whose noise is known.
    why      why the answers cannot be judged; "" if they can.
    places   distinct places read in greedy answers; tied: places with a tie.
    rounded  places where rounding changes the reference's own best token."""

    answers: int = 0
    tokens: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    why: str = ""
    places: int = 0
    tied: int = 0
    rounded: int = 0
    seeded: int = 0

    @property
    def bugs(self) -> list[Divergence]:
        return [one for one in self.divergences if not one.is_tie]

    @property
    def ties(self) -> list[Divergence]:
        return [one for one in self.divergences if one.is_tie]

    @property
    def p_of_ties(self) -> float:
        """p-value: this many ties, if the engine ties as often as the rounded reference does."""
        return stats.more_often(self.tied, self.rounded)

    def findings(self, level: float = LEVEL * TIES) -> list[Finding]:
        """Findings against the engine. level: the p-value of the ties below which they count as one."""
        found = []
        if bugs := self.bugs:
            first, wrong = bugs[0], len({(one.company, one.prompt) for one in bugs})
            why = first.why
            if not why and first.gap is not None:
                why = f"the logits are {first.gap:.4g} apart, and rounding moves them by {first.noise:.2g}"
            where = f"prompt {first.prompt}, token {first.at}, {first.company}: {why}"
            more = f" ({len(bugs)} tokens)" if len(bugs) > wrong else ""
            found.append(Finding("greedy", f"{wrong} of {self.answers} answers are wrong{more}; first {where}"))
        if self.p_of_ties < level:
            what = f"{self.tied} of {self.places:,} tokens are ties, and rounding alone makes {self.rounded}"
            found.append(Finding("greedy", what, self.p_of_ties))
        return found

    def facts(self) -> dict[str, Any]:
        """For the certificate."""
        bugs, ties = self.bugs, self.ties
        return {
            "lossless": not self.findings(),
            "answers": self.answers,
            "tokens": self.tokens,
            "seeded": self.seeded,
            "ties": len(ties),
            "ties_of_rounding": self.rounded,
            "p_of_ties": self.p_of_ties,
            "bugs": len(bugs),
            "findings": list(map(asdict, self.findings())),
            "shown": [one.facts() for one in (*bugs[:SHOWN], *ties[:SHOWN])],
            "why": self.why,
        }


@dataclass
class Stops:
    """Answers asked for with a stop string; wrong: those that did not end before its first occurrence."""

    answers: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        bugs = len(self.wrong)
        return {"lossless": not bugs, "answers": self.answers, "bugs": bugs, "shown": self.wrong[:SHOWN]}


@dataclass(frozen=True)
class Look:
    """A test of all counts so far: p-values of the sum over all cases and of the worst case.

    difference: p-value of the difference from the same engine without drafts, None if that was not asked."""

    requests: int
    p: float
    p_of_worst_case: float
    level: float
    difference: float | None = None

    @property
    def differs(self) -> bool:
        """Whether the counts are not the model's."""
        return min(self.p, self.p_of_worst_case) < self.level

    @property
    def accuses(self) -> bool:
        """Whether the counts show that drafts change the distribution."""
        return self.differs and (self.difference is None or self.difference < self.level)


def sampled_facts(looks: Sequence[Look], cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Facts for the certificate. cases: facts of each case, with "tv" (total variation) and "tv_by_chance"."""
    worst = max(cases, key=lambda one: one["tv"] / max(one["tv_by_chance"], 1e-9), default={})
    p = min((min(look.p, look.p_of_worst_case) for look in looks), default=1.0)
    differences = [look.difference for look in looks if look.difference is not None]
    what = (
        f"the first tokens have another distribution (p = {p:.1g}); the total variation of the worst case is "
        f"{worst.get('tv', 0.0):.3f}, and chance makes {worst.get('tv_by_chance', 0.0):.3f}"
    )
    found = [Finding("sampled", what, p)] if any(look.accuses for look in looks) else []
    return {
        "lossless": not found,
        "requests": looks[-1].requests if looks else 0,
        "p": min((look.p for look in looks), default=1.0),
        "p_of_worst_case": min((look.p_of_worst_case for look in looks), default=1.0),
        "plain_differs": bool(differences) and not found,
        "p_of_difference": min(differences, default=None),
        "findings": list(map(asdict, found)),
        "looks": [asdict(look) for look in looks],
        "tv": worst.get("tv", 0.0),
        "tv_by_chance": worst.get("tv_by_chance", 0.0),
        "cases": list(cases),
    }


def with_long(sampled: dict[str, Any], long: dict[str, Any], found: Sequence[Finding]) -> dict[str, Any]:
    """Add facts and findings of long sampled answers to the facts of sampled answers."""
    facts = [*sampled["findings"], *map(asdict, found)]
    return sampled | {"lossless": not facts, "findings": facts, "long": long}


def power(
    scope: Scope, requests: int, df: int, level: float, *, samples: int = 1, rounding: float = 0.0
) -> dict[str, Any]:
    """Facts on what could have been found: the probability of finding the scope's shift, the smallest shift found with
    `stats.POWER`, and the shift that rounding always hides. level: of one test; samples, rounding: see
    `stats.power`."""
    shift = scope.shift or SHIFT
    how: dict[str, Any] = {"samples": samples, "rounding": rounding}
    return {
        "shift": shift,
        "power": round(stats.power(requests, df, shift, level, **how), 4) if df and requests else 0.0,
        "detectable": round(stats.detectable(requests, df, level, **how), 4) if df else 1.0,
        "hidden": round(rounding / 2, 5),
        "level": LEVEL,
        "tokens": scope.length if df else 0,
    }


def certificate(
    greedy: Greedy, stops: Stops, sampled: dict[str, Any], power: dict[str, Any], scope: Scope, *,
    also: Sequence[str] = (), two_models: str = "", **about: Any,
) -> dict[str, Any]:  # fmt: skip
    """The certificate as `paceline certify --json` prints it, without target and environment.

    also: names of other tests that found something. two_models: why the models are two; "" if they are not.
    about: engine, draft, acceptance, not_tested (in words), scenarios, ran_on (versions) and seconds.
    broken: what the endpoint was asked for when it broke off, and how; "" if it did not."""
    parts: dict[str, Any] = {"greedy": greedy.facts(), "stops": stops.facts(), "sampled": sampled}
    verdict, why = _verdict(parts, power, scope, about["draft"], about["broken"], also)
    if two_models:
        verdict, why = TWO_MODELS, two_models
    return {
        "verdict": verdict,
        "why": why,
        "lossless": verdict == LOSSLESS,
        **parts,
        "power": power | {"greedy_rate": round(3 / max(greedy.tokens, 3), 6)},
        "plan": asdict(scope),
        **about,
    }


def _verdict(
    parts: dict[str, Any], power: dict[str, Any], scope: Scope, draft: str | None, broken: str,
    also: Sequence[str] = (),
) -> tuple[str, str]:  # fmt: skip
    """Returns one of the three verdicts, and why it is no better; "" for lossless. draft: None if the engine chooses
    its own drafter."""
    if wrong := [*(name for name, part in parts.items() if not part["lossless"]), *also]:
        return NOT_LOSSLESS, "; ".join(wrong)
    if why := broken or parts["greedy"]["why"]:
        return CANNOT_SAY, why
    if draft == "none":
        return CANNOT_SAY, NO_DRAFT
    sampled = parts["sampled"]
    if scope.requests != 0 and (tested := power if sampled["requests"] else sampled.get("long")):
        if tested["detectable"] > LENIENT * max(WEAK, scope.shift or SHIFT):
            if tested["detectable"] >= 0.99:
                return CANNOT_SAY, "too few answers were sampled to find any shift; a longer --budget asks more"
            hidden = f", of which rounding hides {100 * tested['hidden']:.2g} %" if tested["hidden"] > 0.001 else ""
            return CANNOT_SAY, (
                f"shifts of sampled distributions below {100 * tested['detectable']:.3g} % would be missed{hidden}; "
                "a longer --budget finds smaller ones, and --shift says which are to be found"
            )
        if draft is not None and sampled.get("draft_tokens") == 0:
            return CANNOT_SAY, "nothing was drafted in sampled answers"
    return LOSSLESS, ""
