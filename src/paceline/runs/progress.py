"""Progress: who is told how far something long is, and may stop it."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True)
class Progress:
    """Callbacks of something long.

    say      what begins now, in words. note: a line that is to stay.
    step     (done, total) of what was said last, or (done, total, other words for it).
    limit    (seconds): from now on all of it takes so long.
    stopped  whether no more is wanted."""

    say: Callable[[str], None] = lambda text: None
    step: Callable[..., None] = lambda done, total, what=None: None
    note: Callable[[str], None] = lambda text: None
    limit: Callable[[float], None] = lambda seconds: None
    stopped: Callable[[], bool] = lambda: False

    def over(self, until: float) -> bool:
        """Whether to go on to what is next: it is stopped, or `until` (perf_counter) is over."""
        return self.stopped() or perf_counter() > until
