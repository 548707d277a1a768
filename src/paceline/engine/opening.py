"""Opening a model and a schedule by name. Only an engine that is given names needs this, and what it imports."""

from __future__ import annotations

from pathlib import Path

from paceline.engine.rectangles import create_schedule, fitted, is_rectangular
from paceline.engine.scheduler import Schedule
from paceline.target.base import Target
from paceline.target.load import load, load_tokenizer
from paceline.target.tokenizer import Tokenizer


def opened(
    model: str | Path | Target,
    schedule: str | Schedule | None,
    max_batch: int,
    prefill_chunk: int,
    *,
    dtype: str,
    device: str,
    exact: bool | None,
    tokenizer: Tokenizer | None,
) -> tuple[Target, Schedule]:
    """The target, as the schedule needs it and with its tokenizer, and the schedule. Raises PacelineError, one line,
    for what cannot be found, read or used."""
    chosen = create_schedule(schedule, max_batch, prefill_chunk)
    if isinstance(model, Target):
        target = fitted(model, chosen)
        if exact:
            target.make_exact()
        return target, chosen
    native = False if is_rectangular(chosen) else None
    target = fitted(load(model, dtype=dtype, device=device, native=native, exact=exact), chosen)
    target.tokenizer = tokenizer or target.tokenizer or load_tokenizer(model)  # which says what is missing
    return target, chosen
