"""RolloutStore: the last answer to every copy of every prompt, at most so many bytes of them. Knows no engine.

    store = RolloutStore("runs/answers.rollouts")      # or RolloutStore(): in memory alone
    store.put([(key, entry)])
    store.get(key)

With a file, several processes share one store, and a run that was killed goes on with what was put before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.rollout.entry import Entry, Key
from paceline.rollout.file import SharedFile, decoded, encoded

CAPACITY = 1 << 30
"""Bytes: about 6 million tokens with the 20 best of each place, 130 million without."""


class RolloutStore:
    """Entries by key, the least recently put forgotten first.

    path      a file to keep them in; made if it is not there.
    capacity  most bytes of entries in memory; the file has up to twice as much before it is written anew.
    max_age   entries whose policy is more versions old than this are not given out; None: all are.

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
        """Whether other processes see what is put here."""
        return self._file is not None

    def get(self, key: Key, version: int | None = None) -> Entry | None:
        """The last answer, unless it is older than `max_age` at policy version `version`."""
        entry = self._entries.get(key)
        if entry is None or version is None or self.max_age is None:
            return entry
        return entry if version - entry.version <= self.max_age else None

    def put(self, items: Iterable[tuple[Key, Entry]]) -> None:
        """Replace the answers of these keys. With a file they are in it when this returns, whole."""
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
        """Take in what other processes have put into the file."""
        if self._file is not None:
            with self._file.locked() as file:
                self._take(file.news())

    def state_dict(self) -> dict[str, Any]:
        """The entries, for a checkpoint: one tensor of bytes."""
        return {"records": torch.frombuffer(bytearray(encoded(self._entries.items())), dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget everything and take the entries of a checkpoint."""
        self._entries, self.nbytes = {}, 0
        self._take(decoded(state["records"].numpy().tobytes()))
        if self._file is not None:
            with self._file.locked() as file:
                file.news()
                file.rewrite(self._entries.items())

    def _take(self, items: Iterable[tuple[Key, Entry]]) -> None:
        for key, entry in items:
            before = self._entries.pop(key, None)  # so that the new one is the last
            self.nbytes += entry.nbytes - (before.nbytes if before is not None else 0)
            self._entries[key] = entry
        while self.nbytes > self.capacity:
            oldest = next(iter(self._entries))
            self.nbytes -= self._entries.pop(oldest).nbytes
