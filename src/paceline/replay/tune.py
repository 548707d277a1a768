"""Tune: measure what rounds and drafters cost on this machine with this model, and predict the gain under load.

    tuning = Tuning(target, tokenizer, ["sam", "suffix"], batches=[1, 8])
    answers = tuning.answers(prompts, 64)      # or those of a log
    table = tuning.measure(answers)            # for `auto:...,table=FILE`
    predict(table, answers, drafter, 8, 32)    # tokens a second, 8 rows at once, 32 requests

Times of rounds are measured in the real engine with drafts of random sizes, at every batch size; a drafter's own time
and the acceptance of its drafts come from replaying the answers. A prediction replays the answers in a full batch, with
the time of every round from the table; the drafters, `auto` too, run as in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import cycle, islice
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

from paceline.draft.auto import Candidate
from paceline.draft.base import Drafter
from paceline.draft.cost import DraftTimes, RoundTimes
from paceline.draft.recording import Recording
from paceline.draft.registry import create
from paceline.engine.engine import Engine
from paceline.engine.prompt import Prompt
from paceline.engine.request import Request
from paceline.engine.round import Round
from paceline.engine.sampling import SamplingParams
from paceline.engine.tree import DraftTree
from paceline.target.base import Target
from paceline.target.tokenizer import Tokenizer
from paceline.workbench.walk import RecordedAnswer, Tally, Walk, drop, replay, replayable, step

Speeds = dict[str, dict[int, float]]
"""Tokens a second, by drafter and batch size."""
Stopped = Callable[[], bool]


def never() -> bool:
    """The answer of runs that nothing stops."""
    return False


WIDEST = 40
"""Nodes of the largest drafts that are timed."""
WARM_ROUNDS, FEWEST_ROUNDS, MOST_ROUNDS = 4, 16, 200
"""Rounds at a batch size before timing begins; least and most rounds that are timed."""
FIRST_ROW = 1 << 20
"""First row id of a second replay with the same drafter."""
SHOWN = (1, 2, 4, 8, 16, 32)
"""Nodes of every row for which a table shows the time of a round."""


@dataclass(frozen=True)
class Tuning:
    """What to measure.

    drafts   drafters to compare. batches: rows at once. seconds: of timed rounds at each batch size.
    step     called after every batch size and every drafter. stopped: asked now and then whether to end early."""

    target: Target
    tokenizer: Tokenizer
    drafts: Sequence[str]
    batches: Sequence[int]
    seconds: float = 2.0
    step: Callable[[], None] = lambda: None
    stopped: Stopped = never

    @property
    def names(self) -> list[str]:
        """The drafters to compare: none, each of `drafts`, and auto with all of them."""
        return ["none", *self.drafts, f"auto:{'|'.join(spec.replace(',', ';') for spec in self.drafts)}"]

    def answers(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RecordedAnswer]:
        """The model's own greedy answers, where there is no log."""
        engine = Engine(self.target, "none", max_batch=8, tokenizer=self.tokenizer)
        rows = [engine.add(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts]
        for _ in engine.follow(rows, until=self.stopped):
            pass
        return [RecordedAnswer(row.tokens[: row.prompt_length], row.new_tokens) for row in rows if row.finish_reason]

    def measure(self, answers: Sequence[RecordedAnswer]) -> dict[str, Any] | None:
        """The table for `auto`; None if it was stopped."""
        times = RoundTimes(fade=1.0, expert_share=self.target.expert_share)
        for batch in self.batches:
            self._time(times, batch, answers)
            times.fit()
            self.step()
        acceptance: dict[str, list[float]] = {}
        for spec in self.drafts:
            if self.stopped():
                return None
            times.drafting[spec], acceptance[spec] = self._replayed(spec, answers, times.to_json())
            self.step()
        if self.stopped():
            return None
        target = self.target
        return {
            "model": {"name": target.name, "fingerprint": target.weights_fingerprint, "dtype": str(target.dtype)},
            **times.to_json(),
            "acceptance": acceptance,
            "round_ms": _shown(times, self.batches),
            "context": round(float(np.mean([len(a.prompt) + len(a.answer) / 2 for a in answers]))),
        }

    def _time(self, times: RoundTimes, batch: int, answers: Sequence[RecordedAnswer]) -> None:
        """Time rounds of a full batch of real prompts, with drafts of all sizes."""
        probe = _Probe(times)
        engine = Engine(self.target, probe, max_batch=batch, tokenizer=self.tokenizer)
        params = SamplingParams(max_tokens=96, ignore_eos=True)
        waiting = cycle(answers)
        began, rounds = perf_counter(), -WARM_ROUNDS
        while not self.stopped():
            while len(engine.rows) + len(engine.waiting) < batch:
                engine.add(next(waiting).prompt.tolist(), params)
            engine.step()
            rounds += 1
            if rounds == 0:
                began, probe.learns = perf_counter(), True
            if rounds >= MOST_ROUNDS or (rounds >= FEWEST_ROUNDS and perf_counter() - began > self.seconds):
                break
        for row in [*engine.rows, *engine.waiting]:
            engine.abort(row)

    @property
    def recording(self) -> Recording:
        """The target's facts for drafters that are replayed; it cannot run."""
        facts = {field.name: getattr(self.target, field.name) for field in fields(Recording)}
        return Recording(**facts | {"tokenizer": self.tokenizer})

    def check(self) -> None:
        """MethodError for a drafter that does not exist or cannot be replayed."""
        for spec in self.drafts:
            replayable(spec, self.recording)

    def _replayed(
        self, spec: str, answers: Sequence[RecordedAnswer], table: Mapping[str, Any]
    ) -> tuple[DraftTimes, list[float]]:
        """A drafter's time by rows, and the share of its drafts that survives each depth."""
        drafter, tally = replayable(spec, self.recording), Tally()
        timed = _Timed(Candidate(spec, drafter))
        for batch in (1, 8, 1, 8):
            predict(table, answers, timed, batch, max(batch + 8, 12), self.stopped)
        for i, answer in enumerate(answers):
            if not self.stopped():
                replay(drafter, answer, FIRST_ROW + i, tally)
        shares: list[float] = []
        above = 1.0
        for share in tally.accepted_by_depth():
            shares.append(round(min(share / above, 1.0), 4) if above > 0 else 0.0)
            above = share
        return timed.candidate.times, shares

    def predicted(self, table: Mapping[str, Any], path: str, answers: Sequence[RecordedAnswer]) -> Speeds:
        """Predictions for every drafter and batch size, each with a new drafter. path: the table's file, for auto."""
        speeds: Speeds = {name: {} for name in self.names}
        for name in self.names:
            for batch in self.batches:
                drafter = create(_with_table(name, path))
                drafter.bind(self.target)
                speeds[name][batch] = predict(table, answers, drafter, batch, _requests(batch), self.stopped)
                self.step()
        return speeds

    def measured(self, path: str, answers: Sequence[RecordedAnswer], batches: Sequence[int]) -> Speeds:
        """Measurements of the engine itself, after a few requests to warm it up; the drafters in turn at every size."""
        speeds: Speeds = {name: {} for name in self.names}
        for batch in batches:
            for name in self.names:
                engine = Engine(self.target, _with_table(name, path), max_batch=batch, tokenizer=self.tokenizer)
                measured(engine, answers[:3], batch + 2, self.stopped)
                speeds[name][batch] = measured(engine, answers, _requests(batch), self.stopped)
                self.step()
        return speeds


def _with_table(name: str, path: str) -> str:
    return f"{name},table={path}" if name.startswith("auto") else name


def _requests(batch: int) -> int:
    return max(12, 4 * batch)


class _Timed(Drafter):
    """Runs a candidate's drafter, timed as `auto` times it."""

    def __init__(self, candidate: Candidate):
        self.candidate, self.name = candidate, candidate.drafter.name

    def start(self, row: Request) -> None:
        self.candidate.drafter.start(row)

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        return self.candidate.propose(rows)

    def observe(self, round: Round) -> None:
        self.candidate.observe(round, learns=True)

    def drop(self, row: Request) -> None:
        self.candidate.drafter.drop(row)


class _Probe(Drafter):
    """Drafts random tokens, in chains of all sizes, and times the rounds that verify them."""

    name = "probe"

    def __init__(self, times: RoundTimes):
        self.times, self.learns = times, False
        self._random = Random(0)
        self._shape = (0, 0, 0, 0)
        self._began = 0.0

    def propose(self, rows: Sequence[Request]) -> list[DraftTree]:
        most = self._random.choice((0, 1, 2, 4, 8, 16, WIDEST))
        share = self._random.choice((0.2, 1.0))
        trees = []
        for row in rows:
            size = self._random.randint(0, most) if self._random.random() < share else 0
            drafted = self._random.choices(row.tokens[: row.prompt_length].tolist(), k=min(size, row.max_draft))
            trees.append(DraftTree.chain(row.last_token, drafted))
        self._shape = len(rows), sum(map(len, trees)), max(map(len, trees)), self.prefill_tokens
        self._began = perf_counter()
        return trees

    def observe(self, round: Round) -> None:
        if self.learns and self._shape[0] == sum(not round.is_prompt(i) for i in range(len(round))):
            self.times.note(*self._shape, perf_counter() - self._began)


def _shown(times: RoundTimes, batches: Sequence[int]) -> dict[str, dict[str, float]]:
    """Milliseconds of a round by rows and by nodes of each, for people: no program reads them."""
    return {
        f"{rows} rows" if rows > 1 else "1 row": {
            f"{nodes} nodes each" if nodes > 1 else "plain": round(1e3 * times.seconds(rows, rows * nodes, nodes), 3)
            for nodes in SHOWN
        }
        for rows in batches
    }


# Prediction ----------------------------------------------------------------------------------------------------------


def predict(
    table: Mapping[str, Any],
    answers: Sequence[RecordedAnswer],
    drafter: Drafter,
    batch: int,
    count: int,
    stopped: Stopped = never,
) -> float:
    """Tokens a second in a full batch, until the last of `count` requests has joined; the answers are repeated.

    drafter  bound. Its own time is measured; the time of rounds is the table's."""
    times = RoundTimes.from_json(table)
    waiting = deque(enumerate(islice(cycle(answers), count)))
    walks: list[Walk] = []
    tally, tokens, seconds = Tally(), 0, 0.0
    while waiting and not stopped():
        fresh = [Walk(*waiting.popleft()) for _ in range(min(batch - len(walks), len(waiting)))]
        for walk in fresh:
            drafter.start(walk.row)
        before = sum(len(walk.row) for walk in walks)
        prompt = sum(len(walk.row) for walk in fresh)
        drafter.begin_round(prompt)
        tally.seconds = 0.0
        trees = step(drafter, walks, tally) if walks else []
        tokens += sum(len(walk.row) for walk in walks) - before + len(fresh)
        nodes, widest = sum(map(len, trees)), max(map(len, trees), default=0)
        seconds += tally.seconds + times.seconds(len(walks), nodes, widest, prompt)
        for walk in fresh:  # the round that reads a prompt brings the first token
            walk.row.extend([int(walk.text[len(walk.row)])])
        walks += fresh
        for walk in [walk for walk in walks if walk.is_over]:
            drop(drafter, walk, tally)
            walks.remove(walk)
    for walk in walks:
        drafter.drop(walk.row)
    return tokens / seconds if seconds else 0.0


def measured(engine: Engine, answers: Sequence[RecordedAnswer], count: int, stopped: Stopped = never) -> float:
    """Tokens a second of the real engine, as `predict` counts them; every answer gets its recorded number of tokens."""
    rows = [
        engine.add(answer.prompt.tolist(), SamplingParams(max_tokens=len(answer.answer), ignore_eos=True))
        for answer in islice(cycle(answers), count)
    ]
    began, tokens = perf_counter(), 0
    while engine.waiting and not stopped():
        tokens += sum(len(delta.tokens) for delta in engine.step())
    seconds = perf_counter() - began
    for row in rows:
        if row.finish_reason is None:
            engine.abort(row)
    return tokens / seconds if seconds else 0.0


def advice(predicted: Mapping[str, Mapping[int, float]], path: str) -> str:
    """One paragraph: what to use and its predicted gain.

    predicted  tokens a second by drafter and batch size; "none" is plain decoding, and one name begins with "auto"."""
    auto = next(name for name in predicted if name.startswith("auto"))
    fixed = [name for name in predicted if name not in ("none", auto)]
    gains = {name: {b: speed / predicted["none"][b] for b, speed in of.items()} for name, of in predicted.items()}
    batches = list(predicted["none"])
    best = {b: max(fixed, key=lambda name: gains[name][b]) for b in batches} if fixed else {}
    short = [b for b in batches if best and gains[auto][b] < 0.98 * max(gains[best[b]][b], 1.0)]
    by_batch = ", ".join(f"{gains[auto][b]:.2f} at {b}" for b in batches)
    if max(gains[auto].values()) < 1.02 and not short:
        return (
            "Nothing here is predicted to gain anything with your model and texts (auto over plain decoding: "
            f"{by_batch} rows at once): decode plainly (--draft none), or try a draft model (--draft model:PATH)."
        )
    text = (
        f"Use --draft {auto.partition(',')[0]!r} --tune {path}: predicted speed-up over plain decoding {by_batch} rows "
        "at once."
    )
    if short:
        which = "; ".join(
            f"{best[b]} at {b} ({gains[best[b]][b]:.2f})" if gains[best[b]][b] > 1 else f"none at {b}" for b in short
        )
        text += f" Others are predicted to be faster at some sizes: {which}."
    last = max((b for b in batches if best and gains[best[b]][b] >= 1.02), default=None)
    if best and last != batches[-1]:
        text += " Fixed drafters gain nothing " + (f"above {last} rows." if last else "at any of these sizes.")
    return text
