"""Run: what `paceline generate` does with its jobs once they and the engine are there."""

from __future__ import annotations

import json
from typing import Any, TextIO

import torch

from paceline.cli.drive import Answer, Comparison, Interrupt, compare, drive
from paceline.cli.options import one_line
from paceline.cli.prompts import Job
from paceline.cli.show import Screen, statistics
from paceline.completion import Delta
from paceline.engine import Engine
from paceline.errors import PacelineError


class Run:
    """One run of the command: jobs in, answers out, on the screen or as JSON lines.

    refused  prompts that the engine would not take."""

    def __init__(self, engine: Engine, screen: Screen, chat: bool | None, lines: TextIO | None, interrupt: Interrupt):
        self.engine, self.screen, self.chat, self.lines, self.interrupt = engine, screen, chat, lines, interrupt
        self.refused = 0
        self._many = False

    def answer(self, jobs: list[Job]) -> None:
        """Answer every job; at batch 1 a text is shown as it grows."""
        self._many = len(jobs) > 1
        streams = self.lines is None and self.engine.max_batch == 1
        watch = self._stream if streams else _look_away
        with self.screen.progress(len(jobs), shown=self._many and not streams) as bar:
            for answer in drive(self.engine, jobs, self.chat, self.interrupt, self._refuse, watch):
                with bar.aside():
                    self._show(answer, streamed=streams)
                bar.advance()

    def compare(self, jobs: list[Job]) -> None:
        """Answer every job with drafts and plainly, and show the one with drafts."""
        self._many = len(jobs) > 1
        target, tokenizer = self.engine.target, self.engine.tokenizer
        plain = Engine(target, "none", max_batch=self.engine.max_batch, tokenizer=tokenizer)
        with self.screen.progress(len(jobs), shown=True) as bar:
            for both in compare(self.engine, plain, jobs, self.chat, self.interrupt, self._refuse, _look_away):
                with bar.aside():
                    self._show_both(both)
                bar.advance()

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
        """An answer that is complete (or will not get any further)."""
        if self.lines is not None:
            self._write(self.lines, answer.record())
            if answer.row.error:
                self._tell(answer)
            return
        if not streamed:
            self._heading(answer.job)
            self.screen.write(answer.pieces)
        self.screen.end_line()
        self._tell(answer)

    def _tell(self, answer: Answer) -> None:
        """How an answer went; an error counts as a prompt that was refused."""
        if answer.row.error:
            self._refuse(answer.job, PacelineError(answer.row.error))
        else:
            self.screen.note(statistics(answer.row, answer.tokens_per_second))

    def _show_both(self, both: Comparison) -> None:
        if self.lines is not None:
            self._write(self.lines, both.record())
            return
        answer = both.drafted or both.plain
        assert answer is not None
        self._show(answer)
        if both.is_complete:
            self.screen.note(*comparison(both, self.engine.drafter.name, self.engine.target.dtype))

    def _write(self, lines: TextIO, record: dict[str, Any]) -> None:
        """One object in one piece: whoever reads the file meanwhile finds whole lines."""
        lines.write(json.dumps(record, ensure_ascii=False) + "\n")
        lines.flush()


def _look_away(engine: Engine, job: Job, delta: Delta) -> None:
    """The watch of an answer that is shown when it is complete."""


def comparison(both: Comparison, drafter: str, dtype: torch.dtype) -> list[str]:
    """What a complete comparison says, in lines: both speeds, their ratio, and whether the outputs are identical."""
    drafted, plain = both.pair
    lines = [
        f"plain {plain.tokens_per_second:.1f} tokens/s, {drafter} {drafted.tokens_per_second:.1f} tokens/s, "
        f"ratio {both.speedup:.2f}"
    ]
    at = both.first_difference
    if at is None:
        return [f"{lines[0]}; outputs identical, token for token"]
    lines.append(f"outputs differ from new token {at} on (counted from 0)")
    lines.append(f"there the tokens are {_around(plain, at)} plainly and {_around(drafted, at)} with drafts")
    if not both.job.params.is_greedy:
        lines.append("a drafter that samples its drafts keeps the distribution of answers, not a seed's very tokens")
    elif dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        lines.append(f"in {name} two nearly equal logits can swap; --dtype float32 rules that out")
    return lines


def _around(answer: Answer, at: int) -> str:
    """Tokens of an answer from `at` on, a few."""
    few = answer.row.new_tokens[at : at + 4].tolist()
    return " ".join(map(str, few)) if few else "(ended)"
