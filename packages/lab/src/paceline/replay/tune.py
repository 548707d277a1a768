"""Tune our own engine: measure the cost of rounds and drafters on this machine with this model.

    tuning = Tuning(target, tokenizer, ["sam", "suffix"], batches=[1, 8])
    answers = tuning.answers(prompts, 64)      # or those of a log
    table = tuning.measure(answers)            # for `auto:...,table=FILE`

The engine answers the prompts at every batch size with `auto`, and its budget learns the times of rounds, as it does in
use. A drafter's own time and the acceptance of its drafts are those of `paceline replay` on the answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np

from paceline.core.sampling import SamplingParams
from paceline.draft.cost import DraftTimes, Prices, Table
from paceline.draft.recording import Recording
from paceline.draft.spec import exchanged
from paceline.engine.budget import Budget
from paceline.engine.engine import Engine
from paceline.engine.prompt import Prompt
from paceline.formats.tokenizer import Tokenizer
from paceline.logs.transcript import RecordedAnswer
from paceline.replay.walk import ReplayTally, replay, replayable
from paceline.target.base import Target

FEWEST_ROUNDS = 32  # Least number of rounds at a batch size, prompts included.
ANSWER = SamplingParams(max_tokens=96, ignore_eos=True)
SHOWN = (1, 2, 4, 8, 16, 32)  # A table shows the time of a round for these numbers of nodes in every row.


@dataclass(frozen=True)
class Tuning:
    """What to measure.

    drafts   drafters to compare; batches: numbers of rows; seconds: time for rounds at each batch size.
    step     called after every batch size and every drafter; stopped: returns whether to end early."""

    target: Target
    tokenizer: Tokenizer
    drafts: Sequence[str]
    batches: Sequence[int]
    seconds: float = 2.0
    step: Callable[[], None] = lambda: None
    stopped: Callable[[], bool] = lambda: False

    def answers(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RecordedAnswer]:
        """Let the model answer greedily, if there is no log."""
        engine = Engine(self.target, "none", max_batch=8, tokenizer=self.tokenizer)
        rows = [engine.add(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts]
        for _ in engine.follow(rows, until=self.stopped):
            pass
        return [RecordedAnswer(row.tokens[: row.prompt_length], row.new_tokens) for row in rows if row.finish_reason]

    def measure(self, answers: Sequence[RecordedAnswer]) -> dict[str, Any] | None:
        """Make the table for `auto`; None if it was stopped."""
        prices, contexts = Prices(fade=1.0), list[int]()
        for batch in self.batches:
            contexts += self._time(prices, batch, answers)
            prices.fit()
            self.step()
        drafting: dict[str, DraftTimes] = {}
        acceptance: dict[str, list[float]] = {}
        for spec in self.drafts:
            if self.stopped():
                return None
            drafting[spec], acceptance[spec] = self._replayed(spec, answers)
            self.step()
        if self.stopped():
            return None
        target = self.target
        return {
            "model": {"name": target.name, "fingerprint": target.weights_fingerprint, "dtype": str(target.dtype)},
            **Table(prices, drafting, acceptance).to_json(),
            "round_ms": _shown(prices, self.batches, context := round(float(np.mean(contexts or [0])))),
            "context": context,
        }

    def _time(self, prices: Prices, batch: int, answers: Sequence[RecordedAnswer]) -> list[int]:
        """Answer real prompts in full batches, and let the engine's budget note its rounds in `prices`. Returns the
        lengths of the rows."""
        engine = Engine(self.target, self.spec, max_batch=batch, tokenizer=self.tokenizer)
        engine.budget = Budget(Table(prices, {}))
        waiting, lengths, began = cycle(answers), list[int](), perf_counter()
        while not self.stopped() and (engine.rounds < FEWEST_ROUNDS or perf_counter() - began < self.seconds):
            while len(engine.rows) + len(engine.waiting) < batch:
                engine.add(next(waiting).prompt.tolist(), ANSWER)
            engine.step()
            lengths += map(len, engine.rows)
        for row in [*engine.rows, *engine.waiting]:
            engine.abort(row)
        return lengths

    @property
    def spec(self) -> str:
        """`auto` over the drafters."""
        return f"auto:{'|'.join(exchanged(spec, ',', ';') for spec in self.drafts)}"

    @property
    def recording(self) -> Recording:
        """The target's facts for replayed drafters. It cannot run."""
        return Recording.elsewhere(self.target, tokenizer=self.tokenizer)

    def check(self) -> None:
        """Raise MethodError if a drafter does not exist or cannot be replayed."""
        for spec in self.drafts:
            replayable(spec, self.recording)

    def _replayed(self, spec: str, answers: Sequence[RecordedAnswer]) -> tuple[DraftTimes, list[float]]:
        """Replay a drafter. Returns its time for a row, and the share of its drafts that survives each depth."""
        drafter, tally = replayable(spec, self.recording), ReplayTally()
        replay(replayable(spec, self.recording), answers[0], 0, ReplayTally())  # Compiles, untimed.
        for i, answer in enumerate(answers):
            if not self.stopped():
                replay(drafter, answer, i, tally)
        shares: list[float] = []
        above = 1.0
        for share in tally.accepted_by_depth():
            shares.append(round(min(share / above, 1.0), 4) if above > 0 else 0.0)
            above = share
        return DraftTimes(0.0, 1e-6 * tally.draft_us_per_round), shares


def _shown(prices: Prices, batches: Sequence[int], context: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a round by rows and by nodes of each row, for people; no program reads them."""
    return {
        f"{rows} rows" if rows > 1 else "1 row": {
            f"{nodes} nodes each" if nodes > 1 else "plain": round(
                1e3 * prices.seconds(rows, rows * (nodes - 1), rows * context), 3
            )
            for nodes in SHOWN
        }
        for rows in batches
    }
