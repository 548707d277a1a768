"""Local: our own engine as a backend, in this process. It answers many requests at once, in a thread of its own.

A prefix is prefilled, never decoded, and in the tokens that were generated where it repeats an earlier response. The
drafter remembers within a request's scope, and prompts that begin alike share keys and values, unless the drafter has
to see every token of a prompt.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.draft.base import Drafter
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.engine.request import Request as DraftedRow
from paceline.engine.request import Row
from paceline.engine.round import Round
from paceline.engine.sampling import SamplingParams
from paceline.engine.tree import DraftTree
from paceline.errors import ModelError, PacelineError
from paceline.evals.align.backend import Request, Response, continued, opened
from paceline.evals.align.types import Call, digest
from paceline.target.base import Facts, Needs
from paceline.workbench.client import CompletionError

MOST_TURNS = 256
"""Turns whose tokens are remembered, for prefixes that go on from them."""
MOST_SCOPES = 128
"""Scopes whose drafters are remembered; more than are ever under way at once."""


@dataclass
class _Pending:
    """A request that the engine is answering. prefix: tokens of its prefix. opened: the template opened the thought."""

    request: Request
    future: Future[Response]
    prefix: list[int]
    row: Row
    opened: bool


class Local:
    """Backend over an `Engine`. A temperature of None is greedy here.

    draft  as for paceline generate.
    reuse  whether prompts that begin alike share keys and values.
    batch  requests answered at once."""

    def __init__(
        self, model: str, draft: str = "none", *, reuse: bool = True, batch: int = 8, dtype: str = "auto",
        device: str = "auto",
    ):  # fmt: skip
        drafter: Drafter = create(draft)
        self._scoped = ScopedDrafter(lambda: create(draft)) if can_be_scoped(drafter) else None
        self.engine = Engine(model, self._scoped or drafter, dtype=dtype, device=device, max_batch=batch, reuse=reuse)
        if self.engine.tokenizer is None or not self.engine.tokenizer.has_chat_template:
            raise ModelError(f"{model} has no chat template, and alignment is measured in conversations")
        self.tokenizer = self.engine.tokenizer
        self.label = model.rstrip("/").rsplit("/", 1)[-1]
        self._turns: OrderedDict[str, list[int]] = OrderedDict()
        self._inbox: queue.Queue[tuple[Request, Future[Response]] | None] = queue.Queue()
        self._pending: dict[int, _Pending] = {}
        self._thread = threading.Thread(target=self._run, name="paceline-align", daemon=True)
        self._thread.start()

    async def complete(self, request: Request) -> Response:
        if not self._thread.is_alive():
            raise CompletionError("the engine has stopped after an error")
        future: Future[Response] = Future()
        self._inbox.put((request, future))
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    # The engine's thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                for delta in self.engine.step():
                    if delta.finished:
                        self._finish(self._pending.pop(delta.row.id))
        except Exception as error:
            for pending in self._pending.values():
                _fail(pending.future, error)
            raise

    def _take_in(self) -> bool:
        """Queue what has arrived, abort what nobody waits for any more; False when it is time to leave."""
        while True:
            try:
                arrived = self._inbox.get(block=not self.engine.has_work)
            except queue.Empty:
                break
            if arrived is None:
                for pending in self._pending.values():
                    self.engine.abort(pending.row)
                return False
            self._add(*arrived)
        for pending in list(self._pending.values()):
            if pending.future.cancelled():
                self.engine.abort(pending.row)
                del self._pending[pending.row.id]
        return True

    def _add(self, request: Request, future: Future[Response]) -> None:
        try:
            text = self.tokenizer.render_chat(request.messages)
            request = continued(request, text)
            prefix = self._prefix(request)
            row = self.engine.add([*self.tokenizer.encode_chat(request.messages), *prefix], self._params(request))
        except PacelineError as error:
            _fail(future, CompletionError(str(error)))
            return
        if self._scoped is not None:
            self._scoped.assign(row, request.scope)
        self._pending[row.id] = _Pending(request, future, prefix, row, opened(text))

    def _params(self, request: Request) -> SamplingParams:
        decoding = request.seeded
        stops = [self.tokenizer.encode_text(stop) for stop in request.stop]
        return SamplingParams(
            temperature=decoding.temperature or 0.0,
            top_k=decoding.top_k or 0,
            top_p=1.0 if decoding.top_p is None else decoding.top_p,
            min_p=decoding.min_p or 0.0,
            max_tokens=decoding.max_tokens,
            seed=decoding.seed,
            stop=request.stop,
            stop_token_ids=tuple(ids[0] for ids in stops if len(ids) == 1),  # a special token never shows in text
        )

    def _prefix(self, request: Request) -> list[int]:
        """Tokens of the prefix: as far as it repeats an earlier response those that were generated, then the rest.

        A model may write a text in other tokens than the tokenizer would; what it wrote is what it goes on from."""
        if not request.prefix:
            return []
        decode, written = self.tokenizer.decode, self._turns.get(_turn(request), [])
        end = next((n for n in range(len(written), 0, -1) if request.prefix.startswith(decode(written[:n]))), 0)
        text = decode(written[:end])
        while end and decode(written[: end - 1]) == text:  # end tokens, which do not show
            end -= 1
        return [*written[:end], *self.tokenizer.encode_text(request.prefix[len(text) :])]

    def _finish(self, pending: _Pending) -> None:
        row, request = pending.row, pending.request
        if row.error:
            _fail(pending.future, CompletionError(row.error))
            return
        _remember(self._turns, _turn(request), [*pending.prefix, *row.new_tokens.tolist()], MOST_TURNS)
        stats = row.stats
        call = Call(
            request.phase,
            "stop" if row.finish_reason == "stop" else "length",
            round(sum(stats.seconds.values()), 6),
            prefilled=row.prompt_length,
            cached=row.reused,
            injected=len(self.tokenizer.encode_text(request.forced)) if request.forced else 0,
            generated=row.num_new,
            speculation={name: getattr(stats, name) for name in ("rounds", "draft_rounds", "draft_tokens")},
        )
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            pending.future.set_result(Response(row.text, call, opened=pending.opened))


def _turn(request: Request) -> str:
    """The same for all requests that go on with one turn."""
    return digest([request.scope, request.sample, request.messages])


def _fail(future: Future[Response], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _remember(memory: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    """Store a value as the newest; the oldest go beyond `most`."""
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > most:
        memory.popitem(last=False)


class ScopedDrafter(Drafter):
    """A drafter that remembers within a scope (an item, or a scenario for a judge) and forgets across scopes.

    Rows of a scope share a drafter of their own: what one request of an item wrote is drafted in the next one, and 300
    judge calls of a scenario feed one memory, without the texts of other items in between.

    make  a new drafter; called for each scope. `assign` a row to its scope before it joins."""

    def __init__(self, make: Callable[[], Drafter]):
        self._make = make
        self._first = make()
        self.name, self.needs = self._first.name, self._first.needs
        self._scopes: OrderedDict[str, Drafter] = OrderedDict()
        self._of: dict[int, Drafter] = {}
        self._target: Facts | None = None

    def bind(self, target: Facts) -> None:
        self._target = target
        self._first.bind(target)

    def assign(self, row: DraftedRow, scope: str) -> None:
        """Put a row into a scope."""
        drafter = self._scopes.get(scope)
        if drafter is None:
            assert self._target is not None
            drafter = self._make()
            drafter.bind(self._target)
        _remember(self._scopes, scope, drafter, MOST_SCOPES)
        self._of[row.id] = drafter

    def start(self, row: DraftedRow) -> None:
        self._of.setdefault(row.id, self._first).start(row)

    def propose(self, rows: Sequence[DraftedRow]) -> list[DraftTree]:
        trees: dict[int, DraftTree] = {}
        for drafter in dict.fromkeys(self._of[row.id] for row in rows):
            own = [row for row in rows if self._of[row.id] is drafter]
            trees |= {row.id: tree for row, tree in zip(own, drafter.propose(own), strict=True)}
        return [trees[row.id] for row in rows]

    def observe(self, round: Round) -> None:
        """Nothing: drafters that ask nothing of the forward learn from `row.tokens` (see `can_be_scoped`)."""

    def drop(self, row: DraftedRow) -> None:
        if (drafter := self._of.pop(row.id, None)) is not None:
            drafter.drop(row)


def can_be_scoped(drafter: Drafter) -> bool:
    """Whether each scope can have a drafter of its own: one without a model that learns from its rows alone."""
    return drafter.weight_bytes == 0 and drafter.needs == Needs() and type(drafter).observe is Drafter.observe
