"""Distil: train the family's small draft model to say what its target would say.

The draft reads the rows that the target learnt from; the loss is that of `paceline.train.draft`. Both have one
tokenizer, which is what makes the draft usable at all.

Doesn't know: how drafts are verified.

    python -m zoo distil chat=dialogues.jsonl.gz --model models/demo --out models/demo-draft
    --checkpoints build/draft --tokens 30000000
"""

from pathlib import Path

import torch

from paceline.errors import PacelineError
from paceline.train.draft import DistilLoss
from paceline.train.trainer import open_teacher
from paceline.workbench.llama import DRAFT, ModelConfig
from zoo.lm import Job, new_model, run_stage
from zoo.text import chat_rows
from zoo.tokenizer import DOCUMENT, token_id


def distil(job: Job, target: Path, model: ModelConfig = DRAFT) -> bool:
    """Train a draft of shape `model` for the model in `target`; writes `out` in bfloat16. False when interrupted."""
    teacher = open_teacher(target)
    if teacher.config.vocab_size != len(job.tokenizer):
        raise PacelineError(
            f"the model in {target} has {teacher.config.vocab_size} tokens and its tokenizer {len(job.tokenizer)}: "
            "a draft model needs its target's vocabulary"
        )
    network = new_model(model, job.tokenizer, job.loop.seed)
    loss = DistilLoss(network, teacher, token_id(job.tokenizer, DOCUMENT), job.compiled)
    return run_stage("distil", job, network, loss, chat_rows(job.tokenizer, job.data), torch.bfloat16)
