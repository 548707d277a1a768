"""The results on real models: their runs, one command for all of them, and the tables of docs/results.

    python benchmarks/results.py plan
    python benchmarks/results.py run build/results --minutes 24 --qwen FILE.gguf --smollm2 FILE.gguf --corpus TEXT ...
    python benchmarks/results.py collect build/results     # figures into docs/results/runs.json, tables into its pages
    python benchmarks/results.py table                     # those of README.md: the speed-ups of every target
    python benchmarks/results.py full                      # runs.md: every figure of every run

`run` goes through the runs, the most important first, each in a folder of its own. After --minutes it stops, and the
same command goes on. Naming runs takes those alone, --limit so many questions of each. A run whose peers are not
installed goes on without them; ask again when they are.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.report import machine, read_run, setting

RECORD = Path(__file__).parent.parent / "docs" / "results" / "runs.json"
BEGIN, END = "<!-- python benchmarks/results.py table -->\n", "<!-- end -->"
"""Around the table of README.md."""
FIGURES = (
    "answers", "speedup", "speedup_low", "speedup_high", "speedup_decode", "mean_accepted_tokens", "tokens_per_second",
    "tokens_per_second_decode", "identical", "looping", "speedup_without_loops", "repeated", "failed",
)  # fmt: skip
"""Of a method, in the record."""

COPYING = ("suffix", "sam", "prompt-lookup", "auto", "recycling,tree=16")
OTHERS = ("recycling", "ngram-pool", "hierarchy", "blend", "jacobi", "rest:{corpus}", "sam,corpus={corpus}")
LLAMA = ("llama-cpp:{model}", "llama-cpp-lookup:{model}")
KINDS = ("ngram-mod", "ngram-simple", "ngram-cache", "ngram-map-k", "ngram-map-k4v")
XLLAMA = ("xllamacpp:{model}", *(f"xllamacpp:{{model}},spec={kind}" for kind in KINDS))
HOSTS = ("transformers", "transformers-lookup", "vllm", "vllm-ngram")
SAMPLED = ("suffix", "sam", "prompt-lookup", "auto")
TARGETS = {
    "qwen-q4": ("qwen", "auto", "Qwen2.5-Coder-1.5B, Q4_K_M"),
    "smollm2": ("smollm2", "bfloat16", "SmolLM2-135M, bfloat16"),
    "qwen-bf16": ("qwen", "bfloat16", "Qwen2.5-Coder-1.5B, bfloat16"),
}
"""Option with the file, dtype and title."""
SUITES = {"spec-bench": "Spec-Bench", "humaneval": "HumanEval", "code-edits": "Code edits"}


@dataclass(frozen=True)
class Plan:
    """One run. minutes: about what it takes on two cores."""

    target: str
    suite: str
    questions: int
    methods: tuple[str, ...]
    peers: tuple[str, ...] = ()
    temperature: float = 0.0
    minutes: int = 0
    part: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, [self.target, self.suite, "sampled" if self.temperature else "", self.part]))


PLANS = (
    Plan("qwen-q4", "spec-bench", 60, COPYING, (*LLAMA, *XLLAMA[:3]), minutes=130),
    Plan("qwen-q4", "code-edits", 20, (*COPYING, "prediction"), (*LLAMA, *XLLAMA[:3]), minutes=45),
    Plan("smollm2", "spec-bench", 120, (*COPYING, *OTHERS), HOSTS, minutes=105),
    Plan("qwen-q4", "humaneval", 40, COPYING, (*LLAMA, *XLLAMA[:3]), minutes=70),
    Plan("smollm2", "code-edits", 20, (*COPYING, *OTHERS, "prediction"), HOSTS, minutes=20),
    Plan("smollm2", "humaneval", 40, (*COPYING, *OTHERS), HOSTS, minutes=35),
    Plan("qwen-q4", "spec-bench", 60, SAMPLED, LLAMA[:1] + XLLAMA[:2], 0.7, minutes=90),
    Plan("smollm2", "spec-bench", 120, SAMPLED, (*HOSTS[:2], "vllm"), 0.7, minutes=55),
    Plan("qwen-bf16", "spec-bench", 60, COPYING, HOSTS, minutes=210),
    Plan("qwen-q4", "spec-bench", 30, OTHERS, XLLAMA, part="more", minutes=85),
    Plan("qwen-q4", "code-edits", 20, (*SAMPLED, "prediction"), LLAMA[:1] + XLLAMA[:2], 0.7, minutes=35),
    Plan("qwen-q4", "code-edits", 20, OTHERS, XLLAMA, part="more", minutes=50),
    Plan("qwen-q4", "humaneval", 40, SAMPLED, LLAMA[:1] + XLLAMA[:2], 0.7, minutes=50),
    Plan("smollm2", "code-edits", 20, (*SAMPLED, "prediction"), (*HOSTS[:2], "vllm"), 0.7, minutes=10),
    Plan("smollm2", "humaneval", 40, SAMPLED, (*HOSTS[:2], "vllm"), 0.7, minutes=20),
    Plan("qwen-bf16", "code-edits", 20, (*COPYING, "prediction"), HOSTS, minutes=75),
    Plan("qwen-bf16", "humaneval", 40, COPYING, HOSTS, minutes=125),
    Plan("qwen-bf16", "spec-bench", 60, SAMPLED, (*HOSTS[:2], "vllm"), 0.7, minutes=170),
)


# Running ---------------------------------------------------------------------------------------------------------


def run(asked: argparse.Namespace) -> int:
    """Run what is asked for until the time is up; 0: all of it is whole."""
    until = time.monotonic() + 60 * asked.minutes
    status = 0
    for plan in PLANS:
        if asked.runs and plan.name not in asked.runs:
            continue
        if time.monotonic() > until - 30:
            print(f"the time is up before {plan.name}; the same command goes on", flush=True)
            return 130
        code = _interruptible(command(plan, asked), until)
        print(f"{plan.name}: {'whole' if code == 0 else f'exit status {code}'}", flush=True)
        if code == 130:
            return code
        status = status or code
    return status


def _interruptible(words: Sequence[str], until: float) -> int:
    """The exit status of a command, which is interrupted when the time is up; 130: it was, and can go on."""
    with subprocess.Popen(words) as process:
        try:
            return process.wait(max(until - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass  # the terminal sent it to both
        process.wait()
        return 130


def command(plan: Plan, asked: argparse.Namespace) -> list[str]:
    """`paceline bench` for a run."""
    option, dtype, _ = TARGETS[plan.target]
    model = getattr(asked, option)
    methods = plan.methods
    if any("{corpus}" in method for method in methods):
        methods = methods if asked.corpus else tuple(method for method in methods if "{corpus}" not in method)
    names = {"model": model, "corpus": _corpus(asked, option, model) if asked.corpus else ""}
    words = [sys.executable, "-m", "paceline", "bench", model, "--dtype", dtype, "-n", str(asked.max_tokens)]
    words += ["--warm-up", "1"]
    words += ["--suite", getattr(asked, plan.suite.replace("-", "_")), "--out", str(asked.out / plan.name)]
    words += ["--limit", str(min(plan.questions, asked.limit or plan.questions)), "-t", str(plan.temperature)]
    words += [word for method in methods for word in ("-d", method.format(**names))]
    words += [word for peer in plan.peers for word in ("--peer", peer.format(**names))]
    return words + (["--peer-python", asked.peer_python] if asked.peer_python else [])


def _corpus(asked: argparse.Namespace, option: str, model: str) -> Path:
    """The store of texts that `rest` and `sam,corpus=` read, in the model's tokens; built the first time."""
    store: Path = asked.out / f"corpus-{option}"
    if not (store / "store.json").exists():
        words = [sys.executable, "-m", "paceline", "corpus", "build", str(store), "--tokenizer", model]
        subprocess.run([*words, *(word for text in asked.corpus for word in ("--text", text))], check=True)
    return store


