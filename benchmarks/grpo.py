"""GRPO with TRL on a real model: what each rule of reuse, and drafts from earlier answers, save in rollouts.

    python benchmarks/grpo.py smollm2 --out runs/grpo                    # three seeds of four cases; half an hour
    python benchmarks/grpo.py smollm2 --out runs/quick --cases vanilla residual --epochs 3 --seeds 1

Sums and differences; an answer that ends by itself with the right number is rewarded. Weights and
their gradients are float32 with products in bfloat16, rollouts bfloat16. Every run is saved when it has ended, and the
same command does the rest; results.json has every batch of every run. Needs `pip install '.[rl]'`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental, and says so

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from paceline.jsonl import check_folder, write_whole
from paceline.rollout import RolloutStore
from paceline.rollout.run import Figures
from paceline.rollout.trl import DRAFT, RolloutReuse
from paceline.target.folder import gguf_of, is_gguf
from paceline.target.load import load_tokenizer
from paceline.workbench.peers.setup import expanded

CASES: dict[str, tuple[str, float | None, str]] = {
    "vanilla": ("vanilla", None, "none"),
    "vanilla, sam": ("vanilla", None, "sam,past=65536"),
    "residual": ("residual", None, "past-answer,first=8"),
    "residual, whole": ("residual", None, "past-answer"),
    "residual, sam": ("residual", None, DRAFT),
    "one-hot": ("one-hot", None, "past-answer,first=8"),
    "plain e^0.5": ("plain", math.exp(0.5), "past-answer"),
}
"""Rule, lenience, drafter. `plain` with e^0.5 is the paper's own for GRPO, and not lossless."""
PROMPTS, GROUP, STEPS = 16, 4, 2
"""Prompts of an epoch, answers to each, and batches of an epoch."""
HELD_OUT = 96
NEW = 48  # most tokens of an answer
RATE = 2e-5
TASK = "Answer with one short sentence."


