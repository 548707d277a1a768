"""Greedy answers: every token must be the model's best after the tokens before it, or tie with it; and stop strings.

An answer is read by the model alone, in float32, in one forward: no second answer is written, and what comes after a
tie is still judged. A token that is not the best is a tie where its logit lies no further below than rounding moves
logits there: twice the most that the engine's dtype changes any, or float32 itself. Anything else is a bug. And there
must not be more ties than the model has when it is rounded: an engine that accepts what is nearly best shows no other.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from paceline.certify.engines import answers
from paceline.certify.verdict import CONTEXT, Divergence, Greedy, Stops
from paceline.core.sampling import SamplingParams, warp
from paceline.workbench.client import Completion
from paceline.workbench.endpoint import Endpoint
from paceline.workbench.reference import Rounding, noise_of

PLACES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # where in an answer a stop string is cut out, as shares of its length
BROKEN = "\N{REPLACEMENT CHARACTER}"


class Reader:
    """Reads greedy answers, and notes where they diverge."""

    def __init__(self, rounding: Rounding, ends: Collection[int]):
        self.rounding, self.ends = rounding, frozenset(ends)
        self.found = Greedy()
        self._read: set[int] = set()  # contexts, hashed: passes write the same text again

    def read(
        self, number: int, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, company: str
    ) -> None:
        """Judge the answer to prompt `number`. After a bug everything differs, so one is enough."""
        self.found.answers += 1
        self.found.tokens += len(tokens)
        start, text = len(prompt), [*prompt, *tokens]
        readings = self.rounding.measured(text, start)
        exact, *rounded = [self._warped(one, text, start, params) for one in readings]
        best, noise = exact.argmax(-1), noise_of(exact, rounded)
        flipped = _unlike(exact, rounded[0].argmax(-1)) if rounded else torch.zeros(0)
        unlike = _unlike(exact, torch.tensor(tokens, dtype=torch.long))
        for at in range(len(tokens)):
            of = None
            if unlike[at]:
                gap = float(exact[at].max() - exact[at, tokens[at]])
                before = list(tokens[max(0, at - CONTEXT) : at])
                of = Divergence(number, at, company, tokens[at], int(best[at]), gap, float(noise[at]), before=before)
                self.found.divergences.append(of)
                if not of.is_tie:
                    return
            if rounded and (context := hash((params.shifts_logits, *text[: start + at]))) not in self._read:
                self._read.add(context)
                self.found.places += 1
                self.found.tied += of is not None
                self.found.rounded += bool(flipped[at])
        if why := self._wrong_end(tokens, params):
            before = list(tokens[-CONTEXT:])
            self.found.divergences.append(Divergence(number, len(tokens), company, why=why, before=before))

    def _warped(self, logits: torch.Tensor, text: Sequence[int], start: int, params: SamplingParams) -> torch.Tensor:
        if not params.shifts_logits or not len(logits):
            return logits
        contexts = [np.array(text[:end]) for end in range(start, len(text))]
        return warp(logits, params.of_row(start, self.ends), contexts)

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


def _unlike(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Which of `tokens` [n] are not the best of `logits` [n, V], bool [n]; of equal logits, any is the best."""
    if not len(tokens):
        return torch.zeros(0, dtype=torch.bool)
    return logits.gather(-1, tokens.unsqueeze(-1))[:, 0] < logits.amax(-1)


def check_stops(
    engine: Endpoint, prompts: Sequence[Sequence[int]], replies: Sequence[Completion], params: SamplingParams,
    decode: Callable[[Sequence[int], Sequence[int]], str], size: int, over: Callable[[], bool] = lambda: False,
) -> Stops:  # fmt: skip
    """replies: answers to `prompts` without stop strings. decode(prompt, answer): the text of all tokens.

    size: requests handed to the engine together; over: whether there is no time for more."""
    asked = [(prompt, stop) for prompt, one in zip(prompts, replies, strict=True) for stop in _strings(one.text)]
    again: list[Completion] = []
    while len(again) < len(asked) and not over():
        some = asked[len(again) : len(again) + size]
        each = [replace(params, stop=(stop,)) for _, stop in some]
        again += answers(engine, [prompt for prompt, _ in some], each)
    stops = Stops(len(again))
    for (prompt, stop), one in zip(asked, again, strict=False):
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
