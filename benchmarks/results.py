"""The results on real models: their runs, one command for all of them, and the tables of docs/results.

    python benchmarks/results.py plan
    python benchmarks/results.py run build/results --qwen FILE.gguf --smollm2 FILE.gguf
    python benchmarks/results.py collect build/results     # figures into docs/results/runs.json, tables into its pages
    python benchmarks/results.py table                     # those of README.md: the speed-ups of every target
    python benchmarks/results.py full                      # runs.md: every figure of every run
    python benchmarks/results.py heads                     # heads.md: trained drafters beside their papers
    python benchmarks/results.py again                     # rows that ran on a second day beside the first
    python benchmarks/results.py gpu build/gpu             # gpu.md: what benchmarks/gpu.py measured in that folder

`run` goes through the runs, the most important first, each in a folder of its own. Ctrl-C (`timeout -s INT 24m`) stops
it, and the same command goes on. Naming runs takes those alone, --limit so many questions of each. A run whose peers
are not installed, or whose trained drafters are not there, goes on without them; ask again when they are.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from paceline.bench.metrics import speedup, speedup_interval, tokens_per_second
from paceline.bench.record import ANSWERS, Answer, good, read_answers
from paceline.bench.report import describe, read_run
from paceline.draft.spec import parse, split
from paceline.formats.folder import fingerprint
from paceline.peers import PEER

RECORD = Path(__file__).parent.parent / "docs" / "results" / "runs.json"
PUBLISHED = Path(__file__).with_name("published.toml")
BEGIN, END = "<!-- python benchmarks/results.py table -->\n", "<!-- end -->"
"""Around the table of README.md."""
FIGURES = (
    "answers", "speedup", "speedup_low", "speedup_high", "speedup_decode", "mean_accepted_tokens", "tokens_per_second",
    "tokens_per_second_decode", "identical", "looping", "speedup_without_loops", "failed",
)  # fmt: skip
"""Of a method, in the record."""

COPYING = ("suffix", "sam", "prompt-lookup", "auto")
OTHERS = ("hierarchy", "recycling", "ngram-pool", "jacobi")
_SERVED = "{llama_server} -m {model} -c 8192 --parallel 1 --no-cache-prompt --cache-ram 0 --port {{port}}"
NATIVE = (_SERVED, f"{_SERVED} --spec-type ngram-mod")
"""llama.cpp's server as its own build makes it for the processor, plainly and with the best of its n-gram drafts."""
WHEEL = ("xllamacpp:{model}", "xllamacpp:{model},spec=ngram-mod")
"""The same server as a wheel, which uses AVX2 alone: where none was built."""
LLAMA = (*NATIVE, *WHEEL)
HOSTS = (*LLAMA, "transformers")
TRAINED = "smollm2-heads"
"""The target with its drafters."""
SHIPPED = ("eagle3", "medusa", "kangaroo")
"""Those of models/. The others are in --made, where zoo/smollm2.toml makes them."""
MADE = "build/smollm2"
VOCAB = "vocab={heads}/smollm2-vocab.safetensors"
"""The tokens over which all of them learn, but eagle3, which has as many of its own."""
EAGLE3, DFLASH, EAGLE, HYDRA, MEDUSA, AMPHISTA, KANGAROO, DRAFT = (
    f"{'model' if name == 'draft' else name}:{'{heads}/smollm2-' if name in SHIPPED else '{made}/'}{name}"
    for name in ("eagle3", "dflash", "eagle", "hydra", "medusa", "amphista", "kangaroo", "draft")
)
LENGTHS = (*(f"{DRAFT},stop=fixed,draft={length},{VOCAB}" for length in (1, 2, 3, 5)), f"{DRAFT},stop=svip,{VOCAB}")
CHAINS = (f"{KANGAROO},{VOCAB}", f"{MEDUSA},tree=benchmarks/chain-3.txt,{VOCAB}")
HEADS = (
    EAGLE3, DFLASH, f"{DFLASH},tree=0", *(f"{head},{VOCAB}" for head in (EAGLE, HYDRA, MEDUSA, AMPHISTA)), *CHAINS,
    *LENGTHS, f"{DRAFT},stop=svip", EAGLE, f"sam+{EAGLE3}", "sam", "suffix",
)  # fmt: skip
"""As papers draft: whole trees, however little they bring."""
PAYING = (
    EAGLE3, f"{EAGLE3},tree=0", f"{MEDUSA},{VOCAB}", f"{KANGAROO},{VOCAB}", "sam", "suffix",
    f"suffix+{EAGLE3},tree=0", f"sam+{EAGLE3}", "auto", f"auto:sam|suffix|{EAGLE3}",
)  # fmt: skip
"""As they run by default, with a budget: those that ship."""
CODER = "eagle3:{heads}/qwen-coder-eagle3"
"""Of `zoo/qwen-coder.toml`; it does not ship."""
OF_CODER = (CODER, f"{CODER},tree=0", f"suffix+{CODER}", "suffix", f"auto:suffix|{CODER}")
TARGETS = {
    "qwen-heads": ("qwen", "auto", "Qwen2.5-Coder-1.5B, Q4_K_M, an eagle3 head trained for it"),
    "qwen-q4": ("qwen", "auto", "Qwen2.5-Coder-1.5B, Q4_K_M"),
    "smollm2-q4": ("smollm2", "auto", "SmolLM2-135M, Q4_1"),
    TRAINED: ("smollm2", "bfloat16", "SmolLM2-135M, bfloat16, drafters trained for it"),
    "smollm2": ("smollm2", "bfloat16", "SmolLM2-135M, bfloat16"),
    "qwen-bf16": ("qwen", "bfloat16", "Qwen2.5-Coder-1.5B, bfloat16"),
}
"""Option with the file, dtype and title."""
LEVELS = {"avx512": "AVX-512", "amx": "AMX", "avx-vnni": "AVX-VNNI", "avx2": "AVX2", "neon": "Arm", "dotprod": "Arm"}
"""Titles of the levels of processors."""
SUITES = {"spec-bench": "Spec-Bench", "humaneval": "HumanEval", "code-edits": "Code edits", "demo": "Demo suite"}


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
    batch: int = 1
    budget: bool = True
    max_tokens: int | None = None

    @property
    def name(self) -> str:
        kind = "sampled" if self.temperature else f"b{self.batch}" if self.batch > 1 else "long" * bool(self.max_tokens)
        return "-".join(filter(None, [self.target, self.suite, kind, "" if self.budget else "whole"]))


