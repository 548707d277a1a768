"""What each rule of reuse saves and costs on a task that a program checks: running totals, learnt with GRPO.

It runs on a processor, and needs the engine, packages/rl and packages/train.

    python examples/rollout_rules.py --out runs/rollout
    python examples/rollout_rules.py --rules vanilla,residual --epochs 6 --seeds 1 --out runs/quick

3+5+2+7+1+4?  ->  8,10,17,18,22;22     running totals, then the result, which is checked

The start is a small Llama (1.05 million parameters) that learns to write worked answers until some of them are right;
350 steps take about two minutes on two cores. All rules of a seed share it. Then group-relative policy optimisation
(Shao et al. 2024, arXiv 2402.03300): each prompt gets a group of answers; an answer's advantage is (its reward - the
group's mean) / the group's standard deviation. There is one update a batch, so the ratio of the policies is 1 and
nothing is clipped. There is no KL term.

Every epoch is saved, so the same command goes on with a run that was stopped. Prints a table; OUT/results.json has
every epoch of every run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from transformers import LlamaForCausalLM

from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.outputs import check_folder, replacing, write_whole
from paceline.rollout.policy import Policy
from paceline.rollout.rules import rule_of
from paceline.rollout.run import Figures, Rollout, rollout
from paceline.rollout.store import RolloutStore
from paceline.train.llama import ModelConfig, new_llama

SPECIAL = ("<pad>", "<s>", "</s>")
PAD, BOS, EOS = range(len(SPECIAL))
ALPHABET = "0123456789+?,;"
VOCAB_SIZE = len(SPECIAL) + len(ALPHABET)
MAX_NEW = 30
"""Most tokens of an answer; worked answers have up to 26."""
PROMPTS, GROUP, STEPS = 64, 8, 4
"""Prompts of an epoch, answers to each, and batches of an epoch."""
RATE = 1e-4
HELD_OUT, TEST_EVERY = 512, 4
"""Problems kept out of training, and epochs between two measurements of accuracy on them."""
SAMPLING = SamplingParams(temperature=1.0, max_tokens=MAX_NEW)
SHAPE = ModelConfig(hidden=128, layers=4, heads=4, kv_heads=4, intermediate=512, positions=64)
START_STEPS, START_BATCH, START_RATE, WARM_UP = 350, 128, 1e-3, 50
SAVE_EVERY = 50
"""Steps of the start between two checkpoints: about half a minute's work."""


# The task -------------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A question and its worked answer. The part after the semicolon is checked."""

    question: str
    worked: str

    @property
    def prompt(self) -> list[int]:
        """The question's token ids."""
        return [BOS, *encode(self.question)]

    def reward(self, tokens: list[int]) -> float:
        """1 for an answer that ended by itself and has the right result, else 0; the steps are not checked."""
        if not tokens or tokens[-1] != EOS:
            return 0.0
        text = "".join(ALPHABET[token - len(SPECIAL)] for token in tokens if token >= len(SPECIAL))
        return float(text.rpartition(";")[2] == self.worked.rpartition(";")[2])


def encode(text: str) -> list[int]:
    """Token ids of a text, one for each character."""
    return [len(SPECIAL) + ALPHABET.index(character) for character in text]


def problems(count: int, rng: random.Random, without: frozenset[str] = frozenset()) -> list[Problem]:
    """`count` different problems of six terms of one digit, none of whose questions is among `without`."""
    chosen: dict[str, Problem] = {}
    while len(chosen) < count:
        terms = [rng.randint(1, 9) for _ in range(6)]
        totals = [sum(terms[: n + 1]) for n in range(1, 6)]
        question = "+".join(map(str, terms)) + "?"
        if question not in without:
            chosen.setdefault(question, Problem(question, ",".join(map(str, totals)) + f";{totals[-1]}"))
    return list(chosen.values())


# Training -------------------------------------------------------------------------------------------------------------


def policy(seed: int) -> LlamaForCausalLM:
    """The model with random weights."""
    return new_llama(SHAPE, seed, vocab_size=VOCAB_SIZE, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)


def supervised(seed: int, steps: int, folder: Path) -> LlamaForCausalLM:
    """The trained start of `seed`. Reads it from `folder` if it is there, and continues training that was stopped."""
    model, file = policy(seed), folder / f"start-{seed}-{steps}.pt"
    optimiser = torch.optim.AdamW(model.parameters(), START_RATE, weight_decay=0.01)
    done = 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        done = int(state["step"])
    for step in range(done, steps):
        for group in optimiser.param_groups:
            group["lr"] = START_RATE * min(1.0, (step + 1) / WARM_UP)
        loss = _loss(model, random.Random(seed * 1_000_003 + step))
        _descend(model, optimiser, loss)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            save(file, {"step": step + 1, "model": model.state_dict(), "optimiser": optimiser.state_dict()})
    return model.eval()


