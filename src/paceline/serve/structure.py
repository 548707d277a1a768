"""Grammars: masks of the next token in an answer that must be JSON, fit a schema or be a tool call. By llguidance.

The mask is a function of the answer's tokens alone: the matcher goes back to where two answers part and reads on, so
nodes of a tree are judged like committed tokens. Draft and target are masked alike, so the distribution is that of
plain constrained decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import numpy as np
import torch

from paceline.core.tree import IntArray
from paceline.errors import PacelineError, shortened
from paceline.formats.tokenizer import Tokenizer
from paceline.net.completion import in_common
from paceline.serve.reading import FINAL, HARMONY
from paceline.serve.settings import Refused

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITE_SPACE: dict[str, JsonCompileOptions] = {
    "limited": {"whitespace_pattern": r" |\n( {0,32}|\t{0,8})"},
    "any": {},
    "none": {"whitespace_flexible": False},
}
"""What may stand between the parts of JSON: one space or one line break with its indentation; as much as the model
likes, which a small one may fill its budget with; nothing. llguidance's options."""
CACHED = 64  # Most compiled grammars in memory.
TRIED, LEAST_TRIED = 4096, 4  # Most tokens to try at a place for a closing after them, for short and for long closings.
WORK = 1 << 18  # Most work at a place, since all rows wait: a try costs the square of the closing's length.
DROPPED = 32  # Most bytes by which a token is expected to shorten a closing.
LONGEST = 4096  # Most steps of a search for a closing.
LETTERS = 8  # Most bytes of a token in a closing that is searched for.
MUCH = 1 << 20  # More tokens than any answer has.