PLANS = (
    Plan("qwen-q4", "code-edits", 12, (*COPYING, "prediction", "recycling"), LLAMA, minutes=20),
    Plan("qwen-q4", "spec-bench", 18, (*COPYING, "recycling"), LLAMA, minutes=30),
    Plan("smollm2-q4", "spec-bench", 36, (*COPYING, *OTHERS), HOSTS, minutes=20),
    Plan("qwen-q4", "humaneval", 12, COPYING, LLAMA, minutes=15),
    Plan(TRAINED, "spec-bench", 24, HEADS, minutes=12, budget=False),
    Plan(TRAINED, "spec-bench", 24, PAYING, minutes=8),
    Plan(TRAINED, "spec-bench", 6, LENGTHS, minutes=10, budget=False, max_tokens=1024),
    Plan("smollm2-q4", "code-edits", 12, (*COPYING, *OTHERS, "prediction"), HOSTS, minutes=8),
    Plan(TRAINED, "code-edits", 12, PAYING, minutes=5),
    Plan("qwen-heads", "spec-bench", 12, OF_CODER, (NATIVE[0], WHEEL[0]), minutes=25),
    Plan("qwen-heads", "spec-bench", 12, (CODER, f"suffix+{CODER}", "suffix"), temperature=0.7, minutes=8),
    Plan("qwen-heads", "humaneval", 12, (CODER, f"suffix+{CODER}", "suffix"), minutes=8),
    Plan("qwen-q4", "spec-bench", 9, COPYING, LLAMA, 0.7, minutes=8),
    Plan(TRAINED, "spec-bench", 24, PAYING, temperature=0.7, minutes=8),
    *(Plan("smollm2-q4", "spec-bench", 64, (*COPYING, "hierarchy"), batch=batch, minutes=6) for batch in (4, 8, 32)),
    Plan("smollm2-q4", "humaneval", 16, (*COPYING, *OTHERS), HOSTS, minutes=8),
    Plan(TRAINED, "humaneval", 16, PAYING, minutes=5),
    Plan("smollm2-q4", "spec-bench", 18, (*COPYING, "hierarchy"), LLAMA, 0.7, minutes=5),
)
"""The most telling first: together about three hours. Runs of before, which the record has too, asked for more."""


