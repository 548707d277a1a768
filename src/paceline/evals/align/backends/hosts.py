"""Several servers of one model in turn; one that says 429 rests until its wait is over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic


@dataclass
class Host:
    """A server's base address, and when it may be asked again (time.monotonic)."""

    url: str
    free_at: float = 0.0


@dataclass
class Hosts:
    """Round robin over servers that are not resting."""

    hosts: list[Host] = field(default_factory=list)
    _next: int = 0

    @classmethod
    def of(cls, urls: Sequence[str]) -> Hosts:
        return cls([Host(url.rstrip("/")) for url in urls])

    async def turn(self) -> Host:
        """The next server; waits if all of them rest."""
        while True:
            now = monotonic()
            for offset in range(len(self.hosts)):
                host = self.hosts[(self._next + offset) % len(self.hosts)]
                if host.free_at <= now:
                    self._next = (self._next + offset + 1) % len(self.hosts)
                    return host
            await asyncio.sleep(max(min(host.free_at for host in self.hosts) - now, 0.01))

    def rest(self, host: Host, seconds: float) -> None:
        """Leave `host` alone for so long."""
        host.free_at = max(host.free_at, monotonic() + seconds)
