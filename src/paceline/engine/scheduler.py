"""Schedule: which requests join the batch, and which rows run in a round."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from paceline.core.request import Row


class Turn(NamedTuple):
    """A row that runs in this round.

    chunk  number of prompt tokens that it runs; 0: it is decoding."""

    row: Row
    chunk: int


class Schedule(Protocol):
    """Called by the engine before every round: first `admit`, then `select`."""

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Remove from `waiting` the requests that join now. The engine puts back those that do not fit into memory."""

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """Select at least one of the rows of `running`, which has no rows that wait for another row's keys and
        values."""


def take(waiting: deque[Row], most: int) -> list[Row]:
    """Remove up to `most` requests from the front of `waiting`."""
    return [waiting.popleft() for _ in range(min(most, len(waiting)))]


FADE = 0.8  # weight of earlier rounds at every new one
LEAST = 32  # prompt tokens that run beside decoding rows in any case: fewer take hardly less time


class Pace:
    """How many prompt tokens may run beside decoding rows, learnt from the times of rounds. A round is expected to take
    what the latest rounds without prompt tokens took, plus a price for each prompt token. This is Sarathi-Serve's token
    budget (Agrawal et al. 2024, arXiv 2403.02310, section 4.3), but measured while it is used.

    max_slowdown  longest time of such a round, in rounds without prompt tokens; None: there is no bound."""

    def __init__(self, max_slowdown: float | None = None):
        self.max_slowdown = max_slowdown
        self._without, self._with = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]  # rounds, seconds, prompt tokens

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from a round with `tokens` prompt tokens."""
        sums = self._with if tokens else self._without
        sums[:] = [FADE * before + new for before, new in zip(sums, (1, seconds, tokens), strict=True)]

    def chunk(self, most: int) -> int:
        """The number of prompt tokens of the next round beside decoding rows, at most `most`."""
        rounds, seconds, tokens = self._with
        if self.max_slowdown is None or not self._without[0] or not tokens:
            return most
        usual = self._without[1] / self._without[0]
        price, extra = max(seconds - rounds * usual, 0.0) / tokens, (self.max_slowdown - 1) * usual
        return most if most * price <= extra else min(most, max(int(extra / price), LEAST))


class Ragged:
    """Rows of any length in one forward. Every row that is decoding runs in every round. Prompts run in
    pieces in the same rounds, so that a long one holds up neither these rows nor a short prompt.

    max_batch      most rows at once.
    prefill_chunk  most prompt tokens in one round. Half of them are the oldest prompt's, the rest goes to the prompts
                   with the fewest tokens left. So a prompt of k tokens takes about 2 k / prefill_chunk rounds if it is
                   the oldest or the shortest.
    pace           `Pace` that bounds prompt tokens further while rows are decoding.
    most_of_one    most rows of one client; None: there is no limit.

    Requests of one client join in the order they came. Of several clients the one with the fewest rows is next; among
    equals, the one whose last turn is longest ago."""

    def __init__(
        self, max_batch: int, prefill_chunk: int, pace: Pace | None = None, most_of_one: int | None = None
    ):  # fmt: skip
        self.max_batch, self.prefill_chunk, self._pace = max_batch, prefill_chunk, pace or Pace()
        self._most_of_one = most_of_one or max_batch
        self._joining: list[Row] = []
        self._turns: dict[str, float] = {}  # by client: when a row of it joined

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Let as many join as fit into the batch, first those that have been preempted."""
        self._turns |= {row.client: row.joined for row in self._joining if row.joined}  # the others were put back
        self._joining, held = [], Counter(row.client for row in running)
        while len(running) + len(self._joining) < self.max_batch and (row := self._next(waiting, held)) is not None:
            waiting.remove(row)
            held[row.client] += 1
            self._joining.append(row)
        return [*self._joining]

    def _next(self, waiting: deque[Row], held: Counter[str]) -> Row | None:
        turns: dict[str, Row] = {}
        for row in waiting:
            if row.preempted:
                return row
            if held[row.client] < self._most_of_one:
                turns.setdefault(row.client, row)
        return min(turns.values(), key=lambda row: (held[row.client], self._turns.get(row.client, 0.0)), default=None)

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """Select all rows that are decoding, and pieces of prompts up to the chunk."""
        prompts = {row.id: row for row in running if not row.is_decoding}
        alone, most = len(prompts) == len(running), self.prefill_chunk
        chunks = self._chunks(list(prompts.values()), most if alone else self._pace.chunk(most))
        return [Turn(row, chunks.get(row.id, 0)) for row in running if row.id in chunks or row.id not in prompts]

    def _chunks(self, prompts: Sequence[Row], left: int) -> dict[int, int]:
        """Number of tokens that each prompt runs, `left` together, by row id."""
        if not prompts:
            return {}
        oldest = min(prompts, key=lambda row: row.id)
        chunks = {oldest.id: min(-(-left // 2), len(oldest.pending))}
        left -= chunks[oldest.id]
        for row in sorted(prompts, key=lambda row: len(row.pending)):
            more = min(left, len(row.pending) - chunks.get(row.id, 0))
            if more:
                chunks[row.id] = chunks.get(row.id, 0) + more
                left -= more
        return chunks
