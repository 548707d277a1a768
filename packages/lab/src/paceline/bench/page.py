"""Lay out a benchmark's report as one HTML page. The figures come from the run's folder."""

import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from paceline.bench.metrics import OVERALL, batch_speedups, scheduled
from paceline.bench.report import KIND_COLORS, BenchRun, Method, describe
from paceline.runs.report import (
    COLORS,
    DASH,
    DEEPEST,
    FAINT,
    SMALL,
    Bar,
    Bars,
    Curve,
    Facts,
    Folded,
    Part,
    Plots,
    Report,
    Section,
    Table,
    by_depth,
    dotted,
    foldable,
    interval,
    marked,
    number,
    percent,
    plot,
    size,
    words,
)  # fmt: skip

COLUMNS, SAID, DEFINITIONS = tomllib.loads(Path(__file__).with_name("page.toml").read_text("utf-8")).values()


def page(run: BenchRun) -> str:
    """The report as one HTML page."""
    about, suite = run.about, run.about.get("suite") or {}
    headline, model = describe("headline", run), f"{run.model} on {suite.get('name') or 'a suite'}"
    differing = [(method, one) for method in run.measured for one in method.get("differs") or ()]
    bugs = sum(one["verdict"] == "bug" for _, one in differing)
    warnings = [*(run.summary.get("disturbed") or ())]
    if not run.complete:
        warnings.append("The run is not complete: some questions have not been answered by every method yet.")
    if bugs:
        differ = "answer differs" if bugs == 1 else "answers differ"
        warnings.append(f"{bugs} {differ} from plain decoding by more than rounding explains: see losslessness.")
    facts: list[Part] = [
        marked("p", describe("findings", run), "lead"),
        f"{describe('setting', run)}. All in one run, on the same prompts.",
        *(marked("p", fact, "note") for fact in (about.get("tuned"), about.get("quantised")) if fact),
        *(marked("p", line, "warn") for line in warnings),
    ]
    if left_out := about.get("left_out"):
        were = "question was" if len(left_out) == 1 else "questions were"
        named = Facts([(out["question"], out["why"]) for out in left_out])
        facts.append(Folded(f"{len(left_out)} {were} left out of the suite", [named]))
    sections = [
        Section(f"Speed-up over {run.plain}", _speed(run)), Section("Under load", _load(run)),
        Section("Schedules and batch sizes", _schedules(run)), Section("By task", _by_task(run)),
        Section("Losslessness", _lossless(run, differing)), Section("Accepted tokens", _accepted(run)),
        Section("Time and memory", _times(run)), Section("Environment", _environment(run, suite)),
        Section("Definitions", [Facts([*DEFINITIONS.items()])]),
    ]  # fmt: skip
    return Report(headline, facts, sections, f"Paceline benchmark: {model}", f"{model}: {headline}").html()


def _name(method: Method) -> Markup:
    plain = "plain decoding" if method.name == "none" else "baseline"
    tags = [marked("small", tag, "tag") for tag in {"peer": ["peer"], "plain": [plain]}.get(method.kind, ())]
    bad = ("lossy" if not method.lossless else "", "failed" if method.failed else "")
    tags += [marked("small", tag, "tag no") for tag in bad if tag]
    return dotted(method.color, Markup(" ").join([foldable(method.label), *tags]))


def _named(methods: Sequence[Method]) -> tuple[str, list[Markup]]:
    """The first column of a table."""
    return "method", [_name(method) for method in methods]


def _figures(methods: Sequence[Method]) -> list[dict[str, Any]]:
    return [method.rows[OVERALL] for method in methods]


def _cell(figure: str, *below: str) -> Markup:
    """A figure, with smaller texts below it."""
    return Markup(" ").join([Markup(figure), *(marked("small", text) for text in below if text)])


def _band(method: Method, category: str = OVERALL) -> str:
    """The interval of a speed-up; "" if there is none."""
    low, high = method.get("speedup_low", category), method.get("speedup_high", category)
    return "" if method.kind == "plain" or low is None else interval(low, high)


def _best(run: BenchRun, category: str) -> Method | None:
    """The fastest lossless method that answered everything."""
    rated = [method for method in run.ranked if method.get("speedup", category) is not None]
    return max(rated, key=lambda method: float(method.get("speedup", category)), default=None)


def _bars(run: BenchRun) -> Bars:
    """Bars of speed-ups with their intervals; a dashed line marks 1."""
    values = [method.get(figure) for method in run.measured for figure in ("speedup", "speedup_high")]
    most = 1.02 * max([1.0, *(value for value in values if value is not None)])

    def bar(m: Method) -> Bar:
        value, low, high, band = m.get("speedup"), m.get("speedup_low"), m.get("speedup_high"), _band(m)
        tip = f"{m.name}: {number(value)}" + (f", 95 % interval {band}" if band else "")
        share, span = None if value is None else value / most, (low / most, high / most) if band and high else None
        return Bar(m.label + " (failed)" * bool(m.failed), number(value), share, m.color, tip, span)

    return Bars([("", [bar(method) for method in run.measured])], 1 / most)


