"""Corpus: text that drafters copy from, tokenised once and kept in a store of kind "corpus".

Knows file formats and tokens. What drafters read is made by *parts*, a function in each of their modules:
`build_part(text, ends, vocab_size, progress)` returns arrays, which are added to the store under their names.

    build("build/corpus", ["answers.jsonl.gz", "notes.txt"], load_tokenizer("models/demo"), Plan())
    open_store("build/corpus", kind="corpus").array("text")

    text  int32 [n], or uint16 where that is enough: the documents one after another, each ending with the end token
    ends  int64 [d]: the offset after each document

A .txt file is one document. A line of a .jsonl file holds {"text"}, {"response"}, {"prompt", "response"},
{"messages": [{"content"}]} or {"choices": [{"turns": []}]} (Spec-Bench's answers), and each text in it is a document.
Either may be compressed (.gz).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.draft.text.frozen import BUILD_BYTES, DISK_BYTES
from paceline.draft.text.store import Store, open_store, writing
from paceline.errors import StoreError, meant
from paceline.jsonl import NotJSON, Piece, loads, numbered, opened
from paceline.target.tokenizer import Tokenizer


@dataclass(frozen=True)
class Part:
    """Where a part is built, and the bytes a token takes: on disk, and of memory in the making (about)."""

    builder: str
    disk: int
    memory: int


PARTS = {
    "automaton": Part("paceline.draft.text.frozen:build_part", DISK_BYTES, BUILD_BYTES),
    "ngrams": Part("paceline.draft.text.ngrams:build_part", 0, 20),
    "suffix-array": Part("paceline.draft.text.suffix_array:build_part", 4, 17),
}

LINE = 'a line holds "text", "response", "prompt" and "response", "messages", or "choices" with "turns"'

Report = Callable[[str, float], None]
"""Called with what is being done ("reading", then the parts' names) and the share of it that is done, 0 to 1."""

Documents = Generator[NDArray[np.int32]]
"""Tokens of documents, each ending with the end token."""

Read = Callable[[Sequence[Path], Tokenizer, int, Callable[[float], None]], Documents]
"""(files, tokenizer, end token, called with the share that is read) to all documents of the files, in their order."""


@dataclass(frozen=True)
class Plan:
    """How to build a corpus.

    parts       names in PARTS. max_tokens: stop reading there (the last document is cut); None: read everything.
    eos         the token between documents, as text or number; None: the tokenizer's own.
    estimated   called between reading and building with (tokens, documents, bytes on disk, bytes of memory)."""

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


def build(
    out: str | Path,
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    plan: Plan = Plan(),
    report: Report | None = None,
    read: Read | None = None,
) -> Store:
    """Tokenise `files` into a store at `out`; it appears there whole or not at all. read: None: in this process.

    Raises StoreError, one line: no such file, a type that is not read, a broken line, no text, no end token."""
    notify = report or (lambda what, done: None)
    for file in map(Path, files):
        _check(file)
    eos = _eos(tokenizer, plan.eos)
    facts = {"tokenizer_name": tokenizer.name, "eos": eos, "parts": list(plan.parts)}
    with writing(out, kind="corpus", tokenizer=tokenizer.fingerprint, **facts) as store:
        with closing((read or _read)([*map(Path, files)], tokenizer, eos, partial(notify, "reading"))) as documents:
            text, ends = _joined(documents, eos, plan.max_tokens)
        if not len(text):
            raise StoreError(f"there is no text in {', '.join(map(str, files)) or 'no file'}: nothing was built")
        notify("reading", 1.0)
        vocab_size = max(tokenizer.vocab_size, int(text.max()) + 1)
        if vocab_size <= 1 << 16:
            text = text.astype(np.uint16)
        if plan.estimated is not None:
            plan.estimated(len(text), len(ends), *_estimate(text, plan.parts))
        store.add("text", text)
        store.add("ends", ends)
        for name in plan.parts:
            _add_part(name, store.add, text, ends, vocab_size, notify)
        store.facts.update(vocab_size=vocab_size, tokens=len(text), documents=len(ends))
    return open_store(out, kind="corpus")


def texts(source: Path | Piece, report: Callable[[float], None] | None = None) -> Iterator[str]:
    """Every text in a file or a piece of one, empty ones left out. StoreError names the line that cannot be read."""
    piece = source if isinstance(source, Piece) else Piece(source)
    file = piece.path
    _check(file)
    size = max(file.stat().st_size, 1)
    with opened(file, StoreError) as lines:
        if is_one_text(file):
            yield from _whole(lines.read(), file)
            return
        for number, line in numbered(piece.within(lines), piece.line):
            yield from _texts(line, f"{file}, line {number}")
            if report is not None:
                report(os.lseek(lines.fileno(), 0, os.SEEK_CUR) / size)


def is_one_text(file: Path) -> bool:
    """Whether a file is one document, rather than lines of them."""
    return _type(file) == ".txt"


def document(text: str, tokenizer: Tokenizer, eos: int) -> NDArray[np.int32]:
    """The tokens of a text."""
    return _ended(np.array(tokenizer.encode_text(text), np.int32), eos)


def _ended(ids: NDArray[np.int32], eos: int) -> NDArray[np.int32]:
    return ids if len(ids) and ids[-1] == eos else np.append(ids, np.int32(eos))


def _whole(content: bytes, file: Path) -> list[str]:
    """The one text of a .txt file, unless it is empty."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise StoreError(f"{file} is not UTF-8: {error.reason} at byte {error.start:,}") from None
    return [text] if text.strip() else []


def _type(file: Path) -> str:
    """.txt or .jsonl, whether compressed or not."""
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def _check(file: Path) -> None:
    if not file.is_file():
        siblings = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        raise StoreError(f"there is no file {file}.{meant(file.name, siblings)}")
    if _type(file) not in (".txt", ".jsonl"):
        raise StoreError(f"{file}: a corpus is made of .txt and .jsonl files, each of them plain or compressed (.gz)")


def _texts(line: bytes, where: str) -> list[str]:
    """The texts of one line of JSON."""
    try:
        record = loads(line)
    except NotJSON as error:
        raise StoreError(f"{where}: {error}") from None
    content = _fields(record) if isinstance(record, dict) else None
    if not isinstance(content, list) or not all(isinstance(text, str) for text in content):
        raise StoreError(f"{where} has no text: {LINE}")
    return [text for text in content if text.strip()]


def _fields(record: dict[str, Any]) -> Any:
    """What should be a list of texts."""
    try:
        if "messages" in record:
            return [message["content"] for message in record["messages"]]
        if "choices" in record:
            return record["choices"][0]["turns"]
    except (LookupError, TypeError):
        return None
    if "response" in record:
        return [record.get("prompt", ""), record["response"]]
    return [record.get("text")]


def _eos(tokenizer: Tokenizer, wanted: str | None) -> int:
    """The end token's id."""
    if wanted is None:
        if tokenizer.eos_token_id is None:
            raise StoreError(
                f"the tokenizer {tokenizer.name} names no end token to put between documents; choose one with --eos"
            )
        return tokenizer.eos_token_id
    known = tokenizer.inner.get_vocab()
    token = known.get(wanted, int(wanted) if wanted.isdecimal() else None)
    if token is None or token >= tokenizer.vocab_size:
        raise StoreError(f"{tokenizer.name} has no token {wanted!r} to end a document with.{meant(wanted, known)}")
    return int(token)


def _read(
    files: Sequence[Path], tokenizer: Tokenizer, eos: int, report: Callable[[float], None]
) -> Documents:
    """Every document in `files`."""
    for at, file in enumerate(files):

        def progress(done: float, at: int = at) -> None:
            report((at + done) / len(files))

        for text in texts(file, progress):
            yield document(text, tokenizer, eos)


def _joined(
    documents: Documents, eos: int, max_tokens: int | None
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """(text, ends) of the documents, the last one cut where there are `max_tokens`."""
    kept: list[NDArray[np.int32]] = []
    left = max_tokens if max_tokens is not None else sys.maxsize
    for ids in documents:
        kept.append(_ended(ids[: left - 1], eos))
        left -= len(kept[-1])
        if left < 2:
            break
    text = np.concatenate(kept) if kept else np.empty(0, np.int32)
    return text, np.cumsum([len(ids) for ids in kept], dtype=np.int64)


def _estimate(text: NDArray[Any], parts: Sequence[str]) -> tuple[int, int]:
    """Bytes on disk, and of memory: parts are built one after another."""
    disk = text.itemsize + sum(PARTS[name].disk for name in parts)
    memory = text.itemsize + max((PARTS[name].memory for name in parts), default=0)
    return disk * len(text), memory * len(text)


def _add_part(
    name: str,
    add: Callable[[str, NDArray[Any]], None],
    text: NDArray[Any],
    ends: NDArray[np.int64],
    vocab_size: int,
    report: Report,
) -> None:
    module, _, function = PARTS[name].builder.partition(":")
    build_part = getattr(importlib.import_module(module), function)
    report(name, 0.0)
    for array_name, array in build_part(text, ends, vocab_size, lambda done: report(name, done)).items():
        add(array_name, array)
    report(name, 1.0)
