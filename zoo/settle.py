"""Settle: a last stage in which a chat model unlearns its own loops.

Now and then the model answers some training prompts, greedily and sampled. Where an answer repeats itself, the tokens
that complete an n-gram it has already said become unlikely: minus log(1 - p) is added for them, the sequence-level
unlikelihood of Welleck et al. 2020 ("Neural text generation with unlikelihood training", section 5.2). The rows of chat
tuning are trained on as well, so that the model keeps what it knows. Decoding is not touched.

Where we differ: only answers with more repeats than `tolerated` are corrected, because lists, tables and figures repeat
n-grams rightly; and the answers come from the engine, many prompts at once."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.target.decoder import Decoder
from paceline.train.data import Document, assistant
from paceline.train.loop import Batch
from paceline.train.loss import IGNORE, LmLoss, chunked_cross_entropy
from zoo.lm import Job, run_stage
from zoo.text import StageMixture, chat_rows, render
from zoo.tokenizer import DOCUMENT, token_id


@dataclass(frozen=True)
class SettleConfig:
    """How the model is caught looping."""

    every: int = 25  # steps between two rounds of answers
    prompts: int = 96  # answered a round, half of them greedily
    temperature: float = 0.7  # of the other half
    tokens: int = 128  # most tokens of an answer
    ngram: int = 4  # tokens of an n-gram whose return is a repeat
    tolerated: float = 0.25  # share of repeats an answer may have
    rows: int = 8  # rows of own answers in a batch, added to those of the mixture
    seed: int = 0


def repeats(answer: Sequence[int], ngram: int) -> np.ndarray:
    """bool [len]: whether the token completes an n-gram that the answer has already said."""
    said: set[tuple[int, ...]] = set()
    marks = np.zeros(len(answer), bool)
    for end in range(ngram, len(answer) + 1):
        gram = tuple(answer[end - ngram : end])
        marks[end - 1] = gram in said
        said.add(gram)
    return marks


def correction(
    prompt: Sequence[int], answer: Sequence[int], config: SettleConfig, length: int
) -> tuple[list[int], list[int]] | None:
    """(input ids, for each the unwanted next token or IGNORE); None for an answer with a tolerable share of repeats."""
    marks = repeats(answer, config.ngram)
    if marks.mean() <= config.tolerated:
        return None
    ids = [*prompt, *answer][-(length + 1) :]
    unwanted = [IGNORE] * len(prompt) + [t if m else IGNORE for t, m in zip(answer, marks, strict=True)]
    return ids[:-1], unwanted[-(length + 1) :][1:]


class SelfCorrection:
    """A stream: the mixture's rows, and rows of the model's own repeats, from its newest answers.

    prompts: token ids of conversations that wait for an answer, taken in a seeded random order."""

    def __init__(
        self, network: Any, mixture: StageMixture, prompts: Sequence[list[int]], config: SettleConfig, pad: int
    ) -> None:
        self.network, self.mixture, self.prompts, self.config, self.pad = network, mixture, prompts, config, pad
        self.own: list[tuple[list[int], list[int]]] = []
        self.answered = 0
        self.caught: list[float] = []  # share of answers that repeated themselves, by round

    def next(self, progress: float) -> Batch:
        """A batch of the mixture, and `rows` rows of repeats with their unwanted tokens."""
        if self.mixture.step % self.config.every == 0:
            self._answer()
        batch = self.mixture.next(progress)
        length = batch["input_ids"].shape[1]
        rng = random.Random(f"{self.config.seed}/{self.mixture.step}")
        ids = np.full((self.config.rows, length), self.pad)
        unwanted = np.full((self.config.rows, length), IGNORE)
        for row, (own, marks) in enumerate(rng.sample(self.own, min(self.config.rows, len(self.own)))):
            ids[row, : len(own)], unwanted[row, : len(marks)] = own, marks
        nothing = torch.full(batch["labels"].shape, IGNORE)
        whole = {
            "input_ids": torch.cat([batch["input_ids"], torch.from_numpy(ids)]),
            "labels": torch.cat([batch["labels"], torch.full(ids.shape, IGNORE)]),
            "unwanted": torch.cat([nothing, torch.from_numpy(unwanted)]),
        }
        # Mixed, because a loss is a mean over a micro-batch: in one of their own, a few repeats would weigh too much.
        order = rng.sample(range(len(whole["labels"])), len(whole["labels"]))
        return {key: tensor[order] for key, tensor in whole.items()}

    def _answer(self) -> None:
        """A round of answers by the model as it is now."""
        config = self.config
        self.own = []
        length = self.mixture.config.length
        chosen = [order_of(self.prompts, self.answered + i, config.seed) for i in range(config.prompts)]
        self.answered += config.prompts
        for prompt, answer in answers(self.network, chosen, config, seed=self.answered):
            if rows := correction(prompt, answer, config, length):
                self.own.append(rows)
        self.caught.append(len(self.own) / config.prompts)

    def state_dict(self) -> dict[str, Any]:
        return {"mixture": self.mixture.state_dict(), "own": self.own, "asked": self.answered, "caught": self.caught}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mixture.load_state_dict(state["mixture"])
        self.own = [(ids, marks) for ids, marks in state["own"]]
        self.answered, self.caught = state["asked"], state["caught"]


class SettleLoss(LmLoss):
    """Cross-entropy at the labelled positions, and the unlikelihood of the unwanted tokens: the mean over both.

    unwanted [B, T]: tokens that should not come next, IGNORE where there is none."""

    def forward(self, input_ids: Tensor, labels: Tensor, unwanted: Tensor | None = None) -> Tensor:
        hidden, table, compiled = self.hidden(input_ids), self.model.lm_head.weight, self.compiled and self.training
        loss = chunked_cross_entropy(hidden, table, labels, compiled=compiled)
        if unwanted is None:
            return loss
        return unlikely(loss, hidden, table, labels, unwanted)


def unlikely(loss: Tensor, hidden: Tensor, table: Tensor, labels: Tensor, unwanted: Tensor) -> Tensor:
    """The mean `loss` over the labelled positions and -log(1 - p) of the unwanted tokens, as a mean over both."""
    is_learnt, is_unwanted = labels != IGNORE, unwanted != IGNORE
    logits = (hidden[is_unwanted] @ table.T).float()
    # 1 - p is the other tokens' share. In this form the gradient does not vanish where p rounds to 1.
    others = logits.scatter(-1, unwanted[is_unwanted][:, None], -torch.inf)
    unlike = (logits.logsumexp(-1) - others.logsumexp(-1)).sum()
    return (loss * is_learnt.sum() + unlike) / (is_learnt | is_unwanted).sum().clamp_min(1)


def order_of(prompts: Sequence[list[int]], index: int, seed: int) -> list[int]:
    """The `index`-th prompt of an endless sequence that runs through all of them, shuffled anew each time."""
    epoch, place = divmod(index, len(prompts))
    return prompts[np.random.default_rng([seed, epoch]).permutation(len(prompts))[place]]


def settle(job: Job, start: Path, config: SettleConfig = SettleConfig()) -> bool:
    """Settle the model in `start`; writes `out` in bfloat16. False when interrupted."""
    network = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    pad = token_id(job.tokenizer, DOCUMENT)

    def wrap(mixture: StageMixture, training: dict[str, list[Document]]) -> SelfCorrection:
        prompts = waiting_prompts(job.tokenizer, training, job.data.length - config.tokens)
        return SelfCorrection(network, mixture, prompts, config, pad)

    build = chat_rows(job.tokenizer, job.data)
    return run_stage("settle", job, network, SettleLoss(network, job.compiled), build, torch.bfloat16, start, wrap)


def waiting_prompts(
    tokenizer: PreTrainedTokenizerFast, training: dict[str, list[Document]], longest: int
) -> list[list[int]]:
    """Token ids of the first turn of every training conversation, up to where the assistant speaks."""
    opening = [
        Document(d.source, messages=(d.messages[0], assistant("")))
        for group in training.values()
        for d in group
        if d.messages and d.messages[0]["role"] == "user"
    ]
    prompts = []
    for ids, learn in render(tokenizer, opening):
        end = learn.index(True)  # the end of the empty answer
        if end <= longest:
            prompts.append(ids[:end])
    return prompts


def answers(
    network: Any, prompts: Sequence[list[int]], config: SettleConfig, seed: int
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer) by the engine, with the network's weights as they are now."""
    ends = network.generation_config.eos_token_id
    ends = tuple(ends) if isinstance(ends, list) else (ends,)
    weights = {name: p.detach() for name, p in network.state_dict().items()}
    device = next(network.parameters()).device
    target = Decoder(network.config, weights, dtype=torch.bfloat16, device=device, eos_token_ids=ends)
    engine = Engine(target, max_batch=32, prefill_chunk=2048)
    rows = []
    for i, prompt in enumerate(prompts):
        heat = config.temperature if i % 2 else 0.0
        rows.append(engine.add(prompt, SamplingParams(max_tokens=config.tokens, temperature=heat, seed=seed + i)))
    engine.finish(rows)
    for row in rows:
        yield row.tokens[: row.prompt_length].tolist(), row.new_tokens.tolist()
