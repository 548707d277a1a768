"""The demo's training: a supervised start, then GRPO with rollouts by one rule. Both continue after a stop.

The start is a small Llama (1.05 million parameters) that learns to write worked answers until some of them are right;
350 steps take about two minutes on two cores. All rules of a seed share it.

Group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300): each prompt gets a group of
answers; an answer's advantage is (its reward - the group's mean) / the group's standard deviation. There is one update
a batch, so the ratio of the policies is 1 and nothing is clipped. There is no KL term.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.jsonl import replacing
from paceline.rollout.demo.task import BOS, EOS, MAX_NEW, PAD, VOCAB_SIZE, Problem, encode, problems
from paceline.rollout.policy import Policy
from paceline.rollout.run import Figures, Rollout, rollout
from paceline.rollout.store import RolloutStore
from paceline.workbench.llama import ModelConfig, new_llama

PROMPTS, GROUP, STEPS = 64, 8, 4
"""Prompts of an epoch, answers to each, and batches of an epoch."""
RATE = 1e-4
HELD_OUT, TEST_EVERY = 512, 4
"""Problems kept out of training, and epochs between two measurements of accuracy on them."""
SAMPLING = SamplingParams(temperature=1.0, max_tokens=MAX_NEW)
SHAPE = ModelConfig(hidden=128, layers=4, heads=4, kv_heads=4, intermediate=512, positions=64)
START_STEPS, START_BATCH, START_RATE, WARM_UP = 350, 128, 1e-3, 50
SAVE_EVERY = 50
"""Steps between two checkpoints: about half a minute's work."""


def policy(seed: int) -> LlamaForCausalLM:
    """The model with random weights."""
    return new_llama(SHAPE, seed, vocab_size=VOCAB_SIZE, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)


def supervised(
    task: str, seed: int, steps: int, folder: Path, progress: Callable[[int, int], None]
) -> LlamaForCausalLM:
    """The trained start of `seed`. Reads it from `folder` if it is there, and continues training that was stopped.

    progress: called with the steps done and all steps."""
    model, file = policy(seed), folder / f"start-{task}-{seed}-{steps}.pt"
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
        loss = _loss(model, task, random.Random(seed * 1_000_003 + step))
        _descend(model, optimiser, loss)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            save(file, {"step": step + 1, "model": model.state_dict(), "optimiser": optimiser.state_dict()})
        progress(step + 1, steps)
    return model.eval()


def save(file: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    with replacing(file) as part:
        torch.save(state, part)


def _loss(model: LlamaForCausalLM, task: str, rng: random.Random) -> torch.Tensor:
    """Cross entropy of worked answers; questions do not count."""
    batch = problems(task, START_BATCH, rng)
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
    """A run of the demo. rule: a name of `paceline.rollout.rules.RULES`, or plain:LOG_LENIENCE."""

    task: str
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
        self._file = folder / f"{plan.task}-{plan.rule.replace(':', '-')}-{plan.seed}.pt"
        rng = random.Random(1000 + plan.seed)
        self.train = problems(plan.task, PROMPTS, rng)
        self.held_out = problems(plan.task, HELD_OUT, rng, frozenset(p.question for p in self.train))
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

    def epoch(self, progress: Callable[[], None]) -> dict[str, Any]:
        """One pass over the prompts in random order; returns its record. `progress` is called after each batch."""
        number = len(self.rows) + 1
        order = self.train.copy()
        random.Random(self.plan.seed * 1009 + number).shuffle(order)
        figures = Figures()
        rewards: list[float] = []
        for begin in range(0, PROMPTS, PROMPTS // STEPS):
            of_step, got = self._step(order[begin : begin + PROMPTS // STEPS], number)
            figures, rewards = figures + of_step, rewards + got
            progress()
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
