"""The calibration of a run: sweeps before it and all through it, kept in the run's folder.

A machine's memory may be fast for some minutes and slow for the next, while computing takes as long as before. So our
engine is calibrated in sweeps, and all of them together predict the run. Every sweep is written at once: a run that was
stopped continues with those it has.

    sweeps = Sweeps(folder, engine)
    sweeps.before(say)
    sweeps.during(0.25)                          # a quarter of the questions is answered
    predict_run(answers, sweeps.calibration)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.cost.calibrate import Calibrator, Sweep
from paceline.cost.calibration import Calibration
from paceline.engine import Engine
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.bench.folder import RunFolder

CALIBRATION, SWEEPS = "calibration.json", "sweeps.json"
"""Files of a run's folder. Those of older versions hold calibrations of peers too; these are left alone."""


class Effort(NamedTuple):
    """Sweeps before the run, the first a warm-up, and during it."""

    before: int
    during: int


USUAL, OF_LARGE = Effort(6, 18), Effort(3, 6)
LARGE = 1 << 28
"""Bytes of weights from which a model's rounds are long and steady, so that it needs fewer sweeps."""


class Sweeps:
    """Makes the sweeps of one run; continues with those in its folder."""

    def __init__(self, folder: RunFolder, engine: Engine):
        self._folder = folder
        self._effort = USUAL if engine.target.weight_bytes < LARGE else OF_LARGE
        self._calibrator = Calibrator(engine, batch=engine.max_batch)
        self._file = folder.read(SWEEPS) or {}
        try:
            self._calibrator.sweeps = [_sweep(kept) for kept in self._file.get("sweeps", [])]
        except (TypeError, AttributeError) as error:
            raise PacelineError(f"{folder.path / SWEEPS} holds no sweeps ({error}); delete it") from None

    @property
    def calibration(self) -> Calibration | None:
        """What all sweeps say together; None without any."""
        return self._calibrator.result() if self._calibrator.sweeps else None

    def before(self, say: Callable[[str], None], stopped: Callable[[], bool] = lambda: False) -> None:
        """The sweeps before the run.

        stopped  asked before each, since those of a large model take minutes; missing ones are made when the run
                 continues."""
        if len(self._calibrator.sweeps) < self._effort.before:
            say("calibrating the cost model")
        while len(self._calibrator.sweeps) < self._effort.before and not stopped():
            self._add()

    def during(self, share: float) -> None:
        """A sweep, if one is due when this share of the run is done."""
        if len(self._calibrator.sweeps) < self._effort.before + round(share * self._effort.during):
            self._add()

    def _add(self) -> None:
        self._calibrator.sweep()
        sweeps = [asdict(sweep) for sweep in self._calibrator.sweeps]
        self._folder.write(SWEEPS, self._file | {"sweeps": sweeps})
        calibrations = self._folder.read(CALIBRATION) or {}
        self._folder.write(CALIBRATION, calibrations | {"paceline": asdict(self._calibrator.result())})


def _sweep(kept: dict[str, Any]) -> Sweep:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()}
    return Sweep(**values)
