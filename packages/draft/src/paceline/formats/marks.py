"""Marks: texts such as <|im_end|>, which must not become the model's control tokens if a person wrote them.

    hidden = marks.hide(messages)            a secret number replaces each mark in messages
    text = template(hidden)                  so all marks in this text are the template's own
    ids = marks.encode(text)

The encoder has secret names for all marks. `encode` renames the template's own marks, and restores the hidden marks as
they were written; the encoder does not know them, so it takes them for text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from secrets import randbelow
from typing import Any

from tokenizers import Tokenizer as Backend

DIGITS = 24  # length of the number that replaces a mark; templates do not change numbers
FORMS = ("<|", "<｜")
"""What marks begin with in nearly all vocabularies, though files do not always call them special."""


def marks_of(added: Mapping[int, Any], used: str) -> list[str]:
    """The marks among a tokenizer's added tokens: special tokens, tokens that occur in `used` (a template, or the
    parsers' marks), and tokens with the form of a mark. White space and HTML, which some vocabularies add, are text."""
    wanted = (
        token.content for token in added.values()
        if token.content.strip() and (token.special or token.content.startswith(FORMS) or token.content in used)
    )  # fmt: skip
    return sorted(set(wanted), key=lambda mark: (-len(mark), mark))


class Marks:
    """The marks of a tokenizer.

    silent  marks that no answer shows, so in the assistant's messages they are text, too. Its other marks are calls and
            reasoning that the model wrote."""

    def __init__(self, backend: Backend, marks: Sequence[str], silent: Collection[str]):
        self._backend, self._marks = backend, list(marks)
        secret = _number()
        self._numbers = {mark: f"{secret}{i:06}" for i, mark in enumerate(self._marks)}
        self._written = dict(zip(self._numbers.values(), self._numbers, strict=True))
        self._hidden = re.compile(rf"{secret}\d{{6}}")
        self._all = _any(self._marks)
        self._silent = _any([mark for mark in self._marks if mark in silent])

    def hide(self, messages: Sequence[Mapping[str, Any]], options: Any) -> tuple[list[dict[str, Any]], Any] | None:
        """Replace the marks in messages and a template's other inputs by numbers. None if there are no marks."""
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
        if isinstance(value, dict):  # The type stays, because templates see how it turns into text.
            return type(value)({self._without(k, marks): self._without(one, marks) for k, one in value.items()})
        return [self._without(one, marks) for one in value] if isinstance(value, (list, tuple)) else value

    def in_text(self, text: str) -> bool:
        """Whether a template's text has hidden marks in it."""
        return self._hidden.search(text) is not None

    def encode(self, text: str) -> list[int]:
        """Encode a template's text with hidden marks."""
        encoder, names, ids = self._encoder
        own = self._all.sub(lambda found: names[found[0]], text)
        whole = self._hidden.sub(lambda found: self._written.get(found[0], found[0]), own)
        return [ids.get(i, i) for i in encoder.encode(whole, add_special_tokens=False).ids]

    def plain(self, text: str) -> list[int]:
        """Encode a person's text."""
        encoder, _, ids = self._encoder if self._all.search(text) else (self._backend, {}, dict[int, int]())
        return [ids.get(i, i) for i in encoder.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _encoder(self) -> tuple[Backend, dict[str, str], dict[int, int]]:
        """The tokenizer with secret names for the marks, these names, and the real ids by its ids of added tokens."""
        secret = _number()
        names = {mark: f"\ue000{secret}{i:06}\ue001" for i, mark in enumerate(self._marks)}
        encoder = _renamed(self._backend, names)
        added = self._backend.get_added_tokens_decoder()
        ids = {encoder.token_to_id(names.get(token.content, token.content)): i for i, token in added.items()}
        return encoder, names, {new: old for new, old in ids.items() if new is not None and new != old}


def _renamed(backend: Backend, names: Mapping[str, str]) -> Backend:
    """Copy a tokenizer with these names for tokens, without anything that would make an old name."""
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
    """A pattern that finds the longest of these marks at a place. marks: sorted by length, longest first."""
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def _number() -> str:
    return str(10 ** (DIGITS - 1) + randbelow(9 * 10 ** (DIGITS - 1)))
