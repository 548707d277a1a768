"""Whole answers from an engine that runs in rounds: all at once, or as they grow. Knows `add`, `step` and `abort`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.engine.prompt import Prompt
from paceline.engine.request import Completion, Delta, Row
from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError, PromptError

if TYPE_CHECKING:
    from paceline.rollout import Rollouts, RolloutStore


class WholeAnswers:
    """What an engine offers to those who do not want to run its rounds themselves."""

    def add(self, prompt: Prompt, params: SamplingParams = SamplingParams()) -> Row:
        """Queue a request."""
        raise NotImplementedError

    def abort(self, row: Row) -> None:
        """End a request where it is."""
        raise NotImplementedError

    def step(self) -> list[Delta]:
        """Run one round."""
        raise NotImplementedError

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> Generator[Delta]:
        """Answer `prompts` together, yielding what each round adds; `Delta.index` counts the prompts from 0.

        Closing the iterator gives up what is unfinished. One stream at a time: other rows run along, but what they
        gain meanwhile is on the rows alone."""
        if isinstance(prompts, str):
            raise PromptError("Give a list of prompts; for one prompt, a list that holds it.")
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(every) != len(prompts):
            raise PacelineError(f"{len(prompts)} prompts with {len(every)} params; give one for all, or one for each.")
        rows: list[Row] = []
        with ExitStack() as leaving:
            for prompt, wish in zip(prompts, every, strict=True):
                rows.append(self.add(prompt, wish))
                leaving.callback(self.abort, rows[-1])
            yield from self.follow(rows)

    def follow(self, rows: Sequence[Row], until: Callable[[], bool] = lambda: False) -> Generator[Delta]:
        """Run until requests that were added have ended, yielding what each round adds; `Delta.index` counts `rows`.

        until  is called before every round; no more are run once it is true."""
        index = {row.id: i for i, row in enumerate(rows)}
        while any(row.finish_reason is None for row in rows) and not until():
            for delta in self.step():
                if delta.row.id in index:
                    yield replace(delta, index=index[delta.row.id])

    def finish(self, rows: Sequence[Row]) -> None:
        """Run until requests that were added have ended. Raises PacelineError if one of them failed."""
        for delta in self.follow(rows):
            if delta.row.error:
                raise PacelineError(delta.row.error)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        progress: Callable[[Delta], None] | None = None,
    ) -> list[Completion]:
        """Answer `prompts`; completions in their order. `progress` is called with every delta.

        A request that failed has finish_reason "error" and says why in `error`; the others are unharmed."""
        rows: dict[int, Row] = {}
        with closing(self.stream(prompts, params)) as deltas:
            for delta in deltas:
                rows[delta.index] = delta.row
                if progress is not None:
                    progress(delta)
        return [Completion.of(i, rows[i]) for i in range(len(prompts))]

    def rollout(self, prompts: Sequence[Prompt], store: RolloutStore, **options: Any) -> Rollouts:
        """Answer prompts of reinforcement learning, reusing their last answers. options: of `rollout.run.rollout`."""
        from paceline.rollout.run import rollout

        return rollout(self, prompts, store, **options)  # type: ignore[arg-type]
