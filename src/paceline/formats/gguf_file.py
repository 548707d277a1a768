"""GGUF files: metadata by key, and tensors by name, mapped from disk.

The first file's name opens a model in several files. Every fault is a ModelError of one line."""

import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import ModelError, shortened
from paceline.formats.folder import refuse_pointer
from paceline.kernels.blocks import Blocks, kind_of

VERSIONS = (2, 3)
DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""ggml's types of tensors that are not in blocks, by number."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_DEEPEST = 4  # largest depth of arrays in arrays


@dataclass(frozen=True)
class Place:
    """A tensor's place: the bytes of its file, its ggml type, its shape [outputs, inputs], and its first byte."""

    data: torch.Tensor
    type: int
    shape: tuple[int, ...]
    begin: int


# The package gguf has a reader, too, but it makes several arrays for each token: it takes 13 s for a vocabulary of
# 150,000 tokens, this class 0.7 s. And it does not stop if a damaged file claims an array of 2**60 numbers.
class GGUF:
    """A GGUF file of version 2 or 3 (ggml's docs/gguf.md), with all its parts.

    metadata  the first file's metadata by key.
    places    places of all tensors, by name.
    family    the architecture; only in a damaged file it is no text."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metadata, self.places = _read(self.path)
        self.family: Any = self.metadata.get("general.architecture")
        for other in self._other_parts():
            more = _read(other)[1]
            _refuse_repeated(other, [*self.places, *more])
            self.places |= more

    def _other_parts(self) -> Iterator[Path]:
        count = int(self.metadata.get("split.count", 1))
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
                raise ModelError(f"{self.path} is one of {count} files of a model; {other.name} is not in its folder")
            yield other

    def tensor(self, name: str) -> torch.Tensor | Blocks:
        """Map a tensor, or a matrix in blocks. Matrices of experts are stacked. ModelError for an unknown type."""
        place = self.places[name]
        dtype, kind = DENSE.get(place.type), None
        if dtype is not None:
            row = place.shape[-1] * dtype.itemsize
        else:
            kind = kind_of(place.type)
            if kind is None:
                raise ModelError(
                    f"{self.path}: {name} is of ggml's type {place.type}, which the package gguf cannot read: install "
                    "a newer one, or make the file anew, as Q8_0, Q4_0 or Q4_K_M"
                )
            if len(place.shape) not in (2, 3) or place.shape[-1] % kind.inputs:
                raise ModelError(
                    f"{self.path}: {name} of {list(place.shape)} does not divide into blocks of {kind.name}"
                )
            row = place.shape[-1] // kind.inputs * kind.nbytes
        size = prod(place.shape[:-1]) * row
        data = place.data[place.begin : place.begin + size]
        if len(data) < size:
            raise ModelError(f"{self.path} is cut off: {name} ends {size - len(data)} bytes after its end")
        if kind is not None:
            return Blocks(kind, data.view(-1, row))
        assert dtype is not None
        aligned = data if place.begin % 8 == 0 else data.clone()
        return aligned.view(dtype).view(place.shape)


class _Cursor:
    """Reads a file's bytes in order. Raises struct.error at its end."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def number(self, code: str) -> Any:
        """Read a number. code: its format in struct's notation."""
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def count(self, least: int = 1) -> int:
        """Read how many items follow, each of at least `least` bytes. struct.error if the file is too short for
        them."""
        count = int(self.number("Q"))
        if count * least > len(self.data) - self.at:
            raise struct.error("longer than the file")
        return count

    def text(self) -> str:
        """Read a length in bytes, then a text of this length."""
        size = self.count()
        self.at += size
        return bytes(self.data[self.at - size : self.at]).decode("utf-8", "replace")

    def texts(self) -> list[str]:
        """Read their number, then the texts. A vocabulary has many, so this is `text` without calls."""
        texts, data, size_at, most = list[str](), self.data, struct.Struct("<Q").unpack_from, len(self.data)
        for _ in range(self.count(8)):
            begin = self.at + 8
            self.at = begin + size_at(data, self.at)[0]
            if self.at > most:
                raise struct.error("longer than the file")
            texts.append(str(data[begin : self.at], "utf-8", "replace"))
        return texts

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a value. kind: the number of its type."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        if depth == _DEEPEST:
            raise ValueError("arrays in arrays")
        inner = int(self.number("I"))
        if inner == _TEXT:
            return self.texts()
        if inner in _NUMBERS:
            code = np.dtype(_NUMBERS[inner]).newbyteorder("<")
            count = self.count(code.itemsize)
            self.at += count * code.itemsize
            return np.frombuffer(self.data, code, count, self.at - count * code.itemsize).tolist()
        return [self.value(inner, depth + 1) for _ in range(self.count())]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Place]]:
    try:
        with path.open("rb") as opened:
            start = opened.read(4)
        refuse_pointer(path)
        if start != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it begins with {start!r}")
        mapped = np.memmap(path, np.uint8, "c")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    cursor = _Cursor(memoryview(mapped))  # type: ignore[arg-type]
    cursor.at = 4
    try:
        version = cursor.number("I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ModelError(f"{path} is a GGUF of version {version}, and {known} are read: convert the model anew")
        tensors, pairs = cursor.count(), cursor.count()
        given = [(cursor.text(), cursor.value(cursor.number("I"))) for _ in range(pairs)]
        entries = [_entry(cursor) for _ in range(tensors)]
    except (struct.error, KeyError, ValueError) as error:
        raise ModelError(f"{path} is cut off or damaged ({error}): copy or download it again") from None
    _refuse_repeated(path, [key for key, _ in given])
    _refuse_repeated(path, [name for name, *_ in entries])
    facts = dict(given)
    step = facts.get("general.alignment", 32)
    if not isinstance(step, int) or step < 1:
        raise ModelError(f"{path}: general.alignment is {step}; it must be a whole number above 0")
    begin, data = -(-cursor.at // step) * step, torch.from_numpy(mapped)
    return facts, {name: Place(data, kind, shape, begin + at) for name, kind, shape, at in entries}


def _refuse_repeated(path: Path, names: Sequence[str]) -> None:
    """Raise ModelError if one of a file's names is there twice."""
    if len({*names}) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise ModelError(f"{path} has {shortened(twice)} twice: it is damaged; copy or download it again")


def _entry(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Read a tensor's name, type, shape and offset."""
    name, dims = cursor.text(), cursor.number("I")
    if not 1 <= dims <= 4:
        raise ValueError(f"{shortened(name)} has {dims} dimensions")
    shape = tuple(int(cursor.number("Q")) for _ in range(dims))[::-1]
    if prod(shape) > 1 << 48:
        raise ValueError(f"{shortened(name)} has the shape {list(shape)}")
    return name, int(cursor.number("I")), shape, int(cursor.number("Q"))
