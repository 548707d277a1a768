"""The pictures of README and docs, drawn from docs/results/runs.json: one SVG each, light and dark, legible on a phone.

    python benchmarks/pictures.py    # all of them, from docs/results/runs.json into docs/pictures
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import chain
from math import ceil, log2
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
RUNS, OUT = DOCS / "results" / "runs.json", DOCS / "pictures"
HEAD = DOCS.parent / "models" / "smollm2-eagle3"
PUBLISHED = Path(__file__).with_name("published.toml")
WIDTH = 420  # units of a picture; a phone shows nearly one pixel for each
STYLE = """text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: 13px }
.small { font-size: 10.5px; fill: #59636e } .bar { fill: #8c959f } .ours { fill: #0969da } .best { fill: #1a7f37 }
.line { stroke: #59636e; fill: none } .grid { stroke: #d1d9e0; stroke-width: .7 } .on { fill: #fff }
.s0 { stroke: #59636e; fill: #59636e } .s1 { stroke: #0969da; fill: #0969da } .s2 { stroke: #1a7f37; fill: #1a7f37 }
.s3 { stroke: #9a6700; fill: #9a6700 } polyline { fill: none !important; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .small { fill: #9198a1 } .bar { fill: #656c76 }
.ours { fill: #1f6feb } .best { fill: #2ea043 } .line { stroke: #9198a1 } .grid { stroke: #3d444d }
.s0 { stroke: #9198a1; fill: #9198a1 } .s1 { stroke: #4493f8; fill: #4493f8 } .s2 { stroke: #3fb950; fill: #3fb950 }
.s3 { stroke: #d29922; fill: #d29922 } }"""

Shapes = Iterable[str]


def svg(height: float, title: str, shapes: Shapes) -> str:
    """A whole picture; `title` is its first line and what is read aloud."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="640" role="img"'
    inside = "\n".join([text(8, 18, title, "title"), *shapes])
    return f'{head} aria-label="{escape(title)}">\n<style>{STYLE}</style>\n{inside}\n</svg>\n'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str = "", fill: str = "") -> str:
    paint = f'style="fill:{fill}"' if fill else f'class="{kind}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="2" {paint}/>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{kind}"/>'


def drawn(height: float, title: str, shapes: Shapes, words: str) -> str:
    """A picture with a caption below, which is broken into lines."""
    lines = textwrap.wrap(words, 74)
    below = [text(8, height + 14 * i, line, "small") for i, line in enumerate(lines)]
    return svg(height + 14 * len(lines), title, [*shapes, *below])


def newest(record: dict[str, Any]) -> dict[str, Any]:
    """Of every run of the plan the newest, with the methods that only an earlier day of that processor has. AVX2 counts
    only where there is no other level, and of a day AVX-512 counts, because llama.cpp was not built for AMX. Those of a
    certain level are there as LEVEL/NAME, too."""
    found: dict[tuple[str, str], Any] = {}
    for name, run in sorted(record.items(), key=lambda item: item[1]["date"]):
        key = name.split("/")[-1].split("@")[0], run["level"]
        found[key] = run | {"of_day": run["methods"], "methods": found.get(key, run)["methods"] | run["methods"]}

    def place(run: dict[str, Any]) -> tuple[bool, str, bool]:
        return run["level"] != "avx2", run["date"], run["level"] != "amx"

    ordered = sorted(found.items(), key=lambda item: place(item[1]))
    return {f"{level}/{plan}": run for (plan, level), run in ordered} | {plan: run for (plan, _), run in ordered}


def on(run: dict[str, Any]) -> str:
    """The processor of a run, and its day."""
    return f"two cores of {run['machine'].split(',')[0]}, {run['date']}"


# The pictures


def hero(runs: dict[str, Any]) -> str:
    """Tokens a second on code edits, plain and drafted, here and in llama.cpp, with intervals of 95 %."""
    run = runs["qwen-q4-code-edits"]
    methods = run["methods"]
    names = {"none": "Paceline, plain", "prompt-lookup": "Paceline, prompt-lookup", "suffix": "Paceline, suffix"}
    hosts = ("peer:llama-server", "peer:llama-cpp", "peer:xllamacpp")
    host = next(name for name in hosts if methods.get(name, {}).get("speedup"))
    peers = [name for name in methods if name.startswith((f"{host},", f"{host}-")) and methods[name]["speedup"]]
    names[host] = "llama.cpp, plain"
    drafted = max(peers, key=lambda name: methods[name]["speedup"])
    names[drafted] = f"llama.cpp, {'prompt lookup' if host == 'peer:llama-cpp' else drafted.split('=')[-1]}"
    plain = methods["none"]["tokens_per_second"]
    most = max(plain * (methods[name]["speedup_high"] or methods[name]["speedup"]) for name in names)
    shapes, y = [], 34.0
    for name, label in names.items():
        one = methods[name]
        left, scale = 170.0, (WIDTH - 215) / most
        bounds = (one[bound] or one["speedup"] for bound in ("speedup_low", "speedup_high"))
        low, high = (left + plain * bound * scale for bound in bounds)
        kind = "best" if name == "suffix" else "bar" if name.startswith("peer") else "ours"
        shapes += [text(8, y + 13, label), rect(left, y, one["tokens_per_second"] * scale, 18, kind),
                   f'<path d="M{low:.1f} {y + 9}H{high:.1f}" class="line"/>',
                   text(high + 6, y + 13, f"{one['tokens_per_second']:.1f}")]  # fmt: skip
        y += 25
    words = (
        f"{methods['none']['answers']} code edits, Qwen2.5-Coder-1.5B in Q4_K_M, {on(run)}, greedy, prompts included; "
        + ("llama.cpp's server with its best drafts, from a wheel that uses AVX2 alone." if host == hosts[-1] else
           f"llama.cpp is built for this processor{', but for its AMX' * (run['level'] == 'amx')}.")
        + " Lines are 95 % intervals." * (methods["suffix"]["speedup_low"] is not None)
    )
    return drawn(y + 12, "Tokens a second on code edits", shapes, words)


def shade(speedup: float) -> str:
    """Blue above 1, red below, white at 1."""
    strength = min(abs(speedup - 1) / (1.2 if speedup > 1 else 0.6), 1)
    end = (9, 105, 218) if speedup > 1 else (207, 34, 46)
    return "#" + "".join(f"{round(245 + (part - 245) * strength):02x}" for part in end)


def heat(runs: dict[str, Any]) -> str:
    """Speed-ups of methods by task."""
    spec = runs["qwen-q4-spec-bench"]
    level = spec["level"]
    others = {"HumanEval": f"{level}/qwen-q4-humaneval", "edits": f"{level}/qwen-q4-code-edits"}
    others = {name: run for name, run in others.items() if run in runs}
    columns = [*spec["tasks"], *others]
    names = [name for name in spec["of_day"] if name != "none" and "by_task" in spec["methods"][name]]
    left, wide, shapes = 142.0, (WIDTH - 150) / len(columns), []
    short = {
        "mt-bench": "chat",
        "translation": "trans",
        "summarization": "summ",
        "math_reasoning": "math",
        "HumanEval": "code",
    }
    for i, column in enumerate(columns):
        shapes.append(text(left + (i + 0.5) * wide, 40, short.get(column, column), "small", "middle"))
    for row, name in enumerate(names):
        y = 46 + row * 22
        label = name.removeprefix("peer:").replace(",spec=", " ").replace(",tree=16", "").replace(",tokens=10", "")
        shapes.append(text(8, y + 15, label, "small" if name.startswith("peer") else ""))
        for i, column in enumerate(columns):
            if column in others:
                value = runs[others[column]]["methods"].get(name, {}).get("speedup")
            else:
                value = spec["methods"][name]["by_task"].get(column)
            if value is None:
                continue
            x = left + i * wide
            shapes.append(rect(x, y, wide - 2, 20, fill=shade(value)))
            colour = "#fff" if abs(value - 1) > (0.8 if value > 1 else 0.4) else "#1f2328"
            shapes.append(f'<text x="{x + wide / 2 - 1:.1f}" y="{y + 14:.1f}" text-anchor="middle" '
                          f'style="fill:{colour};font-size:10.5px">{value:.2f}</text>')  # fmt: skip
    wheel = " (xllamacpp: AVX2 alone)" * any("xllamacpp" in name for name in names)
    end, code = 46 + len(names) * 22, "; code is HumanEval" * ("HumanEval" in columns)
    words = (
        f"Qwen2.5-Coder-1.5B in Q4_K_M, speed over our plain decoding, prompts included{code}; the grey rows are "
        f"llama.cpp{wheel}. Blue gains, red loses. {on(spec)}"
    )
    return drawn(end + 14, "Where drafts pay: methods by task", shapes, words)


def axes(
    x_most: float, y_least: float, y_most: float, x_ticks: Sequence[float], y_ticks: Sequence[float],
    x_name: Callable[[float], str] = "{:g}".format,
) -> Any:  # fmt: skip
    """A frame of 340 x 190 units; two functions that place a value, and the shapes of the axes. x_name: of a tick."""

    def across(value: float) -> float:
        return 48 + (value - x_ticks[0]) / (x_most - x_ticks[0]) * 340

    def down(value: float) -> float:
        return 230 - (value - y_least) / (y_most - y_least) * 190

    shapes = [f'<path d="M48 {down(tick):.1f}H388" class="grid"/>' for tick in y_ticks]
    shapes += [text(42, down(tick) + 4, f"{tick:g}", "small", "end") for tick in y_ticks]
    shapes += [text(across(tick), 246, x_name(tick), "small", "middle") for tick in x_ticks]
    return across, down, shapes


def tokens(runs: dict[str, Any]) -> str:
    """Tokens a round against speed: a dot for each method and run of our own."""
    x, y, shapes = axes(6.5, 0, 3.5, (1, 2, 3, 4, 5, 6), (0, 0.5, 1, 1.5, 2, 2.5, 3))
    for name, run in runs.items():
        if not name.startswith(("qwen-q4", "smollm2-q4")) or run["temperature"] or run["batch"] > 1:
            continue
        kind = "s1" if name.startswith("qwen") else "s3"
        for method, one in run["methods"].items():
            if not method.startswith("peer") and one.get("speedup") and method != "none":
                at = x(one["mean_accepted_tokens"]), y(one["speedup"])
                shapes.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3.4" class="{kind}" fill-opacity=".6"/>')
    shapes.append(path([(x(1), y(1)), (x(3.5), y(3.5))], "grid"))
    shapes.append(text(x(3.55), y(3.42), "as many tokens, as fast", "small"))
    shapes += [text(390, 262, "mean accepted tokens a round", "small", "end"), text(8, 34, "speed over plain", "small")]
    words = (
        "Blue: Qwen2.5-Coder in Q4_K_M, yellow: SmolLM2 in Q4_1; a dot for each method and suite. "
        "What lies below the line pays for its drafts in time."
    )
    return drawn(280, "Tokens are not speed", shapes, words)


def batches(runs: dict[str, Any]) -> str:
    """Speed-up against the number of requests at once."""
    chosen = (run for name, run in runs.items() if name.startswith("smollm2-q4-spec") and not run["temperature"])
    of = {run["batch"]: run for run in chosen}
    sizes, names = sorted(of), ("none", "sam", "suffix", "auto")
    speeds = {name: [of[size]["methods"][name]["speedup"] for size in sizes] for name in names}
    most = max(1.4, *(speed for row in speeds.values() for speed in row))
    x, y, shapes = axes(len(sizes) - 1, 0.6, most + 0.1, range(len(sizes)), (0.6, 0.8, 1, 1.2, 1.4))
    shapes = [one for one in shapes if 'y="246.0"' not in one]
    shapes += [text(x(i), 246, str(size), "small", "middle") for i, size in enumerate(sizes)]
    for row, (name, values) in enumerate(speeds.items()):
        key = path([(280, 44 + 15 * row), (294, 44 + 15 * row)], f"s{row}")
        points = [(x(i), y(value)) for i, value in enumerate(values)]
        shapes += [path(points, f"s{row}"), text(300, 48 + 15 * row, name), key]
    shapes += [text(390, 262, "requests at once", "small", "end"), text(8, 34, "speed over plain", "small")]
    words = (
        "SmolLM2-135M in Q4_1, Spec-Bench, greedy, drafts as much as pays, "
        f"{on(of[1])}; {of[1]['methods']['none']['answers']} to {of[sizes[-1]]['methods']['none']['answers']} answers."
    )
    return drawn(280, "What is left of it in a batch", shapes, words)


def papers(rows: Sequence[dict[str, Any]], runs: dict[str, Any]) -> str:
    """Published speed-ups beside ours, one row a paper."""
    left, scale, shapes, y = 128.0, (WIDTH - 150) / 4, [], 46.0
    shapes += [text(left + t * scale, 38, f"{t}", "small", "middle") for t in range(5)]
    for row in rows:
        run, method = row["ours"]
        here, there = (left + s * scale for s in (runs[run]["methods"][method]["speedup"], row["reported"]))
        shapes += [text(8, y + 4, row["name"]), f'<path d="M{here:.1f} {y}H{there:.1f}" class="grid"/>',
                   f'<circle cx="{there:.1f}" cy="{y}" r="4.5" class="bar"/>',
                   f'<circle cx="{here:.1f}" cy="{y}" r="4.5" class="ours"/>']  # fmt: skip
        y += 21
    shapes.append(f'<path d="M{left + scale:.1f} 42V{y - 8:.0f}" class="line" stroke-dasharray="3 3"/>')
    words = (
        "Speed over plain decoding: grey as published (GPUs, 7B to 14B), blue here (two CPU cores, "
        "heads SmolLM2-135M, copies Qwen2.5-Coder-1.5B). docs/papers.md says why they differ."
    )
    return drawn(y + 8, "Published and measured", shapes, words)


def training(runs: dict[str, Any]) -> str:
    """What heads have read against the tokens a round that they bring, one dot a head."""
    run = runs["smollm2-heads-spec-bench-whole"]
    dots: dict[str, tuple[float, float]] = {}
    for method, one in run["cards"].items():
        tokens = run["methods"].get(method, {}).get("mean_accepted_tokens")
        if tokens and one["tokens"]:
            name = one["folder"].removeprefix("smollm2-")
            dots[name] = max(dots.get(name, (0.0, 0.0)), (one["tokens"] / 1e6, tokens), key=lambda dot: dot[1])
    most, top = ceil(max(read for read, _ in dots.values())), ceil(5 * max(tokens for _, tokens in dots.values()))
    x, y, shapes = axes(most, 1, top / 5, range(most + 1), [fifth / 5 for fifth in range(5, top + 1)])
    below = 0.0
    for name, (read, tokens) in sorted(dots.items(), key=lambda dot: -dot[1][1]):
        across, down = x(read), y(tokens)
        label = below = max(down, below + 11) if across < 150 else down
        shapes += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" class="s1"/>', text(across + 8, label + 4, name)]
    shapes += [text(390, 262, "million tokens read in training", "small", "end")]
    shapes += [text(8, 34, "mean accepted tokens a round", "small")]
    words = f"Drafters of SmolLM2-135M in bfloat16; Spec-Bench, greedy, {on(run)}."
    return drawn(280, "What heads have read, and what they bring", shapes, words)


def curve() -> str:
    """What eagle3's head of `models/` brought while it was trained, over the tokens that it had read."""
    rows = [json.loads(line) for line in (HEAD / "training.jsonl").read_text("utf-8").splitlines()]
    seen = [(row["tokens"] / 1e6, row["expected"]) for row in rows if row.get("expected") and row["tokens"]]
    ticks, most = range(-2, ceil(log2(seen[-1][0])) + 1), ceil(2 * max(max(one.values()) for _, one in seen)) / 2
    y_ticks = [half / 2 for half in range(2, int(2 * most) + 1)]
    x, y, shapes = axes(ticks[-1], 1, most, ticks, y_ticks, lambda power: f"{2.0**power:g}")
    for kind, name, label, below in (("s1", "tokens", "a chain of 5", 40), ("s2", "tree", "a tree of 16", -18)):
        lines, before = list[list[tuple[float, float]]](), 0.0
        for read, one in ((read, one) for read, one in seen if name in one):
            if read == before or not lines:  # Measured again, on other answers.
                lines.append([])
            lines[-1].append((x(log2(read)), y(one[name])))
            before = read
        shapes += [path(points, kind) for points in lines]
        shapes += [f'<circle cx="{at:.1f}" cy="{down:.1f}" r="2.5" class="{kind}"/>' for at, down in chain(*lines)]
        if lines:
            shapes += [text(lines[-1][-1][0], lines[-1][-1][1] + below, label, "small", "end")]
    shapes += [text(390, 262, "million tokens read in training, each line twice the one before", "small", "end")]
    shapes += [text(8, 34, "tokens a round on held-out answers", "small")]
    words = (
        "EAGLE-3's head for SmolLM2-135M while it is trained. Held-out answers are other ones from 2.0 million on, "
        "and from 4.4 on, where both are measured."
    )
    return drawn(280, "What more training brings", shapes, words)


def main() -> None:
    runs = newest(json.loads(RUNS.read_text("utf-8")))
    OUT.mkdir(exist_ok=True)
    for draw in (hero, heat, tokens, batches, training):
        (OUT / f"{draw.__name__}.svg").write_text(draw(runs), "utf-8")
    (OUT / "curve.svg").write_text(curve(), "utf-8")
    (OUT / "papers.svg").write_text(papers(tomllib.loads(PUBLISHED.read_text("utf-8"))["picture"], runs), "utf-8")


if __name__ == "__main__":
    main()
