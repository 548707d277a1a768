"""Detokenizers: tokens to text, one token at a time. Knows nothing of models or rows.

Each hands out text only when no later token can change it, and ends with exactly what `Tokenizer.decode` says of all
tokens: `push` every token, `flush` at the end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from tokenizers import Tokenizer as Backend


def scheme(backend: Backend) -> str:
    """How tokens turn into text: "bytes", "pieces" or "pieces, strip", the chains of decoding steps that nearly all
    language models use; or "other"."""
    steps = _flatten(json.loads(backend.to_str())["decoder"])
    if [s["type"] for s in steps] == ["ByteLevel"]:
        return "bytes"
    marker = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if steps[:1] != [marker] or [s["type"] for s in steps[1:3]] != ["ByteFallback", "Fuse"]:
        return "other"
    if steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        return "pieces, strip"
    return "other" if steps[3:] else "pieces"


def _flatten(step: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step["decoders"] for inner in _flatten(part)]
    return [dict(step)]


class Pieces(dict[int, "bytes | str"]):
    """What each token says, looked up once: bytes, or text; b"" for special and unknown tokens.

    byte_level  every token is bytes, spelled in GPT-2's alphabet; otherwise only tokens like <0x0A> are."""

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
    """GPT-2's spelling of the 256 bytes: printable Latin-1 characters stand for themselves, the other bytes for the
    characters from U+0100 on (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _alphabet()


def _spelled(text: str) -> bytes:
    """The bytes of a byte-level token; an added token may hold other characters, and then means what it says."""
    try:
        return bytes(_BYTE_OF[c] for c in text)
    except KeyError:
        return text.encode()


class ByteLevelDetokenizer:
    """For tokens that are bytes: hold back the beginning of a character until it is complete or turns out broken."""

    def __init__(self, pieces: Pieces):
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._pieces[token])  # type: ignore[arg-type]

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class PieceDetokenizer:
    """For tokens that are text, and single bytes for what has no token.

    A run of byte tokens is UTF-8 text as a whole, or a replacement character for each byte. So a run is held back
    until it ends."""

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
    """Any other tokenizer: decode the last few tokens with and without the new ones, and hand out the difference.

    Right wherever a token's text depends only on its neighbours (word pieces, Metaspace).
    decode   text of token ids without those in `special`; prompt: the tokens before the answer."""

    HOLD = 16
    """Tokens held back at most while the text ends in a broken character."""
    CONTEXT = 4
    """Tokens of a prompt that the first token of the answer is read with."""

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
