"""A corpus tokenised on several machines: every worker reads and tokenises pieces of its files.

    build(out, files, tokenizer, plan, read=Sharded("models/demo", address="local", workers=2))

The documents come back in the order of the files, so that the corpus is byte for byte that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.draft.text.corpus import Documents, document, is_one_text, texts
from paceline.errors import StoreError
from paceline.jsonl import Piece, pieces_of
from paceline.target.load import load_tokenizer
from paceline.target.tokenizer import Tokenizer
from paceline.workbench.cluster import AUTO, spread


@dataclass(frozen=True)
class Sharded:
    """Reads files for `build` on a Ray cluster. name: the tokenizer's, on every machine; the rest as for `spread`."""

    name: str
    address: str = AUTO
    workers: int | None = None

    def __call__(
        self, files: Sequence[Path], tokenizer: Tokenizer, eos: int, report: Callable[[float], None]
    ) -> Documents:
        parts = [
            part for file in files for part in ([Piece(file)] if is_one_text(file) else pieces_of(file, StoreError))
        ]
        with closing(spread(_Tokeniser, (self.name, eos), parts, self.address, self.workers)) as shards:
            for done, (text, ends) in enumerate(shards, 1):
                report(done / len(parts))
                yield from np.split(text, ends[:-1]) if len(ends) else []


class _Tokeniser:
    """A worker."""

    def __init__(self, name: str, eos: int):
        self.tokenizer, self.eos = load_tokenizer(name), eos

    def __call__(self, piece: Piece) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(tokens of its documents, int32 [n]; offset after each, int64 [d]). Raises StoreError."""
        documents = [document(text, self.tokenizer, self.eos) for text in texts(piece)]
        text = np.concatenate(documents) if documents else np.empty(0, np.int32)
        return text, np.cumsum([len(ids) for ids in documents], dtype=np.int64)
