"""What a certificate says of each test, whoever ran it: an engine is asked with token ids, a server with messages.

    found = Greedy(answers=8, tokens=512)
    found.divergences.append(Divergence(prompt=0, at=7, company="alone", said=5, best=9, gap=0.2, noise=1e-4))
    found.facts()["lossless"]            # what `paceline certify --json` prints
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.certify import stats
from paceline.certify.options import Scope

SHOWN = 5
"""Divergences that a certificate shows of each verdict."""
CONTEXT = 12
"""Tokens that it shows before one."""
LEVEL = 1e-3
"""The share of certificates in which a lossless engine is accused all the same."""


@dataclass(frozen=True)
class Divergence:
    """A token that is not the reference's best: a tie if rounding may explain it, else a bug.

    prompt, at  number of the prompt, and of the token in the answer; company: how the answer was asked for.
    said, best  the two tokens, ids or texts; None where there is none.
    gap         between their logits; None: unknown, which is a bug. noise: by how much rounding moves a logit there.
    why         what is wrong, where the gap does not say it. before: the tokens before it, the last few."""

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
        return not self.why and self.gap is not None and self.gap <= 2 * self.noise

    def facts(self) -> dict[str, Any]:
        gap = None if self.gap is None else round(self.gap, 6)
        verdict = "tie" if self.is_tie else "bug"
        return asdict(self) | {"gap": gap, "noise": round(self.noise, 6), "verdict": verdict}


@dataclass
class Greedy:
    """Greedy answers that were read, and where they diverged. why: why nothing could be compared; "" if it could."""

    answers: int = 0
    tokens: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    why: str = ""

    @property
    def bugs(self) -> list[Divergence]:
        return [one for one in self.divergences if not one.is_tie]

    def facts(self) -> dict[str, Any]:
        bugs, ties = self.bugs, [one for one in self.divergences if one.is_tie]
        return {
            "lossless": not bugs and not self.why,
            "answers": self.answers,
            "tokens": self.tokens,
            "ties": len(ties),
            "bugs": len(bugs),
            "shown": [one.facts() for one in (*bugs[:SHOWN], *ties[:SHOWN])],
            "why": self.why,
        }


@dataclass
class Stops:
    """Answers asked for with a stop string, and those that did not end before the first one, as they should."""

    answers: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        bugs = len(self.wrong)
        return {"lossless": not bugs, "answers": self.answers, "bugs": bugs, "shown": self.wrong[:SHOWN]}


@dataclass(frozen=True)
class Look:
    """A test of all counts so far: p-values of the sum over all cases and of the worst case."""

    requests: int
    p: float
    p_of_worst_case: float
    level: float

    @property
    def accuses(self) -> bool:
        """Whether the counts show that the engine is not lossless."""
        return min(self.p, self.p_of_worst_case) < self.level


def sampled_facts(looks: Sequence[Look], cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For the certificate. cases: the facts of each, with "tv", the total variation, and "tv_by_chance"."""
    worst = max(cases, key=lambda one: one["tv"] / max(one["tv_by_chance"], 1e-9), default={})
    return {
        "lossless": not any(look.accuses for look in looks),
        "requests": looks[-1].requests if looks else 0,
        "p": min((look.p for look in looks), default=1.0),
        "p_of_worst_case": min((look.p_of_worst_case for look in looks), default=1.0),
        "looks": [asdict(look) for look in looks],
        "tv": worst.get("tv", 0.0),
        "tv_by_chance": worst.get("tv_by_chance", 0.0),
        "cases": list(cases),
    }


def power(scope: Scope, requests: int, df: int, level: float, *, samples: int = 1) -> dict[str, Any]:
    """What could have been found: the probability of finding the scope's shift, and the smallest shift found with
    `stats.POWER`. level: of one test; samples: see `stats.power`."""
    return {
        "shift": scope.shift,
        "power": round(stats.power(requests, df, scope.shift, level, samples=samples), 4) if df else 0.0,
        "detectable": round(stats.detectable(requests, df, level, samples=samples), 4) if df else 1.0,
        "level": LEVEL,
        "tokens": scope.length if df else 0,
    }


def certificate(
    greedy: Greedy, stops: Stops, sampled: dict[str, Any], power: dict[str, Any], scope: Scope, **about: Any
) -> dict[str, Any]:
    """All of it together, as `paceline certify --json` prints it, but for the target and the environment.

    about: engine, draft, acceptance, not_tested (in words), ran_on (versions) and seconds."""
    parts: dict[str, Any] = {"greedy": greedy.facts(), "stops": stops.facts(), "sampled": sampled}
    return {
        "lossless": all(part["lossless"] for part in parts.values()),
        **parts,
        "power": power | {"greedy_rate": round(3 / max(greedy.tokens, 3), 6)},
        "plan": asdict(scope),
        **about,
    }