# The record ------------------------------------------------------------------------------------------------------


def collect(out: Path) -> None:
    """Write the record, of every run in `out` that has figures what the tables show; and the tables into the pages."""
    record = {}
    for plan in PLANS:
        if not (out / plan.name / "summary.json").exists():
            continue
        found = read_run(out / plan.name)
        record[plan.name] = {
            "target": plan.target,
            "suite": plan.suite,
            "temperature": plan.temperature,
            "setting": setting(found),
            "machine": machine(found),
            "complete": found.complete,
            "notes": [*found.summary.get("disturbed", ()), *filter(None, [found.summary.get("repeated")])],
            "tasks": found.tasks,
            "methods": {label(m.name): _facts(m, found.tasks) for m in found.methods},
        }
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in record.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")  # a line a run
    page, every = RECORD.with_name("README.md"), RECORD.with_name("runs.md")
    before, after = page.read_text("utf-8").split(BEGIN)[0], page.read_text("utf-8").split(END)[1]
    page.write_text("".join([before, BEGIN, *(f"{line}\n" for line in speedups(record)), END, after]), "utf-8")
    every.write_text("\n".join(full(record)) + "\n", "utf-8")
    print(f"{RECORD} holds {len(record)} of {len(PLANS)} runs")


def _facts(method: Any, tasks: Sequence[str]) -> dict[str, Any]:
    facts = {name: _rounded(method.get(name)) for name in FIGURES}
    facts["failed"] = method.unavailable or method.failed
    facts["by_task"] = {task: _rounded(method.get("speedup", task)) for task in tasks}
    facts["differs"] = dict(Counter(one["verdict"] for one in method.get("differs") or ()))
    return facts


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def label(method: str) -> str:
    """A method's name without the files that it reads."""
    return re.sub(r"[:=][^,:=]*/[^,]*", "", method)


# The tables ------------------------------------------------------------------------------------------------------


