"""The round in fifty lines of docs/architecture.md does what the engine does."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import pytest

from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from tests.fakes import TableTarget
from tests.lossless_enumeration import BranchingRandom, drawn, largest_difference, outcomes, plain
from tests.paths import REPOSITORY

PROMPT, NEW, LENGTH = [0, 1], 4, 2
TARGET, DRAFT = TableTarget(3, order=None, seed=7), TableTarget(3, order=1, seed=1)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=NEW)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/architecture.md", "exec"), names)
    assert len(code.splitlines()) <= 50
    return names


def probabilities(model: TableTarget) -> Any:
    return lambda tokens: model.probabilities_after(tokens, SAMPLED).tolist()


class Drawing(Drafter):
    """Chains drawn from the draft model; the best ones for greedy rows."""

    name = "drawing"

    def draft(self, row: Any) -> Any:
        length = min(LENGTH, row.max_draft)
        return drawn(DRAFT, range(length), params=row.params)(row.tokens.tolist(), row.random)


def test_its_law_is_the_engines_and_the_targets(page: dict[str, Any]) -> None:
    target, draft = probabilities(TARGET), probabilities(DRAFT)
    written = outcomes(lambda b: tuple(chain(*page["generate"](target, draft, PROMPT, NEW, LENGTH, b.decide))))

    def engine(branches: Any) -> tuple[int, ...]:
        made = Engine(TARGET, Drawing())
        row = made.add(PROMPT, SAMPLED)
        row.random = BranchingRandom(branches)
        made.finish([row])
        return tuple(row.new_tokens.tolist())

    assert largest_difference(written, outcomes(engine)) < 1e-9
    assert largest_difference(written, plain(TARGET, PROMPT, SAMPLED, NEW)) < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_greedy_rounds_are_the_engines(page: dict[str, Any], seed: int) -> None:
    """The same tokens, and as many of them in every round; the engine's first token comes from the prompt's forward."""
    target, draft = TableTarget(5, order=2, seed=seed), TableTarget(5, order=1, seed=seed)
    models = [page["greedy"](probabilities(model)) for model in (target, draft)]

    class Best(Drafter):
        name = "best"

        def draft(self, row: Any) -> Any:
            tokens: list[int] = []
            while len(tokens) < min(LENGTH, row.max_draft):
                tokens.append(models[1]([*row.tokens.tolist(), *tokens]).index(1.0))
            return self.chain_after(row, tokens)  # type: ignore[arg-type]

    deltas = list(Engine(target, Best()).stream([PROMPT], SamplingParams(max_tokens=20)))
    first = deltas[0].tokens
    rounds = page["generate"](*models, [*PROMPT, *first], 19, LENGTH, lambda weights: weights.index(1.0))
    assert [delta.tokens for delta in deltas[1:]] == rounds


def test_acceptance_goes_on_in_the_stream_where_the_drafter_stopped() -> None:
    """One stream a round and row, begun anew at the round's output position: drafting first, then acceptance; the
    target's own tokens have numbers of their own."""
    made = Engine(TARGET, Drawing())
    row, taken = made.add(PROMPT, SamplingParams(temperature=1.0, max_tokens=NEW, seed=3)), []
    free = row.random.free
    begin, random = free.begin, free.random
    free.begin = lambda position: (taken.append(("begin", position)), begin(position))[1]  # type: ignore[method-assign]
    free.random = lambda: taken.append(number := random()) or number  # type: ignore[method-assign]
    made.step()  # the prompt
    made.step()
    assert taken[0] == ("begin", 1)
    numbers = [number for number in taken if isinstance(number, float)]
    assert len(numbers) > LENGTH, "of the draft, and of acceptance"
    begin(1)
    assert [random() for _ in numbers] == numbers