def _speed(run: BenchRun) -> list[Part]:
    kinds = {"ours": "Paceline", "peer": "a peer, in its own engine", "plain": f"{run.plain}, 1 by definition (dashed)"}
    there = {"ours", "plain", *(method.kind for method in run.measured)}
    legend = [marked("span", dotted(KIND_COLORS[kind], text)) for kind, text in kinds.items() if kind in there]
    loops = []
    for m in run.measured:
        without, short = m.get("speedup_without_loops"), m.get("too_short")
        shown = run.loops and m.kind != "plain" and without is not None
        below = f"{number(without)} without" if shown else "", f"{percent(short)} too short" if short else ""
        loops.append(_cell(percent(m.get("looping")), *below))
    speedups = [_cell(number(m.get("speedup")), _band(m)) for m in run.measured]
    best = [n for n, method in enumerate(run.measured) if method is _best(run, OVERALL)]
    first = _named(run.measured), ("speed-up", speedups), ("looping", loops)
    parts: list[Part] = [
        marked("p", Markup(" ").join([*legend, marked("span", "thin line: 95 % interval")]), "legend"), _bars(run),
        Table.of(_figures(run.measured), COLUMNS["speed"], *first, best=best), marked("p", _of_loops(run), "note"),
    ]  # fmt: skip
    if unfinished := [(method.name, method.why) for method in run.methods if method.why]:
        parts += [marked("h3", "Methods without a full set of answers"), Facts(unfinished)]
    return parts


def _of_loops(run: BenchRun) -> str:
    said = [SAID["loops"]]
    if (plain := run.baseline) and plain.get("looping") is not None:
        by_task = ", ".join(f"{task} {percent(plain.get('looping', task))}" for task in run.tasks)
        of_tasks = f" ({by_task})" if len(run.tasks) > 1 else ""
        said.append(f"Of plain decoding's answers {percent(plain.get('looping'))} end in a loop{of_tasks}.")
        if run.loops:
            said.append('"Without" is the speed-up on the questions whose plain answer does not.')
    if plain and (short := plain.get("too_short")):
        said.append(f"{percent(short)} were cut off too early to tell whether they would have run into one.")
    return " ".join(said)


def _load(run: BenchRun) -> list[Part]:
    if not run.servers:
        return []
    engines = [f"{m.facts['settings']['engine']} {m.facts['settings']['version']}" for m in run.servers]
    positions = [" ".join(map(percent, m.get("accepted_by_position") or ())) for m in run.servers]
    first = _named(run.servers), ("engine", engines), ("accepted\nby position", positions)
    return [
        SAID["load"],
        *(marked("p", note, "note") for note in run.summary.get("notes") or ()),
        Table.of(_figures(run.servers), COLUMNS["load"], *first),
    ]


def _schedules(run: BenchRun) -> list[Part]:
    """Tokens per second by batch size, with a line for each drafter and schedule, and the cost of schedules. Empty if
    no schedules were compared."""
    by_batch = sorted(run.measured, key=lambda method: scheduled(method.rows[OVERALL])["batch"])
    if not any(method.get("scheduled") for method in by_batch):
        return []
    gains, lines = batch_speedups(_figures(by_batch)), dict[str, list[tuple[int, Method]]]()
    for method in by_batch:
        how = scheduled(method.rows[OVERALL])
        lines.setdefault(f"{how['drafter']} {how['schedule']}", []).append((how["batch"], method))
    curves = []
    for i, (name, of_name) in enumerate(lines.items()):
        points = [(batch, method.get("tokens_per_second")) for batch, method in of_name]
        tips = [f"{name}, batch {batch}: {number(speed, 1)} tokens/s" for batch, speed in points]
        curves.append(Curve(points, tips, [COLORS[i % len(COLORS)]] * len(points), name))
    sizes = sorted({batch for of_name in lines.values() for batch, _ in of_name})
    picture = plot(curves, "rows in a batch", "tokens a second", xs=sizes if len(sizes) > 1 else ())
    over = "over plain,\nsame batch", [number(gains.get(method.name)) for method in by_batch]
    return [
        Plots([("", picture)]),
        SAID["schedules"],
        Table.of(_figures(by_batch), COLUMNS["schedules"], _named(by_batch), over),
    ]