class _Answers:
    """A set of answers, kept as hashes, because a long answer may have one at each of its tokens."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def add(self, answer: Sequence[int]) -> None:
        self._seen.add((len(answer), hash(tuple(answer))))

    def begin(self, answer: Sequence[int]) -> bool:
        """Whether a proper beginning of `answer` is in the set."""
        lengths = sorted({length for length, _ in self._seen if length < len(answer)})
        return any((length, hash(tuple(answer[:length]))) in self._seen for length in lengths)


class Matched:
    """A `sampling.Grammar` for one answer, whose `forced` tokens the drafter `grammar` drafts."""

    def __init__(self, matcher: Any, ends: Sequence[int]):
        self.new, self._ends = matcher, tuple(ends)
        self._begin()

    def allowed(self, answer: Sequence[int], size: int) -> torch.Tensor:
        """Which of `size` tokens may come after the answer, bool [size]. Raises PacelineError if the grammar fails, or
        if the answer does not fit it."""
        for _ in range(2):  # A draft may have left the matcher in an error, which needs a new matcher.
            bits = self._matcher.compute_bitmask() if self.goes_on(answer) else None
            if not self._matcher.is_error():
                if bits is None and not self._matcher.is_stopped():
                    raise PacelineError(f"the answer's grammar failed: token {len(self._read)} of the answer breaks it")
                return _only(self._ends, size) if bits is None else _mask(bits, size)
            error = _reason(self._matcher)
            self._begin()
        raise PacelineError(f"the answer's grammar failed: {error}")

    def forced(self, answer: Sequence[int]) -> list[int]:
        """Tokens that must come next, while only one text is possible.
        This is a guess: other tokens may spell the text."""
        return list(self._matcher.compute_ff_tokens()) if self.goes_on(answer) else []

    def is_whole(self, answer: Sequence[int]) -> bool:
        """Whether the answer may end here."""
        self.goes_on(answer)
        read = len(self._read) == len(answer) and not self._matcher.is_error()
        return read and bool(self._matcher.is_accepting())

    def fresh(self) -> Self:
        """The same grammar before its first token, for use in another thread."""
        made = copy(self)
        made._begin()
        return made

    def _begin(self) -> None:
        self._matcher, self._read = self.new.deep_copy(), list[int]()

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


class Closing(Matched):
    """A grammar whose text closes within `most` tokens: every allowed token leaves room for a closing.

    A closing of the answer so far is carried along, and its next token is always allowed. Another token is allowed if
    the grammar allows it and a closing fits after it: the same closing, an end of it, or a new one that is searched
    for. While there is more room than any token can take (`grows`), no token is tried. Otherwise the first TRIED
    doubtful tokens are tried, fewer if the closing is long, and the rest is forbidden.
    The mask depends on the answer alone.

    tokens  llguidance's tokenizer; most: most tokens of the whole answer.
    grows   most tokens by which a closing can become longer: at a sign of JSON, and by a letter of free text."""

    def __init__(self, matcher: Any, ends: Sequence[int], tokens: Any, grows: tuple[int, int], most: int):
        super().__init__(matcher, ends)
        self._tokens, self._grows, self.most = tokens, grows, most
        self._signs, self._letters = _spelled(tokens)
        self._walked, self._closings = list[int](), [self._closing()]
        self._limited = _Answers()  # Answers after which a token did not fit.

    def fresh(self) -> Self:
        made = super().fresh()
        made._walked, made._closings, made._limited = [], self._closings[:1], _Answers()
        return made

    @property
    def least(self) -> int:
        """The length in tokens of the shortest known answer."""
        return len(self._closings[0])

    def allowed(self, answer: Sequence[int], size: int) -> torch.Tensor:
        mask = super().allowed(answer, size)
        closing, room = self._closing_of(answer), self.most - len(answer) - 1
        if room < 0 or not self.goes_on(answer):
            return mask
        legal, (at_sign, by_letter) = np.flatnonzero(mask.numpy()), self._grows
        by_letter = by_letter if len(legal) > TRIED else at_sign  # A letter of a name or word may decide much.
        doubtful = legal[at_sign * self._signs[legal] + by_letter > room - len(closing)]
        tried = doubtful[: min(TRIED, max(WORK // max(len(closing), 1) ** 2, LEAST_TRIED))].tolist()
        kept = [token for token in tried if token in self._ends or self._fits(token, closing, room)]
        mask[doubtful] = False
        mask[kept] = True
        mask[closing[:1]] = True
        if len(kept) < len(doubtful):
            self._limited.add(answer)
        return mask

    def forced(self, answer: Sequence[int]) -> list[int]:
        closing = self._closing_of(answer)
        return closing if self.most - len(answer) <= len(closing) else super().forced(answer)

    def was_limited(self, answer: Sequence[int]) -> bool:
        """Whether the limit of tokens decided any token of the answer."""
        return self._limited.begin(answer)

    def _closing_of(self, answer: Sequence[int]) -> list[int]:
        same = in_common(self._walked, answer)
        del self._walked[same:], self._closings[same + 1 :]
        for i in range(same, len(answer)):
            before = self._closings[-1]
            if before and answer[i] == before[0]:
                after = before[1:]
            else:
                after = [] if not self.goes_on(answer[: i + 1]) else self._shortest(before)
            self._walked.append(answer[i])
            self._closings.append(after)
        return self._closings[-1]

    def _fits(self, token: int, closing: list[int], room: int) -> bool:
        """Whether at most `room` tokens can close the text after `token`."""
        if len(closing) <= room and self._ends_with([token, *closing]):
            return True
        if not self._matcher.try_consume_tokens([token]):
            return False
        try:
            return len(self._shortest(closing, LETTERS * (room + 1))) <= room
        except PacelineError:
            return False
        finally:
            self._matcher.rollback(1)

    def _shortest(self, before: list[int], steps: int = LONGEST) -> list[int]:
        """A closing at the matcher's place. before: a closing one token earlier."""
        text = self._tokens.decode_bytes(before)
        for begin in dict.fromkeys([*range(min(len(text), DROPPED) + 1), len(text)]):
            closing = self._tokens.tokenize_bytes(text[begin:])
            if self._ends_with(closing):
                return list(closing)
        return self._closing(steps)

    def _ends_with(self, tokens: Sequence[int]) -> bool:
        return bool(self._matcher.validate_tokens([*tokens, self._tokens.eos_token]) == len(tokens) + 1)

    def _closing(self, steps: int = LONGEST) -> list[int]:
        """Close the text byte by byte. Raises PacelineError if `steps` find no closing."""
        for order in (b'}]"', b'"}]'):
            copy, found = self._matcher.deep_copy(), list[int]()
            while not copy.is_accepting() and len(found) < min(steps, LONGEST):
                step = list(copy.compute_ff_tokens()) or self._step(copy, order, len(found))
                if not step or not copy.consume_tokens(step):
                    break
                found += step
            if copy.is_accepting():
                text = self._tokens.tokenize_bytes(self._tokens.decode_bytes(found))
                return list(text) if len(text) < len(found) and self._ends_with(text) else found
        raise PacelineError("on_length: no short end of such an answer is known; leave it out")

    def _step(self, matcher: Any, order: bytes, step: int) -> list[int]:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        legal = {byte: token for byte, token in self._letters.items() if mask[token]}
        in_text = sum(byte in legal for byte in b"aeiou") > 2  # Inside a text } and ] close nothing.
        first = b'"' if in_text else order + b"0123456789ntf[{:,"
        chosen = next((legal[byte] for byte in first if byte in legal), None)
        others = list(legal.values())
        return [chosen] if chosen is not None else others[step % len(others) :][:1] if others else []


