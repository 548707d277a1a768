"""Local: an engine of this process as an endpoint. It answers bodies as our server does, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline import __version__
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.net.completion import Completion, CompletionError
from paceline.net.endpoint import Body, Endpoint
from paceline.serve.chats import Chats
from paceline.serve.fields import ChatRequest, TextRequest, validated
from paceline.serve.responses import styles_of, whole
from paceline.serve.settings import Settings
from paceline.serve.worker import Worker

WAITING = 1 << 30  # No limit on waiting requests: the caller decides how many there are.
STOP_SECONDS = 60.0


class Local(Endpoint):
    """An engine that answers many requests at once. Its rounds run in a thread of their own.

    name    name in results; drafts: names for a request's field `draft`, if the drafter is `by_request`.

    A request's field `user` names its client, for whom a drafter may keep a memory (`Row.client`). Raises PacelineError
    if the engine has no tokenizer."""

    has_our_noise = in_process = True

    def __init__(self, engine: Engine, name: str = "", *, drafts: Sequence[str] = (), slots: int | None = None):
        super().__init__(slots or engine.max_batch)
        if engine.tokenizer is None:
            raise PacelineError(f"{engine.target.name} has no tokenizer, and an endpoint is asked with text")
        self.engine, self.name, self.model = engine, name or engine.drafter.name, engine.target.name
        self.facts = {"engine": f"paceline {__version__}", "dtype": str(engine.target.dtype).removeprefix("torch.")}
        self._worker = Worker(engine, WAITING)
        settings = Settings(model=self.model, drafts=tuple(drafts), sampling="none", read_ahead=False)
        self._chats = Chats(self._worker, settings)

    def ask(self, bodies: Sequence[Body], slots: int | None = None) -> list[Completion]:
        """Ask as `Endpoint.ask`. The engine decides when requests that are asked together join its batch."""
        return super().ask(bodies, 1 if slots == 1 else max(len(bodies), 1))

    async def complete(self, body: Body) -> Completion:
        completion = Completion()
        asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        try:
            request = validated(ChatRequest if "messages" in body else TextRequest, asked)
            prompted = self._chats.prompted(request)
            submitted = self._chats.submit(request, prompted, str(body.get("user") or ""))
            styles = styles_of(self._chats, request, prompted)
            completion.take(await whole(self._chats, styles, submitted, dict))
        except PacelineError as error:
            raise CompletionError(f"{self.name} cannot answer this request: {error}") from None
        return completion

    async def aclose(self) -> None:
        await asyncio.to_thread(self._worker.stop, STOP_SECONDS)
