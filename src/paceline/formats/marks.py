"""Marks in people's text, such as <|im_end|>, that must not become the model's control tokens.

    hidden = marks.hide(messages)            each mark in them is a number that nobody knows
    text = template(hidden)                  so all marks in this text are the template's own
    ids = marks.encode(text)

The encoder has other, secret names for all marks. The template's own marks are renamed, the hidden ones come back as
they were written, and the encoder, which does not know them, takes them for text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from secrets import randbelow
from typing import Any

from tokenizers import Tokenizer as Backend

DIGITS = 24  # of the number that stands for a mark, which templates pass on as it is
FORMS = ("<|", "<｜")
"""What begins a mark in nearly all vocabularies, though files do not always call it special."""


def marks_of(added: Mapping[int, Any], used: str) -> list[str]:
    """The marks among a tokenizer's added tokens: special ones, those that `used`, a template or the parsers' marks,
    has, and those in the form of one. White space and HTML, which some vocabularies add, are text."""
    wanted = (
        token.content for token in added.values()
        if token.content.strip() and (token.special or token.content.startswith(FORMS) or token.content in used)
    )  # fmt: skip
    return sorted(set(wanted), key=lambda mark: (-len(mark), mark))


class Marks:
    """The marks of a tokenizer. silent: those that no answer shows, so that they are also text where the assistant is
    quoted; its other marks are calls and reasoning that the model wrote."""

    def __init__(self, backend: Backend, marks: Sequence[str], silent: Collection[str]):
        self._backend, self._marks = backend, list(marks)
        secret = _number()
        self._numbers = {mark: f"{secret}{i:06}" for i, mark in enumerate(self._marks)}
        self._written = dict(zip(self._numbers.values(), self._numbers, strict=True))
        self._hidden = re.compile(rf"{secret}\d{{6}}")
        self._all = _any(self._marks)
        self._silent = _any([mark for mark in self._marks if mark in silent])

    def hide(self, messages: Sequence[Mapping[str, Any]], options: Any) -> tuple[list[dict[str, Any]], Any] | None:
        """Messages and other inputs of a template without marks; None where they have none already."""
        made: list[dict[str, Any]] = []
        for message in messages:
            role = message.get("role")
            marks = self._silent if role == "assistant" else self._all
            made.append({**self._without(dict(message), marks), "role": role})
        others = self._without(options, self._all)
        return None if made == list(messages) and others == options else (made, others)

    def _without(self, value: Any, marks: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return marks.sub(lambda found: self._numbers[found[0]], value)
        if isinstance(value, dict):  # of whatever kind: templates see how it turns into text
            return type(value)({self._without(k, marks): self._without(one, marks) for k, one in value.items()})
        return [self._without(one, marks) for one in value] if isinstance(value, (list, tuple)) else value

    def in_text(self, text: str) -> bool:
        """Whether a template's text has hidden marks."""
        return self._hidden.search(text) is not None

    def encode(self, text: str) -> list[int]:
        """Tokens of a template's text with hidden marks."""
        encoder, names, ids = self._encoder
        own = self._all.sub(lambda found: names[found[0]], text)
        whole = self._hidden.sub(lambda found: self._written.get(found[0], found[0]), own)
        return [ids.get(i, i) for i in encoder.encode(whole, add_special_tokens=False).ids]

    def plain(self, text: str) -> list[int]:
        """Tokens of people's text."""
        encoder, _, ids = self._encoder if self._all.search(text) else (self._backend, {}, dict[int, int]())
        return [ids.get(i, i) for i in encoder.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _encoder(self) -> tuple[Backend, dict[str, str], dict[int, int]]:
        """The tokenizer with other names for the marks; the names; and its ids of added tokens to the real ones."""
        secret = _number()
        names = {mark: f"\ue000{secret}{i:06}\ue001" for i, mark in enumerate(self._marks)}
        encoder = _renamed(self._backend, names)
        added = self._backend.get_added_tokens_decoder()
        ids = {encoder.token_to_id(names.get(token.content, token.content)): i for i, token in added.items()}
        return encoder, names, {new: old for new, old in ids.items() if new is not None and new != old}


def _renamed(backend: Backend, names: Mapping[str, str]) -> Backend:
    """A tokenizer whose tokens have these names instead; what would make one of the old names is gone."""
    file = json.loads(backend.to_str())
    for token in file["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = file["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in names]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return Backend.from_str(json.dumps(file | {"post_processor": None, "truncation": None, "padding": None}))


def _any(marks: Sequence[str]) -> re.Pattern[str]:
    """Finds these marks, which are sorted by length: the longest at a place counts."""
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def _number() -> str:
    return str(10 ** (DIGITS - 1) + randbelow(9 * 10 ** (DIGITS - 1)))
