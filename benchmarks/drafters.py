"""Every drafter against plain decoding on one model: speed-up, tokens a round and loops, by task.

For each prompt the drafters answer one after another, plain decoding among them, in an order that rotates, so that a
machine that drifts is fair to all; the best of `--repeats` times counts. Batch 1, greedy. Loops flatter every drafter:
the last column but two leaves out the answers that ran into one.

    python benchmarks/drafters.py models/demo --prompts questions.jsonl --each 8 -d sam -d recycling

A line of the prompts file has {"turns": [...]} or {"prompt"}, and a "category"; MT-bench's eight count as one.
"""

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.bench.looping import MT_BENCH, is_looping
from paceline.engine import Engine
from paceline.errors import PromptError
from paceline.sampling import SamplingParams
from paceline.target.load import load, load_tokenizer


@dataclass
class Sum:
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    nodes: int = 0


def read(path: Path, each: int) -> dict[str, list[str]]:
    tasks: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        task = "mt-bench" if row.get("category") in MT_BENCH else row.get("category", "all")
        if len(tasks[task]) < each:
            tasks[task].append(row["turns"][0] if "turns" in row else row["prompt"])
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("-d", "--draft", action="append", required=True)
    parser.add_argument("--each", type=int, default=8, help="prompts a task")
    parser.add_argument("--tokens", type=int, default=128, help="an answer; loops show in long ones only")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    # One target: engines take turns, and a row leaves nothing behind.
    target, tokenizer = load(options.model), load_tokenizer(options.model)
    specs = ["none", *options.draft]
    engines = [Engine(target, spec, tokenizer=tokenizer) for spec in specs]
    sums: dict[tuple[str, str], Sum] = defaultdict(Sum)
    loops: dict[str, list[bool]] = defaultdict(list)
    different = dict.fromkeys(specs, 0)
    turn = 0
    for task, prompts in read(options.prompts, options.each).items():
        for text in prompts:
            best: dict[str, tuple[float, list[int], int, int]] = {}
            for _ in range(options.repeats):
                turn += 1
                for i in range(len(specs)):
                    spec = specs[(i + turn) % len(specs)]
                    engine = engines[specs.index(spec)]
                    try:
                        row = engine.add([{"role": "user", "content": text}], SamplingParams(max_tokens=options.tokens))
                    except PromptError:
                        continue
                    while not row.num_new and engine.has_work:  # the prompt, the same for all
                        engine.step()
                    began, rounds = time.perf_counter(), row.stats.rounds
                    while engine.has_work:
                        engine.step()
                    seconds = time.perf_counter() - began
                    if spec not in best or seconds < best[spec][0]:
                        done = row.stats.rounds - rounds
                        best[spec] = (seconds, row.new_tokens.tolist(), done, row.stats.draft_tokens)
            if not best:
                continue
            looping = is_looping(best["none"][1])
            loops[task].append(looping)
            groups = (task, "all") if looping else (task, "all", "not looping")
            for spec, (seconds, tokens, rounds, nodes) in best.items():
                different[spec] += tokens != best["none"][1]
                for group in groups:
                    one = sums[group, spec]
                    one.seconds += seconds
                    one.tokens += len(tokens) - 1
                    one.rounds += rounds
                    one.nodes += nodes
    tasks = [*loops, "all", "not looping"]
    loops["all"] = [looping for group in list(loops.values()) for looping in group]
    loops["not looping"] = [looping for looping in loops["all"] if not looping]
    print(f"| speed-up (tokens a round) | {' | '.join(tasks)} | nodes a round | differs |")
    print("|---|" + "---:|" * (len(tasks) + 2))
    for spec in specs:
        cells = []
        for task in tasks:
            one, plain = sums[task, spec], sums[task, "none"]
            faster = (one.tokens / one.seconds) / (plain.tokens / plain.seconds)
            cells.append(f"{faster:.2f} ({one.tokens / max(one.rounds, 1):.2f})")
        whole = sums["all", spec]
        nodes = f"{whole.nodes / max(whole.rounds, 1):.1f}"
        print(f"| {spec} | {' | '.join(cells)} | {nodes} | {different[spec]} of {len(loops['all'])} |")
    print(f"| looping answers | {' | '.join(f'{sum(loops[t])} of {len(loops[t])}' for t in tasks)} | | |")


if __name__ == "__main__":
    main()