# Running ---------------------------------------------------------------------------------------------------------


def run(asked: argparse.Namespace) -> int:
    """Run what is asked for; the exit status of the last run that was not whole, or 0. Ctrl-C ends it, and the same
    command goes on."""
    status = 0
    for plan in PLANS:
        if not asked.runs or plan.name in asked.runs:
            code = call(command(plan, asked))
            print(f"{plan.name}: {'whole' if code == 0 else f'exit status {code}'}", flush=True)
            if code == 130:
                return code
            status = code or status
    return status


def call(words: Sequence[str]) -> int:
    """The exit status of a command. Ctrl-C reaches it, too, and it ends with what it has."""
    with subprocess.Popen(words) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            return child.wait()


def command(plan: Plan, asked: argparse.Namespace) -> list[str]:
    """`paceline bench` for a run."""
    option, dtype, _ = TARGETS[plan.target]
    model = getattr(asked, option)
    names = {"model": model, "heads": asked.heads, "made": asked.made}
    specs = [method.format(**names) for method in plan.methods]
    if missing := [spec for spec in specs if not all(file.exists() for file in _files(spec))]:
        why = "whose files are not there (zoo/smollm2.toml and zoo/qwen-coder.toml make drafters)"
        print(f"{plan.name}: without {', '.join(missing)}, {why}", flush=True)
    words = [sys.executable, "-m", "paceline", "bench", model, "--dtype", dtype]
    words += ["-n", str(plan.max_tokens or asked.max_tokens)]
    words += ["--warm-up", "1"]
    words += ["--suite", getattr(asked, plan.suite.replace("-", "_")), "--out", str(asked.out / plan.name)]
    words += ["--limit", str(min(plan.questions, asked.limit or plan.questions)), "-t", str(plan.temperature)]
    words += ["-b", str(plan.batch), *([] if plan.budget else ["--no-budget"])]
    words += [word for spec in specs if spec not in missing for word in ("-d", spec)]
    peers = [peer for peer in plan.peers if peer not in (NATIVE if not asked.llama_server else WHEEL)]
    words += [word for peer in peers for word in ("--peer", peer.format(**names, llama_server=asked.llama_server))]
    return words + (["--peer-python", asked.peer_python] if asked.peer_python else [])


def _files(spec: str) -> list[Path]:
    """The checkpoints of a drafter and the files that its options name."""
    parts = [parse(part) for part in split(spec)]
    named = [text for part in parts for text in (part.checkpoint or "", *part.options.values())]
    return [Path(text) for text in named if "/" in text and "|" not in text]


# The record ------------------------------------------------------------------------------------------------------


