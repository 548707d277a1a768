"""The last answer to every copy of every prompt, in memory or in a file that processes share.

    store = RolloutStore("runs/answers.rollouts", capacity=1 << 30)
    store.put([(key, entry)])
    store.get(key, version=7)

At any moment, and after kill -9, the file holds whole records. Imports no engine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.sampling import WARPING, SamplingParams
from paceline.engine.tree import IntArray
from paceline.errors import PacelineError, StoreError
from paceline.jsonl import write_whole

log = logging.getLogger("paceline")

CAPACITY = 1 << 30
"""Bytes: about 6 million tokens with the 20 best of each position, 130 million without."""
OVERHEAD = 256
"""Bytes of an entry in addition to its arrays, about."""
MAGIC = b"paceline rollouts 1\n"
HEAD = len(MAGIC) + 33
"""Bytes before the first record: MAGIC and the file's own number."""
FRAME = struct.Struct("<II")
"""Length of a record in bytes, and its CRC-32."""


class Key(NamedTuple):
    """The digest of a prompt's token ids, and the number of its copy in a group, from 0."""

    digest: bytes
    copy: int

    def seeds(self, seed: int, *more: int) -> np.random.SeedSequence:
        """Randomness of the caller's `seed` for this prompt and for `more`, such as the copy and the version."""
        return np.random.SeedSequence([seed, *np.frombuffer(self.digest, "<u4").tolist(), *more])

    def seed(self, seed: int, *more: int) -> int:
        """64 bits of `seeds`, as a row's seed."""
        return int(self.seeds(seed, *more).generate_state(1, np.uint64)[0])


def digest(prompt: Sequence[int] | IntArray) -> bytes:
    """16 bytes that identify a prompt's token ids."""
    return hashlib.blake2b(np.asarray(prompt, "<i8").tobytes(), digest_size=16).digest()


def numbered(digests: Sequence[bytes]) -> list[Key]:
    """A key for each prompt of a batch: the first of equal ones is copy 0, the next copy 1."""
    counts: dict[bytes, int] = {}
    keys = []
    for name in digests:
        copy = counts.get(name, 0)
        counts[name] = copy + 1
        keys.append(Key(name, copy))
    return keys


def sampling_text(params: SamplingParams) -> str:
    """The parameters that turn logits into a distribution, as text. Equal texts mean equal transformations."""
    values: dict[str, Any] = {name: getattr(params, name) for name in WARPING}
    values["logit_bias"] = sorted(dict(params.logit_bias).items())
    values["bad_words"] = sorted(tuple(word) for word in params.bad_words)
    return " ".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True, eq=False)
