"""Report: a page of texts, tables, bars and plots, as SVG; figures in words. No script, nothing loaded, light and dark.

    Report("Title", ["A sentence."], [Section("Speeds", [Table(("method", "tokens/s"), [("a", number(3.5))])])]).html()

plot.html.jinja draws the SVG: a few kilobytes a plot, in the page's own colours, with a tip on every point."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import Any, Self

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from rich.filesize import decimal

from paceline.errors import CONTROLS

HERE = Path(__file__).parent
DASH = "\N{EN DASH}"
COLORS = (
    "#2a6fdb", "#d9600f", "#1f8f4e", "#b3307a", "#7a55c7", "#8a6d00", "#008a99", "#c43a31",
    "#5f7f2a", "#d0489b", "#54616f", "#3aa0ff",
)  # fmt: skip
FAINT = "faint"  # The page's own colour for things in the background.


def number(value: Any, digits: int = 2) -> str:
    """A dash where there is no figure."""
    is_figure = isinstance(value, int | float) and isfinite(value)
    return f"{value:,.{digits}f}" if is_figure else DASH


def percent(value: Any, digits: int = 0) -> str:
    """A share in percent. Only exact shares are shown as 0 % or 100 %."""
    if not isinstance(value, int | float) or not isfinite(value):
        return DASH
    for places in (digits, 1):
        text = f"{100 * value:.{places}f}"
        if value in (0, 1) or float(text) not in (0, 100):
            return f"{text} %"
    return "under 0.1 %" if value < 0.5 else "over 99.9 %"


def interval(low: Any, high: Any) -> str:
    """From a to b, or a dash."""
    return DASH if low is None or high is None else f"{number(low)} to {number(high)}"


def size(value: Any) -> str:
    """Bytes for people."""
    return decimal(int(value)) if isinstance(value, int | float) else DASH


def words(value: Any) -> str:
    """Any JSON value as a person would write it."""
    if value in (None, [], {}):
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {words(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def foldable(name: str) -> Markup:
    """A method's name that may go on in a new line between its parts."""
    return Markup("<wbr>").join(re.findall(r"[^+,=:/]*[+,=:/]?", name))


def visible(text: str) -> str:
    """An answer's text that can be written and seen."""
    return text.translate(CONTROLS)


def cell(text: str) -> str:
    """Text in a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())


def code(text: str) -> str:
    """Text as Markdown's code on one line, whatever it holds."""
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def breaking(text: str) -> Markup:
    """A text whose lines stay lines."""
    return Markup("<br>").join(text.split("\n"))


def marked(tag: str, text: Any, kind: str = "") -> Markup:
    """A text in an element. kind: its class."""
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), Markup(' class="{}"').format(kind) if kind else "", text)


def dotted(color: str, name: Any) -> Markup:
    """A name with a dot of its colour."""
    return Markup('<span class="dot" style="background: {}"></span>{}').format(color, name)


FILTERS = (breaking, number, percent, interval, size, words, foldable, visible, cell, code)


