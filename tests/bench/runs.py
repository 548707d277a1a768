"""Folders of benchmarks that nobody ran: every figure is made up, the files are as `paceline bench` writes them."""

import json

from paceline.bench.record import Answer
from paceline.net.completion import Completion

TASKS = ("mt-bench", "translation", "summarization", "qa", "math_reasoning", "rag")
METHODS = {"none": 1.0, "sam": 1.9, "recycling,tree=16": 2.2, "peer:transformers-lookup": 1.4}
"""Methods with their overall speed-ups."""
WHY = "vLLM is not installed in /opt/python; pip install vllm"


def make_run(folder, methods=METHODS, *, failed=None, not_installed=None, tasks=TASKS, text="A cat sat on the mat.",
             complete=True, change=lambda about, summary: None):  # fmt: skip
    """A run's folder. change: called with run.json and summary.json before they are written."""
    failed, not_installed = failed or {}, not_installed or {}
    folder.mkdir(parents=True, exist_ok=True)
    names = [*methods, *not_installed]
    about = {
        "kind": "bench",
        "paceline": "0.1.0",
        "identity": {
            "model": "models/demo",
            "suite": {"name": "demo", "source": "shipped", "fingerprint": "0123456789abcdef", "questions": 48},
            "options": {"max_tokens": 128, "temperature": 0.0, "batch": 1, "repeats": 3, "warm_up": 3, "seed": 0},
        },
        "model_name": "demo",
        "left_out": [{"question": "demo-7", "why": "its prompt has 1,100 tokens"}],
        "environment": {
            "python": "3.11.9", "torch": "2.13.0", "cpu": "Some Xeon", "level": "amx", "threads": 2,
            "memory_bytes": 24_000_000_000, "gpu": None, "dtype": "bfloat16", "git": "0123abcd",
            "started": "2026-11-27T10:00:00+00:00", "command": "paceline bench models/demo -d sam -d recycling,tree=16",
        },
        "methods": [
            {"method": name, "settings": {"engine": "some 1.0", "draft": {"n": 3}}, "draft_bytes": 0,
             "target_bytes": 31_000_000, "lossless": True, "unavailable": not_installed.get(name)}
            for name in names
        ],
    }  # fmt: skip
    results = [
        figures(name, category, gain * (1 + 0.1 * i), failed.get(name))
        for name, gain in methods.items()
        for i, category in enumerate(["overall", *tasks])
    ]
    results += [{"method": name, "category": "overall", "answers": 0, "failed": why, "speedup": None}
                for name, why in not_installed.items()]  # fmt: skip
    summary = {"complete": complete, "results": results}
    change(about, summary)
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [
        json.dumps(answer(name, task, f"{task}-{n}", f"{text} {task} {n}, {name}.").row(), ensure_ascii=False) + "\n"
        for task in tasks
        for n in range(2)
        for name in methods
    ]
    (folder / "answers.jsonl").write_text("".join(lines), "utf-8")
    return folder


def figures(method, category, gain, failed):
    """Every figure of a method and task, in proportion to its speed-up."""
    plain, tells = method == "none", not method.startswith("peer:vllm")
    lengths = [0, 60] if plain else [0, 40, 10, 6, 3, 2, 1, 1, *[0] * 9, 1, 2]
    return {
        "method": method, "category": category, "answers": 144, "compared": 144, "failed": failed,
        "speedup": gain, "speedup_low": gain * 0.96, "speedup_high": gain * 1.05, "speedup_decode": gain * 1.1,
        "speedup_spec_bench": gain * 0.98, "tokens_per_second": 480 * gain, "tokens_per_second_spec_bench": 470 * gain,
        "mean_accepted_tokens": gain * 1.2, "block_efficiency": gain * 1.25, "round_cost": 1.1, "mbsu": gain * 1.25,
        "accepted_by_depth": None if plain or not tells else [min(gain / n, 1.0) for n in (3, 4, 5, 7, 8, 6)],
        "drafted_per_round": 0.0 if plain else 9.5, "draft_share": 0.0 if plain else 0.043,
        "parts_ms": {"draft": 0.05 * gain, "forward": 1.6 + gain, "accept": 0.1, "bookkeeping": 0.2} if tells else None,
        "lengths": lengths if tells else None, "rounds": sum(lengths), "new_tokens": 9000, "seconds": 18.5 / gain,
        "peak_bytes": 812_000_000, "first_token_ms": 11.5, "inter_token_ms_p50": 2.1, "inter_token_ms_p99": 4.8,
        "identical": 1.0, "looping": 0.0625, "too_short": 0.0, "speedup_without_loops": gain * 0.9, "differs": [],
    }  # fmt: skip


def answer(method, task, question, text):
    """An answer of two rounds: the target's first tokens, then a draft that was accepted and one more token."""
    words = text.split(" ")
    own, drafted, last = " ".join(words[:2]), " " + " ".join(words[2:-1]), " " + words[-1]
    count = len(words) - 3
    who = "" if method == "none" else method
    runs = [] if method.startswith("peer:") else [("", own, 2), (who, drafted, count), ("", last, 1)]
    turn = Completion(
        text, tokens=list(range(len(words))), usage={"prompt_tokens": 20}, seconds=0.1, lengths=[2, count + 1],
        times=[0.05, 0.1], runs=runs, finish_reason="stop",
    )  # fmt: skip
    return Answer(method, 0, question, task, task, 0, [turn])
