"""Make a corpus that drafters copy from out of files: read and tokenised here, or on the machines of a Ray cluster.

A .txt file is one document. A line of a .jsonl file is a record that `logs.conversations` knows, and each text in it is
a document; in records of token ids, as `paceline serve --log` writes them, the answer is a document. Files may be
packed. Documents keep the order of the files, wherever they are tokenised."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.draft.text import corpus
from paceline.draft.text.corpus import Documents, Plan, Report, document
from paceline.draft.text.store import Progress, Store, silent
from paceline.errors import PATHS, StoreError, meant
from paceline.formats.tokenizer import Tokenizer
from paceline.formats.tokenizer_files import load_tokenizer
from paceline.logs.conversations import read_records
from paceline.logs.formats import conversation
from paceline.replay.cluster import AUTO, spread
from paceline.textfiles import PACKED, Piece, opened, pieces_of, text_of

Files = Sequence[Path]
Read = Callable[[Files, Tokenizer, int, Progress], Documents]
"""(files, tokenizer, end token, called with the share that is read) to all documents of the files, in their order."""


def read_here(files: Files, tokenizer: Tokenizer, eos: int, report: Progress) -> Documents:
    """Yield every document in `files`, read in this process."""
    for at, file in enumerate(files):

        def progress(done: float, at: int = at) -> None:
            report((at + done) / len(files))

        for text in texts(file, tokenizer, progress):
            yield document(text, tokenizer, eos)


def build(
    out: str | Path, files: Sequence[str | Path], tokenizer: Tokenizer, plan: Plan = Plan(),
    report: Report = lambda what, done: None, read: Read = read_here,
) -> Store:  # fmt: skip
    """Tokenise `files` into a store, which appears at `out` whole or not at all.

    Raises PacelineError for a missing file, an unknown type, a broken line, no text,
    or a tokenizer without end token."""
    paths = [*map(Path, files)]
    for file in paths:
        _check(file)
    source = ", ".join(map(str, files)) or "no file"
    return corpus.build(out, partial(read, paths, tokenizer), source, tokenizer, plan, report)


@dataclass(frozen=True)
class Sharded:
    """Reads files for `build` on a Ray cluster.
    name: the tokenizer's, valid on every machine; the rest as in `spread`."""

    name: str
    address: str = AUTO
    workers: int | None = None

    def __call__(self, files: Files, tokenizer: Tokenizer, eos: int, report: Progress) -> Documents:
        parts = [part for file in files for part in ([Piece(file)] if _is_text(file) else pieces_of(file, StoreError))]
        with closing(spread(_Tokeniser, (self.name, eos), parts, self.address, self.workers)) as shards:
            for done, (text, ends) in enumerate(shards, 1):
                report(done / len(parts))
                yield from np.split(text, ends[:-1]) if len(ends) else []


class _Tokeniser:
    """Tokenises pieces in a worker."""

    def __init__(self, name: str, eos: int):
        self.tokenizer, self.eos = load_tokenizer(name), eos

    def __call__(self, piece: Piece) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Returns (tokens of the piece's documents, int32 [n]; end of each, int64 [d]). Raises PacelineError."""
        documents = [document(text, self.tokenizer, self.eos) for text in texts(piece, self.tokenizer)]
        text = np.concatenate(documents) if documents else np.empty(0, np.int32)
        return text, np.cumsum([len(ids) for ids in documents], dtype=np.int64)


def texts(source: Path | Piece, tokenizer: Tokenizer, report: Progress = silent) -> Iterator[str]:
    """Yield every text, except empty ones, in a file or a piece of a file. Raises PacelineError that names an
    unreadable line."""
    piece = source if isinstance(source, Piece) else Piece(source)
    file = piece.path
    _check(file)
    size = max(file.stat().st_size, 1)
    if _is_text(file):
        yield from filter(str.strip, [text_of(file, StoreError)])
        return
    with opened(file, StoreError) as lines:
        for where, line in read_records(lines, file, piece):
            record = conversation(line, where=where)
            if record.messages and not record.answers and "prompt" in record.record:
                raise StoreError(f"{record.where} has no text: neither an answer nor a document in it")
            of_ids = record.tokens and [_decoded(record.tokens[1], tokenizer, record.where)]
            yield from filter(str.strip, of_ids or record.texts())
            report(os.lseek(lines.fileno(), 0, os.SEEK_CUR) / size)


def _decoded(tokens: Sequence[int], tokenizer: Tokenizer, where: str) -> str:
    try:
        return tokenizer.decode(tokens)
    except (KeyError, IndexError, OverflowError):
        raise StoreError(f"{where}: token ids that the tokenizer does not have: another model's log") from None


def _check(file: Path) -> None:
    if not file.is_file():
        siblings = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        raise StoreError(f"there is no file {file}.{meant(file.name, siblings, PATHS)}")
    if _suffix(file) not in (".txt", ".jsonl"):
        raise StoreError(f"{file}: a corpus is made of .txt and .jsonl files, plain or packed ({', '.join(PACKED)})")


def _is_text(file: Path) -> bool:
    """Whether a file is a single document, not lines of records."""
    return _suffix(file) == ".txt"


def _suffix(file: Path) -> str:
    """.txt or .jsonl, whether compressed or not."""
    return Path(file.stem).suffix if file.suffix in PACKED else file.suffix