@cache
def _environment(folder: Path) -> Environment:
    """Templates of `folder` and of this one, with the functions of figures in words as filters."""
    loader = FileSystemLoader([folder, HERE])
    environment = Environment(loader=loader, autoescape=_is_marked_up, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {each.__name__: each for each in FILTERS}
    environment.globals["style"] = Markup((HERE / "report.css").read_text("utf-8"))
    return environment


def _is_marked_up(template: str | None) -> bool:
    """Whether a template makes HTML or XML, in which values are escaped."""
    return template is None or not template.endswith((".txt.jinja", ".md.jinja"))


def render(template: Path, **values: Any) -> str:
    """The text that a template makes of values."""
    made = _environment(template.parent).get_template(template.name).render(values)
    return _TABLE.sub(_labelled, made) if template.name.endswith(".html.jinja") else made


_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEADS = re.compile("<th>(.*?)</th>", re.DOTALL).findall
NARROW = 3  # A phone shows tables of so many columns as they are.


def _labelled(table: re.Match[str]) -> str:
    """A table of many columns, whose cells say what they are of: a phone shows each row as a card."""
    names = [re.sub("<.*?>", "", re.sub(r"(?<=-)<br>", "", name).replace("<br>", " ")) for name in _HEADS(table[0])]
    if len(names) <= NARROW:
        return table[0]
    rows = []
    for row in re.split("(?=<tr)", table[0]):
        labels = iter(names)
        rows.append(re.sub("<td(?=[ >])", lambda cell: f'{cell[0]} data-of="{next(labels)}"', row))  # noqa: B023
    return "".join(rows).replace("<table>", '<table class="cards">', 1)


def macro(template: Path, name: str) -> Callable[..., str]:
    """A macro of a template, as a function of the values it takes."""
    found: Callable[..., str] = getattr(_environment(template.parent).get_template(template.name).module, name)
    return found


@dataclass(frozen=True)
class Curve:
    """Points (x, y) joined by a line, with a tip and a colour for each; the name stands below the plot."""

    points: Sequence[tuple[float, float]]
    tips: Sequence[str]
    colors: Sequence[str]
    name: str = ""


DEEPEST = 16  # Most depths of a draft in a plot.


def by_depth(shares: Sequence[float], name: str, color: str) -> Curve:
    """The share of drafts accepted to each depth, in percent of those that reach it."""
    shares = shares[:DEEPEST]
    tips = [f"{name}: {percent(share, 1)} accepted to depth {d}" for d, share in enumerate(shares, 1)]
    return Curve([(d, 100 * share) for d, share in enumerate(shares, 1)], tips, [color] * len(shares))


@dataclass(frozen=True)
class Frame:
    """The size of a drawing, its margins and its dots, in units of the SVG (about pixels on a phone)."""

    width: int = 400
    height: int = 270
    left: int = 66
    right: int = 14
    top: int = 16
    bottom: int = 42
    dot: float = 3.2

    def at(self, x: float, y: float, xs: Sequence[float], ys: Sequence[float]) -> tuple[str, str]:
        """Where (x, y) lies, the axes reaching from the first to the last of `xs` and `ys`."""
        across = (x - xs[0]) / (xs[-1] - xs[0]) * (self.width - self.left - self.right)
        up = (y - ys[0]) / (ys[-1] - ys[0]) * (self.height - self.top - self.bottom)
        return f"{self.left + across:.1f}", f"{self.height - self.bottom - up:.1f}"


LARGE, SMALL = Frame(), Frame(200, 120, left=32, right=12, top=8, bottom=20, dot=2.2)


def plot(
    lines: Sequence[Curve], across: str = "", up: str = "", *, frame: Frame = LARGE, xs: Sequence[float] = (),
    ys: Sequence[float] = (), label: str = "",
) -> Markup:  # fmt: skip
    """Lines with points, axes and ticks, as an SVG that scales with the page; empty if there is no point.

    across, up, label  what the axes say, and where the picture cannot be seen. xs, ys: ticks, ascending."""
    points = [point for line in lines for point in line.points]
    if not points:
        return Markup("")
    xs, ys = xs or ticks([x for x, _ in points]), ys or ticks([y for _, y in points])
    curves = []
    for line in lines:
        spots = [frame.at(x, y, xs, ys) for x, y in line.points]
        is_faint = line.colors[0] == FAINT
        marked = [] if is_faint else list(zip(spots, line.tips, line.colors, strict=True))
        curves.append(("L".join(map(" ".join, spots)), line.colors[0], marked))
    return Markup(
        render(
            HERE / "plot.html.jinja",
            f=frame,
            label=label or f"{up} by {across}",
            xs=[(frame.at(x, ys[0], xs, ys)[0], _number(x)) for x in xs],
            ys=[(frame.at(xs[0], y, xs, ys)[1], _number(y)) for y in ys],
            curves=curves,
            across=across,
            up=up,
            key=[(line.colors[-1], line.name) for line in lines if line.name and line.points],
        )
    )


def _number(tick: float) -> str:
    return f"{tick / 1000:g}k" if abs(tick) >= 10_000 else f"{tick:g}"


def ticks(values: Sequence[float]) -> list[float]:
    """Three to nine round numbers that span `values`; none is negative unless a value is."""
    low, high = min(values), max(values)
    if high - low < 1e-9:
        spread = abs(low) / 2 or 0.5
        low, high = (max(low - spread, 0.0) if low >= 0 else low - spread), high + spread
    rough = (high - low) / 5
    power = 10.0 ** floor(log10(rough))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= rough)
    return [round(i * step, 9) for i in range(floor(low / step), ceil(high / step) + 1)]


