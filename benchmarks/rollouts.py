"""What reusing old answers saves in rollouts, by the size of the model and the number of rows at once.

    python benchmarks/rollouts.py MODEL --prompts FILE --batch 8 --drift 0.02 -n 64

One epoch fills the store, all weights are moved by normal noise of `--drift` times their tensor's own spread, and the
next epoch is answered by each rule and drafter from the same store: processor seconds of the rollouts, verification
included, tokens decoded, and nodes run, which is what a forward costs where it computes and does not read. One thread.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from paceline import SamplingParams
from paceline.rollout import RolloutStore
from paceline.rollout.policy import Policy
from paceline.rollout.run import rollout
from paceline.target.load import load_tokenizer
from recycling import read_prompts

CASES = [
    ("vanilla", "none"),
    ("residual", "past-answer"),
    ("residual", "past-answer,first=8"),
    ("residual", "past-answer,first=8+sam,past=65536"),
]


def main() -> None:
    """Fill the store in one epoch, and answer the next one by each rule and drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--characters", type=int, default=400)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("-n", "--new", type=int, default=64)
    parser.add_argument("--drift", type=float, default=0.02)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.model)
    prompts = read_prompts(args.prompts, tokenizer, args.every, args.characters)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    ends, params = [tokenizer.eos_token_id or 0], SamplingParams(temperature=1.0, max_tokens=args.new)
    filled = RolloutStore()
    with Policy(model, "none", eos_token_ids=ends, max_batch=args.batch).engine() as engine:
        rollout(engine, prompts, filled, copies=args.copies, params=params)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += args.drift * weight.std() * torch.randn(weight.shape, generator=generator)
    print(f"{args.copies * len(prompts)} answers, {args.batch} at once, drift {args.drift:g}")
    print("| rule | drafter | tokens decoded | reuse | nodes run | processor s | over vanilla |")
    print("|---|---|---:|---:|---:|---:|---:|")
    base = 0.0
    for rule, draft in CASES:
        store = RolloutStore()
        store.load_state_dict(filled.state_dict())
        policy = Policy(model, draft, eos_token_ids=ends, max_batch=args.batch)
        with policy.engine() as engine:
            rollout(engine, prompts[:1], RolloutStore(), params=params)  # compiled and warm
            nodes = 0
            verify = engine.target.verify

            def counted(segments, *more, verify=verify):  # type: ignore[no-untyped-def]
                nonlocal nodes
                nodes += sum(segment.num_run for segment in segments)
                return verify(segments, *more)

            engine.target.verify = counted  # type: ignore[method-assign]
            of = rollout(engine, prompts, store, copies=args.copies, params=params, rule=rule, version=1).figures
        base = base or of.cpu_seconds
        print(
            f"| {rule} | {draft} | {of.decoded:,} | {of.reuse:.2f} | {nodes:,} | {of.cpu_seconds:.2f} | "
            f"{base / of.cpu_seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
