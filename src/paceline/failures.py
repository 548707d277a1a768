"""Failures: a row that fails ends with finish_reason "error", and the others go on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.completion import Delta
from paceline.errors import PacelineError, RowError
from paceline.row import Row

log = logging.getLogger("paceline")


class Failures:
    """The rows of an engine that failed since `deltas` was last called."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    @contextmanager
    def of(self, rows: Sequence[Row]) -> Iterator[None]:
        """What fails inside ends the row that the error names, or, if it names none, all of `rows`."""
        try:
            yield
        except Exception as error:
            named = [row for row in rows if isinstance(error, RowError) and row.id == error.row_id]
            cause = (error.__cause__ if isinstance(error, RowError) else None) or error
            if not isinstance(cause, PacelineError):  # a bug, whose traceback is worth having
                log.error("a round failed", exc_info=cause)
            for row in named or rows:
                self.end(row, cause)

    def end(self, row: Row, error: BaseException) -> None:
        """End a row with an error."""
        message = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        log.error("request %d ended with an error: %s", row.id, message)
        row.end("error", message)
        if row.finish_reason == "error":  # an answer that has just come to its end stands
            self._rows.append(row)

    def deltas(self) -> list[Delta]:
        """A last delta for every row that failed."""
        failed, self._rows = self._rows, []
        return [Delta.end(row) for row in failed]
