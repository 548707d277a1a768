"""Failures: a row that fails ends with finish_reason "error", and the others go on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.engine.request import Delta, Row
from paceline.errors import PacelineError, RowError

log = logging.getLogger("paceline")


class Failures:
    """The rows of an engine that failed since `deltas` was last called.

        with failures.of(rows):
            ...                 # an error in here ends the row that it names, or, if it names none, all of `rows`
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def of(self, rows: Sequence[Row]) -> _Watch:
        """A context in which errors end rows instead of being raised."""
        return _Watch(self, rows)

    def end(self, row: Row, error: BaseException) -> None:
        """End a row with an error."""
        message = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        log.error("request %d ended with an error: %s", row.id, message)
        row.end("error", message)
        if row.finish_reason == "error":  # an answer that has just come to its end stands
            self.rows.append(row)

    def deltas(self) -> list[Delta]:
        """A last delta for every row that failed."""
        failed, self.rows = self.rows, []
        return [Delta.end(row) for row in failed]


class _Watch:
    """The context of `Failures.of`. A class, because it is entered several times a round, and a generator costs five
    times as much."""

    __slots__ = ("failures", "rows")

    def __init__(self, failures: Failures, rows: Sequence[Row]):
        self.failures, self.rows = failures, rows

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False  # such as Ctrl-C
        named = [row for row in self.rows if isinstance(error, RowError) and row.id == error.row_id]
        cause = (error.__cause__ if isinstance(error, RowError) else None) or error
        if not isinstance(cause, PacelineError):  # a bug, whose traceback is worth having
            log.error("a round failed", exc_info=cause)
        for row in named or self.rows:
            self.failures.end(row, cause)
        return True
