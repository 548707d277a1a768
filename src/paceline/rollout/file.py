"""A file of rollouts that several processes append to: whole records, also after kill -9.

A record is its length, its checksum, a JSON line of facts and the arrays' bytes. Everything happens under a lock that
the system frees when a process dies, in a file beside it. A record that a killed process left unfinished stands at the
end, and whoever locks the file next cuts it off.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import numpy as np

from paceline.errors import StoreError
from paceline.records import write_whole
from paceline.rollout.entry import Entry, Key

log = logging.getLogger("paceline")

MAGIC = b"paceline rollouts 1\n"
HEAD = len(MAGIC) + 33
"""Bytes before the first record: what the file is, and which one."""
FRAME = struct.Struct("<II")
"""Length of a record in bytes, and its CRC-32."""


class SharedFile:
    """Records at `path`; read and written inside `with file.locked() as locked` alone.

    head, read  the file's head when this process last read it, and the bytes that it has read."""

    def __init__(self, path: Path):
        self.path, self.head, self.read = path, b"", 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = path.with_name(f"{path.name}.lock").open("ab")
        except OSError as error:
            raise StoreError(f"{path} cannot be used as a store: {error.strerror}") from error

    @contextmanager
    def locked(self) -> Iterator[Locked]:
        """The file, for this process alone."""
        import fcntl  # not on Windows, where everything else of the package works

        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            with self.path.open("a+b", buffering=0) as raw:
                yield Locked(self, raw)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from error
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class Locked:
    """What can be done with the file while it is locked."""

    def __init__(self, file: SharedFile, raw: BinaryIO):
        self._file, self._raw = file, raw

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._raw.fileno()).st_size

    def news(self) -> list[tuple[Key, Entry]]:
        """The records that this process has not read. Cuts off an unfinished one at the end."""
        begin = self._begin()
        self._raw.seek(begin)
        records, end = _whole(memoryview(self._raw.read()), 0)
        self._file.read = begin + end
        if (rest := self.size - self._file.read) > 0:
            log.warning("%s: the last %d bytes are not a whole record and are dropped", self._file.path, rest)
            os.truncate(self._raw.fileno(), self._file.read)
        return records

    def _begin(self) -> int:
        """How far this process has read; after the head in a file that is new, or that was written anew."""
        self._raw.seek(0)
        head = self._raw.read(HEAD)
        if not MAGIC.startswith(head[: len(MAGIC)]):
            raise StoreError(f"{self._file.path} is not a store of rollouts; give another path.")
        if len(head) < HEAD:
            head = _new_head()
            os.truncate(self._raw.fileno(), 0)
            self._raw.write(head)
        if head != self._file.head:
            self._file.head, self._file.read = head, HEAD
        return self._file.read

    def append(self, items: Iterable[tuple[Key, Entry]]) -> None:
        """Write records at the end; after an error the file is as it was. Call `news` first."""
        begin, rest = self.size, memoryview(encoded(items))
        self._file.read = begin + len(rest)
        try:
            while rest:
                rest = rest[self._raw.write(rest) :]
        except OSError:
            os.truncate(self._raw.fileno(), begin)
            self._file.read = begin
            raise

    def rewrite(self, items: Iterable[tuple[Key, Entry]]) -> None:
        """Replace the file by one with these records alone."""
        head, records = _new_head(), encoded(items)
        write_whole(self._file.path, head + records)
        self._file.head, self._file.read = head, HEAD + len(records)


def _new_head() -> bytes:
    """A file's first bytes, different for each file: one that was written anew is read from its beginning."""
    return MAGIC + uuid4().hex.encode() + b"\n"


def encoded(items: Iterable[tuple[Key, Entry]]) -> bytes:
    """Records of these entries, one after another."""
    return b"".join(_encoded(key, entry) for key, entry in items)


def decoded(content: bytes) -> list[tuple[Key, Entry]]:
    """The entries of `encoded`."""
    return _whole(memoryview(content), 0)[0]


def _whole(content: memoryview, at: int) -> tuple[list[tuple[Key, Entry]], int]:
    """The whole records from `at` on, and where the last of them ends."""
    records = []
    while (end := _end(content, at)) is not None:
        records.append(_decoded(content[at + FRAME.size : end]))
        at = end
    return records, at


def _end(content: memoryview, at: int) -> int | None:
    """Where the record at `at` ends; None if it is not whole."""
    if len(content) < at + FRAME.size:
        return None
    length, checksum = FRAME.unpack_from(content, at)
    end = at + FRAME.size + length
    if length == 0 or end > len(content) or zlib.crc32(content[at + FRAME.size : end]) != checksum:
        return None
    return int(end)


def _encoded(key: Key, entry: Entry) -> bytes:
    arrays = (entry.tokens, entry.probs, entry.top_ids, entry.top_probs)
    facts = {
        "digest": key.digest.hex(),
        "copy": key.copy,
        "version": entry.version,
        "visit": entry.visit,
        "finished": entry.finished,
        "law": entry.law,
        "arrays": [[array.dtype.str, *array.shape] for array in arrays],
    }
    body = json.dumps(facts).encode() + b"\n" + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


def _decoded(body: memoryview) -> tuple[Key, Entry]:
    line, _, rest = bytearray(body).partition(b"\n")
    facts = json.loads(line)
    arrays, at = [], 0
    for dtype, *shape in facts["arrays"]:
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(rest, dtype, count, at).reshape(shape))
        at += arrays[-1].nbytes
    entry = Entry(*arrays, facts["version"], facts["visit"], facts["finished"], facts["law"])  # type: ignore[call-arg, arg-type]
    return Key(bytes.fromhex(facts["digest"]), facts["copy"]), entry
