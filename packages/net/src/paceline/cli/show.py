"""Answers on a terminal: streaming, colours of accepted runs, closing lines, tables and progress bars.

Answers go to standard output, all else (statistics, tables, legends, errors) to standard error: a pipe gets the text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from paceline.errors import CONTROLS

if TYPE_CHECKING:
    from paceline.cli.drive import Answer
    from paceline.core.clock import Profile
    from paceline.core.request import Row

Pieces = Iterable[tuple[str, str]]  # (source, text): the drafter that proposed the text, "" for the target.
Columns = Sequence[tuple[str, str, str]]
"""Of a table: title, figure, and its format, which is "" for text on the left. Titles may come again."""

PALETTE = ("green", "cyan", "magenta", "yellow", "blue", "red")
REASONS = {"stop": "the model ended it", "length": "max_tokens reached", "context": "context is full, or its memory"}
REASONS |= {"abort": "stopped", "error": "ended with an error"}
LONG_READING = 1.0  # Longer times for reading a prompt, in seconds, are shown.
REPORT_EVERY = 60.0  # Seconds between two lines of progress if there is no terminal for a bar.


class Screen:
    """Standard output for answers, standard error for the rest.

    color  colour accepted runs, one colour for each drafter; `legend` says which."""

    def __init__(self, color: bool = False):
        self.color = color
        self.out = Console(file=sys.stdout, force_terminal=True if color else None, highlight=False)
        self.err = Console(stderr=True, force_terminal=True if color else None, highlight=False)
        self._colors: dict[str, str] = {}
        self._line_open = False
        self._reading: Steps | None = None

    def reading(self, row: Row) -> None:
        """Show how far a row's prompt is read, until something is written."""
        if self._reading is None:
            self._reading = Steps("reading", unit="tokens read", console=self.err).__enter__()
        self._reading.show(row.cached, row.prompt_length)

    def write(self, pieces: Pieces) -> None:
        """Show text at once, without a line end of its own."""
        if self._reading is not None:
            self._reading.__exit__()
            self._reading = None
        for source, text in pieces:
            if self.out.is_terminal:
                text = text.translate(CONTROLS)
            if self.color and source:
                style = self._colors.setdefault(source, PALETTE[len(self._colors) % len(PALETTE)])
                self.out.print(Text(text, style=style), end="", soft_wrap=True)
            else:
                sys.stdout.write(text)
            self._line_open = not text.endswith("\n") if text else self._line_open
        sys.stdout.flush()

    def end_line(self) -> None:
        """Begin a new line, unless one has just begun."""
        if self._line_open:
            self.write([("", "\n")])

    def note(self, *lines: str) -> None:
        """Lines on standard error."""
        for line in lines:
            self.err.print(line, markup=False, soft_wrap=True)

    def legend(self) -> None:
        """Which colour stands for which drafter, if anything was coloured."""
        if self._colors:
            line = Text("colours: ")
            for source, color in self._colors.items():
                line.append(f"drafted by {source} and accepted", style=color).append(", ")
            self.err.print(line.append("uncoloured: the model's own"), soft_wrap=True)


