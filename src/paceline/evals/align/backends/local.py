"""Local: our own engine in this process, answering many requests at once from a thread of its own.

A prefix is prefilled, never decoded, and in the tokens that were generated where it repeats an earlier reply. The
drafter remembers within a request's scope (`scoped.py`), and prompts that begin alike share keys and values, where it
does not have to see every token of a prompt.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import OrderedDict
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass

from paceline.draft.base import Drafter
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.engine.request import Row
from paceline.engine.sampling import SamplingParams
from paceline.errors import ModelError, PacelineError
from paceline.evals.align.backends.base import Reply, Request
from paceline.evals.align.backends.scoped import Scoped, fits
from paceline.evals.align.thoughts import continued, opened
from paceline.evals.align.types import Call, digest
from paceline.workbench.client import CompletionError

MOST_MEMOS = 256
"""Replies whose tokens are remembered, for prefixes that go on from them."""


@dataclass
class _Work:
    """A request on its way through the engine. prefix: tokens of its prefix, the first part of the turn.

    opened  whether the chat template opened the thought."""

    request: Request
    future: Future[Reply]
    prefix: list[int]
    row: Row
    opened: bool


class Local:
    """Backend over an `Engine` (see the module's docstring).

    draft  as for paceline generate. reuse: whether prompts that begin alike share keys and values.
    batch  requests answered at once. Temperature None is greedy here."""

    def __init__(
        self, model: str, draft: str = "none", *, reuse: bool = True, batch: int = 8,
        dtype: str = "auto", device: str = "auto", label: str | None = None,
    ):  # fmt: skip
        drafter: Drafter = create(draft)
        self._scoped = Scoped(lambda: create(draft)) if fits(drafter) else None
        drafter = self._scoped or drafter
        self.engine = Engine(model, drafter, dtype=dtype, device=device, max_batch=batch, reuse=reuse)
        if self.engine.tokenizer is None or not self.engine.tokenizer.has_chat_template:
            raise ModelError(f"{model} has no chat template, and alignment is measured in conversations")
        self.tokenizer = self.engine.tokenizer
        self.label = label or model.rstrip("/").rsplit("/", 1)[-1]
        self._memos: OrderedDict[str, list[int]] = OrderedDict()
        self._inbox: queue.Queue[tuple[Request, Future[Reply]] | None] = queue.Queue()
        self._work: dict[int, _Work] = {}
        self._thread = threading.Thread(target=self._run, name="paceline-align", daemon=True)
        self._thread.start()

    async def complete(self, request: Request) -> Reply:
        if not self._thread.is_alive():
            raise CompletionError("the engine has stopped after an error")
        future: Future[Reply] = Future()
        self._inbox.put((request, future))
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    # The engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                for delta in self.engine.step():
                    if delta.finished:
                        self._finish(self._work.pop(delta.row.id))
        except Exception as error:
            for work in self._work.values():
                _fail(work.future, error)
            raise

    def _take_in(self) -> bool:
        """Queue what has arrived, give up what nobody waits for; False when it is time to leave."""
        while True:
            try:
                arrived = self._inbox.get(block=not self.engine.has_work)
            except queue.Empty:
                break
            if arrived is None:
                for work in list(self._work.values()):
                    self.engine.abort(work.row)
                return False
            self._add(*arrived)
        for work in list(self._work.values()):
            if work.future.cancelled():
                self.engine.abort(work.row)
                del self._work[work.row.id]
        return True

    def _add(self, request: Request, future: Future[Reply]) -> None:
        try:
            text = self.tokenizer.render_chat(request.messages)
            request = continued(request, text)
            prefix = self._prefix(request)
            prompt = [*self.tokenizer.encode_chat(request.messages), *prefix]
            row = self.engine.add(prompt, self._params(request))
        except PacelineError as error:
            _fail(future, CompletionError(str(error)))
            return
        if self._scoped is not None:
            self._scoped.assign(row, request.scope)
        self._work[row.id] = _Work(request, future, prefix, row, opened(text))

    def _params(self, request: Request) -> SamplingParams:
        wish = request.seeded
        stops = [self.tokenizer.encode_text(stop) for stop in request.stop]
        return SamplingParams(
            temperature=wish.temperature or 0.0,
            top_k=wish.top_k or 0,
            top_p=1.0 if wish.top_p is None else wish.top_p,
            min_p=wish.min_p or 0.0,
            max_tokens=wish.max_tokens,
            seed=wish.seed,
            stop=request.stop,
            stop_token_ids=tuple(ids[0] for ids in stops if len(ids) == 1),  # a special token never shows in text
        )

    def _prefix(self, request: Request) -> list[int]:
        """Tokens of the prefix: those that were generated as far as it repeats an earlier reply, then the rest.

        A model may write a text in other tokens than the tokenizer would; what it wrote is what it goes on from."""
        if not request.prefix:
            return []
        tokens: list[int] = []
        memo = self._memos.get(_turn(request), [])
        for end in range(len(memo), 0, -1):
            if request.prefix.startswith(self.tokenizer.decode(memo[:end])):
                tokens = memo[:end]
                break
        text = self.tokenizer.decode(tokens)
        while tokens and self.tokenizer.decode(tokens[:-1]) == text:  # end tokens, which do not show
            tokens = tokens[:-1]
        return [*tokens, *self.tokenizer.encode_text(request.prefix[len(text) :])]

    def _finish(self, work: _Work) -> None:
        row, request = work.row, work.request
        if row.error:
            _fail(work.future, CompletionError(row.error))
            return
        self._memos[_turn(request)] = [*work.prefix, *row.new_tokens.tolist()]
        while len(self._memos) > MOST_MEMOS:
            self._memos.popitem(last=False)
        stats = row.stats
        call = Call(
            request.phase,
            "stop" if row.finish_reason == "stop" else "length",
            round(sum(stats.seconds.values()), 6),
            prefilled=row.prompt_length,
            cached=row.reused,
            injected=len(self.tokenizer.encode_text(request.forced)) if request.forced else 0,
            generated=row.num_new,
            speculation={
                "rounds": stats.rounds,
                "draft_rounds": stats.draft_rounds,
                "draft_tokens": stats.draft_tokens,
            },
        )
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            work.future.set_result(Reply(row.text, call, opened=work.opened))


def _turn(request: Request) -> str:
    """Requests that go on with the same turn share this."""
    return digest([request.scope, request.sample, request.messages])


def _fail(future: Future[Reply], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
