"""Tokens a second of a fresh process, pass by pass, with forwards padded to sizes that have kernels, and not padded.

    python benchmarks/padded_size.py models/demo --prompts questions.jsonl -d sam -d recycling
    python benchmarks/padded_size.py models/demo --prompts questions.jsonl -d sam -d recycling --exact

A line of the prompts file is one of Spec-Bench's, {"turns": [...]}, of which the first is asked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.target.decoder import Decoder

EVERY, LETTERS, TOKENS, PASSES = 24, 1500, 128, 3
"""Every 24th question is taken, cut to LETTERS characters; TOKENS per answer; PASSES over all of them."""


def main() -> None:
    """Print each drafter's tokens a second, pass by pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("-d", "--draft", action="append", required=True)
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    if options.exact:
        Decoder._padding = lambda *_: 0  # type: ignore[method-assign]
    engine = Engine(options.model, reuse=False)
    lines = options.prompts.read_text().splitlines()[::EVERY]
    prompts = [[{"role": "user", "content": json.loads(line)["turns"][0][:LETTERS]}] for line in lines]
    for draft in options.draft:
        drafted = Engine(engine.target, draft, tokenizer=engine.tokenizer, reuse=False)
        speeds = []
        for _ in range(PASSES):
            began = perf_counter()
            answers = [drafted.generate([prompt], SamplingParams(max_tokens=TOKENS))[0] for prompt in prompts]
            speeds.append(sum(len(answer.tokens) for answer in answers) / (perf_counter() - began))
        print(draft, " ".join(f"{speed:.0f}" for speed in speeds), "tokens/s", flush=True)


if __name__ == "__main__":
    main()
