"""How the server ends: by a signal, or because its engine has failed.

    ending = Ending(uvicorn.Config(app), worker, grace_s=30)
    ending.run()

The first Ctrl-C or SIGTERM begins the grace: the server still listens, refuses new requests with status 503, and lets
open ones end. When the grace is over, or at a second signal, what is still open ends with an error, and the server
exits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from time import perf_counter
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.guard import refused
from paceline.serve.worker import Unavailable, Worker

log = logging.getLogger("paceline")

REST = 2
"""Seconds that clients have to read what is left for them, after everything has ended."""


class Ending(uvicorn.Server):
    """A server that ends in this way. signals: those that have arrived."""

    def __init__(self, config: uvicorn.Config, worker: Worker, grace_s: float):
        config.timeout_graceful_shutdown = REST
        super().__init__(config)
        self.worker, self.grace_s = worker, grace_s
        self.signals: list[int] = []
        self._until = math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal; the next tick acts."""
        self.signals.append(sig)
        self.force_exit = len(self.signals) > 2

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to leave."""
        worker = self.worker
        if self.signals and worker.closed is None:
            worker.close("the server is shutting down", "shutting_down")
            self._until = perf_counter() + self.grace_s
        over = len(self.signals) > 1 or perf_counter() >= self._until or worker.error is not None
        if over:
            worker.end_all()
        if over or (self.signals and not worker.open):
            self.should_exit = True
        return await super().on_tick(counter)


class CutOff:
    """Answers a request that is still open when the server leaves, such as one with half a body. Plain ASGI."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not begun:
                gone = Unavailable("the server is shutting down", "shutting_down")
                await refused(gone)(scope, receive, send)
