"""Drafting beside the target: how often the next window is there, and what it saves.

    python benchmarks/mirror.py hits MODEL DRAFT --prompts FILE        # hit rate by source and candidates, in line
    python benchmarks/mirror.py time MODEL DRAFT --prompts FILE        # in turn: alone, plain speculation, mirror

`time` runs plain decoding and plain speculation with two threads, plain speculation with one, and mirror with one for
each side, in turn; and from the parts of a round, measured over the same prompts, it says beforehand what the latency
model expects (`LatencyModel` of benchmarks/latency.py). Prompts as in benchmarks/recycling.py; greedy.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from latency import LatencyModel
from paceline import Engine, SamplingParams
from paceline.draft.models.draft_worker import DraftWorker
from paceline.target.load import load, load_tokenizer
from recycling import read_prompts


def hits(model: str, draft: str, prompts: list[list[int]], new: int, layers: list[int]) -> None:
    """One line a source and candidates."""
    print("| source | candidates | hit rate | after 0 | after some | tokens a round |")
    print("|---|---:|---:|---:|---:|---:|")
    sources = [("draft", "source=draft"), *((f"layer {n}", f"source=early_exit,layer={n}") for n in layers)]
    sources.append(("both", f"source=both,layer={layers[-1]}"))
    for name, source in sources:
        for candidates in (1, 2, 4, 8):
            spec = f"mirror:{draft},where=line,candidates={candidates},{source}"
            engine = Engine(model, spec, dtype="float32", max_batch=8)
            done = engine.generate(prompts, SamplingParams(max_tokens=new))
            counts: Any = engine.drafter.counts  # type: ignore[attr-defined]
            first = counts.hits[0] / max(counts.hits[0] + counts.misses[0], 1)
            rest = sum(counts.hits.values()) - counts.hits[0], sum(counts.misses.values()) - counts.misses[0]
            mean = sum(one.new_tokens for one in done) / sum(one.rounds for one in done)
            later = rest[0] / max(sum(rest), 1)
            rates = f"{counts.hit_rate:.2f} | {first:.2f} | {later:.2f}"
            print(f"| {name} | {candidates} | {rates} | {mean:.2f} |", flush=True)


def measured(model: str, draft: str, prompts: list[list[int]], new: int) -> LatencyModel:
    """The terms of the latency model here: in line first, on the threads that mirror leaves to the target, then with
    the draft in a process of its own."""
    cores = torch.get_num_threads()

    def run(options: str, threads: int) -> tuple[float, Any, float]:
        """Median seconds of the target's part of a round, the drafter, and seconds of a message to its process."""
        engine = Engine(model, f"mirror:{draft},{options}", threads=threads, max_batch=1)
        mirror: Any = engine.drafter
        trips = [0.0]
        if isinstance(mirror.side, DraftWorker):
            trips = [seconds_of(lambda: mirror.side.windows([])) for _ in range(20)]
        times = []
        for prompt in prompts:
            row = engine.add(prompt, SamplingParams(max_tokens=new))
            while row.finish_reason is None:
                before, drafts = forward(engine), row.num_new > 1
                engine.step()
                times += [forward(engine) - before] if drafts else []
        mirror.close()
        return median(times), mirror, median(trips)

    alone, mirror, _ = run("where=line", max(cores - 1, 1))
    counts = mirror.counts
    latency = LatencyModel(0.0, alone, median(counts.ahead), median(counts.fresh), counts.hit_rate)
    both, _, trip = run("where=process", max(cores - 1, 1))
    together = 1 + max(0.0, both - alone) / min(latency.after, latency.ahead)
    return replace(latency, together=together, rendezvous=trip)


def forward(engine: Engine) -> float:
    """Seconds of the target so far, by the engine's clock."""
    return sum(engine.clock.seconds.get(part, 0.0) for part in ("prepare", "layers", "head", "accept"))


def seconds_of(act: Any) -> float:
    began = perf_counter()
    act()
    return perf_counter() - began


def timed(model: str, draft: str, prompts: list[list[int]], new: int, ahead: str, repeats: int) -> None:
    """What the latency model expects, and a line a contestant."""
    expected = measured(model, f"{draft},{ahead}", prompts, new)
    print(
        f"expected: forward {1e3 * expected.after:.1f} ms, branches {1e3 * expected.ahead:.1f}, a window "
        f"{1e3 * expected.fresh:.1f}, hit rate {expected.hit:.2f}, both at once take {expected.together:.2f} times as "
        f"long: a round {1e3 * expected.round:.1f} ms against {1e3 * expected.plain_round:.1f}, {expected.speedup:.2f} "
        "times plain speculation's speed with one thread"
    )
    plain = f"model:{draft},stop=fixed"
    contestants = {
        "none, 2 threads": Engine(model, "none", threads=2),
        "model, 2 threads": Engine(model, plain, threads=2),
        "model, 1 thread": Engine(model, plain, threads=1),
        f"mirror, {ahead}, 1 + 1": Engine(model, f"mirror:{draft},{ahead}"),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for prompt in prompts:
            for name, engine in contestants.items():
                began = perf_counter()
                (done,) = engine.generate([prompt], SamplingParams(max_tokens=new))
                speeds[name].append((perf_counter() - began) / done.new_tokens)
    base = median(speeds["model, 2 threads"])
    print("| | tokens/s, median | over model, 2 threads |")
    print("|---|---:|---:|")
    for name, seconds in speeds.items():
        print(f"| {name} | {1 / median(seconds):.1f} | {base / median(seconds):.2f} |")
    counts: Any = contestants[f"mirror, {ahead}, 1 + 1"].drafter.counts  # type: ignore[attr-defined]
    waited = f"waited {counts.waited:.2f} s for windows, of it {counts.exposed:.2f} s in misses"
    print(f"hit rate {counts.hit_rate:.2f}; {waited}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["hits", "time"])
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--every", type=int, default=16)
    parser.add_argument("--characters", type=int, default=1500)
    parser.add_argument("-n", "--new", type=int, default=48)
    parser.add_argument("--candidates", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, load_tokenizer(args.model), args.every, args.characters)
    if args.what == "hits":
        layers = load(args.model).num_layers
        hits(args.model, args.draft, prompts, args.new, [layers // 2, layers - 2])
    else:
        timed(args.model, args.draft, prompts, args.new, f"candidates={args.candidates}", args.repeats)


if __name__ == "__main__":
    main()
