"""Run: answer the jobs of `paceline generate` with its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.cli.drive import Answer, Interrupt, drive, ignore, with_seed
from paceline.cli.prompts import Job
from paceline.cli.show import Screen, Steps, statistics
from paceline.core.request import Delta
from paceline.engine.engine import Engine
from paceline.errors import PacelineError, printable
from paceline.outputs import Writer

if TYPE_CHECKING:
    from paceline.cli.compare import Compared


class Run:
    """One run of the command: jobs in, answers out, on the screen or as JSON lines.

    draft    the spec of the engine's drafter; schedule: the name of its schedule.
    drafted  tokens that were drafted for the answers so far."""

    def __init__(
        self, engine: Engine, draft: str, screen: Screen, chat: bool | None, lines: Writer | None, interrupt: Interrupt,
        schedule: str = "ragged",
    ):  # fmt: skip
        self.draft, self.schedule = draft, schedule
        self.engine, self.screen, self.chat, self.lines, self.interrupt = engine, screen, chat, lines, interrupt
        self.drafted = 0
        self._refused: set[int] = set()
        self._many = False

    @property
    def refused(self) -> int:
        """How many prompts could not be answered."""
        return len(self._refused)

    def answer(self, jobs: list[Job]) -> None:
        """Answer every job; at batch 1 a text is shown as it grows."""
        self._many = len(jobs) > 1
        streams = self.lines is None and self.engine.max_batch == 1
        watch = self._stream if streams else ignore
        with Steps("answering", len(jobs), "prompts", shown=self._many and not streams, console=self.screen.err) as bar:
            reading = self.screen.reading if streams else ignore
            for answer in drive(self.engine, jobs, self.chat, self.interrupt, self._refuse, watch, reading):
                with bar.hidden():
                    self._show(answer, streamed=streams)
                bar.advance()

    def compare(self, jobs: list[Job]) -> None:
        """Answer every job with drafts and plainly, and show the one with drafts.

        Jobs that fit into one batch are answered in several turns; more of them, once."""
        from paceline.bench.metrics import BASELINE
        from paceline.cli.compare import Compared, Driven, repeat, runner

        self._many = len(jobs) > 1
        jobs = [with_seed(job) for job in jobs]
        how = (jobs, self.engine, self.chat, self.interrupt, self._refuse)
        drafted = Driven(self.draft, *how, schedule=self.schedule, first=True, name="drafted")
        plain = Driven(BASELINE, *how, schedule=self.schedule)
        repeats = len(jobs) <= self.engine.max_batch
        with Steps("comparing", len(jobs), "prompts", console=self.screen.err) as bar:
            shown: set[int] = set()

            def show(job: Job) -> None:
                shown.add(job.index)
                found = [side.answers[0][job.index] for side in (drafted, plain) if job.index in side.answers[0]]
                if found:
                    failed_first = max(found, key=lambda answer: bool(answer.row.error))
                    with bar.hidden():
                        self._show_both(failed_first, Compared.of(job, drafted, plain))
                bar.advance()

            def answered(job: Job) -> None:
                if not repeats and all(job.index in side.answers[0] for side in (drafted, plain)):
                    show(job)

            turns = runner([drafted, plain], jobs, self.engine.max_batch, self.interrupt, answered)
            repeat(turns.repeat) if repeats else turns.repeat(0)
            for job in jobs:
                if job.index not in shown:
                    show(job)

    def _refuse(self, job: Job, error: PacelineError) -> None:
        """Count a prompt that the engine does not take, once; raise the error if it is the only one."""
        if not self._many and not job.where:
            raise error
        if job.index in self._refused:  # A comparison asks again.
            return
        self._refused.add(job.index)
        self.screen.end_line()
        self.screen.note(f"error: {job.where}: {printable(error)}")

    def _stream(self, engine: Engine, job: Job, delta: Delta) -> None:
        if len(delta.tokens) == delta.row.num_new:
            self._heading(job)
        self.screen.write(delta.pieces)

    def _heading(self, job: Job) -> None:
        if self._many:
            self.screen.end_line()
            self.screen.write([("", f"--- {job.name}\n")])

    def _show(self, answer: Answer, streamed: bool = False) -> None:
        """Show an answer that is complete, or that Ctrl-C ended."""
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
        """Write a JSON object, with the kind of the model's weights."""
        assert self.lines is not None
        target = self.engine.target
        weights = target.quantised or target.expanded or str(target.dtype).removeprefix("torch.")
        self.lines.append([record | {"weights": weights}])

    def _report(self, answer: Answer) -> None:
        """Print the closing line of an answer. An error counts as a refused prompt."""
        if answer.row.error:
            self._refuse(answer.job, PacelineError(answer.row.error))
        else:
            self.screen.note(statistics(answer))

    def _show_both(self, answer: Answer, compared: Compared | None) -> None:
        """Show a job's answer, and its comparison if that is complete."""
        if self.lines is not None and compared:
            self.drafted += compared.pair[0].row.stats.draft_tokens
            self._record(compared.record())
            return
        self._show(compared.pair[0] if compared else answer)
        if compared:
            target = self.engine.target
            self.screen.note(*compared.lines(self.engine.drafter.name, target.dtype, target.quantised))
