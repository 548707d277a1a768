"""A draft model for any target: a small Llama with the target's tokenizer, distilled on the target's own answers.

At every token the draft's distribution q is drawn towards the target's p: KL(p || q) plus the total variation, which is
the rate at which drafts are rejected (Zhou et al. 2024, "DistillSpec: Improving speculative decoding via knowledge
distillation", section 4). The text is what the target wrote itself (`generated.py`). At the end the draft is measured
on held-out answers.

Doesn't know: how drafts are verified.

    paceline train draft models/demo --data answers.jsonl --out build/draft
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from paceline import __version__
from paceline.errors import PacelineError
from paceline.jsonl import loads, write_whole
from paceline.train import options
from paceline.train.agreement import agreement, lines, logits_of
from paceline.train.attention import use_blocks
from paceline.train.drafter import Lesson, LessonConfig, pad_token
from paceline.workbench.llama import DRAFT, ModelConfig, new_llama, save_llama
from paceline.train.loss import autocast_dtype, chunked_distillation
from paceline.train.plan import LoopConfig

PASSES = 20
"""Over the answers, where no budget is given: it begins with random weights."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig(LessonConfig):
    """What a draft looks like and what a batch is made of."""

    model: ModelConfig = DRAFT
    rows: int = 32


class DistilLoss(nn.Module):
    """A draft model whose forward is its distance from the target. input_ids [B, T]; the labels do not matter: p is
    known at every position, so all but padding is learnt."""

    def __init__(self, draft: Any, target: Any, pad: int, compiled: bool = False) -> None:
        super().__init__()
        self.draft = draft
        if compiled:
            use_blocks(draft, target)
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
        hidden = hidden.to(autocast_dtype(hidden))
        table, target_table = self.draft.lm_head.weight, self._target[0].lm_head.weight
        # Padding is a run of the pad token up to the end of the row; one alone may begin a document.
        following = torch.cat([input_ids[:, 1:], torch.full_like(input_ids[:, :1], self.pad)], 1)
        padding = (input_ids == self.pad) & (following == self.pad)
        return chunked_distillation(
            hidden, table, target_hidden, target_table, ~padding, compiled=self.compiled and self.training
        )


def train_draft(
    target: Path,
    answers: Path,
    out: Path,
    run: Path,
    loop: LoopConfig,
    config: DraftConfig = DraftConfig(),
    compiled: bool = True,
) -> bool:
    """Train a draft for the model in `target` on `answers` (a file of `generated_rows`); writes `out` in bfloat16, a
    model folder for `model:PATH`. False when interrupted; the same call goes on."""
    lesson = Lesson.open(target, answers, config)
    facts = lesson.teacher.config
    shape = replace(config.model, positions=min(config.model.positions, facts.max_position_embeddings))
    network: Any = new_llama(
        shape, loop.seed, vocab_size=facts.vocab_size, bos_token_id=facts.bos_token_id,
        eos_token_id=facts.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    loss = DistilLoss(network, lesson.teacher, pad_token(lesson.tokenizer), compiled)
    if not lesson.train(loss, loop, run):
        return False
    if lesson.first:
        teacher, held = lesson.teacher.cpu(), lesson.held
        fits = agreement(logits_of(teacher), logits_of(network.cpu().eval()), held) if held else []
        save_llama(network, out, torch.bfloat16)
        lesson.tokenizer.inner.save_pretrained(out)
        settings = loads((out / "config.json").read_bytes())
        settings |= {"paceline": __version__, "target": asdict(lesson.target_facts())}
        settings |= lesson.facts("draft", loop, acceptance=[asdict(fit) for fit in fits])
        write_whole(out / "config.json", json.dumps(settings, indent=2) + "\n")
        lesson.report(lines(fits) if fits else [], out)
    return True


@options.with_options
def command(
    setup: options.DrafterOptions,
    lr: options.Rate = 2e-3,
    layers: Annotated[int, typer.Option(help="Layers of the draft model.", min=1)] = 3,
    hidden: Annotated[int, typer.Option(help="Its width, a multiple of 64.", min=64)] = 128,
    rows: options.BatchRows = 32,
    compiled: options.Compiled = True,
) -> bool:
    """Train a draft model on the target's own answers, recorded or generated, for `--draft model:OUT`.

    paceline train draft models/demo --prompts mine=prompts.jsonl --generate 5000 --out build/draft

    The answers are kept in CHECKPOINTS/answers.jsonl. Ctrl-C saves; the same command goes on from there. At the end the
    draft is measured on held-out answers: how often would its tokens be accepted?
    """
    if hidden % 64:
        raise PacelineError(f"--hidden is {hidden}; heads are 64 wide, so it is a multiple of 64")
    shape = ModelConfig(hidden=hidden, layers=layers, heads=hidden // 64, kv_heads=1, intermediate=3 * hidden)
    run, answers = setup.prepare()
    loop = setup.loop(answers, PASSES, peak_lr=lr)
    config = DraftConfig(model=shape, length=setup.length, rows=rows)
    return train_draft(setup.target, answers, setup.out, run, loop, config, compiled)