def _by_task(run: BenchRun) -> list[Part]:
    categories = [OVERALL, *run.tasks]
    best = {category: _best(run, category) for category in categories}

    def cell(m: Method, category: str) -> Markup:
        get = lambda figure: m.get(figure, category)  # noqa: E731
        identical = "" if m.kind == "plain" else f"{percent(get('identical'))} identical"
        tokens, spec = f"{number(get('tokens_per_second'), 1)}/s", f"Spec-Bench {number(get('speedup_spec_bench'))}"
        text = _cell(number(get("speedup")), _band(m, category), tokens, identical, spec)
        return marked("span", text, "best") if best[category] is m else text

    columns = [(category, [cell(method, category) for method in run.measured]) for category in categories]
    return [SAID["tasks"], Table.of(_figures(run.measured), "", _named(run.measured), *columns)]


def _lossless(run: BenchRun, differing: Sequence[tuple[Method, dict[str, Any]]]) -> list[Part]:
    parts: list[Part] = [SAID["sampled"]] if (run.about.get("options") or {}).get("temperature") else []
    if not differing:
        return parts
    verdicts = Counter(one["verdict"] for _, one in differing)
    plural = {verdict: "s" if verdicts[verdict] > 1 and verdict in ("tie", "bug") else "" for verdict in verdicts}
    counted = ", ".join(f"{count} {verdict}{plural[verdict]}" for verdict, count in verdicts.items())
    ordered = sorted(differing, key=lambda each: str(each[1]["verdict"]))
    rows = [{**d, "turn": d["turn"] + 1, "at": d["at"] + 1} for _, d in ordered]
    marks = [marked("span", "bug", "tag no") if d["verdict"] == "bug" else d["verdict"] for d in rows]
    columns = "question = question; repeat = repeat; turn = turn; token = at; gap = gap:4; rounding = noise:4"
    table = Table.of(rows, columns, _named([method for method, _ in ordered]), ("verdict", marks))
    summary = f"Where answers part from plain decoding: {counted}"
    return [*parts, Folded(summary, [SAID["differing"], table], open="bug" in verdicts)]


def _accepted(run: BenchRun) -> list[Part]:
    drawn = [(_name(method), of) for method in run.measured if (of := _depths(method, run.measured))]
    return [SAID["accepted"], Plots(drawn, small=True)] if drawn else []


def _depths(method: Method, others: Sequence[Method]) -> Markup:
    """Plot the share of drafts accepted to each depth, of those that reach it. Other methods' lines are faint."""
    if not (shares := method.get("accepted_by_depth")):
        return Markup("")
    found = [other.get("accepted_by_depth") for other in others if other is not method]
    faint = [by_depth(accepted, "", FAINT) for accepted in found if accepted]
    line = by_depth(shares, method.label, method.color)
    label = f"Accepted by depth, {method.label}"
    return plot([*faint, line], frame=SMALL, xs=(1, 4, 8, 12, DEEPEST), ys=(0, 50, 100), label=label)


def _times(run: BenchRun) -> list[Part]:
    """Waits and memory, and the time of a round by part if known."""
    told = [row | {"all_ms": sum(row["parts_ms"].values())} for row in _figures(run.measured) if row.get("parts_ms")]
    parts = dict.fromkeys(part for row in told for part in row["parts_ms"])
    columns = "".join(f"{part}, ms = parts_ms.{part}:3; " for part in parts) + "all, ms = all_ms:3"
    named = _named([method for method in run.measured if method.get("parts_ms")])
    waits = Table.of(_figures(run.measured), COLUMNS["times"], _named(run.measured))
    return [waits, marked("h3", "A round, by part"), Table.of(told, columns, named)] if told else [waits]


def _environment(run: BenchRun, suite: dict[str, Any]) -> list[Part]:
    seen, options = run.about.get("environment") or {}, run.about.get("options")
    about = {"model": run.about.get("model"), "suite": words(suite)} | ({"options": words(options)} if options else {})
    for key, value in seen.items():
        if value is not None and key != "command":
            of_bytes = key.endswith("_bytes")
            about[key.removesuffix("_bytes").replace("_", " ")] = size(value) if of_bytes else words(value)
    settings = []
    for method in run.methods:
        facts = method.facts
        sizes = {"target": facts.get("target_bytes"), "draft model": facts.get("draft_bytes")}
        own = [words(facts["settings"]) if facts.get("settings") else DASH] if facts else []
        own += [f"{name} {size(count)}" for name, count in sizes.items() if count]
        settings += [(method.name, "; ".join(own))] if facts else []
    command = [marked("p", marked("code", seen["command"]))] if seen.get("command") else []
    return [*command, Facts([*about.items()]), Folded("Settings of each method", [Facts(settings)])]
