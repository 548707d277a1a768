"""When a request is tried again, and how long it waits: bounded tries, jittered exponential back-off, Retry-After.

408, 409, 425, 429, 5xx, timeouts, connections that break and streams that are torn pass; any other 4xx is the
request's own fault and is not tried again. A 429 keeps its host out of the rotation until the wait is over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type
from tenacity.wait import wait_random_exponential

from paceline.evals.align.backends.base import BackendError

T = TypeVar("T")
PASSING = frozenset({408, 409, 425, 429})
SHORT_TRIES = 3
"""Attempts at an answer that ended before its budget: a server may also do that at the end of its context."""


class Passing(Exception):
    """A failure that may pass. after: seconds the server asked to wait."""

    def __init__(self, why: str, after: float | None = None):
        super().__init__(why)
        self.after = after


class CutShort(Passing):
    """An answer that was cut off although its budget was not spent; `partial` is taken if it stays so."""

    def __init__(self, partial: object):
        super().__init__("the answer was cut off before its budget was spent")
        self.partial = partial


def passes(status: int) -> bool:
    """Whether an HTTP status is worth another try."""
    return status in PASSING or status >= 500


@dataclass(frozen=True)
class Retry:
    """tries: attempts at most. base, longest: seconds of the back-off's first and longest waits."""

    tries: int = 8
    base: float = 0.5
    longest: float = 30.0

    async def run(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """attempt(number), from 1, until it works. BackendError when it does not."""
        backoff = wait_random_exponential(multiplier=self.base, max=self.longest)

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.after if isinstance(error, Passing) else None
            return backoff(state) + min(asked or 0.0, self.longest)

        def stop(state: RetryCallState) -> bool:
            short = state.outcome is not None and isinstance(state.outcome.exception(), CutShort)
            return state.attempt_number >= (min(SHORT_TRIES, self.tries) if short else self.tries)

        retrying = AsyncRetrying(stop=stop, wait=wait, retry=retry_if_exception_type(Passing), reraise=True)
        number = 0
        try:
            async for one in retrying:
                with one:
                    number += 1
                    return await attempt(number)
        except CutShort as error:
            return error.partial  # type: ignore[return-value]
        except Passing as error:
            raise BackendError(f"{error}; given up after {number} tries") from None
        raise AssertionError("tenacity leaves its loop by a result or an exception")
