"""The calibrations of a run: when each is made, and where it is kept.

A machine's memory may be fast for some minutes and slow for the next, while what it computes takes as long as before.
So our engine is calibrated in sweeps, the first ones before the run and the others all through it, and their mean is
what the run is predicted with. Peers are calibrated before the run, at the pace of ours at that time. Everything is
written down as soon as it is known: a run that was stopped goes on with what it has.

    calibrations = Calibrations(folder, engine)
    calibrations.before(contestants, say)
    calibrations.during(0.25)                    # a quarter of the questions is answered
    predict_run(answers, calibrations.found)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from paceline.bench.calibrate import Calibrator, Sweep, calibrate_transformers
from paceline.bench.calibrate_peer import calibrate_beside
from paceline.bench.calibration import Calibration
from paceline.bench.contestant import Contestant
from paceline.bench.folder import CALIBRATION, SWEEPS, RunFolder
from paceline.bench.metrics import BASELINE
from paceline.bench.predict import BESIDE
from paceline.engine import Engine
from paceline.errors import PacelineError


class Effort(NamedTuple):
    """Sweeps before the run, the first a warm-up, and all through it; sweeps of a peer, and tokens of its answers."""

    before: int
    during: int
    peers: int
    tokens: int


USUAL, OF_LARGE, LARGE = Effort(6, 18, 10, 32), Effort(3, 6, 2, 12), 1 << 28
"""A model of LARGE bytes or more has rounds that are long and steady: it gets fewer sweeps, and shorter answers."""


class Calibrations:
    """found: by name, as `predict_run` wants them: "paceline", peers by their names; in a batch, in which peers do not
    draft, "transformers" for all that run on it; and under BESIDE our engine when the peers were calibrated."""

    def __init__(self, folder: RunFolder, engine: Engine, known: Mapping[str, Any] | None = None):
        """known: what another run of this model on this machine calibrated; its peers' are taken."""
        self._folder, self._engine = folder, engine
        self._effort = USUAL if engine.target.weight_bytes < LARGE else OF_LARGE
        self._calibrator = Calibrator(engine, batch=engine.max_batch)
        try:
            told = (folder.read(SWEEPS) or {}).get("sweeps", [])
            self._calibrator.sweeps = [Sweep(**{k: _tuple(v) for k, v in sweep.items()}) for sweep in told]
        except (TypeError, AttributeError) as error:
            raise PacelineError(f"{folder.path / SWEEPS} holds no sweeps ({error}); delete it") from None
        taken = {name: one for name, one in (known or {}).items() if name != "paceline"}
        kept = folder.read(CALIBRATION) or {}
        self.found = {name: Calibration.from_json(json.dumps(one)) for name, one in {**taken, **kept}.items()}
        if self._calibrator.sweeps:
            self.found["paceline"] = self._calibrator.result()

    def before(
        self,
        contestants: Sequence[Contestant],
        say: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """What is to be known before the run begins. stopped: asked before every sweep and every peer, since of a large
        model they take minutes; what is then missing is made when the run goes on."""
        if len(self._calibrator.sweeps) < self._effort.before:
            say("calibrating the cost model")
        while len(self._calibrator.sweeps) < self._effort.before:
            if stopped():
                return
            self._sweep()
        if BESIDE not in self.found:
            self._keep(BESIDE, self.found["paceline"])
        if self._engine.max_batch > 1:
            self._transformers(contestants, say)
        else:
            self._peers(contestants, say, stopped)

    def during(self, share: float) -> None:
        """Another sweep if one is due when this share of the run is done."""
        if len(self._calibrator.sweeps) < self._effort.before + round(share * self._effort.during):
            self._sweep()

    def _sweep(self) -> None:
        self._calibrator.sweep()
        self._folder.write(SWEEPS, {"sweeps": [asdict(sweep) for sweep in self._calibrator.sweeps]})
        self._keep("paceline", self._calibrator.result())

    def _keep(self, name: str, one: Calibration) -> None:
        self.found[name] = one
        self._folder.write(CALIBRATION, {name: json.loads(one.to_json()) for name, one in self.found.items()})

    def _transformers(self, contestants: Sequence[Contestant], say: Callable[[str], None]) -> None:
        model = next((m for c in contestants if (m := getattr(c, "model", None)) is not None), None)
        if model is not None and "transformers" not in self.found:
            say("calibrating the cost model of transformers")
            batch = self._engine.max_batch
            self._keep("transformers", calibrate_transformers(model, rounds=self._effort.peers, batch=batch))

    def _peers(
        self, contestants: Sequence[Contestant], say: Callable[[str], None], stopped: Callable[[], bool]
    ) -> None:
        plain = next((contestant for contestant in contestants if contestant.name == BASELINE), None)
        for peer in contestants:
            if plain is None or not peer.name.startswith("peer:") or peer.name in self.found:
                continue
            if stopped():
                return
            say(f"calibrating the cost model of {peer.name}")
            with suppress(PacelineError):  # what is wrong with it will be said when it does not answer
                one = calibrate_beside(
                    plain,
                    self.found[BESIDE],
                    peer,
                    self._engine.target.vocab_size,
                    self._engine.target.max_context,
                    rounds=self._effort.peers,
                    tokens=self._effort.tokens,
                )
                if one is not None:
                    self._keep(peer.name, one)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
