"""Our own engine as a backend, in this process.

A prefix is prefilled, never decoded. If it repeats an earlier response, it has the generated tokens. The drafter
remembers texts within a request's scope. Prompts with a common prefix share keys and values, unless the drafter must
see every token of a prompt."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.request import Request as DraftedRow
from paceline.core.round import Round
from paceline.core.tree import DraftTree
from paceline.draft.base import Ask, Drafter
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.errors import ModelError
from paceline.evals.align.backend import Backend, Request
from paceline.evals.align.types import Call, digest
from paceline.formats.facts import Facts
from paceline.net.completion import Completion
from paceline.serve.local import Local
from paceline.target.base import Needs

MOST_TURNS = 256  # Most turns whose tokens are kept, for prefixes that continue them.
MOST_SCOPES = 128  # Most scopes whose drafters are kept; more than can be active at once.


class LocalBackend(Backend):
    """Backend over an `Engine`. A temperature of None is greedy here.

    draft  as for paceline generate.
    reuse  whether prompts with a common prefix share keys and values.
    batch  requests answered at once.
    loading  dtype, device, exact, activations, as for `Engine`."""

    def __init__(self, model: str, draft: str = "none", *, reuse: bool = True, batch: int = 8, **loading: Any):
        drafter: Drafter = create(draft)
        if can_be_scoped(drafter):
            drafter = ScopedDrafter(lambda: create(draft))
        self.engine = Engine(model, drafter, max_batch=batch, reuse=reuse, **loading)
        if self.engine.tokenizer is None or not self.engine.tokenizer.has_chat_template:
            raise ModelError(f"{model} has no chat template, and alignment is measured in conversations")
        self._turns: OrderedDict[str, list[int]] = OrderedDict()
        label = model.rstrip("/").rsplit("/", 1)[-1]
        super().__init__(Local(self.engine), label, tokenizer=self.engine.tokenizer, stream=False)

    def body(self, request: Request, rendered: str) -> dict[str, Any]:
        assert self.tokenizer is not None
        stops = [self.tokenizer.encode_text(stop) for stop in request.stop]
        return {
            **{"temperature": 0.0, **request.seeded.body()},
            "prompt": [*self.tokenizer.encode_chat(request.messages), *self._prefix(request)],
            "stop": list(request.stop),
            "stop_token_ids": [ids[0] for ids in stops if len(ids) == 1],  # Special tokens are not in the text.
            "user": request.scope,
            "return_token_ids": True,
        }

    def _call(self, request: Request, completion: Completion) -> Call:
        _remember(self._turns, _turn(request), [*self._prefix(request), *completion.tokens], MOST_TURNS)
        return super()._call(request, completion)

    def _prefix(self, request: Request) -> list[int]:
        """Tokens of the prefix: generated tokens while it repeats an earlier response, then the tokenizer's.

        A model may spell a text in other tokens than the tokenizer, and must continue from its own tokens."""
        if not request.prefix:
            return []
        assert self.tokenizer is not None
        decode, written = self.tokenizer.decode, self._turns.get(_turn(request), [])
        end = next((n for n in range(len(written), 0, -1) if request.prefix.startswith(decode(written[:n]))), 0)
        text = decode(written[:end])
        while end and decode(written[: end - 1]) == text:  # This drops end tokens, which have no text.
            end -= 1
        return [*written[:end], *self.tokenizer.encode_text(request.prefix[len(text) :])]


def _turn(request: Request) -> str:
    """A key that all requests of one turn share."""
    return digest([request.scope, request.sample, request.messages])


def _remember(memory: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    """Store a value as the newest, and drop the oldest ones beyond `most`."""
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > most:
        memory.popitem(last=False)


class ScopedDrafter(Drafter):
    """A drafter with a separate memory for each scope (an item, or a scenario for a judge).

    All rows of a scope share one inner drafter: the text of one request of an item is drafted in the next one, and 300
    judge calls of a scenario fill one memory, without the texts of other items. A row's scope is its `client`.

    make  returns a new inner drafter."""

    def __init__(self, make: Callable[[], Drafter]):
        self._make = make
        first = make()
        self.name, self.needs = first.name, first.needs
        self._scopes: OrderedDict[str, Drafter] = OrderedDict()
        self._of: dict[int, Drafter] = {}
        self._target: Facts | None = None

    def bind(self, target: Facts) -> None:
        self._target = target

    def start(self, row: DraftedRow) -> None:
        scope = str(getattr(row, "client", ""))
        drafter = self._scopes.get(scope)
        if drafter is None:
            assert self._target is not None
            drafter = self._make()
            drafter.bind(self._target)
        _remember(self._scopes, scope, drafter, MOST_SCOPES)
        self._of[row.id] = drafter
        drafter.start(row)

    def propose(self, asks: Sequence[Ask]) -> list[DraftTree]:
        trees: dict[int, DraftTree] = {}
        for drafter in dict.fromkeys(self._of[row.id] for row, _ in asks):
            own = [ask for ask in asks if self._of[ask.row.id] is drafter]
            trees |= {row.id: tree for (row, _), tree in zip(own, drafter.propose(own), strict=True)}
        return [trees[row.id] for row, _ in asks]

    def observe(self, round: Round) -> None:
        """Nothing to do: the inner drafters learn from `row.tokens` (see `can_be_scoped`)."""

    def drop(self, row: DraftedRow) -> None:
        if (drafter := self._of.pop(row.id, None)) is not None:
            drafter.drop(row)


def can_be_scoped(drafter: Drafter) -> bool:
    """Whether each scope can have its own drafter: it has no model and learns from its rows alone."""
    return drafter.weight_bytes == 0 and drafter.needs == Needs() and type(drafter).observe is Drafter.observe
