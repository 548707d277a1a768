"""Calibration: measures what a round costs on this machine. Knows no drafter, no suite, no answers.

    calibration = calibrate(Engine("models/demo"))
    calibration.round_ms(17)                     # a round that verifies 17 nodes, milliseconds

    calibrator = Calibrator(Engine("models/demo"))
    calibrator.sweep()                           # again and again, with other work between
    calibrator.result()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from time import perf_counter

import numpy as np

from paceline.cost.calibration import Calibration
from paceline.cost.model import Floats
from paceline.draft.base import Drafter
from paceline.engine import Engine
from paceline.errors import PacelineError
from paceline.row import Request, Row
from paceline.sampling import SamplingParams
from paceline.target.base import Facts, Target
from paceline.target.tokenizer import Tokenizer
from paceline.tree import DraftTree

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
"""Nodes of a row, the last committed token included."""

TREES = (8, 32, 96)
"""The sizes of which trees are measured as well as chains."""

ACCEPTED, PAIRS = 4, 4
"""Tokens accepted in a round that times what accepted tokens cost, and the number of such rounds in a sweep."""

LONG = 16
"""Largest number of nodes in the rounds that are measured on a long context too."""

DRIFT = 64
"""Tokens by which a row's context may grow, half of them before and half after the length that is measured; then the
row begins anew."""

LEAST_CONTEXT = 64
"""Tokens that a model's context must hold."""

WARM_ROUNDS, SETTLE_SECONDS, MOST_ROUNDS = 2, 0.06, 24
"""Before timing, rounds of the same size run: at least WARM_ROUNDS, for SETTLE_SECONDS, at most MOST_ROUNDS. In a run,
rounds are nearly of one size, and after rounds of another size a processor needs some 20 rounds of a few milliseconds
to settle."""

TIMED_ROUNDS = 3
"""Rounds of the same size that are then timed; their mean counts."""

WAKE_SECONDS = 0.2
"""Untimed rounds before a sweep, because something else may have run before."""

SPIKE = 2.0
"""Times are clipped at SPIKE x the median: above it another process ran."""


@dataclass(frozen=True)
class _Case:
    """A round to measure: nodes of every row."""

    nodes: int
    tree: bool = False


