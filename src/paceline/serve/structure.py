"""Grammars: what may come next in an answer that must be JSON, fit a schema or be a tool call. By llguidance.

The mask is a function of the answer's tokens alone: the matcher goes back to where two answers part and reads on from
there, so that the nodes of a tree are judged like committed tokens. Draft and target are masked alike; the distribution
is that of plain constrained decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import PacelineError
from paceline.target.tokenizer import Tokenizer
from paceline.workbench.contestant import in_common

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITE_SPACE: dict[str, JsonCompileOptions] = {
    "limited": {"whitespace_pattern": r" |\n( {0,32}|\t{0,8})"},
    "any": {},
    "none": {"whitespace_flexible": False},
}
"""What may stand between the parts of JSON: one space or one line break with its indentation; as much as the model
likes, which a small one may fill its budget with; nothing. llguidance's options."""
CACHED = 64  # most compiled grammars in memory


class Matched:
    """A `sampling.Grammar` for one answer, whose `forced` tokens the drafter `grammar` drafts."""

    def __init__(self, matcher: Any, ends: Sequence[int]):
        self._new, self._ends = matcher, tuple(ends)
        self._begin()

    def allowed(self, answer: Sequence[int], size: int) -> torch.Tensor:
        """Which of `size` tokens may come after the answer, bool [size]. PacelineError if the grammar fails there."""
        for _ in range(2):  # a draft may have brought the matcher into an error, which it never leaves
            bits = self._matcher.compute_bitmask() if self.goes_on(answer) else None
            if not self._matcher.is_error():
                return _only(self._ends, size) if bits is None else _mask(bits, size)
            error = _reason(self._matcher)
            self._begin()
        raise PacelineError(f"the answer's grammar failed: {error}")

    def forced(self, answer: Sequence[int]) -> list[int]:
        """Tokens that must come next, as far as only one text is possible. A guess: other tokens may spell it."""
        return list(self._matcher.compute_ff_tokens()) if self.goes_on(answer) else []

    def is_whole(self, answer: Sequence[int]) -> bool:
        """Whether the answer may end here."""
        self.goes_on(answer)
        read = len(self._read) == len(answer) and not self._matcher.is_error()
        return read and bool(self._matcher.is_accepting())

    def _begin(self) -> None:
        self._matcher, self._read = self._new.deep_copy(), list[int]()

    def goes_on(self, answer: Sequence[int]) -> bool:
        """Bring the matcher to the end of the answer. False if the answer does not fit the grammar, or ends it."""
        same = in_common(self._read, answer)
        if same < len(self._read) and not self._matcher.rollback(len(self._read) - same):
            self._begin()
            same = 0
        del self._read[same:]
        for token in answer[same:]:
            if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token]):
                return False
            self._read.append(token)
        return not self._matcher.is_stopped()


class AfterReasoning:
    """A grammar of what follows the reasoning. Reasoning is free, but the answer cannot end in it.

    begin, end   the marks of reasoning. begin "": the prompt has begun it; else the answer may, or not."""

    def __init__(self, grammar: Matched, tokenizer: Tokenizer, begin: str, end: str, ends: Sequence[int]):
        self._grammar, self._tokenizer, self._end, self._ends = grammar, tokenizer, end, list(ends)
        self._opening = _written(begin, tokenizer) if begin else []
        self._gap = tokenizer.encode_text("\n\n")
        self._spelled: dict[int, str] = {}
        self._read: list[int] = []
        self._tails: list[str] = []  # the text's end after each token that was read

    def allowed(self, answer: Sequence[int], size: int) -> torch.Tensor:
        """Which of `size` tokens may come after the answer, bool [size]."""
        rest, optional = self._after(answer)
        if rest is None:
            mask = torch.full((size,), not optional)
            mask[[end for end in self._ends if end < size]] = False
        else:
            mask = self._grammar.allowed(rest, size)
        mask[optional] = True
        return mask

    def forced(self, answer: Sequence[int]) -> list[int]:
        """Tokens that must come next."""
        try:
            rest, optional = self._after(answer)
        except PacelineError:  # `allowed` will say so
            return []
        return [] if rest is None or optional else self._grammar.forced(rest)

    def _after(self, answer: Sequence[int]) -> tuple[list[int] | None, list[int]]:
        """(tokens for the grammar to read, None within reasoning and its marks; tokens that are allowed besides: the
        next one of the opening mark, or of the empty line after reasoning)."""
        opening, answer = self._opening, list(answer)
        if answer[: len(opening)] != opening:
            begun = answer == opening[: len(answer)]
            return (None if begun and answer else answer), ([opening[len(answer)]] if begun else [])
        found = self._end_of(answer[len(opening) :])
        if found is None:
            return None, []
        at, rest = found
        if rest and not self._grammar.goes_on(rest):
            raise PacelineError(f"the answer's grammar failed: a token joins {self._end} to what cannot follow it")
        answer = answer[len(opening) + at :]
        if not rest and answer == self._gap[: len(answer)] and len(answer) < len(self._gap):
            return (None if answer else []), [self._gap[len(answer)]]
        if not rest and answer[: len(self._gap)] == self._gap:
            answer = answer[len(self._gap) :]
        return rest + answer, []

    def _end_of(self, tokens: list[int]) -> tuple[int, list[int]] | None:
        """(number of tokens up to the closing mark, tokens of the text that follows the mark within the last one)."""
        same = in_common(self._read, tokens)
        del self._read[same:], self._tails[same:]
        for token in tokens[same:]:
            tail = self._tails[-1] if self._tails else ""
            if self._end in tail:
                break
            if token not in self._spelled:
                self._spelled[token] = str(self._tokenizer.inner.decode([token]))
            self._read.append(token)
            self._tails.append(tail[1 - len(self._end) :] + self._spelled[token])
        if not self._tails or self._end not in self._tails[-1]:
            return None
        return len(self._read), self._tokenizer.encode_text(self._tails[-1].partition(self._end)[2].lstrip())


