"""Progress: callbacks that hear how far long work is, and may stop it."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True)
class Progress:
    """Callbacks of long work.

    say      (words): what begins now; note: (line): a line to keep on the screen.
    step     (done, total) of the work said last, or (done, total, other words for it).
    limit    (seconds): from now on all of it takes so long.
    stopped  returns whether to stop."""

    say: Callable[[str], None] = lambda text: None
    step: Callable[..., None] = lambda done, total, what=None: None
    note: Callable[[str], None] = lambda text: None
    limit: Callable[[float], None] = lambda seconds: None
    stopped: Callable[[], bool] = lambda: False

    def over(self, until: float) -> bool:
        """Whether the work must end: it is stopped, or `until` (perf_counter) is past."""
        return self.stopped() or perf_counter() > until
