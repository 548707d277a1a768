"""Prefixes on disk: the keys and values of prompts, for later processes that run the same model.

A prompt is cut into blocks of BLOCK tokens, each in a file. The file's name is a hash of the model, the request's salt
and all tokens up to the block's end, so texts that begin alike share files, and processes that write the same block
write the same file. A recurrent state is in a file of its own, with the keys and values of the tokens after the last
whole block before it; a prompt of a recurrent model is loaded up to such a state. Beside each of these files may be
one with the target's states of its tokens, for drafters that read them. Files are written under another name, and
renamed when they are whole. Damaged files are found by their checksum and removed. If the folder is too large, the
least recently used files are removed."""

import logging
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import pairwise, takewhile
from pathlib import Path
from threading import get_ident
from typing import NamedTuple

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


class Stored(NamedTuple):
    """Keys and values [layers, 2, kv_heads, n, head_dim] of a text, a recurrent model's state after it, and the
    target's states [n, H] by layer."""

    kv: torch.Tensor
    state: State | None
    hidden: Mapping[int, torch.Tensor]


def _beside(path: Path, layers: Sequence[int]) -> Path:
    """The file with the target's states of the tokens in the file `path`."""
    return path.with_suffix(f".{'_'.join(map(str, layers))}.hidden")


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

    def load(self, tokens: IntArray, least: int, salt: str = "", layers: Collection[int] = ()) -> Stored:
        """Load the longest stored beginning of `tokens` with the target's states of `layers`; of no tokens if it would
        be `least` or less."""
        keys = list(self._keys(tokens, salt))
        if self._state is not None:
            return self._load_state(tokens, keys, least, sorted(layers))
        there = list(takewhile(Path.exists, map(self._block, keys[1:])))
        blocks = self._read_blocks(there, sorted(layers)) if len(there) * BLOCK > least else []
        return self._joined(blocks if len(blocks) * BLOCK > least else [], sorted(layers))

    def store(
        self, tokens: IntArray, copy: Callable[[int], torch.Tensor], salt: str = "", states: Mapping[int, State] = {},
        hidden: Mapping[int, torch.Tensor] = {},
    ) -> None:  # fmt: skip
        """Store the whole blocks of `tokens` that are missing, and for a recurrent model the states by number of
        tokens, with the blocks before them. copy(n) returns keys and values of the first n tokens.

        hidden  the target's states [len(tokens) or more, H] by layer."""
        keys, layers = list(self._keys(tokens, salt)), sorted(hidden)
        ends = {self._after(keys, tokens[:n]): n for n in states if BLOCK <= n <= len(tokens)}
        last = len(keys) - 1 if self._state is None else max(ends.values(), default=0) // BLOCK
        spans = {self._block(keys[i + 1]): (BLOCK * i, BLOCK * (i + 1)) for i in range(last)}
        spans |= {path: (n - n % BLOCK, n) for path, n in ends.items()}
        missing = [path for path in spans if not path.exists()]
        bare = [path for path in spans if layers and not _beside(path, layers).exists()]
        if not missing and not bare:
            return
        kv = copy(max((spans[path][1] for path in missing), default=0)).cpu()
        try:
            for path in missing:
                begin, end = spans[path]
                state = [states[end].matrices.cpu(), states[end].inputs.cpu()] if path in ends else []
                self._write(path, [kv[:, :, :, begin:end], *state])
            for path in bare:
                rows = slice(*spans[path])
                self._write(_beside(path, layers), [torch.cat([hidden[layer][rows] for layer in layers], -1).cpu()])
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

    def _load_state(self, tokens: IntArray, keys: list[str], least: int, layers: Sequence[int]) -> Stored:
        stored = defaultdict[str, list[int]](list)
        for path in self.folder.glob("*-*-*.state"):
            key, more, _ = path.stem.split("-", 2)
            if more.isdecimal():
                stored[key].append(int(more))
        ends = {BLOCK * i + more for i, key in enumerate(keys) for more in stored.get(key, ())}
        for n in sorted((n for n in ends if least < n <= len(tokens)), reverse=True):
            last = self._piece(self._after(keys, tokens[:n]), n % BLOCK, layers, self._state)
            blocks = self._read_blocks(map(self._block, keys[1 : n // BLOCK + 1]), layers) if last else []
            if last and len(blocks) == n // BLOCK:
                return self._joined([*blocks, last], layers)
        return self._joined([], layers)

    def _read_blocks(self, paths: Iterable[Path], layers: Sequence[int]) -> list[list[torch.Tensor]]:
        """Read blocks, up to the first that is missing or damaged."""
        return [*takewhile(bool, (self._piece(path, BLOCK, layers) for path in paths))]

    def _piece(self, path: Path, length: int, layers: Sequence[int], state: State | None = None) -> list[torch.Tensor]:
        """Read keys and values of `length` tokens; a state like `state`; states [length, L * H] of L layers. Returns
        none if anything is missing or damaged."""
        like = [] if state is None else [state.matrices, state.inputs]
        dtype, parts = self._target.dtype, [(self._shape(length), self._target.dtype)]
        read = self._read(path, [*parts, *((one.shape, one.dtype) for one in like)])
        if not read or not layers:
            return read
        beside = self._read(_beside(path, layers), [((length, len(layers) * self._target.hidden_size), dtype)])
        return [*read, *beside] if beside else []

    def _shape(self, length: int) -> tuple[int, ...]:
        return (*self.shape[:3], length, self.shape[4])

    def _joined(self, pieces: Sequence[Sequence[torch.Tensor]], layers: Sequence[int]) -> Stored:
        """Join pieces of a text. The last may have a state."""
        none = torch.empty(self._shape(0), dtype=self._target.dtype, device=self._target.device)
        kv = torch.cat([none, *(piece[0] for piece in pieces)], 3)
        state = State(*pieces[-1][1:3]) if pieces and self._state is not None else None
        every = torch.cat([piece[-1] for piece in pieces]).chunk(len(layers), -1) if pieces and layers else ()
        return Stored(kv, state, dict(zip(layers, every, strict=False)))

    def _read(self, path: Path, forms: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
        """Read a file's tensors, given their shapes and dtypes. Returns none if that fails. A damaged file is
        removed."""
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in forms]
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
        named = zip(parts, forms, strict=True)
        return [part.view(dtype).view(*shape).to(self._target.device) for part, (shape, dtype) in named]

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
        for path in [path for kind in ("kv", "state", "hidden", "part") for path in self.folder.glob(f"*.{kind}")]:
            with suppress(FileNotFoundError):
                files.append((path.stat().st_mtime, path.stat().st_size, path))
        left = self.most_bytes
        for _, size, path in sorted(files, reverse=True):
            left -= size
            if left < 0:
                path.unlink(missing_ok=True)
