"""The last answer to every copy of every prompt, in memory or in an SQLite file that processes share.

At any moment, after kill -9 and on a full disk, the file holds whole batches. Imports no engine."""

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save

from paceline.core.params import WARPING, SamplingParams
from paceline.core.tree import IntArray
from paceline.errors import PacelineError, StoreError

CAPACITY = 1 << 30  # Bytes: about 6 million tokens with the 20 best of each position, 130 million without.
OVERHEAD = 256  # An entry takes about so many bytes beyond its arrays.
WAIT = 60.0  # Seconds to wait for another process that writes.
TABLE = """CREATE TABLE IF NOT EXISTS rollouts (
    number INTEGER PRIMARY KEY, digest BLOB, copy INTEGER, version INTEGER, visit INTEGER, finished INTEGER,
    sampling TEXT, bytes INTEGER, arrays BLOB, UNIQUE (digest, copy)
)"""
"""Larger numbers were put later."""
ARRAYS = ("tokens", "probs", "top_ids", "top_probs")


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
    sampling   see `sampling_text`."""

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
        return OVERHEAD + sum(getattr(self, name).nbytes for name in ARRAYS)


def visit_after(old: Entry | None) -> int:
    """The `visit` of the answer that follows `old`."""
    return 0 if old is None else old.visit + 1


class RolloutStore:
    """Entries by key; beyond the capacity the least recently put entry is dropped first.

    path      a file for them, which processes may share; made if it does not exist.
    capacity  most bytes of entries.
    max_age   `get` ignores entries whose policy is more versions old than this; None: no limit.

    Raises StoreError if the file is not a store."""

    def __init__(self, path: str | Path | None = None, *, capacity: int = CAPACITY, max_age: int | None = None):
        if capacity < 1 or (max_age is not None and max_age < 0):
            raise PacelineError(f"capacity is {capacity} and max_age {max_age}; give 1 or more, and 0 or more or None.")
        self.path, self.capacity, self.max_age = path, capacity, max_age
        with self._errors():
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            # In a trainer the calls may come from several threads, one at a time.
            self._db = sqlite3.connect(path or ":memory:", timeout=WAIT, check_same_thread=False)
            if self._db.execute("SELECT 1 FROM sqlite_master WHERE tbl_name != 'rollouts'").fetchone():
                raise sqlite3.DatabaseError("it is another program's database")
            self._db.execute(TABLE)

    def __len__(self) -> int:
        return self._number("SELECT count(*) FROM rollouts")

    @property
    def nbytes(self) -> int:
        """Bytes of the entries, about."""
        return self._number("SELECT total(bytes) FROM rollouts")

    @property
    def is_shared(self) -> bool:
        """Whether other processes see the entries."""
        return self.path is not None

    def get(self, key: Key, version: int | None = None) -> Entry | None:
        """The last answer, unless it is older than `max_age` at policy version `version`."""
        question = "SELECT version, visit, finished, sampling, arrays FROM rollouts WHERE digest = ? AND copy = ?"
        with self._errors():
            row = self._db.execute(question, key).fetchone()
        if row is None or (version is not None and self.max_age is not None and version - row[0] > self.max_age):
            return None
        of, visit, finished, sampling, arrays = row
        return Entry(**load(arrays), version=of, visit=visit, finished=bool(finished), sampling=sampling)

    def put(self, items: Iterable[tuple[Key, Entry]]) -> None:
        """Replace the answers of these keys. When this returns they are in the file, if there is one."""
        rows = [
            (
                *key, entry.version, entry.visit, entry.finished, entry.sampling, entry.nbytes,
                save({name: np.ascontiguousarray(getattr(entry, name)) for name in ARRAYS}),
            )
            for key, entry in items
        ]  # fmt: skip
        names = "digest, copy, version, visit, finished, sampling, bytes, arrays"
        newer = "SELECT number, sum(bytes) OVER (ORDER BY number DESC) AS bytes FROM rollouts"
        with self._errors(), self._db:
            self._db.executemany(f"REPLACE INTO rollouts ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            drop = f"DELETE FROM rollouts WHERE number IN (SELECT number FROM ({newer}) WHERE bytes > ?)"
            self._db.execute(drop, (self.capacity,))

    def state_dict(self) -> dict[str, Any]:
        """The entries, for a checkpoint: one tensor of bytes."""
        return {"records": torch.frombuffer(bytearray(self._db.serialize()), dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all entries by those of a checkpoint."""
        with self._errors(), closing(sqlite3.connect(":memory:")) as saved:
            saved.deserialize(state["records"].numpy().tobytes())
            saved.backup(self._db)

    def _number(self, question: str) -> int:
        with self._errors():
            return int(self._db.execute(question).fetchone()[0])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors as errors of this store."""
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            raise StoreError(f"{self.path} cannot be used as a store: {error}") from None
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self.path} is not a store of rollouts ({error}); give another path.") from None
