"""Run: answer the jobs of `paceline generate` with its engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paceline.cli.drive import Answer, Comparison, Interrupt, compare, drive, with_seed
from paceline.cli.options import one_line
from paceline.cli.prompts import Job
from paceline.cli.repeats import Repeated, once, steady
from paceline.cli.show import Screen, statistics
from paceline.engine.engine import Engine
from paceline.engine.request import Delta
from paceline.errors import PacelineError
from paceline.jsonl import Writer

LOOPS = "the answer runs into a loop, and a loop is the easiest text to draft"


class Run:
    """One run of the command: jobs in, answers out, on the screen or as JSON lines.

    draft    the spec of the engine's drafter; schedule: the name of its schedule.
    refused  prompts that the engine would not take; drafted: tokens, of the answers so far."""

    def __init__(
        self,
        engine: Engine,
        draft: str,
        screen: Screen,
        chat: bool | None,
        lines: Writer | None,
        interrupt: Interrupt,
        schedule: str = "ragged",
    ):
        self.draft, self.schedule = draft, schedule
        self.engine, self.screen, self.chat, self.lines, self.interrupt = engine, screen, chat, lines, interrupt
        self.refused = self.drafted = 0
        self._many = False

    def answer(self, jobs: list[Job]) -> None:
        """Answer every job; at batch 1 a text is shown as it grows."""
        self._many = len(jobs) > 1
        streams = self.lines is None and self.engine.max_batch == 1
        watch = self._stream if streams else _ignore
        with self.screen.progress(len(jobs), shown=self._many and not streams) as bar:
            for answer in drive(self.engine, jobs, self.chat, self.interrupt, self._refuse, watch):
                with bar.hidden():
                    self._show(answer, streamed=streams)
                bar.advance()

    def compare(self, jobs: list[Job]) -> None:
        """Answer every job with drafts and plainly, and show the one with drafts.

        Jobs that fit into one batch are answered again and again until the ratio is steady; more of them, once."""
        self._many = len(jobs) > 1
        plain = self._fresh("none")
        repeats = len(jobs) <= self.engine.max_batch

        def turn(number: int) -> Iterator[Comparison]:
            # A drafter that learns must not have seen the answer.
            engine = self._fresh(self.draft) if number else self.engine
            refuse = _ignore if number else self._refuse
            return compare(engine, plain, jobs, self.chat, self.interrupt, refuse, _ignore, number)

        jobs = [with_seed(job) for job in jobs]
        with self.screen.progress(len(jobs), shown=True) as bar:
            for repeated in steady(turn, self.interrupt) if repeats else map(once, turn(0)):
                with bar.hidden():
                    self._show_both(repeated)
                bar.advance()

    def _fresh(self, draft: str) -> Engine:
        """An engine of the same target whose drafter has seen nothing, and which runs every prompt whole."""
        engine = self.engine
        return Engine(
            engine.target,
            draft,
            max_batch=engine.max_batch,
            tokenizer=engine.tokenizer,
            schedule=self.schedule,
            reuse=False,
        )

    def _refuse(self, job: Job, error: PacelineError) -> None:
        if not self._many and not job.where:
            raise error
        self.refused += 1
        self.screen.end_line()
        self.screen.note(f"error: {job.where}: {one_line(error)}")

    def _stream(self, engine: Engine, job: Job, delta: Delta) -> None:
        if len(delta.tokens) == delta.row.num_new:
            self._heading(job)
        self.screen.write(delta.pieces)

    def _heading(self, job: Job) -> None:
        if self._many:
            self.screen.end_line()
            self.screen.write([("", f"--- {job.name}\n")])

    def _show(self, answer: Answer, streamed: bool = False) -> None:
        """An answer that is complete, or that Ctrl-C ended."""
        self.drafted += answer.row.stats.draft_tokens
        if self.lines is not None:
            if answer.row.error:
                self._report(answer)
            if answer.row.num_new:
                self._record(answer.record())
            return
        if not streamed:
            self._heading(answer.job)
            self.screen.write(answer.pieces)
        self.screen.end_line()
        self._report(answer)

    def _record(self, record: dict[str, Any]) -> None:
        """Write a JSON object, and in it what weights said so."""
        assert self.lines is not None
        target = self.engine.target
        weights = target.quantised or target.expanded or str(target.dtype).removeprefix("torch.")
        self.lines.append([record | {"weights": weights}])

    def _report(self, answer: Answer) -> None:
        """The closing line of an answer; an error counts as a refused prompt."""
        if answer.row.error:
            self._refuse(answer.job, PacelineError(answer.row.error))
        else:
            self.screen.note(statistics(answer.row, answer.tokens_per_second))

    def _show_both(self, repeated: Repeated) -> None:
        both = repeated.both
        answer = both.drafted or both.plain
        assert answer is not None
        if self.lines is not None:
            self.drafted += answer.row.stats.draft_tokens
            self._record(repeated.record())
            return
        self._show(answer)
        if both.is_complete:
            target = self.engine.target
            self.screen.note(*comparison(repeated, self.engine.drafter.name, target.dtype, target.quantised))


def _ignore(*_: object) -> None:
    """For answers that are not streamed, and for prompts that the first turn has refused."""


def comparison(repeated: Repeated, drafter: str, dtype: torch.dtype, blocks: str | None = None) -> list[str]:
    """A complete comparison in lines: both speeds, their ratio, whether the outputs are identical, and any doubts.

    blocks: `Target.quantised`."""
    both = repeated.both
    drafted, plain = both.pair
    speeds = (
        f"plain {plain.tokens_per_second:.1f} tokens/s, {drafter} {drafted.tokens_per_second:.1f} tokens/s, "
        f"ratio {both.speedup:.2f}{repeated.spread}"
    )
    more = [LOOPS] if repeated.is_looping else []
    more += repeated.doubts
    at = both.first_difference
    if at is None:
        return [f"{speeds}; outputs identical, token for token", *more]
    return [speeds, *_difference(both, at, dtype, blocks), *more]


def _difference(both: Comparison, at: int, dtype: torch.dtype, blocks: str | None) -> list[str]:
    drafted, plain = both.pair
    lines = [
        f"outputs differ from new token {at} on (counted from 0)",
        f"there the tokens are {_around(plain, at)} plainly and {_around(drafted, at)} with drafts",
    ]
    if not both.job.params.is_greedy:
        lines.append("a drafter that samples its drafts keeps the distribution of answers, not a seed's very tokens")
    elif blocks:
        lines.append("inputs are rounded to eight bits, so two nearly equal logits can swap; --exact rules that out")
    elif dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        lines.append(f"in {name} two nearly equal logits can swap; --exact rules that out, and --dtype float32 nearly")
    return lines


def _around(answer: Answer, at: int) -> str:
    """A few tokens of an answer from `at` on."""
    few = answer.row.new_tokens[at : at + 4].tolist()
    return " ".join(map(str, few)) if few else "(ended)"