class _Guess(Drafter):
    """Proposes drafts of the wanted size: random tokens, or the `right` ones (the rows' answers, in order)."""

    name = "calibration"

    def __init__(self) -> None:
        self.case = _Case(1)
        self.right: list[list[int]] | None = None
        self._random = np.random.default_rng(0)

    def bind(self, target: Facts) -> None:
        self._vocab_size = target.vocab_size

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        if self.right is None:
            return [self._guess(row.last_token) for row in rows]
        count, trees = self.case.nodes - 1, []
        for row, right in zip(rows, self.right, strict=True):
            new = len(row) - row.prompt_length
            trees.append(DraftTree.chain(row.last_token, right[new : new + count]))
        return trees

    def _guess(self, root: int) -> DraftTree:
        tokens = self.tokens(self.case.nodes - 1)
        if self.case.tree:
            return DraftTree.of(root, tokens, [i // 2 for i in range(len(tokens))])
        return DraftTree.chain(root, tokens)

    def tokens(self, count: int) -> list[int]:
        """Random tokens."""
        tokens: list[int] = self._random.integers(self._vocab_size, size=count).tolist()
        return tokens


@dataclass
class _Stage:
    """Times rounds of a real engine, without the drafter's time."""

    engine: Engine
    guess: _Guess
    batch: int
    largest: int
    drift: int
    rows: list[Row] = field(default_factory=list)

    def wake(self) -> None:
        """Run untimed rounds for WAKE_SECONDS."""
        try:
            self._begin(self._prompts(LEAST_CONTEXT // 4))
            began = perf_counter()
            while perf_counter() - began < WAKE_SECONDS and self.engine.has_work:
                self._round(_Case(1))
        finally:
            self._clear()

    def measure(self, context: int, cases: Sequence[_Case], number: int) -> tuple[list[float], float]:
        """Milliseconds of a round of each case, and of a prompt up to its first token.

        number: of the sweep; the cases are measured in another order in every sweep."""
        times = [0.0] * len(cases)
        prompts: list[float] = []
        most = max(min(MOST_ROUNDS, self.drift // 2 - TIMED_ROUNDS), 0)
        try:
            for step in range(len(cases)):
                i = (step + number) % len(cases)
                if not self.rows or max(map(len, self.rows)) + most >= context + self.drift // 2:
                    prompts.append(1e3 * self._begin(self._prompts(context - self.drift // 2)))
                self._settle(cases[i], most)
                times[i] = 1e3 * fmean(self._round(cases[i]) for _ in range(TIMED_ROUNDS))
        finally:
            self._clear()
        return times, median(prompts)

    def token_ms(self, context: int) -> float:
        """Milliseconds that an accepted token adds to the work beside the forward: the same answer is computed twice,
        first plainly, then with drafts that are right in every other round."""
        pairs = max(min(self.drift // (ACCEPTED + 2), PAIRS), 1)
        prompts = self._prompts(context - self.drift // 2)
        try:
            self._begin(prompts)
            for _ in range(pairs * (ACCEPTED + 2)):
                self._round(_Case(1))
            answers = [row.new_tokens.tolist() for row in self.rows]
            self._begin(prompts)
            costs = []
            for _ in range(pairs):
                accepted, seconds = self._accepting(answers)
                costs.append((seconds - self._accepting(None)[1]) / max(accepted, 1))
        finally:
            self._clear()
        return 1e3 * median(costs)

    def _accepting(self, right: list[list[int]] | None) -> tuple[int, float]:
        """Run a round; the tokens accepted in it, and the seconds of its parts that depend on them."""
        length, before = sum(map(len, self.rows)), self._booked("accept", "commit", "rows")
        self.guess.right = right
        self._round(_Case(ACCEPTED + 1))
        self.guess.right = None
        accepted = sum(map(len, self.rows)) - length - len(self.rows)
        return accepted, self._booked("accept", "commit", "rows") - before

    def _prompts(self, length: int) -> list[list[int]]:
        return [self.guess.tokens(length) for _ in range(self.batch)]

    def _begin(self, prompts: list[list[int]]) -> float:
        """New rows with these prompts; seconds until each has its first token."""
        self._clear()
        params = SamplingParams(max_tokens=self.drift + self.largest + 8, ignore_eos=True)
        self.rows = [self.engine.add(prompt, params) for prompt in prompts]
        self.guess.case = _Case(1)
        began = perf_counter()
        while not all(row.num_new for row in self.rows):
            self.engine.step()
            if broken := [row for row in self.rows if row.error]:
                raise PacelineError(broken[0].error)
        return perf_counter() - began

    def _settle(self, case: _Case, most: int) -> None:
        """Run rounds until the next one takes its usual time; `most` at most."""
        began, rounds = perf_counter(), 0
        while rounds < most and (rounds < WARM_ROUNDS or perf_counter() - began < SETTLE_SECONDS):
            self._round(case)
            rounds += 1

    def _round(self, case: _Case) -> float:
        """Seconds of a round, without the drafter's."""
        self.guess.case = case
        before, began = self._booked("draft", "observe"), perf_counter()
        self.engine.step()
        return perf_counter() - began - (self._booked("draft", "observe") - before)

    def _booked(self, *parts: str) -> float:
        """Seconds of these parts of all rounds so far."""
        return sum(self.engine.clock.seconds.get(part, 0.0) for part in parts)

    def _clear(self) -> None:
        for row in self.rows:
            self.engine.abort(row)
        self.rows = []


@dataclass(frozen=True)
class Sweep:
    """Result of one sweep, in milliseconds: rounds of every case on the usual and on the long context, the prompts of
    both, and an accepted token."""

    ms: tuple[float, ...]
    long_ms: tuple[float, ...]
    prompt_ms: tuple[float, float]
    token_ms: float


class Calibrator:
    """Times rounds of our engine in sweeps over all sizes. Sweeps may follow each other or lie minutes apart: a machine
    may be in another state at the end of a run than at its beginning.

    sweeps  those made so far, the first one a warm-up; may be set to those of an equal calibrator."""

    def __init__(
        self,
        model: Engine | Target,
        tokenizer: Tokenizer | None = None,
        *,
        sizes: Sequence[int] = SIZES,
        context: int = 256,
        batch: int = 1,
    ):
        """tokenizer  writes the rows' text, which is part of a round; an engine brings its own.
        context  tokens in each row's cache; at most a quarter of what the model holds. Larger sizes are left out.

        Raises PacelineError for a model whose context is below LEAST_CONTEXT, and for sizes below 1."""
        target = model.target if isinstance(model, Engine) else model
        tokenizer = tokenizer or (model.tokenizer if isinstance(model, Engine) else target.tokenizer)
        self._cases = _Cases.of(sizes, context, batch, target.max_context)
        guess = _Guess()
        engine = Engine(target, guess, max_batch=batch, tokenizer=tokenizer, reuse=False)
        self._stage = _Stage(engine, guess, batch, self._cases.sizes[-1], self._cases.drift)
        self.sweeps: list[Sweep] = []

    def sweep(self) -> None:
        """Make one more."""
        number, stage, cases = len(self.sweeps), self._stage, self._cases
        stage.wake()
        ms, prompt_ms = stage.measure(cases.context, cases.usual, number)
        long_ms, long_prompt_ms = stage.measure(cases.long_context, cases.long, number)
        token_ms = stage.token_ms(cases.context)
        self.sweeps.append(Sweep(tuple(ms), tuple(long_ms), (prompt_ms, long_prompt_ms), token_ms))

    def result(self) -> Calibration:
        """What all sweeps but the first say."""
        cases, batch = self._cases, self._stage.batch
        sweeps = self.sweeps[1:] or self.sweeps
        times = _typical(np.array([(*sweep.ms, *sweep.long_ms) for sweep in sweeps]))
        ms = dict(zip(cases.usual, times, strict=False))
        trees = [case for case in cases.usual if case.tree]
        prompts = np.median([sweep.prompt_ms for sweep in sweeps], 0)
        return Calibration(
            engine="paceline",
            batch=batch,
            context=cases.context,
            nodes=tuple(batch * n for n in cases.sizes),
            ms=tuple(ms[_Case(n)] for n in cases.sizes),
            tree_nodes=tuple(batch * case.nodes for case in trees),
            tree_ms=tuple(ms[case] for case in trees),
            long_context=cases.long_context,
            long_nodes=tuple(batch * case.nodes for case in cases.long),
            long_ms=tuple(times[len(cases.usual) :]),
            token_ms=max(median(sweep.token_ms for sweep in sweeps), 0.0),
            prompt_tokens=(batch * (cases.context - cases.drift // 2), batch * (cases.long_context - cases.drift // 2)),
            prompt_ms=(float(prompts[0]), float(prompts[1])),
        )


def calibrate(
    model: Engine | Target,
    tokenizer: Tokenizer | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    context: int = 256,
    rounds: int = 15,
    batch: int = 1,
) -> Calibration:
    """Calibrate at once, in `rounds` sweeps after one to warm up; otherwise see Calibrator."""
    if rounds < 1:
        raise PacelineError(f"rounds is {rounds}; it must be 1 or more")
    calibrator = Calibrator(model, tokenizer, sizes=sizes, context=context, batch=batch)
    for _ in range(rounds + 1):
        calibrator.sweep()
    return calibrator.result()


@dataclass(frozen=True)
class _Cases:
    """The rounds to measure, and the contexts to measure them on, in tokens."""

    sizes: list[int]
    context: int
    long_context: int
    drift: int

    @classmethod
    def of(cls, sizes: Sequence[int], context: int, batch: int, room: int) -> _Cases:
        """Those that fit a model whose context holds `room` tokens."""
        if room < LEAST_CONTEXT:
            raise PacelineError(f"the model's context holds {room} tokens; {LEAST_CONTEXT} are needed to time rounds")
        if not sizes or min(sizes) < 1 or min(batch, context) < 1:
            raise PacelineError(
                f"sizes are {list(sizes)}, context is {context} and batch {batch}; all must be 1 or more"
            )
        fit = sorted({1, *(n for n in sizes if n <= room // 4)})
        near = max(min(context, room // 4), 2)
        drift = min(DRIFT, near)
        return cls(fit, near, min(4 * near, room - drift - fit[-1] - 8), drift)

    @property
    def usual(self) -> list[_Case]:
        """On the usual context."""
        return [*(_Case(n) for n in self.sizes), *(_Case(n, tree=True) for n in self.sizes if n in TREES)]

    @property
    def long(self) -> list[_Case]:
        """On the long context."""
        return [_Case(n) for n in sorted({1, max(n for n in self.sizes if n <= LONG)})]


def _typical(times: Floats) -> list[float]:
    """One time for each case, from [sweeps, cases]: the mean over sweeps, since a run is a sum of rounds.

    Each sweep is first scaled to the median pace, because other work on a machine changes more slowly than a sweep
    lasts; then spikes are clipped."""
    pace = np.median(times / np.median(times, 0), 1)
    even = times / pace[:, None]
    typical: list[float] = (np.minimum(even, SPIKE * np.median(even, 0)).mean(0) * pace.mean()).tolist()
    return typical
