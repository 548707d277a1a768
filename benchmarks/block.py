"""Block verification beside one token after the other, for a drafter that draws.

    python benchmarks/block.py MODEL DRAFT --prompts FILE        # a drafter such as model:PATH,draft=5,stop=fixed

Every prompt is answered by both rules in turn, with several seeds. For each temperature: tokens a round of both, the
difference with its 95 % interval over prompts, and tokens a second of one over the other.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np

from paceline import Engine, SamplingParams
from paceline.core.accept import LOSSLESS, TOKENWISE
from recycling import read_prompts


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--every", type=int, default=24)
    parser.add_argument("--characters", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("-n", "--new", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0])
    args = parser.parse_args()
    engine = Engine(args.model, args.draft, max_batch=1, reuse=False)
    prompts = read_prompts(args.prompts, engine.tokenizer, args.every, args.characters)
    print(f"{args.draft}: {len(prompts)} prompts x {args.seeds} seeds, {args.new} tokens")
    print("| temperature | token after token | block | more tokens a round | tokens/s, block over token |")
    print("|---:|---:|---:|---:|---:|")
    for temperature in args.temperatures:
        tokens, rounds, seconds = (np.zeros((len(prompts), 2)) for _ in range(3))
        for i, prompt in enumerate(prompts):
            for seed in range(args.seeds):
                for which in ((0, 1), (1, 0))[seed % 2]:
                    params = SamplingParams(temperature=temperature, max_tokens=args.new, seed=seed)
                    began = perf_counter()
                    with engine.using(rule=(TOKENWISE, LOSSLESS)[which]):
                        [answer] = engine.generate([prompt], params)
                    seconds[i, which] += perf_counter() - began
                    tokens[i, which] += answer.new_tokens
                    rounds[i, which] += answer.rounds
        rate = tokens.sum(0) / rounds.sum(0)
        draws = np.random.default_rng(0).integers(len(prompts), size=(2000, len(prompts)))
        some = tokens[draws].sum(1) / rounds[draws].sum(1)
        low, high = np.quantile(some[:, 1] / some[:, 0] - 1, [0.025, 0.975])
        speed = tokens.sum(0) / seconds.sum(0)
        more = f"{rate[1] / rate[0] - 1:+.1%} ({low:+.1%} to {high:+.1%})"
        print(f"| {temperature:g} | {rate[0]:.3f} | {rate[1]:.3f} | {more} | {speed[1] / speed[0]:.3f} |")


if __name__ == "__main__":
    main()