def collect(out: Path) -> None:
    """Write the record, of every run in `out` that has figures what the tables show, beside the runs of other levels of
    processors; and the tables into the pages. A run of a later day that has not all methods of the one before stands
    beside it, as NAME@DAY."""
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    for plan in PLANS:
        if not (out / plan.name / "summary.json").exists():
            continue
        found = read_run(out / plan.name)
        facts = found.about["environment"]
        name, methods = f"{facts['level']}/{plan.name}", {label(m.name) for m in found.methods}
        if name in record and facts["started"][:10] > record[name]["date"] and record[name]["methods"].keys() - methods:
            name += f"@{facts['started'][:10]}"
        record[name] = {
            "target": plan.target,
            "suite": plan.suite,
            "temperature": plan.temperature,
            "batch": plan.batch,
            "budget": plan.budget,
            "level": facts["level"],
            "date": facts["started"][:10],
            "commit": facts["git"].rstrip("+"),
            "setting": describe("setting", found),
            "machine": describe("machine", found),
            "complete": found.complete,
            "notes": [*found.summary.get("disturbed", ())],
            "tasks": found.tasks,
            "methods": {label(m.name): _facts(m, found.tasks) for m in found.methods},
        }
        if cards := {label(m.name): one for m in found.methods if (one := card(m.name))}:
            record[name] |= {"cards": cards, "claims": [*claimed(out / plan.name)]}
    planned = [f"{level}/{plan.name}" for level in LEVELS for plan in PLANS]
    record = {name: record[name] for name in dict.fromkeys([*planned, *record]) if name in record}
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in record.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")  # a line a run
    page, every = RECORD.with_name("README.md"), RECORD.with_name("runs.md")
    before, after = page.read_text("utf-8").split(BEGIN)[0], page.read_text("utf-8").split(END)[1]
    page.write_text("".join([before, BEGIN, *(f"{line}\n" for line in speedups(record)), END, after]), "utf-8")
    every.write_text("\n".join(full(record)) + "\n", "utf-8")
    RECORD.with_name("heads.md").write_text("\n".join(heads(record)) + "\n", "utf-8")
    print(f"{RECORD} holds {len(record)} runs")


def _facts(method: Any, tasks: Sequence[str]) -> dict[str, Any]:
    facts = {name: _rounded(method.get(name)) for name in FIGURES}
    facts["failed"] = re.sub(r"http://\S+", "its server", method.unavailable or method.failed or "") or None
    facts["by_task"] = {task: _rounded(method.get("speedup", task)) for task in tasks}
    facts["differs"] = dict(Counter(one["verdict"] for one in method.get("differs") or ()))
    return facts


def card(method: str) -> dict[str, Any] | None:
    """What training noted of a drafter with weights: the tokens it read, its minutes, its overlap at the first depth,
    and the mean accepted tokens of a chain of three that follow from its held-out figures, greedy and at temperature 1.
    These two are of the tokens over which it learnt, so not without `vocab` or a vocabulary of its own. None if a
    method's first drafter has no weights, as in sam+eagle3."""
    part = parse(split(method)[0])
    folder = Path(part.checkpoint or "")
    if part.checkpoint is None or not (folder / "config.json").exists():
        return None
    config = json.loads((folder / "config.json").read_text("utf-8"))
    depths = config.get("held_out", {}).get("all", [])[:3]
    accepted, sampled = ([depth.get(figure) for depth in depths] for figure in ("accepted", "sampled"))
    if "vocab" not in part.options and "draft_vocab_size" not in config:
        accepted = sampled = []
    return {
        "folder": folder.name,
        "fingerprint": fingerprint(load_file(folder / "model.safetensors")),
        **{figure: config.get("recipe", {}).get("spent", {}).get(figure) for figure in ("tokens", "minutes")},
        "overlap": depths[0].get("overlap") if depths else None,
        "greedy": _rounded(1 + sum(accumulate(accepted, mul))) if accepted and None not in accepted else None,
        "sampled": _rounded(1 + sum(sampled)) if sampled and None not in sampled else None,
    }


def claimed(run: Path) -> Iterator[dict[str, Any]]:
    """Of every claim of published.toml whose two methods answered in a run: the ratios of their tokens a round and of
    their speeds, each with its 95 % interval, paired by question. `worse` may have a star: the fastest such method."""
    by_method: dict[str, list[Answer]] = {}
    for answer in good(read_answers(run / ANSWERS)):
        by_method.setdefault(label(answer.method), []).append(answer)
    speeds = {method: tokens_per_second(answers) or 0.0 for method, answers in by_method.items()}
    for claim in tomllib.loads(PUBLISHED.read_text("utf-8"))["claims"]:
        others = matching(by_method.keys(), claim["worse"])
        worse = max(others, key=lambda method: speeds[method], default=None)
        if claim["better"] in by_method and worse:
            mine, other = by_method[claim["better"]], by_method[worse]
            speed, interval = speedup(mine, other), speedup_interval(mine, other)
            yield {
                "title": claim["title"],
                "worse": worse,
                "tokens": [_rounded(value) for value in tokens_ratio(mine, other)],
                "speed": [_rounded(value) for value in (speed, *(interval or (None, None)))],
            }