class AfterReasoning:
    """A grammar for the text after reasoning. Reasoning is free, but the answer cannot end in it.

    begin, end   marks of reasoning. begin "": the prompt has begun it; else the answer may begin it. With a grammar
                 that closes, reasoning ends while there is room for the rest.
    then         text that must follow `end`."""

    def __init__(
        self, grammar: Matched, tokenizer: Tokenizer, begin: str, end: str, ends: Sequence[int], then: str = ""
    ):  # fmt: skip
        self._grammar, self._tokenizer, self._end, self._ends = grammar, tokenizer, end, list(ends)
        self._opening = _written(begin, tokenizer) if begin else []
        self._then = tokenizer.encode_text(then) if then else []
        self._gap = tokenizer.encode_text("\n\n")
        self._bound: Closing | None = grammar if isinstance(grammar, Closing) else None
        self._closes, self._limited = _written(end, tokenizer), _Answers()
        if self._bound is not None:
            self._most, self._gap = self._bound.most, self._gap if len(self._gap) == 1 else []
            # Room for the closing mark, perhaps begun in other tokens, and an empty line.
            self._reserve = self._bound.least + 2 * len(self._closes) + 2 + len(self._then)
            if not begin and self._reserve > self._most:
                raise _refused(self._most, self._reserve)
        self._spelled: dict[int, str] = {}
        self._read: list[int] = []
        self._tails: list[str] = []  # The end of the text after each token read.

    def fresh(self) -> Self:
        """As `Matched.fresh`."""
        made = copy(self)
        made._grammar = self._grammar.fresh()
        made._bound = made._grammar if isinstance(made._grammar, Closing) else None
        made._limited, made._read, made._tails = _Answers(), [], []
        return made

    def allowed(self, answer: Sequence[int], size: int) -> torch.Tensor:
        """Which of `size` tokens may come after the answer, bool [size]."""
        rest, optional = self._after(answer)
        if self._bound is not None:
            if rest is None and not optional and self._most - len(answer) <= self._reserve:
                self._limited.add(answer)
                return _only([self._next_of_mark(answer)], size)
            if rest is not None:
                self._bound.most = self._most - (len(answer) - len(rest))
                optional = optional if self._bound.most > self._reserve + len(self._opening) else []
        if rest is None:
            mask = torch.full((size,), not optional)
            mask[[end for end in self._ends if end < size]] = False
        else:
            mask = self._grammar.allowed(rest, size)
        mask[optional] = True
        return mask

    def _next_of_mark(self, answer: Sequence[int]) -> int:
        """The token that begins or continues the mark that ends reasoning."""
        mark = self._closes
        begun = range(min(len(mark) - 1, len(answer)), -1, -1)
        return mark[next(n for n in begun if list(answer[len(answer) - n :]) == mark[:n])]

    def was_limited(self, answer: Sequence[int]) -> bool:
        """As `Closing.was_limited`."""
        rest = self._after(answer)[0] or []
        cut = self._limited.begin(answer)
        return cut or (self._bound is not None and self._bound.was_limited(rest))

    def forced(self, answer: Sequence[int]) -> list[int]:
        """Tokens that must come next."""
        try:
            rest, optional = self._after(answer)
        except PacelineError:  # `allowed` will raise it.
            return []
        return [] if rest is None or optional else self._grammar.forced(rest)

    def _after(self, answer: Sequence[int]) -> tuple[list[int] | None, list[int]]:
        """(tokens for the grammar to read, None within reasoning and its marks; other allowed tokens: the next token of
        the opening mark, or of the empty line after reasoning)."""
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
        if (then := self._then) and answer[: len(then)] == then[: len(answer)]:
            return (None, [then[len(answer)]]) if len(answer) < len(then) else (answer[len(then) :], [])
        if not rest and answer == self._gap[: len(answer)] and len(answer) < len(self._gap):
            return (None if answer else []), [self._gap[len(answer)]]
        if not rest and answer[: len(self._gap)] == self._gap:
            answer = answer[len(self._gap) :]
        return rest + answer, []

    def _end_of(self, tokens: list[int]) -> tuple[int, list[int]] | None:
        """(number of tokens up to the closing mark, tokens of the text after the mark within its last token); None
        without one."""
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
    """A mark's tokens: its own token, if it has one, else those of its text."""
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
    return _short(matcher.get_error().split("<state>")[0])


