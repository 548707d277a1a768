"""Distil: train a small draft model to say what its target would say.

The draft reads the rows that the target learnt from, and at every position its distribution q is drawn towards the
target's p: KL(p || q) plus the total variation, which is the rate at which drafts are rejected (Zhou et al. 2024,
"DistillSpec: Improving speculative decoding via knowledge distillation", section 4). Both have one tokenizer, which is
what makes the draft usable at all.

Doesn't know: how drafts are verified.

    python -m paceline.train distil chat=dialogues.jsonl.gz --model models/demo --out models/demo-draft
    --checkpoints build/draft --tokens 30000000
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.errors import PacelineError
from paceline.train import attention
from paceline.train.lm import Job, ModelConfig, new_model, run_stage
from paceline.train.loop import LoopConfig
from paceline.train.loss import chunked_distillation
from paceline.train.rows import CHAT, DataConfig, chat_rows
from paceline.train.sources import Source
from paceline.train.tokenizer import DOCUMENT, token_id

DRAFT = ModelConfig(hidden=128, layers=3, heads=2, kv_heads=1, intermediate=384)
"""1.6 million parameters: an eighth of the demo target's, and three layers to its eight."""

# Conversations as the target was tuned on them, and the text behind them. Where a row is cut does not matter: p is that
# of the target on the same tokens.
DISTIL = replace(
    CHAT,
    weights={
        "sgd": 0.1, "dolly": 0.1, "reading": 0.13, "gsm8k": 0.06, "synth": 0.17,
        "text/books": 0.11, "text/docs": 0.13, "text/dolly": 0.11, "text/wikitext": 0.02, "text/gsm8k": 0.02,
        "text/sgd": 0.02, "text/synth": 0.03,
    },
    decay_weights={
        "sgd": 0.12, "dolly": 0.12, "reading": 0.15, "gsm8k": 0.07, "synth": 0.17,
        "text/books": 0.08, "text/docs": 0.11, "text/dolly": 0.09, "text/wikitext": 0.02, "text/gsm8k": 0.02,
        "text/sgd": 0.02, "text/synth": 0.03,
    },
    rows=32,
    short=256,
)  # fmt: skip


class DistilLoss(nn.Module):
    """A draft model whose forward is its distance from the target. input_ids [B, T]; the labels do not matter: p is
    known at every position, so all but padding is learnt."""

    def __init__(self, draft: Any, target: Any, pad: int, compiled: bool = False) -> None:
        super().__init__()
        self.draft = draft
        if compiled and next(draft.parameters()).device.type == "cpu":
            for model in (draft, target):
                model.set_attn_implementation(attention.register())
        self.compiled, self.pad = compiled, pad
        # Lists and functions, not modules: neither the target nor compiled copies belong among the parameters.
        self._target = [target.eval().requires_grad_(False)]
        self._run = torch.compile(self._hidden) if compiled else self._hidden

    def _hidden(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            p = self._target[0].model(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.draft.model(input_ids=input_ids, use_cache=False).last_hidden_state, p

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, target_hidden = (self._run if self.training else self._hidden)(input_ids)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        table, target_table = self.draft.lm_head.weight, self._target[0].lm_head.weight
        # Padding is a run of the end-of-document token up to the end of the row; one alone begins a document.
        behind = torch.cat([input_ids[:, 1:], torch.full_like(input_ids[:, :1], self.pad)], 1)
        padding = (input_ids == self.pad) & (behind == self.pad)
        return chunked_distillation(
            hidden, table, target_hidden, target_table, ~padding, compiled=self.compiled and self.training
        )


def distil(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerFast,
    target: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    data: DataConfig = DISTIL,
    model: ModelConfig = DRAFT,
    compiled: bool = True,
) -> bool:
    """Train a draft of shape `model` for the model in `target`; writes `out` in bfloat16. False when interrupted."""
    teacher: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    if teacher.config.vocab_size != len(tokenizer):
        raise PacelineError(
            f"the model in {target} has {teacher.config.vocab_size} tokens and its tokenizer {len(tokenizer)}: "
            "a draft model needs its target's vocabulary"
        )
    network: LlamaForCausalLM = new_model(model, tokenizer, loop.seed)
    job = Job(sources, tokenizer, out, run, loop, data)
    loss = DistilLoss(network, teacher, token_id(tokenizer, DOCUMENT), compiled)
    return run_stage("distil", job, network, loss, chat_rows(tokenizer, data), torch.bfloat16)
