"""Tokenizer: text to tokens and back. Knows nothing of models or rows.

A thin layer over a transformers tokenizer. It adds streaming (`detokenizer.py`), a fingerprint, and errors of one line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from paceline.errors import ModelError, PromptError
from paceline.row import Detokenizer
from paceline.target.detokenizer import ByteLevelDetokenizer, PieceDetokenizer, Pieces, WindowDetokenizer, scheme
from paceline.target.prompt_text import check_text, fewest_tokens, longest_token

QUICK = 16
"""Characters of a prompt for each token of the context; a prompt of fewer is encoded at once to see whether it fits."""


class Tokenizer:
    """Tokens of a model.

    inner  a transformers tokenizer; name is for error messages.
    """

    def __init__(self, inner: Any, name: str = "tokenizer"):
        self.inner = inner
        self.name = name
        self._shows = False

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included; a model's own vocabulary may be larger."""
        return len(self.inner)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits; two tokenizers have the same if their ids mean the same, and hardly ever otherwise."""
        return fingerprint(self.inner.get_vocab())

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer names one."""
        return None if self.inner.eos_token_id is None else int(self.inner.eos_token_id)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return bool(self.inner.chat_template)

    @property
    def chat_template(self) -> str:
        """The chat template's text, all of them where there are several; empty if there is none."""
        template = self.inner.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    def show(self, texts: Iterable[str]) -> None:
        """Let special tokens with these texts show in answers: marks of tool calls, which are read from the text."""
        texts = set(texts)
        shown = {i for i, token in self.inner.added_tokens_decoder.items() if token.content in texts}
        if shown & self._special:
            self._shows, self._special = True, self._special - shown
            vars(self).pop("_pieces", None)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the beginning token if the model wants one.

        An end token that the tokenizer puts after every text, a setting for training, is left off."""
        check_text(text)
        ids = [int(i) for i in self.inner.encode(text)]
        end = self.inner.eos_token_id
        if len(ids) > 1 and ids[-1] == end and not text.endswith(self.inner.eos_token):
            ids.pop()
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a piece of text as it is, without beginning or end token."""
        check_text(text)
        return [int(i) for i in self.inner.encode(text, add_special_tokens=False)]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation, `[{"role": "user", "content": "Hi"}]`, up to where the assistant speaks.

        options: what else the model's template reads, such as tools.

        Raises ModelError if the model has no chat template, PromptError if the template refuses the messages."""
        if not self.has_chat_template:
            raise ModelError(
                f"{self.name} has no chat template: give it plain text to continue, or use a model made for chat"
            )
        return [int(i) for i in self._templated(messages, tokenize=True, **options)]

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that `encode_chat` encodes."""
        return str(self._templated(messages, tokenize=False))

    def _templated(self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool, **options: Any) -> Any:
        """Messages through the chat template: token ids, or text."""
        for text in (text for message in messages for text in message.values() if isinstance(text, str)):
            check_text(text)
        try:
            return self.inner.apply_chat_template(
                [dict(m) for m in messages], add_generation_prompt=True, tokenize=tokenize, return_dict=False, **options
            )
        except Exception as error:  # a template is a program and may raise anything
            what = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise PromptError(f"the chat template of {self.name} refuses these messages: {what}") from error

    def refuse_long(self, prompt: str | Sequence[Mapping[str, Any]], max_context: int) -> None:
        """PromptError for a prompt whose length in bytes alone shows that it cannot fit into the context, for encoding
        megabytes takes a minute. A prompt that passes may still be too long."""
        size = len(prompt) if isinstance(prompt, str) else sum(len(str(m.get("content", ""))) for m in prompt)
        if not isinstance(prompt, str) and not self.has_chat_template:
            return  # `encode_chat` will say so
        if size < QUICK * max_context or self._backend is None or not self._longest_token:
            return
        text = prompt if isinstance(prompt, str) else self.render_chat(prompt)
        check_text(text)
        tokens = fewest_tokens(self._backend, text, self._longest_token)
        if tokens >= max_context:
            raise PromptError(
                f"The prompt has at least {tokens} tokens, and this model's context holds {max_context} with the "
                "answer; shorten it."
            )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        ids = [int(i) for i in ids if not self._shows or i not in self._special]
        return str(self.inner.decode(ids, skip_special_tokens=not self._shows, clean_up_tokenization_spaces=False))

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """For one answer: `push` every token, `flush` at the end; the texts joined are `decode` of all tokens.

        With `prompt` they are what follows the prompt's text: SentencePiece tokenizers then keep the space before the
        answer's first word."""
        continues = any(i not in self._special for i in prompt)
        if self._scheme == "bytes":
            return ByteLevelDetokenizer(self._pieces)
        if self._scheme in ("pieces", "pieces, strip"):
            return PieceDetokenizer(self._pieces, strip=self._scheme == "pieces, strip" and not continues)
        return WindowDetokenizer(self.decode, self._special, prompt)

    @cached_property
    def _backend(self) -> Backend | None:
        return getattr(self.inner, "backend_tokenizer", None)

    @cached_property
    def _longest_token(self) -> int:
        return 0 if self._backend is None else longest_token(self._backend)

    @cached_property
    def _special(self) -> frozenset[int]:
        """Ids that never show in text."""
        return frozenset(i for i, token in self.inner.added_tokens_decoder.items() if token.special)

    @cached_property
    def _scheme(self) -> str:
        return "other" if self._backend is None else scheme(self._backend)

    @cached_property
    def _pieces(self) -> Pieces:
        assert self._backend is not None
        return Pieces(self._backend, self._special, self._scheme == "bytes")


class SentencePiece:
    """A SentencePiece model as `Tokenizer` wants it: `Tokenizer(SentencePiece(processor))`.

    processor  a sentencepiece.SentencePieceProcessor. What the file marks as control or unknown never shows in text;
               there is no chat template in it. A prompt begins with the beginning token if the file has one."""

    chat_template = None

    def __init__(self, processor: Any):
        self._processor = processor
        end = processor.eos_id()
        self.eos_token_id: int | None = end if end >= 0 else None
        self.eos_token: str | None = processor.id_to_piece(end) if end >= 0 else None
        self._vocab = {processor.id_to_piece(i): i for i in range(len(processor))}
        self.added_tokens_decoder = {
            i: AddedToken(token, special=True)
            for token, i in self._vocab.items()
            if processor.is_control(i) or processor.is_unknown(i)
        }

    def __len__(self) -> int:
        return len(self._processor)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return self._vocab

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of `text`, after the beginning token if `add_special_tokens`."""
        begin = self._processor.bos_id()
        return [begin] * (add_special_tokens and begin >= 0) + list(self._processor.encode(text))

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Text of `ids` without special tokens."""
        return str(self._processor.decode([i for i in ids if i not in self.added_tokens_decoder]))


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Of token -> id. A SentencePiece file and its Hugging Face conversion have the same."""
    pairs = sorted((id, token) for token, id in vocabulary.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]
