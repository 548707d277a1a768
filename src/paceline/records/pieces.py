"""Pieces of files: whole lines, each piece to be read by itself, on any machine.

    for piece in pieces_of("log.jsonl"):
        for where, record in objects(piece, TraceError, "an answer"): ...
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import PacelineError

PIECE_BYTES = 1 << 20
"""Bytes of a piece: some seconds of work."""


@dataclass(frozen=True)
class Piece:
    """Bytes [begin, end) of a file, which are whole lines; end None: all the rest. line: the first one's number."""

    path: Path
    begin: int = 0
    end: int | None = None
    line: int = 1

    def within(self, file: IO[bytes]) -> Iterable[bytes]:
        """Its lines, of the opened file."""
        if self.end is None:
            return file
        file.seek(self.begin)
        return io.BytesIO(file.read(self.end - self.begin))


def pieces_of(path: Path, error: type[PacelineError]) -> Iterator[Piece]:
    """A file's pieces in order; one for an empty file, and for a gzipped one, which can be read from its beginning
    alone. `error` if it cannot be read."""
    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz" or raw.read(2) == b"\x1f\x8b":
                yield Piece(path)
                return
            raw.seek(0)
            begin, line = 0, 1
            while content := raw.read(PIECE_BYTES) + raw.readline():
                yield Piece(path, begin, begin + len(content), line)
                begin, line = begin + len(content), line + content.count(b"\n")
            if begin == 0:
                yield Piece(path)
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror or cause}") from cause
