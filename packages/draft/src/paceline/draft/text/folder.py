"""The text files of a folder, such as a working tree, as a corpus in memory that is made anew when they change.

    corpus = FolderCorpus(folder, tokenizer)
    array = corpus.latest()    # None while it is made for the first time

Files that `.gitignore` names, hidden ones and those that are no text are left out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.draft.text.corpus import document
from paceline.draft.text.suffix_array import SuffixArray, build_part
from paceline.errors import StoreError
from paceline.formats.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

log = logging.getLogger("paceline.serving.notices")

SECONDS, PATIENCE = 2.0, 10.0
"""Seconds between two looks at the files; and how many times as long as making the array the next look waits."""
MOST_BYTES, MOST_TOKENS = 1 << 18, 1 << 23
"""Largest size of a file that is read; and the largest number of tokens of all. The files changed last come first."""

_ONE_AT_A_TIME = Lock()
"""Held while an array is made: that takes a core for seconds, and answers need the others."""
Stamp = tuple[int, int]
"""Time of change in nanoseconds, and size."""


class FolderCorpus:
    """A folder's text as a suffix array. A thread makes it and looks after it; `latest` never waits.

    root  a folder around it, whose `.gitignore` and hidden folders count, too; None: the folder itself.

    Raises StoreError for a folder that is none, or a tokenizer without an end token."""

    def __init__(self, folder: str | Path, tokenizer: Tokenizer, root: Path | None = None):
        self.folder = Path(folder).expanduser().resolve()
        self._root = root or self.folder
        if not self.folder.is_dir():
            raise StoreError(f"--corpus {folder}: there is no such folder")
        if tokenizer.eos_token_id is None:
            raise StoreError(f"--corpus: {tokenizer.name} names no end token, which would stand between two files")
        self._tokenizer, self._eos = tokenizer, int(tokenizer.eos_token_id)
        self._tokens: dict[Path, tuple[Stamp, NDArray[np.int32]]] = {}
        self._array: SuffixArray | None = None
        self._lock, self._next = Lock(), 0.0

    def latest(self) -> SuffixArray | None:
        """The array as it was made last; None before the first. Begins to look for changes if it is time."""
        if monotonic() >= self._next and self._lock.acquire(blocking=False):
            Thread(target=self._work, daemon=True).start()
        return self._array

    def renew(self) -> bool:
        """Make the array anew if files have changed. Returns whether they have."""
        stamps = dict(files(self._root, self.folder))
        if {path: stamp for path, (stamp, _) in self._tokens.items()} == stamps:
            return False
        kept: dict[Path, tuple[Stamp, NDArray[np.int32]]] = {}
        for path, stamp in stamps.items():
            known = self._tokens.get(path)
            kept[path] = known if known is not None and known[0] == stamp else (stamp, self._read(path))
        self._tokens = kept
        newest = sorted(kept.values(), key=lambda one: -one[0][0])
        totals = np.cumsum([len(tokens) for _, tokens in newest]).tolist()
        fit = sum(total <= MOST_TOKENS for total in totals)
        documents = [tokens for _, tokens in newest[:fit] if len(tokens)]
        if fit < len(totals):
            log.info("--corpus: of %d tokens in %s, the %d of the files changed last are used",
                     totals[-1], self.folder, sum(map(len, documents)))  # fmt: skip
        text: NDArray[Any] = np.concatenate(documents) if documents else np.empty(0, np.int32)
        size = max(self._tokenizer.vocab_size, int(text.max(initial=0)) + 1)
        if size <= 1 << 16:  # As in stored corpora, so that nothing is compiled anew.
            text = text.astype(np.uint16)
        ends = np.cumsum([len(one) for one in documents], dtype=np.int64)
        self._array = self._made(text, ends, size) if len(text) else None
        return True

    def _made(self, text: NDArray[Any], ends: NDArray[np.int64], vocab_size: int) -> SuffixArray:
        """The array, whose functions are compiled: a round must not wait for that."""
        array = SuffixArray(text, ends, build_part(text, ends, vocab_size)["suffix_positions"])
        array.warm_up()
        array.speculate([0], 1)
        return array

    def _work(self) -> None:
        began = monotonic()
        try:
            first = not self._tokens
            with _ONE_AT_A_TIME:
                changed = self.renew()
            if changed and first and self._array is not None:
                log.info("--corpus: %d tokens of %d files in %s, read in %.1f s", len(self._array.text),
                         len(self._array.ends), self.folder, monotonic() - began)  # fmt: skip
        except Exception:  # Answers do not need it.
            log.exception("--corpus: %s could not be read", self.folder)
        finally:
            self._next = monotonic() + max(SECONDS, PATIENCE * (monotonic() - began))
            self._lock.release()

    def _read(self, path: Path) -> NDArray[np.int32]:
        """The tokens of a file, with the end token; none if it is no text or cannot be read."""
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            return np.empty(0, np.int32)
        is_text = bool(text.strip()) and "\0" not in text
        return document(text, self._tokenizer, self._eos) if is_text else np.empty(0, np.int32)


def files(root: Path, folder: Path | None = None) -> Iterator[tuple[Path, Stamp]]:
    """The files of a repository in `root` that may be text, and their stamps: those that git would add, but no hidden
    ones. folder: only those in this folder."""
    yield from ((path, stamp) for path, stamp in _walk(root, ()) if folder is None or path.is_relative_to(folder))


def _walk(folder: Path, specs: tuple[tuple[Path, GitIgnoreSpec], ...]) -> Iterator[tuple[Path, Stamp]]:
    from pathspec import GitIgnoreSpec

    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        if any(entry.name == ".gitignore" for entry in entries):
            lines = (folder / ".gitignore").read_text("utf-8", "replace").splitlines()
            specs = ((folder, GitIgnoreSpec.from_lines(lines)), *specs)
    except OSError:
        return
    for entry in entries:
        path = folder / entry.name
        try:
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name.startswith(".") or entry.is_symlink() or _is_ignored(path, is_folder, specs):
                continue
            if is_folder:
                yield from _walk(path, specs)
            elif entry.is_file():
                facts = entry.stat()
                if 0 < facts.st_size <= MOST_BYTES:
                    yield path, (facts.st_mtime_ns, facts.st_size)
        except OSError:
            continue


def _is_ignored(path: Path, is_folder: bool, specs: tuple[tuple[Path, GitIgnoreSpec], ...]) -> bool:
    """Whether the innermost `.gitignore` that says anything about a path ignores it."""
    for folder, spec in specs:
        said = spec.check_file(path.relative_to(folder).as_posix() + "/" * is_folder).include
        if said is not None:
            return said
    return False
