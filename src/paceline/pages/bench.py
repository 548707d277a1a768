"""A benchmark's report: one HTML page that loads nothing, and a Markdown table for a README.

Figures come from the run's folder as they are; what is worked out here is their order and how they are put.
Knows nothing of engines, and runs nothing.

    run = read_run(Path("out/run"))
    Path("report.html").write_text(page(run), "utf-8")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from paceline.bench.folder import ANSWERS, RUN, SUMMARY
from paceline.bench.metrics import BASELINE, OVERALL
from paceline.bench.record import Answer
from paceline.bench.words import DASH, foldable, interval, number, percent, size, visible, words
from paceline.errors import PacelineError
from paceline.pages.plots import COLORS, FAINT, SMALL, Line, columns, plot, style
from paceline.records import loads

PEER = "peer:"
SHOWN = 3
"""Methods whose answers are shown token by token."""
LONGEST, DEEPEST = 16, 16
"""Tokens of a round, and depths of a draft, in the plots; longer rounds share the last column."""
KIND_COLORS = {"ours": COLORS[0], "peer": COLORS[1], "plain": COLORS[10]}
PARTS = ("draft", "forward", "accept", "bookkeeping")
"""Of a round, in the order of the loop."""
PART_COLORS = COLORS[2:10]
"""Others than those that tell kinds of methods apart."""


@dataclass(frozen=True)
class Method:
    """A method of the run. facts: what run.json says of it; rows: its figures by category, "overall" among them."""

    name: str
    facts: dict[str, Any]
    rows: dict[str, dict[str, Any]]

    @property
    def kind(self) -> str:
        """ours, peer, or plain for the baseline."""
        return "plain" if self.name == BASELINE else "peer" if self.name.startswith(PEER) else "ours"

    @property
    def label(self) -> str:
        """The name without what its mark says already."""
        return self.name.removeprefix(PEER)

    @property
    def color(self) -> str:
        return KIND_COLORS[self.kind]

    @property
    def lossless(self) -> bool:
        return bool(self.facts.get("lossless", True))

    @property
    def unavailable(self) -> str | None:
        """Why it could not take part."""
        return self.facts.get("unavailable")

    @property
    def failed(self) -> str | None:
        """Why it did not answer everything."""
        return self.get("failed")

    @property
    def why(self) -> str:
        """Why there is not a full set of answers, empty if there is: one that was not there, failed, or is to come."""
        if self.unavailable:
            return f"did not take part: {self.unavailable}"
        if self.failed and self.get("answers"):
            return f"failed after {self.get('answers')} answers: {self.failed}"
        return self.failed or ("" if self.rows else "no answers yet")

    def get(self, figure: str, category: str = OVERALL) -> Any:
        """A figure; None if there is none."""
        return self.rows.get(category, {}).get(figure)


@dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    about    run.json; summary  summary.json, as they were written.
    methods  the fastest first; those without a speed-up behind, in the order of the run.
    tasks    in the order of the summary.
    shown    of each task the first question answered, by method."""

    folder: Path
    about: dict[str, Any]
    summary: dict[str, Any]
    methods: list[Method]
    tasks: list[str]
    shown: dict[str, dict[str, Answer]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return bool(self.summary.get("complete"))

    @property
    def baseline(self) -> Method | None:
        """Plain decoding; None without answers of it."""
        return next((method for method in self.measured if method.kind == "plain"), None)

    @property
    def loops(self) -> bool:
        """Whether some of plain decoding's answers run into a loop."""
        return bool(self.baseline and self.baseline.get("looping"))

    @property
    def measured(self) -> list[Method]:
        """Methods with figures."""
        return [method for method in self.methods if method.get("tokens_per_second") is not None]

    @property
    def ranked(self) -> list[Method]:
        """Lossless methods that answered every question and can be compared with plain decoding, the fastest first."""
        return [
            method
            for method in self.measured
            if method.kind != "plain" and method.lossless and not method.failed and method.get("speedup") is not None
        ]


# Reading ------------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> Run:
    """Read what `paceline bench --out folder` has written so far.

    Raises PacelineError if it is not a run's folder, or one of its files is broken. A last answer that was cut off is
    left out."""
    if not (folder / RUN).is_file():
        raise PacelineError(f"{folder} is not the folder of a run: it has no {RUN}; paceline bench --out makes one")
    if not (folder / SUMMARY).is_file():
        raise PacelineError(f"{folder} has no {SUMMARY} yet; run the command of the benchmark again, and it goes on")
    about, summary = _read_object(folder / RUN), _read_object(folder / SUMMARY)
    results = summary.get("results")
    if not isinstance(results, list) or not all(isinstance(row, dict) and _is_named(row) for row in results):
        raise PacelineError(f'{folder / SUMMARY} is not a summary: "results" must list objects by method and category')
    facts = about.get("methods", [])
    if not isinstance(facts, list) or not all(isinstance(row, dict) and "method" in row for row in facts):
        raise PacelineError(f'{folder / RUN} does not describe a run: "methods" must list objects with a "method"')
    tasks = list(dict.fromkeys(row["category"] for row in results if row["category"] != OVERALL))
    return Run(folder, about, summary, _methods(facts, results), tasks, _first_answers(folder / ANSWERS))


def _is_named(row: dict[str, Any]) -> bool:
    return isinstance(row.get("method"), str) and isinstance(row.get("category"), str)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = loads(file.read_bytes(), parse_constant=lambda _: None)
    except (OSError, ValueError) as error:
        raise PacelineError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise PacelineError(f"{file} is not one JSON object")
    return found


def _methods(facts: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[Method]:
    of = {row["method"]: row for row in facts}
    rows: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in of}
    for row in results:
        rows.setdefault(row["method"], {})[row["category"]] = row
    methods = [Method(name, of.get(name, {}), by_category) for name, by_category in rows.items()]
    return sorted(methods, key=lambda method: -(method.get("speedup") or 0.0))


def _first_answers(file: Path) -> dict[str, dict[str, Answer]]:
    """Of each task the first question in the file, and every method's first answer to it."""
    first: dict[str, dict[str, Answer]] = {}
    question: dict[str, str] = {}
    for answer in _answers(file):
        if question.setdefault(answer.task, answer.question) == answer.question and not answer.failed:
            first.setdefault(answer.task, {}).setdefault(answer.method, answer)
    return first


def _answers(file: Path) -> Iterator[Answer]:
    """Whole lines; what follows the last end of a line was cut off."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield Answer.from_json(line.decode())
                except (PacelineError, UnicodeDecodeError) as error:
                    raise PacelineError(f"{file}, line {number}: {error}") from None
    except OSError as error:
        raise PacelineError(f"{file} cannot be read: {error.strerror}") from None


# Sentences ----------------------------------------------------------------------------------------------------


def headline(run: Run) -> str:
    """What won, in a sentence."""
    ranked = run.ranked
    if not ranked:
        return "No method could be compared with plain decoding"
    best = ranked[0]
    gain = best.get("speedup")
    if gain <= 1:
        return "No method was faster than plain decoding"
    return f"{best.label} answers {number(gain)} times as fast as plain decoding"


def findings(run: Run) -> list[str]:
    """How sure that is, and who comes next: whole sentences."""
    ranked = run.ranked
    if not ranked:
        return []
    best, told = ranked[0], []
    low, high = best.get("speedup_low"), best.get("speedup_high")
    if low is not None and high is not None:
        doubt = "; it includes 1, so no gain is shown" if low <= 1 < best.get("speedup") else ""
        told.append(f"The 95 % interval of {best.label} is {interval(low, high)}{doubt}.")
        level = [m.label for m in ranked[1:] if (m.get("speedup_high") or 0.0) >= low]
        if level:
            told.append(f"Intervals that overlap with it: {', '.join(level)}.")
    else:
        told.append("There are too few answers for an interval.")
    peers = [method for method in ranked if method.kind == "peer"]
    if peers and peers[0] is not best:
        told.append(f"The fastest peer is {peers[0].label} with {number(peers[0].get('speedup'))}.")
    elif peers and (ours := [method for method in ranked if method.kind == "ours"]):
        told.append(f"It is a peer; the fastest of our own is {ours[0].label} with {number(ours[0].get('speedup'))}.")
    unranked = [f"{m.label} ({'failed' if m.failed else 'lossy'})" for m in run.measured if m.failed or not m.lossless]
    if unranked:
        told.append(f"Not ranked: {', '.join(unranked)}.")
    return told


def setting(run: Run) -> str:
    """What was run on what: one sentence without its stop."""
    suite, options = run.about.get("suite") or {}, run.about.get("options") or {}
    batch, temperature = options.get("batch") or 1, options.get("temperature") or 0
    repeats = options.get("repeats") or 1
    parts = [
        f"{len(run.measured)} methods on {suite.get('questions', 'the')} questions of {suite.get('name', 'a suite')}",
        f"model {model_name(run)}",
        f"at most {options['max_tokens']} tokens an answer" if options.get("max_tokens") else "",
        "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}",
        "one question at a time" if batch == 1 else f"{batch} questions at a time",
        "each answered once" if repeats == 1 else f"each answered {repeats} times",
    ]
    return ", ".join(filter(None, parts))


def machine(run: Run) -> str:
    """The machine and what ran on it, in a line."""
    seen = run.about.get("environment") or {}
    gpu = seen.get("gpu")
    parts = [
        (", ".join(gpu) if isinstance(gpu, list) else str(gpu)) if gpu else seen.get("cpu"),
        f"{seen['threads']} thread{'s' if seen['threads'] != 1 else ''}" if seen.get("threads") else "",
        seen.get("dtype"),
        *(f"{name} {seen[name]}" for name in ("torch", "transformers") if seen.get(name)),
        f"Paceline {run.about['paceline']}" if run.about.get("paceline") else "",
    ]
    return ", ".join(str(part) for part in parts if part)


def model_name(run: Run) -> str:
    return str(run.about.get("model_name") or run.about.get("model") or "unknown")


# The Markdown table -------------------------------------------------------------------------------------------


def markdown(run: Run) -> str:
    """A table for a README, the fastest first, then a line about the machine and one with the command."""
    heads = ["method", "speed-up (95 % interval)", *run.tasks, "tokens/s", "mean accepted", "identical", "looping"]
    heads += ["without loops"] if run.loops else []
    lines = [_markdown_row(heads), _markdown_row(["---", *["---:"] * (len(heads) - 1)])]
    for m in run.methods:
        name = _code(m.name) + ("" if m.lossless else " (lossy)")
        if m not in run.measured:
            lines.append(_markdown_row([name, m.why, *[""] * (len(heads) - 2)]))
            continue
        gain = number(m.get("speedup"))
        if m.kind != "plain" and m.get("speedup_low") is not None:
            gain += f" ({interval(m.get('speedup_low'), m.get('speedup_high'))})"
        cells = [name, gain + (f"; {m.why}" if m.why else ""), *(number(m.get("speedup", task)) for task in run.tasks)]
        cells += [number(m.get("tokens_per_second"), 1), number(m.get("mean_accepted_tokens"))]
        cells += [percent(m.get("identical")), percent(m.get("looping"))]
        cells += [number(m.get("speedup_without_loops"))] if run.loops else []
        lines.append(_markdown_row(cells))
    lines += ["", f"{setting(run)}; {machine(run)}.{'' if run.complete else ' Not complete.'}"]
    lines += run.summary.get("disturbed") or []
    if run.about.get("as_large"):
        lines.append(str(run.about["as_large"]))
    command = (run.about.get("environment") or {}).get("command")
    if command:
        lines += ["", _code(str(command))]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _code(text: str) -> str:
    """Text as code on one line, whatever it holds."""
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


# The page -----------------------------------------------------------------------------------------------------


def page(run: Run) -> str:
    """The report as one HTML page."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    filters = (number, percent, interval, size, words, foldable, visible)
    environment.filters |= {rule.__name__: rule for rule in filters}
    template = environment.from_string((files("paceline.bench") / "report.html.jinja").read_text("utf-8"))
    devices: dict[str, dict[str, list[float]]] = (run.summary.get("predictions") or {}).get("devices") or {}
    colors, answers = _shown(run)
    differing = [(method, one) for method in run.measured for one in method.get("differs") or ()]
    return template.render(
        run=run,
        style=style(),
        about=run.about,
        options=run.about.get("options") or {},
        suite=run.about.get("suite") or {},
        seen=run.about.get("environment") or {},
        model=model_name(run),
        headline=headline(run),
        findings=findings(run),
        setting=setting(run),
        baseline=run.baseline,
        unfinished=[method for method in run.methods if method.why],
        most=_most(run),
        best={category: _best(run, category) for category in [OVERALL, *run.tasks]},
        panels=[(m, _lengths(m), _depths(m, run.measured)) for m in run.measured if m.get("lengths")],
        parts=_parts(run.measured),
        devices=devices,
        differing=differing,
        verdicts=Counter(difference["verdict"] for _, difference in differing),
        predicted=[m for m in run.measured if m.kind != "plain" and m.get("predicted") is not None],
        on_devices=lambda method: any(method.name in of for of in devices.values()),
        shown=SHOWN,
        colors=colors,
        answers=answers,
        OVERALL=OVERALL,
        DASH=DASH,
        KIND_COLORS=KIND_COLORS,
    )


def _most(run: Run) -> float:
    """What the bars of speed-ups reach at most, intervals and predictions included."""
    figures = ("speedup", "speedup_high", "predicted")
    found = [m.get(f, c) for m in run.measured for f in figures for c in (OVERALL, *run.tasks)]
    return 1.02 * max([1.0, *(value for value in found if value is not None)])


def _best(run: Run, category: str) -> Method | None:
    """The fastest lossless method that answered everything."""
    rated = [method for method in run.ranked if method.get("speedup", category) is not None]
    return max(rated, key=lambda method: float(method.get("speedup", category)), default=None)


def _lengths(method: Method) -> Markup:
    """How many tokens rounds brought: share of rounds by tokens."""
    counts = [float(count) for count in method.get("lengths")][1:]
    heights = counts[: LONGEST - 1] + ([sum(counts[LONGEST - 1 :])] if len(counts) >= LONGEST else [])
    heights += [0.0] * (LONGEST - len(heights))
    total = max(sum(counts), 1.0)
    each = [str(n) for n in range(1, LONGEST)] + [f"{LONGEST}+"]
    shares = [height / total for height in heights]
    tips = [f"{method.label}: {percent(s, 1)} of rounds brought {n}" for s, n in zip(shares, each, strict=True)]
    names = [n if n in ("1", "4", "8", "12", each[-1]) else "" for n in each]
    label = f"Tokens a round, {method.label}"
    return columns([100 * share for share in shares], names, tips, method.color, ys=(0, 50, 100), label=label)


def _depths(method: Method, others: Sequence[Method]) -> Markup:
    """Drafts accepted to a depth, of those that reach it, before those of the other methods."""
    shares = (method.get("accepted_by_depth") or ())[:DEEPEST]
    if not shares:
        return Markup("")
    behind = [
        Line([(d, 100 * s) for d, s in enumerate(told[:DEEPEST], 1)], (), (FAINT,))
        for other in others
        if other is not method and (told := other.get("accepted_by_depth"))
    ]
    tips = [f"{method.label}: {percent(s, 1)} accepted to depth {d}" for d, s in enumerate(shares, 1)]
    line = Line([(d, 100 * s) for d, s in enumerate(shares, 1)], tips, [method.color] * len(shares))
    label = f"Accepted by depth, {method.label}"
    return plot([*behind, line], frame=SMALL, xs=(1, 4, 8, 12, DEEPEST), ys=(0, 50, 100), label=label)


@dataclass(frozen=True)
class Parts:
    """Milliseconds of a round by part: names with their colours, and the longest round."""

    colors: dict[str, str]
    most: float
    methods: list[Method]


def _parts(methods: Sequence[Method]) -> Parts:
    timed = [method for method in methods if method.get("parts_ms")]
    found = dict.fromkeys(part for method in timed for part in method.get("parts_ms"))
    names = sorted(found, key=lambda part: PARTS.index(part) if part in PARTS else len(PARTS))
    most = max((sum(method.get("parts_ms").values()) for method in timed), default=0.0)
    return Parts({part: PART_COLORS[i % len(PART_COLORS)] for i, part in enumerate(names)}, most, timed)


def _shown(run: Run) -> tuple[dict[str, str], list[tuple[str, str, list[tuple[Method, Answer]]]]]:
    """Colours by drafter; and of each task its question with the answers of the fastest methods that tell runs."""
    chosen = []
    for task, by_method in run.shown.items():
        told = [
            (method, by_method[method.name])
            for method in run.measured
            if method.kind != "plain"
            and method.name in by_method
            and any(turn.runs for turn in by_method[method.name].turns)
        ][:SHOWN]
        if told:
            chosen.append((task, told[0][1].question, told))
    drafters = dict.fromkeys(
        who for _, _, told in chosen for _, answer in told for turn in answer.turns for who, _, _ in turn.runs if who
    )
    return {who: COLORS[i % len(COLORS)] for i, who in enumerate(drafters)}, chosen
