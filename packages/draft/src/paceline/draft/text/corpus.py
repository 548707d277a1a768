"""A corpus: tokenised text from which drafters copy, in a store of kind "corpus".

Each *part* adds the arrays of one data structure, whose module returns them by name from
`build_part(text, ends, vocab_size, progress)`. `replay.corpus.build` reads files.

    text  int32 [n], or uint16 where that is enough: the documents one after another, each ending with the end token
    ends  int64 [d]: the offset after each document
"""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.draft.text import ngrams, suffix_array
from paceline.draft.text.store import Progress, Store, open_store, writing
from paceline.errors import StoreError, meant
from paceline.formats.tokenizer import Tokenizer


@dataclass(frozen=True)
class CorpusPart:
    """The function that builds a part, and the approximate bytes a token takes on disk, and in memory while
    building."""

    build: Callable[..., dict[str, NDArray[Any]]]
    disk: int
    memory: int


PARTS = {
    "ngrams": CorpusPart(ngrams.build_part, disk=0, memory=40),
    "suffix-array": CorpusPart(suffix_array.build_part, disk=4, memory=50),
}

Report = Callable[[str, float], None]
"""report(step, done): called with the step ("reading", then the parts' names), and its share that is done, 0 to 1."""
Documents = Generator[NDArray[np.int32]]  # tokens of documents, each ending with the end token
Read = Callable[[int, Progress], Documents]
"""read(end token, progress) yields all documents."""


@dataclass(frozen=True)
class Plan:
    """How to build a corpus.

    parts       names in PARTS.
    max_tokens  number of tokens after which reading stops, even within a document; None: everything is read.
    eos         the token between documents, as text or number; None: the tokenizer's own.
    estimated   function called between reading and building, with the numbers of tokens, documents, bytes on disk and
                bytes of memory."""

    parts: Sequence[str] = tuple(PARTS)
    max_tokens: int | None = None
    eos: str | None = None
    estimated: Callable[[int, int, int, int], None] | None = None

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise StoreError(f"there is no part {part!r}.{meant(part, PARTS)} Parts: {', '.join(PARTS)}.")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise StoreError(f"max_tokens is {self.max_tokens}; a corpus has 2 tokens or more")


def build(out: str | Path, read: Read, source: str, tokenizer: Tokenizer, plan: Plan, notify: Report) -> Store:
    """Build a store of the documents. It appears at `out` whole or not at all.

    source  name of the documents' source, for messages.

    Raises StoreError for no text or no end token, and the errors of `read`."""
    eos = _eos(tokenizer, plan.eos)
    facts = {"tokenizer_name": tokenizer.name, "eos": eos, "parts": list(plan.parts)}
    with writing(out, kind="corpus", tokenizer=tokenizer.fingerprint, **facts) as store:
        with closing(read(eos, partial(notify, "reading"))) as documents:
            text, ends = _joined(documents, eos, plan.max_tokens)
        if not len(text):
            raise StoreError(f"there is no text in {source}: nothing was built")
        notify("reading", 1.0)
        vocab_size = max(tokenizer.vocab_size, int(text.max()) + 1)
        if vocab_size <= 1 << 16:
            text = text.astype(np.uint16)
        if plan.estimated is not None:
            disk = text.itemsize + sum(PARTS[name].disk for name in plan.parts)
            # Parts are built one after another, so the largest counts.
            memory = text.itemsize + max((PARTS[name].memory for name in plan.parts), default=0)
            plan.estimated(len(text), len(ends), disk * len(text), memory * len(text))
        store.add("text", text)
        store.add("ends", ends)
        for name in plan.parts:
            notify(name, 0.0)
            for array_name, array in PARTS[name].build(text, ends, vocab_size, partial(notify, name)).items():
                store.add(array_name, array)
            notify(name, 1.0)
        store.facts.update(vocab_size=vocab_size, tokens=len(text), documents=len(ends))
    return open_store(out, kind="corpus")


def document(text: str, tokenizer: Tokenizer, eos: int) -> NDArray[np.int32]:
    """The tokens of a text, with the end token."""
    return _ended(np.array(tokenizer.encode_text(text), np.int32), eos)


def _ended(ids: NDArray[np.int32], eos: int) -> NDArray[np.int32]:
    return ids if len(ids) and ids[-1] == eos else np.append(ids, np.int32(eos))


def _eos(tokenizer: Tokenizer, wanted: str | None) -> int:
    """The end token's id."""
    if wanted is None:
        if tokenizer.eos_token_id is None:
            raise StoreError(f"the tokenizer {tokenizer.name} names no end token; choose one with --eos")
        return tokenizer.eos_token_id
    known = tokenizer.inner.get_vocab()
    token = known.get(wanted, int(wanted) if wanted.isdecimal() else None)
    if token is None or token >= tokenizer.vocab_size:
        raise StoreError(f"{tokenizer.name} has no token {wanted!r} to end a document with.{meant(wanted, known)}")
    return int(token)


def _joined(documents: Documents, eos: int, max_tokens: int | None) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Join documents to (text, ends). The last document is cut at `max_tokens`."""
    pieces: list[NDArray[np.int32]] = []
    left = max_tokens if max_tokens is not None else sys.maxsize
    for ids in documents:
        pieces.append(_ended(ids[: left - 1], eos))
        left -= len(pieces[-1])
        if left < 2:
            break
    text = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    return text, np.cumsum([len(ids) for ids in pieces], dtype=np.int64)