class Steps:
    """Progress of a long command on standard error: on a terminal a bar with the time left, elsewhere a line a minute.

    what  the work in words; total: number of its parts; unit: their name, for the lines.
    shown  whether to show anything; console: prints beside the bar without breaking it."""

    def __init__(
        self, what: str, total: float | None = None, unit: str = "steps", shown: bool = True,
        console: Console | None = None,
    ):  # fmt: skip
        self.err = console or Console(stderr=True, highlight=False)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        hidden = not (shown and self.err.is_terminal)
        self._bar = Progress(*columns, console=self.err, transient=True, disable=hidden)
        self._speaks = shown and self._bar.disable
        self._unit, self._total, self._done = unit, total, 0.0
        self._ends: float | None = None
        self._task = self._bar.add_task(what, total=total)
        self._time()

    def _time(self) -> None:
        """Begin to measure how long a step takes."""
        self._began = self._spoke = monotonic()
        self._untimed, self._timed = self._done, False

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside this the bar is away, so that something else can be printed."""
        self._bar.stop()
        yield
        self._bar.start()

    def say(self, what: str) -> None:
        """Begin other work, and say so at once."""
        self.begin(self._total, what)
        if self._speaks:
            self.err.print(what, markup=False, soft_wrap=True)

    def limit(self, seconds: float) -> None:
        """Count seconds from now on, because all that follows takes so long; single steps are ignored."""
        self.begin(seconds, "testing")
        self._unit, self._ends = "seconds", monotonic() + seconds

    def begin(self, total: float | None, what: str = "answering") -> None:
        """Begin to count, to `total`."""
        if self._ends is not None:
            return self.show(0, what=what)
        self._done, self._total = 0.0, total
        self._time()
        self._bar.update(self._task, completed=0, total=total, description=what)

    def advance(self, by: float = 1) -> None:
        """Count more that is done."""
        self.show(self._done + by)

    def show(self, done: float, total: float | None = None, what: str | None = None) -> None:
        """Show how much of `total` is done. what: a new description."""
        if self._ends is not None and self._total is not None:
            done, total = self._total - max(0.0, self._ends - monotonic()), self._total
        self._done, self._total = done, self._total if total is None else total
        self._bar.update(self._task, completed=done, total=self._total, description=what)
        now = monotonic()
        if now - self._began < 1:  # These steps were found in a folder, not done now.
            self._untimed = done
        elif not self._timed:  # The first step includes the warm-up.
            self._untimed, self._began, self._spoke, self._timed = done, now, now, True
        if self._speaks and now - self._spoke > REPORT_EVERY:
            self._spoke, whole = now, self._total or done
            left = (now - self._began) / max(done - self._untimed, 1) * (whole - done)
            self.err.print(f"{done:,.0f} of {whole:,.0f} {self._unit}, {left / 60:.0f} min left", soft_wrap=True)


def standard_output() -> Console:
    """For tables. A file has no width, so none is folded there."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(file=sys.stdout, highlight=False, width=None if known else 200)


def say(*lines: str, err: bool = False) -> None:
    """Lines as they are, on standard output or error: rich neither wraps nor colours them."""
    console = Console(file=sys.stderr if err else sys.stdout, highlight=False)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def statistics(answer: Answer) -> str:
    """The closing line of an answer. The time for reading a long prompt is shown apart."""
    row, reading = answer.row, ""
    speed = f"{answer.tokens_per_second:.1f} tokens/s"
    if answer.reading >= LONG_READING:
        reading = f"{row.prompt_length - row.reused:,} tokens read in {answer.reading:.1f} s; "
        speed = f"{(row.num_new - 1) / max(answer.seconds - answer.reading, 1e-9):.1f} tokens/s after that"
    rounds = f"{row.stats.rounds} rounds, {row.stats.mean_accepted_tokens:.2f} mean accepted tokens"
    reason = f"; {REASONS[row.finish_reason]}" if row.finish_reason else ""
    return f"{reading}{row.num_new} new tokens in {rounds}, {speed}{reason}"


def plain_table(*columns: str, text: Collection[str] = (), gap: int = 2, left: bool = False) -> Table:
    """A table without lines. Columns in `text` are on the left and folded; the others hold figures, on the right, or
    words that are not folded (left)."""
    table = Table(box=None, padding=(0, gap, 0, 0))
    for column in columns:
        is_text = column in text
        table.add_column(column, justify="left" if is_text or left else "right", no_wrap=not is_text, overflow="fold")
    return table


def figures_table(results: Iterable[Mapping[str, Any]], columns: Columns) -> Table:
    """A table without lines, with a row for each result; a dash where it lacks the figure."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title, _, form in columns:
        if form:
            table.add_column(escape(title), justify="right", no_wrap=True)
        else:
            table.add_column(title, overflow="fold", min_width=8)
    for result in results:
        values = [(result.get(figure), form) for _, figure, form in columns]
        table.add_row(*("-" if value is None else escape(format(value, form)) for value, form in values))
    return table


def profile_table(profile: Profile, title: str) -> Table:
    """The mean time of a round by part."""
    table = plain_table("part", "ms", "share", text=("part",))
    rows = profile.table()
    table.title, table.title_justify = f"{title}, mean of {profile.rounds}", "left"
    for part, milliseconds, share in rows:
        table.add_row(part, f"{milliseconds:.3f}", f"{share:.1%}")
    table.add_row("all", f"{sum(row[1] for row in rows):.3f}", f"{sum(row[2] for row in rows):.1%}", style="bold")
    return table
