"""Checks of a prompt's text before it is tokenized: whether it is valid text, and the fewest tokens it can have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.errors import PromptError

_GROWS = {"NFC", "Prepend", "Replace"}
"""Normalizers that keep all text; they are run before bytes are counted."""
_SPLITS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}
"""Pre-tokenizers that keep all text, except a Split that removes its matches."""


def check_text(text: str) -> None:
    """PromptError for text with half a surrogate pair, from an argument that is not UTF-8, or from JSON."""
    try:
        str.encode(text)
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise PromptError(
            f"The prompt is not UTF-8 text: at character {error.start} stands {half}, half of a surrogate pair."
        ) from None


def fewest_tokens(backend: Backend, text: str, longest: int) -> int:
    """A lower bound of the number of tokens of `text`: its bytes, normalized, over those of the longest token.

    longest  of `longest_token`, above 0."""
    normalized = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
    return -(-len(normalized.encode()) // longest)


def longest_token(backend: Backend) -> int:
    """The bytes that one token stands for, at most; 0 if a token may stand for text of any length.

    The latter holds if unknown text becomes one token or none (there is not a token for every byte), if text is left
    out, and if an added token includes the spaces beside it."""
    parts: dict[str, Any] = json.loads(backend.to_str())
    if not _keeps_all(parts):
        return 0
    vocab, added = parts["model"]["vocab"], {token["content"] for token in parts["added_tokens"]}
    byte_level = "ByteLevel" in {step["type"] for step in _steps(parts["pre_tokenizer"])}
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    if byte_level:  # one character of a token is one byte of text
        alphabet = {character for token in vocab if token not in added for character in token}
        if len([character for character in alphabet if character in vocab]) < 256:
            return 0
    elif not (parts["model"].get("byte_fallback") and all(byte in vocab for byte in bytes_)):
        return 0
    own = max(len(token) if byte_level else len(token.encode()) for token in vocab)
    normalize = backend.normalizer.normalize_str if backend.normalizer is not None else str
    return max([own, *(len(normalize(token).encode()) for token in added)])


def _keeps_all(parts: Mapping[str, Any]) -> bool:
    """Whether every byte of a text is in some token of it."""
    return (
        parts["model"].get("type") == "BPE"
        and {step["type"] for step in _steps(parts["normalizer"])} <= _GROWS
        and all(_only_splits(step) for step in _steps(parts["pre_tokenizer"]))
        and not any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
        and not parts["truncation"]
    )


def _only_splits(step: Mapping[str, Any]) -> bool:
    return step["type"] in _SPLITS and step.get("behavior") != "Removed"


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, sequences expanded."""
    if part is None:
        return
    inner = part.get("normalizers") or part.get("pretokenizers")
    if inner is None:
        yield part
    else:
        for step in inner:
            yield from _steps(step)
