"""prompt-lookup: copy what followed an earlier occurrence of the last n tokens.

Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding), transformers and vLLM have
different rules for it (`variant`; docs/methods/prompt-lookup.md lists them). All rules scan the text once, without
state, for the first place with the longest match. With `past` (ours), finished requests are searched, too."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numba import njit

from paceline.core.options import Options, option
from paceline.draft.base import Drafter, DraftTree, Facts, IntArray, Request
from paceline.draft.text.copying import BySalt, up_to_end
from paceline.errors import MethodError

VARIANTS = {"published": (1, 3, True), "transformers": (1, 2, False), "vllm": (0, 0, False)}
"""Shortest and longest run, in tokens (0: equal to the other, or 5), and whether a whole draft must follow the run."""


@dataclass(frozen=True)
class PromptLookupConfig(Options):
    variant: Literal["published", "transformers", "vllm"] = option(
        "published", "program whose rule is followed; published: the author's"
    )
    draft: int = option(10, "most tokens a draft holds; published and transformers: 10, vllm: no default", least=1)
    max_ngram: int | None = option(
        None, "tokens of the longest run looked up; none: published 3, transformers 2, vllm min_ngram or 5", least=1
    )
    min_ngram: int | None = option(
        None, "tokens of the shortest run looked up; none: vllm max_ngram or 5, the other two 1", least=1
    )
    past: int = option(0, "tokens of finished requests to search too, the oldest forgotten first; 0: off", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest, longest = self.ngrams
        if shortest > longest:
            raise MethodError(f"prompt-lookup: min_ngram is {shortest}; it must be at most max_ngram, {longest}.")

    @property
    def ngrams(self) -> tuple[int, int]:
        """Number of tokens of the shortest and the longest run that is looked up."""
        shortest, longest, _ = VARIANTS[self.variant]
        least, most = self.min_ngram, self.max_ngram
        return least or shortest or most or 5, most or longest or least or 5


@dataclass
class Finished:
    """Finished requests, newest first. text: their tokens, int64 [n], with _SEPARATOR after each request."""

    text: IntArray = field(default_factory=lambda: np.empty(0, np.int64))


class PromptLookup(Drafter):
    """Copies the tokens that followed the same few tokens earlier in the text."""

    name = "prompt-lookup"
    lossless = "yes"
    paper = "Saxena 2023, Prompt Lookup Decoding"
    Config = PromptLookupConfig

    def __init__(self, config: PromptLookupConfig = PromptLookupConfig()):
        self.config = config
        self._past = BySalt(Finished)

    def bind(self, target: Facts) -> None:
        super().bind(target)
        self.lookup(np.array([0, 0]))

    def lookup(self, text: IntArray, past: Finished = Finished()) -> IntArray:
        """The tokens that the rule proposes after `text` int64 [n]; `draft` cuts them at end tokens and in length."""
        shortest, longest = self.config.ngrams
        full = VARIANTS[self.config.variant][2]
        follow = self.config.draft if full else 1
        start, length = _find(text, text, shortest, longest, follow, full)
        if length < longest and len(past.text):
            place, _ = _find(past.text, text, length + 1, longest, follow, False)
            if place >= 0:
                return up_to_end(past.text[place : place + self.config.draft], _SEPARATOR, keep=False)
        return text[start : start + self.config.draft] if start >= 0 else text[:0]

    def drop(self, row: Request) -> None:
        if self.config.past and row.is_complete:
            past = self._past.of(row.params.cache_salt)
            past.text = np.concatenate([row.tokens, [*_SEPARATOR], past.text])[: self.config.past]

    def draft(self, row: Request, most: int) -> DraftTree:
        drafted = self.lookup(row.tokens, self._past.of(row.params.cache_salt))[:most]
        if self.config.variant == "transformers":
            drafted = up_to_end(drafted, row.ends, keep=False)
        return self.chain_after(row, drafted)


_SEPARATOR = frozenset({-1})
"""Stands between finished requests. It is no token, so nothing matches across it."""


@njit(cache=True)
def _find(text, ending, shortest, longest, follow, apart):  # type: ignore[no-untyped-def]
    """Find the longest match in `text`, `shortest` to `longest` tokens, with the end of `ending`. Returns the first
    place after such a match, and the match's length; -1 and shortest - 1 if nothing matches.

    follow  smallest number of tokens after the place.
    apart   after a match of n tokens, the place must lie before the text's last n tokens (published: start < len - n).
    """
    end, last = len(text), len(ending) - 1
    best, place = shortest - 1, -1
    for start in range(shortest, end - follow + 1):
        if text[start - 1] != ending[last]:
            continue
        most = min(longest, start, last + 1)
        if apart:
            most = min(most, end - 1 - start)
        if most <= best:
            continue
        length = 1
        while length < most and text[start - 1 - length] == ending[last - length]:
            length += 1
        if length > best:
            best, place = length, start
            if best == longest:
                break
    return place, best
