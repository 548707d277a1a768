"""Answers on a terminal: streaming, colours of accepted runs, closing lines, tables and progress bars.

Answers go to standard output, all else (statistics, tables, legends, errors) to standard error: a pipe gets the text.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from paceline.engine.clock import Profile
    from paceline.engine.request import Row

Pieces = Iterable[tuple[str, str]]  # (source, text): who proposed it, "" for the target itself

PALETTE = ("green", "cyan", "magenta", "yellow", "blue", "red")
REASONS = {"stop": "the model ended it", "length": "max_tokens reached", "context": "the model's context is full"}
REASONS |= {"abort": "stopped", "error": "ended with an error"}
# A model may write anything, terminal control sequences too; they are shown, not obeyed.
CONTROLS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\t\n"} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Screen:
    """Standard output for answers, standard error for the rest.

    color  colour accepted runs, one colour for each drafter; `legend` says which."""

    def __init__(self, color: bool = False):
        self.color = color
        self.out = Console(file=sys.stdout, force_terminal=True if color else None, highlight=False)
        self.err = Console(stderr=True, force_terminal=True if color else None, highlight=False)
        self._colors: dict[str, str] = {}
        self._line_open = False

    def write(self, pieces: Pieces) -> None:
        """Show text at once, without a line end of its own."""
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

    @contextmanager
    def progress(self, total: int, shown: bool) -> Iterator[Bar]:
        """A progress bar on standard error, if that is a terminal and `shown`."""
        columns = (MofNCompleteColumn(), TimeElapsedColumn())
        with progress_bar(self.err, *columns, shown=shown, redirect_stdout=False, redirect_stderr=False) as bar:
            yield Bar(bar, bar.add_task("prompts", total=total))


def progress_bar(console: Console, *columns: ProgressColumn, shown: bool = True, **options: Any) -> Progress:
    """A progress bar with `columns` after it, if `console` is a terminal and `shown`. options: others of rich's."""
    hidden = not (shown and console.is_terminal)
    words = TextColumn("{task.description}")
    return Progress(words, BarColumn(), *columns, console=console, transient=True, disable=hidden, **options)


class Bar(NamedTuple):
    """A progress bar that can be hidden while something else is printed."""

    progress: Progress
    task: TaskID

    def advance(self) -> None:
        """One more is done."""
        self.progress.advance(self.task)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Print inside this."""
        self.progress.stop()
        yield
        if not self.progress.disable:
            self.progress.start()


def statistics(row: Row, tokens_per_second: float) -> str:
    """The closing line of an answer."""
    line = f"{row.num_new} new tokens in {row.stats.rounds} rounds, {row.mean_accepted_tokens:.2f} mean accepted tokens"
    reason = f"; {REASONS[row.finish_reason]}" if row.finish_reason else ""
    return f"{line}, {tokens_per_second:.1f} tokens/s{reason}"


def plain_table(*columns: str, text: Collection[str] = (), gap: int = 2) -> Table:
    """A table without lines. Columns in `text` are on the left and folded; the others hold figures, on the right."""
    table = Table(box=None, padding=(0, gap, 0, 0))
    for column in columns:
        is_text = column in text
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
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
