"""A run in words: sentences for the report page, and a Markdown table for a README.

print(markdown(read_run(Path("out/run"))))
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bench.words import interval, number, percent, words
from paceline.pages.bench_run import BenchRun


def headline(run: BenchRun) -> str:
    """What won, in a sentence."""
    ranked = run.ranked
    if not ranked:
        return "No method could be compared with plain decoding"
    best = ranked[0]
    gain = best.get("speedup")
    if gain <= 1:
        return "No method was faster than plain decoding"
    return f"{best.label} answers {number(gain)} times as fast as plain decoding"


def findings(run: BenchRun) -> list[str]:
    """How sure that is, and who comes next: whole sentences."""
    ranked = run.ranked
    if not ranked:
        return []
    best, sentences = ranked[0], []
    low, high = best.get("speedup_low"), best.get("speedup_high")
    if low is not None and high is not None:
        doubt = "; it includes 1, so no gain is shown" if low <= 1 < best.get("speedup") else ""
        sentences.append(f"The 95 % interval of {best.label} is {interval(low, high)}{doubt}.")
        level = [m.label for m in ranked[1:] if (m.get("speedup_high") or 0.0) >= low]
        if level:
            sentences.append(f"Intervals that overlap with it: {', '.join(level)}.")
    else:
        sentences.append("There are too few answers for an interval.")
    peers = [method for method in ranked if method.kind == "peer"]
    if peers and peers[0] is not best:
        sentences.append(f"The fastest peer is {peers[0].label} with {number(peers[0].get('speedup'))}.")
    elif peers and (ours := [method for method in ranked if method.kind == "ours"]):
        gain = number(ours[0].get("speedup"))
        sentences.append(f"It is a peer; the fastest of our own is {ours[0].label} with {gain}.")
    unranked = [f"{m.label} ({'failed' if m.failed else 'lossy'})" for m in run.measured if m.failed or not m.lossless]
    if unranked:
        sentences.append(f"Not ranked: {', '.join(unranked)}.")
    return sentences


def setting(run: BenchRun) -> str:
    """What was run on what: one sentence without its stop."""
    suite, options = run.about.get("suite") or {}, run.about.get("options") or {}
    batch, temperature = options.get("batch") or 1, options.get("temperature") or 0
    repeats = options.get("repeats") or 1
    parts = [
        f"{len(run.measured)} methods on {suite.get('questions', 'the')} questions of {suite.get('name', 'a suite')}",
        f"model {model_name(run)}",
        f"at most {options['max_tokens']} tokens an answer" if options.get("max_tokens") else "",
        "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}",
        f"batches of {words(options['batches'])} requests"
        if options.get("schedules")
        else "one question at a time"
        if batch == 1
        else f"{batch} questions at a time",
        "each answered once" if repeats == 1 else f"each answered {repeats} times",
    ]
    return ", ".join(filter(None, parts))


def machine(run: BenchRun) -> str:
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


def model_name(run: BenchRun) -> str:
    return str(run.about.get("model_name") or run.about.get("model") or "unknown")


def markdown(run: BenchRun) -> str:
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
    lines += [str(run.about[fact]) for fact in ("tuned", "quantised", "as_large") if run.about.get(fact)]
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
