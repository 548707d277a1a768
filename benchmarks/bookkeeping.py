"""What a round costs outside the model with many rows, by part; and what the memory's bookkeeping costs of it.

python benchmarks/bookkeeping.py models/demo --rows 32 -d none -d sam
"""

from __future__ import annotations

import argparse
from time import perf_counter

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine

MODEL = ("prepare", "layers", "head")
TEXT = "Tell me about the number {}, about mills, about the sea, and then tell me about all of them once more."


def main() -> None:
    """Print a table for each drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-d", "--draft", action="append", required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    first = Engine(options.model)
    for draft in options.draft:
        engine = Engine(first.target, draft, tokenizer=first.tokenizer, max_batch=options.rows, reuse=True)
        spent = 0.0

        def timed(call):  # type: ignore[no-untyped-def]
            def run(*given):  # type: ignore[no-untyped-def]
                nonlocal spent
                began = perf_counter()
                result = call(*given)
                spent += perf_counter() - began
                return result

            return run

        prompts = [[{"role": "user", "content": TEXT.format(n)}] for n in range(options.rows)]
        wish = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
        engine.generate(prompts, SamplingParams(max_tokens=8))
        rows = [engine.add(prompt, wish) for prompt in prompts]
        while any(row.num_new == 0 for row in rows):
            engine.step()
        engine.reset_profile()
        engine.memory.preempt, engine.memory.ready = timed(engine.memory.preempt), timed(engine.memory.ready)
        while len(engine.rows) == options.rows:
            engine.step()
        profile = engine.profile
        print(f"\n{draft}: {options.rows} rows, {profile.rounds} rounds")
        for part, ms, share in profile.table():
            print(f"  {part:10} {ms:8.3f} ms {100 * share:6.2f} %")
        outside = 1 - profile.share(*MODEL) - profile.share("top_k")
        print(f"  outside the model {100 * outside:.2f} %; of that memory {100 * spent / profile.seconds:.3f} %")


if __name__ == "__main__":
    main()
