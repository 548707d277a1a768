"""Schedule: which requests join the batch, and which rows run in a round."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from paceline.core.request import Row
from paceline.core.rules import check_schedule
from paceline.target.base import Target


class Turn(NamedTuple):
    """A row that runs in this round.

    chunk  number of prompt tokens to run; 0: the row is decoding."""

    row: Row
    chunk: int


class Schedule(Protocol):
    """The engine calls first `admit`, then `select` before each round."""

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Remove from `waiting` the requests that join now. The engine puts back those that do not fit into memory."""

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """Select at least one row of `running`. Rows that wait for another row's keys and values are not in
        `running`."""


def take(waiting: deque[Row], most: int) -> list[Row]:
    """Remove up to `most` requests from the front of `waiting`."""
    return [waiting.popleft() for _ in range(min(most, len(waiting)))]


FADE = 0.8
"""Factor on the weight of earlier rounds for each new round."""
LEAST = 32
"""Prompt tokens that always run beside decoding rows, because fewer take hardly less time."""


class Pace:
    """Learns from the times of rounds how many prompt tokens may run beside decoding rows. A round is expected to take
    as long as the latest rounds without prompt tokens, plus a price for each prompt token. This is Sarathi-Serve's
    token budget (Agrawal et al. 2024, arXiv 2403.02310, section 4.3), but measured while it is used.

    max_slowdown  as in `EngineConfig`."""

    def __init__(self, max_slowdown: float | None = None):
        self.max_slowdown = max_slowdown
        self._without, self._with = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]  # sums of rounds, seconds and prompt tokens

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from a round with `tokens` prompt tokens."""
        sums = self._with if tokens else self._without
        sums[:] = [FADE * before + new for before, new in zip(sums, (1, seconds, tokens), strict=True)]

    def chunk(self, most: int) -> int:
        """How many prompt tokens may run beside decoding rows in the next round, at most `most`."""
        rounds, seconds, tokens = self._with
        if self.max_slowdown is None or not self._without[0] or not tokens:
            return most
        usual = self._without[1] / self._without[0]
        price, extra = max(seconds - rounds * usual, 0.0) / tokens, (self.max_slowdown - 1) * usual
        return most if most * price <= extra else min(most, max(int(extra / price), LEAST))


class Ragged:
    """Rows of any length in one forward. All decoding rows run in every round. Prompts run in pieces in the same
    rounds, so that a long prompt holds up neither decoding rows nor short prompts.

    max_batch      largest number of rows at once.
    prefill_chunk  largest number of prompt tokens in a round. Half of them go to the oldest prompt, the rest to the
                   prompts with the fewest tokens left. So a prompt of k tokens takes about 2 k / prefill_chunk rounds
                   if it is the oldest or the shortest.
    pace           bounds prompt tokens further while rows are decoding.
    most_of_one    largest number of rows of a client; None: there is no limit.

    A client's requests join in order of arrival. The client with the fewest rows is next; of equals, the client whose
    last turn was earliest."""

    def __init__(
        self, max_batch: int, prefill_chunk: int, pace: Pace | None = None, most_of_one: int | None = None
    ):  # fmt: skip
        self.max_batch, self.prefill_chunk, self._pace = max_batch, prefill_chunk, pace or Pace()
        self._most_of_one = most_of_one or max_batch
        self._joining: list[Row] = []
        self._turns: dict[str, float] = {}  # by client: when its last row joined

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Let as many requests join as fit into the batch, preempted rows first."""
        # Rows that did not join were put back.
        self._turns |= {row.client: row.joined for row in self._joining if row.joined}
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
        """Select all decoding rows, and pieces of prompts with `prefill_chunk` tokens together."""
        prompts = {row.id: row for row in running if not row.is_decoding}
        alone, most = len(prompts) == len(running), self.prefill_chunk
        chunks = self._chunks(list(prompts.values()), most if alone else self._pace.chunk(most))
        return [Turn(row, chunks.get(row.id, 0)) for row in running if row.id in chunks or row.id not in prompts]

    def _chunks(self, prompts: Sequence[Row], left: int) -> dict[int, int]:
        """Divide `left` tokens among prompts. Returns the number of tokens by row id."""
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


# The published schedules EQSPEC and EXSPEC (Zhang et al. 2025, arXiv 2510.22876), for comparison ----------------------


class Equal:
    """EQSPEC: batches of at most `max_batch` rows. A batch begins when the last row of the batch before has ended.

    prefill_chunk  largest number of tokens of each prompt in a round. Drafting begins when all prompts are done."""

    is_rectangular = True

    def __init__(self, max_batch: int, prefill_chunk: int):
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Let a whole batch join, in order of arrival, if no row runs."""
        return [] if running else take(waiting, self.max_batch)

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """Select pieces of the prompts until they are done, then all rows."""
        return _prompts(running, self.max_batch, self.prefill_chunk) or [Turn(row, 0) for row in running]


class Grouped(Equal):
    """EXSPEC: in each round `max_batch` rows of a window of requests run.

    window         largest number of requests in the window: more than `max_batch`, so that there is a choice.
    prefill_chunk  largest number of tokens of each prompt in a round.

    A request whose length no other has waits long: it runs only when no group is full and it is among the first."""

    def __init__(self, max_batch: int, prefill_chunk: int, window: int):
        super().__init__(max_batch, prefill_chunk)
        self.window = window

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Let as many requests join as fit into the window, in order of arrival."""
        return take(waiting, self.window - len(running))

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """Select pieces of up to `max_batch` new prompts; without new prompts, the window's first full group, or else
        its first rows."""
        prompts = _prompts(running, self.max_batch, self.prefill_chunk)
        return prompts or [Turn(row, 0) for row in self._group(running) or running[: self.max_batch]]

    def _group(self, running: Sequence[Row]) -> list[Row]:
        """The first `max_batch` rows of the same length; none if no length has so many rows."""
        by_length: dict[int, list[Row]] = {}
        for row in running:
            group = by_length.setdefault(len(row), [])
            group.append(row)
            if len(group) == self.max_batch:
                return group
        return []


def _prompts(running: Sequence[Row], most: int, chunk: int) -> list[Turn]:
    """Select pieces, up to `chunk` tokens each, of the first `most` unfinished prompts."""
    fresh = [row for row in running if not row.is_decoding]
    return [Turn(row, min(chunk, len(row.pending))) for row in fresh[:most]]


WINDOW = 32
"""Default window of `grouped`, as in the published program. It is at least twice the batch."""


def create_schedule(spec: str | Schedule, max_batch: int, prefill_chunk: int) -> Schedule:
    """Parse a schedule's name. A Schedule is returned as it is. PacelineError for a wrong name."""
    if not isinstance(spec, str):
        return spec
    name, window = check_schedule(spec, max_batch)
    if name == "grouped":
        return Grouped(max_batch, prefill_chunk, window or max(WINDOW, 2 * max_batch))
    return Equal(max_batch, prefill_chunk) if name == "equal" else Ragged(max_batch, prefill_chunk)



def fitted(target: Target, schedule: Schedule) -> Target:
    """Give `target` the cache that the schedule needs. The published schedules need a transformers target whose rows
    lie in rectangles. ModelError as in `rectangular`."""
    if not getattr(schedule, "is_rectangular", False):
        return target
    from paceline.target.rectangles import rectangular

    return rectangular(target)
