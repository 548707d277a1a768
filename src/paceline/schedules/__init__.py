"""Schedules by name, and the target each one runs on. The engine knows no schedule's name.

ragged        ours: a row has a length of its own, and nothing is ever realigned.
equal         EQSPEC: rows begin together and are realigned after every round.
grouped[:W]   EXSPEC: rows of equal length are looked for in a window of W requests.
"""

from __future__ import annotations

from paceline.errors import PacelineError, meant
from paceline.schedule import Ragged, Schedule
from paceline.schedules.published import Equal, Grouped
from paceline.schedules.target import rectangular
from paceline.target.base import Target

NAMES = ("ragged", "equal", "grouped")
WINDOW = 32
"""Requests that `grouped` chooses from, as the published program does; at least twice the batch."""


def create_schedule(spec: str | Schedule | None, max_batch: int, prefill_chunk: int) -> Schedule:
    """The schedule of that name; `ragged` for None, and a schedule is itself. PacelineError for a wrong name."""
    if spec is None:
        return Ragged(max_batch, prefill_chunk)
    if not isinstance(spec, str):
        return spec
    name, window = check_schedule(spec)
    if name == "grouped":
        if window is not None and window <= max_batch:
            raise PacelineError(f"schedule {spec!r}: a window is larger than the batch, which is {max_batch}")
        return Grouped(max_batch, prefill_chunk, window or max(WINDOW, 2 * max_batch))
    return Equal(max_batch, prefill_chunk) if name == "equal" else Ragged(max_batch, prefill_chunk)


def check_schedule(spec: str) -> tuple[str, int | None]:
    """Name and window of `spec`; PacelineError, one line, if it is wrong."""
    name, colon, window = spec.partition(":")
    if name not in NAMES:
        raise PacelineError(f"there is no schedule {name!r}; there are {', '.join(NAMES)}.{meant(name, NAMES)}")
    if not colon:
        return name, None
    if name != "grouped" or not window.isdecimal() or int(window) < 1:
        raise PacelineError(f"schedule {spec!r}: only grouped takes a number, its window, as in grouped:48")
    return name, int(window)


def is_rectangular(schedule: str | Schedule | None) -> bool:
    """Whether a schedule runs on a transformers target with a rectangular cache."""
    if isinstance(schedule, str):
        return check_schedule(schedule)[0] != "ragged"
    return isinstance(schedule, (Equal, Grouped))


def fitted(target: Target, schedule: Schedule) -> Target:
    """`target` as the schedule needs it; ModelError if it cannot be had so."""
    return rectangular(target) if is_rectangular(schedule) else target
