"""Calibration: what a round costs on this machine, from a handful of rounds. Knows no drafter, no suite, no answers.

    calibration = calibrate(Engine("models/demo"))
    calibration.round_ms(17)                     # a round that verifies 17 nodes, milliseconds

    calibrator = Calibrator(Engine("models/demo"))
    calibrator.sweep()                           # again and again, with other work between
    calibrator.result()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from time import perf_counter

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

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
"""Of these sizes trees are measured as well as chains."""

ACCEPTED, PAIRS = 4, 4
"""Tokens accepted in the rounds that time what an accepted token costs, and such rounds in a sweep."""

LONG = 16
"""Beside plain rounds, rounds over at most this many nodes are measured on a long context."""

DRIFT = 64
"""A row's context is allowed to grow by so many tokens around the one that is measured, before it is begun anew."""

LEAST_CONTEXT = 64

WARM, SETTLED, MOST = 2, 0.06, 24
"""Rounds of the same size before those that are timed: so many at least, for so many seconds, so many at most. In a run
rounds are of one size or nearly, and it takes a processor some 20 rounds of a few milliseconds to settle behind larger
or smaller ones."""

TIMED = 3
"""Rounds of the same size that are timed then; their mean counts."""

WAKE = 0.2
"""Seconds of rounds before a sweep, which may come after something else."""

SPIKE = 2.0
"""Times that are so many times as long as they usually are had something else going on beside them."""

Progress = Callable[[int, int], None]
"""Called as progress(rounds done, rounds in all)."""


# Our engine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A round to measure: nodes of every row."""

    nodes: int
    tree: bool = False