def save(file: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    with replacing(file) as part:
        torch.save(state, part)


def _loss(model: LlamaForCausalLM, rng: random.Random) -> torch.Tensor:
    """Cross entropy of worked answers; questions do not count."""
    batch = problems(START_BATCH, rng)
    texts = [(len(p.prompt), [*p.prompt, *encode(p.worked), EOS]) for p in batch]
    width = max(len(text) for _, text in texts)
    ids = torch.tensor([[*text, *[PAD] * (width - len(text))] for _, text in texts])
    labels = torch.tensor([[-100] * n + text[n:] + [-100] * (width - len(text)) for n, text in texts])
    loss: torch.Tensor = model.train()(ids, attention_mask=(ids != PAD).long(), labels=labels).loss
    return loss


def _descend(model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One step down the gradient."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()


@dataclass(frozen=True)
class Plan:
    """A run. rule: a name of `paceline.rollout.rules.RULES`, or plain:LOG_LENIENCE."""

    rule: str
    seed: int
    epochs: int
    draft: str

    @property
    def rule_name(self) -> str:
        """The rule without its lenience."""
        return self.rule.partition(":")[0]

    @property
    def lenience(self) -> float | None:
        """e to the number after the colon; None without a colon. PacelineError if it is not a number."""
        name, colon, log_lenience = self.rule.partition(":")
        if not colon:
            return None
        try:
            return math.exp(float(log_lenience))
        except (ValueError, OverflowError):
            raise PacelineError(f"{self.rule}: {log_lenience!r} is not a number; write {name}:0.5 for e^0.5.") from None


class Run:
    """The training of one plan; `rows` has a record of each finished epoch."""

    def __init__(self, plan: Plan, start: LlamaForCausalLM, folder: Path):
        self.plan = plan
        self.rows: list[dict[str, Any]] = []
        self.store = RolloutStore()
        self._file = folder / f"{plan.rule.replace(':', '-')}-{plan.seed}.pt"
        rng = random.Random(1000 + plan.seed)
        self.train = problems(PROMPTS, rng)
        self.held_out = problems(HELD_OUT, rng, frozenset(p.question for p in self.train))
        self.model = policy(plan.seed)
        self.model.load_state_dict(start.state_dict())
        self.optimiser = torch.optim.AdamW(self.model.parameters(), RATE, weight_decay=0.0)
        draft = "none" if plan.rule == "vanilla" else plan.draft
        self.policy = Policy(self.model, draft, eos_token_ids=(EOS,), max_batch=PROMPTS * GROUP // STEPS)
        if self._file.exists():
            self._restore()

    @property
    def is_done(self) -> bool:
        """Whether every epoch is there."""
        return len(self.rows) >= self.plan.epochs

    def epoch(self) -> dict[str, Any]:
        """One pass over the prompts in random order; returns its record."""
        number = len(self.rows) + 1
        order = self.train.copy()
        random.Random(self.plan.seed * 1009 + number).shuffle(order)
        figures = Figures()
        rewards: list[float] = []
        for begin in range(0, PROMPTS, PROMPTS // STEPS):
            of_step, got = self._step(order[begin : begin + PROMPTS // STEPS], number)
            figures, rewards = figures + of_step, rewards + got
        row = asdict(figures) | {"epoch": number, "reward": sum(rewards) / len(rewards), "decoded": figures.decoded}
        if number % TEST_EVERY == 0 or number == self.plan.epochs:
            row["accuracy"] = self._accuracy(number)
        self.rows.append(row)
        self._save()
        return row

    def _step(self, batch: list[Problem], epoch: int) -> tuple[Figures, list[float]]:
        """One batch: rollouts, rewards, an update."""
        with self.policy.engine() as engine:
            rollouts = rollout(
                engine,
                [p.prompt for p in batch],
                self.store,
                copies=GROUP,
                params=SAMPLING,
                rule=self.plan.rule_name,
                lenience=self.plan.lenience,
                version=epoch,
                seed=self.plan.seed,
            )
        rewards = [batch[i // GROUP].reward(answer.tokens) for i, answer in enumerate(rollouts.answers)]
        update(self.model, self.optimiser, rollouts.answers, advantages(rewards))
        return rollouts.figures, rewards

    def _accuracy(self, epoch: int) -> float:
        """Share of the held-out problems that one sampled answer solves. All rules get the same noise."""
        with self.policy.engine() as engine:
            asked = [p.prompt for p in self.held_out]
            rollouts = rollout(engine, asked, RolloutStore(), params=SAMPLING, rule="vanilla", seed=epoch)
        right = [p.reward(answer.tokens) for p, answer in zip(self.held_out, rollouts.answers, strict=True)]
        return sum(right) / len(right)

    def _save(self) -> None:
        parts = {"model": self.model, "optimiser": self.optimiser, "store": self.store}
        states = {name: part.state_dict() for name, part in parts.items()}  # type: ignore[attr-defined]
        save(self._file, {**states, "rows": self.rows})

    def _restore(self) -> None:
        state = torch.load(self._file, weights_only=True)
        self.rows = state["rows"]
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.store.load_state_dict(state["store"])


def advantages(rewards: list[float]) -> torch.Tensor:
    """Rewards, float [B], group by group, centred and scaled in each group."""
    groups = torch.tensor(rewards).view(-1, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def update(
    model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, answers: list[Rollout], advantage: torch.Tensor
) -> None:
    """One step along the policy gradient; every token of the batch has the same weight."""
    texts = [[*answer.prompt, *answer.tokens] for answer in answers]
    width = max(map(len, texts))
    ids = torch.tensor([text + [PAD] * (width - len(text)) for text in texts])
    is_answer = torch.tensor(
        [[0] * len(a.prompt) + [1] * len(a.tokens) + [0] * (width - len(a.prompt) - len(a.tokens)) for a in answers]
    )[:, 1:]
    logits = model.train()(ids).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    loss = -(logprobs * advantage[:, None] * is_answer).sum() / is_answer.sum()
    _descend(model, optimiser, loss)


# All runs -------------------------------------------------------------------------------------------------------------


def run(plans: Sequence[Plan], start_steps: int, folder: Path) -> list[dict[str, Any]]:
    """Do all that is not done yet; returns a record for every epoch of every run."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for plan in plans:
        start = supervised(plan.seed, start_steps, folder)
        torch.manual_seed(plan.seed)
        going = Run(plan, start, folder)
        while not going.is_done:
            row = going.epoch()
            print(f"{plan.rule}, seed {plan.seed}, epoch {row['epoch']}: reward {row['reward']:.3f}", flush=True)
        rows += [{"rule": plan.rule, "seed": plan.seed, **row} for row in going.rows[: plan.epochs]]
    return rows


def results(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record for each rule, over its seeds: sums over all epochs, and means over seeds."""
    of_rule: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_rule.setdefault(row["rule"], []).append(row)
    return [_result(rule, of) for rule, of in of_rule.items()]


def _result(rule: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    last = list({row["seed"]: row for row in sorted(rows, key=itemgetter("epoch"))}.values())  # of each seed
    each = (Figures(**{name: row[name] for name in vars(Figures()) if name in row}) for row in rows)
    seeds, figures = len(last), sum(each, Figures())
    made = rule_of(rule.partition(":")[0], lenience=Plan(rule, 0, 0, "").lenience)
    return {
        "rule": rule,
        "name": made.name,
        "lossless": made.lossless,
        "seeds": seeds,
        "epochs": max(row["epoch"] for row in rows),
        "rollouts": figures.answers,
        "tokens": round(figures.tokens / seeds),
        "tokens_decoded": round(figures.decoded / seeds),
        "reuse": round(figures.reuse, 4),
        "full_reuse": round(figures.full_reuse, 4),
        "drift": round(figures.mean_drift, 4),
        "final_reward": round(mean(row["reward"] for row in last), 4),
        "final_accuracy": round(mean(row["accuracy"] for row in last), 4),
        "accuracy_noise": round(stdev(row["accuracy"] for row in last), 4) if seeds > 1 else None,
        "seconds": round(figures.seconds / seeds, 2),
        "cpu_seconds": round(figures.cpu_seconds / seeds, 2),
    }


def main() -> None:
    """Train with each rule, and print what reuse saved and what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rules", default="vanilla,residual,one-hot,plain:0,plain:0.5,plain:1",
                        help="vanilla, residual, one-hot, coupled, plain:LOG_LENIENCE; joined by commas")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=24, help="passes over the 64 prompts, 8 answers to each")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each rule, each from a start of its own")
    parser.add_argument("--start-steps", type=int, default=START_STEPS)
    parser.add_argument("--draft", default="past-answer,first=8", help="what proposes old answers")
    asked = parser.parse_args()
    rules = [rule.strip() for rule in asked.rules.split(",")]
    plans = [Plan(rule, seed, asked.epochs, asked.draft) for seed in range(asked.seeds) for rule in rules]
    try:
        check_folder(asked.out)
        for plan in plans[: len(rules)]:
            rule_of(plan.rule_name, lenience=plan.lenience)
    except PacelineError as error:
        parser.error(str(error))
    rows = run(plans, asked.start_steps, asked.out)
    whole = {"results": results(rows), "epochs": rows}
    write_whole(asked.out / "results.json", json.dumps(whole, indent=1, allow_nan=False) + "\n")
    columns = ("tokens_decoded", "reuse", "full_reuse", "drift", "final_accuracy", "accuracy_noise", "cpu_seconds")
    print("| rule |", " | ".join(columns), "|")
    print("|---|" + "---:|" * len(columns))
    for of in whole["results"]:
        print(f"| {of['name']} |", " | ".join(str(of[name]) for name in columns), "|")


if __name__ == "__main__":
    main()
