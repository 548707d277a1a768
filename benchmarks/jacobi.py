"""How often the candidates of each slot are right while jacobi decodes, and the tree that follows from it.

    python benchmarks/jacobi.py MODEL --prompts FILE --every 12 --drafter jacobi,retrieve=none

Writes slots.json to --out, for `jacobi:FOLDER,tree=N`; `paceline train jacobi` writes one beside a model.
Prompts as in benchmarks/recycling.py. Greedy, batch 1. Rows that no slot has filled do not count.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from paceline import Engine, SamplingParams
from paceline.bench.record import is_looping
from paceline.core.round import Round
from paceline.draft.methods.jacobi import Jacobi
from paceline.draft.registry import create
from paceline.draft.shapes import SLOTS_FILE, best_paths
from paceline.target.load import load, load_tokenizer
from recycling import read_prompts


def main() -> None:
    """Decode the prompts, count which candidates were right, and write the tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True, help="a prompts file")
    parser.add_argument("--every", type=int, default=1, help="take each Nth line of it")
    parser.add_argument("--characters", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--drafter", default="jacobi,retrieve=none", help="jacobi and its options")
    parser.add_argument("--out", type=Path, help="folder for slots.json")
    given = parser.parse_args()
    target, tokenizer = load(given.model), load_tokenizer(given.model)
    drafter = create(given.drafter)
    assert isinstance(drafter, Jacobi)
    tables: list[tuple[int, list[list[int]]]] = []
    observe = drafter.observe

    def watch(round: Round) -> None:
        observe(round)
        if not round.is_prompt(0):
            tables.append((len(round.rows[0]), drafter._tables[round.rows[0].id]))

    drafter.observe = watch  # type: ignore[method-assign]
    engine = Engine(target, drafter, tokenizer=tokenizer, max_batch=1, reuse=False)
    right, seen = np.zeros((drafter.depth, drafter.config.candidates)), np.zeros(drafter.depth)
    for prompt in read_prompts(given.prompts, tokenizer, given.every, given.characters):
        tables.clear()
        (done,) = engine.generate([prompt], SamplingParams(max_tokens=given.max_tokens))
        text = [*prompt, *done.tokens]
        for length, table in [] if is_looping(done.tokens) else tables:
            for slot, candidates in enumerate(table):
                if length + slot < len(text):
                    seen[slot] += 1
                    right[slot, : len(candidates)] += np.array(candidates) == text[length + slot]
    shares = right / np.maximum(seen, 1)[:, None]
    print("| slot | filled | right | among the candidates | by rank |\n|---|---:|---:|---:|---|")
    for slot, row in enumerate(shares):
        ranks = " ".join(f"{share:.3f}" for share in row)
        print(f"| {slot + 1} | {seen[slot]:.0f} | {row[0]:.1%} | {row.sum():.1%} | {ranks} |")
    accuracies = [row.tolist() for row in shares.round(4)]
    for count in (8, 16, 32):
        print(f"{count} nodes:", *("".join(map(str, path)) for path in best_paths(accuracies, count)))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / SLOTS_FILE).write_text(json.dumps({"accuracies": accuracies}))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
