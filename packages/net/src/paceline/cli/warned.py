"""Print warnings of our loggers as lines on standard error."""

import logging
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from time import monotonic

from paceline.errors import printable


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # The reader may have left.
        print(text, file=sys.stderr, flush=True)


class Warned(logging.Handler):
    """Shows every warning once, and tracebacks of bugs inside a request; all else commands report themselves.

    write  where a line goes. seen: by kind when it was shown, how many were not since, and the last of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.write: Callable[[str], None] = _print
        self._seconds: float | None = None
        self.seen: dict[Hashable, tuple[float, int, str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        serves, error = self._seconds is not None, record.exc_info and record.exc_info[1]
        if record.levelno > logging.WARNING and not error and not serves:
            return
        kind = record.msg if serves else record.getMessage(), type(error), _place(error or None)
        shown, left_out, _ = self.seen.get(kind, (-inf, 0, ""))
        line = f"{record.levelname.lower()}: {printable(record.getMessage())}"
        if monotonic() - shown < (inf if self._seconds is None else self._seconds):
            self.seen[kind] = shown, left_out + 1, line
            return
        self.seen[kind] = monotonic(), 0, line
        line += _more(left_out)
        self.write(line if not error else f"{line}\n{logging.Formatter().formatException(record.exc_info)}")  # type: ignore[arg-type]

    @contextmanager
    def serving(self, write: Callable[[str], None], seconds: float = 60.0) -> Iterator[None]:
        """A context in which errors are shown too, and every kind of message once in so many seconds, by `write`."""
        before, self.write, self._seconds = self.write, write, seconds
        try:
            yield
        finally:
            self.write, self._seconds = before, None
            for _, left_out, line in self.seen.values():
                if left_out:
                    write(line + _more(left_out - 1))
            self.seen.clear()


def _more(left_out: int) -> str:
    return f" ({left_out} more like it)" if left_out else ""


def _place(error: BaseException | None) -> tuple[str, int] | None:
    """Where an error was raised."""
    trace = None if error is None else error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


class Said(logging.Handler):
    """Shows messages as they are."""

    def emit(self, record: logging.LogRecord) -> None:
        _print(record.getMessage())


WARNED, SAID = Warned(), Said()
