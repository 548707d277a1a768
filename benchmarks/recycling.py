"""Drafters that learn from the target's own logits: what they gain on a model, what they cost, which shapes pay.

    python benchmarks/recycling.py accept MODEL --prompts FILE recycling sam+recycling ngram-pool
    python benchmarks/recycling.py shapes MODEL --prompts FILE      # shapes of 8, 16 and 32 nodes by what is accepted
    python benchmarks/recycling.py time                             # microseconds of a draft and of an update
    python benchmarks/recycling.py topk                             # and of the 8 best of 81 nodes' logits

A prompts file is JSON Lines with "prompt", "messages" or "turns" (Spec-Bench's question.jsonl: the first turn is
asked); --every N takes each Nth line, --characters cuts long texts. Greedy, batch 1 unless --batch says otherwise.
Answers that run into a loop are the easiest to draft, so what the others alone give has a column of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import Engine, SamplingParams
from paceline.bench.record import is_looping
from paceline.core.logits import top_tokens
from paceline.core.request import Completion
from paceline.core.round import Round
from paceline.core.tree import DraftTree, depths
from paceline.draft.methods.recycling import TREES, Recycling, RecyclingConfig, _grow, _update
from paceline.draft.shapes import RankPath, compile_template
from paceline.target.base import Target
from paceline.target.load import load, load_tokenizer
from paceline.target.tokenizer import Tokenizer


def read_prompts(file: str, tokenizer: Tokenizer, every: int, characters: int) -> list[list[int]]:
    """Token ids of each `every`th line of `file`, as chats."""
    lines = [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()][::every]
    chats = [line.get("messages") or [{"role": "user", "content": first_turn(line)}] for line in lines]
    return [tokenizer.encode_chat([{**m, "content": m["content"][:characters]} for m in chat]) for chat in chats]


def first_turn(line: dict[str, Any]) -> str:
    """What a line without messages asks."""
    return str(line["turns"][0] if "turns" in line else line["prompt"])


def accept(
    target: Target, tokenizer: Tokenizer, prompts: list[list[int]], specs: list[str], new: int, batch: int
) -> None:
    """One line a drafter, all over the same prompts, each from a cold start."""
    print("| | mean accepted | not looping | nodes a round | positions a token |")
    print("|---|---:|---:|---:|---:|")
    for spec in specs:
        engine = Engine(target, spec, tokenizer=tokenizer, max_batch=batch, reuse=False)
        done = engine.generate(prompts, SamplingParams(max_tokens=new))
        calm = [one for one in done if not is_looping(one.tokens)]
        rounds, tokens = sum(one.rounds for one in done), sum(one.new_tokens for one in done)
        nodes = sum(one.stats.draft_tokens for one in done)
        print(
            f"| {spec} | {mean_accepted(done):.3f} | {mean_accepted(calm):.3f} | {nodes / rounds:.1f} "
            f"| {(nodes + rounds) / tokens:.1f} |",
            flush=True,
        )
    print(f"{len(done)} answers, {tokens} tokens; {len(done) - len(calm)} answers loop")


def mean_accepted(done: Sequence[Completion]) -> float:
    return sum(one.new_tokens for one in done) / max(sum(one.rounds for one in done), 1)


class Counting(Recycling):
    """Counts, for every rank path, the rounds in which the target's own tokens took it."""

    def __init__(self, config: RecyclingConfig):
        super().__init__(config)
        self.taken: Counter[RankPath] = Counter()

    def observe(self, round: Round) -> None:
        for tree, done in zip(round.trees, round.accepted, strict=True):
            token, path = int(tree.tokens[0]), ()
            for decided in done.tokens if len(tree) > 1 else []:
                ranks = np.flatnonzero(self.matrix[token] == decided)
                if not len(ranks):
                    break
                token, path = decided, (*path, int(ranks[0]))
                self.taken[path] += 1
        super().observe(round)


