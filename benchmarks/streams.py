"""Several tokens a draft forward: how many they are, and what becomes of them.

    python benchmarks/streams.py MODEL DRAFT... --prompts FILE        # drafts as `model:` takes them

For each draft: drafted tokens a forward of the draft model, tokens a round, the share of drafted tokens accepted, and
processor time of a drafted token. One thread, float32, prompts as in benchmarks/recycling.py.
"""

from __future__ import annotations

import argparse
from time import process_time
from typing import Any

from paceline import Engine, SamplingParams
from paceline.target.load import load_tokenizer
from recycling import read_prompts


class Counted(Engine):
    """An engine that counts its drafter's forwards, and the time it spends drafting."""

    def __init__(self, model: str, draft: str):
        super().__init__(model, draft, dtype="float32", threads=1, max_batch=1)
        self.calls, self.drafting = 0, 0.0
        drafter: Any = self.drafter
        run, propose = drafter.run_nodes, drafter.propose

        def counted(*args: Any) -> Any:
            self.calls += 1
            return run(*args)

        def timed(*args: Any) -> Any:
            began = process_time()
            try:
                return propose(*args)
            finally:
                self.drafting += process_time() - began

        drafter.run_nodes, drafter.propose = counted, timed


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafts", nargs="+")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--every", type=int, default=24)
    parser.add_argument("--characters", type=int, default=1500)
    parser.add_argument("-n", "--new", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, load_tokenizer(args.model), args.every, args.characters)
    params = SamplingParams(max_tokens=args.new, temperature=args.temperature, seed=0)
    print(f"{len(prompts)} prompts, {args.new} tokens, temperature {args.temperature:g}")
    print("| draft | tokens a draft forward | drafted a round | tokens a round | accepted | us a drafted token |")
    print("|---|---:|---:|---:|---:|---:|")
    for draft in args.drafts:
        engine = Counted(args.model, f"model:{draft}")
        done = engine.generate(prompts, params)
        rounds, new = sum(one.rounds for one in done), sum(one.new_tokens for one in done)
        drafted = sum(one.stats.draft_tokens for one in done)
        accepted = sum(n * count for one in done for n, count in enumerate(one.stats.accepted))
        print(
            f"| {draft} | {drafted / engine.calls:.2f} | {drafted / rounds:.2f} | {new / rounds:.3f} | "
            f"{accepted / drafted:.2f} | {1e6 * engine.drafting / drafted:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
