"""The calibrations of a run: when each is made, and where it is kept.

A machine's memory may be fast for some minutes and slow for the next, while what it computes takes as long as before.
So our engine and the peers are calibrated in sweeps, the first ones before the run and the others all through it, and
what they found together is what the run is predicted with. Every sweep is written down: a run that was stopped goes on
with what it has.

    calibrations = Calibrations(folder, engine)
    calibrations.before(contestants, say)
    calibrations.during(0.25)                    # a quarter of the questions is answered
    calibrations.after(answers)
    predict_run(answers, calibrations.found)

What a peer's sweeps found counts as it is in their own run. Another run that takes it over may find the machine faster
or slower: so it is kept at the pace of BESIDE, by what plain decoding took in their run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from paceline.bench.calibrate_peer import PeerCalibrator, PeerSweep
from paceline.bench.contestant import Contestant
from paceline.bench.folder import CALIBRATION, SWEEPS, RunFolder
from paceline.bench.metrics import BASELINE
from paceline.bench.record import Answer
from paceline.cost.calibrate import Calibrator, Sweep, calibrate_transformers
from paceline.cost.calibration import Calibration
from paceline.cost.predict import BESIDE, pace
from paceline.engine import Engine
from paceline.errors import PacelineError


class Effort(NamedTuple):
    """Sweeps before the run, the first a warm-up, and all through it; those of every peer, and tokens of its answers.
    """

    before: int
    during: int
    peers_before: int
    peers_during: int
    tokens: int


USUAL, OF_LARGE, LARGE = Effort(6, 18, 4, 8, 32), Effort(3, 6, 2, 4, 12), 1 << 28
"""A model of LARGE bytes or more has rounds that are long and steady: it gets fewer sweeps, and shorter answers."""


class Calibrations:
    """found: by name, as `predict_run` wants them: "paceline", peers by their names; in a batch, in which peers do not
    draft, "transformers" for all that run on it; and under BESIDE our engine at the pace that the peers' are at."""

    def __init__(self, folder: RunFolder, engine: Engine, known: Mapping[str, Any] | None = None):
        """known: what another run of this model on this machine calibrated; its peers' are taken as they are."""
        self._folder, self._engine = folder, engine
        self._effort = USUAL if engine.target.weight_bytes < LARGE else OF_LARGE
        self._calibrator = Calibrator(engine, batch=engine.max_batch)
        self._peers: dict[str, PeerCalibrator] = {}
        self._busy: dict[str, PeerCalibrator] = {}  # those that more sweeps may be asked of
        try:
            told = folder.read(SWEEPS) or {}
            self._calibrator.sweeps = [
                Sweep(**{k: _tuple(v) for k, v in sweep.items()}) for sweep in told.get("sweeps", [])
            ]
            self._kept = {
                name: [PeerSweep(**sweep) for sweep in sweeps] for name, sweeps in told.get("peers", {}).items()
            }
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
        idle: Collection[str] = (),
    ) -> None:
        """What is to be known before the run begins.

        contestants  all that take part; idle: names of those that are not open.
        stopped      asked before every sweep, since of a large model they take minutes together; what is then missing
                     is made when the run goes on."""
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
            return
        self._peers = self._calibrators(contestants)
        self._busy = {name: peer for name, peer in self._peers.items() if name not in idle}
        for name, peer in list(self._busy.items()):
            if len(peer.sweeps) < self._effort.peers_before:
                say(f"calibrating the cost model of {name}")
            while name in self._busy and len(peer.sweeps) < self._effort.peers_before:
                if stopped():
                    return
                self._sweep_of(name)

    def during(self, share: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """The sweeps that are due when this share of the run is done: one of ours, and of the peers in turn."""
        if len(self._calibrator.sweeps) < self._effort.before + round(share * self._effort.during):
            self._sweep()
        due = self._effort.peers_before + share * self._effort.peers_during
        while self._busy and not stopped():
            name = min(self._busy, key=lambda name: len(self._busy[name].sweeps))
            if sum(len(peer.sweeps) for peer in self._busy.values()) >= round(due * len(self._busy)):
                return
            self._sweep_of(name)

    def after(self, answers: Iterable[Answer]) -> None:
        """What the sweeps of the peers say, now that plain decoding has answered. Calibrated and asked at the same
        times, a peer met the same machine in its sweeps as in its answers, and plain decoding in its own."""
        plain = [a for a in answers if a.method == BASELINE and a.failed is None]
        turns = [[turn] for answer in plain for turn in answer.turns]
        for name, peer in self._peers.items():
            if len(peer.sweeps) >= self._effort.peers_before:
                self._keep(name, peer.result().at_pace(1 / (pace(turns, self.found[BESIDE]) or 1.0)))

    def _sweep(self) -> None:
        self._calibrator.sweep()
        self._write()
        self._keep("paceline", self._calibrator.result())

    def _sweep_of(self, name: str) -> None:
        """One more of a peer; none any more of one that does not tell its rounds, or does not answer."""
        peer = self._busy[name]
        try:
            told = peer.sweep()
        except PacelineError:  # what is wrong with it will be said when it does not answer a question
            told = False
        if not told:
            del self._busy[name]
            return
        self._kept[name] = peer.sweeps
        self._write()
        if len(peer.sweeps) >= self._effort.peers_before:
            self._keep(name, peer.result())  # at what pace is known when plain decoding has answered

    def _write(self) -> None:
        ours = [asdict(sweep) for sweep in self._calibrator.sweeps]
        peers = {name: [asdict(sweep) for sweep in sweeps] for name, sweeps in self._kept.items()}
        self._folder.write(SWEEPS, {"sweeps": ours, "peers": peers})

    def _keep(self, name: str, one: Calibration) -> None:
        self.found[name] = one
        self._folder.write(CALIBRATION, {name: json.loads(one.to_json()) for name, one in self.found.items()})

    def _transformers(self, contestants: Sequence[Contestant], say: Callable[[str], None]) -> None:
        model = next((m for c in contestants if (m := getattr(c, "model", None)) is not None), None)
        if model is not None and "transformers" not in self.found:
            say("calibrating the cost model of transformers")
            batch = self._engine.max_batch
            rounds = self._effort.peers_before + self._effort.peers_during
            self._keep("transformers", calibrate_transformers(model, rounds=rounds, batch=batch))

    def _calibrators(self, contestants: Sequence[Contestant]) -> dict[str, PeerCalibrator]:
        """Of all peers but those whose calibration was taken from elsewhere, with the sweeps there are."""
        target, found = self._engine.target, {}
        for peer in contestants:
            if peer.name.startswith("peer:") and (peer.name in self._kept or peer.name not in self.found):
                one = PeerCalibrator(peer, target.vocab_size, target.max_context, tokens=self._effort.tokens)
                one.sweeps = self._kept.get(peer.name, [])
                found[peer.name] = one
        return found


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