def shapes(target: Target, tokenizer: Tokenizer, prompts: list[list[int]], new: int) -> None:
    """Of the paper's paths those taken most often, for every budget. A path is never taken more often than its
    beginning, so they are a tree, and no other part of the paper's would have had more accepted in these rounds."""
    counting = Counting(RecyclingConfig())
    engine = Engine(target, counting, tokenizer=tokenizer, max_batch=1, reuse=False)
    rounds = calm = 0
    for prompt in prompts:
        before = counting.taken.copy()
        (done,) = engine.generate([prompt], SamplingParams(max_tokens=new))
        if is_looping(done.tokens):
            counting.taken = before
        else:
            rounds, calm = rounds + done.rounds, calm + 1
    print(f"{rounds} rounds of the {calm} of {len(prompts)} answers that do not loop")
    ordered = sorted(paths_of(80), key=lambda path: (-counting.taken[path], len(path), path))
    for budget in (8, 16, 32, 60):
        chosen = sorted(ordered[:budget], key=lambda path: (len(path), path))
        taken = sum(counting.taken[path] for path in chosen)
        print(f"{budget}: {taken / rounds:.3f} accepted a round:", *("".join(map(str, path)) for path in chosen))
    for size in TREES:
        print(f"built in, {size}: {sum(counting.taken[path] for path in paths_of(size)) / rounds:.3f} accepted a round")


def paths_of(size: int) -> list[RankPath]:
    """The paths of a built-in shape."""
    return [tuple(map(int, word)) for word in TREES[size].split()]


def microseconds(function: Callable[[Any], object], given: Any, rounds: int = 300) -> float:
    """Median of `rounds` calls with `given`, after a tenth as many to warm up."""
    seconds = []
    for turn in range(rounds + rounds // 10):
        begin = time.perf_counter()
        function(given)
        if turn >= rounds // 10:
            seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def timings() -> None:
    """A draft and an update of every shape: every row of the matrix set, 32,000 tokens, k = 8."""
    random = np.random.default_rng(0)
    matrix = random.integers(0, 32_000, (32_000, 8)).astype(np.int32)
    print("| nodes | draft µs | with its depths, as a DraftTree µs | update µs |\n|---|---:|---:|---:|")
    for size in TREES:
        parent, rank, *_ = compile_template(paths_of(size), 8)
        given = matrix, 5, parent, rank, size + 1, np.empty(0, np.int64)
        tokens, above = _grow(*given)
        verified = tokens, depths(above), np.array([0, 1]), random.integers(0, 32_000, (size + 1, 8))
        times = (
            microseconds(lambda given: _grow(*given), given),
            microseconds(lambda given: DraftTree(*_grow(*given)).depth, given),
            microseconds(lambda verified: _update(matrix, *map(np.array, verified[:3]), verified[3]), verified),
        )
        print(f"| {size} | {' | '.join(f'{each:.1f}' for each in times)} |")


def topk_timings() -> None:
    """The 8 best of 81 rows of random logits, by torch and by us."""
    print("| logits | torch µs | compiled µs |\n|---|---:|---:|")
    for dtype in (torch.bfloat16, torch.float32):
        for size in (8192, 32_000, 128_256):
            logits = torch.randn(81, size).to(dtype)
            times = [microseconds(lambda x, find=find: find(x, 8), logits, 30) for find in (torch.topk, top_tokens)]
            print(f"| {size:,} {str(dtype).removeprefix('torch.')} | {' | '.join(f'{each:,.0f}' for each in times)} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accept", "shapes", "time", "topk"])
    parser.add_argument("model", nargs="?", default="models/demo")
    parser.add_argument("drafters", nargs="*", default=["recycling"])
    parser.add_argument("--prompts", default="src/paceline/cli/demo-prompts-tiny.jsonl")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--characters", type=int, default=1500, help="of a text, at most (default 1500)")
    parser.add_argument("--max-tokens", type=int, default=96, help="new tokens, at most (default 96)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, default=1, help="answers at a time (default 1); for accept")
    given = parser.parse_args()
    if given.what in ("time", "topk"):
        timings() if given.what == "time" else topk_timings()
        return
    target, tokenizer = load(given.model, dtype=given.dtype), load_tokenizer(given.model)
    prompts = read_prompts(given.prompts, tokenizer, given.every, given.characters)
    if given.what == "shapes":
        shapes(target, tokenizer, prompts, given.max_tokens)
    else:
        accept(target, tokenizer, prompts, given.drafters, given.max_tokens, given.batch)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
