"""The published schedules EQSPEC and EXSPEC (Zhang et al. 2025, arXiv 2510.22876), for comparison with `Ragged`.

They run on a transformers target whose rows lie in rectangles (`target/rectangles.py`)."""

from collections import deque
from collections.abc import Sequence

from paceline.core.request import Row
from paceline.engine.scheduler import Ragged, Schedule, Turn, take
from paceline.errors import PacelineError, meant
from paceline.target.base import Target
from paceline.target.rectangles import rectangular


class Equal:
    """EQSPEC: batches of at most `max_batch` rows; a batch begins when the last row of the one before has ended.

    prefill_chunk  most tokens of each row's prompt in one round. Drafting begins when all prompts are done."""

    is_rectangular = True

    def __init__(self, max_batch: int, prefill_chunk: int):
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Let a whole batch join, in order of arrival, when no row runs."""
        return [] if running else take(waiting, self.max_batch)

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """Select pieces of the prompts until they are done, then every row."""
        return _prompts(running, self.max_batch, self.prefill_chunk) or [Turn(row, 0) for row in running]


class Grouped(Equal):
    """EXSPEC: a window of requests, of which `max_batch` run in a round.

    window         most requests in the window: more than `max_batch`, so that there is a choice.
    prefill_chunk  most tokens of each row's prompt in one round.

    A request whose length no other has waits long: it runs only among the window's first, while no group is full."""

    def __init__(self, max_batch: int, prefill_chunk: int, window: int):
        super().__init__(max_batch, prefill_chunk)
        self.window = window

    def admit(self, waiting: deque[Row], running: Sequence[Row]) -> list[Row]:
        """Let as many join as fit into the window, in order of arrival."""
        return take(waiting, self.window - len(running))

    def select(self, running: Sequence[Row]) -> list[Turn]:
        """Select pieces of new prompts, `max_batch` at a time; else the window's first full group, or its first
        rows."""
        prompts = _prompts(running, self.max_batch, self.prefill_chunk)
        return prompts or [Turn(row, 0) for row in self._group(running) or running[: self.max_batch]]

    def _group(self, running: Sequence[Row]) -> list[Row]:
        """The first `max_batch` rows of one length; none if no length has so many rows."""
        by_length: dict[int, list[Row]] = {}
        for row in running:
            group = by_length.setdefault(len(row), [])
            group.append(row)
            if len(group) == self.max_batch:
                return group
        return []


def _prompts(running: Sequence[Row], most: int, chunk: int) -> list[Turn]:
    """Pieces of the first `most` unfinished prompts."""
    fresh = [row for row in running if not row.is_decoding]
    return [Turn(row, min(chunk, len(row.pending))) for row in fresh[:most]]


NAMES = ("ragged", "equal", "grouped")
WINDOW = 32  # default window of `grouped`, as in the published program; at least twice the batch


def create_schedule(spec: str | Schedule, max_batch: int, prefill_chunk: int) -> Schedule:
    """Parse a schedule's name. A Schedule is returned as it is. PacelineError for a wrong name."""
    if not isinstance(spec, str):
        return spec
    name, window = check_schedule(spec)
    if name == "grouped":
        if window is not None and window <= max_batch:
            raise PacelineError(f"schedule {spec!r}: a window is larger than the batch, which is {max_batch}")
        return Grouped(max_batch, prefill_chunk, window or max(WINDOW, 2 * max_batch))
    return Equal(max_batch, prefill_chunk) if name == "equal" else Ragged(max_batch, prefill_chunk)


def check_schedule(spec: str) -> tuple[str, int | None]:
    """Parse `spec` into name and window. PacelineError if it is wrong."""
    name, colon, window = spec.partition(":")
    if name not in NAMES:
        raise PacelineError(f"there is no schedule {name!r}; there are {', '.join(NAMES)}.{meant(name, NAMES)}")
    if not colon:
        return name, None
    if name != "grouped" or not window.isdecimal() or int(window) < 1:
        raise PacelineError(f"schedule {spec!r}: only grouped takes a number, its window, as in grouped:48")
    return name, int(window)


def fitted(target: Target, schedule: Schedule) -> Target:
    """Give `target` the cache that the schedule needs. ModelError as `rectangular`."""
    return rectangular(target) if getattr(schedule, "is_rectangular", False) else target