class _Guess(Drafter):
    """Proposes as many random tokens as it is told to, or the `right` ones (the answers of the rows, in order): what
    is timed is the round around them."""

    name = "calibration"

    def __init__(self) -> None:
        self.case = _Case(1)
        self.right: list[list[int]] | None = None
        self._random = np.random.default_rng(0)

    def bind(self, target: Facts) -> None:
        self._vocab_size = target.vocab_size

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        if self.right is not None:
            count, trees = self.case.nodes - 1, []
            for row, right in zip(rows, self.right, strict=True):
                new = len(row) - row.prompt_length
                trees.append(DraftTree.chain(row.last_token, right[new : new + count]))
            return trees
        return [self._guess(row.last_token) for row in rows]

    def _guess(self, root: int) -> DraftTree:
        tokens = self.tokens(self.case.nodes - 1)
        if self.case.tree:
            return DraftTree.of(root, tokens, [i // 2 for i in range(len(tokens))])
        return DraftTree.chain(root, tokens)

    def tokens(self, count: int) -> list[int]:
        """Random tokens."""
        found: list[int] = self._random.integers(self._vocab_size, size=count).tolist()
        return found


@dataclass
class _Stage:
    """Times rounds of a real engine, drafting taken off."""

    engine: Engine
    guess: _Guess
    batch: int
    largest: int
    drift: int
    done: Callable[[], None] = lambda: None
    rows: list[Row] = field(default_factory=list)

    def wake(self) -> None:
        """Some rounds that nobody times."""
        try:
            self._begin(LEAST_CONTEXT // 4)
            began = perf_counter()
            while perf_counter() - began < WAKE and self.engine.has_work:
                self._round(_Case(1))
        finally:
            self._clear()

    def measure(self, context: int, cases: Sequence[_Case], number: int) -> tuple[list[float], float]:
        """Milliseconds of rounds of each case, in an order that is another one for every `number`; and of a prompt,
        to its first token."""
        times = [0.0] * len(cases)
        prompts: list[float] = []
        most = max(min(MOST, self.drift // 2 - TIMED), 0)
        try:
            for i in _rotated(len(cases), number):
                if not self.rows or max(map(len, self.rows)) + most >= context + self.drift // 2:
                    prompts.append(1e3 * self._begin(context - self.drift // 2))
                settle(lambda case=cases[i]: self._round(case), most)  # type: ignore[misc]
                times[i] = 1e3 * fmean(self._round(cases[i]) for _ in range(TIMED))
                self.done()
        finally:
            self._clear()
        return times, median(prompts)

    def token_ms(self, context: int) -> float:
        """Milliseconds that an accepted token adds to what is done besides the forward: the same answer twice, first
        plainly, then with drafts that are right in every other round."""
        pairs = max(min(self.drift // (ACCEPTED + 2), PAIRS), 1)
        prompts = self._prompts(context - self.drift // 2)
        try:
            self._begin_with(prompts)
            for _ in range(pairs * (ACCEPTED + 2)):
                self._round(_Case(1))
            answers = [row.new_tokens.tolist() for row in self.rows]
            self._begin_with(prompts)
            dearer = []
            for _ in range(pairs):
                accepted, with_them = self._accepting(answers)
                dearer.append((with_them - self._accepting(None)[1]) / max(accepted, 1))
        finally:
            self._clear()
        return 1e3 * median(dearer)

    def _accepting(self, right: list[list[int]] | None) -> tuple[int, float]:
        """Tokens gained by a round beyond one a row, and the seconds of its parts that depend on them."""
        had, before = sum(map(len, self.rows)), self._booked("accept", "commit", "rows")
        self.guess.right = right
        self._round(_Case(ACCEPTED + 1))
        self.guess.right = None
        gained = sum(map(len, self.rows)) - had - len(self.rows)
        return gained, self._booked("accept", "commit", "rows") - before

    def _prompts(self, length: int) -> list[list[int]]:
        return [self.guess.tokens(length) for _ in range(self.batch)]

    def _begin(self, length: int) -> float:
        """New rows with prompts of random tokens; seconds until each has its first token."""
        return self._begin_with(self._prompts(length))

    def _begin_with(self, prompts: list[list[int]]) -> float:
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

    def _round(self, case: _Case) -> float:
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
    """What one sweep found, in milliseconds: rounds of every case on the usual context and on the long one, prompts of
    the two, and an accepted token."""

    ms: tuple[float, ...]
    long_ms: tuple[float, ...]
    prompt_ms: tuple[float, float]
    token_ms: float


class Calibrator:
    """Times rounds of our engine in sweeps over all sizes. They may follow each other or lie minutes apart: a machine
    that was in one state when a run began may be in another when it ends.

    sweeps  those there are, the first one a warm-up; may be filled with those of a calibrator like this one."""

    def __init__(
        self,
        model: Engine | Target,
        tokenizer: Tokenizer | None = None,
        *,
        sizes: Sequence[int] = SIZES,
        context: int = 256,
        batch: int = 1,
    ):
        """tokenizer  whose text the rows are written in, for that is part of a round; an engine brings its own.
        context  tokens behind a row; less where the model holds less than four times as many, and sizes above a quarter
                 of what it holds are left out.

        Raises PacelineError for a model that holds next to nothing, and for sizes that are none."""
        target = model.target if isinstance(model, Engine) else model
        tokenizer = tokenizer or (model.tokenizer if isinstance(model, Engine) else target.tokenizer)
        self._of = _plan(sizes, context, 1, batch, target.max_context)
        guess = _Guess()
        engine = Engine(target, guess, max_batch=batch, tokenizer=tokenizer)
        self._stage = _Stage(engine, guess, batch, self._of.sizes[-1], self._of.drift)
        self.max_context = target.max_context
        self.sweeps: list[Sweep] = []

    def sweep(self, done: Callable[[], None] = lambda: None) -> None:
        """One more; done: called with every round that was timed."""
        number, stage, of = len(self.sweeps), self._stage, self._of
        stage.done = done
        stage.wake()
        ms, prompt_ms = stage.measure(of.context, of.cases, number)
        long_ms, long_prompt_ms = stage.measure(of.long_context, of.long_cases, number)
        token_ms = stage.token_ms(of.context)
        self.sweeps.append(Sweep(tuple(ms), tuple(long_ms), (prompt_ms, long_prompt_ms), token_ms))

    def result(self) -> Calibration:
        """Of all sweeps but the first."""
        of, batch = self._of, self._stage.batch
        some = self.sweeps[1:] or self.sweeps
        times = _typical(np.array([(*sweep.ms, *sweep.long_ms) for sweep in some]))
        found = dict(zip(of.cases, times, strict=False))
        trees = [case for case in of.cases if case.tree]
        prompts = np.median([sweep.prompt_ms for sweep in some], 0)
        return Calibration(
            engine="paceline",
            batch=batch,
            context=of.context,
            nodes=tuple(batch * n for n in of.sizes),
            ms=tuple(found[_Case(n)] for n in of.sizes),
            tree_nodes=tuple(batch * case.nodes for case in trees),
            tree_ms=tuple(found[case] for case in trees),
            long_context=of.long_context,
            long_nodes=tuple(batch * case.nodes for case in of.long_cases),
            long_ms=tuple(times[len(of.cases) :]),
            token_ms=max(median(sweep.token_ms for sweep in some), 0.0),
            prompt_tokens=(batch * (of.context - of.drift // 2), batch * (of.long_context - of.drift // 2)),
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
    progress: Progress | None = None,
) -> Calibration:
    """Time rounds of our engine on `model` at once: as many sweeps as `rounds`, and one to warm up; see Calibrator."""
    calibrator = Calibrator(model, tokenizer, sizes=sizes, context=context, batch=batch)
    count = _plan(sizes, context, rounds, batch, calibrator.max_context).counter(rounds, progress)
    for _ in range(rounds + 1):
        calibrator.sweep(count)
    return calibrator.result()


@dataclass(frozen=True)
class _Plan:
    """What is measured of a model that holds so many tokens."""

    sizes: list[int]
    context: int
    long_context: int
    drift: int

    @property
    def cases(self) -> list[_Case]:
        """Of the usual context."""
        return [*self.chains, *(_Case(n, tree=True) for n in self.sizes if n in TREES)]

    @property
    def chains(self) -> list[_Case]:
        """Without trees."""
        return [_Case(n) for n in self.sizes]

    @property
    def long_cases(self) -> list[_Case]:
        """Of the long context."""
        return [_Case(n) for n in sorted({1, max(n for n in self.sizes if n <= LONG)})]

    def counter(self, rounds: int, progress: Progress | None) -> Callable[[], None]:
        """Called once a round."""
        total, done = (rounds + 1) * (len(self.cases) + len(self.long_cases)), 0

        def count() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        return count


def settle(a_round: Callable[[], object], most: int = MOST) -> None:
    """Do a round again and again until the next one will take what it usually takes; `most` times at most."""
    began, done = perf_counter(), 0
    while done < most and (done < WARM or perf_counter() - began < SETTLED):
        a_round()
        done += 1


def _rotated(count: int, by: int) -> list[int]:
    """0..count-1, begun elsewhere every time."""
    return [(i + by) % count for i in range(count)]


def _typical(times: Floats) -> list[float]:
    """Times [sweeps, cases] to one a case: means over the sweeps, since a run is a sum of rounds; each sweep is brought
    to the usual pace first, for what else a machine does comes and goes more slowly than sweeps do, and spikes are cut.
    """
    pace = np.median(times / np.median(times, 0), 1)
    even = times / pace[:, None]
    found: list[float] = (np.minimum(even, SPIKE * np.median(even, 0)).mean(0) * pace.mean()).tolist()
    return found


def _plan(sizes: Sequence[int], context: int, rounds: int, batch: int, room: int) -> _Plan:
    if room < LEAST_CONTEXT:
        raise PacelineError(f"the model's context holds {room} tokens; {LEAST_CONTEXT} are needed to time rounds")
    if not sizes or min(sizes) < 1 or min(rounds, batch, context) < 1:
        raise PacelineError(
            f"sizes are {list(sizes)}, context is {context}, rounds {rounds} and batch {batch}; all must be 1 or more"
        )
    fit = sorted({1, *(n for n in sizes if n <= room // 4)})
    near = max(min(context, room // 4), 2)
    drift = min(DRIFT, near)
    return _Plan(fit, near, min(4 * near, room - drift - fit[-1] - 8), drift)


# transformers ------------------------------------------------------------------------------------------------


@torch.inference_mode()
def calibrate_transformers(
    model: PreTrainedModel,
    *,
    sizes: Sequence[int] = SIZES,
    context: int = 256,
    rounds: int = 15,
    batch: int = 1,
    progress: Progress | None = None,
) -> Calibration:
    """Time forwards of a transformers model behind a cache of `context` tokens, up to the best token of every node,
    and what `generate` spends on a round besides; otherwise as `calibrate`. For batches, in which `generate` does not
    draft; of single requests `calibrate_peer` knows more."""
    text = model.config.get_text_config()
    plan = _plan(sizes, context, rounds, batch, int(text.max_position_embeddings))
    count = plan.counter(rounds, progress)
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(int(text.vocab_size), (batch, n), generator=generator).to(model.device)

    def measure(length: int, cases: Sequence[_Case]) -> tuple[list[float], float]:
        for _ in range(2):  # the first is a warm-up
            cache, began = DynamicCache(), perf_counter()
            model(tokens(length), past_key_values=cache, logits_to_keep=1).logits.argmax(-1).tolist()
            prompt = perf_counter() - began
        times = np.empty((rounds + 1, len(cases)))
        for sweep in range(rounds + 1):
            for i in _rotated(len(cases), sweep):
                drafted = tokens(cases[i].nodes)

                def forward(drafted: torch.Tensor = drafted) -> None:
                    model(drafted, past_key_values=cache).logits.argmax(-1).tolist()
                    cache.crop(-drafted.shape[1])

                settle(forward)
                began = perf_counter()
                for _ in range(TIMED):
                    forward()
                times[sweep, i] = 1e3 * (perf_counter() - began) / TIMED
                count()
        return _typical(times[1:]), 1e3 * prompt

    ms, prompt_ms = measure(plan.context, plan.chains)
    long_ms, long_prompt_ms = measure(plan.long_context, plan.long_cases)
    besides = max(_generate_ms(model, tokens(plan.context), rounds) - ms[0], 0.0)
    return Calibration(
        engine="transformers",
        batch=batch,
        context=plan.context,
        nodes=tuple(batch * n for n in plan.sizes),
        ms=tuple(each + besides for each in ms),
        long_context=plan.long_context,
        long_nodes=tuple(batch * case.nodes for case in plan.long_cases),
        long_ms=tuple(each + besides for each in long_ms),
        prompt_tokens=(batch * plan.context, batch * plan.long_context),
        prompt_ms=(prompt_ms, long_prompt_ms),
    )


def _generate_ms(model: PreTrainedModel, prompt: torch.Tensor, rounds: int) -> float:
    """Milliseconds of a token that `generate` makes, the first one not counted."""

    def seconds(new: int) -> float:
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        began = perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)  # type: ignore[operator]
        return perf_counter() - began

    new = min(rounds, 16) + 1
    seconds(1)
    return 1e3 * median((seconds(new) - seconds(1)) / (new - 1) for _ in range(3))
