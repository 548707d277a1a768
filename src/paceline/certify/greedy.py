"""Greedy answers: every token must be the model's best after the tokens before it, or tie with it; and stop strings.

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

from paceline.certify.engines import Output, UnderTest
from paceline.certify.reference import Model
from paceline.engine.sampling import SamplingParams, warp

ROUNDING = 1e-5
"""Of float32, as a share of the largest logit: kernels of other libraries add in another order."""
SHOWN = 5
"""Divergences that a certificate shows of each verdict."""
PLACES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Where in an answer a stop string is cut out, as shares of its length."""
BROKEN = "\N{REPLACEMENT CHARACTER}"


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


class Greedy:
    """The test of greedy answers: how many were read, and where they diverged.

    exact: the model in float32; own: the same in the engine's dtype, None where that is float32."""

    def __init__(self, exact: Model, own: Model | None, ends: Collection[int]):
        self.exact, self.own, self.ends = exact, own, frozenset(ends)
        self.answers = self.tokens = 0
        self.divergences: list[Divergence] = []

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

    def read(
        self, number: int, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, company: str
    ) -> None:
        """Judge the answer to prompt `number`. After a bug everything differs, so one is enough."""
        self.answers += 1
        self.tokens += len(tokens)
        start, text = len(prompt), [*prompt, *tokens]
        logits = self._warped(self.exact, text, start, params)
        for at in _unlike(logits, tokens):
            gap, noise = self._gap(text, start + at, logits[at], params)
            verdict = "tie" if gap <= 2 * noise else "bug"
            before = list(tokens[max(0, at - 12) : at])
            best = int(logits[at].argmax())
            facts = (tokens[at], best, round(gap, 6), round(noise, 6), verdict, "", before)
            self.divergences.append(Divergence(number, at, company, *facts))
            if verdict == "bug":
                return
        if why := self._wrong_end(tokens, params):
            before = list(tokens[-12:])
            self.divergences.append(Divergence(number, len(tokens), company, None, None, 0.0, 0.0, "bug", why, before))

    def _warped(self, model: Model, text: Sequence[int], start: int, params: SamplingParams) -> torch.Tensor:
        logits = model.along(text, start)
        contexts = [np.array(text[:end]) for end in range(start, len(text))]
        return warp(logits, params, contexts) if params.shifts_logits and len(logits) else logits

    def _gap(self, text: Sequence[int], at: int, exact: torch.Tensor, params: SamplingParams) -> tuple[float, float]:
        """How far the logit of token `at` of `text` lies below the best of `exact` [V], and what rounding moves."""
        finite = torch.isfinite(exact)
        noise = ROUNDING * float(exact[finite].abs().max())
        if self.own is not None:
            own = self._warped(self.own, text[: at + 1], at, params)[0]
            noise = max(noise, float((own - exact)[finite].abs().max()))
        return float(exact.max() - exact[text[at]]), noise

    def _wrong_end(self, tokens: Sequence[int], params: SamplingParams) -> str:
        """Why an answer does not end where it must, at its first end token or at max_tokens; "" if it does."""
        ends = set() if params.ignore_eos else self.ends
        first = next((i for i, token in enumerate(tokens) if token in ends), None)
        if first is not None and first + 1 < len(tokens):
            return "it goes on after an end token"
        if first is None and len(tokens) < params.max_tokens:
            return f"it ends after {len(tokens)} of {params.max_tokens} tokens, without an end token"
        if len(tokens) > params.max_tokens:
            return f"it has {len(tokens)} tokens; {params.max_tokens} were asked for"
        return ""


def _unlike(logits: torch.Tensor, tokens: Sequence[int]) -> list[int]:
    """Places of tokens that are not the best of `logits` [n, V]; of equal logits, any is the best."""
    if not tokens:
        return []
    chosen = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1))[:, 0]
    return torch.nonzero(chosen < logits.amax(-1))[:, 0].tolist()


@dataclass
class Stops:
    """Answers asked for with a stop string, and those that did not end before the first one, as they should."""

    answers: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """For the certificate."""
        bugs = len(self.wrong)
        return {"lossless": not bugs, "answers": self.answers, "bugs": bugs, "shown": self.wrong[:SHOWN]}


def check_stops(
    engine: UnderTest,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Output],
    params: SamplingParams,
    decode: Callable[[Sequence[int], Sequence[int]], str],
) -> Stops:
    """outputs: the engine's answers to `prompts`, by `params`, without stop strings. decode(prompt, answer): the text
    of all tokens of an answer."""
    asked = [(prompt, stop) for prompt, one in zip(prompts, outputs, strict=True) for stop in _strings(one.text or "")]
    stops = Stops(len(asked))
    each = [replace(params, stop=(stop,)) for _, stop in asked]
    again = engine.answer([prompt for prompt, _ in asked], each) if asked else []
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