class Entry:
    """A stored rollout: the last answer to one copy of a prompt.

    tokens     int32 [n], with the end token if there was one.
    probs      float [n]: the probability of each token under the policy of `version`, after temperature and filters.
    top_ids    int32 [n, M]: that policy's M most probable tokens at each position; top_probs float [n, M]. M may be 0.
    version    of the policy, as the caller counts.
    visit      number of earlier answers to this copy.
    finished   whether it ended by itself; otherwise it was cut at `max_tokens`.
    sampling   see `sampling_text`.
    """

    tokens: NDArray[np.int32]
    probs: NDArray[Any]
    top_ids: NDArray[np.int32]
    top_probs: NDArray[Any]
    version: int
    visit: int
    finished: bool
    sampling: str

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def logprobs(self) -> NDArray[Any]:
        """Natural logarithms of `probs`."""
        return np.log(self.probs)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, about."""
        arrays = (self.tokens, self.probs, self.top_ids, self.top_probs)
        return OVERHEAD + sum(array.nbytes for array in arrays)


def visit_after(old: Entry | None) -> int:
    """The `visit` of the answer that follows `old`."""
    return 0 if old is None else old.visit + 1


class RolloutStore:
    """Entries by key; beyond the capacity the least recently put entry is dropped first.

    path      a file for them, which processes may share; made if it does not exist.
    capacity  most bytes of entries in memory; the file grows to twice that before it is rewritten.
    max_age   `get` ignores entries whose policy is more versions old than this; None: no limit.

    Raises StoreError if the file is not a store."""

    def __init__(self, path: str | Path | None = None, *, capacity: int = CAPACITY, max_age: int | None = None):
        if capacity < 1 or (max_age is not None and max_age < 0):
            raise PacelineError(f"capacity is {capacity} and max_age {max_age}; give 1 or more, and 0 or more or None.")
        self.capacity, self.max_age = capacity, max_age
        self.nbytes = 0
        self._entries: dict[Key, Entry] = {}
        self._file = SharedFile(Path(path)) if path is not None else None
        self.refresh()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_shared(self) -> bool:
        """Whether other processes see the entries."""
        return self._file is not None

    def get(self, key: Key, version: int | None = None) -> Entry | None:
        """The last answer, unless it is older than `max_age` at policy version `version`."""
        entry = self._entries.get(key)
        if entry is None or version is None or self.max_age is None:
            return entry
        return entry if version - entry.version <= self.max_age else None

    def put(self, items: Iterable[tuple[Key, Entry]]) -> None:
        """Replace the answers of these keys. When this returns they are in the file, if there is one."""
        items = list(items)
        if self._file is not None:
            with self._file.locked() as file:
                self._take(file.news())
                file.append(items)
                self._take(items)
                if file.size > 2 * self.capacity:
                    file.rewrite(self._entries.items())
        else:
            self._take(items)

    def refresh(self) -> None:
        """Read what other processes have put into the file."""
        if self._file is not None:
            with self._file.locked() as file:
                self._take(file.news())

    def state_dict(self) -> dict[str, Any]:
        """The entries, for a checkpoint: one tensor of bytes."""
        return {"records": torch.frombuffer(bytearray(encoded(self._entries.items())), dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all entries by those of a checkpoint."""
        self._entries, self.nbytes = {}, 0
        self._take(decoded(state["records"].numpy().tobytes()))
        if self._file is not None:
            with self._file.locked() as file:
                file.news()
                file.rewrite(self._entries.items())

    def _take(self, items: Iterable[tuple[Key, Entry]]) -> None:
        for key, entry in items:
            before = self._entries.pop(key, None)  # so that the new one becomes the last
            self.nbytes += entry.nbytes - (before.nbytes if before is not None else 0)
            self._entries[key] = entry
        while self.nbytes > self.capacity:
            oldest = next(iter(self._entries))
            self.nbytes -= self._entries.pop(oldest).nbytes


class SharedFile:
    """A file of records that several processes append to, only inside `with file.locked() as locked`.

    head, read  the file's head when this process last read it, and the number of bytes that it has read."""

    def __init__(self, path: Path):
        self.path, self.head, self.read = path, b"", 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = path.with_name(f"{path.name}.lock").open("ab")
        except OSError as error:
            raise StoreError(f"{path} cannot be used as a store: {error.strerror}") from error

    @contextmanager
    def locked(self) -> Iterator[Locked]:
        """The file, locked for this process."""
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
    """Operations on the file while it is locked."""

    def __init__(self, file: SharedFile, raw: BinaryIO):
        self._file, self._raw = file, raw

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._raw.fileno()).st_size

    def news(self) -> list[tuple[Key, Entry]]:
        """The records that this process has not read. Cuts an unfinished record off the end."""
        begin = self._begin()
        self._raw.seek(begin)
        records, end = _whole(memoryview(self._raw.read()), 0)
        self._file.read = begin + end
        if (rest := self.size - self._file.read) > 0:
            log.warning("%s: the last %d bytes are not a whole record and are dropped", self._file.path, rest)
            os.truncate(self._raw.fileno(), self._file.read)
        return records

    def _begin(self) -> int:
        """The byte up to which this process has read; the end of the head for a new or rewritten file."""
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
    """A file's first bytes, different for each file, so that a rewritten file is read from its beginning."""
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
        "law": entry.sampling,
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
