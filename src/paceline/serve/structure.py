"""Grammars: what may come next in an answer that must be JSON, fit a schema or be a tool call. By llguidance.

    grammars = Grammars(tokenizer, vocab_size)
    params = SamplingParams(grammar=grammars.json_schema({"type": "object", ...}))

The mask is a function of the answer's tokens alone: the matcher goes back to where two answers part and reads on from
there, so that the nodes of a tree are judged like committed tokens. Draft and target are masked alike; the distribution
is that of plain constrained decoding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.target.tokenizer import Tokenizer

CACHED = 64
"""Grammars that are kept compiled."""


class Matched:
    """A `sampling.Grammar` for one answer."""

    def __init__(self, matcher: Any, ends: Sequence[int]):
        self._matcher, self._ends = matcher, tuple(ends)
        self._read: list[int] = []
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}

    def allowed(self, answer: Sequence[int], size: int) -> torch.Tensor:
        """Which of `size` tokens may come after the answer, bool [size]."""
        if not self._go_to(answer):
            return self._only_ends(size)
        if self._matcher.is_stopped():
            return self._only_ends(size)
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        mask = (bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).flatten().bool()
        return torch.nn.functional.pad(mask[:size], (0, max(0, size - len(mask))))

    def forced(self, answer: Sequence[int]) -> list[int]:
        """Tokens that must come next, as far as only one text is possible; a guess, for a text may be written in
        other tokens."""
        return list(self._matcher.compute_ff_tokens()) if self._go_to(answer) and not self._matcher.is_stopped() else []

    def _go_to(self, answer: Sequence[int]) -> bool:
        """Bring the matcher to the end of the answer; False where the answer is not of the grammar."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._read, answer, strict=False)))
        if back := len(self._read) - same:
            self._matcher.rollback(back)
            del self._read[same:]
        for token in answer[same:]:
            if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token]):
                return False
            self._read.append(token)
        return True

    def _only_ends(self, size: int) -> torch.Tensor:
        mask = torch.zeros(size, dtype=torch.bool)
        mask[[end for end in self._ends if end < size]] = True
        return mask


class Grammars:
    """Makes grammars for one tokenizer. PacelineError, with the library's reason, for a schema it cannot keep to."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]):
        from llguidance.hf import from_tokenizer

        self._ends = tuple(ends)
        self._compiled = lru_cache(CACHED)(self._compile)
        self._tokens = from_tokenizer(tokenizer.inner, n_vocab=vocab_size, eos_token=list(ends) or None)

    def json_object(self) -> Matched:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Any) -> Matched:
        """JSON that fits a schema."""
        from llguidance import LLMatcher

        try:
            return self._matched(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        except (ValueError, TypeError) as error:
            raise PacelineError(f"the JSON schema cannot be kept to: {error}") from None

    def regex(self, pattern: str) -> Matched:
        """Text that a regular expression matches whole."""
        from llguidance import LLMatcher

        return self._matched(LLMatcher.grammar_from_regex(pattern))

    def _matched(self, grammar: str) -> Matched:
        return Matched(self._compiled(grammar).deep_copy(), self._ends)

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, grammar)
        if matcher.is_error():
            raise PacelineError(f"the JSON schema cannot be kept to: {' '.join(matcher.get_error().split())}")
        return matcher
