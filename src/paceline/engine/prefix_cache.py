"""Prefixes on disk: the keys and values of prompts, for later processes that run the same model.

A prompt is cut into blocks of BLOCK tokens, each in a file. The file's name is a hash of the model, the request's salt
and all tokens up to the block's end, so texts that begin alike share files, and processes that write the same block
write the same file. A recurrent state is in a file of its own, with the keys and values of the tokens after the last
whole block before it; a prompt of a recurrent model is loaded up to such a state. Files are written under another name,
and renamed when they are whole. Damaged files are found by their checksum and removed. If the folder is too large, the
least recently used files are removed."""

import logging
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import pairwise, takewhile
from pathlib import Path
from threading import get_ident

import numpy as np
import torch

from paceline.core.tree import IntArray
from paceline.errors import PacelineError
from paceline.target.base import Target
from paceline.target.recurrent import State

log = logging.getLogger("paceline.prefix_cache")

BLOCK = 64
"""Number of tokens of a file. Tokens after a prompt's last whole block are not stored."""
FORMAT = "paceline prefix 1"
"""Version of the files' format: a checksum of four bytes, then the block's keys and values."""


class PrefixCache:
    """A model's files in `folder`, which models and processes may share.

    shape       shape of a block's keys and values: [layers, 2, kv_heads, BLOCK, head_dim].
    most_bytes  largest number of bytes of all files in the folder.
    state       an empty state of a recurrent model; None: the model has none."""

    def __init__(
        self, folder: str | Path, target: Target, shape: tuple[int, ...], most_bytes: int, state: State | None = None
    ):  # fmt: skip
        self.folder, self.shape, self.most_bytes = Path(folder), shape, most_bytes
        self._target, self._state = target, state
        self._model = sha256(f"{FORMAT} {target.prefix_key} {shape}".encode()).digest()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # Others must not read the prompts.
        except OSError as error:
            raise PacelineError(f"prefix_cache: {self.folder} cannot be a folder: {error.strerror}") from None

    def load(self, tokens: IntArray, least: int, salt: str = "") -> tuple[torch.Tensor, State | None]:
        """Load the longest stored beginning of `tokens`: keys and values [layers, 2, kv_heads, n, head_dim], and a
        recurrent model's state after them. n is 0 if it would be `least` or less."""
        keys = list(self._keys(tokens, salt))
        if self._state is not None:
            return self._load_state(tokens, keys, least)
        there = list(takewhile(Path.exists, map(self._block, keys[1:])))
        blocks = self._read_blocks(there) if len(there) * BLOCK > least else []
        return self._joined(blocks if len(blocks) * BLOCK > least else []), None

    def store(
        self, tokens: IntArray, copy: Callable[[int], torch.Tensor], salt: str = "", states: Mapping[int, State] = {}
    ) -> None:  # fmt: skip
        """Store the whole blocks of `tokens` that are missing, and for a recurrent model the states by number of
        tokens, with the blocks before them. copy(n) returns keys and values of the first n tokens."""
        keys = list(self._keys(tokens, salt))
        ends = {n: self._after(keys, tokens[:n]) for n in states if BLOCK <= n <= len(tokens)}
        new = {n: path for n, path in ends.items() if not path.exists()}
        last = len(keys) - 1 if self._state is None else max(ends, default=0) // BLOCK
        missing = [i for i in range(last) if not self._block(keys[i + 1]).exists()]
        if not missing and not new:
            return
        kv = copy(max(BLOCK * (missing[-1] + 1) if missing else 0, *new, 0)).cpu()
        try:
            for i in missing:
                self._write(self._block(keys[i + 1]), [kv[:, :, :, BLOCK * i : BLOCK * (i + 1)]])
            for n, path in new.items():
                self._write(path, [kv[:, :, :, n - n % BLOCK : n], states[n].matrices.cpu(), states[n].inputs.cpu()])
            self._trim()
        except OSError as error:
            log.warning("prefix_cache: a prompt was not stored in %s: %s", self.folder, error)

    def _keys(self, tokens: IntArray, salt: str) -> Iterator[str]:
        """The hash of each beginning of `tokens` of whole blocks, from that of 0 tokens on."""
        text = sha256(self._model + salt.encode()).digest() if salt else self._model
        yield text.hex()
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            text = sha256(text + tokens[end - BLOCK : end].astype(np.int64).tobytes()).digest()
            yield text.hex()

    def _block(self, key: str) -> Path:
        """The file of the block that ends the beginning with this hash."""
        return self.folder / f"{key}.kv"

    def _after(self, keys: Sequence[str], tokens: IntArray) -> Path:
        """The file of the state after `tokens`, whose beginnings have the hashes `keys`."""
        blocks, more = divmod(len(tokens), BLOCK)
        rest = sha256(tokens[len(tokens) - more :].astype(np.int64).tobytes()).hexdigest()[:16]
        return self.folder / f"{keys[blocks]}-{more}-{rest}.state"

    def _load_state(self, tokens: IntArray, keys: list[str], least: int) -> tuple[torch.Tensor, State | None]:
        assert self._state is not None
        stored = defaultdict[str, list[int]](list)
        for path in self.folder.glob("*-*-*.state"):
            key, more, _ = path.stem.split("-", 2)
            if more.isdecimal():
                stored[key].append(int(more))
        ends = {BLOCK * i + more for i, key in enumerate(keys) for more in stored.get(key, ())}
        for n in sorted((n for n in ends if least < n <= len(tokens)), reverse=True):
            shape = self._state.matrices.shape, self._state.inputs.shape
            parts = self._read(self._after(keys, tokens[:n]), [self._shape(n % BLOCK), *shape], self._state)
            blocks = self._read_blocks(map(self._block, keys[1 : n // BLOCK + 1])) if parts else []
            if parts and len(blocks) == n // BLOCK:
                return self._joined([*blocks, parts[0]]), State(*parts[1:])
        return self._joined([]), None

    def _read_blocks(self, paths: Iterable[Path]) -> list[torch.Tensor]:
        """Read blocks, up to the first that is missing or damaged."""
        read = (self._read(path, [self._shape(BLOCK)]) for path in paths)
        return [block for block, in takewhile(bool, read)]

    def _shape(self, length: int) -> tuple[int, ...]:
        return (*self.shape[:3], length, self.shape[4])

    def _joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        none = torch.empty(self._shape(0), dtype=self._target.dtype, device=self._target.device)
        return torch.cat([none, *pieces], 3)

    def _read(self, path: Path, shapes: Sequence[Sequence[int]], state: State | None = None) -> list[torch.Tensor]:
        """Read a file's tensors: keys and values, and those of a state like `state`. Returns none if that fails. A
        damaged file is removed."""
        dtypes = [self._target.dtype, *([state.matrices.dtype, state.inputs.dtype] if state is not None else [])]
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        try:
            data = bytearray(path.read_bytes())
            if len(data) != 4 + sum(sizes) or zlib.crc32(memoryview(data)[4:]) != int.from_bytes(data[:4], "little"):
                log.warning("prefix_cache: %s is damaged, and was removed", path)
                path.unlink(missing_ok=True)
                return []
            os.utime(path)
        except OSError:
            return []  # Another process may have removed it.
        ends = [4 + sum(sizes[:i]) for i in range(len(sizes) + 1)]
        bytes_ = torch.frombuffer(data, dtype=torch.uint8)
        parts = [bytes_[begin:end].clone() for begin, end in pairwise(ends)]  # A copy is aligned.
        named = zip(parts, dtypes, shapes, strict=True)
        return [part.view(dtype).view(*shape).to(self._target.device) for part, dtype, shape in named]

    def _write(self, path: Path, tensors: Sequence[torch.Tensor]) -> None:
        data = b"".join(one.contiguous().view(torch.uint8).numpy().tobytes() for one in tensors)
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
        for path in [path for kind in ("kv", "state", "part") for path in self.folder.glob(f"*.{kind}")]:
            with suppress(FileNotFoundError):
                files.append((path.stat().st_mtime, path.stat().st_size, path))
        left = self.most_bytes
        for _, size, path in sorted(files, reverse=True):
            left -= size
            if left < 0:
                path.unlink(missing_ok=True)
