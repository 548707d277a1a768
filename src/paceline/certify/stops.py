"""Stop strings: an answer must end before the first one, also where it was drafted whole.

Strings are cut out of the engine's own greedy answers, at places where a draft may hold them; the answer is asked for
again with each. Its tokens must reach just up to the string, and its text must end before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.certify.engines import Said, UnderTest
from paceline.certify.greedy import SHOWN
from paceline.sampling import SamplingParams

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
