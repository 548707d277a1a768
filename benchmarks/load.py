"""Drafters under load: tokens a second by batch size, requests always waiting, all drafters in turn.

    python benchmarks/load.py models/demo --out load.jsonl --seconds 130     # again and again, until it is done
    python benchmarks/load.py models/demo --out load.jsonl --table           # what it has so far, as a table

A piece is one repeat of one batch size: every drafter answers the same requests, in an order that changes from repeat
to repeat, and is timed until the last request has joined the batch, so that the batch is always full. Pieces are kept
in the file; the command goes on where it was stopped. Before its first piece a drafter answers two batches untimed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from paceline import Engine, SamplingParams
from paceline.bench.suites import read_suite
from paceline.target.base import Target
from paceline.target.load import load, load_tokenizer

DRAFTS = ("none", "sam", "suffix", "model:models/demo-draft", "auto")
REQUESTS = {1: 8, 2: 14, 4: 22, 8: 36, 16: 60, 32: 96}


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a Hugging Face id")
    parser.add_argument("--draft", "-d", action="append", help=f"may be repeated (default: {', '.join(DRAFTS)})")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--requests", type=int, help="of a piece, for each row of the batch (default: 3 to 8)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no piece after this time")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    drafts = options.draft or DRAFTS
    if not options.table:
        measure(options, drafts)
    print("\n".join(table(read(options.out), drafts)))


def measure(options: argparse.Namespace, drafts: Sequence[str]) -> None:
    """Make the pieces that are missing, as long as there is time."""
    began = perf_counter()
    bench = Bench(load(options.model), drafts, options)
    done = {(line["repeat"], line["batch"]) for line in read(options.out)}
    for repeat in range(options.repeats):
        for batch in options.batches:
            if (repeat, batch) in done:
                continue
            if perf_counter() - began > options.seconds:
                print("out of time; the same command goes on")
                return
            lines = bench.piece(repeat, batch)
            with options.out.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))


class Bench:
    """The engines of a run, by drafter and batch size; each keeps what its drafter has learned."""

    def __init__(self, target: Target, drafts: Sequence[str], options: argparse.Namespace):
        self.target, self.drafts, self.options = target, drafts, options
        self.target.tokenizer = self.target.tokenizer or load_tokenizer(options.model)
        self.prompts = [[{"role": "user", "content": one.turns[0]}] for one in read_suite("demo").questions]
        self.engines: dict[tuple[str, int], Engine] = {}

    def piece(self, repeat: int, batch: int) -> list[dict[str, object]]:
        """One repeat of one batch size."""
        first = repeat % len(self.drafts)
        return [self.timed(draft, repeat, batch) for draft in (*self.drafts[first:], *self.drafts[:first])]

    def timed(self, draft: str, repeat: int, batch: int) -> dict[str, object]:
        """One drafter's part of a piece."""
        engine = self.engines.get((draft, batch))
        if engine is None:
            engine = self.engines[draft, batch] = Engine(self.target, draft, max_batch=batch)
            self.answer(engine, 7, 3 * batch)
        wanted = self.options.requests
        tokens, seconds, rounds = self.answer(
            engine, repeat, batch * wanted if wanted else REQUESTS.get(batch, 5 * batch)
        )
        return {
            "draft": draft, "batch": batch, "repeat": repeat,
            "tokens": tokens, "seconds": round(seconds, 6), "rounds": rounds,
        }  # fmt: skip

    def answer(self, engine: Engine, repeat: int, count: int) -> tuple[int, float, int]:
        """Answer `count` requests until the last has joined: tokens, seconds and rounds."""
        params = SamplingParams(max_tokens=self.options.max_tokens)
        prompts = [self.prompts[(11 * repeat + i) % len(self.prompts)] for i in range(count)]
        rows = [engine.add(prompt, params) for prompt in prompts]
        began, before, tokens = perf_counter(), engine.rounds, 0
        while engine.waiting:
            tokens += sum(len(delta.tokens) for delta in engine.step())
        seconds = perf_counter() - began
        for row in rows:
            if row.finish_reason is None:
                engine.abort(row)
        return tokens, seconds, engine.rounds - before


def read(path: Path) -> list[dict[str, object]]:
    """The lines measured so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(lines: Sequence[dict[str, object]], drafts: Sequence[str]) -> list[str]:
    """Markdown: medians of tokens a second, and each `auto` over the better of plain decoding and the best of its
    fixed drafters, the median of the repeats' ratios."""
    speeds: dict[tuple[str, int], dict[int, float]] = {}
    for line in lines:
        of = speeds.setdefault((str(line["draft"]), int(line["batch"])), {})  # type: ignore[call-overload]
        of[int(line["repeat"])] = float(line["tokens"]) / float(line["seconds"])  # type: ignore[call-overload,arg-type]
    batches = sorted({batch for _, batch in speeds})
    out = ["| batch | " + " | ".join(map(str, batches)) + " |", "|---|" + "---:|" * len(batches)]
    for draft in drafts:
        cells = [f"{median(speeds[draft, b].values()):.0f}" if (draft, b) in speeds else "-" for b in batches]
        out.append(f"| `{draft}` | {' | '.join(cells)} |")
    for draft in (draft for draft in drafts if draft.startswith("auto")):
        cells = [ratio(speeds, draft, [d for d in drafts if not d.startswith("auto")], batch) for batch in batches]
        out.append(f"| `{draft}` over the best | {' | '.join(cells)} |")
    return out


def ratio(speeds: dict[tuple[str, int], dict[int, float]], auto: str, fixed: Sequence[str], batch: int) -> str:
    """A cell: the median of its ratios to the fixed drafter that has the best median."""
    there = [draft for draft in fixed if (draft, batch) in speeds]
    if not there or (auto, batch) not in speeds:
        return "-"
    best = max(there, key=lambda draft: median(speeds[draft, batch].values()))
    ratios = [speed / speeds[best, batch][repeat] for repeat, speed in speeds[auto, batch].items()]
    return f"{median(ratios):.2f}"


if __name__ == "__main__":
    main()