def problems(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Sums and differences with their results, to train on and held out. A model of 135 million parameters knows
    about half of them."""
    pairs = [(a, b, sign) for a in range(3, 16) for b in range(2, 7) for sign in (1, -1)]
    chosen = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} {'+' if sign > 0 else '-'} {b}? {TASK}"}],
            "result": a + sign * b,
        }
        for a, b, sign in random.Random(seed).sample(pairs, PROMPTS + HELD_OUT)
    ]
    return chosen[:PROMPTS], chosen[PROMPTS:]


def is_right(completions: list[Any], result: list[int], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: 1 for an answer that ended by itself and whose last number is the result."""
    rewards = []
    for completion, wanted, ids in zip(completions, result, completion_ids, strict=True):
        numbers = re.findall(r"-?\d+", completion[0]["content"].replace(",", ""))
        rewards.append(float(len(ids) < NEW and bool(numbers) and int(numbers[-1]) == wanted))
    return rewards


class Run:
    """The training of one case with one seed."""

    def __init__(self, model: Path, tokenizer: Any, case: str, seed: int, epochs: int, out: Path):
        rule, lenience, draft = CASES[case]
        self.case, self.seed, self.batches = case, seed, []  # type: ignore[var-annotated]
        self.reuse = RolloutReuse(
            RolloutStore(), rule=rule, lenience=lenience, draft=draft, seed=seed, dtype=torch.bfloat16
        )
        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=is_right,
            rollout_func=self._answers,
            train_dataset=Dataset.from_list(problems(seed)[0]),
            eval_dataset=Dataset.from_list(problems(seed)[1]),
            args=GRPOConfig(
                output_dir=str(out),
                num_train_epochs=epochs,
                per_device_train_batch_size=PROMPTS * GROUP // STEPS,
                num_generations=GROUP,
                num_generations_eval=1,
                per_device_eval_batch_size=HELD_OUT,
                max_completion_length=NEW,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                beta=0.0,
                eval_strategy="no",
                save_strategy="no",
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                bf16=True,
                seed=seed,
            ),
        )

    def _answers(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        if not trainer.model.training:
            return self.reuse(prompts, trainer)
        answers = self.reuse(prompts, trainer)
        self.batches.append(asdict(self.reuse.last) | {"decoded": self.reuse.last.decoded})
        return answers

    def record(self) -> dict[str, Any]:
        """Train; what results.json says of the run."""
        before = self.trainer.evaluate()["eval_reward"]
        self.trainer.train()
        after = self.trainer.evaluate()["eval_reward"]
        rewards = [row["reward"] for row in self.trainer.state.log_history if "reward" in row]
        return {
            "case": self.case,
            "seed": self.seed,
            "lossless": self.reuse.rule.lossless,
            "batches": [batch | {"reward": reward} for batch, reward in zip(self.batches, rewards, strict=True)],
            "held_out": [before, after],
        }


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Sums over epochs, means over seeds, as Markdown; shares are of vanilla's with the same seeds."""
    lines = [
        "| case | seeds | tokens decoded | of vanilla's | in the last epoch | reuse | reused whole | drift "
        "| reward, first and last epoch | held out | processor s | speed-up | last epoch |",
        "|---|---:|" + "---:|" * 11,
    ]
    by_case: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_case.setdefault(record["case"], []).append(record)

    def total(of: Sequence[dict[str, Any]], begin: int = 0) -> Figures:
        batches = [batch for record in of for batch in record["batches"][begin:]]
        return sum((Figures(**{k: b[k] for k in vars(Figures()) if k in b}) for b in batches), Figures())

    def ratio(a: float, b: float, comparable: bool) -> str:
        return f"{a / b:.2f}" if comparable and b else ""

    for case, of in by_case.items():
        seeds = {record["seed"] for record in of}
        base = [record for record in by_case.get("vanilla", []) if record["seed"] in seeds]
        same = len(base) == len(of)
        all_, plain, last, plain_last = total(of), total(base), total(of, -STEPS), total(base, -STEPS)
        first, final = (
            mean(batch["reward"] for record in of for batch in part(record["batches"]))
            for part in (lambda b: b[:STEPS], lambda b: b[-STEPS:])
        )
        ends = [record["held_out"][-1] for record in of]
        noise = f" ± {stdev(ends):.2f}" if len(ends) > 1 else ""
        lines.append(
            f"| {case}{'' if of[0]['lossless'] else ' (not lossless)'} | {len(of)} | {all_.decoded // len(of):,} | "
            f"{ratio(all_.decoded, plain.decoded, same)} | {ratio(last.decoded, plain_last.decoded, same)} | "
            f"{all_.reuse:.2f} | {all_.full_reuse:.2f} | {all_.mean_drift:.3f} | "
            f"{first:.2f} → {final:.2f} | {mean(ends):.2f}{noise} | "
            f"{all_.cpu_seconds / len(of):.0f} | {ratio(plain.cpu_seconds, all_.cpu_seconds, same)} | "
            f"{ratio(plain_last.cpu_seconds, last.cpu_seconds, same)} |"
        )
    return lines


def main() -> None:
    """Run every case with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--cases", nargs="+", default=["vanilla", "residual", "residual, sam", "plain e^0.5"],
                        choices=CASES, metavar="CASE", help="; ".join(CASES))  # fmt: skip
    parser.add_argument("--epochs", type=int, default=5, help=f"passes over {PROMPTS} prompts, {GROUP} answers each")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    check_folder(asked.out)
    file = asked.out / "results.json"
    records = json.loads(file.read_text("utf-8")) if file.exists() else []
    model = Path(asked.model) if not is_gguf(asked.model) else expanded(gguf_of(asked.model), torch.float32)
    tokenizer = load_tokenizer(asked.model).inner
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for seed in range(asked.seeds):
        for case in asked.cases:
            if any((record["case"], record["seed"]) == (case, seed) for record in records):
                continue
            records.append(Run(model, tokenizer, case, seed, asked.epochs, asked.out).record())
            write_whole(file, json.dumps(records, indent=1, allow_nan=False) + "\n")
            decoded = sum(batch["decoded"] for batch in records[-1]["batches"])
            print(f"seed {seed}, {case}: {decoded:,} tokens decoded", flush=True)
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
