"""Prefixes on disk: the keys and values of prompts, for later processes that run the same model.

A prompt is cut into blocks of BLOCK tokens, each in a file. The file's name is a hash of the model, the request's salt
and all tokens up to the block's end, so texts that begin alike share files, and processes that write the same block
write the same file. Files are written under another name, and renamed when they are whole. Damaged files are found by
their checksum and removed. If the folder is too large, the least recently used files are removed."""

import logging
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from threading import get_ident

import numpy as np
import torch

from paceline.core.tree import IntArray
from paceline.errors import PacelineError
from paceline.target.base import Target

log = logging.getLogger("paceline.prefix_cache")

BLOCK = 64
"""Number of tokens of a file. Tokens after a prompt's last whole block are not stored."""
FORMAT = "paceline prefix 1"
"""Version of the files' format: a checksum of four bytes, then the block's keys and values."""


class PrefixCache:
    """A model's files in `folder`, which models and processes may share.

    shape       shape of a block's keys and values: [layers, 2, kv_heads, BLOCK, head_dim].
    most_bytes  largest number of bytes of all files in the folder."""

    def __init__(self, folder: str | Path, target: Target, shape: tuple[int, ...], most_bytes: int):
        self.folder, self.shape, self.most_bytes = Path(folder), shape, most_bytes
        self._target = target
        self._nbytes = int(np.prod(shape)) * target.dtype.itemsize
        self._model = sha256(f"{FORMAT} {target.prefix_key} {shape}".encode()).digest()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # Others must not read the prompts.
        except OSError as error:
            raise PacelineError(f"prefix_cache: {self.folder} cannot be a folder: {error.strerror}") from None

    def load(self, tokens: IntArray, least: int, salt: str = "") -> torch.Tensor | None:
        """Load the stored blocks with which `tokens` begin: keys and values [layers, 2, kv_heads, n, head_dim]; None if
        n would be `least` or less."""
        there = list(takewhile(Path.exists, self._paths(tokens, salt)))
        blocks: list[torch.Tensor] = []
        if len(there) * BLOCK > least:
            for path in there:
                if (block := self._read(path)) is None:
                    break
                blocks.append(block)
        return torch.cat(blocks, 3) if len(blocks) * BLOCK > least else None

    def store(self, tokens: IntArray, copy: Callable[[int], torch.Tensor], salt: str = "") -> None:
        """Store the whole blocks of `tokens` that are missing. copy(n) returns keys and values of the first n
        tokens."""
        missing = [(i, path) for i, path in enumerate(self._paths(tokens, salt)) if not path.exists()]
        if not missing:
            return
        kv = copy(BLOCK * (missing[-1][0] + 1)).cpu()
        try:
            for i, path in missing:
                self._write(path, kv[:, :, :, BLOCK * i : BLOCK * (i + 1)])
            self._trim()
        except OSError as error:
            log.warning("prefix_cache: a prompt was not stored in %s: %s", self.folder, error)

    def _paths(self, tokens: IntArray, salt: str = "") -> Iterator[Path]:
        """The files of all whole blocks of `tokens`, in order."""
        text = sha256(self._model + salt.encode()).digest() if salt else self._model
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            text = sha256(text + tokens[end - BLOCK : end].astype(np.int64).tobytes()).digest()
            yield self.folder / f"{text.hex()}.kv"

    def _read(self, path: Path) -> torch.Tensor | None:
        """Read a block; None if that fails. A damaged file is removed."""
        try:
            data = bytearray(path.read_bytes())
            if len(data) == 4 + self._nbytes and zlib.crc32(memoryview(data)[4:]) == int.from_bytes(data[:4], "little"):
                os.utime(path)
                block = torch.frombuffer(data, dtype=self._target.dtype, offset=4).view(self.shape)
                return block.to(self._target.device)
            log.warning("prefix_cache: %s is damaged, and was removed", path)
            path.unlink(missing_ok=True)
        except OSError:
            return None  # Another process may have removed it.
        return None

    def _write(self, path: Path, kv: torch.Tensor) -> None:
        data = kv.contiguous().view(torch.uint8).numpy().tobytes()
        part = path.with_suffix(f".{os.getpid()}-{get_ident()}.part")
        try:
            with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(zlib.crc32(data).to_bytes(4, "little") + data)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _trim(self) -> None:
        """Remove the least recently used files until the others fit, and unfinished files that a process left."""
        files = []
        for path in [*self.folder.glob("*.kv"), *self.folder.glob("*.part")]:
            with suppress(FileNotFoundError):
                files.append((path.stat().st_mtime, path.stat().st_size, path))
        left = self.most_bytes
        for _, size, path in sorted(files, reverse=True):
            left -= size
            if left < 0:
                path.unlink(missing_ok=True)