def tokens_ratio(mine: Sequence[Answer], other: Sequence[Answer], resamples: int = 2000) -> tuple[float, float, float]:
    """One method's tokens a round over another's, and its 95 % interval: a bootstrap over questions, paired."""
    counts = []
    for answers in (mine, other):
        of: dict[str, list[int]] = {}
        for answer in answers:
            lengths = [n for turn in answer.turns for n in turn.lengths or ()]
            tokens, rounds = of.setdefault(answer.question, [0, 0])
            of[answer.question] = [tokens + sum(lengths), rounds + len(lengths)]
        counts.append(of)
    both = np.array([[counts[0][question], counts[1][question]] for question in counts[0].keys() & counts[1].keys()])
    drawn = np.random.default_rng(0).integers(len(both), size=(resamples, len(both)))
    sums = np.concatenate([both.sum(0)[None], both[drawn].sum(1)])
    ratios = sums[:, 0, 0] / sums[:, 0, 1] / (sums[:, 1, 0] / sums[:, 1, 1])
    low, high = np.percentile(ratios[1:], [2.5, 97.5])
    return float(ratios[0]), float(low), float(high)


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def label(method: str) -> str:
    """A method's name without the files that it reads; of a text file, its name stays, and of a server's command its
    program and kind of drafts."""
    if " " in method:
        words = method.removeprefix(PEER).split()
        kind = f",spec={words[words.index('--spec-type') + 1]}" if "--spec-type" in words else ""
        return f"{PEER}{Path(words[0]).name}{kind}"
    return re.sub(r"[:=](?:[^,:=]*/[^,>|+]*|smollm2)", "", re.sub(r"=[^,]*/([^,/]*)\.txt\b", r"=\1", method))


# The tables ------------------------------------------------------------------------------------------------------


def speedups(record: dict[str, Any]) -> Iterator[str]:
    """For every level of processors and every target a table: methods over greedy suites; the speed-up, its interval,
    and tokens a round. Trained drafters have a page of their own."""
    newest = max((one["date"] for one in record.values()), default="")
    for level in dict.fromkeys(one["level"] for one in record.values()):
        of_level = [one for one in record.values() if one["level"] == level and not _trained(one)]
        if of_level:
            yield f"### {LEVELS[level]}: {of_level[0]['machine'].split(',')[0]}"
            yield ""
        for target in TARGETS:
            yield from _of_target(target, [one for one in of_level if one["target"] == target], newest)


def _trained(run: dict[str, Any]) -> bool:
    return str(run["target"]).endswith("-heads")


def _of_target(target: str, runs: Sequence[dict[str, Any]], newest: str) -> Iterator[str]:
    """The table of a target: greedy, one request at a time."""
    runs = [one for one in runs if not one["temperature"] and one["batch"] == 1]
    suites = [suite for suite in SUITES if any(one["suite"] == suite for one in runs)]
    if not suites:
        return
    of = {suite: _joined(one for one in runs if one["suite"] == suite) for suite in suites}
    methods = dict.fromkeys(method for suite in suites for method, facts in of[suite].items() if facts["answers"])
    first = of[suites[0]]
    ranked = sorted(methods, key=lambda method: -(first.get(method, {}).get("speedup") or 0))
    dates = sorted({one["date"] for one in runs})
    commits = ", ".join(sorted({one["commit"] for one in runs}))
    age = "" if newest in dates else ", **an older version, not run anew**"
    title = f"{TARGETS[target][2]}; {', '.join(dates)}, commit {commits}{age}"
    yield f"| {title} | {' | '.join(SUITES[suite] for suite in suites)} |"
    yield "|---|" + "---:|" * len(suites)
    for method in ranked:
        yield f"| {_code(method)} | {' | '.join(_speedup(of[suite].get(method)) for suite in suites)} |"
    yield ""


