"""What draft heads weigh and cost: parameters, milliseconds of a draft and of a round, and the tree that pays.

    python benchmarks/heads.py models/demo medusa:models/demo-medusa eagle:models/demo-eagle,tree=16

Greedy answers to a few prompts, one at a time. A draft's time is all that the drafter does in a round: reading new
states, guessing, learning what became of it. `auto` is the number of nodes that tree=auto takes here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from paceline import Engine, SamplingParams
from paceline.draft.models.fixed_tree import FixedTree
from paceline.draft.registry import create
from paceline.target.base import Target
from paceline.target.load import load, load_tokenizer


def parameters(drafter: object) -> int:
    """Numbers in a head's own file of weights; 0 for a drafter without one."""
    checkpoint = getattr(getattr(drafter, "config", None), "checkpoint", None)
    if checkpoint is None:
        return 0
    return sum(tensor.numel() for tensor in load_file(Path(checkpoint) / "model.safetensors").values())


def measure(target: Target, tokenizer: Any, spec: str, prompts: list[Any], new: int) -> str:
    """One row of the table."""
    engine = Engine(target, spec, tokenizer=tokenizer, max_batch=1)
    engine.generate(prompts[:1], SamplingParams(max_tokens=8))  # kernels are compiled
    engine.reset_profile()
    done = engine.generate(prompts, SamplingParams(max_tokens=new))
    profile, rounds = engine.profile, sum(one.rounds for one in done)
    draft = sum(profile.parts.get(part, 0.0) for part in ("draft", "observe"))
    forward = sum(profile.parts.get(part, 0.0) for part in ("prepare", "layers", "head"))
    accepted = sum(one.new_tokens for one in done) / rounds
    size = parameters(engine.drafter)
    auto = "-"
    if isinstance(engine.drafter, FixedTree):
        other = create(f"{spec.split(',')[0]},tree=auto")
        other.bind(target)
        assert isinstance(other, FixedTree)
        auto = str(len(other.template.parent) - 1)
    ms = 1000 / rounds
    return f"| {spec} | {size / 1e6:.2f} M | {draft * ms:.2f} | {forward * ms:.2f} | {accepted:.3f} | {auto} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--prompts", default="src/paceline/cli/demo-prompts-tiny.jsonl")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    target, tokenizer = load(given.model, dtype=given.dtype), load_tokenizer(given.model)
    lines = [json.loads(line) for line in Path(given.prompts).read_text("utf-8").splitlines() if line.strip()]
    prompts = [line.get("messages") or [{"role": "user", "content": line["prompt"]}] for line in lines]
    print("| | parameters | ms a draft | ms a forward | tokens a round | auto |")
    print("|---|---:|---:|---:|---:|---:|")
    for spec in ["none", *given.drafters]:
        print(measure(target, tokenizer, spec, prompts, given.max_tokens), flush=True)


if __name__ == "__main__":
    main()
