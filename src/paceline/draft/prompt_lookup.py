"""prompt-lookup: copy what followed the last n tokens when they stood in the text before.

Three rules under one name, for three programs do three things:

* published: Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding). The last 3
  tokens, else 2, else 1; the earliest place that has a full draft behind it and does not overlap the end.
* transformers: `generate(prompt_lookup_num_tokens=...)`. The last 2 tokens, else 1; the earliest place; a
  draft may be shorter where the text ends, and stops before an end token.
* vllm: `method: ngram`. The longest n from `min_ngram` to `max_ngram` (both 5 unless given), the earliest
  place; a draft may be shorter where the text ends.

All of them are one scan: match lengths are compared backwards from every place, and the first place with the
longest match wins. There is no state; a draft costs O(length of the text), compiled. Lossless: the drafts are
point masses, so acceptance keeps the target's distribution exactly.

With `past`, which none of the three has, finished requests are searched too, the latest first, for a match that is
longer than the text's own.

Where we differ: a text shorter than max_ngram is searched for what it has, where the published code raises an
error; transformers' check of drafts against its logits processors is left to verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numba import njit

from paceline.draft.base import Drafter
from paceline.draft.text.copying import end_tokens, up_to_end
from paceline.errors import MethodError
from paceline.row import Request
from paceline.target.base import Facts
from paceline.tree import DraftTree, IntArray


@dataclass(frozen=True)
class PromptLookupConfig:
    """Options of prompt-lookup."""

    variant: Literal["published", "transformers", "vllm"] = field(
        default="published", metadata={"help": "whose rule: the author's, transformers' or vLLM's"}
    )
    draft: int = field(
        default=10,
        metadata={"help": "most tokens a draft holds; published code and transformers: 10, vllm has no default"},
    )
    max_ngram: int | None = field(
        default=None,
        metadata={"help": "longest run of tokens looked up; none: published 3, transformers 2, vllm min_ngram or 5"},
    )
    min_ngram: int | None = field(
        default=None,
        metadata={"help": "shortest run looked up; none: published and transformers 1, vllm max_ngram or 5"},
    )
    past: int = field(
        default=0, metadata={"help": "tokens of finished requests to search too, the oldest forgotten first; 0: off"}
    )

    def __post_init__(self) -> None:
        shortest, longest = self.ngrams
        if self.draft < 1 or not 1 <= shortest <= longest:
            raise MethodError(
                f"prompt-lookup: draft is {self.draft}, min_ngram {shortest}, max_ngram {longest}; "
                "all must be 1 or more, and min_ngram at most max_ngram."
            )
        if self.past < 0:
            raise MethodError(f"prompt-lookup: past is {self.past}; it must be 0 or more tokens.")

    @property
    def ngrams(self) -> tuple[int, int]:
        """Shortest and longest run of tokens looked up."""
        shortest, longest = self.min_ngram, self.max_ngram
        if self.variant == "vllm":
            either = next((n for n in (shortest, longest) if n is not None), 5)
            return either if shortest is None else shortest, either if longest is None else longest
        usual = 3 if self.variant == "published" else 2
        return 1 if shortest is None else shortest, usual if longest is None else longest


class PromptLookup(Drafter):
    """Copies what followed the same few tokens earlier in the text."""

    name = "prompt-lookup"
    lossless = "yes"
    paper = "Saxena 2023, Prompt Lookup Decoding"
    Config = PromptLookupConfig

    def __init__(self, config: PromptLookupConfig = PromptLookupConfig()):
        self.config = config
        self._eos: Sequence[int] = ()
        self._past: IntArray = np.empty(0, np.int64)

    def bind(self, target: Facts) -> None:
        """Compile; take the end tokens."""
        self._eos = target.eos_token_ids
        self.lookup(np.array([0, 0]))

    def lookup(self, text: IntArray) -> IntArray:
        """The rule itself: what is proposed behind `text` int64 [n], end tokens and the row's room not minded."""
        shortest, longest = self.config.ngrams
        full = self.config.variant == "published"
        follow = self.config.draft if full else 1
        start, length = _find(text, text, shortest, longest, follow, full)
        if length < longest and len(self._past):
            place, _ = _find(self._past, text, length + 1, longest, follow, False)
            if place >= 0:
                return up_to_end(self._past[place : place + self.config.draft], _BETWEEN, keep=False)
        return text[start : start + self.config.draft] if start >= 0 else text[:0]

    def drop(self, row: Request) -> None:
        if self.config.past and row.is_complete:
            self._past = np.concatenate([row.tokens, [*_BETWEEN], self._past])[: self.config.past]

    def draft(self, row: Request) -> DraftTree:
        if row.max_draft < 1:
            return DraftTree.root(row.last_token)
        drafted = self.lookup(row.tokens)[: row.max_draft]
        if self.config.variant == "transformers":
            drafted = up_to_end(drafted, end_tokens(row, self._eos), keep=False)
        return DraftTree.chain(row.last_token, drafted, source=self.name)


_BETWEEN = frozenset({-1})
"""What stands between two requests of the past; no token, so nothing matches across it."""


@njit(cache=True)
def _find(text, ending, shortest, longest, follow, apart):  # type: ignore[no-untyped-def]
    """Where in `text` the draft begins that follows the end of `ending`, and the length of the match: the first place
    with the longest match of `shortest` to `longest` tokens; -1 and shortest - 1 if there is none.

    follow  tokens that must stand behind that place. apart: it must lie before the last n tokens of the text,
    n being the length of the match (published: start < len - n)."""
    end, last = len(text), len(ending) - 1
    best, found = shortest - 1, -1
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
            best, found = length, start
            if best == longest:
                break
    return found, best