def _joined(runs: Iterator[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Methods of runs of one suite, each by the newest run that has it."""
    joined: dict[str, dict[str, Any]] = {}
    for one in sorted(runs, key=lambda run: run["date"]):
        joined |= one["methods"]
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
    """Every run: one line a method; and what ran on two days."""
    yield "# Every run"
    yield ""
    yield "<!-- Written by `python benchmarks/results.py full`; do not edit by hand. -->"
    yield (
        "What the columns mean: [figures](../glossary.md). [The results in short](README.md). Not all drafters that "
        "were measured ship: [which do](heads.md)."
    )
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
                yield f"| {_code(method)} | {facts['failed']} |{' |' * (len(heads) - 2)}"
                continue
            cells = [_speedup({**facts, "mean_accepted_tokens": None})]
            cells += [_number(facts[key], 2) for key in ("speedup_decode", "mean_accepted_tokens")]
            cells += [_number(facts[key], 1) for key in ("tokens_per_second", "tokens_per_second_decode")]
            cells += ["" if facts[key] is None else f"{facts[key]:.0%}" for key in ("identical", "looping")]
            cells += [_number(facts["speedup_without_loops"], 2) if facts["looping"] else ""]
            cells += [_number(facts["by_task"].get(task), 2) for task in one["tasks"]]
            yield f"| {_code(method)} | {' | '.join(cells)} |"
    if len(twice := [*again(record)]) > 2:
        yield ""
        yield "## On two days"
        yield ""
        yield from twice


def again(record: dict[str, Any]) -> Iterator[str]:
    """Methods that copy and ran on two days, with the speed-up of each."""
    yield "| run | method | first day | later day | later / first |"
    yield "|---|---|---:|---:|---:|"
    for name, later in record.items():
        first = record.get(name.partition("@")[0], later)
        for method, facts in later["methods"].items() if first is not later else ():
            one = first["methods"].get(method, {}).get("speedup")
            if one and facts["speedup"] and method in COPYING:
                ratio = f"{facts['speedup'] / one:.2f}"
                cells = [first["date"], later["date"]]
                speeds = [f"{speed:.2f} ({day})" for speed, day in zip((one, facts["speedup"]), cells, strict=True)]
                yield f"| {name.partition('@')[0]} | {_code(method)} | {' | '.join(speeds)} | {ratio} |"


# Trained drafters beside their papers ----------------------------------------------------------------------------


def heads(record: dict[str, Any]) -> Iterator[str]:
    """heads.md: trained drafters on SmolLM2, what their papers say, and whether the published order holds."""
    published = tomllib.loads(PUBLISHED.read_text("utf-8"))
    runs = {name: one for name, one in record.items() if one["target"] == TRAINED}
    dated = sorted(runs.values(), key=lambda run: run["date"])
    newest = {_place(one): one for run in dated for one in run.get("cards", {}).values()}
    yield "# Drafters trained for SmolLM2"
    yield ""
    yield "<!-- Written by `python benchmarks/results.py heads`; do not edit by hand. -->"
    if weights := sorted(f"{place} {one['fingerprint']}" for place, one in newest.items()):
        yield f"<!-- measured with {', '.join(weights)} -->"
    yield (
        "SmolLM2-135M-Instruct in bfloat16, and the drafters that were [trained](../train.md) for it. Of these "
        f"{len(SHIPPED)} ship, in `models/smollm2-*`; those in `{MADE}` do not ship any more. [Their recipe]"
        "(../../zoo/README.md#drafters-of-a-real-model) makes them, and the figures are those of the weights that were "
        "measured. In runs whose name ends in `whole` they draft as in their papers, trees of 16 nodes however little "
        "these bring; in the others as much as pays. `vocab`: over the tokens that they learnt; `eagle3` has such of "
        "its own. Tokens are those of a round, the target's own included; speed-ups are over plain decoding, prompts "
        "included. [The results in short](README.md); [every figure](runs.md), also of drafters that are gone."
    )
    if not runs:
        yield ""
        yield "None of its runs has been made yet: `python benchmarks/results.py run build/results`."
        return
    yield from _card_table(newest)
    yield from _claims(runs, published)
    for name, one in runs.items():
        if "chains" not in name:
            yield from _beside_papers(name, one, published, newest)


def _place(one: dict[str, Any]) -> str:
    """Where a drafter of the record is found; when it was measured, it may have shipped."""
    name = one["folder"].removeprefix("smollm2-")
    return f"models/smollm2-{name}" if name in SHIPPED else f"{MADE}/{name}"


def _card_table(drafters: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Every drafter's training in a line, and whether all have seen as many tokens."""
    trained = {one["tokens"] for one in drafters.values()}
    yield ""
    yield "## What they have learnt from"
    yield ""
    yield "sum min(p, q) is over held-out answers, for the first drafted token. " + (
        "All have read as many tokens." if len(trained) == 1 else "**They have not all read as many tokens.**"
    )
    yield ""
    yield "| | tokens read | minutes | sum min(p, q) |"
    yield "|---|---:|---:|---:|"
    for place, one in sorted(drafters.items()):
        tokens = "" if one["tokens"] is None else f"{one['tokens']:,}"
        yield f"| `{place}` | {tokens} | {_number(one['minutes'], 1)} | {_number(one['overlap'], 3)} |"


def _beside_papers(
    name: str, run: dict[str, Any], published: dict[str, Any], newest: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """A run's methods, the most tokens a round first. The papers' figures stand beside those of the papers' benchmark,
    Spec-Bench, greedy."""
    kept = {method: facts for method, facts in run["methods"].items() if ">" not in method}  # a>b is not made any more
    methods = {method: facts for method, facts in kept.items() if facts["mean_accepted_tokens"] is not None}
    ranked = sorted(methods, key=lambda method: -methods[method]["mean_accepted_tokens"])
    whole = run["suite"] == "spec-bench" and not run["temperature"] and not run["budget"]
    papers = published["methods"] if whole else {}
    order = sorted((m for m in ranked if "tokens" in papers.get(m, {})), key=lambda m: -papers[m]["tokens"])
    known = [method for method in ranked if method in order]
    yield ""
    yield f"## {name}"
    yield ""
    yield f"{run['setting']}; {run['machine']}.{'' if run['complete'] else ' Not complete.'}"
    yield from run["notes"]
    for place, one in {_place(one): one for one in run.get("cards", {}).values()}.items():
        if one["fingerprint"] != newest[place]["fingerprint"]:
            yield f"With an earlier `{place}`, which had read {one['tokens']:,} tokens."
    yield ""
    simulated = "simulated, a chain of 3"
    columns = ["", "tokens a round", simulated, "tokens/s", "speed-up (95 %)", "identical"]
    columns += ["place", "published: place", "tokens", "speed-up", "its authors' own"] if papers else []
    yield f"| {' | '.join(columns)} |"
    yield "|---|" + "---:|" * (len(columns) - 1)
    for method in ranked:
        facts, paper, one = methods[method], papers.get(method, {}), run.get("cards", {}).get(method, {})
        cells = [_code(method), _number(facts["mean_accepted_tokens"], 2)]
        cells += [_number(one.get("sampled" if run["temperature"] else "greedy"), 2)]
        cells += [_number(facts["tokens_per_second"], 1), _speedup({**facts, "mean_accepted_tokens": None})]
        cells += ["" if facts["identical"] is None or run["temperature"] else f"{facts['identical']:.0%}"]
        if papers:
            cells += [str(places.index(method) + 1) if method in places else "" for places in (known, order)]
            cells += [_number(paper.get(figure), 2) for figure in ("tokens", "speedup")] + [paper.get("own", "")]
        yield f"| {' | '.join(cells)} |"
    if papers:
        yield ""
        used = dict.fromkeys(papers[method]["source"] for method in ranked if "source" in papers.get(method, {}))
        for source in used:
            of = ", ".join(_code(method) for method in ranked if papers.get(method, {}).get("source") == source)
            yield f"- Published figures of {of}: {published['sources'][source]}."


def _claims(runs: dict[str, dict[str, Any]], published: dict[str, Any]) -> Iterator[str]:
    """Whether one method is ahead of another where a paper says so, in every run that asked both."""
    yield ""
    yield "## Does the published order hold?"
    yield ""
    yield (
        "How many times the tokens a round, and how many times the speed, the first method has, each with its 95 % "
        "interval, by question. It is ahead, or behind, if the interval is on one side of 1. How long each has learnt "
        "is [above](#what-they-have-learnt-from)."
    )
    yield ""
    yield "| | published | run | beside | tokens a round | ahead | speed | ahead |"
    yield "|---|---|---|---|---:|---|---:|---|"
    for claim in published["claims"]:
        said = f"{claim['published']} ({published['sources'][claim['source']].split(',')[0]})"
        for name, run in runs.items():
            for one in run.get("claims", ()):
                if one["title"] == claim["title"]:
                    cells = [_code(one["worse"])]
                    for figure in ("tokens", "speed"):
                        value, low, high = one[figure]
                        known = low is not None
                        cells += [f"{value:.2f}" + (f" ({low:.2f} to {high:.2f})" if known else "")]
                        cells += [_ahead(low, high) if known else ""]
                    both = claim["better"], one["worse"]
                    minutes = [run["cards"].get(method, {}).get("minutes") for method in both]
                    equal = None in minutes or max(minutes) < 1.5 * min(minutes)
                    title = claim["title"] if equal else f"{claim['title']}, **not trained equally long**"
                    yield f"| {title} | {said} | {name} | {' | '.join(cells)} |"
                    said = ""


def _ahead(low: float, high: float) -> str:
    """What an interval of a ratio says."""
    return "yes" if low > 1 else "**no**" if high < 1 else "no difference seen"


def gpu(out: Path) -> None:
    """Write the page of what `benchmarks/gpu.py` measured in `out`, a table for rows of one kind."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from benchmarks.gpu import tables

    rows = [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]
    cards = ", ".join(dict.fromkeys(row["card"] for row in rows if "card" in row))
    head = ["# On a GPU", "", "<!-- Written by `python benchmarks/results.py gpu OUT`; do not edit by hand. -->", ""]
    head += [f"`python benchmarks/gpu.py --out OUT` on {cards}; what a row means is said [there](../gpu.md)."]
    RECORD.with_name("gpu.md").write_text("\n".join([*head, *tables(rows)]) + "\n", "utf-8")


def _code(method: str) -> str:
    """A name in a table, whose cells a bar would end."""
    return "`" + method.replace("|", "\\|") + "`"


def _number(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"


def main(words: Sequence[str] | None = None) -> int:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("out", type=Path)
    running.add_argument("runs", nargs="*", metavar="RUN", help="names of the plan, right after OUT; none: all")
    running.add_argument("--limit", type=int, help="questions of each run, to try it out")
    running.add_argument("--max-tokens", type=int, default=128)
    running.add_argument("--qwen", default="qwen2.5-coder-1.5b-instruct-Q4_K_M.gguf")
    running.add_argument("--smollm2", default="smollm2")
    running.add_argument("--spec-bench", default="spec-bench")
    running.add_argument("--humaneval", default="humaneval")
    running.add_argument("--code-edits", default="code-edits")
    running.add_argument("--demo", default="demo")
    running.add_argument("--heads", default="models", help="folder of the drafters smollm2-* and qwen-coder-*")
    running.add_argument("--made", default=MADE, help="folder of the others of SmolLM2, which zoo/smollm2.toml makes")
    running.add_argument("--llama-server", help="llama.cpp's server, built here; none: it is left out")
    running.add_argument("--peer-python", help="as for paceline bench: vllm=PATH,xllamacpp=PATH")
    commands.add_parser("collect").add_argument("out", type=Path)
    commands.add_parser("gpu").add_argument("out", type=Path)
    for name in ("plan", "table", "full", "heads", "again"):
        commands.add_parser(name)
    asked = parser.parse_args(words)
    if asked.command == "run":
        return run(asked)
    if asked.command == "collect":
        collect(asked.out)
    elif asked.command == "gpu":
        gpu(asked.out)
    elif asked.command == "plan":
        for plan in PLANS:
            print(f"{plan.name:34} {plan.questions:4} questions, about {plan.minutes} minutes")
    else:
        record = json.loads(RECORD.read_text("utf-8"))
        print("\n".join({"table": speedups, "full": full, "heads": heads, "again": again}[asked.command](record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
