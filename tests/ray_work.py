"""Work for a Ray cluster that kills the process that does it, once. A worker imports it from here."""

import os
import signal
from pathlib import Path

from paceline.errors import PacelineError
from paceline.replay.workers import Replayer


class Doubling:
    """Doubles, refuses 13, and is killed once by what it should double."""

    def __init__(self, folder):
        self.mark = Path(folder, "killed")

    def __call__(self, item):
        if item == 13:
            raise PacelineError("13 is not doubled")
        if item == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 2 * item


class Mortal(Replayer):
    """A replayer that is killed once, in the middle of the recording."""

    def __call__(self, shard):
        mark = Path(self.job.traces[0]).with_suffix(".killed")
        if shard.pieces[0].begin > 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(shard)
