"""Our own engine as a backend, in this process. Its drafter remembers texts within a request's scope. Prompts with a
common prefix share keys and values, unless the drafter must see every token of a prompt."""

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
from paceline.evals.align.backend import Backend, remember
from paceline.formats.facts import Facts
from paceline.serve.local import Local
from paceline.target.base import Needs

MOST_SCOPES = 128  # Most scopes whose drafters are kept; more than can be active at once.


def local_backend(model: str, draft: str = "none", *, reuse: bool = True, batch: int = 8, **loading: Any) -> Backend:
    """A backend over an `Engine`. A temperature of None is greedy here. Raises ModelError without a chat template.

    draft  as for paceline generate.
    reuse  whether prompts with a common prefix share keys and values.
    batch  requests answered at once.
    loading  dtype, device, exact, activations, as for `Engine`."""
    drafter: Drafter = create(draft)
    if can_be_scoped(drafter):
        drafter = ScopedDrafter(lambda: create(draft))
    engine = Engine(model, drafter, max_batch=batch, reuse=reuse, **loading)
    if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
        raise ModelError(f"{model} has no chat template, and alignment is measured in conversations")
    label = model.rstrip("/").rsplit("/", 1)[-1]
    return Backend(Local(engine), label, tokenizer=engine.tokenizer, stream=False)


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
        remember(self._scopes, scope, drafter, MOST_SCOPES)
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
