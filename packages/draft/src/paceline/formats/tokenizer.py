"""Tokenizers, and detokenizers, which turn an answer into text token by token."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from inspect import signature
from typing import Any

import jinja2
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from paceline.core.request import Detokenizer
from paceline.errors import ModelError, PromptError, TooLong, shortened
from paceline.formats.marks import Marks, marks_of
from paceline.formats.turns import forms

ROLES = ("system", "user", "assistant", "tool")
"""Roles that every chat template may get. Other roles are refused unless the template names them."""
QUICK = 16
"""A prompt is only checked by `refuse_long` if it has more characters for each token of the context."""


class Tokenizer:
    """The tokenizer of a model. inner: a transformers tokenizer, or a `SentencePiece`; name: for error messages.

    begins       whether conversations begin with BOS even if their template does not write it, as in llama.cpp.
    reads_marks  whether marks in messages, such as <|im_end|>, become tokens, as in other engines."""

    begins = False
    reads_marks = False

    def __init__(self, inner: Any, name: str = "tokenizer"):
        self.inner = inner
        self.name = name
        self._backend: Backend | None = getattr(inner, "backend_tokenizer", None)
        self._shows, self._shown = False, ""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, with added tokens. The model's vocabulary may be larger."""
        return len(self.inner)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits, which are equal for two tokenizers if (in practice: only if) their ids mean the
        same."""
        return fingerprint(self.inner.get_vocab())

    @property
    def eos_token_id(self) -> int | None:
        """The end token, if the tokenizer has one."""
        return None if self.inner.eos_token_id is None else int(self.inner.eos_token_id)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return bool(self.inner.chat_template)

    @property
    def chat_template(self) -> str:
        """The text of the chat template, or of all templates if there are several; "" if there is none."""
        template = self.inner.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    def show(self, texts: Iterable[str]) -> None:
        """Show the special tokens with these texts in answers, because tool calls are parsed from the text."""
        texts = set(texts)
        self._shown += "\n".join(sorted(texts))
        vars(self).pop("_marks", None)
        shown = {i for i, token in self.inner.added_tokens_decoder.items() if token.content in texts}
        if shown & self._special:
            self._shows, self._special = True, self._special - shown
            vars(self).pop("_pieces", None)

    def encode(self, text: str) -> list[int]:
        """Encode a plain prompt, with a beginning token if the tokenizer adds it, and without an end token."""
        check_text(text)
        ids = [int(i) for i in self.inner.encode(text)]
        end = self.inner.eos_token_id
        if len(ids) > 1 and ids[-1] == end and not text.endswith(self.inner.eos_token):
            ids.pop()
        begin = getattr(self.inner, "bos_token_id", None)
        if begin is not None and ids[:2] == [begin, begin] and text.startswith(self.inner.bos_token):
            del ids[0]  # The text has a beginning token already.
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Encode a piece of text, without beginning or end token."""
        check_text(text)
        return [int(i) for i in self.inner.encode(text, add_special_tokens=False)]

    def encode_words(self, text: str) -> list[int]:
        """As `encode_text`, for people's text. Its marks are text, as in messages."""
        check_text(text)
        marks = None if self.reads_marks else self._marks
        return self.encode_text(text) if marks is None else marks.plain(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Encode a conversation, `[{"role": "user", "content": "Hi"}]`, up to the beginning of the assistant's turn.

        options  other inputs of the chat template, such as tools.

        Raises ModelError if the model has no chat template, PromptError if the template refuses the messages."""
        if not self.has_chat_template:
            raise ModelError(f"{self.name} has no chat template: give it plain text, or use a model made for chat")
        hidden, others = self.hidden(messages, options)
        if hidden is messages:
            return [int(i) for i in self._templated(messages, tokenize=True, **options)]
        return self.encode_hidden(self._templated(hidden, tokenize=False, **others))

    def hidden(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
        """Hide the marks in messages and a chat template's other inputs, so that `encode_hidden` takes them for text.
        Without marks, the arguments are returned."""
        marks = None if self.reads_marks else self._marks
        return (marks.hide(messages, options) if marks is not None else None) or (messages, options)

    def encode_hidden(self, text: str) -> list[int]:
        """Encode the text that a template has made of `hidden` messages."""
        marks = self._marks
        return marks.encode(text) if marks is not None and marks.in_text(text) else self.encode_text(text)

    def get_ready(self) -> None:
        """Prepare for marks, which takes seconds for a large vocabulary, so that the first conversation need not
        wait."""
        if self._marks is not None and not self.reads_marks:
            self._marks.encode("")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text that `encode_chat` encodes. It does not say which of its marks are tokens."""
        return str(self._templated(messages, tokenize=False, **options))

    def _templated(self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool, **options: Any) -> Any:
        """The chat template's output: token ids, or text."""
        for text in (text for message in messages for text in message.values() if isinstance(text, str)):
            check_text(text)
        given = [{**message, "role": self._role(i, message.get("role"))} for i, message in enumerate(messages)]
        made = self._accepted(given, {"add_generation_prompt": True, **options, "tokenize": tokenize})
        if not self.begins:
            return made
        start = [self.inner.bos_token_id] if tokenize else self.inner.bos_token
        return made if made[: len(start)] == start else start + made

    def _accepted(self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> Any:
        """Apply the template to the first form of the messages that it accepts."""
        what = ""
        for form in forms(messages):
            try:
                return self.inner.apply_chat_template(form, **options, return_dict=False)
            except Exception as error:  # A template is a program, and may raise anything.
                known = isinstance(error, jinja2.TemplateError)
                what = what or (str(error) if known else f"{type(error).__name__}: {error}")
        what = shortened(" ".join(what.split()), 400)
        raise PromptError(f"the chat template of {self.name} refuses these messages: {what}")

    def _role(self, number: int, role: Any) -> str:
        """A message's role as the chat template knows it. PromptError for a role that it does not name."""
        if isinstance(role, str) and (role in ROLES or any(f"{q}{role}{q}" in self.chat_template for q in "'\"")):
            return role
        if role == "developer":  # This is OpenAI's newer name for "system".
            return "system"
        known = f"{', '.join(ROLES)}, or one that the model's chat template names"
        raise PromptError(f"messages.{number}: role is {shortened(repr(role))}; it can be {known}.")

    def refuse_long(self, prompt: str | Sequence[Mapping[str, Any]], max_context: int) -> None:
        """Raise PromptError if the beginning of a long prompt already fills the context, because encoding megabytes
        takes a minute. A prompt that passes may still be too long."""
        size = len(prompt) if isinstance(prompt, str) else sum(len(str(message)) for message in prompt)
        if not isinstance(prompt, str) and not self.has_chat_template:
            return  # `encode_chat` raises the error.
        if size < QUICK * max_context:
            return
        text = prompt if isinstance(prompt, str) else self.render_chat(prompt)
        seen = QUICK * max_context
        while True:  # `seen` doubles until the text is long enough: a token can be dozens of blanks.
            tokens = len(self.encode_text(text[:seen])) - QUICK  # A cut last word may have more tokens.
            if tokens >= max_context:
                why = f"it has at least {tokens} tokens, and this model's context holds {max_context} with the answer"
                raise TooLong(f"The prompt is too long: {why}; shorten it.")
            if seen * 2 > len(text):
                return
            seen *= 2

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        ids = [int(i) for i in ids if not self._shows or i not in self._special]
        return str(self.inner.decode(ids, skip_special_tokens=not self._shows, clean_up_tokenization_spaces=False))

    def spelling(self, token: int) -> bytes | str:
        """A token's bytes or text; b"" for special and unknown tokens."""
        return self._pieces[token]

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Make a detokenizer for an answer: `push` each token, then `flush`. The joined texts are `decode` of all
        tokens.

        With `prompt`, they are the text after the prompt, with the space before the first word."""
        continues = any(i not in self._special for i in prompt)
        if self._scheme == "bytes":
            return ByteLevelDetokenizer(self._pieces)
        if self._scheme in ("pieces", "pieces, strip"):
            return PieceDetokenizer(self._pieces, strip=self._scheme == "pieces, strip" and not continues)
        return WindowDetokenizer(self.decode, self._special, prompt)

    @cached_property
    def _special(self) -> frozenset[int]:
        """Ids of tokens without text."""
        return frozenset(i for i, token in self.inner.added_tokens_decoder.items() if token.special)

    @cached_property
    def _marks(self) -> Marks | None:
        """The marks that are text in messages; None for a tokenizer without a backend, whose tokens cannot be
        renamed."""
        if self._backend is None:
            return None
        added = self.inner.added_tokens_decoder
        marks = marks_of(added, f"{self.chat_template}\n{self._shown}")
        return Marks(self._backend, marks, {added[i].content for i in self._special})

    @cached_property
    def _scheme(self) -> str:
        return "other" if self._backend is None else scheme(self._backend)

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._backend or self.inner, self._special, self._scheme == "bytes")


class SentencePiece:
    """A SentencePiece model with the interface that `Tokenizer` needs: `Tokenizer(SentencePiece(processor))`.

    processor  a sentencepiece.SentencePieceProcessor. Control and unknown tokens have no text, and there is no chat
               template. A prompt begins with the beginning token if the file has it."""

    chat_template = None

    def __init__(self, processor: Any):
        self._processor = processor
        end = processor.eos_id()
        self.eos_token_id: int | None = end if end >= 0 else None
        self.eos_token: str | None = processor.id_to_piece(end) if end >= 0 else None
        self._vocab = {processor.id_to_piece(i): i for i in range(len(processor))}
        special = [i for i in range(len(processor)) if processor.is_control(i) or processor.is_unknown(i)]
        self.added_tokens_decoder = {i: AddedToken(processor.id_to_piece(i), special=True) for i in special}

    def __len__(self) -> int:
        return len(self._processor)

    def get_vocab(self) -> dict[str, int]:
        return self._vocab

    def id_to_token(self, token: int) -> str | None:
        """The spelling of a token; None if `token` is none."""
        return str(self._processor.id_to_piece(token)) if token < len(self) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode `text`, after the beginning token if `add_special_tokens`."""
        begin = self._processor.bos_id()
        return [begin] * (add_special_tokens and begin >= 0) + list(self._processor.encode(text))

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Text of `ids` without special tokens."""
        return str(self._processor.decode([i for i in ids if i not in self.added_tokens_decoder]))


def vocabulary(inner: Any) -> dict[str, int]:
    """Token -> id of a tokenizer, without default tokens of its class. (Qwen 2's class appends an end token if the
    folder's files do not name it.)"""
    own = {word.default for word in signature(type(inner)).parameters.values() if isinstance(word.default, str)}
    return {token: i for token, i in inner.get_vocab().items() if token not in own}


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Hash token -> id. A SentencePiece file and its Hugging Face conversion have the same hash."""
    pairs = sorted((id, token) for token, id in vocabulary.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


def check_text(text: str) -> None:
    """Raise PromptError for text with half a surrogate pair, as from JSON or from an argument that is not UTF-8."""
    try:
        str.encode(text)
    except UnicodeEncodeError as error:
        half = f"at character {error.start} stands \\u{ord(text[error.start]):04x}, half of a surrogate pair"
        raise PromptError(f"The prompt is not UTF-8 text: {half}.") from None


def scheme(backend: Backend) -> str:
    """How tokens become text: "bytes", "pieces" or "pieces, strip", as in nearly all language models; or "other"."""
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": ""}
    steps = decoder.get("decoders", [decoder])
    if [s["type"] for s in steps] == ["ByteLevel"]:
        return "bytes"
    marker = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if steps[:1] != [marker] or [s["type"] for s in steps[1:3]] != ["ByteFallback", "Fuse"]:
        return "other"
    if steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        return "pieces, strip"
    return "other" if steps[3:] else "pieces"


class Pieces(dict[int, "bytes | str"]):
    """Bytes or text of each token, looked up once; b"" for special and unknown tokens.

    byte_level  whether all tokens are bytes in GPT-2's alphabet; if not, only tokens like <0x0A> are bytes."""

    def __init__(self, backend: Backend, special: frozenset[int], byte_level: bool):
        self._backend, self._special, self._byte_level = backend, special, byte_level

    def __missing__(self, token: int) -> bytes | str:
        text = None if token in self._special or token < 0 else self._backend.id_to_token(token)
        if text is None:
            piece: bytes | str = b""
        elif self._byte_level:
            piece = _spelled(text)
        else:
            byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
            piece = bytes.fromhex(byte[1]) if byte else text.replace("▁", " ")
        self[token] = piece
        return piece


def _alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 characters stand for their own bytes, and characters from
    U+0100 on for the other bytes (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _alphabet()


def _spelled(text: str) -> bytes:
    """The bytes of a byte-level token. An added token with other characters stands for its UTF-8 text."""
    try:
        return bytes(_BYTE_OF[c] for c in text)
    except KeyError:
        return text.encode()


class ByteLevelDetokenizer:
    """Detokenizes tokens that are bytes. It holds back a character until it is complete or invalid."""

    def __init__(self, pieces: Pieces):
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._pieces[token])  # type: ignore[arg-type]

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class PieceDetokenizer:
    """Detokenizes tokens that are text, or single bytes of characters without a token.

    It waits for the end of a run of byte tokens. If the run is not UTF-8, each byte becomes a replacement character."""

    def __init__(self, pieces: Pieces, strip: bool):
        self._pieces = pieces
        self._run = b""
        self._strip = strip

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self._final(self._end_run() + piece)

    def flush(self) -> str:
        return self._final(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _final(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Detokenizes tokens of all other tokenizers: it decodes the last few tokens with and without the new tokens, and
    returns the difference. That is right if a token's text depends only on its neighbours (word pieces, Metaspace).

    decode   text of token ids.
    special  ids without text.
    prompt   the tokens before the answer."""

    HOLD = 16  # largest number of tokens held back for an incomplete character
    CONTEXT = 4  # number of prompt tokens with which the first token is decoded

    def __init__(self, decode: Callable[[Sequence[int]], str], special: Set[int], prompt: Sequence[int]):
        self._decode, self._special = decode, special
        self._before = [i for i in prompt[-self.CONTEXT :] if i not in special]
        self._new: list[int] = []

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        self._new.append(token)
        text = self._pending()
        if not text or (text.endswith("\ufffd") and len(self._new) < self.HOLD):
            return ""
        self._before, self._new = self._new, []
        return text

    def flush(self) -> str:
        text, self._new = self._pending(), []
        return text

    def _pending(self) -> str:
        old = self._decode(self._before) if self._before else ""
        return self._decode(self._before + self._new)[len(old) :]
