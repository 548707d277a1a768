"""GRPO with TRL, where every epoch reuses the last one's answers: a tiny model learns to write digits, on a processor.

    python examples/grpo_trl.py --out runs/digits
    accelerate launch --multi_gpu --num_processes 2 examples/grpo_trl.py --out runs/digits     # without a GPU too

Needs `pip install '.[rl]'`. Prints one line of JSON for each batch of rollouts.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental, and says so

from datasets import Dataset
from rollout_rules import ALPHABET, SPECIAL, policy
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from paceline.rollout import RolloutStore
from paceline.rollout.trl import RolloutReuse


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character of the other example's task."""
    ids = {symbol: i for i, symbol in enumerate([*SPECIAL, *ALPHABET])}
    characters = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left"
    )


def share_of_digits(completions: list[str], **_: object) -> list[float]:
    """The reward: how much of an answer is digits."""
    return [sum(c.isdigit() for c in text) / max(len(text.replace(" ", "")), 1) for text in completions]


def main() -> None:
    """Train, and print what was reused."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, required=True, help="folder of the answers and the checkpoints")
    options.add_argument(
        "--rule", default="residual", help="residual, one-hot, coupled, vanilla, or plain, not lossless"
    )
    options.add_argument("--lenience", type=float, help="of plain")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--in-memory", action="store_true", help="no file for the answers; processes exchange them")
    options = options.parse_args()

    reuse = RolloutReuse(
        RolloutStore(None if options.in_memory else options.out / "answers.rollouts"),
        rule=options.rule,
        lenience=options.lenience,
    )

    def noting(prompts, trainer):
        answers = reuse(prompts, trainer)
        if trainer.model.training:
            figures = reuse.last
            line = {"epoch": round(trainer.state.epoch or 0, 2), "process": trainer.accelerator.process_index}
            line |= {"answers": figures.answers, "decoded": figures.decoded, "reused": figures.reused}
            # In one piece: several processes write to one stream.
            print(json.dumps(line | {"reuse": round(figures.reuse, 3)}) + "\n", end="", flush=True)
        return answers

    trainer = GRPOTrainer(
        model=policy(0),
        processing_class=tokenizer(),
        reward_funcs=share_of_digits,
        rollout_func=noting,
        train_dataset=Dataset.from_list([{"prompt": f"{a}+{b}?"} for a, b in ((1, 2), (3, 4), (5, 6), (7, 8))]),
        eval_dataset=Dataset.from_list([{"prompt": "1+2?"}]),
        args=GRPOConfig(
            output_dir=str(options.out),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            learning_rate=1e-3,
            eval_strategy="epoch",
            per_device_eval_batch_size=4,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            seed=1,
        ),
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        print(json.dumps({"rewards": rewards, "kept": len(reuse.store)}))


if __name__ == "__main__":
    main()