def _short(what: object) -> str:
    """Shorten an error of the library, which may repeat the whole schema."""
    return shortened(" ".join(str(what).split()), 400)


def _refused(most: int, least: int) -> Refused:
    what = f"on_length is close, and there are {most} tokens for the answer, which takes at least {least}"
    return Refused(f"{what}; raise max_tokens", "max_tokens")


def _without_marks(inner: Any) -> str:
    """A fast tokenizer in JSON, with its marks renamed to strings that no text contains.

    Text that a grammar forces is then spelled in ordinary tokens. The library takes no mark for text, so a text in
    which the tokenizer found a mark would never fit. Every token keeps its id, and marks are masked in free text."""
    backend = copy(inner.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    made = json.loads(backend.to_str())
    model, named = made["model"], dict[str, str]()
    for one in made["added_tokens"]:
        name = one["content"]
        # The library misreads names that are not ASCII.
        if one["special"] or re.fullmatch("<.*>", name, re.DOTALL) or not name.isascii():
            one["content"] = named[name] = f"<{uuid4().hex}>"
    if isinstance(model["vocab"], dict):
        model["vocab"] = {named.get(token, token): id for token, id in model["vocab"].items()}
    else:
        model["vocab"] = [[named.get(token, token), score] for token, score in model["vocab"]]
    model["unk_token"] = named.get(model.get("unk_token"), model.get("unk_token"))
    if "merges" in model:
        pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
        model["merges"] = [pair for pair in pairs if named.keys().isdisjoint((*pair, "".join(pair)))]
    return json.dumps(made)


@lru_cache(4)
def _spelled(tokens: Any) -> tuple[IntArray, dict[int, int]]:
    """Returns the number of JSON's signs in each token, and the tokens of one byte by their byte."""
    texts = [tokens.decode_bytes([token]) for token in range(tokens.vocab_size)]
    signs = np.array([sum(map(text.count, (b"{", b"[", b",", b":", b'"', b"\\"))) for text in texts])
    return signs, {text[0]: token for token, text in reversed([*enumerate(texts)]) if len(text) == 1}


def growth(schema: str) -> tuple[int, int]:
    """Most bytes, and so tokens, by which a closing can become longer: at a sign of JSON, and by a letter of free text.
    No value that a schema demands is longer than its text, and no word than its patterns, times its least counts."""
    least = re.findall(r'"min(?:Items|Length|Properties|Contains)": (\d+)|\{(\d+)', schema)
    times = prod(max(int(a or b), 1) for a, b in least)
    words = sum(map(len, re.findall(r'"(?:pattern|format)": "(?:[^"\\]|\\.)*"', schema)))
    return min((len(schema) + 64) * times, MUCH), min(8 + words * times, MUCH)


class Grammars:
    """Makes grammars for a tokenizer. Raises PacelineError, with the library's reason, for a schema it cannot
    enforce."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int], white_space: str = "limited"):
        from llguidance import LLTokenizer

        if white_space not in WHITE_SPACE:
            raise PacelineError(f"--json-whitespace is {white_space!r}; it can be {', '.join(WHITE_SPACE)}")
        self._ends, self._white_space, self._tokenizer = tuple(ends), WHITE_SPACE[white_space], tokenizer
        self._compiled = lru_cache(CACHED)(self._compile)
        self._tokens = LLTokenizer(
            _without_marks(tokenizer.inner), n_vocab=vocab_size, eos_token=list(ends) or tokenizer.eos_token_id
        )

    def json_object(self) -> Matched:
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Any, white_space: JsonCompileOptions | None = None) -> Matched:
        """JSON that fits a schema. white_space: other rules than the server's."""
        from llguidance import LLMatcher

        options = self._white_space if white_space is None else white_space
        try:
            return self._matched(LLMatcher.grammar_from_json_schema(json.dumps(schema), options))
        except (ValueError, TypeError) as error:
            raise PacelineError(f"the JSON schema cannot be kept to: {_short(error)}") from None

    def either(self, *schemas: dict[str, Any]) -> Matched:
        """JSON that fits one of several schemas, each with definitions of its own."""
        from llguidance import LLMatcher

        forms = [json.dumps({"x-guidance": self._white_space, **schema}) for schema in schemas]
        names = [f"form_{i}" for i in range(len(forms))]
        rules = [f"{name}: %json {form}" for name, form in zip(names, forms, strict=True)]
        try:
            return self._matched(LLMatcher.grammar_from_lark("\n".join([f"start: {' | '.join(names)}", *rules])))
        except (ValueError, TypeError) as error:
            raise PacelineError(f"the JSON schema cannot be kept to: {_short(error)}") from None

    def check(self, schema: Any) -> None:
        """Raise PacelineError for a schema that `fits` cannot read."""
        self.json_schema(schema, WHITE_SPACE["any"])

    def fits(self, schema: Any, text: str) -> bool:
        """Whether a text is JSON that fits a schema, whatever its white space."""
        return self.json_schema(schema, WHITE_SPACE["any"]).is_whole(self._tokens.tokenize_str(text))

    def closing(self, grammar: Matched, schema: Any, most: int) -> Closing:
        """A grammar that closes within `most` tokens. Raises Refused, with the number it needs, if it cannot."""
        made = Closing(grammar.new, self._ends, self._tokens, growth(json.dumps(schema)), most)
        if made.least > most:
            raise _refused(most, made.least)
        return made

    def after_reasoning(self, grammar: Matched, marks: tuple[str, str], inside: bool) -> AfterReasoning:
        """A grammar that begins where reasoning ends."""
        begin, then = "" if inside else marks[0], FINAL if marks == HARMONY else ""
        return AfterReasoning(grammar, self._tokenizer, begin, marks[1], self._ends, then)

    def _matched(self, grammar: str) -> Matched:
        return Matched(self._compiled(grammar), self._ends)

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        for text in ("", "{"):  # Some grammars fail only at the first token.
            begun = matcher.deep_copy()
            begun.try_consume_tokens(self._tokens.tokenize_str(text))
            begun.compute_bitmask()
            if begun.is_error():
                raise PacelineError(f"the JSON schema cannot be kept to: {_reason(begun)}")
        return matcher
