"""GGUF files: facts by key, and tensors by name, mapped from disk and not yet read. Knows nothing of models.

    file = GGUF("model-Q4_K_M.gguf")
    file.facts["general.architecture"], file.tensor("token_embd.weight")

The layout is that of ggml's docs/gguf.md, versions 2 and 3. Large models may be cut into several files, which are
opened together. Every mistake in a file is a ModelError of one line.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import ModelError, shortened
from paceline.target.quantised.blocks import Blocks, Kind, kind_of

VERSIONS = (2, 3)
DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of tensors that are ordinary numbers, by ggml's number."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_DEEPEST = 4
"""Arrays inside arrays."""


@dataclass(frozen=True)
class Place:
    """Where a tensor is: its file's bytes, its type's number, its shape with the outputs first."""

    data: torch.Tensor
    type: int
    shape: tuple[int, ...]
    begin: int


class GGUF:
    """A GGUF file, all its parts together.

    facts   the first file's pairs of key and value. places: tensors by name."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.facts, self.places = _read(self.path)
        for other in self._other_parts():
            self.places |= _read(other)[1]

    def _other_parts(self) -> Iterator[Path]:
        count = int(self.facts.get("split.count", 1))
        if count < 2:
            return
        match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", self.path.name)
        if match is None or int(match[2]) != 1 or int(match[3]) != count:
            raise ModelError(
                f"{self.path} is a part of a model in {count} files: name the first, ...-00001-of-{count:05}.gguf"
            )
        for part in range(2, count + 1):
            other = self.path.with_name(f"{match[1]}-{part:05}-of-{match[3]}{match[4]}")
            if not other.exists():
                raise ModelError(f"{self.path} is one of {count} files of a model, and {other.name} is not beside it")
            yield other

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def tensor(self, name: str) -> torch.Tensor | Blocks:
        """A tensor, mapped: numbers, or a matrix in blocks. ModelError for a type that is not read."""
        place = self.places[name]
        dtype = DENSE.get(place.type)
        kind = kind_of(place.type) if dtype is None else None
        if kind is None and dtype is None:
            raise ModelError(
                f"{self.path}: {name} is of ggml's type {place.type}, which the package gguf cannot read: install a "
                "newer one, or make the file anew, as Q8_0, Q4_0 or Q4_K_M"
            )
        if kind is not None and (len(place.shape) != 2 or place.shape[1] % kind.inputs):
            raise ModelError(f"{self.path}: {name} of {list(place.shape)} does not divide into blocks of {kind.name}")
        row = _row_bytes(place.shape, kind, dtype)
        size = prod(place.shape[:-1]) * row
        data = place.data[place.begin : place.begin + size]
        if len(data) < size:
            raise ModelError(f"{self.path} is cut off: {name} ends {size - len(data)} bytes after its end")
        if kind is not None:
            return Blocks(kind, data.view(-1, row))
        assert dtype is not None
        aligned = data if place.begin % 8 == 0 else data.clone()
        return aligned.view(dtype).view(place.shape)


def _row_bytes(shape: tuple[int, ...], kind: Kind | None, dtype: torch.dtype | None) -> int:
    if kind is not None:
        return shape[-1] // kind.inputs * kind.nbytes
    assert dtype is not None
    return shape[-1] * dtype.itemsize


class _Cursor:
    """Reads a file's bytes from the front. struct.error at its end."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def number(self, code: str) -> Any:
        """One number, in struct's notation."""
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def count(self, least: int = 1) -> int:
        """A number of things that take `least` bytes each, which must be there."""
        count = int(self.number("Q"))
        if count * least > len(self.data) - self.at:
            raise struct.error("longer than the file")
        return count

    def text(self) -> str:
        """A length and so many bytes."""
        size = self.count()
        self.at += size
        return bytes(self.data[self.at - size : self.at]).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value of a type."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        if depth == _DEEPEST:
            raise ValueError("arrays in arrays")
        inner = int(self.number("I"))
        if inner in _NUMBERS:
            code = np.dtype(_NUMBERS[inner]).newbyteorder("<")
            count = self.count(code.itemsize)
            self.at += count * code.itemsize
            return np.frombuffer(self.data, code, count, self.at - count * code.itemsize).tolist()
        return [self.value(inner, depth + 1) for _ in range(self.count())]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Place]]:
    try:
        with path.open("rb") as opened:
            start = opened.read(30)
        if start.startswith(b"version https://git-lfs"):
            raise ModelError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull`")
        if start[:4] != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it begins with {shortened(repr(bytes(start[:4])))}")
        mapped = np.memmap(path, np.uint8, "c")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    cursor = _Cursor(memoryview(mapped))  # type: ignore[arg-type]
    cursor.at = 4
    try:
        version = cursor.number("I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ModelError(f"{path} is a GGUF of version {version}, and {known} are read: convert the model anew")
        tensors, pairs = cursor.count(), cursor.count()
        facts = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(pairs)}
        entries = [_entry(cursor) for _ in range(tensors)]
    except (struct.error, KeyError, ValueError) as error:
        raise ModelError(f"{path} is cut off or damaged ({error}): copy or download it again") from error
    step = facts.get("general.alignment", 32)
    if not isinstance(step, int) or step < 1:
        raise ModelError(f"{path}: general.alignment is {step}; it must be a whole number above 0")
    begin, data = -(-cursor.at // step) * step, torch.from_numpy(mapped)
    return facts, {name: Place(data, kind, shape, begin + at) for name, kind, shape, at in entries}


def _entry(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Name, type, shape and offset of a tensor."""
    name, dims = cursor.text(), cursor.number("I")
    if not 1 <= dims <= 4:
        raise ValueError(f"{shortened(name)} has {dims} dimensions")
    shape = tuple(int(cursor.number("Q")) for _ in range(dims))[::-1]
    if prod(shape) > 1 << 48:
        raise ValueError(f"{shortened(name)} has the shape {list(shape)}")
    return name, int(cursor.number("I")), shape, int(cursor.number("Q"))