@dataclass(frozen=True)
class Table:
    """Rows of cells, which are texts. best: numbers of rows in bold. heat: shares, but for the first cell of each row,
    that are shaded."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    best: Collection[int] = ()
    heat: bool = False

    @classmethod
    def of(
        cls, rows: Sequence[Mapping[str, Any]], columns: str, *first: tuple[str, Iterable[Any]],
        best: Collection[int] = (),
    ) -> Self:  # fmt: skip
        """A table of figures.

        columns  "head = name:form; head = name.name:form; ...": a figure by its name in the row, or by the names on
                 the way to it; form: decimals, or % and decimals of a share, or size; without one it stays as it is.
        first    heads of columns before those, and the cells of each."""
        named = [[part.strip(" ") for part in column.split("=")] for column in columns.split(";") if column.strip()]
        before = zip(*(cells for _, cells in first), strict=True) if first else ((),) * len(rows)
        made = [[*cells, *(_figure(row, name) for _, name in named)] for row, cells in zip(rows, before, strict=True)]
        return cls([*(head for head, _ in first), *(head for head, _ in named)], made, best)


def _figure(row: Any, name: str) -> Any:
    """A figure of a row in words. name: as in `Table.of`."""
    path, _, form = name.partition(":")
    for key in path.split("."):
        row = row.get(key) if isinstance(row, Mapping) else None
    if form == "size":
        return size(row)
    if form.startswith("%"):
        return percent(row, int(form[1:] or 0))
    return number(row, int(form)) if form else "" if row is None else row


@dataclass(frozen=True)
class Bar:
    """share: of the whole width, None for no bar; span: from one share to another, a line beside it; tip: on hover."""

    name: str
    figure: str
    share: float | None
    color: str
    tip: str = ""
    span: tuple[float, float] | None = None


@dataclass(frozen=True)
class Bars:
    """Groups of bars with their titles. at: a share where a dashed line is drawn through all; 0: nowhere."""

    groups: Sequence[tuple[str, Sequence[Bar]]]
    at: float = 0.0


@dataclass(frozen=True)
class Plots:
    """Plots with their captions; those that are empty are left out. small: many to a row."""

    drawn: Sequence[tuple[Any, Markup]]
    small: bool = False


@dataclass(frozen=True)
class Facts:
    """Names, and what is said of each."""

    facts: Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Folded:
    """Parts hidden until the reader opens them."""

    summary: Any
    parts: Sequence["Part"]
    open: bool = False


Part = str | Table | Bars | Plots | Facts | Folded
"""A text is a paragraph, unless it is marked up. An empty text is nothing."""


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Report:
    """A page. over: a line above the title; window: the title of the window, if it is another; facts: parts below the
    title."""

    title: str
    facts: Sequence[Part]
    sections: Sequence[Section]
    over: str = ""
    window: str = ""

    def html(self) -> str:
        """The page; sections without parts are left out."""
        some = [one for one in self.sections if any(one.parts)]
        return render(HERE / "report.html.jinja", report=replace(self, sections=some))