def _written(mark: str, tokenizer: Tokenizer) -> list[int]:
    """A mark's tokens: one of its own, if there is one."""
    own = tokenizer.inner.convert_tokens_to_ids(mark)
    return [own] if own is not None and tokenizer.inner.decode([own]) == mark else tokenizer.encode_text(mark)


def _only(tokens: Sequence[int], size: int) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[[token for token in tokens if token < size]] = True
    return mask


def _mask(bits: bytes, size: int) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
    mask = (flat.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).flatten().bool()
    return torch.nn.functional.pad(mask[:size], (0, max(0, size - len(mask))))


def _reason(matcher: Any) -> str:
    """Why a matcher failed, in one line without its state."""
    return " ".join(matcher.get_error().split("<state>")[0].split())


class Grammars:
    """Makes grammars for one tokenizer. PacelineError, with the library's reason, for a schema it cannot keep to."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int], white_space: str = "limited"):
        from llguidance.hf import from_tokenizer

        if white_space not in WHITE_SPACE:
            raise PacelineError(f"--json-whitespace is {white_space!r}; it can be {', '.join(WHITE_SPACE)}")
        self._ends, self._white_space, self._tokenizer = tuple(ends), WHITE_SPACE[white_space], tokenizer
        self._compiled = lru_cache(CACHED)(self._compile)
        self._tokens = from_tokenizer(tokenizer.inner, n_vocab=vocab_size, eos_token=list(ends) or None)

    def json_object(self) -> Matched:
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Any, white_space: JsonCompileOptions | None = None) -> Matched:
        """JSON that fits a schema. white_space: other rules than the server's."""
        from llguidance import LLMatcher

        options = self._white_space if white_space is None else white_space
        try:
            return self._matched(LLMatcher.grammar_from_json_schema(json.dumps(schema), options))
        except (ValueError, TypeError) as error:
            raise PacelineError(f"the JSON schema cannot be kept to: {error}") from None

    def either(self, *schemas: dict[str, Any]) -> Matched:
        """JSON that fits one of several schemas, each with definitions of its own."""
        from llguidance import LLMatcher

        forms = [json.dumps({"x-guidance": self._white_space, **schema}) for schema in schemas]
        names = [f"form_{i}" for i in range(len(forms))]
        rules = [f"{name}: %json {form}" for name, form in zip(names, forms, strict=True)]
        try:
            return self._matched(LLMatcher.grammar_from_lark("\n".join([f"start: {' | '.join(names)}", *rules])))
        except (ValueError, TypeError) as error:
            raise PacelineError(f"the JSON schema cannot be kept to: {error}") from None

    def check(self, schema: Any) -> None:
        """PacelineError for a schema that `fits` cannot read."""
        self.json_schema(schema, WHITE_SPACE["any"])

    def fits(self, schema: Any, text: str) -> bool:
        """Whether a text is JSON that fits a schema, whatever its white space."""
        return self.json_schema(schema, WHITE_SPACE["any"]).is_whole(self._tokenizer.encode_text(text))

    def after_reasoning(self, grammar: Matched, marks: tuple[str, str], inside: bool) -> AfterReasoning:
        """A grammar that begins where reasoning ends."""
        return AfterReasoning(grammar, self._tokenizer, "" if inside else marks[0], marks[1], self._ends)

    def _matched(self, grammar: str) -> Matched:
        return Matched(self._compiled(grammar), self._ends)

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        for text in ("", "{"):  # many a grammar fails at its first token only
            begun = matcher.deep_copy()
            begun.try_consume_tokens(self._tokens.tokenize_str(text))
            begun.compute_bitmask()
            if begun.is_error():
                raise PacelineError(f"the JSON schema cannot be kept to: {_reason(begun)}")
        return matcher
