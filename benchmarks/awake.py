"""What a round takes at the beginning of an answer, and later in it: while the cores are busy, after they slept, and
after `wake`, which `paceline bench` calls before every answer.

    python benchmarks/awake.py models/demo
    python benchmarks/awake.py models/demo --peer-python build/vllm/bin/python      # vLLM's rounds as well
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from statistics import median

from paceline.bench.ours import Ours
from paceline.target.load import load, load_tokenizer
from paceline.workbench.contestant import Ask, Contestant
from paceline.workbench.peers import create_peer

SLEEP = WAKE = 0.2
TOKENS = 129
PART = 16
"""Rounds to a column."""
PROMPT = [*range(100, 140)]


def main() -> None:
    """Start the engines and print a line for each, and for each way of waiting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer-python")
    parser.add_argument("--answers", type=int, default=12)
    options = parser.parse_args()
    target, tokenizer = load(options.model), load_tokenizer(options.model)
    contestants: list[Contestant] = [Ours("none", target, tokenizer, batch=1)]
    if options.peer_python:
        peer = create_peer(
            "vllm",
            options.model,
            dtype="bfloat16",
            threads=None,
            python=options.peer_python,
            batch=1,
            max_context=target.max_context,
            decode=tokenizer.decode,
        )
        contestants.append(peer)
    print(f"milliseconds of a round, medians of {options.answers} answers, by {PART} rounds")
    for contestant in contestants:
        contestant.open()
        try:
            for _ in range(3):
                contestant.answer([PROMPT], Ask(TOKENS))
            for sleep, wake in ((0.0, 0.0), (SLEEP, 0.0), (SLEEP, WAKE)):
                show(contestant, sleep, wake, options.answers)
        finally:
            contestant.close()


def show(contestant: Contestant, sleep: float, wake: float, answers: int) -> None:
    """A line: the rounds of answers behind so many seconds of sleep, and of being woken."""
    parts: dict[int, list[float]] = {}
    for _ in range(answers):
        time.sleep(sleep)
        if wake:
            contestant.wake(wake)
        [turn] = contestant.answer([PROMPT], Ask(TOKENS))
        times = turn.times or []
        for i, (before, after) in enumerate(pairwise(times)):
            parts.setdefault(i // PART, []).append(1e3 * (after - before))
    columns = " ".join(f"{median(part):6.2f}" for part in parts.values())
    print(f"{contestant.name:10} {sleep:.1f} s asleep, {wake:.1f} s woken: {columns}", flush=True)


if __name__ == "__main__":
    main()