def speedups(record: dict[str, Any]) -> Iterator[str]:
    """For every target a table: methods over greedy suites; the speed-up, its interval, and tokens a round."""
    for target, (_, _, title) in TARGETS.items():
        runs = [one for one in record.values() if one["target"] == target and not one["temperature"]]
        suites = [suite for suite in SUITES if any(one["suite"] == suite for one in runs)]
        if not suites:
            continue
        of = {suite: _joined(one for one in runs if one["suite"] == suite) for suite in suites}
        methods = dict.fromkeys(method for suite in suites for method in of[suite])
        first = of[suites[0]]
        ranked = sorted(methods, key=lambda method: -(first.get(method, {}).get("speedup") or 0))
        yield f"| {title} | {' | '.join(SUITES[suite] for suite in suites)} |"
        yield "|---|" + "---:|" * len(suites)
        for method in ranked:
            yield f"| `{method}` | {' | '.join(_speedup(of[suite].get(method)) for suite in suites)} |"
        yield ""


def _joined(runs: Iterator[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Methods of runs of one suite, each by the first run that has it."""
    joined: dict[str, dict[str, Any]] = {}
    for one in runs:
        for method, facts in one["methods"].items():
            joined.setdefault(method, facts)
    return joined


def _speedup(facts: dict[str, Any] | None) -> str:
    """1.19 (1.13 to 1.25), 1.38 a round."""
    if not facts or facts["speedup"] is None:
        return ""
    text = f"{facts['speedup']:.2f}"
    if facts["speedup_low"] is not None and facts["speedup_low"] != facts["speedup_high"]:
        text += f" ({facts['speedup_low']:.2f} to {facts['speedup_high']:.2f})"
    tokens = facts["mean_accepted_tokens"]
    return text if tokens is None else f"{text}, {tokens:.2f} a round"


def full(record: dict[str, Any]) -> Iterator[str]:
    """Every run: one line a method."""
    yield "# Every run"
    yield ""
    yield "<!-- Written by `python benchmarks/results.py full`; do not edit by hand. -->"
    yield "What the columns mean: [figures](../metrics.md). [The results in short](README.md)."
    for name, one in record.items():
        yield ""
        yield f"## {name}"
        yield ""
        yield f"{one['setting']}; {one['machine']}.{'' if one['complete'] else ' Not complete.'}"
        yield from one["notes"]
        yield ""
        heads = ["method", "speed-up (95 %)", "without prompts", "mean accepted", "tokens/s", "without prompts"]
        heads += ["identical", "loop", "speed-up without loops", *one["tasks"]]
        yield f"| {' | '.join(heads)} |"
        yield "|---|" + "---:|" * (len(heads) - 1)
        for method, facts in one["methods"].items():
            if facts["speedup"] is None:
                yield f"| `{method}` | {facts['failed']} |{' |' * (len(heads) - 2)}"
                continue
            cells = [_speedup({**facts, "mean_accepted_tokens": None})]
            cells += [_number(facts[key], 2) for key in ("speedup_decode", "mean_accepted_tokens")]
            cells += [_number(facts[key], 1) for key in ("tokens_per_second", "tokens_per_second_decode")]
            cells += ["" if facts[key] is None else f"{facts[key]:.0%}" for key in ("identical", "looping")]
            cells += [_number(facts["speedup_without_loops"], 2) if facts["looping"] else ""]
            cells += [_number(facts["by_task"].get(task), 2) for task in one["tasks"]]
            yield f"| `{method}` | {' | '.join(cells)} |"


def _number(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"


def main(words: Sequence[str] | None = None) -> int:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("out", type=Path)
    running.add_argument("runs", nargs="*", metavar="RUN", help="names of the plan, right after OUT; none: all")
    running.add_argument("--minutes", type=float, default=24.0)
    running.add_argument("--limit", type=int, help="questions of each run, to try it out")
    running.add_argument("--max-tokens", type=int, default=128)
    running.add_argument("--qwen", default="qwen2.5-coder-1.5b-instruct-Q4_K_M.gguf")
    running.add_argument("--smollm2", default="smollm2")
    running.add_argument("--spec-bench", default="spec-bench")
    running.add_argument("--humaneval", default="humaneval")
    running.add_argument("--code-edits", default="code-edits")
    running.add_argument("--corpus", nargs="*", default=[], help="texts for rest and sam,corpus=")
    running.add_argument("--peer-python", help="as for paceline bench: vllm=PATH,xllamacpp=PATH")
    commands.add_parser("collect").add_argument("out", type=Path)
    for name in ("plan", "table", "full"):
        commands.add_parser(name)
    asked = parser.parse_args(words)
    if asked.command == "run":
        return run(asked)
    if asked.command == "collect":
        collect(asked.out)
    elif asked.command == "plan":
        for plan in PLANS:
            print(f"{plan.name:34} {plan.questions:4} questions, about {plan.minutes} minutes")
    else:
        record = json.loads(RECORD.read_text("utf-8"))
        print("\n".join({"table": speedups, "full": full}[asked.command](record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
