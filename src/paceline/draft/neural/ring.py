"""Ring: a stream of messages from one process to another through shared memory, without pickling or system calls.

The writer copies bytes and then publishes how many there are; the reader spins for some microseconds, then sleeps. A
message longer than the ring passes through it in pieces. Knows nothing of what messages mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from time import perf_counter, sleep

_HEADER = 64
"""Bytes: the number of bytes written so far, and at 8 the number read, both int64."""
SPIN_S, LEAST_NAP_S, MOST_NAP_S = 50e-6, 20e-6, 1e-3
"""Seconds of spinning, then of the first and of the longest nap."""


class Closed(Exception):
    """The other side is gone, or took longer than it may."""


class Ring:
    """One direction. name: of a ring that another process made; None makes one of `size` bytes.

    alive   asked while waiting: whether the other side still is. limit: most seconds to wait."""

    def __init__(self, name: str | None = None, size: int = 1 << 22):
        self.memory = SharedMemory(name, create=name is None, size=_HEADER + size)
        assert self.memory.buf is not None
        self._view = self.memory.buf
        self._size = size
        self.alive: Callable[[], bool] = lambda: True
        self.limit = 60.0

    def write(self, message: bytes) -> None:
        """Send a message. Closed if the reader does not take it."""
        self._put(struct.pack("q", len(message)))
        self._put(message)

    def read(self) -> bytes:
        """The next message. Closed if none comes."""
        (length,) = struct.unpack("q", self._take(8))
        return self._take(length)

    @property
    def waiting(self) -> bool:
        """Whether something has been written and not read."""
        return self._get(0) > self._get(8)

    def close(self, unlink: bool = False) -> None:
        """Let go of the memory; `unlink`: nobody needs it any more."""
        with suppress(BufferError, FileNotFoundError):
            self._view = memoryview(b"")
            self.memory.close()
            if unlink:
                self.memory.unlink()

    def _get(self, at: int) -> int:
        return int(struct.unpack_from("q", self._view, at)[0])

    def _put(self, data: bytes) -> None:
        done = 0
        while done < len(data):
            written = self._get(0)
            self._wait(lambda at=written: self._size - (at - self._get(8)) > 0)  # type: ignore[misc]
            at = written % self._size
            count = min(len(data) - done, self._size - (written - self._get(8)), self._size - at)
            self._view[_HEADER + at : _HEADER + at + count] = data[done : done + count]
            struct.pack_into("q", self._view, 0, written + count)
            done += count

    def _take(self, length: int) -> bytes:
        parts, missing = [], length
        while missing:
            read = self._get(8)
            self._wait(lambda at=read: self._get(0) > at)  # type: ignore[misc]
            at = read % self._size
            count = min(missing, self._get(0) - read, self._size - at)
            parts.append(bytes(self._view[_HEADER + at : _HEADER + at + count]))
            struct.pack_into("q", self._view, 8, read + count)
            missing -= count
        return b"".join(parts)

    def _wait(self, ready: Callable[[], bool]) -> None:
        began, nap = perf_counter(), LEAST_NAP_S
        while not ready():
            waited = perf_counter() - began
            if waited < SPIN_S:
                continue
            if waited > self.limit or not self.alive():
                raise Closed
            sleep(nap)
            nap = min(nap * 1.5, MOST_NAP_S)
