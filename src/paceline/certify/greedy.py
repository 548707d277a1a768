"""Greedy answers: every token must be the model's best after the tokens before it, or tie with it.

An answer is read by the model alone, in float32, in one forward: no second answer is written, and what comes after a
tie is still judged. A token that is not the best is a tie where its logit lies no further below than rounding moves
logits there: twice the most that the engine's dtype changes any, or float32 itself. Anything else is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from paceline.certify.engines import Said, UnderTest
from paceline.certify.reference import Model
from paceline.engine.sampling import SamplingParams, warp

ROUNDING = 1e-5
"""Of float32, as a share of the largest logit: kernels of other libraries add in another order."""
SHOWN = 5
"""Divergences that a certificate shows of each verdict."""


@dataclass(frozen=True)
class Divergence:
    """A token that is not the model's best.

    prompt, at  number of the prompt, and of the token in the answer; company: how the answer was asked for.
    said, best  the two tokens; gap: between their logits in float32; noise: what the dtype changes there.
    before      the tokens of the answer before it, the last few."""

    prompt: int
    at: int
    company: str
    said: int | None
    best: int | None
    gap: float
    noise: float
    verdict: str
    why: str = ""
    before: list[int] = field(default_factory=list)


@dataclass
class Greedy:
    """Counts over answers, and what diverged."""

    answers: int = 0
    tokens: int = 0
    drafted_rounds: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def bugs(self) -> list[Divergence]:
        return [one for one in self.divergences if one.verdict == "bug"]

    def facts(self) -> dict[str, Any]:
        """For the certificate."""
        ties = [one for one in self.divergences if one.verdict == "tie"]
        return {
            "lossless": not self.bugs,
            "answers": self.answers,
            "tokens": self.tokens,
            "ties": len(ties),
            "bugs": len(self.bugs),
            "shown": [asdict(one) for one in (*self.bugs[:SHOWN], *ties[:SHOWN])],
        }


class Judge:
    """exact: the model in float32; own: the same in the engine's dtype, None where that is float32."""

    def __init__(self, exact: Model, own: Model | None, ends: Collection[int]):
        self.exact, self.own, self.ends = exact, own, frozenset(ends)

    def read(
        self,
        greedy: Greedy,
        number: int,
        prompt: Sequence[int],
        tokens: Sequence[int],
        wish: SamplingParams,
        company: str,
    ) -> None:
        """Judge an answer and add what came of it to `greedy`."""
        greedy.answers += 1
        greedy.tokens += len(tokens)
        start, text = len(prompt), [*prompt, *tokens]
        logits = self._warped(self.exact, text, start, wish)
        found = [self._divergence(number, text, start, at, logits[at], wish, company) for at in _unlike(logits, tokens)]
        if not any(one.verdict == "bug" for one in found):
            found += self._end(number, tokens, wish, company)
        # After a bug everything differs; one is enough.
        first = next((i for i, one in enumerate(found) if one.verdict == "bug"), len(found))
        greedy.divergences += found[: first + 1]

    def _warped(self, model: Model, text: Sequence[int], start: int, wish: SamplingParams) -> torch.Tensor:
        logits = model.along(text, start)
        contexts = [np.array(text[:end]) for end in range(start, len(text))]
        return warp(logits, wish, contexts) if wish.shifts_logits and len(logits) else logits

    def _divergence(
        self,
        number: int,
        text: Sequence[int],
        start: int,
        at: int,
        exact: torch.Tensor,
        wish: SamplingParams,
        company: str,
    ) -> Divergence:
        said, best = text[start + at], int(exact.argmax())
        gap = float(exact[best] - exact[said])
        noise = ROUNDING * float(exact[torch.isfinite(exact)].abs().max())
        if self.own is not None:
            own = self._warped(self.own, text[: start + at + 1], start + at, wish)[0]
            moved = (own - exact)[torch.isfinite(exact)]
            noise = max(noise, float(moved.abs().max()))
        verdict = "tie" if gap <= 2 * noise else "bug"
        before = list(text[max(start, start + at - 12) : start + at])
        return Divergence(number, at, company, said, best, round(gap, 6), round(noise, 6), verdict, before=before)

    def _end(self, number: int, tokens: Sequence[int], wish: SamplingParams, company: str) -> list[Divergence]:
        """A divergence if the answer does not end where it must: at its first end token, or at max_tokens."""
        ends = set() if wish.ignore_eos else self.ends
        first = next((i for i, token in enumerate(tokens) if token in ends), None)
        if first is not None and first + 1 < len(tokens):
            why = "it goes on after an end token"
        elif first is None and len(tokens) < wish.max_tokens:
            why = f"it ends after {len(tokens)} of {wish.max_tokens} tokens, without an end token"
        elif len(tokens) > wish.max_tokens:
            why = f"it has {len(tokens)} tokens; {wish.max_tokens} were asked for"
        else:
            return []
        return [Divergence(number, len(tokens), company, None, None, 0.0, 0.0, "bug", why, list(tokens[-12:]))]


def _unlike(logits: torch.Tensor, tokens: Sequence[int]) -> list[int]:
    """Places of tokens that are not the best of `logits` [n, V]; of equal logits, any is the best."""
    if not tokens:
        return []
    said = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1))[:, 0]
    return torch.nonzero(said < logits.amax(-1))[:, 0].tolist()


# Stop strings: an answer must end before the first one, also where it was drafted whole.

PLACES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Where in an answer a string is cut out, as shares of its length."""
BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass
class Stops:
    """Answers asked for with a stop string, and those that did not end as they should."""

    answers: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """For the certificate."""
        return {
            "lossless": not self.wrong,
            "answers": self.answers,
            "bugs": len(self.wrong),
            "shown": self.wrong[:SHOWN],
        }


def check_stops(
    engine: UnderTest,
    prompts: Sequence[Sequence[int]],
    said: Sequence[Said],
    wish: SamplingParams,
    decode: Callable[[Sequence[int], Sequence[int]], str],
) -> Stops:
    """said: what the engine answered to `prompts`, by `wish`, without stop strings. decode(prompt, answer): the text of
    all tokens of an answer."""
    asked = [(prompt, stop) for prompt, one in zip(prompts, said, strict=True) for stop in _strings(one.text or "")]
    stops = Stops(len(asked))
    wishes = [replace(wish, stop=(stop,)) for _, stop in asked]
    again = engine.answer([prompt for prompt, _ in asked], wishes) if asked else []
    for (prompt, stop), one in zip(asked, again, strict=True):
        whole, before = decode(prompt, one.tokens), decode(prompt, one.tokens[:-1])
        right = whole[: whole.index(stop)] if stop in whole else whole
        if one.text != right or stop in before:
            stops.wrong.append({"stop": stop, "text": one.text, "right": right})
    return stops


def _strings(text: str) -> list[str]:
    """Different strings of the text, of two characters or one, none of which is half of another character."""
    cuts: dict[str, None] = {}
    for share in PLACES:
        begin = int(share * len(text))
        found = (text[begin : begin + n] for n in (2, 1) if BROKEN not in text[begin : begin + n])
        cuts |= dict.fromkeys([next(found, "")])
    return [cut for cut in cuts if cut]
