"""Print the tables of docs/results from the pages of the runs, so that no figure there is typed.

    python benchmarks/results.py table               # eight methods in four runs: speed-up and interval
    python benchmarks/results.py differing           # how many of our answers are not plain decoding's
    python benchmarks/results.py full demo-small     # every method of one run, Markdown; docs/results/demo-small.md

A page (`paceline report`) is the record of its run. Three of its tables are read: speed-ups, speed-ups by task, and
answers that differ.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "results"
RUNS = {
    "demo-small": "Demo suite",
    "demo-1B": "Demo suite, cost of 1B",
    "spec-bench-small": "Spec-Bench",
    "spec-bench-1B": "Spec-Bench, cost of 1B",
}
METHODS = (
    "suffix",
    "sam",
    "model:demo-draft",
    "kangaroo:demo-kangaroo",
    "s2d:demo-sorted",
    "recycling,tree=16",
    "peer:vllm-ngram",
    "peer:transformers-lookup",
)
FULL_RUNS = (*RUNS, "drafts-1B", "drafts-1B-32")


class Tables(HTMLParser):
    """Every table of a page: rows of cells, a cell a list of its texts (the figure, then what stands small below)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[list[str]]]] = []
        self._cell: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = [""]
            self.tables[-1][-1].append(self._cell)
        elif tag in ("small", "br") and self._cell is not None:
            self._cell.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = None
        elif tag == "small" and self._cell is not None:
            self._cell.append("")

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell[-1] += data.strip()


@dataclass(frozen=True)
class Table:
    """One table of a page: its columns and, by method, the cells under them."""

    columns: list[str]
    rows: list[tuple[str, list[list[str]]]]

    def cell(self, method: str, column: str) -> list[str]:
        """Texts of one cell. KeyError: the run has no such method."""
        return dict(self.rows)[method][self.columns.index(column)]


@cache
def tables(run: str) -> tuple[Table, ...]:
    """The tables of a run's page that have a line for each method (or for each method's answer)."""
    parser = Tables()
    parser.feed((FOLDER / f"{run}.html").read_text("utf-8"))
    return tuple(
        Table([" ".join(cell).strip() for cell in table[0]], [(label(row[0]), row) for row in table[1:]])
        for table in parser.tables
        if table and table[0][0] == ["method"]
    )


def label(cell: list[str]) -> str:
    """The name of a method as it was asked for, without the folders that its files were in."""
    name = cell[0].replace("models/", "").replace("build/results/", "")
    return f"peer:{name}" if "peer" in cell[1:] else name


def speed_table(run: str) -> Table:
    """The first table of the page: one line a method, the fastest first."""
    return next(table for table in tables(run) if "tokens/s" in table.columns)


def differing(run: str) -> Counter[str]:
    """By method of ours, the answers that are not plain decoding's; each is counted once, wherever it differs."""
    table = next((table for table in tables(run) if "verdict" in table.columns), None)
    rows = table.rows if table else []
    answers = {(method, row[1][0], row[2][0]) for method, row in rows if not method.startswith("peer:")}
    return Counter(method for method, _, _ in answers)


def answered(run: str) -> int:
    """The number of answers that our drafters gave, without plain decoding's own, which they are compared with."""
    table = speed_table(run)
    ours = [method for method, _ in table.rows if method != "none" and not method.startswith("peer:")]
    return sum(int(table.cell(method, "answers")[0]) for method in ours)


def shortened() -> Iterator[str]:
    """METHODS in RUNS: speed-up over plain decoding, and its 95 % interval."""
    yield f"| speed-up (95 % interval) | {' | '.join(RUNS.values())} |"
    yield "|---|" + "---:|" * len(RUNS)
    for method in METHODS:
        cells = [speed_table(run).cell(method, "speed-up") for run in RUNS]
        yield f"| `{method}` | {' | '.join(f'{cell[0]} ({cell[1]})' for cell in cells)} |"


def full(run: str) -> Iterator[str]:
    """A page in Markdown: every method of one run, by task."""
    speeds, by_task = speed_table(run), next(table for table in tables(run) if "overall" in table.columns)
    tasks = [task for task in by_task.columns if task not in ("method", "overall")]
    loops = any("without" in text for _, row in speeds.rows for text in row[speeds.columns.index("looping")])
    names = ["method", "speed-up (95 % interval)", *tasks, "tokens/s", "mean accepted", "identical", "looping"]
    yield f"# {run}"
    yield ""
    yield f"<!-- Written by `python benchmarks/results.py full {run}`; do not edit by hand. -->"
    yield f"Speed-up over plain decoding, over all questions and by task, from [the run's page]({run}.html), which has"
    yield "much more: plots, latency, memory, the machine and the command. [All results](README.md)."
    yield ""
    yield f"| {' | '.join(names + ['without loops'] * loops)} |"
    yield "|---|" + "---:|" * (len(names) - 1 + loops)
    for method, _ in speeds.rows:
        speed, looping = speeds.cell(method, "speed-up"), speeds.cell(method, "looping")
        cells = [f"{speed[0]} ({speed[1]})" if len(speed) > 1 else speed[0]]
        cells += [by_task.cell(method, task)[0] for task in tasks]
        cells += [speeds.cell(method, column)[0] for column in ("tokens/s", "mean accepted", "identical")]
        if loops:
            cells += [looping[0], looping[1].split()[0] if len(looping) > 1 else speed[0]]
        else:
            cells.append(looping[0] + (f" ({looping[1]} to tell)" if len(looping) > 1 else ""))
        yield f"| `{method}` | {' | '.join(cells)} |"


def count_differing() -> Iterator[str]:
    """A line a run, and their sum."""
    total = sum(answered(run) for run in FULL_RUNS)
    for run in FULL_RUNS:
        counts = differing(run)
        by_method = ", ".join(f"{method} {count}" for method, count in sorted(counts.items()))
        yield f"{run}: {counts.total()} of {answered(run):,} differ{f' ({by_method})' if by_method else ''}"
    yield f"all: {sum(differing(run).total() for run in FULL_RUNS)} of {total:,} differ"


def main(arguments: list[str]) -> None:
    """Print what was asked for."""
    match arguments:
        case ["table"]:
            lines = shortened()
        case ["differing"]:
            lines = count_differing()
        case ["full", run] if run in FULL_RUNS:
            lines = full(run)
        case _:
            sys.exit(f"{__doc__}\nruns: {', '.join(FULL_RUNS)}")
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
